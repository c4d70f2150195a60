"""List-watch of one collection, decoded into our own types.

Survives what API servers do: outages, also slow ones (backoff with jitter; what is known stays known), ended watches (continued from the
last version), forgotten history (410: list again) and long lists (read in pages, so that 50,000 pods never lie in memory as text).
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from program.backoff import Backoff
from proto.errors import AliquotError
from scheduler_plugin.adapters.kube import LIST_SECONDS, PAGE_SIZE, KubeConnection
from scheduler_plugin.errors import KubeApiError, KubeExpiredError

logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 300
"""How long the server keeps one watch; a little more is drawn by chance."""
IDLE_SECONDS: Final = 90.0
"""API servers send a bookmark every minute; a stream that is silent for longer is dead, whatever TCP says."""
FIRST_BACKOFF_SECONDS: Final = 0.1
LAST_BACKOFF_SECONDS: Final = 10.0

_T = TypeVar("_T")


class Listener(Protocol[_T]):
    """Who is told what the stream says."""

    def listing(self) -> None:
        """Note that a list begins: it tells everything up to this moment."""
        ...

    def listed(self, items: list[_T]) -> None:
        """Take all objects there are."""
        ...

    def opened(self) -> None:
        """Note that the API answers, and that what changed since the stream ended is yet to be told."""
        ...

    def changed(self, item: _T) -> None:
        """Take a new or changed object."""
        ...

    def deleted(self, item: _T) -> None:
        """Forget an object; this is how it last was."""
        ...

    def current(self, *, bookmark: bool) -> None:
        """Note that all that has come is told; with a bookmark, nothing from before the watch was opened is outstanding."""
        ...

    def trouble(self, sentence: str) -> None:
        """Note why the stream is not current."""
        ...


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _OnlyVersion(msgspec.Struct):
    metadata: _ListMetadata


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""


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
        """Make it; ``run`` begins.

        Args: what: for messages. path: of the collection. decode: reads one object; None skips one that nobody wants; an
              AliquotError or DecodeError skips one that cannot be read, with a line in the log.
        """
        self._what = what
        self._path = path
        self._decode = decode
        self._connection = connection
        self._listener = listener
        self._monotonic = monotonic
        self._pause = pause
        self._backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        self._version = ""
        self._attempt: asyncio.Task[None] | None = None
        self._relist_wanted = False

    def relist(self) -> None:
        """List everything again, now: what is watched may be older than what must be known."""
        self._version, self._relist_wanted = "", True
        if self._attempt is not None:
            self._attempt.cancel()

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            self._relist_wanted, least_wait = False, 0.0
            self._backoff.begin()
            self._attempt = asyncio.create_task(self._list_and_watch(), name=f"watch {self._what}")
            try:
                await self._attempt
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._relist_wanted or (task is not None and task.cancelling()):
                    raise
                continue
            except KubeExpiredError:
                self._version = ""
            except KubeApiError as exc:
                self._listener.trouble(f"{self._what}: {exc}")
                least_wait = exc.retry_after_seconds
            except msgspec.DecodeError as exc:
                self._listener.trouble(f"{self._what}: {exc}")
            backoff = self._backoff.ended(self._monotonic())
            await self._pause(least_wait + random.uniform(backoff / 2, backoff))  # noqa: S311 - spreads load

    async def _list_and_watch(self) -> None:
        if not self._version:
            self._version = await self._list()
        await self._watch()

    async def _list(self) -> str:
        """Read all pages and return the version of the whole; the event loop runs on between pages."""
        items: list[_T] = []
        token = ""
        self._listener.listing()
        while True:
            path = f"{self._with('limit')}={PAGE_SIZE}" + (f"&continue={token}" if token else "")
            page = msgspec.json.decode(await self._connection.request("GET", path, seconds=LIST_SECONDS), type=_Page)
            items += [item for raw in page.items or () if (item := self._decoded(raw)) is not None]
            token = page.metadata.continue_ or ""
            if not token:
                break
        self._listener.listed(items)
        return page.metadata.resource_version

    async def _watch(self) -> None:
        seconds = int(WATCH_SECONDS * random.uniform(1.0, 1.25))  # noqa: S311 - spreads load
        options = f"watch=1&allowWatchBookmarks=true&resourceVersion={self._version}&timeoutSeconds={seconds}"
        async with self._connection.stream(f"{self._with(options)}", IDLE_SECONDS) as content:
            self._backoff.opened(self._monotonic())
            self._listener.opened()
            pending = b""
            async for chunk in content.iter_any():
                *lines, pending = (pending + chunk).split(b"\n")
                bookmark = False
                for line in lines:
                    if line:
                        event = msgspec.json.decode(line, type=_Event)
                        self._take(event)
                        bookmark |= event.type == "BOOKMARK"
                self._listener.current(bookmark=bookmark)

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            failure = msgspec.json.decode(event.object, type=_Failure)
            message = f"{failure.message} ({failure.code})"
            raise KubeExpiredError(message) if failure.code == 410 else KubeApiError(message)
        if event.type == "DELETED":
            self._take_deleted(event.object)
        elif event.type != "BOOKMARK" and (item := self._decoded(event.object)) is not None:
            self._listener.changed(item)
        self._version = msgspec.json.decode(event.object, type=_OnlyVersion).metadata.resource_version

    def _take_deleted(self, raw: msgspec.Raw) -> None:
        """Forget an object. One that cannot be read any more may be known by an earlier form, which only a list takes away."""
        try:
            item = self._decode(raw)
        except (AliquotError, msgspec.DecodeError) as exc:
            raise KubeExpiredError(f"an object that cannot be read was deleted: {exc}") from exc
        if item is not None:
            self._listener.deleted(item)

    def _decoded(self, raw: msgspec.Raw) -> _T | None:
        try:
            return self._decode(raw)
        except (AliquotError, msgspec.DecodeError) as exc:
            logger.warning("%s: an object cannot be read and is left out: %s", self._what, exc)
            return None

    def _with(self, options: str) -> str:
        return f"{self._path}{'&' if '?' in self._path else '?'}{options}"
