# SPDX-License-Identifier: Apache-2.0
"""A count of changes that coroutines can wait on without missing one."""

import asyncio


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
