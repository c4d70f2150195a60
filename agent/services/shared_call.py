"""One call for all who ask at about the same time.

Kept true: whoever asks gets the answer of a call that began after he asked, so that it tells at least of all that had happened by then.
One call runs at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """A call to a server that limits how often it is called."""

    def __init__(
        self, call: Callable[[], Awaitable[T]], spacing_seconds: float, turn: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        """Make it.

        Args:
            spacing_seconds: the least time between the beginnings of two calls.
            turn: entered before each call and left after it; whoever asks while it is being entered shares the call.
        """
        self._call = call
        self._spacing_seconds = spacing_seconds
        self._turn = turn
        self._one_at_a_time = asyncio.Lock()
        self._coming: asyncio.Task[T] | None = None
        """The call that has not begun yet, for all who ask meanwhile."""
        self._next_at = 0.0
        """By the loop's clock."""

    async def answer(self) -> T:
        """Return the answer of a call that begins now or soon. Raises what the call raises."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._make())
            self._coming.add_done_callback(_hear)
        return await asyncio.shield(self._coming)  # one who is cancelled leaves the call to the others

    async def _make(self) -> T:
        loop = asyncio.get_running_loop()
        async with self._one_at_a_time:
            await asyncio.sleep(self._next_at - loop.time())
            async with self._turn():
                self._next_at = loop.time() + self._spacing_seconds
                self._coming = None
                return await self._call()


def _hear(call: "asyncio.Task[T]") -> None:
    """Take note of an error that nobody is left to hear, because all who asked were cancelled."""
    if not call.cancelled():
        call.exception()
