# SPDX-License-Identifier: Apache-2.0
"""The operator's commands against the stand-in API server and a real agent: what they print, change and end with."""

import asyncio
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import SOURCE_ROOT
from aliquot_cli.__main__ import main
from aliquot_cli.completion import candidates
from aliquot_lab.standin.node import NODE_TOKEN, Node
from tests.integration.agent_nodes import container, eventually, inject, make_node, manifest, running
from tests.integration.test_agent_usage import cuda, until_used

pytestmark = pytest.mark.usefixtures("build_dir")

AGENT_POD: dict[str, Any] = {
    "metadata": {"name": "aliquot-agent-x7k2p", "namespace": "aliquot-system", "labels": {"app.kubernetes.io/name": "aliquot-agent"}},
    "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "agent", "command": ["sleep", "600"]}]},
}


class Shell:
    """Runs ``aliquot`` with a kubeconfig."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.kubeconfig = node.layout.base / "kubeconfig"
        cluster = {"name": "standin", "cluster": {"server": node.api.url}}
        user = {"name": "admin", "user": {"token": NODE_TOKEN}}
        context = {"name": "here", "context": {"cluster": "standin", "user": "admin", "namespace": "default"}}
        nowhere = {"name": "nowhere", "context": {"cluster": "gone", "user": "admin"}}
        gone = {"name": "gone", "cluster": {"server": "http://127.0.0.1:9"}}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [cluster, gone],
            "users": [user],
            "contexts": [context, nowhere],
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))

    async def run(self, *arguments: str, status: int = 0) -> str:
        """Run one command; return its standard output, or its standard error when it ends with another status than 0."""

        def invoke() -> Result:
            return CliRunner().invoke(main, [*arguments, "--kubeconfig", str(self.kubeconfig)])

        done = await asyncio.to_thread(invoke)
        assert done.exit_code == status, f"{arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
        return done.stderr if status in (1, 2, 3) else done.stdout

    async def run_program(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command as a process that finds the cluster by KUBECONFIG."""
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        command = [sys.executable, "-m", "aliquot_cli", *arguments]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, cwd=SOURCE_ROOT, env=environment, timeout=60, check=False
        )

    async def run_on_terminal(self, *arguments: str, **environment: str) -> str:
        """Run the command as a process with a terminal as output."""

        def run() -> str:
            ours, theirs = pty.openpty()
            with os.fdopen(ours, "rb", buffering=0) as shown:
                command = [sys.executable, "-m", "aliquot_cli", *arguments]
                given = {**os.environ, "TERM": "xterm", "KUBECONFIG": str(self.kubeconfig), **environment}
                subprocess.run(command, stdout=theirs, stderr=theirs, cwd=SOURCE_ROOT, env=given, timeout=60, check=True)
                os.close(theirs)
                text = b""
                with suppress(OSError):  # how a terminal ends when its last writer has gone
                    while more := shown.read(65536):
                        text += more
                return text.decode()

        return await asyncio.to_thread(run)

    async def json(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(await self.run(*arguments, "-o", "json", status=status))


@asynccontextmanager
async def operator(profile: str, *flags: str) -> AsyncIterator[Shell]:
    """A node with an agent that the API server knows as a pod."""
    async with make_node(profile, *flags) as node:
        node.create_pod(AGENT_POD)
        name, namespace = AGENT_POD["metadata"]["name"], AGENT_POD["metadata"]["namespace"]
        await node.wait_for_pod(name, lambda pod: pod["status"].get("phase") == "Running", namespace=namespace)
        node.api.pages[(namespace, name)] = await node.agent.metrics_url(60)
        shell = Shell(node)
        await published(shell)
        yield shell


async def published(shell: Shell) -> None:
    """Wait for the node's inventory: it comes a moment after the agent is ready."""
    for _ in range(200):
        if (await shell.json("get", "gpus"))["gpus"]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the agent has not published its GPUs for 20 s")


async def test_what_runs_is_shown_per_share_gpu_and_node():
    async with operator("t4x2", "--placement-policy=binpack") as shell:
        node = shell.node
        node.create_pod(manifest("train", cuda("hold", "--mib", "512", mib=2048, cores=30)))
        node.create_pod(manifest("serve", container(mib=1024)))
        await running(node, "train", "serve")
        await until_used(node, "train", 512 * MIB)

        (found,) = (await shell.json("top"))["nodes"]
        shares = {one["pod"]: one for gpu in found["gpus"] for one in gpu["shares"]}
        assert shares.keys() == {"train", "serve"}
        assert shares["train"]["limit_bytes"] == 2048 * MIB
        assert shares["train"]["used_bytes"] >= 512 * MIB
        assert shares["train"]["cores_limit_ratio"] == 0.3
        assert shares["serve"]["used_bytes"] == 0
        assert [one["in_force"] for one in shares.values()] == [1, 1]

        title, *rows = (await shell.run("top", "--sort", "limit")).splitlines()
        assert title.split()[:5] == ["NODE", "GPU", "NAMESPACE", "POD", "CONTAINER"]
        assert [row.split()[3] for row in rows] == ["train", "serve"]
        assert "/2.0Gi" in rows[0]
        assert "30%" in rows[0]
        assert "\x1b" not in "".join(rows)
        assert [row.split()[3] for row in (await shell.run("top", "--filter", "SERVE")).splitlines()[1:]] == ["serve"]
        assert (await shell.run("top", "-n", "elsewhere")).splitlines()[1:] == []
        gpus = (await shell.run("top", "gpus", "-o", "wide")).splitlines()
        assert len(gpus) == 3
        assert any("2/16" in line and "healthy" in line and "Tesla T4" in line for line in gpus)
        (_, line) = (await shell.run("top", "nodes")).splitlines()
        assert line.split()[:3] == ["node-1", "2", "2/2"]
        watched = await shell.run("top", "--watch", "--seconds", "0.5", "--count", "2", "--filter", "train")
        assert [line.split()[0] for line in watched.splitlines()] == ["NODE", "node-1"] * 2


async def test_one_gpu_pod_and_node_are_described_in_full():
    async with operator("a100x8-mig") as shell:
        node = shell.node
        await eventually(lambda: node.allocatable(contract.RESOURCE_MIG_PREFIX + "1g.10gb"), "the kubelet counts the instances")
        node.create_pod(manifest("train", container(mib=2048)))
        node.create_pod(manifest("hard", {**container(), "resources": {"limits": {contract.RESOURCE_MIG_PREFIX + "1g.10gb": "1"}}}))
        node.create_pod(manifest("huge", container(mib=10_000_000)))
        await running(node, "train", "hard")
        gpus = {gpu["uuid"]: gpu for gpu in (await shell.json("get", "gpus"))["gpus"]}
        assert len(gpus) == 8
        (holder,) = [gpu for gpu in gpus.values() if any(one["pod"] == "hard" for one in gpu["shares"])]
        assert holder["mig_enabled"]
        assert [one["backend"] for one in holder["shares"]] == ["mig"]
        text = await shell.run("describe", "gpu", f"node-1/{holder['minor']}")
        assert holder["uuid"] in text
        assert "hard" in text
        assert holder["uuid"] in await shell.run("describe", "gpu", holder["uuid"][:12])
        pod = await shell.run("describe", "pod", "train")
        assert "2.0Gi requested" in pod
        assert "train" in pod.splitlines()[-1]
        listed = {one["name"]: one for one in (await shell.json("get", "pods", "-n", "default"))["pods"]}
        assert listed.keys() == {"train", "hard", "huge"}
        assert listed["hard"]["other"] == {contract.RESOURCE_MIG_PREFIX + "1g.10gb": "1"}
        assert "huge" in await shell.run("get", "pods", "huge")
        assert "A100" in await shell.run("describe", "node", "node-1")
        assert yaml.safe_load(await shell.run("get", "nodes", "-o", "yaml"))["nodes"][0]["name"] == "node-1"


async def test_cordoned_gpu_gets_no_new_pods_until_uncordoned():
    async with operator("t4x2") as shell:
        node = shell.node
        first, second = (gpu.uuid for gpu in node.inventory.gpus)
        assert await shell.run("cordon", "node-1/0") == f"GPU {first} of node-1 cordoned\n"
        assert "already" in await shell.run("cordon", first)
        states = {gpu["uuid"]: gpu["cordoned"] for gpu in (await shell.json("get", "gpus"))["gpus"]}
        assert states == {first: True, second: False}
        assert "cordoned" in await shell.run("get", "gpus", "node-1/0")
        await asyncio.sleep(1.0)
        for name in ("a", "b"):
            node.create_pod(manifest(name, container(mib=1024)))
        await running(node, "a", "b")
        (found,) = (await shell.json("top"))["nodes"]
        assert {one["device_uuid"] for gpu in found["gpus"] for one in gpu["shares"]} == {second}
        await shell.run("uncordon", "node-1/0")
        assert not any(gpu["cordoned"] for gpu in (await shell.json("get", "gpus"))["gpus"])
        await shell.run("cordon", "node-1")
        assert all(gpu["cordoned"] for gpu in (await shell.json("get", "gpus"))["gpus"])
        await shell.run("uncordon", "node-1")


async def test_unhealthy_gpu_and_silent_agent_are_shown():
    async with operator("t4x2") as shell:
        node = shell.node
        uuid = node.inventory.gpus[0].uuid
        inject(node, "lost", "--gpu", "0")
        async with asyncio.timeout(60):
            while (await shell.json("get", "gpus", uuid))["gpus"][0]["healthy"]:  # noqa: ASYNC110 - asks another process
                await asyncio.sleep(0.3)
        assert "unhealthy" in await shell.run("get", "gpus", uuid)
        await node.agent.kill()
        (found,) = (await shell.json("top"))["nodes"]
        assert found["trouble"]
        assert len(found["gpus"]) == 2
        assert "node-1: " in await shell.run("top")


async def test_names_are_completed_as_the_cluster_has_them_now():
    async with operator("t4x2") as shell:
        shell.node.create_pod(manifest("train", container(mib=2048)))
        shell.node.create_pod({"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "main", "command": ["sleep", "60"]}]}})
        await running(shell.node, "train", "plain")
        (uuid, other) = (gpu.uuid for gpu in shell.node.inventory.gpus)

        async def completed(*words: str) -> list[str]:
            command, *rest = words
            return await asyncio.to_thread(candidates, [command, "--kubeconfig", str(shell.kubeconfig), *rest])

        assert await completed("get", "nodes", "") == ["node-1"]
        assert await completed("get", "gpus", "n") == ["node-1/0", "node-1/1"]
        assert await completed("describe", "gpu", uuid[:-2]) == [uuid]
        assert await completed("describe", "pod", "") == ["train"]
        assert await completed("describe", "pod", "-n", "elsewhere", "") == []
        assert await completed("why", "t") == ["train"]
        assert await completed("cordon", "node-1") == ["node-1", "node-1/0", "node-1/1"]
        assert await completed("what-if", "--cordon", "GPU-") == sorted((uuid, other))
        assert await completed("top", "--node", "") == ["node-1"]
        assert await completed("top", "--context", "") == ["here", "nowhere"]
        begun = time.monotonic()
        assert await completed("get", "--context", "nowhere", "nodes", "") == []
        assert await completed("get", "--context", "no-such", "nodes", "") == []
        assert time.monotonic() - begun < 10


async def test_every_result_has_every_output_format():
    async with operator("t4x2") as shell:
        shell.node.create_pod(manifest("train", container(mib=2048)))
        await running(shell.node, "train")
        uuid = (await shell.json("top", "gpus", "--filter", "train"))["nodes"][0]["gpus"][0]["uuid"]
        listings = [("top", "gpus"), ("get", "pods")]
        for words in (*listings, ("describe", "gpu", uuid), ("describe", "pod", "train"), ("drift",)):
            table, wide, as_json, as_yaml = [await shell.run(*words, "-o", form) for form in ("table", "wide", "json", "yaml")]
            assert table.strip(), words
            assert json.loads(as_json).keys() == yaml.safe_load(as_yaml).keys(), words
            if words in listings:
                columns, more = [text.splitlines()[0].split() for text in (table, wide)]
                assert set(columns) < set(more), words
            else:
                assert wide.splitlines()[0] == table.splitlines()[0], words
        assert "\x1b[32mhealthy" in await shell.run_on_terminal("get", "gpus")
        assert "\x1b" not in await shell.run_on_terminal("get", "gpus", NO_COLOR="1")
        assert "\x1b" not in (await shell.run_program("get", "gpus")).stdout
        assert "train" in await shell.run("get", "pods", "-n", "default")
        assert await shell.run("drift", "-n", "default") == "no differences on 1 nodes\n"


async def test_exit_codes_tell_scripts_the_outcome():
    async with operator("t4x2") as shell:
        shell.node.create_pod(manifest("train", container(mib=2048)))
        await running(shell.node, "train")
        assert await shell.run("drift") == "no differences on 1 nodes\n"
        assert await shell.json("drift") == {"differences": [], "silent": {}}
        assert "node-9" in await shell.run("top", "--node", "node-9", status=3)
        assert "node-1/0" in await shell.run("describe", "gpu", "node-1/7", status=3)
        assert "no pod" in await shell.run("describe", "pod", "nobody", status=3)
        assert "no GPU" in await shell.run("cordon", "GPU-", status=3)
        assert "cannot be reached" in await shell.run("top", "--context", "nowhere", status=1)
        assert "no-such" in await shell.run("top", "--context", "no-such", status=1)
        assert "Usage" in await shell.run("top", "everything", status=2)
        done = await shell.run_program("top", "--node", "node-9")
        assert (done.returncode, done.stdout) == (3, "")
        done = await shell.run_program("top", "gpus")
        assert (done.returncode, done.stderr) == (0, "")
        assert "Tesla T4" in done.stdout
        await shell.node.agent.kill()
        assert "node-1" in await shell.run("drift", status=1)
