# SPDX-License-Identifier: Apache-2.0
"""What containers get, through reordered and concurrent starts, crashes of the agent and outages of the API."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent.core.region_layout import decode_limits
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.node import Node
from aliquot_lab.standin.plugins import Behaviour
from tests.integration.agent_nodes import (
    VGPU,
    assign,
    assignment,
    container,
    eventually,
    grants,
    make_node,
    manifest,
    page,
    promised_mib,
    refused,
    running,
    share,
    usable_mib,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir"), pytest.mark.asyncio(loop_scope="module")]
ASSIGNED = "--placement=assigned"
USABLE_T4_MIB = 14915
"""What the driver leaves of a T4's 15360 MiB."""


def limits_in(node, pod: str, name: str | None = None):
    """The limits a container sees."""
    path = node.container(pod, name).root / contract.CONTAINER_LIMITS.lstrip("/")
    return [(device.uuid, device.memory_bytes // MIB, device.sm_percent) for device in decode_limits(path.read_bytes()).devices]


def granted(node: Node, *pods: str) -> list[str]:
    """Which of these pods have a grant."""
    return [grant["pod"] for grant in grants(node) if grant["pod"] in pods]


async def gone(node: Node, pod: str) -> None:
    """Delete a pod, so that kubelet no longer counts what it asks for."""
    node.delete_pod(pod)
    await node.wait_gone(pod)


# Nodes that tests share, each with pods of its own names.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large_node(build_dir: Path) -> AsyncIterator[Node]:
    # a kubelet with a topology manager chooses a NUMA node before it asks for advice
    async with make_node("h200x8", ASSIGNED, behaviour=Behaviour(align_numa=False)) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def assigned_node(build_dir: Path) -> AsyncIterator[Node]:
    async with make_node("t4x2", ASSIGNED) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local_node(build_dir: Path) -> AsyncIterator[Node]:
    async with make_node("t4x2") as node:
        yield node


async def test_percentage_is_part_of_the_gpu_that_local_placement_chose(local_node):
    node = local_node
    part = container()
    part["resources"]["limits"] = {VGPU: "2", contract.RESOURCE_VGPU_MEMORY_PERCENT: "66"}
    node.create_pod(manifest("part", part))
    await running(node, "part")
    assert [mib for _, mib, _ in limits_in(node, "part")] == [USABLE_T4_MIB * 33 // 100] * 2
    assert node.allocatable(contract.RESOURCE_VGPU_MEMORY_PERCENT) == 200
    node.delete_pod("part")
    await node.wait_gone("part")


class TestAssigned:
    async def test_a_container_gets_what_its_pod_was_assigned(self, large_node):
        node = large_node
        text = assignment("uid-a", main=[share(node, 5, 2048, 30), share(node, 2, 2048, 30)])
        metadata: dict[str, Any] = {"uid": "uid-a", "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}
        node.create_pod(manifest("a", container(vgpus=2, mib=4096, cores=60), **metadata))
        await running(node, "a")
        uuids = [node.inventory.gpus[index].uuid for index in (5, 2)]
        assert limits_in(node, "a") == [(uuids[0], 2048, 30), (uuids[1], 2048, 30)]
        visible = {value for name, value in node.container("a").env.items() if name.startswith(contract.ENV_SIM_DEVICE_PREFIX)}
        assert visible == set(uuids)

    async def test_kubelet_is_steered_to_the_assigned_gpus(self, large_node):
        node = large_node
        for index in range(8):
            text = assignment(f"uid-{index}", main=[share(node, index)])
            metadata: dict[str, Any] = {"uid": f"uid-{index}", "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}
            node.create_pod(manifest(f"steered-{index}", **metadata))
            await running(node, f"steered-{index}")
        found = [grant for grant in grants(node) if grant["pod"].startswith("steered-")]
        assert len(found) == 8
        for grant in found:
            assert grant["device_ids"][0].startswith(grant["shares"][0]["device_uuid"])

    async def test_a_pod_that_was_not_placed_waits_and_starts_once_it_is(self, assigned_node):
        node = assigned_node
        pod = node.create_pod(manifest("waits"))
        await refused(node, "waits", contract.ANNOTATION_ASSIGNMENT, contract.SCHEDULER_NAME)
        await eventually(
            lambda: [event for event in node.events("waits") if event["reason"] == contract.EVENT_REASON_REFUSED],
            "an event about the refusal",
        )
        assert 'aliquot_refusals_total{reason="assignment-missing"}' in await node.metrics()
        assign(node, "waits", assignment(pod["metadata"]["uid"], main=[share(node, 1)]))
        await running(node, "waits")
        await gone(node, "waits")

    async def test_an_assignment_for_an_earlier_pod_of_the_name_is_refused(self, assigned_node):
        node = assigned_node
        text = assignment("uid-of-the-first", main=[share(node, 1)])
        node.create_pod(manifest("namesake", annotations={contract.ANNOTATION_ASSIGNMENT: text}))
        await refused(node, "namesake", "earlier pod of this name")
        assert granted(node, "namesake") == []
        await gone(node, "namesake")

    async def test_an_assignment_of_more_than_the_spec_asks_is_refused(self, assigned_node):
        node = assigned_node
        pod = node.create_pod(manifest("modest"))
        assign(node, "modest", assignment(pod["metadata"]["uid"], main=[share(node, 1, 4096)]))
        await refused(node, "modest", "the pod's spec requests 1 GiB")
        assert granted(node, "modest") == []
        await gone(node, "modest")

    async def test_two_pods_assigned_same_memory_are_distinguished_by_ledger(self, assigned_node):
        node = assigned_node
        whole = await usable_mib(node) - 512
        for name in ("one", "other"):
            text = assignment(f"uid-{name}", main=[share(node, 0, whole)])
            metadata: dict[str, Any] = {"uid": f"uid-{name}", "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}
            node.create_pod(manifest(name, container(mib=whole), **metadata))
        await eventually(lambda: len(granted(node, "one", "other")) == 1, "one of them has its share")
        (first,) = granted(node, "one", "other")
        second = "other" if first == "one" else "one"
        await refused(node, second, "without enough free memory", f"default/{first}/main")
        node.delete_pod(first)
        await running(node, second)


class TestCrashes:
    async def test_the_agent_killed_between_allocate_and_prestart_heals(self):
        async with make_node("t4x2", ASSIGNED) as node:
            pod = node.create_pod(manifest("a"))
            await refused(node, "a", contract.ANNOTATION_ASSIGNMENT)  # allocated, not started
            await node.agent.kill()
            assign(node, "a", assignment(pod["metadata"]["uid"], main=[share(node, 1)]))
            await node.agent.start()
            await running(node, "a")
            assert limits_in(node, "a") == [(node.inventory.gpus[1].uuid, 1024, 0)]

    async def test_the_agent_killed_inside_prestart_heals(self):
        async with make_node("t4x2") as node:
            with node.api.outage():
                node.cluster.create(Kind.POD, {**manifest("a"), "spec": {**manifest("a")["spec"], "nodeName": node.options.name}})
                await asyncio.sleep(1.0)  # PreStart waits for the pod, which the agent cannot know
                await node.agent.kill()
            await node.agent.start()
            await running(node, "a")
            assert len(grants(node)) == 1

    async def test_a_torn_ledger_row_is_set_aside_and_healed(self):
        async with make_node() as node:
            node.create_pod(manifest("a"))
            await running(node, "a")
            before = promised_mib(node)
            await node.agent.kill()
            (row,) = (node.layout.state / "ledger").glob("*.json")
            row.write_bytes(row.read_bytes()[:40])
            await node.agent.start()
            await node.wait_ready()
            assert promised_mib(node) == before
            assert list((node.layout.state / "ledger/quarantine").iterdir())

    async def test_pods_ended_during_agent_absence_are_released_on_its_return(self):
        async with make_node() as node:
            for name in ("a", "b"):
                node.create_pod(manifest(name))
            await running(node, "a", "b")
            await node.agent.kill()
            node.delete_pod("a")
            await node.wait_gone("a")
            await node.agent.start()
            await node.wait_ready()
            await eventually(lambda: [grant["pod"] for grant in grants(node)] == ["b"], "the ended pod's grant is gone")
            assert len(list(node.layout.cdi_dynamic.iterdir())) == 1

    async def test_kills_during_start_burst_leave_every_pod_with_own_devices(self):
        async with make_node("h200x8", ASSIGNED) as node:
            names = [f"p{number}" for number in range(12)]
            pods = {name: node.create_pod(manifest(name, container(mib=20_000))) for name in names}
            for name in names:
                await refused(
                    node, name, contract.ANNOTATION_ASSIGNMENT
                )  # allocated: an agent killed in Allocate would fail the pod for good
            for number, name in enumerate(names):
                assign(node, name, assignment(pods[name]["metadata"]["uid"], main=[share(node, number % 8, 20_000)]))
            for pause in (0.05, 0.3, 0.6, 0.9):
                await asyncio.sleep(pause)
                await node.agent.kill()
                await node.agent.start()
            await running(node, *names)
            for number, name in enumerate(names):
                assert limits_in(node, name) == [(node.inventory.gpus[number % 8].uuid, 20_000, 0)]
            assert len(grants(node)) == 12


class TestManyPods:
    async def test_pods_starting_together_get_own_devices_in_any_order(self, large_node):
        node = large_node
        names = [f"p{number}" for number in range(24)]
        for number, name in enumerate(names):
            text = assignment(f"uid-{name}", a=[share(node, number % 8, 1000 + number)], b=[share(node, (number + 3) % 8, 2000 + number)])
            metadata: dict[str, Any] = {"uid": f"uid-{name}", "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}
            node.create_pod(manifest(name, container("a", mib=1000 + number), container("b", mib=2000 + number), **metadata))
        await running(node, *names)
        for number, name in enumerate(names):
            assert limits_in(node, name, "a") == [(node.inventory.gpus[number % 8].uuid, 1000 + number, 0)]
            assert limits_in(node, name, "b") == [(node.inventory.gpus[(number + 3) % 8].uuid, 2000 + number, 0)]

    async def test_small_pods_share_gpu_under_binpack_with_any_kubelet_ids(self):
        # a kubelet with a topology manager may pass advice over
        for align_numa in (True, False):
            async with make_node("t4x2", "--placement-policy=binpack", behaviour=Behaviour(align_numa=align_numa)) as node:
                for name, mib in (("a", 1024), ("b", 2048), ("c", 512)):
                    node.create_pod(manifest(name, container(mib=mib)))
                await running(node, "a", "b", "c")
                assert sorted(promised_mib(node).values()) == [0, 3584]

    async def test_spread_uses_every_gpu(self):
        async with make_node("t4x2", "--placement-policy=spread") as node:
            for name in ("a", "b"):
                node.create_pod(manifest(name))
                await running(node, name)
            assert sorted(promised_mib(node).values()) == [1024, 1024]

    async def test_a_full_node_refuses_the_rest_and_serves_them_as_others_end(self):
        async with make_node("t4x2", "--publish-node-capacity=false") as node:  # else kubelet itself would refuse the fifth
            half = USABLE_T4_MIB // 2
            names = [f"p{number}" for number in range(5)]
            for name in names:
                node.create_pod(manifest(name, container(mib=half)))
            await eventually(lambda: len(grants(node)) == 4, "four fit")
            (left,) = set(names) - {grant["pod"] for grant in grants(node)}
            await refused(node, left, "without enough free memory")
            node.delete_pod(next(name for name in names if name != left))
            await running(node, left)

    async def test_deleted_pod_leaves_no_trace(self):
        async with make_node("t4x2") as node:
            names = [f"p{number}" for number in range(8)]
            for name in names:
                node.create_pod(manifest(name))
            await running(node, *names)
            for name in names:
                node.delete_pod(name)
            await eventually(lambda: not grants(node), "the ledger is empty")
            await eventually(lambda: not list(node.layout.cdi_dynamic.iterdir()), "no CDI spec is left")
            assert not list((node.layout.run / "containers").iterdir())
            assert "aliquot_container_info{" not in await node.metrics()


class TestLife:
    async def test_a_restarted_container_keeps_its_devices(self, local_node):
        node = local_node
        node.create_pod(manifest("restarts", container(mib=1500, command=["sh", "-c", "sleep 1"])))
        await running(node, "restarts")
        before = limits_in(node, "restarts")
        await node.wait_for_pod("restarts", lambda pod: any(one["restartCount"] for one in pod["status"].get("containerStatuses", ())))
        await running(node, "restarts")
        assert limits_in(node, "restarts") == before
        await gone(node, "restarts")

    async def test_an_init_container_has_a_share_and_hands_it_on(self, local_node):
        node = local_node
        init = container("warm", mib=3000, command=["sh", "-c", "sleep 0.5"])
        node.create_pod(manifest("initialised", container(vgpus=2, mib=4000), init=[init]))
        await running(node, "initialised")
        assert limits_in(node, "initialised", "warm")[0][1] == 3000
        assert [mib for _, mib, _ in limits_in(node, "initialised", "main")] == [2000, 2000]

        def holders() -> list[str]:
            return [grant["container"] for grant in grants(node) if grant["pod"] == "initialised"]

        await eventually(lambda: holders() == ["main"], "only the app container's grant is left")

    async def test_a_pod_that_completes_frees_its_share_while_it_is_still_listed(self, local_node):
        node = local_node
        body = manifest("completes", container(command=["true"]))
        body["spec"]["restartPolicy"] = "Never"
        node.create_pod(body)
        await node.wait_for_pod("completes", lambda pod: pod["status"].get("phase") == "Succeeded")
        await eventually(lambda: not granted(node, "completes"), "the share is free")
        assert node.pod("completes")

    async def test_a_recreated_pod_of_the_name_gets_a_grant_of_its_own(self, local_node):
        node = local_node
        first = node.create_pod(manifest("again"))
        await running(node, "again")
        node.delete_pod("again")
        await node.wait_gone("again")
        second = node.create_pod(manifest("again", container(mib=2048)))
        await running(node, "again")
        assert first["metadata"]["uid"] != second["metadata"]["uid"]

        def holders() -> list[str]:
            return [grant["pod_uid"] for grant in grants(node) if grant["pod"] == "again"]

        await eventually(lambda: holders() == [second["metadata"]["uid"]], "the first's grant is gone")
        assert limits_in(node, "again")[0][1] == 2048

    async def test_an_outage_of_the_api_stops_neither_restarts_nor_the_agent(self):
        async with make_node("t4x2") as node:
            spec = container()
            spec["command"] = ["sh", "-c", "sleep 1"]
            node.create_pod(manifest("a", spec))
            await running(node, "a")
            run = node.container("a").id
            with node.api.outage():
                await eventually(lambda: node.container("a").id != run, "the container was started again during the outage")
                assert (await page(node, "/healthz"))[0] == 200
            node.create_pod(manifest("b"))
            await running(node, "b")

    async def test_preload_variant_is_mounted_on_request(self):
        async with make_node("t4x2", "--interposition=preload") as node:
            node.create_pod(manifest("a"))
            await running(node, "a")
            (spec,) = node.layout.cdi_dynamic.iterdir()
            mounts = {mount["containerPath"] for mount in json.loads(spec.read_bytes())["devices"][0]["containerEdits"]["mounts"]}
            assert {contract.LD_SO_PRELOAD, contract.CONTAINER_PRELOAD} <= mounts

    async def test_every_file_a_container_can_write_belongs_to_it_alone(self, local_node):
        node = local_node
        for name in ("writes", "writes-too"):
            node.create_pod(manifest(name))
        await running(node, "writes", "writes-too")
        writable = []
        for spec in node.layout.cdi_dynamic.iterdir():
            mounts = json.loads(spec.read_bytes())["devices"][0]["containerEdits"]["mounts"]
            writable.append([mount["hostPath"] for mount in mounts if "rw" in mount["options"]])
        assert len(writable) >= 2
        assert all(len(paths) == 1 and Path(paths[0]).name == "region" for paths in writable)
        assert len({path for paths in writable for path in paths}) == len(writable)

    async def test_resources_of_kubelet_are_counted_in_shares(self):
        async with make_node("t4x2", "--shares-per-gpu=2") as node:
            assert node.allocatable(VGPU) == 4
