# SPDX-License-Identifier: Apache-2.0
import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from agent.core.inventory import FailedDevice
from agent.core.ledger import Grant, Ledger
from agent.core.publishing import NodeCondition, NodeFacts
from agent.errors import DriverMissingError, DriverTimeoutError
from agent.ports.kube import GpuNodeState, NodeState
from agent.services import publisher as module
from agent.services.changes import Changes
from agent.services.driver_watch import DriverWatch
from agent.services.grant_manager import GrantManager
from agent.services.pod_cache import PodCache
from agent.services.publisher import ECHO_SECONDS, CapacityTarget, ConditionTarget, GpuNodeTarget, NodePublisher, Target
from agent.services.state import AgentState
from aliquot import contract
from aliquot.contract.gpunode import NO_CORDON
from aliquot.contract.model import Isolation
from tests.unit.agent.builders import gpu, grant, reading, share
from tests.unit.agent.fakes import AT_ONCE, FakeClock, FakeDriver, FakeKubeApi

MEMORY, PERCENT, CORES = contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_MEMORY_PERCENT, contract.RESOURCE_VGPU_CORES
BOTH = reading(gpu(0, mib=1000), gpu(1, mib=1000))
ONE_LOST = reading(gpu(0, mib=1000), failed=(FailedDevice(1, "GPU-1", "GPU is lost", lost=True),))
HEALTHY = NodeCondition(True, "AllGPUsHealthy", "all 2 GPUs take work")


async def settle() -> None:
    """Let the publisher act on what it received, even on a busy machine: its calls go through the threads that this goes through."""
    for _ in range(10):
        await asyncio.sleep(0.003)
        await asyncio.to_thread(int)


class FakeManager:
    """The grants, as far as the publisher looks at them."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.changes = Changes()

    async def hold(self, *grants: Grant) -> None:
        self.ledger = Ledger({one.grant_id: one for one in grants})
        self.changes.notify()
        await settle()


class Harness:
    """A publisher of everything, with an API where the test plays the watch."""

    def __init__(self) -> None:
        self.driver = FakeDriver(BOTH)
        self.clock = FakeClock()
        self.watch = DriverWatch(self.driver, 1.0, AT_ONCE, self.clock.monotonic)
        self.pods = PodCache()
        self.api = FakeKubeApi()
        self.manager = FakeManager()
        # The publisher reads only the ledger and its changes.
        self.state = AgentState(self.watch, self.pods, cast(GrantManager, self.manager))
        parts: dict[str, Any] = {"api": self.api, "state": self.state}
        self.gpu_node_target = GpuNodeTarget(NodeFacts("node-1", "1", 16), lambda: (Isolation.SHIM,), chance=lambda: 0.5, **parts)
        targets: list[Target] = [
            CapacityTarget("node-1", **parts),
            ConditionTarget("node-1", chance=lambda: 0.5, **parts),
            self.gpu_node_target,
        ]
        self.publisher = NodePublisher("node-1", targets, state=self.state, clock=self.clock)

    async def look(self, answer=BOTH) -> None:
        self.driver.answer = answer
        await self.watch.poll()
        await settle()

    async def node(self, memory: str | None = None, cores: str | None = None, condition: NodeCondition | None = None) -> None:
        capacity = {name: value for name, value in ((MEMORY, memory), (PERCENT, memory and "200"), (CORES, cores)) if value is not None}
        self.pods.node_changed(NodeState("node-uid", capacity, {}, gpus_healthy=condition))
        await settle()

    async def right(self) -> None:
        """The node as it should be said to be."""
        await self.node("2000", "200", HEALTHY)

    async def gpu_node(self, status: dict | None) -> None:
        self.pods.gpu_node_seen(GpuNodeState(NO_CORDON, "", status) if status is not None else None)
        await settle()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, and the publisher look."""
        self.clock.seconds += seconds
        self.watch.changes.notify()
        await settle()


@pytest.fixture
async def node(monkeypatch):
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.001)
    harness = Harness()
    running = asyncio.ensure_future(harness.publisher.run())
    yield harness
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


class TestCapacity:
    async def test_nothing_is_published_before_both_the_node_and_its_gpus_are_known(self, node):
        await node.node()
        assert node.api.published == []
        await node.look()
        assert node.api.published == [{MEMORY: 2000, PERCENT: 200, CORES: 200}]

    async def test_a_node_that_says_the_right_thing_is_left_alone(self, node):
        await node.look()
        await node.node("2k", "200")
        assert node.api.published == []

    async def test_a_value_someone_else_overwrote_is_put_right_at_once(self, node):
        await node.look()
        await node.node("2000", "200")
        await node.node("0", "200")
        assert node.api.published == [{MEMORY: 2000}]

    async def test_a_lost_gpu_lowers_what_the_node_offers(self, node):
        await node.look()
        await node.node("2000", "200")
        await node.look(ONE_LOST)
        assert node.api.published == [{MEMORY: 1000, PERCENT: 100, CORES: 100}]

    async def test_held_shares_of_lost_gpu_are_offered_until_released(self, node):
        await node.manager.hold(grant(frozenset({"GPU-1::0"}), share(1, 600, cores=30)))
        await node.look()
        await node.node("2000", "200")
        await node.look(ONE_LOST)
        assert node.api.published == [{MEMORY: 1600, CORES: 130}]
        await node.node("1600", "130")
        node.clock.seconds += 1
        await node.manager.hold()
        assert node.api.published[1:] == [{MEMORY: 1000, PERCENT: 100, CORES: 100}]

    async def test_write_without_watch_echo_is_repeated_rarely(self, node):
        await node.look()
        await node.node("0", "200")
        await node.pass_time(ECHO_SECONDS - 1)
        assert len(node.api.published) == 1
        await node.pass_time(2)
        assert len(node.api.published) == 2

    async def test_an_outage_of_the_api_is_survived(self, node):
        node.api.outage = True
        await node.look()
        await node.node("0", "0")
        assert node.api.published == []
        node.api.outage = False
        await asyncio.sleep(0.1)
        assert node.api.published


class TestCondition:
    async def test_a_node_without_one_gets_one(self, node):
        await node.look()
        await node.node("2000", "200")
        assert node.api.conditions == [(HEALTHY, True)]

    async def test_it_turns_at_once_and_another_reason_waits(self, node):
        await node.look()
        await node.right()
        await node.look(ONE_LOST)
        ((condition, turned),) = node.api.conditions
        assert (condition.holds, turned) == (False, True)
        await node.node("1000", "100", condition)
        await node.look(DriverMissingError("the module is gone"))
        assert len(node.api.conditions) == 1
        await node.pass_time(66)
        assert [turned for _, turned in node.api.conditions] == [True, False]

    async def test_driver_missing_from_start_is_reported(self, node):
        await node.node()
        await node.look(DriverMissingError("the NVIDIA kernel module is not loaded"))
        ((condition, _),) = node.api.conditions
        assert (condition.reason, "kernel module is not loaded" in condition.message) == ("NoGPU", True)


class TestInventory:
    async def test_object_is_created_when_api_is_known_to_lack_it(self, node):
        await node.look()
        await node.right()
        assert node.api.gpu_nodes_created == []
        await node.gpu_node(None)
        assert node.api.gpu_nodes_created == [("node-1", "node-uid")]
        assert [device["uuid"] for device in node.api.statuses[0]["devices"]] == ["GPU-0", "GPU-1"]

    async def test_an_object_that_says_the_right_thing_is_left_alone(self, node):
        await node.look()
        await node.right()
        await node.gpu_node({})
        assert node.api.gpu_nodes_created == []
        (status,) = node.api.statuses
        await node.gpu_node(dict(status))
        await node.pass_time(1000)
        assert len(node.api.statuses) == 1

    async def test_gpu_health_is_written_at_once_and_other_changes_each_minute(self, node):
        await node.look()
        await node.right()
        await node.gpu_node({})
        await node.gpu_node(dict(node.api.statuses[-1]))
        await node.pass_time(1)
        await node.look(ONE_LOST)
        assert [bool(device.get("trouble")) for device in node.api.statuses[-1]["devices"]] == [False, True]
        await node.gpu_node(dict(node.api.statuses[-1]))
        writes = len(node.api.statuses)
        await node.look(replace(ONE_LOST, driver_version="590"))
        await node.pass_time(50)
        assert len(node.api.statuses) == writes
        await node.pass_time(16)
        assert len(node.api.statuses) == writes + 1
        assert node.api.statuses[-1]["driverVersion"] == "590"

    async def test_field_dropped_by_api_causes_no_endless_writes(self, node):
        node.api.pruned = {"cudaVersion"}
        await node.look()
        await node.right()
        await node.gpu_node({})
        (status,) = node.api.statuses
        await node.gpu_node({key: value for key, value in status.items() if key != "cudaVersion"})
        for _ in range(3):
            await node.pass_time(1000)
        assert len(node.api.statuses) == 1

    async def test_foreign_change_is_corrected(self, node):
        await node.look()
        await node.right()
        await node.gpu_node({})
        await node.gpu_node({**node.api.statuses[0], "devices": []})
        await node.pass_time(1)
        assert len(node.api.statuses) == 2
        assert node.api.statuses[1] == node.api.statuses[0]

    async def test_an_agent_started_without_a_driver_keeps_the_gpus_and_marks_them(self, node):
        await node.right()
        await node.gpu_node({"summary": "2 x NVIDIA H200", "devices": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}]})
        await node.look(DriverMissingError("no driver"))
        (status,) = node.api.statuses
        assert [(device["uuid"], device["trouble"]) for device in status["devices"]] == [
            (uuid, "no usable NVIDIA driver: no driver") for uuid in ("GPU-0", "GPU-1")
        ]

    async def test_driver_hanging_from_start_is_reported_once(self, node):
        await node.right()
        await node.gpu_node({"devices": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}]})
        for seconds in range(6, 406, 100):
            await node.look(DriverTimeoutError(f"nvmlInit has not returned for {seconds}.0 s"))
            (status,), (condition,) = node.api.statuses, node.api.conditions
            await node.node("2000", "200", condition[0])
            await node.gpu_node(dict(status))
            await node.pass_time(100)
        assert f"for {seconds}.0 s" in node.watch.trouble
        assert [len(reported) for reported in (node.api.statuses, node.api.conditions)] == [1, 1]


async def test_news_is_written_before_watch_echo_of_previous_write(node):
    await node.look()
    await node.right()
    await node.gpu_node({})
    await node.look(ONE_LOST)
    await node.pass_time(1)
    assert [bool(status["devices"][1].get("trouble")) for status in node.api.statuses] == [False, True]
    assert node.api.published[-1] == {MEMORY: 1000, PERCENT: 100, CORES: 100}
