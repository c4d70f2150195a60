# SPDX-License-Identifier: Apache-2.0
"""MIG instances that the agent makes and removes, on the simulated DGX A100: placements, restarts, crashes, leftovers, strategies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent.adapters.mig_files import MigRecordFiles
from agent.adapters.node_files import boot_id
from agent.core.mig import MigRecord
from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.codec import MigPlace
from aliquot.contract.model import DeviceShare
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions
from aliquot_lab.standin.plugins import Behaviour
from tests.integration.agent_invariants import look_at_driver
from tests.integration.agent_nodes import (
    QUICK,
    VGPU,
    assignment,
    container,
    eventually,
    grants,
    is_running,
    log_of,
    make_node,
    manifest,
    not_ready_because,
    page,
    published,
    refused,
    running,
)
from tests.integration.mig_nodes import a100_topology, ctk, on_host
from tests.integration.test_agent_metrics import HAMI, scrape

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir"), pytest.mark.asyncio(loop_scope="module")]
DYNAMIC = "--mig-strategy=dynamic"
WHOLE_GPUS = 1
MIG_GPU = WHOLE_GPUS
RESOURCES = ("1g.10gb", "1g.10gb.me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")


@asynccontextmanager
async def dynamic_node(directory: Path, *flags: str, start_agent: bool = True, **options: Any) -> AsyncIterator[Node]:
    """A node with an agent that makes instances, with every profile offered to kubelet."""
    every = (*QUICK, DYNAMIC, f"--nvidia-ctk={ctk(directory)}", *flags)
    made = NodeOptions(agent_flags=every, start_agent=start_agent, **options)
    async with Node(SimulatedHardware(a100_topology(directory, whole=WHOLE_GPUS)), made) as node:
        if start_agent:
            await eventually(lambda: all(node.allocatable(contract.RESOURCE_MIG_PREFIX + name) for name in RESOURCES), "every profile")
        yield node


def mig(*arguments: str, profile: str = "2g.20gb", count: int = 1) -> dict[str, Any]:
    program = " ".join((str(built("bin/aliquot-cuda-client")), *arguments)) if arguments else "sleep 600"
    resource = contract.RESOURCE_MIG_PREFIX + profile.replace("+", ".")
    return {"name": "main", "command": ["sh", "-c", f"exec {program}"], "resources": {"limits": {resource: str(count)}}}


COUNT_GPU_INSTANCES = """
result = 0
for profile in (0, 5, 9, 14, 15, 19, 20):
    found, count = (nv.c_nvmlGpuInstance_t * 16)(), ctypes.c_uint(16)
    nv.nvmlDeviceGetGpuInstances(gpu, profile, found, ctypes.byref(count))
    result += count.value
"""


def instances(node: Node) -> list[tuple[str, int]]:
    """The profiles and first slices of the instances that exist."""
    return sorted((place.profile, place.start) for place in map(codec.decode_place, look_at_driver(node).instances) if place is not None)


def uuid_at(node: Node, start: int) -> str:
    (uuid,) = [uuid for name, uuid in look_at_driver(node).instances.items() if name.endswith(f"@{start}")]
    return uuid


def records(node: Node) -> MigRecordFiles:
    return MigRecordFiles(node.layout.state / "mig")


def sees(node: Node, pod: str) -> set[str]:
    """The devices a container was given."""
    return {value for name, value in node.container(pod).env.items() if name.startswith(contract.ENV_SIM_DEVICE_PREFIX)}


def share_at(node: Node, start: int, profile: str = "2g.20gb", mib: int = 19968) -> DeviceShare:
    return DeviceShare(str(MigPlace(node.inventory.gpus[MIG_GPU].uuid, profile, start)), mib * MIB)


async def cleared(node: Node) -> None:
    """Leave a node that tests share as it was found."""
    for pod in node.cluster.list(Kind.POD)[1]:
        node.delete_pod(pod["metadata"]["name"])
    await eventually(lambda: not instances(node) and not records(node).load(), "every instance is gone with its pod")
    await eventually(lambda: not node.cluster.list(Kind.POD)[1], "every pod is gone")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_local_node(build_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    unhurried = Behaviour(retry_seconds=0.5, crash_backoff_seconds=3)
    async with dynamic_node(tmp_path_factory.mktemp("local"), HAMI, behaviour=unhurried) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def local_node(shared_local_node: Node) -> AsyncIterator[Node]:
    yield shared_local_node
    await cleared(shared_local_node)


class TestOnDemand:
    async def test_instance_is_created_for_container_and_removed_with_its_pod(self, local_node):
        node = local_node
        node.create_pod(manifest("a", mig("hold", "--mib", "512")))
        await running(node, "a")
        ((given,),) = [grant["shares"] for grant in grants(node)]
        place = codec.decode_place(given["device_uuid"])
        assert place is not None
        assert instances(node) == [("2g.20gb", place.start)]
        assert sees(node, "a") == {uuid_at(node, place.start)}
        series = await scrape(node)
        for name in ("aliquot_container_mig_instance_info", "hami_mig_device_info"):
            assert [labels["mig_uuid"] for labels, _ in series[name]] == [uuid_at(node, place.start)], name
        ((info, _),), ((of_device, _),) = series["aliquot_container_mig_instance_info"], series["aliquot_device_mig_instance_info"]
        assert info["gpu_uuid"] == of_device["device_uuid"] == place.device_uuid
        assert info["gpu_instance_id"] == of_device["gpu_instance_id"] != ""
        node.delete_pod("a")
        await eventually(lambda: instances(node) == [] and records(node).load() == [], "the instance is gone with its pod")

    async def test_kubelet_is_offered_possible_instances_and_small_ones_spare_large_ones(self, local_node):
        node = local_node
        one, three, seven = (contract.RESOURCE_MIG_PREFIX + profile for profile in ("1g.10gb", "3g.40gb", "7g.80gb"))

        def offered() -> tuple[int, int, int]:
            return node.allocatable(one), node.allocatable(three), node.allocatable(seven)

        await eventually(lambda: offered() == (7, 2, 1), "an empty GPU")
        for name, profile in (("a", "1g.10gb"), ("b", "1g.10gb+me"), ("c", "1g.10gb")):
            node.create_pod(manifest(name, mig(profile=profile)))
            await running(node, name)
        await eventually(lambda: offered() == (6, 1, 0), "half of it is partitioned")
        node.create_pod(manifest("d", mig(profile="3g.40gb")))
        await running(node, "d")
        assert [start for profile, start in instances(node) if profile == "3g.40gb"] == [0]
        await eventually(lambda: offered() == (2, 1, 0), "it is full")
        for name in ("a", "b", "c", "d"):
            node.delete_pod(name)
        await eventually(lambda: offered() == (7, 2, 1), "it is empty again")

    async def test_mig_manager_is_left_alone_while_it_works(self, local_node):
        node = local_node

        async def label(state: str) -> None:
            """Write the label, and take the capacity away with it: once it is back, the agent has seen both."""

            def change(one: dict[str, Any]) -> None:
                one["metadata"].setdefault("labels", {})["nvidia.com/mig.config.state"] = state
                del one["status"]["capacity"][contract.RESOURCE_VGPU_MEMORY]

            node.cluster.update(Kind.NODE, "", node.options.name, change)
            await eventually(lambda: contract.RESOURCE_VGPU_MEMORY in capacity(), "the agent publishes the capacity again")

        def capacity() -> dict[str, str]:
            return node.cluster.get(Kind.NODE, "", node.options.name)["status"]["capacity"]

        await label("pending")
        node.create_pod(manifest("a", mig()))
        await refused(node, "a", "nvidia.com/mig.config.state", "pending")
        assert instances(node) == []
        await label("success")
        await running(node, "a")

    async def test_container_restarting_after_reset_gets_recreated_instance(self, local_node):
        node = local_node
        node.create_pod(manifest("a", mig("hold", "--mib", "64")))
        await running(node, "a")
        ((_, start),) = instances(node)
        before = uuid_at(node, start)
        node.container("a").signal_group(9)
        on_host(node, DESTROY_ALL, MIG_GPU)

        def on_another() -> bool:
            (row,) = records(node).load() or [MigRecord("", "", "")]
            return bool(row.uuid) and row.uuid != before and sees(node, "a") == {row.uuid}

        await eventually(on_another, "the container runs on the recreated instance")

    async def test_scheduler_chooses_placement_and_administrator_instances_stay_unused_and_unremoved(self, tmp_path):
        async with dynamic_node(tmp_path, "--placement=assigned") as node:

            def place(name: str, start: int) -> None:
                metadata: dict[str, Any] = {"uid": f"uid-{name}", "annotations": {}}
                metadata["annotations"][contract.ANNOTATION_ASSIGNMENT] = assignment(f"uid-{name}", main=[share_at(node, start)])
                node.create_pod(manifest(name, mig("hold", "--mib", "64"), **metadata))

            place("a", 2)
            await running(node, "a")
            assert instances(node) == [("2g.20gb", 2)]
            assert sees(node, "a") == {uuid_at(node, 2)}
            place("b", 2)
            await refused(node, "b", "is in use or has another profile than 2g.20gb")
            await cleared(node)

            create = "instance = nv.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, ctypes.byref(nv.c_nvmlGpuInstancePlacement_t(0, 4)))\n"
            on_host(node, f"{create}nv.nvmlGpuInstanceCreateComputeInstance(instance, 2)\nresult = None", MIG_GPU)
            resource = contract.RESOURCE_MIG_PREFIX + "3g.40gb"
            await eventually(lambda: node.allocatable(resource) == 2, "it is offered as it is, beside the one that can be made")
            place("c", 2)
            await refused(node, "c", "is in use or has another profile than 2g.20gb")
            assert instances(node) == [("3g.40gb", 0)]


DESTROY_ALL = """
for slot in range(7):
    try:
        device = nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
    except nv.NVMLError_NotFound:
        continue
    instance = nv.nvmlDeviceGetGpuInstanceById(gpu, nv.nvmlDeviceGetGpuInstanceId(device))
    for attempt in range(100):
        try:
            nv.nvmlComputeInstanceDestroy(
                nv.nvmlGpuInstanceGetComputeInstanceById(instance, nv.nvmlDeviceGetComputeInstanceId(device)))
            break
        except nv.NVMLError_InUse:
            import time; time.sleep(0.02)
    nv.nvmlGpuInstanceDestroy(instance)
result = None
"""

LEFTOVERS = """
half_made = nv.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 14, ctypes.byref(nv.c_nvmlGpuInstancePlacement_t(2, 2)))
made = nv.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 14, ctypes.byref(nv.c_nvmlGpuInstancePlacement_t(4, 2)))
nv.nvmlGpuInstanceCreateComputeInstance(made, 1)
result = None
"""


class TestCrashes:
    async def test_a_killed_agent_takes_over_the_instances_it_made(self, tmp_path):
        async with dynamic_node(tmp_path) as node:
            for name in ("a", "b"):
                node.create_pod(manifest(name, mig("hold", "--mib", "64")))
            await running(node, "a", "b")
            before = look_at_driver(node).instances
            await node.agent.kill()
            node.delete_pod("b")
            await node.wait_gone("b")
            await node.agent.start()
            await node.wait_ready()
            await eventually(lambda: len(instances(node)) == 1, "the instance of the pod that ended meanwhile is removed")
            assert look_at_driver(node).instances.items() < before.items()
            assert is_running(node.pod("a"))

    async def test_leftovers_of_agent_killed_while_creating_instance_are_removed(self, tmp_path):
        async with dynamic_node(tmp_path, start_agent=False) as node:
            for start in (0, 2, 4):  # nothing made yet, a GPU instance alone, and all made but not recorded
                records(node).write(MigRecord(share_at(node, start).device_uuid, "a" * 24, boot_id()))
            on_host(node, LEFTOVERS, MIG_GPU)
            assert on_host(node, COUNT_GPU_INSTANCES, MIG_GPU) == 2
            await node.agent.start()
            await node.wait_ready()
            await eventually(lambda: records(node).load() == [], "the records are gone")
            assert on_host(node, COUNT_GPU_INSTANCES, MIG_GPU) == 0

    async def test_agent_killed_repeatedly_leaves_every_pod_exactly_its_instance(self, tmp_path):
        async with dynamic_node(tmp_path) as node:
            names = [f"p{number}" for number in range(4)]
            for name in names:
                node.create_pod(manifest(name, mig("hold", "--mib", "64", profile="1g.10gb")))
            for pause in (0.4, 0.6, 0.8):
                await asyncio.sleep(pause)
                await node.agent.kill()
                await node.agent.start()
            await running(node, *(name for name in names if node.pod(name)["status"].get("phase") != "Failed"))
            alive = [name for name in names if is_running(node.pod(name))]
            await eventually(lambda: len(records(node).load()) == len(alive), "one record for each pod that runs")
            given = [uuid for name in alive for uuid in sees(node, name)]
            assert len(set(given)) == len(alive)
            assert {row.uuid for row in records(node).load()} == set(given)

    async def test_turning_it_off_keeps_what_runs_and_removes_it_afterwards(self, tmp_path):
        async with dynamic_node(tmp_path) as node:
            node.create_pod(manifest("a", mig()))
            await running(node, "a")
            await node.agent.kill()
            node.agent.flags.append("--mig-strategy=mixed")
            await node.agent.start()
            await eventually(lambda: "ledger loaded" in log_of(node), "the agent is back")
            assert len(instances(node)) == 1
            node.delete_pod("a")
            await eventually(lambda: instances(node) == [], "the instance is gone with its pod")


class TestStrategies:
    async def test_strategy_none_shares_unpartitioned_gpus_and_leaves_others_alone(self, tmp_path):
        topology = a100_topology(tmp_path, whole=1, instances=("gpu=1 profile=3g.40gb start=0",))
        async with make_node(topology, "--mig-strategy=none", f"--nvidia-ctk={ctk(tmp_path)}") as node:
            whole = node.inventory.gpus[0]
            await eventually(lambda: node.allocatable(VGPU) == 16, "one GPU is shared")
            await eventually(lambda: (found := published(node)) is not None and len(found.devices) == 2, "the node is published")
            found = published(node)
            assert found is not None
            assert "mig" not in found.isolation
            offered_mib = node.allocatable(contract.RESOURCE_VGPU_MEMORY)
            assert offered_mib == next(entry.device.memory_bytes // MIB for entry in found.devices if entry.device.uuid == whole.uuid)
            for number in range(3):
                node.create_pod(manifest(f"p{number}"))
                await running(node, f"p{number}")
                assert sees(node, f"p{number}") == {whole.uuid}
            node.create_pod(manifest("two", container(vgpus=2, mib=2048)))
            await refused(node, "two", "1 of 2 GPUs fit: 1 in MIG mode")
            assert not any(name.startswith(contract.RESOURCE_MIG_PREFIX) for name in node.status["allocatable"])
            assert (await page(node, "/readyz"))[0] == 200
            assert instances(node) == [("3g.40gb", 0)]

    async def test_single_refuses_to_offer_a_node_that_is_not_partitioned_alike(self):
        hardware = SimulatedHardware("a100x8-mig")
        async with Node(hardware, NodeOptions(agent_flags=(*QUICK, "--mig-strategy=single"), start_agent=False)) as node:
            await node.agent.start()
            await not_ready_because(node, "migStrategy single needs every GPU in MIG mode")
            await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU) > 0, "the GPUs that are not partitioned are shared")
            assert not any(name.startswith(contract.RESOURCE_MIG_PREFIX) for name in node.status["allocatable"])

    async def test_single_gives_an_instance_for_each_vgpu(self, tmp_path):
        hardware = SimulatedHardware(a100_topology(tmp_path, instances=("gpu=0 profile=3g.40gb start=0", "gpu=0 profile=3g.40gb start=4")))
        async with Node(hardware, NodeOptions(agent_flags=(*QUICK, "--mig-strategy=single"), start_agent=False)) as node:
            await node.agent.start()
            await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU) == 2, "two vGPUs")
            program = {"command": ["sh", "-c", f"exec {built('bin/aliquot-cuda-client')} hold --mib 64"], "name": "main"}
            node.create_pod(manifest("a", {**program, "resources": {"limits": {contract.RESOURCE_VGPU: "1"}}}))
            await running(node, "a")
            (seen,) = sees(node, "a")
            assert seen.startswith("MIG-")
            isolated = {contract.ANNOTATION_ISOLATION: "exclusive"}
            node.create_pod(manifest("b", {**program, "resources": {"limits": {contract.RESOURCE_VGPU: "1"}}}, annotations=isolated))
            await refused(node, "b", "each vGPU is a MIG instance 3g.40gb", "migStrategy: single")
