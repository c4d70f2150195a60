# SPDX-License-Identifier: Apache-2.0
"""The device plugin of one resource, as kubelet calls it.

Allocate is a pure function of the IDs: an error there fails the pod permanently. All work that may fail happens in PreStartContainer.
ListAndWatch sends only changes, because kubelet writes its checkpoint at every message.
"""

import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from agent.core.injection import Answer
from agent.core.inventory import AdvertisedDevice
from agent.core.steering import prefer_ids
from agent.ports.clock import Clock
from agent.services.admissions import Admissions
from agent.services.allocator import Allocator
from agent.services.changes import Changes
from agent.services.injection import Injection
from agent.services.offering import Offering
from agent.services.pending import PendingPods
from agent.services.telemetry import Telemetry
from aliquot import contract
from aliquot.kubelet_api import deviceplugin_pb2 as pb
from aliquot.kubelet_api.deviceplugin_pb2_grpc import DevicePluginServicer

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class PluginServices:
    """What answers kubelet's calls, for the plugins of all resources."""

    admissions: Admissions
    allocator: Allocator
    injection: Injection
    pending: PendingPods


class DevicePlugin(DevicePluginServicer):
    """Serves one resource."""

    def __init__(self, resource: str, offering: Offering, *, services: PluginServices, telemetry: Telemetry, clock: Clock) -> None:
        self.resource = resource
        self._offering = offering
        self._admissions = services.admissions
        self._allocator = services.allocator
        self._injection = services.injection
        self._pending = services.pending
        self._telemetry = telemetry
        self._clock = clock
        self._updates = Changes()
        self._generation = 0
        self._streams = 0
        self._stream_lost_at: float | None = None

    @property
    def stream_lost_at(self) -> float | None:
        """Monotonic time since which kubelet holds no ListAndWatch stream; None while it does."""
        return self._stream_lost_at

    def expect_stream(self) -> None:
        """Count the time without a stream from now: the plugin has just been registered."""
        self._stream_lost_at = None if self._streams else self._clock.monotonic()

    def devices(self) -> tuple[AdvertisedDevice, ...]:
        """Return the devices that are offered now."""
        return self._offering.devices().get(self.resource, ())

    def refresh(self) -> None:
        """Let the open streams check whether to send an update."""
        self._updates.notify()

    def end_streams(self) -> None:
        """End the open streams; a stopping server waits for them."""
        self._generation += 1
        self._updates.notify()

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Context) -> pb.DevicePluginOptions:
        """Return which optional calls this plugin needs."""
        return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(self, request: pb.Empty, context: Context) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send all devices, and all again after each change."""
        self._streams += 1
        self._stream_lost_at = None
        generation = self._generation
        try:
            sent: tuple[AdvertisedDevice, ...] | None = None
            while generation == self._generation:
                seen = self._updates.count
                devices = self.devices()
                if devices != sent:
                    yield pb.ListAndWatchResponse(devices=_messages(devices))
                    sent = devices
                await self._updates.after(seen)
        finally:
            self._streams -= 1
            if not self._streams:
                self._stream_lost_at = self._clock.monotonic()

    async def GetPreferredAllocation(self, request: pb.PreferredAllocationRequest, context: Context) -> pb.PreferredAllocationResponse:
        """Advise kubelet to take IDs of the GPUs that the container will get."""
        with self._telemetry.preferred_allocation_seconds.time():
            await self._admissions.announced()
            return await self._preferred_allocation(request)

    async def _preferred_allocation(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        responses = []
        for asked in request.container_requests:
            wanted = await self._pending.wanted_devices(self.resource, asked.allocation_size)
            held = self._pending.held_ids(self.resource)
            chosen = prefer_ids(
                asked.available_deviceIDs,
                asked.must_include_deviceIDs,
                asked.allocation_size,
                wanted,
                held,
                packing=self._pending.packing,
            )
            responses.append(pb.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return pb.PreferredAllocationResponse(container_responses=responses)

    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        """Return the CDI name of the container's devices; the devices themselves without CDI."""
        with self._telemetry.allocate_seconds.time(), self._admissions.allocating():
            return pb.AllocateResponse(container_responses=[await self._answer(asked.devices_ids) for asked in request.container_requests])

    async def _answer(self, device_ids: Iterable[str]) -> pb.ContainerAllocateResponse:
        ids = frozenset(device_ids)
        return response_of(await self._injection.answer(self.resource, ids, self._allocator.grant_id(self.resource, ids)))

    async def PreStartContainer(self, request: pb.PreStartContainerRequest, context: Context) -> pb.PreStartContainerResponse:
        """Grant the container its devices, or fail with the reason."""
        refusal = await self._allocator.prestart(self.resource, frozenset(request.devices_ids))
        if refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{contract.PRODUCT}: {refusal.message}")
        return pb.PreStartContainerResponse()


def response_of(answer: Answer) -> pb.ContainerAllocateResponse:
    """Return a reply as kubelet's message. Kubelet also stores it (``ports.KubeletCheckpoint``)."""
    return pb.ContainerAllocateResponse(
        cdi_devices=[pb.CDIDevice(name=answer.cdi_name)] if answer.cdi_name else [],
        envs=answer.env,
        mounts=[pb.Mount(host_path=host, container_path=inside, read_only=read_only) for host, inside, read_only in answer.mounts],
        devices=[pb.DeviceSpec(host_path=node, container_path=node, permissions="rw") for node in answer.nodes],
    )


def _messages(devices: Iterable[AdvertisedDevice]) -> list[pb.Device]:
    return [
        pb.Device(
            ID=device.device_id,
            health=contract.DEVICE_HEALTHY if device.healthy else contract.DEVICE_UNHEALTHY,
            topology=None if device.numa_node is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=device.numa_node)]),
        )
        for device in devices
    ]
