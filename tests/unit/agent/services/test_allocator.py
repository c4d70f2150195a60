# SPDX-License-Identifier: Apache-2.0
import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import pytest

from agent.adapters.pod_resources import KubeletPodResources
from agent.core.cdi import Interposition
from agent.core.identity import RememberedDevices
from agent.core.injection import Answer, DeviceInjection
from agent.core.limits import FailPolicy
from agent.core.refusal import Reason, Refusal
from agent.core.region_layout import decode_limits
from agent.errors import KubeletBusyError, ShimError
from agent.ports.kube import NodeState
from agent.services.admissions import Admissions
from agent.services.allocator import Allocator, AllocatorOptions
from agent.services.container_finder import ContainerFinder
from agent.services.device_plugin import response_of
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.grant_contents import ContentsOptions, GrantContents
from agent.services.liveness import Liveness
from agent.services.pod_cache import PodCache
from agent.services.process_census import ProcessCensus
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from agent.services.telemetry import Telemetry
from aliquot import contract
from aliquot.contract.model import ContainerSpec, ContainerState, ContainerStatus, Policy
from aliquot.contract.units import MIB
from aliquot.placement import request
from aliquot.placement.fit import Reject
from aliquot_lab.standin.devices import Allocation, DeviceTable
from aliquot_lab.standin.podresources import PodResourcesServer
from aliquot_lab.standin.pods import Container, PodSpec, Role
from tests.unit.agent.adapters.test_files import SlotHolder
from tests.unit.agent.builders import BOOT, SECRET, VGPU, assigned, gpu, held, ids, limits, pod, reading, share
from tests.unit.agent.fakes import (
    Disk,
    FakeClock,
    FakeDriver,
    FakeKubeApi,
    FakeKubeletCheckpoint,
    FakePodResources,
    FakeProcesses,
    FakeShim,
    make_injection,
    posted,
    posted_on_pods,
    settle,
)
from tests.unit.agent.partitions import make_backends

APP = Container("main", Role.APP, (), (), ())
PAGES = {"priority_page": "/run/aliquot/priority/page"}


class Harness:
    """An allocator over fakes of everything but the files."""

    def __init__(
        self,
        base: Path,
        policy: Policy | None = None,
        backends=make_backends,
        *,
        injection=DeviceInjection.CDI,
        pod_resources=None,
        disk=None,
        **options,
    ) -> None:
        self.disk = disk or Disk(base)
        self.driver = FakeDriver(reading(gpu(0), gpu(1)))
        self.watch = DriverWatch(self.driver, 1.0)
        self.pods = PodCache()
        self.cordon_known = True
        self.manager = self.disk.manager()
        self.pod_resources = pod_resources or FakePodResources()
        self.checkpoint = FakeKubeletCheckpoint()
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, FakeClock())
        self.telemetry = Telemetry()
        self.shim = FakeShim(base / "shim")
        self.clock = FakeClock()
        self.processes = FakeProcesses()
        self.census = ProcessCensus(60.0, driver=self.driver, processes=self.processes)
        self.liveness = Liveness(
            manager=self.manager, files=self.disk.files, census=self.census, processes=self.processes, watch=self.watch
        )
        self.injection = make_injection(self.manager, self.disk, self.pods, self.watch, injection)
        secret, shares = options.pop("secret", SECRET), options.pop("shares_per_gpu", 16)
        pod_wait_seconds, pages = options.pop("pod_wait_seconds", 0.05), {**PAGES, **options}
        self.state = AgentState(self.watch, self.pods, self.manager)
        self.finder = ContainerFinder(
            pod_wait_seconds, state=self.state, pod_resources=self.pod_resources, checkpoint=self.checkpoint,
            injection=self.injection, clock=self.clock, cordon_known=lambda: self.cordon_known,
        )  # fmt: skip
        self.contents = GrantContents(
            ContentsOptions(Interposition.FRONT, FailPolicy.CLOSED, **pages), manager=self.manager, files=self.disk.files,
            cdi=self.disk.cdi, shim=self.shim, context_bytes={"GPU-0": 0, "GPU-1": 500 * MIB}.__getitem__,
        )  # fmt: skip
        self.allocator = Allocator(
            AllocatorOptions(secret, BOOT, shares, policy), state=self.state, finder=self.finder, contents=self.contents,
            backends=backends(self.manager), liveness=self.liveness,
            reporting=Reporting(self.events, self.telemetry),
        )  # fmt: skip
        static = base / "etc-cdi"
        static.mkdir(exist_ok=True)
        devices = [{"name": f"GPU-{minor}", "containerEdits": {"env": [f"D{minor}=1"]}} for minor in range(2)]
        mounts = [{"hostPath": "/host/libcuda.so.580", "containerPath": "/usr/lib/libcuda.so.580"}]
        spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": {"mounts": mounts}}
        (static / "nvidia.json").write_bytes(msgspec.json.encode(spec))

    async def ready(self, *pods) -> Self:
        await self.watch.poll()
        self.pods.pods_listed(pods)
        await settle()
        return self

    async def start(self, one, device_ids, container="main", resource=VGPU) -> Refusal | None:
        """Let kubelet hold the IDs for the container and start it."""
        self.pod_resources.listing = [
            entry for entry in self.pod_resources.listing or [] if (entry.pod, entry.container) != (one.name, container)
        ]
        self.pod_resources.listing.append(held(one, device_ids, container=container, resource=resource))
        return await self.allocator.prestart(resource, device_ids)

    def spec(self, device_ids) -> dict:
        path = self.disk.base / "cdi" / f"{contract.CDI_FILE_PREFIX}{self.allocator.grant_id(VGPU, device_ids)}.json"
        return msgspec.json.decode(path.read_bytes())["devices"][0]["containerEdits"]

    def limits(self, device_ids):
        return decode_limits(Path(self.disk.files.paths(self.allocator.grant_id(VGPU, device_ids))[0]).read_bytes())

    def refusals(self, reason: str) -> float:
        return self.telemetry.registry.get_sample_value("aliquot_refusals_total", {"reason": reason}) or 0.0


def placed(name: str = "train", *shares, **settings):
    one = pod(name, **settings)
    return replace(one, annotations=assigned(one.uid, main=shares or [share(1)]))


@pytest.fixture
async def node(tmp_path):
    return Harness(tmp_path)


async def test_a_container_gets_spec_limits_and_ledger_row(node):
    await node.ready(placed())
    assert await node.start(placed(), ids("0:3")) is None
    assert "D1=1" in node.spec(ids("0:3"))["env"]
    assert [(limit.uuid, limit.memory_bytes) for limit in node.limits(ids("0:3")).devices] == [("GPU-1", 100 * MIB)]
    assert [grant.pod_uid for grant in node.manager.ledger.grants.values()] == ["uid-train"]


async def test_asking_again_changes_nothing(node):
    await node.ready(placed())
    await node.start(placed(), ids("0:3"))
    before = (node.manager.ledger, node.spec(ids("0:3")))
    assert await node.start(placed(), ids("0:3")) is None
    assert (node.manager.ledger, node.spec(ids("0:3"))) == before


@pytest.fixture
def parses(monkeypatch):
    """Counts how often the request of a pod is parsed."""
    counted = []

    def count(annotations):
        counted.append(annotations)
        return parse(annotations)

    parse = request.pod_preferences
    monkeypatch.setattr(request, "pod_preferences", count)
    return counted


@pytest.mark.parametrize("policy", [None, Policy.BINPACK], ids=["assigned", "local"])
async def test_prestart_parses_request_once(tmp_path, parses, policy):
    node = await Harness(tmp_path, policy).ready(placed())
    assert await node.start(placed(), ids("0:3")) is None
    assert len(parses) == 1
    assert await node.start(placed(), ids("0:3")) is None
    assert len(parses) == 2


async def test_prestart_with_capped_burst_parses_request_once(node, parses):
    one = replace(placed(), annotations={**placed().annotations, contract.ANNOTATION_MEMORY_BURST: "1.5"})
    await node.ready(one)
    refusal = await node.start(one, ids("0:3"))
    assert refusal is not None
    assert refusal.reason is Reason.ISOLATION_UNAVAILABLE
    assert len(parses) == 1


async def test_refused_request_is_parsed_once(node, parses):
    one = replace(placed(), annotations={**placed().annotations, contract.ANNOTATION_PRIORITY: "highest"})
    await node.ready(one)
    refusal = await node.start(one, ids("0:3"))
    assert refusal is not None
    assert refusal.reason is Reason.REQUEST_INVALID
    assert len(parses) == 1


async def test_rewrite_parses_request_once(node, parses):
    await node.ready(placed())
    await node.start(placed(), ids("0:3"))
    parses.clear()
    (granted,) = node.manager.ledger.grants.values()
    await node.allocator.rewrite(granted)
    assert len(parses) == 1


async def test_ids_of_deleted_pod_are_reused_only_after_its_processes_end(node):
    await node.ready(placed("gone"))
    assert await node.start(placed("gone"), ids("0:3")) is None
    before = node.manager.ledger
    process = SlotHolder(Path(node.disk.files.paths(node.allocator.grant_id(VGPU, ids("0:3")))[1]))
    try:
        await node.ready(placed("next"))
        node.pod_resources.listing = []
        refusal = await node.start(placed("next"), ids("0:3"))
        assert refusal is not None
        assert refusal.reason is Reason.IDS_HELD
        assert node.manager.ledger == before
    finally:
        process.kill()
    assert await node.start(placed("next"), ids("0:3")) is None
    assert [grant.pod for grant in node.manager.ledger.grants.values()] == ["next"]


async def test_many_containers_may_start_at_once_and_never_pass_a_device(tmp_path):
    node = await Harness(tmp_path, Policy.BINPACK).ready(*(pod(f"p{number}") for number in range(30)))
    starts = [node.start(pod(f"p{number}"), ids(f"{number % 2}:{number}")) for number in range(30)]
    outcomes = await asyncio.gather(*starts)
    assert sum(outcome is None for outcome in outcomes) == 20
    assert {outcome.reason for outcome in outcomes if outcome is not None} == {Reject.MEMORY}
    assert len(node.manager.ledger.grants) == 20


async def test_refusal_is_counted_and_reported_to_pod_owner(node):
    await node.ready(pod())
    refusal = await node.start(pod(), ids("0:0"))
    assert refusal is not None
    assert refusal.reason is Reason.ASSIGNMENT_MISSING
    assert node.refusals("assignment-missing") == 1
    reported = await posted_on_pods(node.events, node.api)
    assert [(event.pod, event.reason, event.warning) for event in reported] == [("train", contract.EVENT_REASON_REFUSED, True)]


async def test_a_pod_that_appears_late_is_waited_for(tmp_path):
    node = await Harness(tmp_path, pod_wait_seconds=60).ready()
    starting = asyncio.ensure_future(node.start(placed(), ids("0:0")))
    await asyncio.sleep(0.02)
    assert not starting.done()
    node.pods.pod_changed(placed())
    assert await asyncio.wait_for(starting, 30) is None


async def test_a_pod_that_never_appears_is_refused_by_name(node):
    await node.ready()
    refusal = await node.start(placed(), ids("0:0"))
    assert refusal is not None
    assert refusal.reason is Reason.POD_MISSING
    assert "default/train" in refusal.message


async def test_deleted_pod_is_not_mistaken_for_successor(node):
    await node.ready(placed(deleting=True))
    refusal = await node.start(placed(), ids("0:0"))
    assert refusal is not None
    assert refusal.reason is Reason.POD_MISSING


async def test_until_cordons_are_known_containers_restart_and_new_ones_wait(node):
    old, new = placed("old"), placed("new")
    await node.ready(old, new)
    assert await node.start(old, ids("1:0")) is None
    node.cordon_known = False
    assert await node.start(old, ids("1:0")) is None
    refusal = await node.start(new, ids("1:1"))
    assert refusal.reason is Reason.NOT_READY
    assert "has not returned gpunodes" in refusal.message
    node.cordon_known = True
    assert await node.start(new, ids("1:1")) is None


async def test_during_an_api_outage_containers_restart_and_new_ones_wait(node):
    await node.ready(placed(), placed("new"))
    await node.start(placed(), ids("0:0"))
    node.pods.api_trouble("pods", "connection refused")
    await settle()
    assert await node.start(placed(), ids("0:0")) is None
    refusal = await node.start(placed("new"), ids("0:1"))
    assert refusal is not None
    assert "connection refused" in refusal.message


async def test_a_silent_kubelet_is_a_reason_to_retry(node):
    await node.ready(placed())
    node.pod_resources.listing = None
    refusal = await node.allocator.prestart(VGPU, ids("0:0"))
    assert refusal is not None
    assert refusal.reason is Reason.NODE_FAILURE


async def test_burst_of_starts_keeps_kubelet_call_limit_without_refusals(tmp_path):
    starting = [PodSpec("default", f"p{number}", f"uid-p{number}", (APP,), "Always", 0) for number in range(32)]
    of_pods = [ids(f"{number % 2}:{number}") for number in range(32)]
    table = DeviceTable(allocations=[Allocation(one.uid, "main", VGPU, tuple(of_pods[at]), b"") for at, one in enumerate(starting)])
    time = FakeClock()
    kubelet = PodResourcesServer(tmp_path / "pr.sock", lambda: table, lambda: starting, time.monotonic)
    await kubelet.start()
    resources = KubeletPodResources(kubelet.socket)
    small = [pod(one.name, ContainerSpec("main", limits(1, 10))) for one in starting]
    try:
        node = await Harness(tmp_path, Policy.BINPACK, pod_resources=Admissions(resources, FakeKubeletCheckpoint(), time.monotonic)).ready(
            *small
        )
        starts = asyncio.gather(*(node.allocator.prestart(VGPU, one) for one in of_pods))
        assert await asyncio.wait_for(starts, 60) == [None] * 32
        with pytest.raises(KubeletBusyError):  # another client, such as a monitoring agent, leaves nothing
            await asyncio.gather(*(resources.held() for _ in range(11)))
        once_more = asyncio.ensure_future(node.allocator.prestart(VGPU, of_pods[0]))
        await asyncio.sleep(0.1)
        assert not once_more.done()
        time.seconds += 1
        assert await asyncio.wait_for(once_more, 60) is None
    finally:
        await resources.close()
        await kubelet.stop()


async def test_a_kubelet_that_stays_busy_is_a_reason_to_retry(tmp_path):
    class Busy(FakePodResources):
        async def held(self):
            harness.clock.seconds += 1
            raise KubeletBusyError("rejected by rate limit")

    harness = Harness(tmp_path, pod_resources=Busy())
    node = await harness.ready(placed())
    refusal = await node.allocator.prestart(VGPU, ids("0:0"))
    assert refusal is not None
    assert refusal.reason is Reason.NODE_FAILURE


async def test_unheld_ids_are_refused_after_short_wait(node):
    await node.ready(placed())

    async def time_passes():
        await asyncio.sleep(0.01)
        node.clock.seconds += 10

    refusal, _ = await asyncio.gather(node.allocator.prestart(VGPU, ids("0:0")), time_passes())
    assert refusal is not None
    assert refusal.reason is Reason.UNKNOWN_HOLDER


async def test_before_the_driver_answers_nothing_is_granted(node):
    refusal = await node.allocator.prestart(VGPU, ids("0:0"))
    assert refusal is not None
    assert refusal.reason is Reason.NOT_READY


async def test_without_the_shim_nothing_is_granted(node, monkeypatch):
    await node.ready(placed())

    def missing():
        raise ShimError("the shim's libcuda.so.1 cannot be read")

    monkeypatch.setattr(node.shim, "installed", missing)
    refusal = await node.start(placed(), ids("0:0"))
    assert refusal is not None
    assert "libcuda.so.1" in refusal.message
    assert not node.manager.ledger.grants


async def test_missing_device_in_host_spec_is_named_and_promise_kept_for_retry(node):
    await node.ready(placed())
    path = node.disk.base / "etc-cdi/nvidia.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"GPU-1", b"GPU-7"))
    refusal = await node.start(placed(), ids("0:0"))
    assert refusal is not None
    assert str(path) in refusal.message
    path.write_bytes(whole)
    assert await node.start(placed(), ids("0:0")) is None


async def test_without_a_host_spec_the_preload_library_is_used(node):
    (node.disk.base / "etc-cdi/nvidia.json").unlink()
    await node.ready(placed())
    assert await node.start(placed(), ids("0:0")) is None
    edits = node.spec(ids("0:0"))
    assert "/etc/ld.so.preload" in {mount["containerPath"] for mount in edits["mounts"]}
    assert {"path": "/dev/nvidia1"} in edits["deviceNodes"]


async def test_driver_left_to_nvidia_runtime_is_in_pod_event_and_counted(tmp_path):
    with_spec, without = Harness(tmp_path / "a"), Harness(tmp_path / "b")
    (without.disk.base / "etc-cdi/nvidia.json").unlink()
    for node, reported in ((with_spec, False), (without, True)):
        await node.ready(placed())
        await node.start(placed(), ids("0:0"))
        (event,) = await posted(node.events, node.api)
        assert ("left to NVIDIA's container runtime" in event.message) is reported
        assert node.telemetry.registry.get_sample_value("aliquot_grants_without_host_spec_total") == reported


async def test_an_init_container_hands_its_share_on(node):
    one = pod("a", ContainerSpec("init", limits(1, 900), init=True), ContainerSpec("main", limits(2, 1800)))
    one = replace(one, annotations=assigned(one.uid, init=[share(0, 900)], main=[share(0, 900), share(1, 900)]))
    await node.ready(one)
    node.pod_resources.listing = [held(one, ids("0:0", "1:0"))]
    assert await node.allocator.prestart(VGPU, ids("0:0")) is None
    assert [grant.container for grant in node.manager.ledger.grants.values()] == ["init"]
    assert await node.allocator.prestart(VGPU, ids("0:0", "1:0")) is None
    assert [grant.container for grant in node.manager.ledger.grants.values()] == ["main"]
    assert len(node.disk.cdi.ids()) == 1


async def test_what_a_context_was_measured_to_cost_is_in_the_limits(node):
    await node.ready(placed())
    await node.start(placed(), ids("0:0"))
    assert node.limits(ids("0:0")).devices[0].context_bytes == 500 * MIB


@pytest.mark.parametrize(("priority", "access", "sign"), [("high", "rw", 1), ("low", "ro", -1)])
async def test_pod_with_priority_has_node_page_and_device_line(node, priority, access, sign):
    one = placed()
    one = replace(one, annotations={**one.annotations, contract.ANNOTATION_PRIORITY: priority})
    await node.ready(one)
    assert await node.start(one, ids("0:0")) is None
    (mount,) = [mount for mount in node.spec(ids("0:0"))["mounts"] if mount["containerPath"] == contract.CONTAINER_PRIORITY]
    assert mount["hostPath"] == "/run/aliquot/priority/page"
    assert mount["options"][0] == access
    limit = node.limits(ids("0:0")).devices[0]
    assert (limit.priority, limit.priority_line) == (sign, 2)


async def test_a_pod_without_a_priority_has_no_page(node):
    await node.ready(placed())
    await node.start(placed(), ids("0:0"))
    assert contract.CONTAINER_PRIORITY not in {mount["containerPath"] for mount in node.spec(ids("0:0"))["mounts"]}
    assert node.limits(ids("0:0")).devices[0].priority_line == 0


@pytest.mark.parametrize("paused", ["true", "false"])
async def test_container_of_paused_pod_starts_paused_with_event(node, paused):
    one = placed()
    one = replace(one, annotations={**one.annotations, contract.ANNOTATION_PAUSED: paused})
    await node.ready(one)
    assert await node.start(one, ids("0:0")) is None
    assert node.limits(ids("0:0")).devices[0].paused is (paused == "true")
    (event,) = await posted(node.events, node.api)
    assert ("starts paused" in event.message) is (paused == "true")


async def test_only_a_container_that_may_burst_has_the_nodes_page_of_turns(tmp_path):
    may_burst = partial(make_backends, most_memory_burst=2.0)
    node = Harness(tmp_path, backends=may_burst, turns_page="/run/aliquot/turns/page")
    plain, bursting = placed("plain"), placed("bursting")
    bursting = replace(bursting, annotations={**bursting.annotations, contract.ANNOTATION_MEMORY_BURST: "1.5"})
    await node.ready(plain, bursting)
    for one, device_ids in ((plain, ids("0:0")), (bursting, ids("0:1"))):
        assert await node.start(one, device_ids) is None
    mounts = {mount["containerPath"]: mount for mount in node.spec(ids("0:1"))["mounts"]}
    assert mounts[contract.CONTAINER_TURNS]["hostPath"] == "/run/aliquot/turns/page"
    assert mounts[contract.CONTAINER_TURNS]["options"][0] == "rw"
    assert node.limits(ids("0:1")).devices[0].burst_bytes == 150 * MIB
    assert contract.CONTAINER_TURNS not in {mount["containerPath"] for mount in node.spec(ids("0:0"))["mounts"]}


async def test_after_settings_were_lowered_containers_restart_within_them(tmp_path, caplog):
    pods = [placed(name) for name in ("a", "b")]
    pods = [replace(one, annotations={**one.annotations, contract.ANNOTATION_MEMORY_BURST: "1.5"}) for one in pods]
    node = await Harness(tmp_path, backends=partial(make_backends, most_memory_burst=2.0), turns_page="/turns").ready(*pods)
    for number, one in enumerate(pods):
        assert await node.start(one, ids(f"1:{number}")) is None
    later = Harness(tmp_path, shares_per_gpu=1)
    later.manager.load(BOOT)
    await later.ready(*pods)
    for number, one in enumerate(pods):
        assert await later.start(one, ids(f"1:{number}")) is None
        assert later.limits(ids(f"1:{number}")).devices[0].burst_bytes == 0
    assert "1.5 of container main exceeds what this node allows; its limits file says 1" in caplog.text


class TestIdentity:
    async def test_recreated_pod_is_awaited_when_kubelet_starts_it(self, tmp_path):
        """The API is slower than kubelet: the namesake that is known here is gone already."""
        node = await Harness(tmp_path, pod_wait_seconds=60).ready(placed(uid="uid-1"))
        node.checkpoint.entries = [RememberedDevices("uid-2", "main", VGPU, ids("0:0"))]
        starting = asyncio.ensure_future(node.start(placed(uid="uid-1"), ids("0:0")))
        await asyncio.sleep(0.05)
        assert not starting.done()
        node.pods.pod_changed(placed(uid="uid-2"))
        assert await asyncio.wait_for(starting, 30) is None
        assert [grant.pod_uid for grant in node.manager.ledger.grants.values()] == ["uid-2"]

    async def test_init_container_with_ids_of_app_container_gets_own_share(self, tmp_path):
        node = Harness(tmp_path, Policy.BINPACK)
        containers = (ContainerSpec("warm", limits(1, 300), init=True), ContainerSpec("main", limits(1, 100)))
        waiting = pod("a", *containers)
        await node.ready(waiting)
        assert await node.start(waiting, ids("0:0")) is None
        assert node.limits(ids("0:0")).devices[0].memory_bytes == 300 * MIB
        ended = pod("a", *containers, statuses=[ContainerStatus("warm", ContainerState.COMPLETED)])
        node.pods.pod_changed(ended)
        await settle()
        assert await node.start(ended, ids("0:0")) is None
        assert node.limits(ids("0:0")).devices[0].memory_bytes == 100 * MIB
        assert [grant.container for grant in node.manager.ledger.grants.values()] == ["main"]

    async def test_rewrite_writes_granted_amounts_whatever_assignment_says_now(self, node):
        await node.ready(placed())
        await node.start(placed(), ids("0:0"))
        (granted,) = node.manager.ledger.grants.values()
        spec, before = node.spec(ids("0:0")), node.limits(ids("0:0"))
        node.pods.pod_changed(placed("train", share(0, 900)))
        node.disk.cdi.remove(granted.grant_id)
        node.disk.files.remove(granted.grant_id)
        node.disk.store.remove(granted.grant_id)
        await settle()
        await node.allocator.rewrite(granted)
        assert (node.spec(ids("0:0")), node.limits(ids("0:0")).devices) == (spec, before.devices)
        assert node.disk.store.read(granted.grant_id) == granted

    @pytest.mark.parametrize(
        ("allowed", "injection", "wanted_mib"),
        [
            pytest.param(1.0, DeviceInjection.CDI, 0, id="a node that allows none"),
            pytest.param(1.5, DeviceInjection.CDI, 150, id="a node that allows less"),
            pytest.param(8.0, DeviceInjection.CDI, 400, id="a node that allows more"),
            pytest.param(8.0, DeviceInjection.LEGACY, 0, id="a node that cannot give any"),
        ],
    )
    async def test_a_rewrite_gives_no_burst_that_the_node_does_not_allow(self, tmp_path, caplog, allowed, injection, wanted_mib):
        """Annotations may be changed after a pod was admitted."""
        node = Harness(tmp_path, backends=partial(make_backends, most_memory_burst=allowed), injection=injection, turns_page="/turns")
        await node.ready(placed())
        assert await node.start(placed(), ids("1:0")) is None
        (granted,) = node.manager.ledger.grants.values()
        changed = replace(placed(), annotations={**placed().annotations, contract.ANNOTATION_MEMORY_BURST: "4"})
        node.pods.pod_changed(changed)
        await settle()
        await node.allocator.rewrite(granted)
        assert node.limits(ids("1:0")).devices[0].burst_bytes == wanted_mib * MIB
        assert ("memory-burst" in caplog.text) is (wanted_mib != 400)
        if injection is DeviceInjection.CDI:
            turns = contract.CONTAINER_TURNS in {mount["containerPath"] for mount in node.spec(ids("1:0"))["mounts"]}
            assert turns is (wanted_mib > 0)


class TestWithoutCdi:
    """Kubelet's IDs have decided on the GPUs by the time that the pod is known."""

    async def test_container_with_gpu_ids_gets_shim_with_its_files(self, tmp_path):
        node = await Harness(tmp_path, injection=DeviceInjection.LEGACY).ready(placed())
        assert await node.start(placed(), ids("1:3")) is None
        limits, _ = node.disk.files.paths(node.allocator.grant_id(VGPU, ids("1:3")))
        links = {path.name: path.readlink() for path in Path(limits).parent.iterdir() if path.is_symlink()}
        assert [*links] == ["libaliquot-preload.so"]
        (copy,) = links.values()
        assert copy.is_file(), "its own copy"
        assert copy != tmp_path / "shim" / copy.name

    async def test_container_with_ids_of_other_gpus_is_refused_naming_both(self, tmp_path):
        node = await Harness(tmp_path, injection=DeviceInjection.LEGACY).ready(placed())
        refusal = await node.start(placed(), ids("0:3"))
        assert refusal is not None
        assert refusal.reason is Reason.ASSIGNMENT_INVALID
        assert "GPU-0" in refusal.message
        assert "GPU-1" in refusal.message
        assert not node.manager.ledger.grants

    async def test_local_placement_follows_ids_and_refuses_full_gpu(self, tmp_path):
        big = pod("big", ContainerSpec("main", limits(1, 950)))
        node = await Harness(tmp_path, Policy.BINPACK, injection=DeviceInjection.LEGACY).ready(pod("a"), big)
        assert await node.start(pod("a"), ids("1:0")) is None
        assert [grant.device_names for grant in node.manager.ledger.grants.values()] == [("GPU-1",)]
        refusal = await node.start(big, ids("1:1"))
        assert refusal is not None
        assert refusal.reason is Reject.MEMORY

    @pytest.mark.parametrize("taken", [0, 1])
    async def test_with_local_placement_an_assignment_and_the_ids_have_to_agree(self, tmp_path, taken):
        node = await Harness(tmp_path, Policy.BINPACK, injection=DeviceInjection.LEGACY).ready(placed())
        refusal = await node.start(placed(), ids(f"{taken}:3"))
        assert (refusal.reason if refusal else None) == (None if taken == 1 else Reason.ASSIGNMENT_INVALID)

    async def test_what_only_cdi_can_give_is_refused(self, tmp_path):
        node = Harness(tmp_path, injection=DeviceInjection.LEGACY)
        one = pod("a", annotations={**assigned("uid-a", main=[share(1)]), contract.ANNOTATION_PRIORITY: "high"})
        await node.ready(one)
        refusal = await node.start(one, ids("1:0"))
        assert refusal is not None
        assert refusal.reason is Reason.ISOLATION_UNAVAILABLE


OLD_NODE = NodeState("u", {}, {}, runtime_version="containerd://1.6.33", kubelet_version="v1.34.1")
NEW_NODE = replace(OLD_NODE, runtime_version="containerd://2.1.4")


class TestAdmittedBefore:
    """Kubelet repeats what Allocate answered when the container was admitted, even if the node has changed since."""

    async def admitted(self, base: Path, one, device_ids, mode=DeviceInjection.AUTO, runtime=OLD_NODE) -> tuple[Answer, RememberedDevices]:
        """Have an agent answer for the container; return the answer, and what kubelet keeps of it."""
        node = Harness(base, injection=mode)
        node.pods.node_changed(runtime)
        await node.ready(one)
        answer = await node.injection.answer(VGPU, device_ids, node.allocator.grant_id(VGPU, device_ids))
        return answer, RememberedDevices(one.uid, "main", VGPU, device_ids, response_of(answer).SerializeToString())

    def missing(self, answer: Answer) -> list[str]:
        """Return the sources of its mounts that are not there: a runtime makes directories of them."""
        return [host for host, _, _ in answer.mounts if not os.path.lexists(host)]

    @pytest.mark.parametrize("runtime", [OLD_NODE, NEW_NODE, None], ids=["as it was", "upgraded", "not heard of yet"])
    @pytest.mark.parametrize("remembered", [True, False], ids=["remembered", "checkpoint unreadable"])
    async def test_without_cdi_it_finds_the_shim_in_its_place(self, tmp_path, runtime, remembered):
        answer, kept = await self.admitted(tmp_path, placed(), ids("1:3"))
        node = Harness(tmp_path, injection=DeviceInjection.AUTO)
        node.checkpoint.entries = [kept] if remembered else []
        if runtime is not None:
            node.pods.node_changed(runtime)
        await node.ready(placed())
        assert await node.start(placed(), ids("1:3")) is None
        assert self.missing(answer) == []

    async def test_container_without_cdi_gets_no_gpus_beyond_its_ids_after_cdi_arrives(self, tmp_path):
        _, kept = await self.admitted(tmp_path, placed(), ids("0:3"))
        node = Harness(tmp_path, injection=DeviceInjection.AUTO)
        node.checkpoint.entries = [kept]
        node.pods.node_changed(NEW_NODE)
        await node.ready(placed())
        refusal = await node.start(placed(), ids("0:3"))
        assert refusal is not None
        assert refusal.reason is Reason.ASSIGNMENT_INVALID
        assert not node.manager.ledger.grants

    async def test_local_placement_without_cdi_keeps_ids_after_cdi_arrives(self, tmp_path):
        _, kept = await self.admitted(tmp_path, pod(), ids("1:3"))
        node = Harness(tmp_path, Policy.BINPACK, injection=DeviceInjection.AUTO)
        node.checkpoint.entries = [kept]
        node.pods.node_changed(NEW_NODE)
        await node.ready(pod())
        assert await node.start(pod(), ids("1:3")) is None
        assert [grant.device_names for grant in node.manager.ledger.grants.values()] == [("GPU-1",)]

    @pytest.mark.parametrize("mode", [DeviceInjection.LEGACY, DeviceInjection.CDI])
    async def test_container_with_reply_for_files_of_other_grant_is_refused(self, tmp_path, mode):
        """The node's secret was lost: other grants have other names."""
        _, kept = await self.admitted(tmp_path, placed(), ids("1:3"), mode)
        node = Harness(tmp_path, injection=mode, secret=b"another secret")
        node.checkpoint.entries = [kept]
        await node.ready(placed())
        refusal = await node.start(placed(), ids("1:3"))
        assert refusal is not None
        assert refusal.reason is Reason.ADMISSION_STALE
        assert "Delete the pod" in refusal.message
        assert not node.manager.ledger.grants

    async def test_container_by_cdi_is_refused_after_node_stops_resolving_names(self, tmp_path):
        _, kept = await self.admitted(tmp_path, placed(), ids("1:3"), runtime=NEW_NODE)
        node = Harness(tmp_path, injection=DeviceInjection.AUTO)
        node.checkpoint.entries = [kept]
        node.pods.node_changed(OLD_NODE)
        await node.ready(placed())
        refusal = await node.start(placed(), ids("1:3"))
        assert refusal is not None
        assert refusal.reason is Reason.ADMISSION_STALE

    async def test_container_by_cdi_gets_assignment_after_host_spec_is_lost(self, tmp_path):
        """containerd 1.7 after a reboot that NVIDIA's spec in /var/run/cdi did not outlive: it resolves names all the same."""
        containerd = replace(OLD_NODE, runtime_version="containerd://1.7.27")
        _, kept = await self.admitted(tmp_path, placed(), ids("0:3"), runtime=containerd)
        node = Harness(tmp_path, injection=DeviceInjection.AUTO)
        node.checkpoint.entries = [kept]
        (tmp_path / "etc-cdi/nvidia.json").unlink()
        node.pods.node_changed(containerd)
        await node.ready(placed())
        assert await node.start(placed(), ids("0:3")) is None
        assert [grant.device_names for grant in node.manager.ledger.grants.values()] == [("GPU-1",)]

    async def test_a_rewrite_gives_no_burst_to_one_that_was_admitted_without_cdi(self, tmp_path):
        _, kept = await self.admitted(tmp_path, placed(), ids("1:3"))
        node = Harness(
            tmp_path, backends=partial(make_backends, most_memory_burst=8.0), injection=DeviceInjection.AUTO, turns_page="/turns"
        )
        node.checkpoint.entries = [kept]
        node.pods.node_changed(NEW_NODE)
        await node.ready(placed())
        assert await node.start(placed(), ids("1:3")) is None
        (granted,) = node.manager.ledger.grants.values()
        node.pods.pod_changed(replace(placed(), annotations={**placed().annotations, contract.ANNOTATION_MEMORY_BURST: "4"}))
        await settle()
        await node.allocator.rewrite(granted)
        assert node.limits(ids("1:3")).devices[0].burst_bytes == 0
