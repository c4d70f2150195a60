# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.adapters.cgroup_tree import CgroupTree
from agent.core.cgroups import ContainerRef
from agent.errors import DriverError
from agent.services.driver_limits import DriverLimitController
from agent.services.events import EventRecorder
from agent.services.pod_cache import PodCache
from aliquot import contract
from aliquot.contract.model import ContainerState, ContainerStatus, Isolation
from aliquot.contract.units import MIB
from tests.unit.agent.builders import grant, ids, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeKubeApi, posted_on_pods, settle

ID = "a" * 64
LIMITED = replace(grant(ids("0:0"), share(0, 100), share(1, 100)), isolation=Isolation.DRIVER)


class FakeLimits:
    def __init__(self) -> None:
        self.limits: dict[tuple[str, str], int] = {}
        self.failure: DriverError | None = None

    async def limit_bytes(self, device_uuid, cgroup):
        if self.failure is not None:
            raise self.failure
        return self.limits.get((device_uuid, cgroup))

    async def set_limit(self, device_uuid, cgroup, limit_bytes):
        self.limits[device_uuid, cgroup] = limit_bytes


class Harness:
    def __init__(self, base) -> None:
        self.base = base / "cgroup"
        self.pods = PodCache()
        self.manager = Disk(base).manager()
        self.limits = FakeLimits()
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, FakeClock())
        self.controller = DriverLimitController(
            "node-1", self.limits, CgroupTree(self.base), manager=self.manager, pods=self.pods, events=self.events
        )
        self.manager.ledger = self.manager.ledger.adopting([LIMITED])

    async def run(self, state=ContainerState.RUNNING, container_id=ID):
        self.pods.pods_listed([replace(pod(), phase="Running", statuses=(ContainerStatus("main", state, container_id),))])
        await settle()

    def make_cgroup(self) -> str:
        directory = (
            self.base / "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-poduid_train.slice" / f"cri-containerd-{ID}.scope"
        )
        directory.mkdir(parents=True)
        return str(directory)

    def in_force(self) -> list[float]:
        (found,) = self.controller.families()
        assert {labels[found.labels.index("node")] for labels, _ in found.samples} <= {"node-1"}
        return [value for _, value in found.samples]


@pytest.fixture
async def node(tmp_path):
    return Harness(tmp_path)


async def test_missing_limit_is_set_on_every_gpu_of_container(node):
    cgroup = node.make_cgroup()
    await node.run()
    assert await node.controller.look() is True
    assert node.limits.limits == {("GPU-0", cgroup): 100 * MIB, ("GPU-1", cgroup): 100 * MIB}
    assert node.in_force() == [1.0, 1.0]
    assert node.controller.unlimited == set()


async def test_another_limit_is_put_right(node):
    cgroup = node.make_cgroup()
    node.limits.limits["GPU-0", cgroup] = 5 * MIB
    await node.run()
    await node.controller.look()
    assert node.limits.limits["GPU-0", cgroup] == 100 * MIB


async def test_container_is_checked_only_once_running(node):
    node.make_cgroup()
    await node.run(ContainerState.WAITING, "")
    assert await node.controller.look() is False
    assert node.limits.limits == {}


async def test_containers_of_other_backends_are_left_alone(node):
    node.manager.ledger = node.manager.ledger.adopting([replace(LIMITED, isolation=Isolation.SHIM)])
    await node.run()
    assert await node.controller.look() is False


@pytest.mark.parametrize("failing", ["no cgroup", "no driver"])
async def test_unenforceable_limit_is_reported(node, failing):
    if failing == "no driver":
        node.make_cgroup()
        node.limits.failure = DriverError("the driver is away")
    await node.run()
    assert await node.controller.look() is True
    assert node.in_force() == [0.0, 0.0]
    assert node.controller.unlimited == {LIMITED.grant_id}


async def test_obstacle_to_limit_is_logged_once_and_again_when_it_changes(node, caplog):
    await node.run()
    for _ in range(3):
        await node.controller.look()
    assert [one.device_uuid for one in caplog.records] == ["GPU-0", "GPU-1"]
    caplog.clear()
    cgroup = node.make_cgroup()
    node.limits.limits["GPU-1", cgroup] = 100 * MIB
    node.limits.failure = DriverError("the agent may not")
    for _ in range(3):
        await node.controller.look()
    assert [one.message for one in caplog.records] == ["driver limit not in force: the agent may not"] * 2
    node.limits.failure = None
    await node.controller.look()
    assert node.in_force() == [1.0, 1.0]


async def test_pod_gets_one_event_per_limit_not_in_force(node):
    cgroup = node.make_cgroup()
    node.limits.limits["GPU-1", cgroup] = 100 * MIB
    await node.run()
    await node.controller.look()
    assert [event for event in await posted_on_pods(node.events, node.api) if event.reason == contract.EVENT_REASON_DRIVER_LIMIT] == []
    node.limits.failure = DriverError("the agent may not")
    for _ in range(3):
        await node.controller.look()
    reported = [event for event in await posted_on_pods(node.events, node.api) if event.reason == contract.EVENT_REASON_DRIVER_LIMIT]
    assert [(event.pod, event.pod_uid, event.container, event.message, event.warning) for event in reported] == [
        ("train", "uid-train", "main", f"container main: the driver does not limit its memory on {uuid}: the agent may not", True)
        for uuid in ("GPU-0", "GPU-1")
    ]


def test_cgroup_of_container_is_found_in_layouts_of_both_drivers(tmp_path):
    ref = ContainerRef("uid-1", ID)
    assert CgroupTree(tmp_path).of_container(ref) is None
    plain = tmp_path / "kubepods/burstable/poduid-1" / ID
    plain.mkdir(parents=True)
    (tmp_path / "kubepods/burstable/poduid-2" / ID).mkdir(parents=True)
    assert CgroupTree(tmp_path).of_container(ref) == str(plain)
