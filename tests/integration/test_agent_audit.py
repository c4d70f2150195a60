# SPDX-License-Identifier: Apache-2.0
"""What the host sees of programs that go round the shim: which container they are of, what they use, and what the policy does about it."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.adapters.container_files import GrantFiles
from agent.core.region_layout import encode_limits
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_lab.standin.node import Node
from tests.fakes.other_limits import build, environment
from tests.integration.agent_nodes import container, drift_page, eventually, grants, log_of, make_node, manifest, page_shows, running
from tests.integration.test_agent_usage import series, until_busy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]


def client(*arguments: str) -> str:
    return f"{built('bin/aliquot-cuda-client')} {' '.join(arguments)}"


def honest() -> dict[str, Any]:
    """A container that uses nearly all it may."""
    return {**container(mib=1024), "command": ["sh", "-c", f"exec {client('hold', '--mib', '900')}"]}


FIGURES = ("memory_driver_bytes", "memory_used_bytes", "processes")


def around(node, *arguments: str, spec: dict[str, Any] | None = None, every: bool = True) -> dict[str, Any]:
    """A container with a program that brings a driver library of its own, and sees ``every`` GPU of the node."""
    names = [f"{contract.ENV_SIM_DEVICE_PREFIX}{index}" for index in range(len(node.inventory.gpus))]
    hidden = " ".join(f"-u {name}" for name in names if every)
    library = built(f"lib/sim/{contract.CUDA_SONAME}").parent
    directory = f"{contract.ENV_SIM_DIR}={node.layout.base / 'sim'}"
    command = f"exec env {hidden} LD_LIBRARY_PATH={library} {directory} {client(*arguments)}"
    return {**(spec or container()), "command": ["sh", "-c", command]}


async def test_process_bypassing_shim_is_found_and_others_are_left_alone():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("honest", honest()))
        node.create_pod(manifest("static", around(node, "hold", "--mib", "100", "--device", "0")))
        node.create_pod(manifest("greedy", around(node, "hold", "--mib", "3000", "--device", "1")))
        bare = {"name": "main"}
        node.create_pod(manifest("thief", around(node, "hold", "--mib", "50", "--device", "0", spec=bare)))
        await running(node, "honest", "static", "greedy", "thief")
        given = {grant["pod"]: grant["shares"][0]["device_uuid"] for grant in grants(node)}
        uuids = [gpu.uuid for gpu in node.inventory.gpus]
        expected = {
            "static": ["shim-missing"] if given["static"] == uuids[0] else ["wrong-device"],
            "greedy": ["over-limit", "shim-missing"] if given["greedy"] == uuids[1] else ["wrong-device"],
            "thief": ["no-grant"],
        }
        found = await page_shows(node, "findings", *(kind for kinds in expected.values() for kind in kinds))
        for pod, kinds in expected.items():
            of_pod = [one for one in found if one["pod"] == pod]
            assert sorted(one["kind"] for one in of_pod) == kinds
            assert all(one["pids"] == [node.container(pod).pid] for one in of_pod)
        metrics = await node.metrics()
        assert 'aliquot_audit_findings{container="main",device_uuid="' in metrics
        assert f'kind="no-grant",namespace="default",node="{node.options.name}",pod="thief"}} 1.0' in metrics
        await eventually(lambda: [e for e in node.events("greedy") if e["reason"] == contract.EVENT_REASON_AUDIT], "an event")
        assert not [e for e in node.events("honest") if e["reason"] == contract.EVENT_REASON_AUDIT]
        for pod in ("static", "greedy", "thief"):
            assert node.container(pod).exit_code is None  # policy: report
            node.delete_pod(pod)
        await page_shows(node, "findings")


async def test_what_goes_round_the_shim_is_in_the_figures_of_its_container():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("greedy", around(node, "work", "--mib", "3000", "--seconds", "60", "--kernel-us", "1000", every=False)))
        await running(node, "greedy")
        await until_busy(node, "greedy")
        figures = {name: await series(node, f"container_{name}") for name in FIGURES}
        assert figures["memory_driver_bytes"] == {"greedy": pytest.approx(3000 * MIB, rel=0.2)}
        assert figures["memory_used_bytes"] == {"greedy": 0}, "the shim has counted nothing"
        assert figures["processes"] == {"greedy": 1}


async def test_policy_kill_kills_only_offending_process():
    async with make_node("t4x2", "--audit-policy=kill") as node:
        node.create_pod(manifest("honest", honest()))
        node.create_pod(manifest("static", around(node, "hold", "--mib", "100")))
        await running(node, "honest", "static")
        run = node.container("static")
        assert await asyncio.wait_for(run.wait(), 60) == 128 + 9
        assert node.container("honest").exit_code is None
        assert 'action="kill"' in await node.metrics()


async def test_process_bypassing_shim_is_killed_during_api_outage_and_then_no_finding():
    async with make_node("t4x2", "--audit-policy=kill") as node:
        begin = node.layout.base / "begin"
        late = around(node, "hold", "--mib", "100")
        late["command"][-1] = f"until test -e {begin}; do sleep 0.1; done; {late['command'][-1]}"
        node.create_pod({**(pod := manifest("static", late)), "spec": {**pod["spec"], "restartPolicy": "Never"}})
        node.create_pod(manifest("honest", honest()))
        await running(node, "honest", "static")
        run = node.container("static")
        with node.api.outage():
            await eventually(lambda: "watching pods" in log_of(node), "the agent notices that the API is away")
            begin.touch()
            assert await asyncio.wait_for(run.wait(), 30) == 128 + 9
            await page_shows(node, "findings")
            assert 'action="kill"' in await node.metrics()
        assert node.container("honest").exit_code is None


async def test_policy_evict_evicts_pod_except_exempt_ones():
    async with make_node("t4x2", "--audit-policy=evict", "--audit-exempt-namespaces=monitoring,other") as node:
        node.create_pod(manifest("watcher", around(node, "hold", "--mib", "10", spec={"name": "main"}), namespace="monitoring"))
        await node.wait_for_pod("watcher", lambda pod: pod["status"].get("phase") == "Running", namespace="monitoring")
        node.create_pod(manifest("static", around(node, "hold", "--mib", "100")))
        await running(node, "static")
        await node.wait_gone("static")
        await eventually(lambda: not grants(node), "its share is free")
        assert node.pod("watcher", "monitoring")["status"]["phase"] == "Running"


async def test_a_process_of_the_host_is_nobodys_container():
    async with make_node("t4x2", "--audit-policy=kill") as node:
        environment = {**os.environ, **node.hardware.host_environment()}
        program = built("bin/aliquot-cuda-client")
        process = await asyncio.create_subprocess_exec(program, "hold", "--mib", "10", env=environment, stdout=asyncio.subprocess.DEVNULL)
        try:
            entry = node.layout.proc / str(process.pid)
            entry.symlink_to(f"/proc/{process.pid}")
            (found,) = await page_shows(node, "findings", "host-process")
            assert (found["pids"], found["pod"]) == ([process.pid], "")
            await asyncio.sleep(1.0)
            assert process.returncode is None
        finally:
            entry.unlink()
            process.kill()
            await process.wait()


def kernels(*arguments: str, cores: int, **more: Any) -> dict[str, Any]:
    """A container that launches kernels all the time."""
    command = " ".join(("exec", client("work", "--mib", "50", "--seconds", "100", *arguments)))
    return {**container(mib=512, cores=cores), "command": ["sh", "-c", command], **more}


def unlimited(node: Node, library: Path, cores: int) -> dict[str, Any]:
    """A container in which the shim reads limits that the tenant wrote, once the test has put them there."""
    spec = kernels("--kernel-us", "2000", cores=cores)
    other = node.layout.base / "containers" / "other-limits"
    spec["command"][2] = f"until test -e {other}; do sleep 0.1; done; export {environment(library, other)}; {spec['command'][2]}"
    return spec


def other_limits(node: Node, pod: str) -> bytes:
    """The limits of a pod's container, without its SM limit."""
    (grant_id,) = [grant["grant_id"] for grant in grants(node) if grant["pod"] == pod]
    limits = GrantFiles(node.layout.run / "containers").limits(grant_id)
    assert limits is not None
    return encode_limits(replace(limits, devices=tuple(replace(device, sm_percent=0) for device in limits.devices)))


@pytest.mark.parametrize("policy", ["report", "kill", pytest.param("evict", marks=pytest.mark.soak)])
async def test_container_with_replaced_limits_is_found_above_its_cores(tmp_path, policy):
    async with make_node("t4x2", f"--audit-policy={policy}", "--placement-policy=spread") as node:
        node.create_pod(manifest("hostile", unlimited(node, build(tmp_path), cores=10)))
        node.create_pod(manifest("honest", kernels("--kernel-us", "2000", cores=30)))
        await running(node, "hostile", "honest")
        run = node.container("hostile")
        other = node.layout.base / "containers" / "other-limits"
        other.with_suffix(".new").write_bytes(other_limits(node, "hostile"))
        other.with_suffix(".new").rename(other)
        if policy == "kill":
            assert await asyncio.wait_for(run.wait(), 40) == 128 + 9
        elif policy == "evict":
            await node.wait_gone("hostile")
        else:
            await eventually(lambda: "kind=over-cores" in log_of(node), "the finding")
            (found,) = await page_shows(node, "findings", "over-cores")
            assert (found["pod"], found["pids"]) == ("hostile", [run.pid])
            in_force = await series(node, "container_enforcement_in_force")
            assert in_force == {"hostile": 0.0, "honest": 1.0}
            assert run.exit_code is None
        await eventually(lambda: [e for e in node.events("hostile") if "of the cores" in e["message"]], "an event")
        assert node.container("honest").exit_code is None


async def test_honest_containers_with_cores_are_no_finding():
    """Small kernels, long ones, bursts of short processes, priorities, and use of idle cores, over two windows."""
    short = f"while true; do {client('work', '--mib', '20', '--seconds', '1', '--kernel-us', '3000')}; sleep 1; done"
    weight = {contract.ANNOTATION_CORES_MODE: "weight"}
    pods = {
        "small": (kernels("--kernel-us", "200", cores=15), {}),
        "long": (kernels("--kernel-us", "200000", cores=20), {}),
        "bursts": ({**container(mib=512, cores=20), "command": ["sh", "-c", short]}, {}),
        "low": (kernels("--kernel-us", "2000", cores=20), {contract.ANNOTATION_PRIORITY: "low"}),
        "high": (kernels("--kernel-us", "2000", cores=20), {contract.ANNOTATION_PRIORITY: "high"}),
        "elastic": (kernels("--kernel-us", "2000", cores=20), weight),
        "free": (kernels("--kernel-us", "2000", cores=0), {}),
    }
    async with make_node("t4x2", "--audit-policy=kill") as node:
        for name, (spec, annotations) in pods.items():
            if name == "free":
                del spec["resources"]["limits"][contract.RESOURCE_VGPU_CORES]
            node.create_pod(manifest(name, spec, annotations=annotations))
        await running(node, *pods)
        await asyncio.sleep(14.0)
        assert (await drift_page(node))["findings"] == []
        assert "over-cores" not in log_of(node)
        assert set((await series(node, "container_enforcement_in_force")).values()) == {1.0}
