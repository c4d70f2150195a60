# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
from dataclasses import replace
from typing import cast

import pytest

from agent.core.limits import FailPolicy, limits_of
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.planning import Planned
from agent.core.region_layout import MAX_DEVICES, RegionSnapshot, Slot, SlotDevice
from agent.errors import DriverError, StorageError
from agent.ports.grants import ContainerFiles, RegionView
from agent.services.driver_watch import DriverWatch
from agent.services.overhead import FRESH_SECONDS, OverheadMeter
from agent.services.pod_cache import PodCache
from agent.services.process_census import ProcessCensus
from agent.services.state import AgentState
from aliquot.contract.model import Preferences
from aliquot.contract.units import MIB
from tests.unit.agent.builders import gpu, grant, ids, inventory, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, FakeProcesses, settle

ONE = grant(ids("0:0"), share(0, 1000), of=pod("one"))
TWO = grant(ids("0:1"), share(0, 1000), of=pod("two"))


class Regions:
    """The files of the grants, except for what the processes in the regions hold, which the test sets."""

    def __init__(self, disk: Disk) -> None:
        self._files = disk.files
        self.slots: dict[str, tuple[Slot, ...]] = {}
        self.stored: list[dict[int, int]] = []
        self.broken: set[str] = set()
        self.read: list[str] = []

    def region(self, grant_id):
        self.read.append(grant_id)
        slots = self.slots.get(grant_id, ())
        return RegionView(RegionSnapshot((0,) * MAX_DEVICES, (0,) * MAX_DEVICES, slots, 0, 0), ())

    def amend_limits(self, grant_id, change):
        if grant_id in self.broken:
            raise StorageError("the limits are gone")
        return self._files.amend_limits(grant_id, change)

    def store_host_pids(self, grant_id, pids):
        self.stored.append(dict(pids))


def slot(pid: int, used_mib: int, context_mib: int = 300) -> Slot:
    held = SlotDevice(used_mib * MIB, context_mib * MIB, 0, 0, 0, 1, 0, 0, 0, 0, 0)
    empty = SlotDevice(*(0,) * 11)
    return Slot(0, pid, 0, 50, (held, *(empty,) * (MAX_DEVICES - 1)))


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.manager = self.disk.manager()
        self.files = Regions(self.disk)
        self.driver = FakeDriver(reading(gpu(0, mib=10000), gpu(1, mib=10000)))
        self.watch = DriverWatch(self.driver, 1.0)
        self.clock = FakeClock()
        self.processes = FakeProcesses(*(HostProcess(1000 + pid, (1000 + pid, pid), 50, "0::/") for pid in (7, 8)))
        self.census = ProcessCensus(60.0, driver=self.driver, processes=self.processes)
        self.pods = PodCache()
        # The meter calls only the three methods that Regions has.
        files = cast(ContainerFiles, self.files)
        self.meter = OverheadMeter(census=self.census, state=AgentState(self.watch, self.pods, self.manager), files=files, clock=self.clock)

    async def granted(self, *grants) -> "Harness":
        await self.watch.poll()
        for one in grants:
            await self.manager.commit(
                Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, inventory(gpu(0, mib=10000)), 16
            )
        return self

    async def reconcile(self) -> None:
        await self.meter.reconcile(await self.census.take())

    def driver_says(self, **used_mib: int) -> None:
        self.driver.process_list = [GpuProcess("GPU-0", 1000 + int(name[1:]), mib * MIB) for name, mib in used_mib.items()]

    def driver_bytes(self, of, uuid: str = "GPU-0") -> int | None:
        return self.meter.holdings.used_bytes(of.grant_id, uuid)

    def busy(self, of) -> float | None:
        return self.meter.holdings.utilization_ratio(of.grant_id, "GPU-0")

    def overhead_in_limits(self, of) -> int:
        return self.disk.files.limits(of.grant_id).devices[0].overhead_bytes // MIB


@pytest.fixture
async def node(tmp_path):
    return Harness(tmp_path)


async def test_driver_memory_beyond_count_goes_into_limits_and_metric(node):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver_says(p7=430)
    await node.reconcile()
    assert node.overhead_in_limits(ONE) == 30
    assert node.meter.overhead_bytes == {(ONE.grant_id, "GPU-0"): 30 * MIB}
    assert node.driver_bytes(ONE) == 430 * MIB
    assert node.files.stored == [{0: 1007}]


async def test_known_figures_of_gpu_stay_while_it_is_silent(node):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver_says(p7=430)
    await node.reconcile()
    node.files.slots[ONE.grant_id] = (slot(7, 0),)
    node.driver_says()
    node.driver.unknown = frozenset({"GPU-0"})
    await node.reconcile()
    assert node.overhead_in_limits(ONE) == 30
    assert node.meter.overhead_bytes == {(ONE.grant_id, "GPU-0"): 30 * MIB}
    assert node.driver_bytes(ONE) is None


async def test_how_busy_a_container_is_comes_from_its_own_processes(node):
    await node.granted(ONE, TWO)
    node.files.slots = {ONE.grant_id: (slot(7, 400),), TWO.grant_id: (slot(8, 100),)}
    node.driver.process_list = [GpuProcess("GPU-0", 1007, 400 * MIB, 0.25), GpuProcess("GPU-0", 1008, 100 * MIB)]
    await node.reconcile()
    assert (node.busy(ONE), node.busy(TWO)) == (0.25, None)


async def test_utilization_is_unknown_while_process_with_memory_is_unlisted(node):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400), replace(slot(8, 100), index=1))
    node.driver.process_list = [GpuProcess("GPU-0", 1007, 400 * MIB, 0.25)]
    await node.reconcile()
    assert node.busy(ONE) is None
    node.files.slots[ONE.grant_id] = (slot(7, 400), replace(slot(8, 0), index=1))
    await node.reconcile()
    assert node.busy(ONE) == 0.25


async def test_recent_figures_of_failing_driver_are_dropped(node):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver.process_list = [GpuProcess("GPU-0", 1007, 430 * MIB, 0.25)]
    running = asyncio.create_task(node.meter.run())
    await node.reconcile()
    node.driver.process_list = DriverError("hangs")
    node.clock.seconds += FRESH_SECONDS + 1
    assert await asyncio.to_thread(node.meter.fresh_overhead_bytes) == {(ONE.grant_id, "GPU-0"): 30 * MIB}
    assert node.busy(ONE) is None
    running.cancel()


async def test_each_container_has_its_own(node):
    await node.granted(ONE, TWO)
    node.files.slots = {ONE.grant_id: (slot(7, 400),), TWO.grant_id: (slot(8, 100),)}
    node.driver_says(p7=410, p8=100)
    await node.reconcile()
    assert (node.overhead_in_limits(ONE), node.overhead_in_limits(TWO)) == (10, 0)


async def test_it_is_taken_back_when_the_driver_uses_less(node):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver_says(p7=430)
    await node.reconcile()
    node.driver_says(p7=405)
    await node.reconcile()
    assert node.overhead_in_limits(ONE) == 5


async def test_a_known_host_pid_is_not_written_again(node):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (replace(slot(7, 400), host_pid=1007),)
    node.driver_says(p7=400)
    await node.reconcile()
    assert node.files.stored == [{}]


async def test_where_the_driver_lists_no_process_no_region_is_read(node):
    await node.granted(ONE, TWO)
    node.files.slots[TWO.grant_id] = (slot(7, 400),)
    node.driver.process_list = [GpuProcess("GPU-1", 1008, 10 * MIB)]
    await node.reconcile()
    assert node.files.read == []
    assert node.driver_bytes(TWO) == 0


async def test_overhead_is_taken_back_when_the_driver_lists_the_process_no_more(node):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver_says(p7=430)
    await node.reconcile()
    node.files.slots[ONE.grant_id] = (slot(7, 0),)
    node.driver_says()
    await node.reconcile()
    assert node.overhead_in_limits(ONE) == 0
    assert node.driver_bytes(ONE) == 0
    node.files.read.clear()
    await node.reconcile()
    assert node.files.read == []


async def test_a_scrape_has_new_figures_unless_those_there_are_fresh(node):
    await node.granted(ONE)
    running = asyncio.ensure_future(node.meter.run())
    await settle()
    assert node.driver_bytes(ONE) is None
    assert await asyncio.to_thread(node.meter.fresh_overhead_bytes) == {}
    assert node.driver_bytes(ONE) == 0, "the first scrape does not wait for the first census"
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver_says(p7=430)
    assert await asyncio.to_thread(node.meter.fresh_overhead_bytes) == {}
    node.clock.seconds += FRESH_SECONDS + 0.1
    assert await asyncio.to_thread(node.meter.fresh_overhead_bytes) == {(ONE.grant_id, "GPU-0"): 30 * MIB}
    node.clock.seconds += FRESH_SECONDS + 0.1
    node.driver.process_list = DriverError("it does not answer")
    assert await asyncio.to_thread(node.meter.fresh_overhead_bytes) == {(ONE.grant_id, "GPU-0"): 30 * MIB}
    running.cancel()


async def test_container_with_failing_files_does_not_stop_others(node):
    await node.granted(ONE, TWO)
    node.files.slots = {ONE.grant_id: (slot(7, 400),), TWO.grant_id: (slot(8, 100),)}
    node.files.broken.add(ONE.grant_id)
    node.driver_says(p7=410, p8=120)
    await node.reconcile()
    assert node.overhead_in_limits(TWO) == 20


async def test_limits_that_are_still_those_of_the_container_before_are_left_alone(node):
    await node.granted(ONE)
    following = grant(ids("0:0"), share(1, 1000), of=pod("two"))
    node.manager.ledger = node.manager.ledger.adopting([following])
    before = node.disk.files.limits(ONE.grant_id)
    node.files.slots[following.grant_id] = (slot(7, 400),)
    node.driver.process_list = [GpuProcess("GPU-1", 1007, 430 * MIB)]
    await node.reconcile()
    assert node.disk.files.limits(ONE.grant_id) == before
    assert node.meter.overhead_bytes == {}


async def test_cost_of_bare_context_is_learned_per_model_and_only_decreases(node):
    await node.granted(ONE)
    assert node.meter.context_bytes("GPU-1") == 0
    node.files.slots[ONE.grant_id] = (slot(7, 300),)
    for driver_mib, known_mib in ((330, 330), (310, 310), (320, 310)):
        node.driver_says(p7=driver_mib)
        await node.reconcile()
        assert node.meter.context_bytes("GPU-1") == known_mib * MIB  # the same model


@pytest.mark.timeout(60)
async def test_slow_region_does_not_delay_file_work(node, monkeypatch):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver_says(p7=430)
    looking, done, look = threading.Event(), threading.Event(), node.files.region

    def takes_long(grant_id):
        looking.set()
        done.wait()
        return look(grant_id)

    monkeypatch.setattr(node.files, "region", takes_long)
    passing = asyncio.ensure_future(node.reconcile())
    await asyncio.to_thread(looking.wait)
    await node.manager.on_disk(lambda: None)
    assert not passing.done()
    done.set()
    await passing
    assert node.overhead_in_limits(ONE) == 30


async def test_limits_of_a_grant_that_ended_during_the_look_are_not_touched(node, monkeypatch):
    await node.granted(ONE)
    node.files.slots[ONE.grant_id] = (slot(7, 400),)
    node.driver_says(p7=430)
    next_one = replace(ONE, pod_uid="uid-next")
    monkeypatch.setattr(node.files, "store_host_pids", lambda *_: setattr(node.manager, "ledger", node.manager.ledger.adopting([next_one])))
    await node.reconcile()
    assert node.overhead_in_limits(ONE) == 0
    assert node.meter.overhead_bytes == {}
