# SPDX-License-Identifier: Apache-2.0
"""Cases of Kubernetes' own tests of kubelet and its drivers, with a real agent process as the driver.

``docs/development/dra-scenarios.md`` has them by Kubernetes' names.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from agent.adapters.dra_grpc import HEALTH_PACKAGES
from aliquot.kubelet_api import drahealth_pb2
from aliquot_lab.standin.cluster import ChangeType, Kind
from aliquot_lab.standin.node import Node
from tests.fakes.mounting import mounted
from tests.integration.agent_nodes import grants, inject, not_ready_because, page
from tests.integration.dra_nodes import FakeKubelet, allocate, dra_node, offered
from tests.unit.agent.fakes import until

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def empty() -> Iterator[Path]:
    """A directory of kubelet, with a path that leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


async def restarted(kubelet: FakeKubelet) -> FakeKubelet:
    """A kubelet that does not know the drivers of the last one, and registers them again."""
    later = FakeKubelet(kubelet.registry.parent)
    await later.register()
    return later


async def agent_restarts(node: Node, kubelet: FakeKubelet) -> None:
    """Kill the agent, and register the next one."""
    dead = set(kubelet.registry.iterdir())
    await node.agent.kill()
    await node.agent.start()
    await until(lambda: set(kubelet.registry.iterdir()).isdisjoint(dead))
    await kubelet.register()


async def ready(node: Node) -> None:
    async with asyncio.timeout(30):
        while True:
            status, _ = await page(node, "/readyz")
            if status == 200:
                return
            await asyncio.sleep(0.05)


async def tells(stream: Any, *unhealthy: str) -> None:
    """Wait until the stream of health has these devices, and no others, as unhealthy."""
    async with asyncio.timeout(30):
        while True:
            devices = (await stream.read()).devices
            if devices and [one.device.device_name for one in devices if one.health != drahealth_pb2.HEALTHY] == list(unhealthy):
                return


async def read_to_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


def files_of(node: Node, grant_id: str) -> Sequence[Path]:
    """What the disk has of a grant."""
    return list(node.layout.base.rglob(f"*{grant_id}*"))


@pytest.mark.parametrize("deleted", [False, True], ids=["claim stays", "claim and agent go"])
async def test_unprepare_that_failed_is_repeated_by_restarted_kubelet(empty, deleted):
    async with dra_node(empty) as (node, kubelet):
        claim = allocate(node, "train", "gpu-0", 8192)
        (device,) = (await kubelet.prepare(claim)).claims[claim.uid].devices
        grant_id = device.cdi_device_ids[0].rpartition("=")[2]
        held = node.layout.run / "containers" / grant_id / "held"
        held.mkdir()
        with mounted(held, "-t", "tmpfs", "aliquot-test"):  # what is mounted cannot be removed
            assert str(held.parent) in (await kubelet.unprepare(claim)).claims[claim.uid].error
            if deleted:
                node.cluster.delete(Kind.RESOURCE_CLAIM, "default", "train")
                await agent_restarts(node, kubelet)
            kubelet = await restarted(kubelet)
            assert str(held.parent) in (await kubelet.unprepare(claim)).claims[claim.uid].error
            assert [grant["grant_id"] for grant in grants(node)] == [grant_id]
        assert (await kubelet.unprepare(claim)).claims[claim.uid].error == ""
        assert files_of(node, grant_id) == []
        other = allocate(node, "other", "gpu-0", 140000)
        assert (await kubelet.prepare(other)).claims[other.uid].error == ""


async def test_driver_that_kubelet_refused_registers_when_asked_again(empty):
    async with dra_node(empty) as (node, kubelet):
        await kubelet.register(error="no version in common")
        await not_ready_because(node, "no version in common")
        kubelet = await restarted(kubelet)
        await ready(node)
        claim = allocate(node, "train", "gpu-0", 1024)
        assert (await kubelet.prepare(claim)).claims[claim.uid].error == ""


async def test_quick_restart_of_agent_leaves_slices_as_they_are(empty):
    async with dra_node(empty, "--driver-poll-seconds=0.2") as (node, kubelet):
        await ready(node)
        before = node.cluster.version
        await node.agent.stop()
        await node.agent.start()
        await kubelet.register()
        await ready(node)
        await asyncio.sleep(1)  # time for a write that must not be
        inject(node, "lost", "--gpu", "1")
        await until(lambda: [device["name"] for device in offered(node) if device.get("taints")] == ["gpu-1"])
        _, changes = node.cluster.changes_after(before, Kind.RESOURCE_SLICE, 0)
        assert {change.type for change in changes} == {ChangeType.MODIFIED}
        assert all(any(device.get("taints") for device in change.object["spec"]["devices"]) for change in changes)


async def test_health_ends_with_agent_and_comes_back_with_next(empty):
    """Kubelet takes health as unknown when the stream ends."""
    async with dra_node(empty, "--driver-poll-seconds=0.2") as (node, kubelet):
        async with kubelet.health(HEALTH_PACKAGES[0]) as stream:
            await tells(stream)
            await agent_restarts(node, kubelet)
            with pytest.raises(grpc.aio.AioRpcError):
                await read_to_end(stream)
        await both_services_work(node, kubelet)


async def test_dropped_connection_leaves_both_services_for_the_next(empty):
    async with dra_node(empty, "--driver-poll-seconds=0.2") as (node, kubelet):
        async with kubelet.health(HEALTH_PACKAGES[0]) as dropped:
            await dropped.read()
        await both_services_work(node, kubelet)
        assert await node.agent.stop() == 0


async def both_services_work(node: Node, kubelet: FakeKubelet) -> None:
    """Prepare a claim, and read the health stream: one message at the start, and one when a GPU is lost."""
    async with kubelet.health(HEALTH_PACKAGES[0]) as stream:
        await tells(stream)
        claim = allocate(node, "train", "gpu-0", 1024)
        assert (await kubelet.prepare(claim)).claims[claim.uid].error == ""
        inject(node, "lost", "--gpu", "1")
        await tells(stream, "gpu-1")
