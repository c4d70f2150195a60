# SPDX-License-Identifier: Apache-2.0
"""List-watch of one collection on the event loop, decoded into the scheduler's types.

``aliquot.kube.watch`` decides when to list, watch and wait. Lists are read in pages, so that 50,000 pods never lie in memory as text.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from aliquot.kube.errors import KubeApiError, KubeExpiredError, KubeNotFoundError
from aliquot.kube.watch import Changed, Current, Deleted, Event, Listed, ListWatch, Read, Rules, Unreadable, Wait, Watch
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube import PAGE_SIZE

logger = logging.getLogger(__name__)

RULES: Final = Rules(
    watch_seconds=300,
    silence_seconds=90.0,  # API servers send a bookmark every minute: a silent stream is broken, even if TCP does not notice
    page_size=PAGE_SIZE,
    first_backoff_seconds=0.1,
    last_backoff_seconds=10.0,
    skips_unreadable=True,
)

_T = TypeVar("_T")


class Listener(Protocol[_T]):
    """Takes what a stream delivers."""

    def listing(self) -> None:
        """Note that a list begins, which will show everything up to this moment."""
        ...

    def listed(self, items: list[_T]) -> None:
        """Take all objects of the collection."""
        ...

    def opened(self) -> None:
        """Note that the API replies, and that changes since the stream ended are still to come."""
        ...

    def changed(self, item: _T) -> None:
        """Take a new or changed object."""
        ...

    def deleted(self, item: _T) -> None:
        """Forget an object, given in its last state."""
        ...

    def current(self, *, bookmark: bool) -> None:
        """Note that everything received is delivered; with a bookmark, no change from before the watch was opened is outstanding."""
        ...

    def trouble(self, sentence: str, *, is_missing: bool = False) -> None:
        """Note why the stream is not current. Args: is_missing: whether the API server has no such collection."""
        ...


class Stream(Generic[_T]):
    """One list-watch."""

    def __init__(
        self,
        what: str,
        path: str,
        decode: Callable[[msgspec.Raw], _T | None],
        connection: KubeConnection,
        listener: Listener[_T],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make it; ``run`` starts it.

        Args: what: for messages. path: of the collection. decode: reads one object; returns None for an object to ignore, and raises
              AliquotError or DecodeError for one that cannot be read, which is left out with a line in the log.
        """
        self._what = what
        self._machine = ListWatch(path, decode, RULES)
        self._connection = connection
        self._listener = listener
        self._monotonic = monotonic
        self._pause = pause
        self._attempt: asyncio.Task[None] | None = None

    def relist(self) -> None:
        """List everything again now: the caller needs a newer state than the watch may have."""
        self._machine.relist()
        if self._attempt is not None:
            self._attempt.cancel()

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            step = self._machine.next_step(self._monotonic(), random.random())  # noqa: S311 - spreads load
            if isinstance(step, Wait):
                await self._pause(step.seconds)
                continue
            self._attempt = asyncio.create_task(self._carry_out(step), name=f"watch {self._what}")
            try:
                await self._attempt
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._machine.relist_wanted or (task is not None and task.cancelling()):
                    raise
            except KubeApiError as exc:
                if self._machine.failed(exc) and not isinstance(exc, KubeExpiredError):  # then a list follows at once
                    self._listener.trouble(f"{self._what}: {exc}", is_missing=isinstance(exc, KubeNotFoundError))

    async def _carry_out(self, step: Read | Watch) -> None:
        if isinstance(step, Read):
            if step.starts_list:
                self._listener.listing()
            self._deliver(self._machine.replied(await self._connection.request("GET", step.path, seconds=step.timeout_seconds)))
            return
        async with self._connection.stream(step.path, step.silence_seconds) as chunks:
            self._machine.opened(self._monotonic())
            self._listener.opened()
            async for chunk in chunks:
                self._deliver(self._machine.received(chunk))
        self._machine.ended()

    def _deliver(self, events: Iterable[Event[_T]]) -> None:
        """Call the listener's method for each event."""
        for event in events:
            match event:
                case Changed(item):
                    self._listener.changed(item)
                case Deleted(item):
                    self._listener.deleted(item)
                case Current(bookmark):
                    self._listener.current(bookmark=bookmark)
                case Listed(items):
                    self._listener.listed(items)
                case Unreadable(error):
                    logger.warning("%s: an object cannot be read and is left out: %s", self._what, error)
