# SPDX-License-Identifier: Apache-2.0
"""A stand-in node with a real agent: comes up, gives slices out, survives the agent's death, and goes without a trace."""

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from aliquot import contract
from aliquot_lab.standin.agentprocess import AgentError
from aliquot_lab.standin.hardware import HardwareError, SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions

pytestmark = pytest.mark.timeout(60)
QUICK = ("--reconcile-seconds=0.2", "--driver-poll-seconds=0.2")


@pytest.fixture(autouse=True)
def base(build_dir, monkeypatch):
    """Where the node's temporary directory goes; no file may be left in it."""
    path = Path(tempfile.mkdtemp(prefix="aq-node-"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    assert list(path.iterdir()) == []
    path.rmdir()


def make_node(**options):
    return Node(SimulatedHardware("t4x2"), NodeOptions(agent_flags=QUICK, **options))


def pod(name, mib=1024, vgpus=1):
    limits = {contract.RESOURCE_VGPU: vgpus, contract.RESOURCE_VGPU_MEMORY: mib}
    container = {"name": "main", "command": ["sleep", "600"], "resources": {"limits": limits}}
    return {"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}}


def running(item):
    return item["status"]["phase"] == "Running"


async def test_a_pod_gets_its_slice_as_files_in_its_root():
    async with make_node() as node:
        node.create_pod(pod("first"))
        await node.wait_for_pod("first", running)
        root = node.container("first").root
        assert (root / contract.CONTAINER_LIMITS.lstrip("/")).exists()
        region = (root / contract.CONTAINER_REGION.lstrip("/")).stat()
        assert region.st_ino in {path.stat().st_ino for path in node.layout.run.rglob("region*")}
        assert 'pod="first"' in await node.metrics()


async def test_a_start_given_up_waits_for_what_still_writes_into_its_directory():
    class Slow(SimulatedHardware):
        began, written = threading.Event(), threading.Event()

        def prepare(self, directory, node_name):
            self.began.set()
            time.sleep(0.3)
            (directory / "late").write_text("")
            self.written.set()
            return super().prepare(directory, node_name)

    hardware = Slow("t4x2")
    start = asyncio.create_task(Node(hardware, NodeOptions()).__aenter__())
    await asyncio.to_thread(hardware.began.wait)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert hardware.written.is_set()


async def test_the_kubelet_sees_the_published_capacity():
    async with make_node() as node:
        assert node.allocatable(contract.RESOURCE_VGPU) == 2 * 16
        assert node.allocatable(contract.RESOURCE_VGPU_MEMORY) > 0


async def test_containers_outlive_a_killed_agent_and_new_ones_start_after_its_return():
    async with make_node() as node:
        node.create_pod(pod("first"))
        await node.wait_for_pod("first", running)
        await node.agent.kill()
        assert node.container("first").exit_code is None
        await node.agent.start()
        await node.wait_ready()
        node.create_pod(pod("second"))
        await node.wait_for_pod("second", running)


async def test_the_agent_registers_again_after_a_kubelet_restart():
    async with make_node() as node:
        await node.kubelet.restart()
        await node.wait_ready()
        node.create_pod(pod("first", vgpus=2))
        await node.wait_for_pod("first", running)


async def test_an_exception_in_the_block_ends_everything():
    pids = []

    async def fail_with_a_pod():
        async with make_node() as node:
            node.create_pod(pod("first"))
            await node.wait_for_pod("first", running)
            pids.append(node.container("first").pid)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await fail_with_a_pod()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


async def test_cancellation_while_it_comes_up_ends_everything():
    async def bring_up():
        async with make_node():
            await asyncio.Event().wait()

    for delay_seconds in (0.01, 0.15, 0.3):
        task = asyncio.create_task(bring_up())
        await asyncio.sleep(delay_seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_agent_that_does_not_start_is_quoted():
    options = NodeOptions(agent_flags=("--shares-per-gpu=many",))
    with pytest.raises(AgentError, match="many"):
        async with Node(SimulatedHardware("t4x2"), options):
            pass


async def test_an_unknown_topology_is_refused_with_the_reason():
    with pytest.raises(HardwareError, match="no-such-profile"):
        async with Node(SimulatedHardware("no-such-profile")):
            pass
