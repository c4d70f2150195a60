# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from agent.core.slices import FoundSlice, Offer
from agent.ports.kube import NodeState
from agent.services.driver_watch import DriverWatch
from agent.services.pod_cache import PodCache
from agent.services.publisher import NodePublisher
from agent.services.slice_publisher import SliceCache, SliceTarget
from agent.services.state import AgentState
from tests.unit.agent.builders import gpu, reading
from tests.unit.agent.claim_builders import NODE, FakeResourceApi
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, settle, until


class Node:
    """A publisher of slices over an API that a test changes behind its back."""

    def __init__(self, base) -> None:
        self.api = FakeResourceApi()
        self.driver = FakeDriver(reading(gpu(0), gpu(1)))
        self.state = AgentState(DriverWatch(self.driver, 1.0), PodCache(), Disk(base).manager())
        self.cache = SliceCache()
        self.withheld = ""
        target = SliceTarget(NODE, Offer(16), api=self.api, state=self.state, cache=self.cache, withheld=lambda: self.withheld)
        clock = FakeClock()
        clock.monotonic = asyncio.get_running_loop().time
        self.publisher = NodePublisher(NODE, [target], state=self.state, clock=clock, further=[self.cache.changes])
        self.seen = 0

    async def start(self):
        await self.state.watch.poll()
        self.state.pods.node_changed(NodeState("uid-node", {}, {}))
        self.echo()
        await settle()
        return asyncio.ensure_future(self.publisher.run())

    def echo(self) -> None:
        """Let the watch list what the API has."""
        self.seen += 1
        self.cache.slices_listed([FoundSlice(name, str(self.seen), spec) for name, spec in self.api.slices.items()])

    def devices(self) -> list[str]:
        return [device["name"] for spec in self.api.slices.values() for device in spec["devices"]]


@pytest.fixture
async def node(tmp_path):
    made = Node(tmp_path)
    running = await made.start()
    yield made
    running.cancel()


async def test_slices_are_published_and_again_when_gone(node):
    await until(lambda: node.devices() == ["gpu-0", "gpu-1"])
    node.echo()
    await settle()
    node.api.slices.clear()  # as kubelet does at its start
    node.echo()
    await until(lambda: node.devices() == ["gpu-0", "gpu-1"])


async def test_slice_that_others_change_is_written_again(node):
    await until(node.devices)
    (name,) = node.api.slices
    node.api.slices[name] = {**node.api.slices[name], "devices": []}
    node.echo()
    await until(lambda: len(node.devices()) == 2)


async def test_nothing_is_written_while_nothing_changes(node):
    await until(node.devices)
    node.echo()
    await settle()
    node.api.outage = True
    node.cache.slice_changed(FoundSlice(*next(iter((name, "9", spec) for name, spec in node.api.slices.items()))))
    await asyncio.sleep(0.05)
    assert node.publisher._targets[0].due_seconds(0.0) is None


async def test_slices_are_deleted_when_devices_are_withheld(node):
    await until(node.devices)
    node.withheld = "allocation: dra waits"
    node.echo()
    await until(lambda: not node.api.slices)


async def test_deleted_slice_is_forgotten(node):
    await until(node.devices)
    node.echo()
    await settle()
    (one,) = node.cache.slices.values()
    node.cache.slice_deleted(one)
    await settle()
    assert not node.cache.slices
