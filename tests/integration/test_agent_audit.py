"""What the host sees of programs that go round the shim: which container they are of, what they use, and what the policy does about it."""

import asyncio
import os
from typing import Any

import pytest

from aliquot.paths import built
from proto import contract
from proto.units import MIB
from tests.integration.agent_nodes import container, eventually, grants, log_of, make_node, manifest, page_shows, running
from tests.integration.test_agent_usage import series, until_busy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]


def client(*arguments: str) -> str:
    return f"{built('bin/aliquot-cuda-client')} {' '.join(arguments)}"


def honest() -> dict[str, Any]:
    """A container that uses nearly all it may."""
    return {**container(mib=1024), "command": ["sh", "-c", f"exec {client('hold', '--mib', '900')}"]}


FIGURES = ("memory_driver_bytes", "memory_used_bytes", "processes")


def around(node, *arguments: str, spec: dict[str, Any] | None = None, every: bool = True) -> dict[str, Any]:
    """A container whose program brings a driver library of its own, and sees ``every`` GPU of the node."""
    names = [f"{contract.ENV_SIM_DEVICE_PREFIX}{index}" for index in range(len(node.inventory.gpus))]
    hidden = " ".join(f"-u {name}" for name in names if every)
    library = built(f"lib/sim/{contract.CUDA_SONAME}").parent
    directory = f"{contract.ENV_SIM_DIR}={node.layout.base / 'sim'}"
    command = f"exec env {hidden} LD_LIBRARY_PATH={library} {directory} {client(*arguments)}"
    return {**(spec or container()), "command": ["sh", "-c", command]}


async def test_who_goes_round_the_shim_is_found_and_who_does_not_is_left_alone():
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


async def test_where_the_policy_says_so_the_process_is_killed_and_no_other():
    async with make_node("t4x2", "--audit-policy=kill") as node:
        node.create_pod(manifest("honest", honest()))
        node.create_pod(manifest("static", around(node, "hold", "--mib", "100")))
        await running(node, "honest", "static")
        run = node.container("static")
        assert await asyncio.wait_for(run.wait(), 15) == 128 + 9
        assert node.container("honest").exit_code is None
        assert 'action="kill"' in await node.metrics()


async def test_while_the_api_is_away_who_goes_round_the_shim_is_killed_all_the_same_and_is_no_finding_afterwards():
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


async def test_where_the_policy_says_so_the_pod_is_evicted_and_exempt_ones_are_not():
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
