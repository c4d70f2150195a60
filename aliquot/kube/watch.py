# SPDX-License-Identifier: Apache-2.0
"""List-watch of one collection as a state machine without I/O, the way h11 treats HTTP.

The machine decides what to request next and what the listener must learn; the caller sends, reads, sleeps, measures time and draws chance.
``watch_thread.follow`` and the scheduler's ``kube_watch.Stream`` are the two callers. Each repeats:

    step = machine.next_step(now, chance)
    Wait   sleep for step.seconds
    Read   GET step.path; deliver every event of machine.replied(body)
    Watch  GET step.path as a stream; call machine.opened(now); deliver every event of machine.received(chunk) for each chunk;
           call machine.ended() when the stream ends
    If a request, a call of the machine or the listener fails: report the error if machine.failed(error) returns True

The states, and what changes them (a dashed arrow waits first: Retry-After plus the backoff):

    PROBE ──version──▶ LIST ──last page──▶ WATCH ─ ─ stream ended, error ─ ─▶ WATCH from the last version
                        │                    └─ ─ 404, 410, no version ─ ─▶ PROBE
                        ├─ ─ error ─ ─▶ PROBE
                        └──504: the server's cache is behind──▶ LIST without a version

PROBE is left out unless ``Rules.version_path`` is set. ``relist`` leads to PROBE from any state, without a wait.

Invariants:
- An event counts as delivered when the caller takes the next one. If a listener fails, it gets that event again, or a new list.
- After any failures, disconnects, lost history and duplicates, the delivered events add up to a fresh list
  (tests/property/test_kube_watch.py).
- Memory holds at most the decoded objects of one list, and one page or one chunk of text.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Generic, TypeAlias, TypeVar

import msgspec

from aliquot.contract.errors import AliquotError
from aliquot.kube.backoff import Backoff
from aliquot.kube.errors import KubeApiError, KubeBehindError, KubeExpiredError, KubeNotFoundError, decode_reply, error_of_event
from aliquot.kube.requests import with_options

T = TypeVar("T")

WATCH_SPREAD = 0.25
"""A watch is requested for up to this share longer than the rules say, so that clients that started together do not reconnect together."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How one list-watch treats the API server."""

    watch_seconds: int
    """How long the server keeps one watch; chance adds up to WATCH_SPREAD of it."""
    silence_seconds: float | None = None
    """How long a watch may bring nothing before it counts as broken; None means a little longer than the server keeps it."""
    list_seconds: float = 60.0
    """For each request of a list. If clients gave up on a slow server sooner, each would retry its list, and no list would ever finish."""
    page_size: int = 0
    """Objects in each reply to a list; 0 requests all of them at once."""
    version_path: str = ""
    """Path of a cheap list. Its version is the lowest one that the list may show. Empty: the list is read without such a version."""
    first_backoff_seconds: float
    last_backoff_seconds: float
    expired_spread_seconds: float = 0.0
    """After a 410, chance adds up to this: a restarted server has lost the history for all clients at once."""
    absent_seconds: float = 0.0
    """Wait after a 404, at least: the cluster does not have this kind of object, for example before its definition is installed."""
    skips_unreadable: bool = False
    """Whether objects that cannot be decoded are left out. Otherwise one of them fails the list or the watch."""


class Wait(msgspec.Struct, frozen=True):
    """Do nothing for a while."""

    seconds: float


class Read(msgspec.Struct, frozen=True):
    """Read one page of a list."""

    path: str
    timeout_seconds: float
    starts_list: bool
    """Whether what is listed is at least as new as this moment."""


class Watch(msgspec.Struct, frozen=True):
    """Open a watch."""

    path: str
    silence_seconds: float


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """All objects of the collection; any other object that the listener knows is gone."""

    items: list[T]


class Changed(msgspec.Struct, Generic[T], frozen=True):
    """An object was added or changed, or an earlier change is repeated."""

    item: T


class Deleted(msgspec.Struct, Generic[T], frozen=True):
    """An object was deleted; ``item`` is its last state."""

    item: T


class Current(msgspec.Struct, frozen=True):
    """Everything received so far is delivered."""

    bookmark: bool
    """Whether a bookmark was received: no change from before the watch was opened is outstanding."""


class Unreadable(msgspec.Struct, frozen=True):
    """An object was left out because it cannot be decoded."""

    error: Exception


Event: TypeAlias = Listed[T] | Changed[T] | Deleted[T] | Current | Unreadable


class _State(Enum):
    PROBE = auto()
    LIST = auto()
    WATCH = auto()


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct):
    metadata: _Metadata
    items: list[msgspec.Raw] | None = None


class _Frame(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class _OnlyVersion(msgspec.Struct):
    metadata: _Metadata


class ListWatch(Generic[T]):
    """One list-watch; see the module."""

    def __init__(self, path: str, decode: Callable[[msgspec.Raw], T | None], rules: Rules) -> None:
        """Start at the list.

        Args: path: of the collection, with its selectors.
              decode: reads one object; returns None for an object to ignore. Raises msgspec.DecodeError or AliquotError.
        """
        self._path = path
        self._decode = decode
        self._rules = rules
        self._backoff = Backoff(rules.first_backoff_seconds, rules.last_backoff_seconds)
        self._version = ""
        """Where the next watch starts; empty if a list is needed."""
        self._is_over = False
        """Whether the current try has ended, so that a wait comes next."""
        self._least_wait_seconds = 0.0
        self._spread_seconds = 0.0
        self._relist_wanted = False
        self._pending = b""
        self._start_list()

    def _start_list(self) -> None:
        self._version = ""
        self._state = _State.PROBE if self._rules.version_path else _State.LIST
        self._not_older_than = ""
        self._continue = ""
        self._items: list[T] = []

    def relist(self) -> None:
        """List everything again at the next step: the listener needs a newer state than the watch may have.

        The caller must end the request in progress.
        """
        self._relist_wanted = True

    @property
    def relist_wanted(self) -> bool:
        """Whether ``relist`` was called since the last step."""
        return self._relist_wanted

    def next_step(self, now: float, chance: float) -> Wait | Read | Watch:
        """Return what to do next. Args: now: monotonic seconds. chance: drawn evenly from 0 to 1."""
        if self._relist_wanted:
            self._relist_wanted = False
            self._start_try()
            self._start_list()
        elif self._is_over:
            return self._wait(now, chance)
        if self._state is _State.WATCH:
            return self._watch(chance)
        if self._state is _State.PROBE:
            return Read(self._rules.version_path, self._rules.list_seconds, starts_list=True)
        starts_list = not self._continue and not self._rules.version_path
        return Read(with_options(self._path, **self._list_options()), self._rules.list_seconds, starts_list)

    def _wait(self, now: float, chance: float) -> Wait:
        backoff = self._backoff.ended(now)
        wait = Wait(self._least_wait_seconds + self._spread_seconds * chance + backoff * (1 + chance) / 2)
        self._start_try()
        if not self._version:
            self._start_list()
        return wait

    def _start_try(self) -> None:
        self._backoff.begin()
        self._is_over = False
        self._least_wait_seconds = self._spread_seconds = 0.0
        self._pending = b""

    def _list_options(self) -> dict[str, str]:
        """Return the options of the next page.

        To select pods by their node, an API server before 1.31, or with an old etcd, reads all pods of the cluster from etcd, unless the
        request states the version that the list must have reached: then the server uses its cache, where pods are indexed by node. The
        version to state is the one etcd is at, which the list of a single object by its name returns (PROBE). So the list is as new as one
        from etcd: an older one may lack a pod that has a grant, or have one that a new pod of the same name has replaced.

        Source: k8s.io/apiserver/pkg/registry/generic/registry.Store.ListPredicate; k8s.io/apiserver/pkg/storage/cacher, GetList.
        """
        options = {"limit": str(self._rules.page_size)} if self._rules.page_size else {}
        if self._continue:  # the token has the version of the first page
            return options | {"continue": self._continue}
        if self._not_older_than:
            return options | {"resourceVersion": self._not_older_than, "resourceVersionMatch": "NotOlderThan"}
        return options

    def _watch(self, chance: float) -> Watch:
        seconds = int(self._rules.watch_seconds * (1 + WATCH_SPREAD * chance))
        path = with_options(self._path, watch="1", allowWatchBookmarks="true", resourceVersion=self._version, timeoutSeconds=str(seconds))
        silence_seconds = self._rules.silence_seconds
        return Watch(path, seconds + 10.0 if silence_seconds is None else silence_seconds)

    def replied(self, body: bytes) -> Iterator[Event[T]]:
        """Take the reply to a Read. Raises KubeApiError: the reply cannot be decoded."""
        page = decode_reply(body, _Page, "a list")
        if self._state is _State.PROBE:
            self._not_older_than = page.metadata.resource_version
            self._state = _State.LIST
            return
        for raw in page.items or ():
            item = self._item(raw)
            if isinstance(item, Unreadable):
                yield item
            elif item is not None:
                self._items.append(item)
        self._continue = page.metadata.continue_ or ""
        if not self._continue:
            yield Listed(self._items)
            self._items = []
            self._version = page.metadata.resource_version
            self._state = _State.WATCH

    def opened(self, now: float) -> None:
        """Note that the server accepted the Watch, at ``now`` in monotonic seconds; changes since the last version follow."""
        self._backoff.opened(now)

    def received(self, chunk: bytes) -> Iterator[Event[T]]:
        """Take bytes of a watch, cut anywhere.

        Raises: KubeApiError: a line cannot be decoded, or the server reports an error. KubeExpiredError: list again.
        """
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        bookmark = False
        for line in filter(None, lines):
            frame = decode_reply(line, _Frame, "an event")
            if frame.type == "ERROR":
                raise error_of_event(frame.object)
            if frame.type == "BOOKMARK":
                bookmark = True
            else:
                yield from self._change(frame)
            self._version = decode_reply(frame.object, _OnlyVersion, "an object").metadata.resource_version
        yield Current(bookmark)

    def _change(self, frame: _Frame) -> Iterator[Event[T]]:
        is_deleted = frame.type == "DELETED"
        item = self._item(frame.object)
        if isinstance(item, Unreadable):
            if is_deleted:  # the listener may know an earlier state of it, which only a list removes
                raise KubeExpiredError(f"an object that cannot be read was deleted: {item.error}") from item.error
            yield item
        elif item is not None:
            yield Deleted(item) if is_deleted else Changed(item)

    def _item(self, raw: msgspec.Raw) -> T | Unreadable | None:
        try:
            return self._decode(raw)
        except (AliquotError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            if self._rules.skips_unreadable:
                return Unreadable(exc)
            raise KubeApiError(f"an object cannot be read: {exc}") from exc

    def ended(self) -> None:
        """Note that a Watch ended without an error."""
        self._is_over = True

    def failed(self, error: KubeApiError) -> bool:
        """Note that a request, or taking its reply, failed; return whether that is worth a report."""
        if self._not_older_than and self._state is _State.LIST and isinstance(error, KubeBehindError):
            # No pod was written for seconds, and this server rarely asks etcd for its version. Few clients list at such a time.
            self._not_older_than = ""
            return False
        self._is_over = True
        self._least_wait_seconds = error.retry_after_seconds
        if isinstance(error, KubeExpiredError):
            self._version = ""
            self._spread_seconds = self._rules.expired_spread_seconds
        elif isinstance(error, KubeNotFoundError):
            self._version = ""
            self._least_wait_seconds = max(self._least_wait_seconds, self._rules.absent_seconds)
        return True
