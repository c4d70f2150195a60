# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.inventory import OverdueCall
from agent.errors import DriverError, DriverLeftError, DriverMismatchError, DriverMissingError, DriverTimeoutError
from agent.services.driver_watch import FIRST_SEARCH_POLLS, DriverWatch
from agent.services.driver_watchdog import FIRST_PATIENCE_SECONDS, LOOK_SECONDS, PATIENCE_SECONDS, DriverWatchdog
from tests.unit.agent.fakes import FakeClock, FakeDriver
from tests.unit.agent.services.test_driver_watch import ALL, BOTH, ONE_LOST

MISMATCH = DriverMismatchError("library and loaded kernel module have different versions")


class Guarded:
    """A guard over a driver that is read as often as the guard looks."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.driver = FakeDriver(BOTH)
        self.watch = DriverWatch(self.driver, 5.0, monotonic=self.clock.monotonic)
        self.guard = DriverWatchdog(self.watch, self.clock.monotonic)

    async def goes_on_for(self, seconds, answer):
        """Whether the agent is still there after so long with an answer."""
        self.driver.answer = answer
        for _ in range(int(seconds / LOOK_SECONDS)):
            await self.watch.poll()
            try:
                self.guard.look()
            except DriverError:
                return False
            self.clock.seconds += LOOK_SECONDS
        return True


@pytest.fixture
def node():
    return Guarded()


async def test_a_mismatch_that_outlasts_its_time_ends_an_agent_that_had_worked(node):
    assert await node.goes_on_for(60, BOTH)
    assert await node.goes_on_for(PATIENCE_SECONDS, MISMATCH)
    assert not await node.goes_on_for(2 * LOOK_SECONDS, MISMATCH)


async def test_a_mismatch_that_was_there_at_the_start_is_given_longer(node):
    assert await node.goes_on_for(FIRST_PATIENCE_SECONDS, MISMATCH)
    assert not await node.goes_on_for(2 * LOOK_SECONDS, MISMATCH)


@pytest.mark.parametrize(
    "between",
    [BOTH, DriverMissingError("the kernel module is not loaded"), DriverTimeoutError("nvmlInit has not returned")],
    ids=["it was cured", "the module went", "it hung"],
)
async def test_a_mismatch_that_passes_begins_from_new_when_it_comes_back(node, between):
    await node.goes_on_for(60, BOTH)
    for _ in range(3):
        assert await node.goes_on_for(PATIENCE_SECONDS, MISMATCH)
        assert await node.goes_on_for(2 * LOOK_SECONDS, between)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(ONE_LOST, id="a lost GPU"),
        pytest.param(DriverMissingError("libnvidia-ml.so.1 was not found"), id="no driver"),
        pytest.param(DriverTimeoutError("nvmlInit has not returned"), id="a hang"),
        pytest.param(DriverError("nvmlInit: unknown error"), id="an unknown error"),
        pytest.param(DriverLeftError("mig-manager"), id="kept out"),
    ],
)
@pytest.mark.parametrize("worked", [True, False])
async def test_other_faults_do_not_end_agent(node, answer, worked):
    if worked:
        await node.goes_on_for(60, BOTH)
    assert await node.goes_on_for(2 * FIRST_PATIENCE_SECONDS, answer)


INIT = OverdueCall("nvmlInitWithFlags", None, 600.0)
HANG = DriverTimeoutError("the NVIDIA driver does not answer: nvmlInitWithFlags has not returned for 600.0 s")
SEARCHING_SECONDS = FIRST_SEARCH_POLLS * LOOK_SECONDS


@pytest.mark.parametrize("worked", [True, False])
async def test_call_that_hangs_only_here_ends_agent(node, worked):
    if worked:
        await node.goes_on_for(60, BOTH)
    node.driver.out, node.driver.in_new_session = [INIT], ALL
    assert await node.goes_on_for(SEARCHING_SECONDS + PATIENCE_SECONDS - LOOK_SECONDS, HANG)
    assert not await node.goes_on_for(3 * LOOK_SECONDS, HANG)
    with pytest.raises(DriverError, match=r"nvmlInitWithFlags has not returned.*answered another process for 60 s\. The agent exits"):
        node.guard.look()


@pytest.mark.parametrize(
    ("answer", "out", "in_new_session"),
    [
        pytest.param(HANG, [INIT], frozenset(), id="it keeps everybody waiting"),
        pytest.param(HANG, [INIT], DriverError("a new session of the driver did not answer"), id="another process waits as well"),
        pytest.param(HANG, [replace(INIT, uninterruptible=True)], ALL, id="the process could not end"),
        pytest.param(ONE_LOST, [OverdueCall("nvmlDeviceGetName", "GPU-1", 600.0)], ALL, id="a GPU hangs"),
    ],
)
async def test_a_hang_that_another_process_would_not_cure_ends_no_agent(node, answer, out, in_new_session):
    await node.goes_on_for(60, BOTH)
    node.driver.out, node.driver.in_new_session = out, in_new_session
    assert await node.goes_on_for(2 * FIRST_PATIENCE_SECONDS, answer)
    assert node.driver.searches


async def test_a_hang_that_passes_begins_from_new_when_it_comes_back(node):
    for _ in range(3):
        node.driver.out, node.driver.in_new_session = [INIT], ALL
        assert await node.goes_on_for(SEARCHING_SECONDS + PATIENCE_SECONDS - LOOK_SECONDS, HANG)
        node.driver.out = []
        assert await node.goes_on_for(2 * LOOK_SECONDS, BOTH)


async def test_version_mismatch_is_unknown_without_driver_watch(node):
    await node.goes_on_for(60, BOTH)
    for _ in range(3):
        assert await node.goes_on_for(PATIENCE_SECONDS, MISMATCH)
        assert await node.goes_on_for(2 * LOOK_SECONDS, DriverLeftError("mig-manager"))


async def test_the_loop_ends_with_the_error(node, monkeypatch):
    monkeypatch.setattr("agent.services.driver_watchdog.LOOK_SECONDS", 0.0)
    node.watch.failure, node.watch.answered = MISMATCH, True
    node.guard.look()
    node.clock.seconds += PATIENCE_SECONDS
    with pytest.raises(DriverError, match="The agent exits"):
        await node.guard.run()
