# SPDX-License-Identifier: Apache-2.0
"""An agent's life: it may give its place to another agent, and take it back."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest

import agent.__main__ as module
from agent.errors import StorageError


class Knot:
    """A part of an agent. As most parts are, it is in a circle of references, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


class Life:
    """Agents without services, which give their place away at once."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.load_error: Exception | None = None
        self.drains = True
        self.stop: asyncio.Event | None = None
        self.knots: list[weakref.ref[Knot]] = []

    async def leave(self) -> None:
        self.done.append("leave")

    async def load(self, parts: SimpleNamespace) -> None:
        self.done.append("load")
        if self.load_error is not None:
            raise self.load_error

    async def drain(self) -> None:
        self.done.append("drain")
        if not self.drains:
            self.stop.set()  # as SIGTERM does
            await asyncio.Event().wait()

    def parts(self) -> SimpleNamespace:
        knot = Knot()
        self.knots.append(weakref.ref(knot))
        watcher = SimpleNamespace(start=lambda listener: None)
        front = SimpleNamespace(drain=self.drain)
        claims = SimpleNamespace(watcher=watcher, cache=None, open=lambda: self.done.append("open"), front=front)
        return SimpleNamespace(cluster=SimpleNamespace(watcher=watcher, pods=None), claims=claims, knot=knot)


@pytest.fixture
def life(monkeypatch):
    life = Life()
    succession = SimpleNamespace(is_asked_for=lambda: True, retire=lambda: life.done.append("retire"))
    place = SimpleNamespace(succession=succession, telemetry=None, front=None, leave=life.leave)

    async def wait_to_be_alone(settings, place, stop):
        life.stop = stop
        if life.knots:
            stop.set()  # as SIGTERM does
        return not life.knots

    async def shut_down(tasks, parts, watchers):
        for task in tasks:
            task.cancel()

    monkeypatch.setattr(module, "build_place", lambda settings, environ: place)
    monkeypatch.setattr(module, "wait_to_be_alone", wait_to_be_alone)
    monkeypatch.setattr(module, "build_setup", lambda *_: None)
    monkeypatch.setattr(module, "build_parts", lambda *_: life.parts())
    monkeypatch.setattr(module, "build_watchers", lambda _: None)
    monkeypatch.setattr(module, "_load", life.load)
    monkeypatch.setattr(module, "_services", lambda *_: [])
    monkeypatch.setattr(module, "_start_status_server", lambda *_: None)
    monkeypatch.setattr(module, "_shut_down", shut_down)
    yield life
    gc.unfreeze()


async def test_agent_that_gave_its_place_away_keeps_none_of_its_parts(life):
    await module._run(None, {})
    assert life.done == ["load", "open", "retire", "drain", "leave", "leave"]
    gc.collect()
    assert [knot() for knot in life.knots] == [None]


async def test_agent_that_is_stopped_does_not_finish_calls(life):
    life.drains = False
    await module._run(None, {})
    assert life.done == ["load", "open", "retire", "drain", "leave"]


async def test_calls_about_claims_are_not_answered_without_ledger(life):
    life.load_error = StorageError("the disk is gone")
    with pytest.raises(StorageError, match="gone"):
        await module._run(None, {})
    assert life.done == ["load", "leave"]
