# SPDX-License-Identifier: Apache-2.0
import asyncio
from typing import cast

import grpc
import pytest

from agent.core.identity import cdi_name, grant_id
from agent.core.injection import Answer, named_answer
from agent.core.inventory import FailedDevice
from agent.core.refusal import Reason, Refusal
from agent.services.admissions import Admissions
from agent.services.allocator import Allocator
from agent.services.device_plugin import DevicePlugin, PluginServices
from agent.services.driver_watch import DriverWatch
from agent.services.injection import Injection
from agent.services.pending import PendingPods
from agent.services.telemetry import Telemetry
from aliquot.kubelet_api import deviceplugin_pb2 as pb
from tests.unit.agent.builders import SECRET, VGPU, gpu, reading
from tests.unit.agent.fakes import AT_ONCE, FakeClock, FakeDriver, FakeKubeletCheckpoint, FakePodResources
from tests.unit.agent.partitions import make_offering


class FakeAllocator:
    refusal: Refusal | None = None
    started: list[frozenset[str]]

    def __init__(self) -> None:
        self.started = []

    def grant_id(self, resource, device_ids):
        return grant_id(SECRET, resource, device_ids)

    async def prestart(self, resource, device_ids):
        self.started.append(device_ids)
        return self.refusal


class FakeInjection:
    given: Answer | None = None
    hold: asyncio.Event | None = None

    async def answer(self, resource, device_ids, grant_id):
        if self.hold is not None:
            await self.hold.wait()
        return self.given or named_answer(cdi_name(grant_id))


class FakePending:
    packing = False

    wanted: tuple[str, ...] = ()

    async def wanted_devices(self, resource, size):
        return self.wanted

    def held_ids(self, resource):
        return frozenset()


class AbortedError(Exception):
    pass


class FakeContext:
    async def abort(self, code, details):
        raise AbortedError(code, details)


class Harness:
    def __init__(self) -> None:
        self.driver = FakeDriver(reading(gpu(0, numa=0), gpu(1, numa=1)))
        self.watch = DriverWatch(self.driver, 1.0, AT_ONCE)
        self.allocator = FakeAllocator()
        self.pending = FakePending()
        self.injection = FakeInjection()
        self.clock = FakeClock()
        self.pod_resources = FakePodResources()
        self.admissions = Admissions(self.pod_resources, FakeKubeletCheckpoint(), self.clock.monotonic)
        # The plugin calls only the methods that these fakes have.
        services = PluginServices(
            self.admissions, cast(Allocator, self.allocator), cast(Injection, self.injection), cast(PendingPods, self.pending)
        )
        self.plugin = DevicePlugin(
            VGPU,
            make_offering(self.watch, 2),
            services=services,
            telemetry=Telemetry(),
            clock=self.clock,
        )

    async def see(self, answer) -> None:
        self.driver.answer = answer
        await self.watch.poll()
        self.plugin.refresh()


@pytest.fixture
async def node():
    harness = Harness()
    await harness.watch.poll()
    return harness


def health(message: pb.ListAndWatchResponse) -> dict[str, str]:
    return {device.ID: device.health for device in message.devices}


async def test_nothing_is_listed_while_kubelet_allocates(node):
    """See services.admissions."""
    node.injection.hold = asyncio.Event()
    allocating = asyncio.create_task(
        node.plugin.Allocate(pb.AllocateRequest(container_requests=[{"devices_ids": ["GPU-0::1"]}]), FakeContext())
    )
    await asyncio.sleep(0)
    listing = asyncio.create_task(node.admissions.held())
    await asyncio.sleep(0.05)
    assert not listing.done()
    node.injection.hold.set()
    await allocating
    node.clock.seconds += 1.0
    await listing


class TestListAndWatch:
    async def test_all_replicas_are_sent_first_with_their_numa_node(self, node):
        first = await anext(node.plugin.ListAndWatch(pb.Empty(), FakeContext()))
        assert health(first) == {"GPU-0::0": "Healthy", "GPU-0::1": "Healthy", "GPU-1::0": "Healthy", "GPU-1::1": "Healthy"}
        assert [device.topology.nodes[0].ID for device in first.devices] == [0, 0, 1, 1]

    async def test_nothing_is_sent_while_nothing_changes(self, node):
        stream = node.plugin.ListAndWatch(pb.Empty(), FakeContext())
        await anext(stream)
        following = asyncio.ensure_future(anext(stream))
        await node.see(reading(gpu(0, numa=0), gpu(1, numa=1), used_mib=77))
        await asyncio.sleep(0.02)
        assert not following.done()
        following.cancel()

    async def test_a_lost_gpu_is_sent_as_unhealthy_and_back_as_healthy(self, node):
        stream = node.plugin.ListAndWatch(pb.Empty(), FakeContext())
        await anext(stream)
        await node.see(reading(gpu(0, numa=0), failed=(FailedDevice(1, "GPU-1", "lost"),)))
        assert health(await anext(stream))["GPU-1::1"] == "Unhealthy"
        await node.see(reading(gpu(0, numa=0), gpu(1, numa=1)))
        assert health(await anext(stream))["GPU-1::1"] == "Healthy"

    async def test_a_stream_can_be_ended_and_its_loss_is_noted(self, node):
        stream = node.plugin.ListAndWatch(pb.Empty(), FakeContext())
        await anext(stream)
        assert node.plugin.stream_lost_at is None
        node.plugin.end_streams()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert node.plugin.stream_lost_at == node.clock.seconds

    async def test_one_of_two_streams_lost_is_no_loss(self, node):
        streams = [node.plugin.ListAndWatch(pb.Empty(), FakeContext()) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        await streams[0].aclose()
        assert node.plugin.stream_lost_at is None


async def test_options_ask_for_prestart_and_preferences(node):
    options = await node.plugin.GetDevicePluginOptions(pb.Empty(), FakeContext())
    assert options.pre_start_required
    assert options.get_preferred_allocation_available


async def test_allocate_answers_with_a_name_and_no_devices(node):
    asked = [pb.ContainerAllocateRequest(devices_ids=["GPU-1::0", "GPU-0::0"]), pb.ContainerAllocateRequest(devices_ids=["GPU-0::1"])]
    answer = await node.plugin.Allocate(pb.AllocateRequest(container_requests=asked), FakeContext())
    names = [container.cdi_devices[0].name for container in answer.container_responses]
    assert names == [cdi_name(grant_id(SECRET, VGPU, ["GPU-0::0", "GPU-1::0"])), cdi_name(grant_id(SECRET, VGPU, ["GPU-0::1"]))]
    assert [dict(container.envs) for container in answer.container_responses] == [{"NVIDIA_VISIBLE_DEVICES": "void"}] * 2
    assert not any(container.mounts or container.devices for container in answer.container_responses)
    assert node.allocator.started == []


async def test_without_cdi_allocate_answers_with_the_devices_themselves(node):
    node.injection.given = Answer(env={"A": "b"}, mounts=[("/host", "/inside", True)], nodes=["/dev/nvidia0"])
    asked = [pb.ContainerAllocateRequest(devices_ids=["GPU-0::0"])]
    (answer,) = (await node.plugin.Allocate(pb.AllocateRequest(container_requests=asked), FakeContext())).container_responses
    assert not answer.cdi_devices
    assert dict(answer.envs) == {"A": "b"}
    assert [(one.host_path, one.container_path, one.read_only) for one in answer.mounts] == [("/host", "/inside", True)]
    assert [(one.host_path, one.container_path, one.permissions) for one in answer.devices] == [("/dev/nvidia0", "/dev/nvidia0", "rw")]


async def test_preferences_follow_the_pending_pod(node):
    node.pending.wanted = ("GPU-1",)
    asked = pb.ContainerPreferredAllocationRequest(available_deviceIDs=["GPU-0::0", "GPU-1::0"], allocation_size=1)
    answer = await node.plugin.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[asked]), FakeContext())
    assert list(answer.container_responses[0].deviceIDs) == ["GPU-1::0"]


async def test_prestart_answers_when_the_container_is_granted(node):
    await node.plugin.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["GPU-0::0"]), FakeContext())
    assert node.allocator.started == [frozenset({"GPU-0::0"})]


async def test_a_refusal_reaches_kubelet_as_its_sentence(node):
    node.allocator.refusal = Refusal(Reason.POD_MISSING, "pod default/a did not appear")
    with pytest.raises(AbortedError) as caught:
        await node.plugin.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["GPU-0::0"]), FakeContext())
    assert caught.value.args == (grpc.StatusCode.FAILED_PRECONDITION, "aliquot: pod default/a did not appear")
