"""A count of changes that coroutines can wait on without missing one."""

import asyncio


class Changes:
    """Counts. Whoever remembers the count it has seen learns of every later change, however many came in between."""

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
        """Return the count once it differs from ``count``, or as it is when the time is up."""
        if self.count == count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=timeout_seconds)
            finally:
                self._waiters.discard(waiter)
        return self.count
