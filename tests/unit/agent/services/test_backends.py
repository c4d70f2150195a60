# SPDX-License-Identifier: Apache-2.0
"""PreStart with other backends than the shim: what is made ready, what the container's CDI spec says, and what a failure leaves."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from agent.core.cdi import file_name
from agent.core.mps_records import SupervisorState
from agent.core.refusal import Reason
from agent.errors import DriverError, MpsError, PartitionError
from agent.services.backends import Provision
from agent.services.events import EventRecorder
from agent.services.mps_controller import MpsController
from aliquot import contract
from aliquot.contract.model import ContainerSpec, Isolation, Policy
from tests.unit.agent.builders import gpu, grant, held, ids, instance, limits, pod, reading, share
from tests.unit.agent.fakes import FakeClock, FakeKubeApi
from tests.unit.agent.partitions import FakeMpsDaemons, FakePartitions, dynamic_gpu, make_backends, make_controller
from tests.unit.agent.services.test_allocator import Harness

MIG_RESOURCE = "nvidia.com/mig-1g.10gb"


def isolated(isolation: str, mib: int | None = 100):
    return pod("a", ContainerSpec("main", limits(mib=mib)), annotations={contract.ANNOTATION_ISOLATION: isolation})


def on_demand():
    return pod("a", ContainerSpec("main", {MIG_RESOURCE: "1"}))


def make_capabilities(base: Path) -> None:
    """Have the kernel's files of every instance that FakePartitions can make; it numbers GPU instances from 7."""
    for start in range(8):
        directory = base / f"capabilities/gpu0/mig/gi{7 + start}"
        (directory / "ci0").mkdir(parents=True)
        (directory / "access").write_text(f"DeviceFileMinor: {100 + start}\n")
        (directory / "ci0/access").write_text(f"DeviceFileMinor: {200 + start}\n")


class MigNode(Harness):
    """A node with one GPU on which instances are made on demand, and its capability files."""

    def __init__(self, base) -> None:
        self.partitions = FakePartitions()
        super().__init__(base, Policy.BINPACK, lambda manager: make_backends(manager, make_controller(manager, self.partitions)))
        self.driver.answer = reading(dynamic_gpu(0))
        make_capabilities(base)

    async def start_mig(self, one, device_ids):
        self.pod_resources.listing = [held(one, device_ids, resource=MIG_RESOURCE)]
        return await self.allocator.prestart(MIG_RESOURCE, device_ids)

    def edits(self):
        (path,) = (self.disk.base / "cdi").glob("*.json")
        return msgspec.json.decode(path.read_bytes())["devices"][0]["containerEdits"]


class TestMig:
    @pytest.fixture
    async def node(self, tmp_path):
        return await MigNode(tmp_path).ready(on_demand())

    async def test_the_container_gets_the_nodes_of_the_instance_that_was_made(self, node):
        assert await node.start_mig(on_demand(), ids("0:0")) is None
        (made,) = node.partitions.instances.values()
        nodes = [entry["path"] for entry in node.edits()["deviceNodes"]]
        start = made.placement_start
        assert nodes == ["/dev/nvidia0", f"/dev/nvidia-caps/nvidia-cap{100 + start}", f"/dev/nvidia-caps/nvidia-cap{200 + start}"]
        assert [one.backend for one in node.manager.ledger.grants.values()] == [Isolation.MIG]

    async def test_instance_nodes_missing_in_host_spec_are_added(self, node):
        (node.disk.base / "proc-devices").write_text("237 nvidia-caps\n")
        entry = {"name": "MIG-made-1", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}
        document = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [entry]}
        (node.disk.base / "cdi/nvidia.json").write_bytes(msgspec.json.encode(document))
        assert await node.start_mig(on_demand(), ids("0:0")) is None
        (one,) = node.manager.ledger.grants.values()
        spec = msgspec.json.decode((node.disk.base / "cdi" / file_name(one.grant_id)).read_bytes())
        capabilities = [entry for entry in spec["devices"][0]["containerEdits"]["deviceNodes"] if "caps" in entry["path"]]
        assert [(entry["type"], entry["major"], entry["minor"] // 100) for entry in capabilities] == [("c", 237, 1), ("c", 237, 2)]

    async def test_starting_again_makes_nothing_new(self, node):
        await node.start_mig(on_demand(), ids("0:0"))
        before = node.edits()
        assert await node.start_mig(on_demand(), ids("0:0")) is None
        assert node.partitions.made == 1
        assert node.edits() == before

    async def test_an_instance_that_cannot_be_made_leaves_no_promise(self, node):
        node.partitions.failure = PartitionError("making a MIG instance: another instance is in the way")
        refusal = await node.start_mig(on_demand(), ids("0:0"))
        assert refusal is not None
        assert refusal.reason is Reason.NODE_FAILURE
        assert "in the way" in refusal.message
        assert not node.manager.ledger.grants
        assert node.disk.cdi.ids() == []
        node.partitions.failure = None
        assert await node.start_mig(on_demand(), ids("0:0")) is None

    async def test_files_written_again_name_the_same_instance(self, node):
        await node.start_mig(on_demand(), ids("0:0"))
        before = node.edits()
        (one,) = node.manager.ledger.grants.values()
        node.disk.cdi.remove(one.grant_id)
        await node.allocator.rewrite(one)
        assert node.edits() == before

    async def test_existing_instance_is_not_created_again(self, node):
        node.driver.answer = reading(gpu(0, mig=[instance(0, 7)]))
        await node.watch.poll()
        assert await node.start_mig(on_demand(), frozenset({"MIG-0-7"})) is None
        assert node.partitions.calls == []


class TestOthers:
    async def test_exclusive_has_the_whole_gpu_and_nothing_of_the_shim(self, tmp_path):
        one = isolated("exclusive", mib=None)
        node = await Harness(tmp_path, Policy.BINPACK).ready(one)
        assert await node.start(one, ids("0:0")) is None
        assert contract.CONTAINER_LIMITS not in {mount["containerPath"] for mount in node.spec(ids("0:0"))["mounts"]}

    async def test_the_drivers_limit_is_in_the_spec(self, tmp_path):
        one = isolated("driver", 2048)
        node = Harness(tmp_path, Policy.BINPACK, partial(make_backends, without_driver_limits=""))
        node.driver.answer = replace(reading(gpu(0, mib=4096)), driver_version="615.10", has_cgroup_limits=True)
        await node.ready(one)
        assert await node.start(one, ids("0:0")) is None
        edits = node.spec(ids("0:0"))
        assert "NVIDIA_GPU_MEMORY_LIMIT=2048" in edits["env"]
        assert edits["hooks"][0]["args"][1] == "apply-cuda-memory-limits"

    async def test_mps_is_offered_while_its_supervisor_lives(self, tmp_path):
        backends = make_backends(Harness(tmp_path).manager)
        with pytest.raises(MpsError, match="no aliquot-mps runs on this node"):
            await backends.provide(replace(grant(ids("0:0"), share(0)), isolation=Isolation.MPS))

    async def test_mps_is_offered_again_when_its_supervisor_is_there(self, tmp_path):
        manager, daemons = Harness(tmp_path).manager, FakeMpsDaemons(None)
        controller = MpsController(
            "node-1", daemons, "/run/aliquot/mps", manager=manager, models=dict, events=EventRecorder(FakeKubeApi(), FakeClock())
        )
        backends = make_backends(manager, mps=controller)
        assert "no aliquot-mps" in backends.abilities.without_mps
        daemons.about = SupervisorState(50, "/host/shm")
        await controller.look()
        assert backends.abilities.without_mps == ""

    async def test_the_shim_needs_nothing_more(self, tmp_path):
        node = Harness(tmp_path)
        assert await make_backends(node.manager).provide(grant(ids("0:0"))) == Provision()

    async def test_driver_fault_while_creating_instance_causes_retry(self, tmp_path):
        node = await MigNode(tmp_path).ready(on_demand())
        node.partitions.failure = DriverError("the driver is away")
        refusal = await node.start_mig(on_demand(), ids("0:0"))
        assert refusal is not None
        assert "The agent tries again when kubelet retries" in refusal.message
