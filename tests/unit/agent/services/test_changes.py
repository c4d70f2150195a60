# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from agent.services import changes as module
from agent.services.changes import Changes


async def test_a_change_wakes_every_waiter():
    changes = Changes()
    waiters = [asyncio.ensure_future(changes.after(0)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.notify()
    assert await asyncio.gather(*waiters) == [1, 1, 1]


async def test_a_change_before_the_wait_is_not_missed():
    changes = Changes()
    changes.notify()
    changes.notify()
    assert await asyncio.wait_for(changes.after(0), 1) == 2


async def test_a_wait_ends_when_the_time_is_up():
    assert await Changes().after(0, 0.01) == 0


@pytest.fixture
def slow_pace(monkeypatch):
    """No second look comes within a test."""
    monkeypatch.setattr(module, "PACE_SECONDS", 3600.0)


async def a_moment() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_follower_counts_many_changes_as_one(slow_pace):
    source, follower = Changes(), Changes()
    following = asyncio.ensure_future(follower.follow(source))
    await a_moment()
    for _ in range(100):
        source.notify()
        await a_moment()
    assert follower.count == 1
    following.cancel()


async def test_follower_misses_no_change():
    source, follower = Changes(), Changes()
    following = asyncio.ensure_future(follower.follow(source))
    for _ in range(100):
        seen = follower.count
        source.notify()
        await asyncio.wait_for(follower.after(seen), 60)
    following.cancel()


async def test_paced_wait_returns_many_changes_together(monkeypatch):
    pace = asyncio.Event()
    monkeypatch.setattr(asyncio, "sleep", lambda _: pace.wait())
    changes = Changes()
    waiting = asyncio.ensure_future(changes.paced_after(0))
    await asyncio.wait([waiting], timeout=0)
    for _ in range(100):
        changes.notify()
    await asyncio.wait([waiting], timeout=0)
    assert not waiting.done()
    pace.set()
    assert await asyncio.wait_for(waiting, 60) == 100
