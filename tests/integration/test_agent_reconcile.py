# SPDX-License-Identifier: Apache-2.0
"""What differs on a node is found, reported and repaired: files, rows, specs, assignments, and shares of pods that are gone."""

import asyncio
import json
import os
import time
from dataclasses import replace

import pytest

from agent.adapters.container_files import GrantFiles
from agent.core.region_layout import decode_limits, encode_limits
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.node import Node
from tests.integration.agent_nodes import (
    assign,
    assignment,
    container,
    drift_page,
    eventually,
    grants,
    make_node,
    manifest,
    page,
    page_shows,
    refused,
    running,
    share,
)
from tests.integration.mig_nodes import a100_topology, ctk, on_host

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]


async def cures(node) -> dict[str, float]:
    """How many drifts of each kind were cured so far."""
    lines = [line for line in (await node.metrics()).splitlines() if line.startswith("aliquot_drift_cures_total{")]
    return {line.split('kind="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def cured(node, *kinds: str) -> None:
    async with asyncio.timeout(60):
        while not set(kinds) <= (await cures(node)).keys():  # noqa: ASYNC110 - asks another process
            await asyncio.sleep(0.05)


async def test_lost_or_changed_files_are_rewritten_unnoticed_by_container():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a"))
        await running(node, "a")
        (grant,) = grants(node)
        pid, name = node.container("a").pid, grant["grant_id"]
        row = node.layout.state / "ledger" / f"{name}.json"
        files = node.layout.run / "containers" / name
        (spec,) = node.layout.cdi_dynamic.iterdir()
        before = {path: path.read_bytes() for path in (row, files / "limits", spec)}
        await page_shows(node, "drifts")

        row.unlink()
        spec.unlink()
        (files / "region").unlink()
        await cured(node, "lost-row", "lost-spec", "lost-files")
        spec.write_bytes(b"{}")
        content = bytearray((files / "limits").read_bytes())
        (files / "limits").chmod(0o644)
        (files / "limits").write_bytes(content[:200])
        row.write_bytes(row.read_bytes().replace(b'"container"', b'"contained"'))
        await eventually(lambda: {path: path.exists() and path.read_bytes() for path in before} == before, "all is as it was")
        await page_shows(node, "drifts")
        assert (files / "region").is_file()
        assert (node.container("a").pid, node.container("a").exit_code) == (pid, None)
        metrics = await node.metrics()
        assert f'aliquot_drift{{kind="lost-spec",node="{node.options.name}"}} 0.0' in metrics
        await eventually(lambda: [e for e in node.events("a") if e["reason"] == contract.EVENT_REASON_DRIFT], "an event about it")


async def test_limits_that_somebody_changed_are_put_back_where_the_container_sees_them():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a"))
        await running(node, "a")
        (grant,) = grants(node)
        limits = node.layout.run / "containers" / grant["grant_id"] / "limits"
        seen = node.container("a").root / contract.CONTAINER_LIMITS.lstrip("/")
        granted = decode_limits(limits.read_bytes())
        (device,) = granted.devices
        limits.chmod(0o644)
        limits.write_bytes(encode_limits(replace(granted, devices=(replace(device, memory_bytes=2 * device.memory_bytes),))))
        await cured(node, "changed-limits")
        await eventually(lambda: decode_limits(seen.read_bytes(), interrupted_too=True) == granted, "they are what was granted")
        await page_shows(node, "drifts")
        await eventually(lambda: "limits on disk differ from its grant" in reported(node, "a"), "an event about it")


def reported(node: Node, pod: str) -> str:
    """What the events about a pod's drift say."""
    return " ".join(event["message"] for event in node.events(pod) if event["reason"] == contract.EVENT_REASON_DRIFT)


async def test_share_of_deleted_pod_is_held_with_node_event_while_kubelet_fails():
    async with make_node("t4x2") as node:
        pod = node.create_pod(manifest("a"))
        await running(node, "a")
        pid = node.container("a").pid
        await node.kubelet.stop()
        node.cluster.delete(Kind.POD, "default", "a")
        (drift,) = await page_shows(node, "drifts", "pod-gone")
        assert (drift["pod"], drift["podUid"], drift["cure"]) == ("a", pod["metadata"]["uid"], "wait")
        os.kill(pid, 0)  # the container runs on
        assert [grant["pod"] for grant in grants(node)] == ["a"]
        _, events = node.cluster.list(Kind.EVENT, lambda event: event["involvedObject"]["kind"] == "Node")
        assert [(event["reason"], "its pod is deleted" in event["message"]) for event in events] == [(contract.EVENT_REASON_DRIFT, True)]
        await node.kubelet.start()
        await eventually(lambda: not grants(node), "kubelet ends the container, and its share is free")
        await page_shows(node, "drifts")


async def test_running_container_with_other_kubelet_ids_gets_event_and_keeps_share():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a"))
        await running(node, "a")
        before, table = grants(node), node.kubelet.devices.table
        (listed,) = table.allocations
        other = min(table.healthy(listed.resource) - set(listed.ids))
        table.allocations = [replace(listed, ids=(other,))]
        (drift,) = await page_shows(node, "drifts", "ids-differ")
        assert (drift["pod"], drift["container"], drift["cure"]) == ("a", "main", "evict")
        await eventually(lambda: "kubelet lists it with other device IDs" in reported(node, "a"), "an event about it")
        assert grants(node) == before
        assert node.container("a").exit_code is None
        table.allocations = [listed]
        await page_shows(node, "drifts")


DESTROY = """
instance = nv.nvmlDeviceGetGpuInstanceById(gpu, nv.nvmlDeviceGetGpuInstanceId(nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)))
nv.nvmlComputeInstanceDestroy(nv.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
nv.nvmlGpuInstanceDestroy(instance)
result = None
"""


async def test_pod_with_removed_device_gets_event_and_policy_evicts_it(tmp_path):
    topology = a100_topology(tmp_path, instances=("gpu=0 profile=3g.40gb start=0",))
    async with make_node(topology, "--drift-policy=evict", f"--nvidia-ctk={ctk(tmp_path)}") as node:
        resource = contract.RESOURCE_MIG_PREFIX + "3g.40gb"
        await eventually(lambda: node.allocatable(resource) == 1, "kubelet knows the instance")
        node.create_pod(manifest("a", {"name": "main", "command": ["sleep", "600"], "resources": {"limits": {resource: "1"}}}))
        await running(node, "a")
        ((given,),) = [grant["shares"] for grant in grants(node)]
        on_host(node, DESTROY, 0)
        await eventually(lambda: f"this node no longer has {given['device_uuid']}" in reported(node, "a"), "an event about it")
        await node.wait_gone("a")
        await eventually(lambda: not grants(node), "nothing is held")
        await page_shows(node, "drifts")
        assert (await cures(node))["unknown-device"] == 1


async def test_program_starting_after_cure_uses_region_that_agent_reads():
    async with make_node("t4x2") as node:
        program = f"while [ ! -e go ]; do sleep 0.05; done; exec {built('bin/aliquot-cuda-client')} hold --mib 200"
        node.create_pod(manifest("a", {**container(), "command": ["sh", "-c", program]}))
        await running(node, "a")
        (spec,) = node.layout.cdi_dynamic.iterdir()
        spec.unlink()
        await cured(node, "lost-spec")
        (node.container("a").root / "go").touch()
        await eventually(lambda: node.container("a").lines(), "it holds its memory")
        (grant,) = grants(node)
        view = GrantFiles(node.layout.run / "containers").region(grant["grant_id"])
        assert view is not None
        assert [slot.devices[0].used_bytes >= 200 * MIB for slot in view.snapshot.slots] == [True]


async def test_files_without_owner_are_removed():
    async with make_node("t4x2") as node:
        shown = await drift_page(node)
        assert (shown["node"], shown["drifts"], shown["findings"]) == ("node-1", [], [])
        node.create_pod(manifest("a"))
        await running(node, "a")
        names = [f"stray{letter * 19}" for letter in "abc"]  # each is found by itself, not by the company it keeps
        spec = node.layout.cdi_dynamic / f"{contract.CDI_FILE_PREFIX}{names[0]}.json"
        spec.write_text("{}")
        directory = node.layout.run / "containers" / names[1]
        directory.mkdir()
        (directory / "region").write_bytes(b"x" * 100)
        row = node.layout.state / "ledger" / f"{names[2]}.json"
        row.write_text("{}")
        other = node.layout.cdi_dynamic / "vendor.example-device.json"
        other.write_text("{}")
        await cured(node, "stray-files")
        await eventually(lambda: not any(path.exists() for path in (spec, directory, row)), "all three are gone")
        assert other.exists()  # another vendor's
        assert [grant["pod"] for grant in grants(node)] == ["a"]


async def test_assignment_changed_under_running_container_gives_event_and_no_change():
    async with make_node("t4x2", "--placement=assigned") as node:
        pod = node.create_pod(manifest("a"))
        uid = pod["metadata"]["uid"]
        assign(node, "a", assignment(uid, main=[share(node, 0)]))
        await running(node, "a")
        before = grants(node)
        assign(node, "a", assignment(uid, main=[share(node, 1)]))
        (drift,) = await page_shows(node, "drifts", "assignment-differs")
        assert node.inventory.gpus[1].uuid in str(drift["message"])
        assert (drift["pod"], drift["container"], drift["podUid"], drift["cure"]) == ("a", "main", uid, "evict")
        await asyncio.sleep(1.0)
        assert grants(node) == before
        limits = decode_limits((node.container("a").root / contract.CONTAINER_LIMITS.lstrip("/")).read_bytes())
        assert limits.devices[0].uuid == node.inventory.gpus[0].uuid
        await running(node, "a")
        assign(node, "a", assignment(uid, main=[share(node, 0)]))
        await page_shows(node, "drifts")


async def test_share_is_free_within_period_after_any_end_of_pod():
    async with make_node("t4x2", "--reconcile-seconds=2") as node:
        for name in ("a", "b", "c"):
            node.create_pod(manifest(name))
        await running(node, "a", "b", "c")
        begun = time.monotonic()
        node.delete_pod("a")
        node.container("b").signal_group(9)  # restarts, and keeps its share
        await node.agent.kill()
        node.delete_pod("c")
        await node.wait_gone("a")
        await node.wait_gone("c")
        await node.agent.start()
        await node.wait_ready()
        await eventually(lambda: [grant["pod"] for grant in grants(node)] == ["b"], "the shares are free")
        assert time.monotonic() - begun < 8
        names = {grants(node)[0]["grant_id"]}
        assert {path.name for path in (node.layout.run / "containers").iterdir()} == names
        assert {json.loads(path.read_bytes())["devices"][0]["name"] for path in node.layout.cdi_dynamic.iterdir()} == names


async def test_unwritable_cdi_directory_is_named_and_starts_resume_once_writable():
    async with make_node("t4x2") as node:
        directory = node.layout.cdi_dynamic
        aside = directory.with_name("aside")
        directory.rename(aside)
        directory.write_text("in the way")
        node.create_pod(manifest("a"))
        await refused(node, "a", str(directory), "tries again when kubelet retries")
        assert (await page(node, "/healthz"))[0] == 200
        directory.unlink()
        aside.rename(directory)
        await running(node, "a")
        await page_shows(node, "drifts")
        assert len(list(directory.iterdir())) == len(grants(node)) == 1
