# SPDX-License-Identifier: Apache-2.0
"""The thread does what the machine decides; tests/unit/agent/adapters/test_kube.py runs it against an API server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from aliquot.kube.urllib3_transport import KubeConnection
from aliquot.kube.watch import Changed, Listed, ListWatch, Rules
from aliquot.kube.watch_thread import follow

RULES = Rules(watch_seconds=100, first_backoff_seconds=0.0, last_backoff_seconds=0.0)


class Api:
    """Replies to lists, then sends the same change in each watch. Also the event that stops the thread, as one more watch opens."""

    def __init__(self, watches: int) -> None:
        self.watches = watches
        self.requests: list[str] = []
        self.delivered: list[object] = []
        """Types of events and reported sentences, in order."""
        self.failing: type | None = None
        """Kind of event that the listener fails to take, once."""

    def request(self, method: str, path: str, *, seconds: float) -> bytes:
        self.requests.append(path)
        return b'{"metadata":{"resourceVersion":"5"},"items":["a"]}'

    @contextmanager
    def stream(self, path: str, silence_seconds: float) -> Iterator[Iterator[bytes]]:
        self.requests.append(path)
        self.watches -= 1
        yield iter((b'{"type":"MODIFIED","object":{"metadata":{"resourceVersion":"6"}}}\n',))

    def deliver(self, event: object) -> None:
        if type(event) is self.failing:
            self.failing = None
            raise LookupError("the listener is broken")
        if isinstance(event, Listed | Changed):
            self.delivered.append(type(event))

    def is_set(self) -> bool:
        return self.watches < 0

    def wait(self, seconds: float) -> None: ...

    def connection(self) -> KubeConnection:
        return cast(KubeConnection, self)  # follow() uses nothing but request and stream

    def play(self) -> list[object]:
        machine: ListWatch[Any] = ListWatch("/things", lambda raw: json.loads(bytes(raw)), RULES)
        follow(machine, self.connection(), self.deliver, self.delivered.append, cast(threading.Event, self))
        return self.delivered


def test_watch_continues_after_it_ended():
    api = Api(watches=2)
    assert api.play() == [Listed, "", Changed, "", Changed, ""]
    assert ["resourceVersion=5" in path or "resourceVersion=6" in path for path in api.requests] == [False, True, True, True]


def test_failing_listener_is_reported_and_gets_the_event_again(caplog):
    api = Api(watches=2)
    api.failing = Changed
    assert api.play() == [Listed, "", "unexpected LookupError: the listener is broken", "", Changed, ""]
    assert "resourceVersion=5" in api.requests[2]
    assert "LookupError" in caplog.text


def test_stopped_thread_makes_no_request():
    api = Api(watches=0)
    stopped = threading.Event()
    stopped.set()
    follow(ListWatch("/things", lambda raw: raw, RULES), api.connection(), api.deliver, api.delivered.append, stopped)
    assert api.requests == []
