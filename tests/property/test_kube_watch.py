# SPDX-License-Identifier: Apache-2.0
"""Whatever happens between the list-watch and a model API server, the cache ends up as a fresh list would show it."""

import json
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aliquot.kube.errors import KubeApiError, KubeBehindError, KubeExpiredError, KubeNotFoundError, error_of_reply
from aliquot.kube.watch import Changed, Deleted, Event, Listed, ListWatch, Read, Rules, Wait, Watch

PATH = "/api/v1/things?fieldSelector=x%3Dy"
VERSION_PATH = "/api/v1/nodes?fieldSelector=metadata.name%3Dn"
NAMES = ("a", "b", "c")
UNREADABLE = "no number"
MOST_STEPS = 100
"""More than a client needs that is no longer disturbed."""


class Metadata(msgspec.Struct):
    name: str


class Thing(msgspec.Struct):
    metadata: Metadata
    value: int


def event(kind: str, version: int, name: str = "", value: object = None) -> bytes:
    thing = {"metadata": {"name": name, "resourceVersion": str(version)}, "value": value}
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


class Server:
    """One collection with its whole history, and rules for how much of it clients may read."""

    def __init__(self) -> None:
        self.history: list[tuple[str, str, object]] = []
        """Kind, name and value of each change; the change to version n has index n - 1."""
        self.oldest = 0
        """The oldest version that a watch or a page may continue from."""
        self.lag = 0
        """How many versions the server's cache is behind."""

    @property
    def version(self) -> int:
        return len(self.history)

    def things(self, version: int | None = None) -> dict[str, object]:
        things: dict[str, object] = {}
        for kind, name, value in self.history[:version]:
            if kind == "DELETED":
                things.pop(name)
            else:
                things[name] = value
        return things

    def put(self, name: str, value: object) -> None:
        self.history.append(("MODIFIED" if name in self.things() else "ADDED", name, value))

    def compact(self) -> None:
        self.oldest = self.version

    def fall_behind(self, versions: int) -> None:
        self.lag = versions

    def delete(self, name: str) -> None:
        if name in (things := self.things()):
            self.history.append(("DELETED", name, things[name]))

    def get(self, path: str) -> bytes:
        """Reply to a Read. Raises KubeExpiredError, KubeBehindError."""
        options = dict(parse_qsl(urlsplit(path).query))
        if path == VERSION_PATH:
            return json.dumps({"metadata": {"resourceVersion": str(self.version)}, "items": []}).encode()
        version, start = self._snapshot(options)
        things = sorted(self.things(version).items())
        end = start + int(options.get("limit", len(things) or 1))
        token = f"{version}/{end}" if end < len(things) else ""
        items = [{"metadata": {"name": name}, "value": value} for name, value in things[start:end]]
        return json.dumps({"metadata": {"resourceVersion": str(version), "continue": token}, "items": items}).encode()

    def _snapshot(self, options: dict[str, str]) -> tuple[int, int]:
        """Return the version to list, and the number of objects to skip."""
        if token := options.get("continue"):
            assert "resourceVersion" not in options
            version, start = map(int, token.split("/"))
            if version < self.oldest:
                raise error_of_reply("GET", 410, b"")
            return version, start
        if "resourceVersion" not in options:
            return self.version, 0
        assert options["resourceVersionMatch"] == "NotOlderThan"
        cached = max(0, self.version - self.lag)
        if cached < int(options["resourceVersion"]):
            raise error_of_reply("GET", 504, b"")
        return cached, 0


class Stream:
    """An open watch: what the server has sent, and the client has not received."""

    def __init__(self, server: Server, path: str) -> None:
        options = dict(parse_qsl(urlsplit(path).query))
        assert (options["watch"], options["allowWatchBookmarks"]) == ("1", "true")
        self._server = server
        self._sent = int(options["resourceVersion"])
        self._sent_last = b""
        self._is_expired = self._sent < server.oldest
        self.waiting = b""

    def send(self) -> None:
        if self._is_expired:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            self.waiting += json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
            return
        for number, change in enumerate(self._server.history[self._sent :], self._sent + 1):
            kind, name, value = change
            self._sent, self._sent_last = number, event(kind, number, name, value)
            self.waiting += self._sent_last

    def repeat(self) -> None:
        self.waiting += self._sent_last

    def bookmark(self) -> None:
        self.send()
        if not self._is_expired:
            self.waiting += event("BOOKMARK", self._sent)


class ListenerError(Exception):
    """The listener cannot take an event."""


class Client:
    """Calls the machine as the transports do, one step or one chunk at a time."""

    def __init__(self, server: Server, rules: Rules) -> None:
        self.server = server
        self.machine = ListWatch(PATH, lambda raw: msgspec.json.decode(raw, type=Thing), rules)
        self.cache: dict[str, int] = {}
        self.is_synced = False
        self.stream: Stream | None = None
        self.now = 0.0
        self.next_error: Exception | None = None
        """Of the next request."""
        self.listener_fails = False
        """At the next event."""

    def act(self, size: int, chance: float) -> None:
        """Receive so many bytes of the watch, or do the next step."""
        if self.stream is None:
            self.step(chance)
        else:
            self.receive(self.stream, size)

    def step(self, chance: float) -> None:
        step = self.machine.next_step(self.now, chance)
        try:
            if isinstance(step, Wait):
                assert 0 <= step.seconds <= 30 + 5 + 10
                self.now += step.seconds
            elif isinstance(step, Read):
                self._raise_next_error()
                self.deliver(self.machine.replied(self.server.get(step.path)))
            else:
                assert isinstance(step, Watch)
                self._raise_next_error()
                self.stream = Stream(self.server, step.path)
                self.machine.opened(self.now)
                assert self.is_synced
        except (KubeApiError, ListenerError) as exc:
            self.fail(exc)

    def receive(self, stream: Stream, size: int) -> None:
        stream.send()
        chunk, stream.waiting = stream.waiting[:size], stream.waiting[size:]
        try:
            self.deliver(self.machine.received(chunk))
        except (KubeApiError, ListenerError) as exc:
            self.fail(exc)

    def disconnect(self, error: Exception | None) -> None:
        """End the stream, with an error or without."""
        if self.stream is not None:
            self.stream = None
            if error is None:
                self.machine.ended()
            else:
                self.fail(error)

    def refuse(self, error: Exception) -> None:
        self.next_error = error

    def break_listener(self) -> None:
        self.listener_fails = True

    def repeat(self) -> None:
        if self.stream is not None:
            self.stream.repeat()

    def bookmark(self) -> None:
        if self.stream is not None:
            self.stream.bookmark()

    def relist(self) -> None:
        self.stream = None
        self.machine.relist()

    def deliver(self, events: Iterator[Event[Thing]]) -> None:
        for one in events:
            if self.listener_fails:
                self.listener_fails = False
                raise ListenerError("full")
            match one:
                case Listed(items):
                    self.cache = {item.metadata.name: item.value for item in items}
                    self.is_synced = True
                case Changed(item):
                    self.cache[item.metadata.name] = item.value
                case Deleted(item):
                    self.cache.pop(item.metadata.name, None)

    def fail(self, error: Exception) -> None:
        self.stream = None
        self.machine.failed(error if isinstance(error, KubeApiError) else KubeApiError(str(error)))

    def _raise_next_error(self) -> None:
        error, self.next_error = self.next_error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Go on without new disturbances until everything the server has is received."""
        self.next_error, self.listener_fails = None, False
        for _ in range(MOST_STEPS):
            self.act(1 << 20, 0.5)
        assert self.stream is not None


ERRORS = (
    KubeApiError("connection reset"),
    KubeApiError("too many requests", 7.0),
    KubeBehindError("the cache is behind"),
    KubeExpiredError("too old"),
    KubeNotFoundError("no such kind"),
)

acts = st.tuples(st.just(Client.act), st.sampled_from((1, 60, 1000, 1000)), st.floats(0, 1))
puts = st.tuples(st.just(Server.put), st.sampled_from(NAMES), st.one_of(st.integers(0, 9), st.just(UNREADABLE)))
deletes = st.tuples(st.just(Server.delete), st.sampled_from(NAMES))
lags = st.tuples(st.just(Server.fall_behind), st.integers(0, 3))
ends = st.tuples(st.just(Client.disconnect), st.sampled_from((None, *ERRORS)))
refusals = st.tuples(st.just(Client.refuse), st.sampled_from(ERRORS))
others = st.tuples(st.sampled_from((Server.compact, Client.repeat, Client.bookmark, Client.relist, Client.break_listener)))
histories = st.lists(st.one_of(acts, acts, acts, puts, deletes, lags, ends, refusals, others, others), min_size=20, max_size=80)


def play(client: Client, history: list[tuple]) -> None:
    for action, *arguments in history:
        action(client.server if action.__qualname__.startswith("Server") else client, *arguments)


def rules(page_size: int = 0, version_path: str = "") -> Rules:
    return Rules(
        watch_seconds=240,
        page_size=page_size,
        version_path=version_path,
        first_backoff_seconds=0.2,
        last_backoff_seconds=10.0,
        expired_spread_seconds=5.0,
        absent_seconds=30.0,
        skips_unreadable=True,
    )


ACT = (Client.act, 1000, 0.5)


@pytest.mark.parametrize(
    "how", [rules(), rules(page_size=1), rules(page_size=2), rules(version_path=VERSION_PATH)], ids=["whole", "1", "2", "cached"]
)
@given(history=histories)
@example(history=[(Server.put, "a", 1), *[ACT] * 4, (Server.delete, "a"), (Server.compact,), (Client.disconnect, None)])
@example(history=[(Server.put, "a", 1), *[ACT] * 4, (Server.put, "a", UNREADABLE), ACT, (Server.delete, "a"), ACT])
@example(history=[*[ACT] * 4, (Server.put, "a", 1), (Client.break_listener,), ACT])
@example(history=[(Server.put, "a", 1), (Server.put, "b", 1), ACT, (Server.delete, "a"), (Client.refuse, ERRORS[0]), ACT])
def test_any_history_ends_in_cache_of_fresh_list(how, history):
    client = Client(Server(), how)
    play(client, history)
    client.settle()
    things = client.server.things()
    for name, value in client.cache.items():
        if things.get(name) == UNREADABLE:  # its last state that could be read stays known
            things[name] = value
    assert client.cache == {name: value for name, value in things.items() if value != UNREADABLE}
