import asyncio
import fcntl
import struct
import threading
from dataclasses import replace

import pytest

from agent.adapters.directory_watch import DirectoryWatch
from agent.core.drift import Cure, DriftKind, DriftPolicy
from agent.core.inventory import FailedDevice
from agent.core.ledger import Grant
from agent.core.limits import FailPolicy, limits_of
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.planning import Planned
from agent.core.reconciliation import CLAIMED_GRACE_SECONDS
from agent.core.region_layout import OWN_GEOMETRY, SLOT_HEADER, SLOT_LIVE
from agent.errors import DriverMissingError, StorageError
from agent.ports import NodeState, PodEvent
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.evictor import Evictor
from agent.services.liveness import Liveness
from agent.services.pod_cache import PodCache
from agent.services.process_census import Census, ProcessCensus
from agent.services.reconciler import CALM_SECONDS, Reconciler, ReconcilerOptions
from agent.services.telemetry import Telemetry
from proto import contract
from proto.model import ContainerState, ContainerStatus, Isolation, Preferences
from proto.units import MIB
from tests.unit.agent.builders import VGPU, assigned, board, gpu, grant, held, ids, instance, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, FakeKubeApi, FakePodResources, FakeProcesses, posted, settle, until

GRANT = grant(ids("0:0"), of=pod("a"))


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.book = self.disk.book()
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
        return Reconciler(
            ReconcilerOptions("node-1", period_seconds, assigned, policy),
            book=self.book, pods=self.pods, pod_resources=self.pod_resources,
            liveness=Liveness(
                book=self.book, files=self.disk.files, census=self.census, processes=self.processes, watch=self.watch
            ),
            file_changes=self.file_changes, watch=self.watch,
            resources=lambda: {VGPU}, rewrite=self.rewrite, evictor=Evictor(self.api, self.clock), events=self.events,
            telemetry=self.telemetry, clock=self.clock,
        )  # fmt: skip

    async def rewrite(self, grant: Grant) -> None:
        self.rewritten.append(grant)
        await self.book.rewrite(grant, limits_of(grant, FailPolicy.CLOSED), dict)

    def drifts(self) -> list[DriftKind]:
        return [one.drift.kind for one in self.reconciler.standing]

    def cured(self, kind: DriftKind, cure: Cure) -> float:
        return self.telemetry.registry.get_sample_value("aliquot_drift_cures_total", {"kind": kind, "cure": cure}) or 0.0

    async def knows(self, *pods) -> None:
        self.pods.pods_listed(pods)
        await settle()

    @property
    def grants(self) -> set[str]:
        return set(self.book.ledger.grants)


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
    await harness.book.commit(Planned(GRANT, (), Preferences()), limits_of(GRANT, FailPolicy.CLOSED), dict, board(), 16)
    return harness


async def test_before_the_pods_are_known_nothing_is_released(node):
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_a_running_pods_grant_stays(node):
    await node.knows(pod("a", phase="Running"))
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_a_gone_pods_grant_and_files_go_in_one_pass(node):
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == set()
    assert not node.disk.files.ids()
    assert not node.disk.cdi.ids()
    assert not node.disk.store.ids()


async def test_a_deleted_pod_kubelet_still_lists_is_released_after_a_while(node):
    await node.knows()
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}
    node.clock.seconds += 61
    await node.reconciler.reconcile()
    assert node.grants == set()


async def test_a_pod_that_came_back_starts_its_time_anew(node):
    await node.knows()
    await node.reconciler.reconcile()
    node.clock.seconds += 61
    await node.knows(pod("a"))
    await node.reconciler.reconcile()
    await node.knows()
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_a_silent_kubelet_delays_the_release(node):
    await node.knows()
    node.pod_resources.listing = None
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_a_gone_pods_grant_stays_while_the_driver_lists_a_process_of_it(node, isolation):
    of = replace(GRANT, isolation=isolation)
    node.book.ledger = node.book.ledger.adopting([of])
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
async def test_a_gone_pods_grant_waits_for_the_first_word_of_the_driver(node, isolation):
    """An agent that has just started knows nothing of processes, but by the locks of the shim."""
    of = replace(GRANT, isolation=isolation)
    node.book.ledger = node.book.ledger.adopting([of])
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


async def test_after_a_restart_limits_are_what_they_are_found_to_be_whatever_the_settings_say_by_now(node):
    restarted = Harness(node.disk.base)
    restarted.book.load(GRANT.boot_id)
    await restarted.book.on_disk(lambda: restarted.disk.files.prepare(GRANT, limits_of(GRANT, FailPolicy.OPEN)))
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
async def test_the_instances_of_the_board_are_compared_with_assignments(node, named, drifts):
    node.driver.answer = reading(gpu(0), gpu(1, mig=[instance(1, 0), instance(1, 1), instance(1, 4, profile="3g.40gb")]))
    await node.watch.poll()
    owner = pod("m", phase="Running", annotations=assigned("uid-m", main=[share(name) for name in named]))
    one = grant(frozenset({"MIG-1-0"}), share("MIG-1-0"), of=owner, resource=f"{contract.RESOURCE_MIG_PREFIX}1g.10gb")
    await node.book.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, node.watch.board, 16)
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
async def test_a_lock_keeps_a_gone_pods_grant_while_a_process_of_that_pod_is_there(node):
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
async def test_where_the_hosts_processes_are_not_seen_a_lock_keeps_a_gone_pods_grant_for_a_while(node):
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}
    node.clock.seconds += CLAIMED_GRACE_SECONDS
    await node.reconciler.reconcile()
    assert node.grants == set()


@pytest.mark.timeout(60)
async def test_a_region_that_takes_long_to_look_at_holds_up_no_file_work(node, monkeypatch):
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
    await node.book.on_disk(lambda: None)
    assert not passing.done()
    done.set()
    await passing
    assert node.grants == set()


async def test_a_region_that_tells_nothing_is_no_word_that_nobody_runs(node):
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
async def test_a_gone_pods_grant_waits_while_its_gpu_does_not_tell(node, isolation):
    of = replace(GRANT, isolation=isolation)
    node.book.ledger = node.book.ledger.adopting([of])
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


async def test_a_gone_pods_grant_waits_while_its_gpu_may_be_one_that_has_not_answered_since_the_agent_started(node):
    of = replace(GRANT, isolation=Isolation.EXCLUSIVE)
    node.book.ledger = node.book.ledger.adopting([of])
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
        await node.book.commit(Planned(other, (), Preferences()), limits_of(other, FailPolicy.CLOSED), dict, board(), 16)
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
async def test_a_lost_file_is_noticed_long_before_the_period_and_its_cure_brings_no_further_pass(node, lost):
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
    node.watch.board = board(gpu(1))
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
    node.watch.board = board(gpu(1))


async def assign_another(node: Harness) -> None:
    await node.knows(replace(RUNNING, annotations=assigned("uid-a", main=[share(1)])))


ON_NODE, ON_A, ON_B = ("node-1", "uid-n"), ("default", "a", "uid-a", "main"), ("default", "b", "uid-b", "main")
TOLD = {
    DriftKind.STRAY_FILES: (leave_stray, ON_NODE, "belong to no grant"),
    DriftKind.LOST_ROW: (lose_row, ON_A, "its row in the ledger on disk is gone"),
    DriftKind.LOST_FILES: (lose_files, ON_A, "its limits and usage region cannot be read"),
    DriftKind.CHANGED_LIMITS: (change_limits, ON_A, "its limits on disk are not what it was granted"),
    DriftKind.LOST_SPEC: (lose_spec, ON_A, "its CDI spec is gone"),
    DriftKind.POD_GONE: (delete_pod, ON_NODE, "its pod is gone"),
    DriftKind.UNLISTED: (forget_ids, ON_A, "kubelet has forgotten its devices"),
    DriftKind.IDS_DIFFER: (list_other_ids, ON_A, "kubelet lists it with other device IDs"),
    DriftKind.UNGRANTED: (start_without_grant, ON_B, "no grant is known for it"),
    DriftKind.ASSIGNMENT_DIFFERS: (assign_another, ON_A, "its assignment names GPU-1"),
    DriftKind.UNKNOWN_DEVICE: (lose_gpu, ON_A, "this node no longer has GPU-0"),
}
"""What brings each kind about on the node of the one grant, which object the event is about, and what it says."""


class TestDrift:
    async def test_a_node_on_which_all_agree_has_none(self, node):
        await node.watch.poll()
        await node.knows(pod("a", phase="Running"))
        await node.reconciler.reconcile()
        assert node.drifts() == []
        assert node.telemetry.registry.get_sample_value("aliquot_drift", {"node": "node-1", "kind": "lost-spec"}) == 0
        assert not node.rewritten

    async def test_a_lost_spec_is_written_again_and_told_once(self, node):
        await node.knows(pod("a", phase="Running"))
        node.disk.cdi.remove(GRANT.grant_id)
        await node.reconciler.reconcile()
        assert node.drifts() == [DriftKind.LOST_SPEC]
        assert node.disk.cdi.ids() == [GRANT.grant_id]
        assert node.cured(DriftKind.LOST_SPEC, Cure.REWRITE) == 1
        await node.reconciler.reconcile()
        assert node.drifts() == []

    async def test_a_spec_that_somebody_changed_is_written_again(self, node):
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

        def full(_):
            raise StorageError("no space left on device")

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
    async def test_each_kind_is_told_once_on_the_pod_that_has_it_and_on_the_node_where_there_is_none(self, node, kind):
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
        of_pod = isinstance(event, PodEvent)
        assert about == ((event.namespace, event.pod, event.pod_uid, event.container) if of_pod else (event.node, event.node_uid))

    async def test_a_pod_whose_devices_kubelet_forgot_is_told_so_when_that_lasts(self, node):
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

    async def test_where_the_policy_says_so_it_is_evicted_once(self, node):
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
    async def test_a_grant_is_of_an_unknown_gpu_only_when_all_gpus_are_known(self, node, unseen, evicted):
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

    async def test_a_kubelet_that_lists_its_pods_again_in_time_has_forgotten_none(self, node):
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
        on_disk = node.book.on_disk

        async def slow(work):
            begun.set()
            await go_on.wait()
            return await on_disk(work)

        monkeypatch.setattr(node.book, "on_disk", slow)
        planned = Planned(other, (), Preferences())
        commit = asyncio.ensure_future(node.book.commit(planned, limits_of(other, FailPolicy.CLOSED), dict, board(), 16))
        await begun.wait()
        looking = asyncio.ensure_future(node.reconciler.reconcile())
        await settle()
        go_on.set()
        await asyncio.gather(commit, looking)
        assert node.drifts() == []
