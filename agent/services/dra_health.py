# SPDX-License-Identifier: Apache-2.0
"""Tells kubelet the health of this node's devices. Kubelet shows it in the status of the pods that use them."""

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from agent.core.inventory import InventoryDevice
from agent.core.slices import Offer, names_on
from agent.ports.clock import Clock
from agent.ports.dra import HealthStreams
from agent.services.driver_watch import DriverWatch
from aliquot.kubelet_api import drahealth_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
REPEAT_SECONDS: Final = 10.0
"""Kubelet takes a device's health as unknown 30 s after the last message."""
MAX_MESSAGE_CHARS: Final = 1024


class DeviceHealthService(HealthStreams):
    """Sends every change, and the complete list again every 10 s."""

    def __init__(self, pool: str, offer: Offer, watch: DriverWatch, clock: Clock) -> None:
        self._pool = pool
        self._offer = offer
        self._watch = watch
        self._clock = clock
        self._generation = 0

    def end_streams(self) -> None:
        """End the open streams; a stopping server waits for them."""
        self._generation += 1
        self._watch.changes.notify()

    async def NodeWatchResources(
        self, request: pb.NodeWatchResourcesRequest, context: Context
    ) -> AsyncIterator[pb.NodeWatchResourcesResponse]:
        """Send the health of all devices."""
        generation = self._generation
        while generation == self._generation:
            seen = self._watch.changes.count
            devices = [self._health(entry, name) for entry in self._watch.inventory.devices for name in names_on(entry, self._offer)]
            yield pb.NodeWatchResourcesResponse(devices=devices)
            await self._watch.changes.after(seen, REPEAT_SECONDS)

    def _health(self, entry: InventoryDevice, name: str) -> pb.DeviceHealth:
        return pb.DeviceHealth(
            device=pb.DeviceIdentifier(pool_name=self._pool, device_name=name),
            health=pb.HEALTHY if entry.healthy else pb.UNHEALTHY,
            last_updated_time=int(self._clock.now()),
            message=entry.trouble[:MAX_MESSAGE_CHARS],
        )
