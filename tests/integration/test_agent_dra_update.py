# SPDX-License-Identifier: Apache-2.0
"""Two agents of one node in an update: kubelet always has a driver, and each claim is prepared once.

Scenario T11 of the driver's plan. The two are real processes with one ledger; the kubelet registers and calls them as the real one does.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aliquot import contract
from aliquot_lab.standin.agentprocess import AgentProcess
from aliquot_lab.standin.node import Node
from tests.integration.dra_nodes import FakeKubelet, allocate, dra_node
from tests.unit.agent.fakes import until

UPDATE_SECONDS = 60


@pytest.fixture
def empty():
    """A directory of kubelet, with a path that leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def next_agent(node: Node, pod: str) -> AgentProcess:
    """The agent of another pod of the node."""
    first = node.agent
    env = {**first.env, "HOSTNAME": pod}
    return AgentProcess(first.flags, env, log_path=node.layout.base / f"{pod}.log", address_file=node.layout.run / "metrics-address")


@asynccontextmanager
async def registering(kubelet: FakeKubelet) -> AsyncIterator[None]:
    """Kubelet registers each driver that it finds."""
    task = asyncio.ensure_future(kubelet.register_all(set(kubelet.registry.iterdir())))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def prepared_and_released(node: Node, kubelet: FakeKubelet, number: int) -> None:
    """Prepare and release one claim; fail with what kubelet would show."""
    claim = allocate(node, f"claim-{number}", f"gpu-{number % 8}", 1024)
    assert (await kubelet.prepare(claim)).claims[claim.uid].error == ""
    assert (await kubelet.unprepare(claim)).claims[claim.uid].error == ""


async def test_no_call_fails_while_next_agent_takes_over_and_releases_earlier_claims(empty):
    async with dra_node(empty) as (node, kubelet), registering(kubelet):
        claim = allocate(node, "before", "gpu-0", 8192)
        first = (await kubelet.prepare(claim)).claims[claim.uid]
        earlier = set(kubelet.registry.iterdir())
        successor = next_agent(node, "agent-2")
        await successor.start()
        try:
            number = 0
            async with asyncio.timeout(UPDATE_SECONDS):
                while not earlier.isdisjoint(kubelet.registry.iterdir()):
                    await prepared_and_released(node, kubelet, number)
                    number += 1
            assert node.agent.running
            assert (await kubelet.prepare(claim)).claims[claim.uid] == first
            assert (await kubelet.unprepare(claim)).claims[claim.uid].error == ""
            assert list(node.layout.cdi_dynamic.glob(f"{contract.CDI_FILE_PREFIX}*")) == []
            assert await node.agent.stop() == 0
            await prepared_and_released(node, kubelet, number)
        finally:
            await successor.kill()


async def test_agent_that_gave_its_place_away_takes_over_from_killed_successor(empty):
    async with dra_node(empty) as (node, kubelet), registering(kubelet):
        earlier = set(kubelet.registry.iterdir())
        successor = next_agent(node, "agent-2")
        await successor.start()
        try:
            await until(lambda: earlier.isdisjoint(kubelet.registry.iterdir()))
            claim = allocate(node, "kept", "gpu-1", 4096)
            first = (await kubelet.prepare(claim)).claims[claim.uid]
        finally:
            await successor.kill()
        dead = set(kubelet.registry.iterdir())
        await until(lambda: dead.isdisjoint(kubelet.registry.iterdir()) and Path(kubelet.endpoint).exists())
        assert (await kubelet.prepare(claim)).claims[claim.uid] == first
