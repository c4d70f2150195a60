# SPDX-License-Identifier: Apache-2.0
"""A count of changes that coroutines can wait on without missing one."""

import asyncio
from typing import Final

PACE_SECONDS: Final = 0.25
"""The least time between two looks at everything. Many containers start together, and each start is several changes."""


class Changes:
    """Counts changes. A reader that keeps the last count it saw misses no later change."""

    def __init__(self) -> None:
        self.count = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Count one change and wake all waiters; on the event loop only."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def after(self, count: int, timeout_seconds: float | None = None) -> int:
        """Return the count once it differs from ``count``, or the same count when the time is up."""
        if self.count == count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=timeout_seconds)
            finally:
                self._waiters.discard(waiter)
        return self.count

    async def paced_after(self, count: int, timeout_seconds: float | None = None) -> int:
        """Act as ``after``, but wait for ``PACE_SECONDS`` first.

        For loops with a look at everything: they see the first change at once, and many changes that follow it in one look.
        """
        await asyncio.sleep(PACE_SECONDS)
        return await self.after(count, timeout_seconds)

    async def follow(self, source: "Changes") -> None:
        """Count the changes of another object here too, until cancelled: those before as one, and many that come together as few."""
        seen = source.count
        while True:
            self.notify()
            await asyncio.sleep(PACE_SECONDS)
            seen = await source.after(seen)
