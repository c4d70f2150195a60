# SPDX-License-Identifier: Apache-2.0
import asyncio
import itertools
from collections.abc import Iterable, Sequence

import pytest

from agent.core.overhead import GpuProcess, HostProcess
from agent.errors import DriverError, DriverMissingError, DriverTimeoutError
from agent.services.process_census import Census, ProcessCensus
from tests.unit.agent import fakes
from tests.unit.agent.builders import reading
from tests.unit.agent.fakes import FakeClock, FakeDriver, until

USE = GpuProcess("GPU-0", 10, 100)
PROCESS = HostProcess(10, (10,), 500, "0::/\n")


class FakeProcesses(fakes.FakeProcesses):
    def __init__(self) -> None:
        super().__init__(PROCESS)
        self.asked = 0

    def read(self, pids: Iterable[int]) -> Sequence[HostProcess]:
        self.asked += 1
        return super().read(pids)


def make():
    driver, processes = FakeDriver(reading()), FakeProcesses()
    return driver, processes, ProcessCensus(0.01, driver=driver, processes=processes)


async def test_a_census_says_what_is_used_and_by_whom():
    driver, _, census = make()
    driver.process_list = [USE, GpuProcess("GPU-1", 11, 5)]  # 11 has gone meanwhile
    assert await census.take() == Census((USE, GpuProcess("GPU-1", 11, 5)), (PROCESS,))


async def test_silent_gpus_are_named_and_logged_once(caplog):
    driver, _, census = make()
    driver.process_list, driver.unknown = [USE], frozenset({"GPU-1"})
    running = asyncio.ensure_future(census.run())
    await until(lambda: census.changes.count > 2)
    running.cancel()
    assert census.latest == Census((USE,), (PROCESS,), frozenset({"GPU-1"}))
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_hang_is_logged_once_and_again_after_return(caplog):
    driver, _, census = make()
    looks = itertools.count(1)
    looked = 0

    async def hang():
        nonlocal looked
        looked = next(looks)
        raise DriverTimeoutError(f"nvmlInitWithFlags has not returned for {looked}.0 s")

    answer, driver.processes = driver.processes, hang
    running = asyncio.ensure_future(census.run())
    await until(lambda: looked >= 3)
    driver.processes = answer
    await until(lambda: census.changes.count)
    before, driver.processes = looked, hang
    await until(lambda: looked >= before + 3)
    running.cancel()
    assert len([record for record in caplog.records if "nvmlInitWithFlags" in record.getMessage()]) == 2


async def test_without_processes_no_owner_lookup_happens():
    _, processes, census = make()
    assert await census.take() == Census()
    assert processes.asked == 0


async def test_failed_census_is_skipped_and_next_one_counts():
    driver, _, census = make()
    driver.process_list = DriverError("lost")
    running = asyncio.ensure_future(census.run())
    await asyncio.sleep(0.03)
    assert not census.latest.heard
    driver.process_list = DriverMissingError("no driver")
    await until(lambda: census.latest.heard)
    assert census.changes.count == 0
    driver.process_list = [USE]
    await asyncio.wait_for(census.changes.after(0), 60)
    assert census.latest == Census((USE,), (PROCESS,))
    running.cancel()


@pytest.mark.parametrize(
    ("look_seconds", "wait_seconds"),
    [
        pytest.param(4.0, 6.0, id="a period after it began"),
        pytest.param(30.0, 1.0, id="after a calm when it took longer than a period"),
    ],
)
async def test_a_look_follows_the_one_before(look_seconds, wait_seconds):
    clock, driver, waits = FakeClock(), FakeDriver(reading()), []
    answer = driver.processes

    async def slow():
        clock.seconds += look_seconds
        return await answer()

    async def pause(seconds):
        waits.append(seconds)
        clock.seconds += seconds
        await asyncio.sleep(0)

    driver.processes = slow
    census = ProcessCensus(10.0, driver=driver, processes=FakeProcesses(), monotonic=clock.monotonic, pause=pause)
    running = asyncio.ensure_future(census.run())
    await until(lambda: len(waits) > 1)
    running.cancel()
    assert waits[:2] == [wait_seconds, wait_seconds]
