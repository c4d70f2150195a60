# SPDX-License-Identifier: Apache-2.0
import asyncio
from typing import Any

import pytest

from agent.core.cgroups import ContainerRef
from agent.core.over_cores import WINDOW_SAMPLES
from agent.core.overhead import GpuProcess, HostProcess
from agent.errors import DriverError
from agent.services.busy_sampler import BusySampler
from agent.services.process_census import Census, ProcessCensus
from aliquot.contract.model import Isolation
from aliquot.contract.units import MIB
from tests.unit.agent.builders import gpu, grant, ids, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeDriver, FakeProcesses, settle

UID, ID = "0c3c9f4e-6f0a-4a52-8f5e-5f6c2a1d9b77", "ab" * 32
REF = ContainerRef(UID, ID)
GRANT = grant(ids("0:0"), share(0, 100, cores=10), of=pod("train", uid=UID))


def process(pid: int, cgroup: str = f"0::/kubepods/pod{UID}/{ID}\n") -> HostProcess:
    return HostProcess(pid, (pid,), 500 + pid, cgroup)


def busy(pid: int, ratio: float, device: str = "GPU-0") -> GpuProcess:
    return GpuProcess(device, pid, 50 * MIB, ratio)


class Processes(FakeProcesses):
    """Counts what is read."""

    def __init__(self, *there: HostProcess) -> None:
        super().__init__(*there)
        self.read_pids: list[int] = []

    def read(self, pids):
        self.read_pids += sorted(pids)
        return [self.there[pid] for pid in pids if pid in self.there]


class Harness:
    def __init__(self, base, *there: HostProcess) -> None:
        self.manager = Disk(base).manager()
        self.manager.ledger = self.manager.ledger.adopting([GRANT])
        self.driver = FakeDriver(reading(gpu(0), gpu(1)))
        self.processes = Processes(*there)
        self.census = ProcessCensus(60.0, driver=self.driver, processes=self.processes)
        self.pauses = 0
        self.sampler = BusySampler(
            10.0, driver=self.driver, processes=self.processes, manager=self.manager, census=self.census, pause=self.pause
        )

    async def pause(self, seconds: float) -> None:
        assert seconds == 1.0
        self.pauses += 1
        await asyncio.sleep(0)

    async def look(self, *listed: GpuProcess) -> None:
        self.driver.process_list = listed
        await self.sampler.look({"GPU-0"})


@pytest.fixture
def node(tmp_path):
    return Harness(tmp_path, process(10), process(11), process(12, "0::/system.slice/cron.service\n"))


async def test_processes_of_a_container_count_together_and_the_host_not(node):
    await node.look(busy(10, 0.25), busy(11, 0.5), busy(12, 0.9), busy(99, 0.9), busy(10, 0.7, "GPU-1"))
    assert node.sampler.history.samples == ({(REF, "GPU-0"): 0.75},)


async def test_container_of_each_process_is_read_once(node):
    for _ in range(3):
        await node.look(busy(10, 0.25))
    assert node.processes.read_pids == [10]
    await node.look(busy(11, 0.25))
    await node.look(busy(10, 0.25))
    assert node.processes.read_pids == [10, 11, 10], "the pid may be of another process by now"


async def test_driver_without_reply_gives_no_sample(node):
    node.driver.process_list = DriverError("away")
    await node.sampler.look({"GPU-0"})
    assert node.sampler.history.samples == ()


async def test_short_processes_one_after_the_other_are_found(node):
    node.processes.there = {pid: process(pid) for pid in range(100, 100 + WINDOW_SAMPLES)}
    for pid in node.processes.there:
        await node.look(busy(pid, 0.99))
    assert node.sampler.history.busy()[REF, "GPU-0"].exceeds(10)


@pytest.mark.parametrize(
    ("change", "samples"),
    [
        pytest.param({}, True, id="container with cores"),
        pytest.param({"shares": (share(0, 100),)}, False, id="container without cores"),
        pytest.param({"isolation": Isolation.MPS}, False, id="another backend"),
        pytest.param({"shares": (share(1, 100, cores=10),)}, False, id="GPU without processes"),
    ],
)
async def test_only_gpus_with_cores_and_processes_are_sampled(node, change, samples):
    given = {name: getattr(GRANT, name) for name in GRANT.__slots__} | change
    node.manager.ledger = node.manager.ledger.releasing([GRANT.grant_id]).adopting([type(GRANT)(**given)])
    node.driver.process_list = (busy(10, 0.5),)
    node.census.latest = Census((busy(10, 0.5),), (process(10),))
    running = asyncio.ensure_future(node.sampler.run())
    await settle()
    running.cancel()
    assert (node.pauses > 0, len(node.sampler.history.samples) > 0) == (samples, samples)


async def test_interval_follows_a_short_period(node):
    parts: dict[str, Any] = {name: getattr(node, name) for name in ("driver", "processes", "manager", "census")}
    intervals = [BusySampler(period, **parts).interval_seconds for period in (10.0, 1.5, 0.05)]
    assert intervals == [1.0, 0.5, 0.1]
