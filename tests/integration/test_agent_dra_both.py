# SPDX-License-Identifier: Apache-2.0
"""An agent process that gives out one GPU by both interfaces of kubelet: device IDs and ResourceClaims are granted from one ledger."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aliquot import contract
from aliquot.contract.model import Allocation
from aliquot.kubelet_api import dra_pb2
from aliquot.paths import SOURCE_ROOT
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node
from tests.integration.agent_nodes import (
    QUICK,
    VGPU,
    container,
    grants,
    is_running,
    manifest,
    promised_mib,
    published,
    refused,
    running,
    usable_mib,
    waiting_message,
)
from tests.integration.dra_nodes import FakeKubelet, allocate, dra_node, offered
from tests.unit.agent.fakes import until

T4X2 = SOURCE_ROOT / "simulated_driver" / "profiles" / "t4x2"


@pytest.fixture
def empty() -> Iterator[Path]:
    """A directory of kubelet, with a path that leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@asynccontextmanager
async def both(directory: Path) -> AsyncIterator[tuple[Node, FakeKubelet]]:
    """A node with one GPU for both interfaces."""
    topology = directory / "topology"
    topology.write_text("".join(line for line in T4X2.read_text().splitlines(keepends=True) if not line.startswith("gpu      1 ")))
    async with dra_node(directory, "--allocation=both", *QUICK, hardware=SimulatedHardware(str(topology))) as (node, kubelet):
        await node.wait_ready()
        yield node, kubelet


async def restart(node: Node, kubelet: FakeKubelet, allocation: Allocation) -> None:
    """Start the agent with another setting."""
    await node.agent.stop()
    node.agent.flags.append(f"--allocation={allocation}")
    await node.agent.start()
    await kubelet.register()


async def prepare(kubelet: FakeKubelet, claim: dra_pb2.Claim) -> str:
    """Return why a claim was refused; empty if it is prepared."""
    error: str = (await kubelet.prepare(claim)).claims[claim.uid].error
    return error


def total(node: Node) -> int:
    (mib,) = promised_mib(node).values()
    return mib


async def test_serves_ids_and_tainted_slices_of_same_gpu(empty: Path) -> None:
    async with both(empty) as (node, _):
        await until(lambda: node.allocatable(VGPU) > 0 and node.allocatable(contract.RESOURCE_VGPU_MEMORY) > 0)
        [device] = offered(node)
        assert [taint["key"] for taint in device["taints"]] == [contract.PLANNED]
        await until(lambda: (found := published(node)) is not None and found.allocation is Allocation.BOTH)


async def test_each_interface_gets_only_what_the_other_leaves(empty: Path) -> None:
    async with both(empty) as (node, kubelet):
        whole = await usable_mib(node)
        node.create_pod(manifest("ids", container(mib=whole - 1024)))
        await running(node, "ids")
        large, exact = allocate(node, "large", "gpu-0", 1025), allocate(node, "exact", "gpu-0", 1024)
        assert "Already granted there" in await prepare(kubelet, large)
        assert await prepare(kubelet, exact) == ""
        assert total(node) == whole
        node.create_pod(manifest("late", container(mib=1)))
        await refused(node, "late", "memory")
        assert total(node) == whole
        await kubelet.unprepare(exact)
        node.delete_pod("late")
        await node.wait_gone("late")
        node.create_pod(manifest("later", container(mib=1024)))
        await running(node, "later")
        assert "Already granted there" in await prepare(kubelet, exact)
        assert sorted(grant["shares"][0]["memory_bytes"] >> 20 for grant in grants(node)) == [1024, whole - 1024]


async def test_calls_of_both_interfaces_at_once_and_killed_agent_never_overbook(empty: Path) -> None:
    async with both(empty) as (node, kubelet):
        whole = await usable_mib(node)
        claims = [allocate(node, f"claim-{number}", "gpu-0", whole // 4) for number in range(4)]
        names = [f"pod-{number}" for number in range(4)]
        for name in names:
            node.create_pod(manifest(name, container(mib=whole // 4)))
        errors = await asyncio.gather(*(prepare(kubelet, claim) for claim in claims))
        prepared = [claim for claim, error in zip(claims, errors, strict=True) if not error]
        await until(lambda: len(prepared) + len(running_of(node, names)) == 4)
        await until(lambda: all(is_running(node.pod(name)) or waiting_message(node.pod(name)) for name in names))
        started = running_of(node, names)
        assert total(node) == 4 * (whole // 4)
        await node.agent.kill()
        dead = set(kubelet.registry.iterdir())
        await node.agent.start()
        await until(lambda: set(kubelet.registry.iterdir()).isdisjoint(dead))
        await kubelet.register()
        assert [await prepare(kubelet, claim) for claim in prepared] == [""] * len(prepared)
        refusals = [await prepare(kubelet, claim) for claim in claims if claim not in prepared]
        assert all("Already granted there" in refusal for refusal in refusals)
        assert total(node) == 4 * (whole // 4)
        assert running_of(node, names) == started


def running_of(node: Node, names: Sequence[str]) -> Sequence[str]:
    return [name for name in names if is_running(node.pod(name))]


async def test_change_waits_only_for_the_interface_that_ends(empty: Path) -> None:
    async with both(empty) as (node, kubelet):
        node.create_pod(manifest("ids"))
        await running(node, "ids")
        claim = allocate(node, "claimed", "gpu-0", 1024)
        assert await prepare(kubelet, claim) == ""
        shares = node.allocatable(VGPU)
        await restart(node, kubelet, Allocation.PLUGIN)
        await until(lambda: not offered(node) and node.allocatable(VGPU) == 0)
        assert is_running(node.pod("ids"))
        await restart(node, kubelet, Allocation.BOTH)
        await until(lambda: len(offered(node)) == 1 and node.allocatable(VGPU) == shares)
        await restart(node, kubelet, Allocation.PLANNED)
        await until(lambda: not offered(node) and node.allocatable(VGPU) == 0)
        node.delete_pod("ids")
        await until(lambda: len(offered(node)) == 1)
        assert len(grants(node)) == 1
        await restart(node, kubelet, Allocation.BOTH)
        await until(lambda: len(offered(node)) == 1 and node.allocatable(VGPU) == shares)
        assert node.cluster.get(Kind.RESOURCE_CLAIM, "default", "claimed")["metadata"]["uid"] == claim.uid
