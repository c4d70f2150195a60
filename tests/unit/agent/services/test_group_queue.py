# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from agent.services.group_queue import GroupQueue
from tests.unit.agent.fakes import until


class Recorder:
    """Carries out groups of texts, and records them."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    async def carry_out(self, items):
        self.groups.append(list(items))
        await asyncio.sleep(0)
        if "broken" in items:
            raise RuntimeError("broken")
        return [ValueError(item) if item == "bad" else item.upper() for item in items]


async def waiting(lock: asyncio.Lock, queue: GroupQueue[str, str], *items: str) -> list[asyncio.Task[str]]:
    """Add items while the lock is held, and let go of it."""
    async with lock:
        tasks = [asyncio.ensure_future(queue.add(item, item)) for item in items]
        await until(lambda: len(queue._waiting) == len(items))
    return tasks


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


async def test_waiting_items_are_one_group_with_own_results(recorder):
    lock = asyncio.Lock()
    queue = GroupQueue(lock, recorder.carry_out, 10)
    tasks = await waiting(lock, queue, "a", "bad", "c")
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert recorder.groups == [["a", "bad", "c"]]
    assert (outcomes[0], str(outcomes[1]), outcomes[2]) == ("A", "bad", "C")


async def test_items_of_one_key_are_in_separate_groups_in_order(recorder):
    lock = asyncio.Lock()
    queue = GroupQueue(lock, recorder.carry_out, 10)
    await asyncio.gather(*await waiting(lock, queue, "a", "a", "b"))
    assert recorder.groups == [["a", "b"], ["a"]]


async def test_failed_group_fails_all_its_items_and_no_others(recorder):
    lock = asyncio.Lock()
    queue = GroupQueue(lock, recorder.carry_out, 2)
    outcomes = await asyncio.gather(*await waiting(lock, queue, "a", "broken", "c"), return_exceptions=True)
    assert [str(one) for one in outcomes] == ["broken", "broken", "C"]


async def test_cancelled_item_is_not_carried_out(recorder):
    lock = asyncio.Lock()
    queue = GroupQueue(lock, recorder.carry_out, 10)
    async with lock:
        first, second = (asyncio.ensure_future(queue.add(item, item)) for item in "ab")
        await until(lambda: len(queue._waiting) == 2)
        first.cancel()
        await until(first.done)
    assert await second == "B"
    assert recorder.groups == [["b"]]
