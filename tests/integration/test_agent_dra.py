# SPDX-License-Identifier: Apache-2.0
"""The agent as a DRA driver over real sockets, with a kubelet that finds, registers and calls it as the real one does."""

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agent.adapters.dra_grpc import DRIVER_PACKAGES, HEALTH_PACKAGES, DriverDirectories
from agent.core.slices import Offer
from agent.services.dra_health import DeviceHealthService
from agent.services.dra_plugin import DraPlugin
from agent.services.dra_registrar import DraRegistrar
from aliquot import contract
from aliquot.kubelet_api import dra_pb2, drahealth_pb2
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.node import Node
from tests.integration.agent_nodes import QUICK, inject, manifest, not_ready_because, page, running
from tests.integration.dra_nodes import FakeKubelet, allocate, allocate_requests, claim_of, dra_node, limits_in, offered, passed_on
from tests.unit.agent.builders import gpu, reading
from tests.unit.agent.claim_builders import NODE, claim_object, result
from tests.unit.agent.fakes import until
from tests.unit.agent.services.test_claims import ClaimHarness


def _claim(name: str) -> dra_pb2.Claim:
    return dra_pb2.Claim(namespace="default", name=name, uid=f"uid-{name}")


class Agent(ClaimHarness):
    """The driver of one agent process."""

    def __init__(self, base: Path, kubelet_directory: Path, instance: str = "1") -> None:
        super().__init__(base)
        sockets = DriverDirectories(kubelet_directory, instance)
        health = DeviceHealthService(NODE, Offer(16), self.watch, self.clock)
        self.registrar = DraRegistrar(sockets, DraPlugin(self.claims), health, self.telemetry)
        self.running: asyncio.Future | None = None

    async def serve(self) -> None:
        await self.ready()
        self.running = asyncio.ensure_future(self.registrar.run())

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.registrar.stop()


@pytest.fixture
def directory():
    """Kubelet's directory, with a path that leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "plugins_registry").mkdir()
        yield Path(made)


@pytest.fixture
def empty():
    """A directory of kubelet for an agent process."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture
async def agent(tmp_path, directory):
    one = Agent(tmp_path / "agent-1", directory)
    await one.serve()
    yield one
    await one.end()


@pytest.fixture
async def kubelet(agent, directory):
    found = FakeKubelet(directory)
    await found.register()
    return found


def taints_of(node: Node, device: str) -> list[dict[str, Any]]:
    return [taint for one in offered(node) if one["name"] == device for taint in one.get("taints", ())]


async def test_kubelet_finds_and_registers_driver(agent, kubelet):
    assert agent.registrar.trouble == ""
    assert kubelet.versions == ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]


async def test_refused_registration_is_reported(agent, kubelet):
    await kubelet.register(error="no version in common")
    assert "no version in common" in agent.registrar.trouble
    await kubelet.register()
    assert agent.registrar.trouble == ""


@pytest.mark.parametrize("package", DRIVER_PACKAGES)
async def test_claim_is_prepared_and_released_in_every_version(agent, kubelet, package):
    agent.resources.put(claim_object("train", result(0, mib=300)))
    reply = await kubelet.prepare(_claim("train"), package=package)
    (device,) = reply.claims["uid-train"].devices
    assert (device.pool_name, device.device_name, list(device.request_names)) == (NODE, "gpu-0", ["gpu"])
    assert device.cdi_device_ids[0].startswith(f"{contract.CDI_KIND}=")
    assert len(agent.specs()) == 1
    assert (await kubelet.unprepare(_claim("train"), package=package)).claims["uid-train"].error == ""
    assert agent.specs() == []


async def test_every_claim_of_a_call_is_answered(agent, kubelet):
    agent.resources.put(claim_object("good", result(0)))
    reply = await kubelet.prepare(_claim("good"), _claim("gone"))
    assert reply.claims.keys() == {"uid-good", "uid-gone"}
    assert "does not exist" in reply.claims["uid-gone"].error


@pytest.mark.parametrize("package", HEALTH_PACKAGES)
async def test_health_is_streamed_at_once_and_at_each_change(agent, kubelet, package):
    async with kubelet.health(package) as stream:
        first = await stream.read()
        assert [(one.device.device_name, one.health) for one in first.devices] == [
            ("gpu-0", drahealth_pb2.HEALTHY),
            ("gpu-1", drahealth_pb2.HEALTHY),
        ]
        agent.driver.answer = reading(gpu(0))
        await agent.watch.poll()
        while (second := await stream.read()).devices[1].health == drahealth_pb2.HEALTHY:
            pass
        assert "no longer lists it" in second.devices[1].message


async def test_next_agent_serves_and_removes_socket_of_killed_one(agent, kubelet, tmp_path, directory):
    agent.running.cancel()
    registry = directory / "plugins_registry"
    dead = registry / f"{contract.DRA_DRIVER}-dead-reg.sock"
    await agent.registrar.stop()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    later = Agent(tmp_path / "agent-2", directory, "2")
    await later.serve()
    await until(lambda: [path.name for path in registry.iterdir()] == [f"{contract.DRA_DRIVER}-2-reg.sock"])
    await later.end()
    assert list(registry.iterdir()) == []


async def test_socket_that_vanished_is_served_again(agent, kubelet, directory):
    (path,) = (directory / "plugins_registry").glob("*-reg.sock")
    path.unlink()
    await kubelet.register()
    agent.resources.put(claim_object("train", result(0)))
    assert (await kubelet.prepare(_claim("train"))).claims["uid-train"].error == ""


async def test_answers_of_kubelet_wake_the_publisher_of_slices(agent, kubelet):
    seen = agent.registrar.changes.count
    await kubelet.register()
    assert agent.registrar.changes.count == seen + 1


class TestProcess:
    """The whole agent, over a stand-in API server."""

    @staticmethod
    async def restarted(node: Node, kubelet: FakeKubelet) -> None:
        """Kill the agent and start the next one."""
        await node.agent.kill()
        dead = set(kubelet.registry.iterdir())
        await node.agent.start()
        await until(lambda: set(kubelet.registry.iterdir()).isdisjoint(dead))
        await kubelet.register()

    async def test_offers_gpus_by_slices_only(self, empty):
        async with dra_node(empty) as (node, _):
            assert len(offered(node)) == 8
            await until(lambda: node.allocatable(contract.RESOURCE_VGPU_MEMORY) == 0)
            assert node.allocatable(contract.RESOURCE_VGPU) == 0
            answers: list[tuple[int, str]] = []
            while (200, "ok\n") not in answers and len(answers) < 60:
                answers.append(await page(node, "/readyz"))
                await asyncio.sleep(0.2)
            assert answers[-1] == (200, "ok\n")

    async def test_claims_survive_killed_agent(self, empty):
        async with dra_node(empty) as (node, kubelet):
            claim, other = allocate(node, "kept", "gpu-0", 8192), allocate(node, "later", "gpu-0", 140000)
            first = (await kubelet.prepare(claim)).claims[claim.uid]
            assert first.error == ""
            await self.restarted(node, kubelet)
            assert (await kubelet.prepare(claim)).claims[claim.uid] == first
            refused = (await kubelet.prepare(other)).claims[other.uid].error
            assert "Already granted there" in refused
            assert (await kubelet.unprepare(claim)).claims[claim.uid].error == ""
            assert (await kubelet.prepare(other)).claims[other.uid].error == ""

    @pytest.mark.parametrize(
        ("parts", "by_name", "mib"),
        [
            pytest.param([("gpu-0", 1024), ("gpu-1", 2048)], False, [1024, 2048], id="two GPUs"),
            pytest.param([("gpu-3", 1024), ("gpu-3", 2048)], True, [3072], id="one GPU twice"),
            pytest.param([("gpu-2", 1), ("gpu-1", 2), ("gpu-2", 3), ("gpu-0", 4)], False, [4, 2, 4], id="four requests"),
        ],
    )
    async def test_container_with_several_requests_has_limits_of_all(self, empty, parts, by_name, mib):
        names = [f"gpu-{number}" for number in range(len(parts))]
        uses = [{"name": "gpus", "request": name} for name in names] if by_name else [{"name": "gpus"}]
        async with dra_node(empty) as (node, kubelet):
            user = manifest("user", {"name": "main", "image": "cuda", "resources": {"claims": uses}})
            user["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": "pair"}]
            claim = allocate_requests(node, "pair", dict(zip(names, parts, strict=True)), node.create_pod(user))
            reply = (await kubelet.prepare(claim)).claims[claim.uid]
            assert reply.error == ""
            assert [(list(one.request_names), one.device_name) for one in reply.devices] == [
                ([name], device) for name, (device, _) in zip(names, parts, strict=True)
            ]
            for named in ([""], names, names[-1:]):
                assert list(limits_in(node, passed_on(reply, *named)).values()) == mib
            too_much = allocate(node, "later", parts[0][0], None)
            await self.restarted(node, kubelet)
            assert (await kubelet.prepare(claim)).claims[claim.uid] == reply
            assert "Already granted there: claim default/pair" in (await kubelet.prepare(too_much)).claims[too_much.uid].error
            assert (await kubelet.unprepare(claim)).claims[claim.uid].error == ""
            assert [path.name for path in node.layout.cdi_dynamic.iterdir()] == []
            assert (await kubelet.prepare(too_much)).claims[too_much.uid].error == ""

    async def test_claim_waits_while_its_gpu_does_not_answer(self, empty):
        """T12. The GPU takes no new claims for a while after it answers again; this one was allocated before."""
        async with dra_node(empty, *QUICK, "--health-recovery-seconds=60", "--health-max-recovery-seconds=60") as (node, kubelet):
            claim = allocate(node, "train", "gpu-0", 1024)
            inject(node, "hang", "3600000", "--gpu", "0")
            await until(lambda: taints_of(node, "gpu-0"))
            waiting = asyncio.ensure_future(kubelet.prepare(claim))
            await asyncio.sleep(1)
            assert not waiting.done()
            inject(node, "hang", "0", "--gpu", "0")
            assert (await waiting).claims[claim.uid].error == ""
            assert taints_of(node, "gpu-0")

    async def test_silent_gpu_is_named_before_kubelet_gives_up(self, empty):
        async with dra_node(empty, *QUICK) as (node, kubelet):
            claim, other = allocate(node, "train", "gpu-0", 1024), allocate(node, "other", "gpu-1", 1024)
            inject(node, "hang", "3600000", "--gpu", "0")
            await until(lambda: taints_of(node, "gpu-0"))
            refused = (await kubelet.prepare(claim, seconds=8)).claims[claim.uid].error
            assert "which does not answer now: " in refused
            assert (await kubelet.prepare(other)).claims[other.uid].error == ""

    async def test_deleted_slices_come_back(self, empty):
        async with dra_node(empty) as (node, _):
            for one in node.cluster.list(Kind.RESOURCE_SLICE)[1]:
                node.cluster.delete(Kind.RESOURCE_SLICE, "", one["metadata"]["name"])
            await until(lambda: len(offered(node)) == 8)

    async def test_claim_status_reports_device(self, empty):
        async with dra_node(empty) as (node, kubelet):
            claim = allocate(node, "reported", "gpu-1", 1024)
            await kubelet.prepare(claim)

            def reported():
                return node.cluster.get(Kind.RESOURCE_CLAIM, "default", "reported")["status"].get("devices")

            await until(reported)
            assert reported()[0]["data"]["memoryBytes"] == 1024 << 20
            assert claim_of(node.cluster.get(Kind.RESOURCE_CLAIM, "default", "reported")) == claim

    async def test_change_to_device_plugin_waits_for_last_claim(self, empty):
        async with dra_node(empty) as (node, kubelet):
            claim = allocate(node, "last", "gpu-0", 1024)
            await kubelet.prepare(claim)
            await node.agent.stop()
            node.agent.flags.append("--allocation=plugin")
            await node.agent.start()
            await kubelet.register()
            await until(lambda: not offered(node))
            await not_ready_because(node, "waits until the last of 1 prepared ResourceClaims")
            assert node.allocatable(contract.RESOURCE_VGPU) == 0
            assert (await kubelet.unprepare(claim)).claims[claim.uid].error == ""
            await until(lambda: node.allocatable(contract.RESOURCE_VGPU) == 128)
            await node.wait_ready()

    async def test_change_to_claims_waits_for_last_container(self, empty):
        async with dra_node(empty, "--allocation=plugin") as (node, _):
            await node.wait_ready()
            node.create_pod(manifest("last"))
            await running(node, "last")
            await node.agent.stop()
            node.agent.flags.append("--allocation=dra")
            await node.agent.start()
            await until(lambda: node.allocatable(contract.RESOURCE_VGPU) == 0)
            assert not offered(node)
            node.delete_pod("last")
            await until(lambda: len(offered(node)) == 8)
