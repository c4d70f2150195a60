# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from agent.core.audit import AuditPolicy, FindingKind
from agent.core.cgroups import ContainerRef
from agent.core.drift import Snapshot, find_drifts
from agent.core.limits import FailPolicy, limits_of, with_sm_limit
from agent.core.over_cores import Busy
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.planning import Planned
from agent.errors import DriverError, ProcessError
from agent.services.audit import GIVE_UP_LOOKS, Auditor, AuditorOptions, Confirmed, ProcessSources
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.evictor import AGAIN_AFTER_SECONDS, Evictor
from agent.services.pod_cache import PodCache
from agent.services.process_census import ProcessCensus
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from agent.services.telemetry import Telemetry
from agent.services.throttle import HOLD_SECONDS
from aliquot import contract
from aliquot.contract.model import ContainerState, ContainerStatus, CoresMode, Preferences, Priority
from aliquot.contract.units import MIB
from tests.unit.agent.builders import gpu, grant, ids, inventory, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, FakeKubeApi, posted_on_pods, settle, until

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

    def cgroups(self):
        return {process.cgroup for process in self.there.values()}

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
        self.manager = self.disk.manager()
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
            state=AgentState(DriverWatch(self.driver, 1.0), self.pods, self.manager),
            sources=ProcessSources(self.census, self.processes, **further), files=self.disk.files,
            evictor=Evictor(self.api, self.clock), reporting=Reporting(self.events, self.telemetry), clock=self.clock,
        )  # fmt: skip

    async def audit(self, auditor: Auditor) -> None:
        await auditor.audit(await self.census.take())

    async def twice(self, auditor: Auditor) -> list[FindingKind]:
        await self.audit(auditor)
        assert auditor.confirmed == ()
        await self.audit(auditor)
        found: Sequence[Confirmed] = auditor.confirmed  # mypy takes it for the empty tuple of the assertion above
        return [one.finding.kind for one in found]


@pytest.fixture
async def node(tmp_path):
    harness = Harness(tmp_path)
    await harness.manager.commit(Planned(GRANT, (), Preferences()), limits_of(GRANT, FailPolicy.CLOSED), dict, inventory(), 16)
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


async def test_pod_owner_gets_one_event(node):
    for _ in range(4):
        await node.audit(node.auditor)
    reported = await posted_on_pods(node.events, node.api)
    assert [(event.pod, event.reason, event.warning) for event in reported] == [("train", contract.EVENT_REASON_AUDIT, True)]


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


async def test_policy_evict_ends_pod_with_limited_retries(node):
    evicting = node.make(AuditPolicy.EVICT)
    await node.twice(evicting)
    await node.audit(evicting)
    assert node.api.evicted == [("default", "train", UID)]
    node.clock.seconds += AGAIN_AFTER_SECONDS + 1
    await node.audit(evicting)
    assert len(node.api.evicted) == 2


async def test_silent_api_prevents_eviction_but_not_audit(node):
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


async def test_possibly_new_pod_is_not_checked_until_api_knows_it(node):
    new = replace(PROCESS, cgroup=PROCESS.cgroup.replace(UID, str(uuid.uuid4())))
    node.processes.there = {10: new}
    node.pods.api_trouble("pods", "connection refused")
    await settle()
    assert await node.twice(node.auditor) == []
    node.pods.api_trouble("pods", "")
    await settle()
    assert await node.twice(node.auditor) == [FindingKind.NO_GRANT]


async def test_before_first_pod_list_no_process_is_judged(node):
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


async def test_finding_of_ended_process_ends_with_first_failed_check(node):
    await node.twice(node.auditor)
    node.processes.there = {10: replace(PROCESS, start_ticks=900)}  # the pid is another's by now
    await node.auditor.doubt(1)
    assert node.auditor.confirmed == ()


async def test_finding_causes_no_action_while_driver_is_silent(node):
    killing = node.make(AuditPolicy.KILL)
    await node.twice(killing)
    await killing.doubt(1)
    assert (len(killing.confirmed), node.processes.killed) == (1, [10])


async def test_host_process_is_left_alone_under_every_policy(node):
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
    await asyncio.wait_for(node.manager.release([GRANT]), 60)
    assert not auditing.done()
    over.set()
    await auditing


async def test_unreadable_process_is_reported_unknown_without_action(node):
    node.processes.mapping = None
    for policy in (AuditPolicy.KILL, AuditPolicy.EVICT):
        auditor = node.make(policy)
        assert await node.twice(auditor) == [FindingKind.SHIM_UNKNOWN]
        assert auditor.bypassed == set()
    assert (node.processes.killed, node.api.evicted) == ([], [])


async def test_audit_follows_census_and_survives_silent_driver(node):
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


CORES_GRANT = grant(ids("0:0"), share(0, 100, cores=10), of=OWNER)
ALWAYS_BUSY = {(ContainerRef(UID, ID), "GPU-0"): Busy(99.0, 95.0)}


@pytest.mark.parametrize(
    ("preferences", "expected"),
    [
        pytest.param(Preferences(), [FindingKind.OVER_CORES], id="fixed cores"),
        pytest.param(Preferences(priority=Priority.LOW), [FindingKind.OVER_CORES], id="fixed cores and a priority"),
        pytest.param(Preferences(cores_mode=CoresMode.WEIGHT), [], id="may use idle cores"),
    ],
)
async def test_cores_are_audited_unless_idle_ones_may_be_used(tmp_path, preferences, expected):
    node = Harness(tmp_path)
    limits = limits_of(CORES_GRANT, FailPolicy.CLOSED, preferences)
    await node.manager.commit(Planned(CORES_GRANT, (), Preferences()), limits, dict, inventory(), 16)
    node.pods.pods_listed([OWNER])
    node.processes.mapping = True
    auditor = node.make(busy=lambda: ALWAYS_BUSY)
    assert await node.twice(auditor) == expected
    assert auditor.bypassed == ({CORES_GRANT.grant_id} if expected else set())


@pytest.mark.parametrize("policy", AuditPolicy)
async def test_each_policy_acts_on_a_container_above_its_cores(tmp_path, policy):
    node = Harness(tmp_path)
    await node.manager.commit(Planned(CORES_GRANT, (), Preferences()), limits_of(CORES_GRANT, FailPolicy.CLOSED), dict, inventory(), 16)
    node.pods.pods_listed([OWNER])
    node.processes.mapping = True
    auditor = node.make(policy, busy=lambda: ALWAYS_BUSY)
    assert await node.twice(auditor) == [FindingKind.OVER_CORES]
    assert node.processes.killed == ([10] if policy is AuditPolicy.KILL else [])
    assert [name for _, name, _ in node.api.evicted] == (["train"] if policy is AuditPolicy.EVICT else [])


class TestThrottle:
    """Policy throttle lowers the SM limit in proportion, for a while, and leaves no drift behind."""

    @pytest.fixture
    async def node(self, tmp_path):
        node = Harness(tmp_path)
        await node.manager.commit(Planned(CORES_GRANT, (), Preferences()), limits_of(CORES_GRANT, FailPolicy.CLOSED), dict, inventory(), 16)
        node.pods.pods_listed([OWNER])
        node.processes.mapping = True
        return node

    def sm_percent(self, node) -> int:
        limits = node.disk.files.limits(CORES_GRANT.grant_id)
        assert limits is not None
        return limits.devices[0].sm_percent

    async def drifts(self, node) -> list[str]:
        survey = await node.manager.survey()
        return [drift.kind for drift in find_drifts(Snapshot(survey.grants, survey.files))]

    async def test_limit_is_lowered_once_and_given_back(self, node):
        busy = {(ContainerRef(UID, ID), "GPU-0"): Busy(40.0, 36.0)}
        auditor = node.make(AuditPolicy.THROTTLE, busy=lambda: busy)
        await node.twice(auditor)
        assert self.sm_percent(node) == 2, "10 * 10 / 40"
        assert await self.drifts(node) == []
        await node.audit(auditor)
        assert node.telemetry.registry.get_sample_value("aliquot_audit_actions_total", {"kind": "over-cores", "action": "throttle"}) == 1
        busy.clear()
        node.clock.seconds += HOLD_SECONDS - 1
        await node.audit(auditor)
        assert self.sm_percent(node) == 2
        node.clock.seconds += 2
        await node.audit(auditor)
        assert self.sm_percent(node) == 10
        assert await self.drifts(node) == []

    async def test_next_agent_gives_the_cores_back(self, node):
        auditor = node.make(AuditPolicy.THROTTLE, busy=lambda: ALWAYS_BUSY)
        await node.twice(auditor)
        assert self.sm_percent(node) == 1
        await node.audit(node.make(AuditPolicy.REPORT))
        assert self.sm_percent(node) == 10

    async def test_other_findings_are_only_reported(self, node):
        node.driver.process_list = [GpuProcess("GPU-0", 10, 500 * MIB)]
        assert await node.twice(node.make(AuditPolicy.THROTTLE)) == [FindingKind.OVER_LIMIT]
        assert self.sm_percent(node) == 10
        assert (node.processes.killed, node.api.evicted) == ([], [])

    async def test_limit_lowered_by_another_program_is_drift(self, node):
        node.manager.load(CORES_GRANT.boot_id)
        await node.manager.survey()
        node.disk.files.amend_limits(CORES_GRANT.grant_id, partial(with_sm_limit, device_uuid="GPU-0", percent=3))
        assert await self.drifts(node) == ["changed-limits"]
