# SPDX-License-Identifier: Apache-2.0
import asyncio
import fcntl
import struct
import threading
from dataclasses import replace
from functools import partial

import pytest

from agent.adapters.directory_watch import DirectoryWatch
from agent.core.drift import Cure, DriftKind, DriftPolicy
from agent.core.identity import grant_id
from agent.core.inventory import FailedDevice
from agent.core.ledger import Grant
from agent.core.limits import FailPolicy, limits_of
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.planning import Planned
from agent.core.reconciliation import CLAIMED_GRACE_SECONDS
from agent.core.region_layout import OWN_GEOMETRY, SLOT_HEADER, SLOT_LIVE
from agent.errors import DriverMissingError, StorageError
from agent.ports.kube import NodeState, PodEvent
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.evictor import Evictor
from agent.services.liveness import Liveness
from agent.services.pod_cache import PodCache
from agent.services.process_census import Census, ProcessCensus
from agent.services.reconciler import CALM_SECONDS, Cures, Reconciler, ReconcilerOptions, Witnesses
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from agent.services.telemetry import Telemetry
from aliquot import contract
from aliquot.contract.model import ContainerState, ContainerStatus, Isolation, Preferences
from aliquot.contract.units import MIB
from tests.unit.agent.builders import SECRET, VGPU, assigned, gpu, grant, held, ids, instance, inventory, pod, reading, share
from tests.unit.agent.claim_builders import claim_grant, user
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, FakeKubeApi, FakePodResources, FakeProcesses, posted, settle, until

GRANT = grant(ids("0:0"), of=pod("a"))


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.manager = self.disk.manager()
        self.pods = PodCache()
        self.pod_resources = FakePodResources(held(pod("a"), ids("0:0")))
        self.clock = FakeClock()
        self.driver = FakeDriver(reading(gpu(0), gpu(1)))
        self.watch = DriverWatch(self.driver, 1.0)
        self.processes = FakeProcesses()
        self.census = ProcessCensus(60.0, driver=self.driver, processes=self.processes)
        self.census.latest = Census()
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, self.clock)
        self.telemetry = Telemetry("node-1")
        self.rewritten: list[Grant] = []
        self.file_changes = DirectoryWatch([base / "cdi", base / "state/ledger"], nested=base / "run/containers")
        self.reconciler = self.make()

    def make(self, period_seconds: float = 0.05, *, assigned: bool = False, policy: DriftPolicy = DriftPolicy.REPORT) -> Reconciler:
        liveness = Liveness(manager=self.manager, files=self.disk.files, census=self.census, processes=self.processes, watch=self.watch)
        return Reconciler(
            ReconcilerOptions("node-1", period_seconds, assigned, policy),
            state=AgentState(self.watch, self.pods, self.manager),
            witnesses=Witnesses(self.pod_resources, liveness, self.file_changes, lambda: {VGPU}, partial(grant_id, SECRET)),
            cures=Cures(self.rewrite, Evictor(self.api, self.clock)),
            reporting=Reporting(self.events, self.telemetry), clock=self.clock,
        )  # fmt: skip

    async def rewrite(self, grant: Grant) -> None:
        self.rewritten.append(grant)
        await self.manager.rewrite(grant, limits_of(grant, FailPolicy.CLOSED), dict)

    def drifts(self) -> list[DriftKind]:
        return [one.drift.kind for one in self.reconciler.open_drifts]

    def cured(self, kind: DriftKind, cure: Cure) -> float:
        return self.telemetry.registry.get_sample_value("aliquot_drift_cures_total", {"kind": kind, "cure": cure}) or 0.0

    async def knows(self, *pods) -> None:
        self.pods.pods_listed(pods)
        await settle()

    @property
    def grants(self) -> set[str]:
        return set(self.manager.ledger.grants)


async def reconciled_until_confirmed(node: Harness) -> None:
    """Let the pod of the grant run, and look at the node for as long as any drift takes to count."""
    evicting = node.make(policy=DriftPolicy.EVICT)
    await node.knows(pod("a", phase="Running"))
    await evicting.reconcile()
    node.clock.seconds += 0.2
    await evicting.reconcile()


@pytest.fixture
async def node(tmp_path):
    harness = Harness(tmp_path)
    await harness.manager.commit(Planned(GRANT, (), Preferences()), limits_of(GRANT, FailPolicy.CLOSED), dict, inventory(), 16)
    return harness


async def test_before_the_pods_are_known_nothing_is_released(node):
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_a_running_pods_grant_stays(node):
    await node.knows(pod("a", phase="Running"))
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_grant_and_files_of_deleted_pod_are_removed_in_one_pass(node):
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == set()
    assert not node.disk.files.ids()
    assert not node.disk.cdi.ids()
    assert not node.disk.store.ids()


async def test_deleted_pod_still_listed_by_kubelet_is_released_later(node):
    await node.knows()
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}
    node.clock.seconds += 61
    await node.reconciler.reconcile()
    assert node.grants == set()


async def test_returned_pod_restarts_its_waiting_time(node):
    await node.knows()
    await node.reconciler.reconcile()
    node.clock.seconds += 61
    await node.knows(pod("a"))
    await node.reconciler.reconcile()
    await node.knows()
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_grant_of_claim_stays_without_its_pod(node):
    """Another pod may use the claim; kubelet says when the last one has ended."""
    made = claim_grant("train", share(1, 10))
    await node.manager.commit(Planned(made, (), Preferences()), limits_of(made, FailPolicy.CLOSED), dict, inventory(), 16)
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {made.grant_id}


async def test_a_silent_kubelet_delays_the_release(node):
    await node.knows()
    node.pod_resources.listing = None
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_grant_of_deleted_pod_stays_while_driver_lists_its_process(node, isolation):
    of = replace(GRANT, isolation=isolation)
    node.manager.ledger = node.manager.ledger.adopting([of])
    process = HostProcess(10, (10,), 500, f"0::/kubepods/pod{of.pod_uid}/{'ab' * 32}\n")
    node.processes.there[10] = process
    node.driver.process_list = [GpuProcess("GPU-0", 10, 50 * MIB)]
    node.census.latest = await node.census.take()
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {of.grant_id}
    assert node.drifts() == [DriftKind.LOST_ROW, DriftKind.POD_GONE] if isolation is not Isolation.SHIM else [DriftKind.POD_GONE]
    node.processes.there[10] = replace(process, start_ticks=501)  # another has its pid by now
    await node.reconciler.reconcile()
    assert node.grants == set()


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_grant_of_deleted_pod_waits_for_first_driver_reading(node, isolation):
    """An agent that has just started knows processes only by the locks of the shim."""
    of = replace(GRANT, isolation=isolation)
    node.manager.ledger = node.manager.ledger.adopting([of])
    node.census.latest = Census(heard=False)
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == (set() if isolation is Isolation.SHIM else {of.grant_id})
    node.census.latest = await node.census.take()
    await node.reconciler.reconcile()
    assert node.grants == set()


async def test_the_metric_of_drift_names_the_container_until_it_is_cured(node):
    def series():
        (found,) = node.reconciler.families()
        assert found.name == "aliquot_container_drift"
        return [dict(zip(found.labels, labels, strict=True)) | {"value": value} for labels, value in found.samples]

    await node.knows(pod("a", phase="Running"))
    node.disk.cdi.remove(GRANT.grant_id)
    node.disk.store.remove(GRANT.grant_id)
    (node.disk.base / "state/ledger/stray").touch()
    await node.reconciler.reconcile()
    whose = {"node": "node-1", "namespace": "default", "pod": "a", "container": "main"}
    assert series() == [{**whose, "kind": kind, "value": 1} for kind in ("lost-row", "lost-spec")]
    await node.reconciler.reconcile()
    assert series() == []


async def test_limits_that_were_changed_behind_the_agents_back_are_put_right(node):
    def with_more(limits):
        return replace(limits, devices=tuple(replace(device, burst_bytes=8 * device.memory_bytes) for device in limits.devices))

    await node.knows(pod("a", phase="Running"))
    node.disk.files.amend_limits(GRANT.grant_id, with_more)
    await node.reconciler.reconcile()
    assert node.drifts() == [DriftKind.CHANGED_LIMITS]
    await node.reconciler.reconcile()
    assert node.drifts() == []
    assert node.disk.files.limits(GRANT.grant_id) == limits_of(GRANT, FailPolicy.CLOSED)


async def test_after_restart_limits_stay_as_found_whatever_settings_say(node):
    restarted = Harness(node.disk.base)
    restarted.manager.load(GRANT.boot_id)
    await restarted.manager.on_disk(lambda: restarted.disk.files.prepare(GRANT, limits_of(GRANT, FailPolicy.OPEN)))
    await restarted.knows(pod("a", phase="Running"))
    await restarted.reconciler.reconcile()
    assert restarted.drifts() == []
    restarted.disk.files.amend_limits(GRANT.grant_id, lambda limits: replace(limits, fail_open=False))
    await restarted.reconciler.reconcile()
    assert restarted.drifts() == [DriftKind.CHANGED_LIMITS]


@pytest.mark.parametrize(
    ("named", "drifts"),
    [
        (["MIG-1-0"], []),
        (["MIG-1-1"], [DriftKind.ASSIGNMENT_DIFFERS]),
        (["MIG-1-0", "MIG-1-1"], [DriftKind.ASSIGNMENT_DIFFERS]),
        (["MIG-1-0", "MIG-1-4"], []),
    ],
    ids=["the same", "another", "one more", "one of another profile"],
)
async def test_known_instances_are_compared_with_assignments(node, named, drifts):
    node.driver.answer = reading(gpu(0), gpu(1, mig=[instance(1, 0), instance(1, 1), instance(1, 4, profile="3g.40gb")]))
    await node.watch.poll()
    owner = pod("m", phase="Running", annotations=assigned("uid-m", main=[share(name) for name in named]))
    one = grant(frozenset({"MIG-1-0"}), share("MIG-1-0"), of=owner, resource=f"{contract.RESOURCE_MIG_PREFIX}1g.10gb")
    await node.manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, node.watch.inventory, 16)
    node.reconciler = node.make(assigned=True)
    await node.knows(pod("a", phase="Running"), owner)
    await node.reconciler.reconcile()
    assert node.drifts() == drifts


@pytest.fixture
def handed_on(node):
    """The region of the grant is open in another pod, with the lock that a process of the grant's pod took."""
    region, offset = node.disk.base / "run/containers" / GRANT.grant_id / "region", OWN_GEOMETRY.slot(0)
    with region.open("r+b") as file:
        file.seek(offset)
        file.write(SLOT_HEADER.pack(SLOT_LIVE, 7, 0, 0, 0))
        file.flush()
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, 0, offset, 1, 0))
        yield


def of_pod(pid: int, uid: str) -> HostProcess:
    return HostProcess(pid, (pid,), 500, f"0::/kubepods/pod{uid}/{'ab' * 32}\n")


@pytest.mark.usefixtures("handed_on")
async def test_lock_keeps_grant_of_deleted_pod_while_its_process_exists(node):
    node.processes.there = {7: of_pod(7, GRANT.pod_uid), 8: of_pod(8, "uid-accomplice")}
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    node.clock.seconds += 86400
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}
    del node.processes.there[7]
    await node.reconciler.reconcile()
    assert node.grants == set()


@pytest.mark.usefixtures("handed_on")
async def test_lock_keeps_grant_for_a_while_when_host_processes_are_hidden(node):
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}
    node.clock.seconds += CLAIMED_GRACE_SECONDS
    await node.reconciler.reconcile()
    assert node.grants == set()


@pytest.mark.timeout(60)
async def test_slow_region_does_not_delay_file_work(node, monkeypatch):
    looking, done, look = threading.Event(), threading.Event(), node.disk.files.region

    def takes_long(grant_id):
        looking.set()
        done.wait()
        return look(grant_id)

    monkeypatch.setattr(node.disk.files, "region", takes_long)
    await node.knows()
    node.pod_resources.listing = []
    passing = asyncio.ensure_future(node.reconciler.reconcile())
    await asyncio.to_thread(looking.wait)
    await node.manager.on_disk(lambda: None)
    assert not passing.done()
    done.set()
    await passing
    assert node.grants == set()


async def test_unreadable_region_does_not_prove_absence_of_processes(node):
    (node.disk.base / "run/containers" / GRANT.grant_id / "region").write_bytes(b"spoilt")
    node.census.latest = Census(heard=False)
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}
    node.census.latest = await node.census.take()
    await node.reconciler.reconcile()
    assert node.grants == set()


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_grant_of_deleted_pod_waits_while_its_gpu_is_silent(node, isolation):
    of = replace(GRANT, isolation=isolation)
    node.manager.ledger = node.manager.ledger.adopting([of])
    node.driver.unknown = frozenset({"GPU-0"})
    node.census.latest = await node.census.take()
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == (set() if isolation is Isolation.SHIM else {of.grant_id})
    node.driver.unknown = frozenset()
    node.census.latest = await node.census.take()
    await node.reconciler.reconcile()
    assert node.grants == set()


async def test_grant_of_deleted_pod_waits_while_its_gpu_is_silent_since_start(node):
    of = replace(GRANT, isolation=Isolation.EXCLUSIVE)
    node.manager.ledger = node.manager.ledger.adopting([of])
    node.driver.answer = reading(gpu(1), failed=(FailedDevice(0, None, "the driver does not answer in time"),))
    await node.watch.poll()
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {of.grant_id}
    node.driver.answer = reading(gpu(0), gpu(1))
    await node.watch.poll()
    await node.reconciler.reconcile()
    assert node.grants == set()


class TestFilesThatCannotBeRemoved:
    @pytest.fixture
    async def stuck(self, node, monkeypatch):
        """A node on which the first of two ended grants, and a stray before another, cannot be removed."""
        remove = node.disk.files.remove

        def failing(identifier):
            if identifier in (GRANT.grant_id, "0-stuck"):
                raise StorageError(f"removing {identifier}: device busy")
            remove(identifier)

        monkeypatch.setattr(node.disk.files, "remove", failing)
        other = grant(ids("0:1"), of=pod("b"))
        await node.manager.commit(Planned(other, (), Preferences()), limits_of(other, FailPolicy.CLOSED), dict, inventory(), 16)
        await node.knows()
        node.pod_resources.listing = []
        return node

    async def test_one_grant_that_stays_keeps_no_other(self, stuck, caplog):
        await stuck.reconciler.reconcile()
        assert stuck.grants == {GRANT.grant_id}
        assert "device busy" in caplog.text

    async def test_the_rest_of_the_pass_is_done_all_the_same(self, stuck):
        stuck.disk.cdi.write("stray", {})
        await stuck.reconciler.reconcile()
        assert stuck.disk.cdi.ids() == []
        assert stuck.drifts() == [DriftKind.STRAY_FILES]  # what is left of the grant is no drift, and is not written again
        assert stuck.rewritten == []
        assert stuck.reconciler.passed_at is not None

    async def test_it_goes_as_soon_as_it_can(self, stuck, monkeypatch):
        await stuck.reconciler.reconcile()
        monkeypatch.undo()
        await stuck.reconciler.reconcile()
        assert stuck.grants == set()

    async def test_one_stray_that_stays_keeps_no_other(self, stuck, caplog):
        for name in ("0-stuck", "stray"):
            stuck.disk.cdi.write(name, {})
            (stuck.disk.base / "run/containers" / name).mkdir()
        await stuck.reconciler.reconcile()
        assert set(stuck.disk.files.ids()) == {GRANT.grant_id, "0-stuck"}
        assert stuck.cured(DriftKind.STRAY_FILES, Cure.REMOVE) == 1


async def test_strays_are_swept_even_before_the_pods_are_known(node):
    node.disk.cdi.write("stray", {})
    await node.reconciler.reconcile()
    assert node.disk.cdi.ids() == [GRANT.grant_id]


async def test_the_end_of_a_pod_is_noticed_long_before_the_period(tmp_path, node):
    patient = node.make(3600)
    await node.knows(pod("a", phase="Running"))
    running = asyncio.ensure_future(patient.run())
    await until(lambda: patient.passed_at is not None)
    node.pod_resources.listing = []
    node.pods.pod_deleted(pod("a"))
    await until(lambda: not node.grants)
    running.cancel()


@pytest.mark.parametrize("lost", ["cdi/*.json", "state/ledger/*.json", "run/containers/*/limits"])
async def test_lost_file_is_noticed_early_and_cure_causes_no_extra_pass(node, lost):
    patient = node.make(3600)
    node.reconciler = patient
    await node.knows(pod("a", phase="Running"))
    running = asyncio.ensure_future(patient.run())
    await until(lambda: patient.passed_at is not None)
    (path,) = node.disk.base.glob(lost)
    path.unlink()
    node.clock.seconds += CALM_SECONDS  # between two passes
    cured_at = node.clock.seconds
    await until(lambda: patient.passed_at == cured_at)
    assert node.rewritten == [GRANT]
    assert path.exists()
    node.clock.seconds += CALM_SECONDS
    node.pods.pod_changes.notify()  # wakes it, to see whether it is due
    await asyncio.sleep(0.05)
    assert patient.passed_at == cured_at
    running.cancel()
    node.file_changes.close()


@pytest.mark.parametrize(
    ("pass_seconds", "next_seconds"),
    [
        pytest.param(4.0, 10.0, id="a period after it began"),
        pytest.param(30.0, 31.0, id="after a calm when it took longer than a period"),
    ],
)
async def test_a_pass_follows_the_one_before(node, monkeypatch, pass_seconds, next_seconds):
    patient, begun = node.make(10.0), []

    async def slow():
        begun.append(node.clock.seconds)
        node.clock.seconds += pass_seconds
        return node.pod_resources.listing

    monkeypatch.setattr(node.pod_resources, "held", slow)
    await node.knows(pod("a", phase="Running"))
    running = asyncio.ensure_future(patient.run())
    await until(lambda: patient.passed_at is not None)
    for seconds in (next_seconds - 0.1, next_seconds):
        assert len(begun) == 1
        node.clock.seconds = begun[0] + seconds
        node.pods.pod_changes.notify()  # wakes it, to see whether it is due
        await asyncio.sleep(0.05)
    await until(lambda: len(begun) == 2)
    running.cancel()
    node.file_changes.close()


async def test_a_gpu_that_goes_is_noticed_long_before_the_period(node):
    patient = node.reconciler = node.make(3600)
    await node.knows(pod("a", phase="Running"))
    await node.watch.poll()
    running = asyncio.ensure_future(patient.run())
    await until(lambda: patient.passed_at is not None)
    assert DriftKind.UNKNOWN_DEVICE not in node.drifts()
    node.watch.inventory = inventory(gpu(1))
    node.watch.changes.notify()
    node.clock.seconds += CALM_SECONDS
    await until(lambda: DriftKind.UNKNOWN_DEVICE in node.drifts())
    running.cancel()
    node.file_changes.close()


RUNNING = pod(
    "a",
    phase="Running",
    statuses=(ContainerStatus("main", ContainerState.RUNNING),),
    annotations=assigned("uid-a", main=[share(0)]),
)


async def lose_row(node: Harness) -> None:
    node.disk.store.remove(GRANT.grant_id)


async def lose_files(node: Harness) -> None:
    node.disk.files.remove(GRANT.grant_id)


async def change_limits(node: Harness) -> None:
    more = replace(GRANT, shares=(share(0, 101),))
    node.disk.files.prepare(GRANT, limits_of(more, FailPolicy.CLOSED))


async def lose_spec(node: Harness) -> None:
    node.disk.cdi.remove(GRANT.grant_id)


async def leave_stray(node: Harness) -> None:
    node.disk.cdi.write("stray", {})


async def delete_pod(node: Harness) -> None:
    await node.knows()


async def forget_ids(node: Harness) -> None:
    node.pod_resources.listing = []


async def list_other_ids(node: Harness) -> None:
    node.pod_resources.listing = [held(RUNNING, ids("0:7"))]


async def start_without_grant(node: Harness) -> None:
    await node.knows(RUNNING, replace(RUNNING, name="b", uid="uid-b", annotations={}))


async def lose_gpu(node: Harness) -> None:
    node.watch.inventory = inventory(gpu(1))


async def assign_another(node: Harness) -> None:
    await node.knows(replace(RUNNING, annotations=assigned("uid-a", main=[share(1)])))


async def damage_row_and_copy(node):
    """The next life of the agent finds neither row nor copy readable."""
    for path in (node.disk.base / f"state/ledger/{GRANT.grant_id}.json", node.disk.base / f"run/containers/{GRANT.grant_id}/grant.json"):
        path.write_bytes(b"torn")
    node.manager.ledger = node.manager.ledger.releasing([GRANT.grant_id])
    node.manager.load(GRANT.boot_id)


ON_NODE, ON_A, ON_B = ("node-1", "uid-n"), ("default", "a", "uid-a", "main"), ("default", "b", "uid-b", "main")
TOLD = {
    DriftKind.STRAY_FILES: (leave_stray, ON_NODE, "belong to no grant"),
    DriftKind.LOST_ROW: (lose_row, ON_A, "its row in the ledger on disk is missing"),
    DriftKind.LOST_FILES: (lose_files, ON_A, "its limits and usage region cannot be read"),
    DriftKind.CHANGED_LIMITS: (change_limits, ON_A, "its limits on disk differ from its grant"),
    DriftKind.LOST_SPEC: (lose_spec, ON_A, "its CDI spec is missing"),
    DriftKind.DAMAGED_GRANT: (damage_row_and_copy, ON_A, "its ledger row and the copy of it are damaged. It may run on GPU-0"),
    DriftKind.POD_GONE: (delete_pod, ON_NODE, "its pod is deleted"),
    DriftKind.UNLISTED: (forget_ids, ON_A, "kubelet no longer lists its devices"),
    DriftKind.IDS_DIFFER: (list_other_ids, ON_A, "kubelet lists it with other device IDs"),
    DriftKind.UNGRANTED: (start_without_grant, ON_B, "runs without a grant"),
    DriftKind.ASSIGNMENT_DIFFERS: (assign_another, ON_A, "its assignment names GPU-1"),
    DriftKind.UNKNOWN_DEVICE: (lose_gpu, ON_A, "this node no longer has GPU-0"),
}
"""What brings each kind about on the node of the one grant, which object the event is about, and what it says."""


class TestDrift:
    async def test_consistent_node_has_no_drift(self, node):
        await node.watch.poll()
        await node.knows(pod("a", phase="Running"))
        await node.reconciler.reconcile()
        assert node.drifts() == []
        assert node.telemetry.registry.get_sample_value("aliquot_drift", {"node": "node-1", "kind": "lost-spec"}) == 0
        assert not node.rewritten

    async def test_lost_spec_is_rewritten_and_reported_once(self, node):
        await node.knows(pod("a", phase="Running"))
        node.disk.cdi.remove(GRANT.grant_id)
        await node.reconciler.reconcile()
        assert node.drifts() == [DriftKind.LOST_SPEC]
        assert node.disk.cdi.ids() == [GRANT.grant_id]
        assert node.cured(DriftKind.LOST_SPEC, Cure.REWRITE) == 1
        await node.reconciler.reconcile()
        assert node.drifts() == []

    async def test_changed_spec_is_rewritten(self, node):
        await node.knows(pod("a", phase="Running"))
        node.disk.cdi.write(GRANT.grant_id, {"devices": "another's"})
        await node.reconciler.reconcile()
        assert node.drifts() == [DriftKind.LOST_SPEC]
        await node.reconciler.reconcile()
        assert node.drifts() == []

    async def test_a_cure_that_fails_is_tried_again(self, node, monkeypatch):
        await node.knows(pod("a", phase="Running"))
        node.disk.store.remove(GRANT.grant_id)
        write = node.disk.store.write

        def full(grants):
            return {one.grant_id: StorageError("no space left on device") for one in grants}

        monkeypatch.setattr(node.disk.store, "write", full)
        await node.reconciler.reconcile()
        assert node.cured(DriftKind.LOST_ROW, Cure.REWRITE) == 0
        monkeypatch.setattr(node.disk.store, "write", write)
        await node.reconciler.reconcile()
        assert node.disk.store.ids() == [GRANT.grant_id]

    async def test_strays_are_counted_as_they_are_swept(self, node):
        node.disk.cdi.write("stray", {})
        await node.reconciler.reconcile()
        assert node.cured(DriftKind.STRAY_FILES, Cure.REMOVE) == 1

    @pytest.mark.parametrize("kind", DriftKind)
    async def test_each_drift_is_event_on_its_pod_or_else_on_node(self, node, kind):
        breaks, about, words = TOLD[kind]
        await node.watch.poll()
        reconciler = node.make(assigned=True)
        node.pods.node_changed(NodeState("uid-n", {}, {}))
        await node.knows(RUNNING)
        await breaks(node)
        for _ in range(4):
            await reconciler.reconcile()
            node.clock.seconds += 0.1
        (event,) = await posted(node.events, node.api)
        assert (event.reason, event.warning) == (contract.EVENT_REASON_DRIFT, True)
        assert words in event.message
        if isinstance(event, PodEvent):
            assert about == (event.namespace, event.pod, event.pod_uid, event.container)
        else:
            assert about == (event.node, event.node_uid)

    async def test_pod_with_devices_forgotten_by_kubelet_gets_event_when_lasting(self, node):
        await node.knows(pod("a", phase="Running", statuses=(ContainerStatus("main", ContainerState.RUNNING),)))
        node.pod_resources.listing = []
        await node.reconciler.reconcile()
        node.clock.seconds += 0.1
        await node.reconciler.reconcile()
        assert await posted(node.events, node.api) == []
        node.clock.seconds += 0.1
        await node.reconciler.reconcile()
        await node.reconciler.reconcile()
        assert [event.reason for event in await posted(node.events, node.api)] == [contract.EVENT_REASON_DRIFT]
        assert node.api.evicted == []

    async def test_policy_evict_evicts_it_once(self, node):
        evicting = node.make(policy=DriftPolicy.EVICT)
        await node.knows(pod("a", phase="Running", statuses=(ContainerStatus("main", ContainerState.RUNNING),)))
        node.pod_resources.listing = []
        for _ in range(4):
            assert node.api.evicted == []
            await evicting.reconcile()
        node.clock.seconds += 0.2
        for _ in range(4):
            await evicting.reconcile()
        assert node.api.evicted == [("default", "a", "uid-a")]

    @pytest.mark.parametrize(
        ("unseen", "evicted"),
        [
            pytest.param({"failed": (FailedDevice(0, None, "lost"),)}, [], id="a GPU that has not answered since the start"),
            pytest.param({}, [("default", "a", "uid-a")], id="a GPU that is not there"),
        ],
    )
    async def test_grant_has_unknown_gpu_only_when_all_gpus_are_known(self, node, unseen, evicted):
        node.watch = DriverWatch(FakeDriver(reading(gpu(1), **unseen)), 1.0)
        await node.watch.poll()
        await reconciled_until_confirmed(node)
        assert node.api.evicted == evicted

    async def test_a_driver_that_stopped_answering_witnesses_no_loss(self, node):
        driver = FakeDriver(reading(gpu(1)))
        node.watch = DriverWatch(driver, 1.0)
        await node.watch.poll()
        driver.answer = DriverMissingError("no driver")
        await node.watch.poll()
        await reconciled_until_confirmed(node)
        assert node.api.evicted == []

    async def test_kubelet_listing_its_pods_again_in_time_causes_no_drift(self, node):
        evicting = node.make(policy=DriftPolicy.EVICT)
        await node.knows(pod("a", phase="Running", statuses=(ContainerStatus("main", ContainerState.RUNNING),)))
        listing = node.pod_resources.listing
        for _ in range(3):
            node.pod_resources.listing = []
            await evicting.reconcile()
            node.clock.seconds += 0.1
            node.pod_resources.listing = listing
            await evicting.reconcile()
            node.clock.seconds += 0.1
        assert node.api.evicted == []

    async def test_a_grant_that_is_being_written_is_no_drift(self, node, monkeypatch):
        await node.knows(pod("a", phase="Running"), pod("b", phase="Running"))
        other = grant(ids("0:1"), of=pod("b"))
        begun, go_on = asyncio.Event(), asyncio.Event()
        on_disk = node.manager.on_disk

        async def slow(work):
            begun.set()
            await go_on.wait()
            return await on_disk(work)

        monkeypatch.setattr(node.manager, "on_disk", slow)
        planned = Planned(other, (), Preferences())
        commit = asyncio.ensure_future(node.manager.commit(planned, limits_of(other, FailPolicy.CLOSED), dict, inventory(), 16))
        await begun.wait()
        looking = asyncio.ensure_future(node.reconciler.reconcile())
        await settle()
        go_on.set()
        await asyncio.gather(commit, looking)
        assert node.drifts() == []


class TestDamagedGrant:
    """A grant with a damaged row and copy stays while any source says that its container may run."""

    @pytest.fixture
    async def node(self, node):
        await node.watch.poll()
        await node.knows(RUNNING)
        await damage_row_and_copy(node)
        assert node.manager.ledger.unclear == {GRANT.grant_id: {"GPU-0"}}
        return node

    async def test_its_files_stay_and_its_gpu_is_closed(self, node):
        await node.reconciler.reconcile()
        assert node.drifts() == [DriftKind.DAMAGED_GRANT]
        assert node.disk.files.ids() == [GRANT.grant_id]
        assert node.disk.cdi.ids() == [GRANT.grant_id]
        states = node.manager.ledger.states(node.watch.inventory, 16)
        assert [state.cordoned for state in states] == [True, False]

    async def test_it_ends_when_its_pod_is_gone(self, node):
        node.pod_resources.listing = []
        await node.knows()
        await node.reconciler.reconcile()
        assert node.manager.ledger.unclear == {}
        await node.reconciler.reconcile()
        assert (node.disk.files.ids(), node.disk.cdi.ids(), node.drifts()) == ([], [], [])

    async def test_it_ends_when_kubelet_still_lists_an_ended_pod(self, node):
        await node.knows()
        await node.reconciler.reconcile()
        assert node.manager.ledger.unclear == {}

    async def test_it_stays_while_kubelet_does_not_answer(self, node):
        node.pod_resources.listing = None
        await node.knows()
        await node.reconciler.reconcile()
        assert node.manager.ledger.unclear

    async def test_it_stays_while_an_ungranted_container_runs(self, node):
        """A kubelet that lost its checkpoint lists nothing."""
        node.pod_resources.listing = []
        await node.reconciler.reconcile()
        assert node.manager.ledger.unclear

    async def test_it_stays_while_a_pod_uses_a_claim_without_known_grant(self, node):
        """Kubelet lists no claims, and calls Prepare only once."""
        node.pod_resources.listing = []
        await node.knows(user("claimant", "train"))
        await node.reconciler.reconcile()
        assert node.manager.ledger.unclear
        await node.knows(user("claimant", "train", phase="Succeeded"))
        await node.reconciler.reconcile()
        assert node.manager.ledger.unclear == {}

    @pytest.mark.usefixtures("handed_on")
    async def test_it_stays_while_a_process_locks_its_region(self, node):
        node.pod_resources.listing = []
        await node.knows()
        await node.reconciler.reconcile()
        assert node.manager.ledger.unclear
