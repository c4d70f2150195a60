# SPDX-License-Identifier: Apache-2.0
import asyncio
from contextlib import asynccontextmanager, nullcontext

import pytest

from agent.services.shared_call import SharedCall
from tests.unit.agent.fakes import settle, until


class Server:
    """Answers with the number of the call, once it may."""

    def __init__(self) -> None:
        self.calls = 0
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def call(self) -> int:
        self.calls += 1
        number = self.calls
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return number


@pytest.fixture
async def server():
    return Server()


async def test_callers_during_running_call_share_next_one(server):
    shared = SharedCall(server.call, 0.0, nullcontext)
    first = asyncio.ensure_future(shared.answer())
    await until(lambda: server.calls)
    others = [asyncio.ensure_future(shared.answer()) for _ in range(40)]
    await settle()
    server.may_answer.set()
    assert await first == 1
    assert await asyncio.gather(*others) == [2] * 40


async def test_calls_are_apart(server):
    server.may_answer.set()
    shared = SharedCall(server.call, 0.05, nullcontext)
    begun = asyncio.get_running_loop().time()
    for _ in range(3):
        await shared.answer()
    assert asyncio.get_running_loop().time() - begun >= 0.1


async def test_error_reaches_all_callers_and_is_not_cached(server):
    shared = SharedCall(server.call, 0.0, nullcontext)
    server.error = OSError("away")
    server.may_answer.set()
    outcomes = await asyncio.gather(*(shared.answer() for _ in range(3)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["away"] * 3
    server.error = None
    assert await shared.answer() == 2


async def test_one_who_is_cancelled_leaves_the_call_to_the_others(server):
    shared = SharedCall(server.call, 0.0, nullcontext)
    cancelled, waits = (asyncio.ensure_future(shared.answer()) for _ in range(2))
    await until(lambda: server.calls)
    cancelled.cancel()
    server.may_answer.set()
    assert await waits == 1
    assert cancelled.cancelled()


async def test_all_who_ask_while_a_call_waits_for_its_turn_share_it(server):
    its_turn, left = asyncio.Event(), []

    @asynccontextmanager
    async def turn():
        await its_turn.wait()
        yield
        left.append(server.calls)

    shared = SharedCall(server.call, 0.0, turn)
    server.may_answer.set()
    askers = []
    for _ in range(3):
        askers.append(asyncio.ensure_future(shared.answer()))
        await settle()
    its_turn.set()
    assert await asyncio.gather(*askers) == [1] * 3
    assert left == [1]
