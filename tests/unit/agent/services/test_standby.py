# SPDX-License-Identifier: Apache-2.0
import asyncio

from agent.services import standby
from agent.services.standby import Standby


class FakeLocks:
    """Other agents hold them for as many tries as there are names."""

    def __init__(self, *holders: str) -> None:
        self.holders = list(holders)

    def take(self) -> str:
        return self.holders.pop(0) if self.holders else ""

    def close(self) -> None:
        self.holders.clear()


async def test_agent_takes_over_and_logs_each_holder_once(monkeypatch, caplog):
    monkeypatch.setattr(standby, "LOOK_SECONDS", 0.0)
    waiting = Standby(FakeLocks("agent a", "agent a", "agent a", "agent b"))
    assert await waiting.wait(asyncio.Event())
    assert waiting.trouble == ""
    reported = [record.getMessage() for record in caplog.records if "this agent waits" in record.getMessage()]
    assert [sentence.partition(":")[0] for sentence in reported] == ["agent a", "agent b"]


async def test_agent_that_is_stopped_while_it_waits_never_takes_over():
    stop = asyncio.Event()
    stop.set()
    assert not await Standby(FakeLocks("agent a")).wait(stop)


async def test_stop_ends_a_wait_at_once():
    stop = asyncio.Event()
    waiting = asyncio.ensure_future(Standby(FakeLocks(*["agent a"] * 1000)).wait(stop))
    await asyncio.sleep(0)
    stop.set()
    assert not await asyncio.wait_for(waiting, 60)


def test_waiting_agent_is_alive_and_not_ready():
    waiting = Standby(FakeLocks("agent a"))
    assert not waiting.is_alone()
    assert waiting.health("").status == 200
    assert waiting.page("").status == 503
    assert waiting.page("").body.startswith(b"agent a: this agent waits until that one ends")


async def test_agent_that_gave_its_place_away_waits_while_the_other_takes_it():
    taken = [True, True, False]
    waiting = Standby(FakeLocks(), lambda: taken.pop(0))
    assert [waiting.is_alone() for _ in range(3)] == [False, False, True]
