# SPDX-License-Identifier: Apache-2.0
import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from agent.core.conflict import Evidence
from agent.core.inventory import advertised
from agent.ports.kube import NodeState
from agent.services import registrar as module
from agent.services.device_plugin import DevicePlugin
from agent.services.driver_watch import DriverWatch
from agent.services.pod_cache import PodCache
from agent.services.registrar import PluginDirectory, Registrar
from agent.services.telemetry import Telemetry
from aliquot import contract
from tests.unit.agent.builders import VGPU, gpu, instance, reading
from tests.unit.agent.fakes import FakeClock, FakeDriver, FakeKubelet, settle
from tests.unit.agent.partitions import make_offering


@dataclass
class FakePlugin:
    """The part of a device plugin that the registrar sees."""

    resource: str
    watch: DriverWatch
    stream_lost_at: float | None = None
    refreshed: int = 0
    ended: int = 0

    def expect_stream(self) -> None:
        self.stream_lost_at = None

    def refresh(self) -> None:
        self.refreshed += 1

    def end_streams(self) -> None:
        self.ended += 1

    def devices(self):
        return advertised(self.watch.inventory, 16).get(self.resource, ())


class Harness:
    """A registrar over a fake kubelet directory, looking as fast as the event loop turns."""

    running: asyncio.Future

    def __init__(self) -> None:
        self.driver = FakeDriver(reading(gpu(0)))
        self.watch = DriverWatch(self.driver, 1.0)
        self.kubelet = FakeKubelet()
        self.kubelet.touch(contract.KUBELET_SOCKET_NAME)
        self.pods = PodCache()
        self.clock = FakeClock()
        self.telemetry = Telemetry()
        self.plugins: dict[str, FakePlugin] = {}
        self.held_back = ""
        self.registrar = Registrar(
            PluginDirectory(self.kubelet, "1-2"), make_offering(self.watch), self._plugin,
            pods=self.pods, telemetry=self.telemetry, clock=self.clock, held_back=lambda: self.held_back,
        )  # fmt: skip

    def _plugin(self, resource: str) -> DevicePlugin:
        # The registrar uses only what FakePlugin has.
        return cast(DevicePlugin, self.make(resource))

    def make(self, resource: str) -> FakePlugin:
        self.plugins[resource] = FakePlugin(resource, self.watch)
        return self.plugins[resource]

    async def cancel(self) -> None:
        """End the loop, which must not have ended by itself."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        assert self.running.cancelled()

    @property
    def registered(self) -> list[str]:
        return [resource for _, resource in self.kubelet.registrations]


@pytest.fixture
async def node(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0)
    harness = Harness()
    harness.running = asyncio.ensure_future(harness.registrar.run())
    await harness.watch.poll()
    await settle()
    yield harness
    await harness.cancel()


async def test_a_resource_is_served_and_registered_once(node):
    await settle()
    assert node.registered == [VGPU]
    assert len(node.kubelet.servers) == 1
    assert node.registrar.troubles == {VGPU: ""}


async def test_a_restarted_kubelet_gets_a_new_socket_and_registration(node):
    node.kubelet.restart()
    await settle()
    first, second = (socket for socket, _ in node.kubelet.registrations)
    assert first != second
    assert node.kubelet.servers[0].stopped
    assert node.plugins[VGPU].ended == 1


async def test_a_kubelet_that_only_replaced_its_own_socket_is_registered_with_again(node):
    node.kubelet.touch(contract.KUBELET_SOCKET_NAME)
    await settle()
    assert len(node.registered) == 2
    assert len(node.kubelet.servers) == 1


async def test_a_lost_socket_of_ours_is_replaced(node):
    del node.kubelet.files[node.kubelet.registrations[0][0]]
    await settle()
    assert len(node.kubelet.servers) == 2
    assert len(node.registered) == 2


async def test_a_stream_that_stays_away_is_a_reason_to_register_again(node):
    node.plugins[VGPU].stream_lost_at = node.clock.seconds
    await settle()
    assert len(node.registered) == 1
    node.clock.seconds += 3
    await settle()
    assert len(node.registered) == 2


async def test_held_back_registration_states_reason_and_does_not_contact_kubelet(node):
    node.held_back = "waiting for the Node object"
    node.kubelet.restart()
    await settle()
    assert len(node.registered) == 1
    assert node.registrar.troubles == {VGPU: "waiting for the Node object"}
    node.held_back = ""
    await settle()
    assert len(node.registered) == 2
    assert node.registrar.troubles == {VGPU: ""}


async def test_a_kubelet_that_is_away_is_waited_for(node):
    node.kubelet.files.clear()
    await settle()
    assert "waiting for kubelet" in node.registrar.troubles[VGPU]
    node.kubelet.restart()
    await settle()
    assert node.registrar.troubles[VGPU] == ""


async def test_a_refused_registration_is_tried_again_and_counted(node):
    node.kubelet.refusal = "not today"
    node.kubelet.restart()
    await settle()
    assert node.registrar.troubles[VGPU] == "not today"
    node.kubelet.refusal = None
    await settle()
    assert node.registrar.troubles[VGPU] == ""
    assert node.telemetry.registry.get_sample_value("aliquot_registrations_total", {"resource": VGPU, "result": "failure"}) >= 1


async def test_an_occupied_name_is_reported_and_never_fought_over(node, caplog):
    node.kubelet.evidence_found = Evidence(allocatable_ids=["GPU-9-0"])
    node.plugins[VGPU].stream_lost_at = node.clock.seconds - 10
    await settle()
    assert len(node.registered) == 1
    assert "another device plugin holds" in node.registrar.troubles[VGPU]
    assert len([record for record in caplog.records if "another device plugin" in record.getMessage()]) == 1
    node.kubelet.evidence_found = Evidence()
    node.clock.seconds += module.CONFLICT_SECONDS
    await settle()
    assert len(node.registered) == 2


async def test_node_status_missing_us_for_long_causes_new_registration(node):
    node.pods.node_changed(NodeState("uid", {}, {VGPU: "0"}))
    await settle()
    assert len(node.registered) == 1
    node.clock.seconds += module.FORGOTTEN_SECONDS
    await settle()
    assert len(node.registered) == 2


async def test_mig_profiles_are_resources_of_their_own_and_may_turn_up_later(node):
    node.driver.answer = reading(gpu(0), gpu(1, mig=[instance(1, 0), instance(1, 1, profile="2g.20gb")]))
    await node.watch.poll()
    await settle()
    assert sorted(node.registered) == ["nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", VGPU]


async def test_open_streams_update_when_inventory_changes(node):
    before = node.plugins[VGPU].refreshed
    node.driver.answer = reading()
    await node.watch.poll()
    await settle()
    assert node.plugins[VGPU].refreshed == before + 1


async def test_stopping_ends_the_streams_and_removes_the_sockets(node):
    await node.cancel()
    await node.registrar.stop()
    assert node.plugins[VGPU].ended == 1
    assert list(node.kubelet.files) == [contract.KUBELET_SOCKET_NAME]
