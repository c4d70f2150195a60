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


async def test_next_group_begins_before_callers_of_the_last_go_on(recorder):
    lock = asyncio.Lock()
    queue = GroupQueue(lock, recorder.carry_out, 2)
    begun_groups = []

    async def add(item: str) -> None:
        await queue.add(item, item)
        begun_groups.append(len(recorder.groups))

    async with lock:
        tasks = [asyncio.ensure_future(add(item)) for item in "abcd"]
        await until(lambda: len(queue._waiting) == 4)
    await asyncio.gather(*tasks)
    assert begun_groups == [2, 2, 2, 2]


async def test_another_change_comes_between_two_groups(recorder):
    lock = asyncio.Lock()
    queue = GroupQueue(lock, recorder.carry_out, 1)
    seen_groups = []

    async def change() -> None:
        async with lock:
            seen_groups.append(len(recorder.groups))

    async with lock:
        tasks = [asyncio.ensure_future(queue.add(item, item)) for item in "ab"]
        await until(lambda: len(queue._waiting) == 2)
        other = asyncio.ensure_future(change())
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, other)
    assert seen_groups == [1]


async def test_caller_that_is_cancelled_during_its_group_harms_no_other():
    groups, may_end = [], asyncio.Event()

    async def carry_out(items):
        groups.append(list(items))
        await may_end.wait()
        return [item.upper() for item in items]

    queue = GroupQueue(asyncio.Lock(), carry_out, 2)
    tasks = [asyncio.ensure_future(queue.add(item, item)) for item in "abc"]
    await until(lambda: groups)
    tasks[0].cancel()
    await until(tasks[0].done)
    may_end.set()
    assert (await tasks[1], await tasks[2]) == ("B", "C")
    assert tasks[0].cancelled()
    assert groups == [["a", "b"], ["c"]]


class Killed(BaseException):
    """Ends a process."""


async def test_callers_of_group_that_ends_the_process_do_not_wait():
    async def carry_out(items):
        raise Killed

    queue = GroupQueue(asyncio.Lock(), carry_out, 2)
    outcomes = await asyncio.gather(queue.add("a", "a"), queue.add("b", "b"), return_exceptions=True)
    assert [type(one) for one in outcomes] == [Killed, Killed]
    with pytest.raises(Killed):
        await queue.add("c", "c")
