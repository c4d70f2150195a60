import asyncio

import pytest

from agent.ports import NodeState
from agent.services import publisher as module
from agent.services.driver_watch import DriverWatch
from agent.services.pod_cache import PodCache
from agent.services.publisher import CapacityPublisher
from proto import contract
from tests.unit.agent.builders import gpu, reading
from tests.unit.agent.fakes import FakeDriver, FakeKubeApi

MEMORY, CORES = contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES


class Harness:
    def __init__(self) -> None:
        self.driver = FakeDriver(reading(gpu(0, mib=1000), gpu(1, mib=1000)))
        self.watch = DriverWatch(self.driver, 1.0)
        self.pods = PodCache()
        self.api = FakeKubeApi()
        self.publisher = CapacityPublisher("node-1", self.api, self.watch, self.pods)

    async def node(self, **capacity: str) -> None:
        self.pods.node_changed(NodeState("uid", {name.replace("_", "-"): value for name, value in capacity.items()}, {}))
        await asyncio.sleep(0.02)

    async def node_with(self, memory: str, cores: str) -> None:
        self.pods.node_changed(NodeState("uid", {MEMORY: memory, CORES: cores}, {}))
        await asyncio.sleep(0.02)


@pytest.fixture
async def node(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.001)
    harness = Harness()
    running = asyncio.ensure_future(harness.publisher.run())
    yield harness
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


async def test_nothing_is_published_before_both_the_node_and_its_gpus_are_known(node):
    await node.node()
    assert node.api.published == []
    await node.watch.poll()
    await asyncio.sleep(0.02)
    assert node.api.published[0] == {MEMORY: 2000, CORES: 200}


async def test_a_node_that_says_the_right_thing_is_left_alone(node):
    await node.watch.poll()
    await node.node_with("2k", "200")
    assert node.api.published == []


async def test_a_value_someone_else_overwrote_is_put_right(node):
    await node.watch.poll()
    await node.node_with("2000", "200")
    await node.node_with("0", "200")
    assert node.api.published[0] == {MEMORY: 2000}


async def test_a_lost_gpu_lowers_what_the_node_offers(node):
    await node.watch.poll()
    await node.node_with("2000", "200")
    node.driver.answer = reading(gpu(0, mib=1000))
    await node.watch.poll()
    await asyncio.sleep(0.02)
    assert node.api.published[0] == {MEMORY: 1000, CORES: 100}


async def test_an_outage_of_the_api_is_survived(node):
    node.api.outage = True
    await node.watch.poll()
    await node.node_with("0", "0")
    assert node.api.published == []
    node.api.outage = False
    await asyncio.sleep(0.1)
    assert node.api.published
