import asyncio
import threading
import uuid
from dataclasses import replace

import pytest

from agent.core.audit import AuditPolicy, FindingKind
from agent.core.limits import FailPolicy, limits_of
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.planning import Planned
from agent.errors import DriverError, ProcessError
from agent.services.audit import GIVE_UP_LOOKS, Auditor, AuditorOptions
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.evictor import AGAIN_AFTER_SECONDS, Evictor
from agent.services.pod_cache import PodCache
from agent.services.process_census import ProcessCensus
from agent.services.telemetry import Telemetry
from proto import contract
from proto.model import ContainerState, ContainerStatus, Preferences
from proto.units import MIB
from tests.unit.agent.builders import board, gpu, grant, ids, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, FakeKubeApi, posted, settle, until

UID = "0c3c9f4e-6f0a-4a52-8f5e-5f6c2a1d9b77"
ID = "ab" * 32
OWNER = pod("train", uid=UID, phase="Running", statuses=[ContainerStatus("main", ContainerState.RUNNING, ID)])
GRANT = grant(ids("0:0"), share(0, 100), of=OWNER)
PROCESS = HostProcess(10, (10,), 500, f"0::/kubepods/pod{UID}/{ID}\n")


class FakeProcesses:
    """Processes that are there, and those that were ended."""

    def __init__(self, *processes: HostProcess) -> None:
        self.there = {process.pid: process for process in processes}
        self.mapping: bool | None = False
        self.killed: list[int] = []
        self.refusal: str | None = None

    def read(self, pids):
        return [self.there[pid] for pid in set(pids) if pid in self.there]

    def own_cgroup(self):
        return "0::/\n"

    def maps(self, pid, path):
        return self.mapping

    def kill(self, process):
        if self.refusal is not None:
            raise ProcessError(self.refusal)
        self.killed.append(process.pid)
        return True


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.book = self.disk.book()
        self.pods = PodCache()
        self.driver = FakeDriver(reading(gpu(0), gpu(1)))
        self.driver.process_list = [GpuProcess("GPU-0", 10, 50 * MIB)]
        self.processes = FakeProcesses(PROCESS)
        self.clock = FakeClock()
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, self.clock)
        self.telemetry = Telemetry()
        self.census = ProcessCensus(0.05, driver=self.driver, processes=self.processes)
        self.auditor = self.make()

    def make(self, policy: AuditPolicy = AuditPolicy.REPORT, exempt: frozenset[str] = frozenset(), **further) -> Auditor:
        return Auditor(
            AuditorOptions("node-1", policy, exempt),
            census=self.census, processes=self.processes, watch=DriverWatch(self.driver, 1.0), book=self.book, pods=self.pods,
            files=self.disk.files, evictor=Evictor(self.api, self.clock), events=self.events, telemetry=self.telemetry, clock=self.clock,
            **further,
        )  # fmt: skip

    async def audit(self, auditor: Auditor) -> None:
        await auditor.audit(await self.census.take())

    async def twice(self, auditor: Auditor) -> list[FindingKind]:
        await self.audit(auditor)
        assert auditor.confirmed == ()
        await self.audit(auditor)
        return [one.finding.kind for one in auditor.confirmed]


@pytest.fixture
async def node(tmp_path):
    harness = Harness(tmp_path)
    await harness.book.commit(Planned(GRANT, (), Preferences()), limits_of(GRANT, FailPolicy.CLOSED), dict, board(), 16)
    harness.pods.pods_listed([OWNER])
    await settle()
    return harness


async def test_a_finding_counts_when_it_is_made_twice_in_a_row(node):
    assert await node.twice(node.auditor) == [FindingKind.SHIM_MISSING]
    assert node.auditor.bypassed == {GRANT.grant_id}
    (family,) = node.auditor.families()
    assert family.samples == ((("node-1", "shim-missing", "default", "train", "main", "GPU-0"), 1),)
    node.driver.process_list = []
    await node.audit(node.auditor)
    assert node.auditor.confirmed == ()
    assert node.auditor.bypassed == set()


async def test_a_process_that_maps_its_region_runs_the_shim(node):
    node.processes.mapping = True
    assert await node.twice(node.auditor) == []


async def test_its_pods_owner_is_told_once(node):
    for _ in range(4):
        await node.audit(node.auditor)
    told = await posted(node.events, node.api)
    assert [(event.pod, event.reason, event.warning) for event in told] == [("train", contract.EVENT_REASON_AUDIT, True)]


async def test_the_policy_report_does_nothing_more(node):
    await node.twice(node.auditor)
    assert (node.processes.killed, node.api.evicted) == ([], [])


async def test_the_policy_kill_ends_the_process(node):
    await node.twice(node.make(AuditPolicy.KILL))
    assert node.processes.killed == [10]
    labels = {"kind": "shim-missing", "action": "kill"}
    assert node.telemetry.registry.get_sample_value("aliquot_audit_actions_total", labels) == 1


async def test_a_process_that_cannot_be_ended_stops_no_audit(node):
    node.processes.refusal = "operation not permitted"
    assert await node.twice(node.make(AuditPolicy.KILL)) == [FindingKind.SHIM_MISSING]


async def test_the_policy_evict_ends_the_pod_and_asks_no_more_than_once_in_a_while(node):
    evicting = node.make(AuditPolicy.EVICT)
    await node.twice(evicting)
    await node.audit(evicting)
    assert node.api.evicted == [("default", "train", UID)]
    node.clock.seconds += AGAIN_AFTER_SECONDS + 1
    await node.audit(evicting)
    assert len(node.api.evicted) == 2


async def test_an_api_that_does_not_answer_evicts_nobody_and_stops_no_audit(node):
    node.api.outage = True
    assert await node.twice(node.make(AuditPolicy.EVICT)) == [FindingKind.SHIM_MISSING]


async def test_an_outage_of_the_api_stops_no_audit(node):
    node.pods.api_trouble("pods", "connection refused")
    await settle()
    assert await node.twice(node.make(AuditPolicy.KILL)) == [FindingKind.SHIM_MISSING]
    assert node.processes.killed == [10]


async def test_a_finding_ends_with_its_process_during_an_outage_of_the_api(node):
    await node.twice(node.auditor)
    node.pods.api_trouble("pods", "connection refused")
    await settle()
    node.driver.process_list = []
    await node.audit(node.auditor)
    assert (node.auditor.confirmed, node.auditor.bypassed) == ((), set())


async def test_a_pod_that_may_be_new_is_not_judged_until_the_api_tells_of_it(node):
    new = replace(PROCESS, cgroup=PROCESS.cgroup.replace(UID, str(uuid.uuid4())))
    node.processes.there = {10: new}
    node.pods.api_trouble("pods", "connection refused")
    await settle()
    assert await node.twice(node.auditor) == []
    node.pods.api_trouble("pods", "")
    await settle()
    assert await node.twice(node.auditor) == [FindingKind.NO_GRANT]


async def test_before_the_pods_were_listed_nobody_is_judged(node):
    node.pods = PodCache()
    assert await node.twice(node.make()) == []


async def test_a_finding_outlives_a_look_that_fails_and_not_every_one(node):
    await node.twice(node.auditor)
    (before,) = node.auditor.confirmed
    for failed in range(1, GIVE_UP_LOOKS):
        await node.auditor.doubt(failed)
        assert node.auditor.confirmed == (before,)
    await node.auditor.doubt(GIVE_UP_LOOKS)
    assert node.auditor.confirmed == ()


async def test_a_finding_whose_process_is_gone_ends_with_the_first_look_that_fails(node):
    await node.twice(node.auditor)
    node.processes.there = {10: replace(PROCESS, start_ticks=900)}  # the pid is another's by now
    await node.auditor.doubt(1)
    assert node.auditor.confirmed == ()


async def test_nothing_is_done_about_a_finding_while_the_driver_tells_nothing(node):
    killing = node.make(AuditPolicy.KILL)
    await node.twice(killing)
    await killing.doubt(1)
    assert (len(killing.confirmed), node.processes.killed) == (1, [10])


async def test_a_process_of_the_host_is_left_alone_whatever_the_policy(node):
    node.processes.there = {10: replace(PROCESS, cgroup="0::/system.slice/x.service\n")}
    for policy in (AuditPolicy.KILL, AuditPolicy.EVICT):
        assert await node.twice(node.make(policy)) == [FindingKind.HOST_PROCESS]
    assert (node.processes.killed, node.api.evicted) == ([], [])


async def test_a_process_that_hangs_holds_up_the_audit_and_no_container(node, monkeypatch):
    asked, over = threading.Event(), threading.Event()

    def hangs(pid, path):
        asked.set()
        return over.wait(30)

    monkeypatch.setattr(node.processes, "maps", hangs)
    auditing = asyncio.ensure_future(node.audit(node.auditor))
    await asyncio.to_thread(asked.wait, 10)
    await asyncio.wait_for(node.book.release([GRANT]), 10)
    assert not auditing.done()
    over.set()
    await auditing


async def test_what_may_not_be_looked_at_is_said_to_be_unknown_and_nothing_is_done_about_it(node):
    node.processes.mapping = None
    for policy in (AuditPolicy.KILL, AuditPolicy.EVICT):
        auditor = node.make(policy)
        assert await node.twice(auditor) == [FindingKind.SHIM_UNKNOWN]
        assert auditor.bypassed == set()
    assert (node.processes.killed, node.api.evicted) == ([], [])


async def test_the_audit_follows_the_census_and_outlives_a_driver_that_does_not_answer(node):
    node.driver.process_list = DriverError("gpu is lost")
    running = [asyncio.ensure_future(one.run()) for one in (node.auditor, node.census)]
    await asyncio.sleep(0.02)
    node.driver.process_list = [GpuProcess("GPU-0", 10, 50 * MIB)]
    await until(lambda: node.auditor.confirmed)
    node.driver.process_list = DriverError("gpu is lost")
    await until(lambda: not node.auditor.confirmed)
    for task in running:
        task.cancel()


async def test_the_servers_of_aliquot_mps_are_no_finding_while_it_lives(node):
    supervisor = HostProcess(50, (50,), 400, f"0::/kubepods/pod{UID}/{'cd' * 32}\n")
    node.processes.there |= {50: supervisor, 11: replace(supervisor, pid=11)}
    node.driver.process_list = [GpuProcess("GPU-1", 11, 50 * MIB)]
    pid: list[int | None] = [50]
    auditor = node.make(supervisor_pid=lambda: pid[0])
    assert await node.twice(auditor) == []
    pid[0] = None
    assert await node.twice(auditor) == [FindingKind.WRONG_DEVICE]
