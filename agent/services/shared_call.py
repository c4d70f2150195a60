# SPDX-License-Identifier: Apache-2.0
"""One call to a server, shared by all callers that come before it starts.

Invariant: a caller gets the reply of a call that began after its own request, so the reply shows at least the state at that time. One call
runs at a time.
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
        """Make the shared call.

        Args:
            spacing_seconds: the least time between the beginnings of two calls.
            turn: entered before each call and left after it. Callers that come while it is being entered share the call.
        """
        self._call = call
        self._spacing_seconds = spacing_seconds
        self._turn = turn
        self._one_at_a_time = asyncio.Lock()
        self._coming: asyncio.Task[T] | None = None
        """The call that has not started yet; later callers share it."""
        self._next_at = 0.0
        """By the loop's clock."""

    async def answer(self) -> T:
        """Return the reply of a call that starts now or soon. Raises the errors of the call."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._make())
            self._coming.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._coming)  # a cancelled caller does not cancel the call for the others

    async def _make(self) -> T:
        loop = asyncio.get_running_loop()
        async with self._one_at_a_time:
            await asyncio.sleep(self._next_at - loop.time())
            async with self._turn():
                self._next_at = loop.time() + self._spacing_seconds
                self._coming = None
                return await self._call()


def _retrieve_error(call: "asyncio.Task[T]") -> None:
    """Retrieve an error of a call without callers left, so that asyncio does not log it."""
    if not call.cancelled():
        call.exception()
