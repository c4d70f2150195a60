# SPDX-License-Identifier: Apache-2.0
"""Two agents on one node: the second changes nothing while the first lives, and takes over after any end of the first."""

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aliquot import contract
from aliquot_lab.standin.agentprocess import AgentProcess
from aliquot_lab.standin.node import Node
from tests.integration.agent_nodes import container, eventually, grants, log_of, make_node, manifest, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]


class Second:
    """Another agent with the flags of the node's own."""

    def __init__(self, node: Node, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        base = node.layout.base
        own = [*node.agent.flags, f"--metrics-address={self._address}", *flags]
        self.log = base / "containers" / "second-agent.log"
        self.process = AgentProcess(own, node.hardware.agent_environment(), log_path=self.log, address_file=base / "no-address")

    async def page(self, path: str) -> tuple[int, str]:
        def fetch() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://{self._address}{path}", timeout=5) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as exc:
                with exc:
                    return exc.code, exc.read().decode()
            except OSError as exc:
                return 0, str(exc)

        return await asyncio.to_thread(fetch)

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while (await self.page("/readyz"))[0] != 200:
                self.process.check()
                await asyncio.sleep(0.1)


@asynccontextmanager
async def second_agent(node: Node, *flags: str) -> AsyncIterator[Second]:
    second = Second(node, *flags)
    await second.process.start()
    try:
        await eventually(lambda: second.log.exists() and "status server listens" in second.log.read_text(), "it waits")
        yield second
    finally:
        await second.process.stop()


def files_of(node: Node) -> dict[Path, int]:
    """Every file that the agent has made, with its inode."""
    places = (node.layout.state, node.layout.run, node.layout.cdi_dynamic, node.layout.plugin_dir)
    return {path: path.lstat().st_ino for place in places for path in place.rglob("*")}


async def test_second_agent_changes_nothing_and_says_who_runs():
    flags = ("--audit-policy=kill", "--drift-policy=evict")
    async with make_node("t4x2", *flags) as node:
        node.create_pod(manifest("before"))
        await running(node, "before")
        async with second_agent(node, *flags) as second:
            assert (await second.page("/healthz"))[0] == 200
            code, sentence = await second.page("/readyz")
            assert code == 503
            assert f"process {node.agent.pid}, since" in sentence
            assert f"uses {node.layout.state}: this agent waits" in sentence
            assert (await second.page("/metrics"))[0] == 503
            node.create_pod(manifest("meanwhile"))  # a second agent would take its files for strays
            await running(node, "meanwhile")
            before = files_of(node)
            await asyncio.sleep(2.0)
            assert files_of(node) == before
            assert {grant["pod"] for grant in grants(node)} == {"before", "meanwhile"}
            assert "drift" not in log_of(node) + second.log.read_text()
        assert second.process.log_tail().count("this agent waits until that one ends") == 1
        await running(node, "before", "meanwhile")


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_second_agent_takes_over_when_the_first_ends(end):
    async with make_node("t4x2") as node:
        node.create_pod(manifest("before"))
        await running(node, "before")
        granted, pid = grants(node), node.container("before").pid
        async with second_agent(node) as second:
            await (node.agent.stop() if end == "stop" else node.agent.kill())
            await second.until_ready()
            # No scheduler waits for the devices here: kubelet rejects a pod that comes before them.
            await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU) == 32, "kubelet has the devices of the second agent")
            node.create_pod(manifest("after", container(mib=512)))
            await running(node, "after")
            assert [grant for grant in grants(node) if grant["pod"] == "before"] == granted
            assert (node.container("before").pid, node.container("before").exit_code) == (pid, None)


async def test_second_agent_with_other_directories_waits_for_a_shared_cdi_directory(tmp_path):
    async with make_node("t4x2") as node:
        node.create_pod(manifest("before"))
        await running(node, "before")
        async with second_agent(node, f"--state-dir={tmp_path / 'state'}", f"--runtime-dir={tmp_path / 'run'}") as second:
            assert f"another agent uses {node.layout.cdi_dynamic}" in (await second.page("/readyz"))[1]
            await asyncio.sleep(1.0)
            assert len(list(node.layout.cdi_dynamic.iterdir())) == 1
        assert await second.process.stop() in (0, None)


async def test_waiting_agent_ends_on_a_signal():
    async with make_node("t4x2") as node, second_agent(node) as second:
        assert await second.process.stop() == 0
