# SPDX-License-Identifier: Apache-2.0
"""Kubelet's PodResources API: which container holds which device IDs.

All calls use one channel, because creating a channel costs more than a call. The channel reconnects by itself after kubelet's restart, with
a short backoff, because starting containers wait for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio

from agent.core.identity import HeldDevices
from agent.errors import KubeletBusyError, KubeletError
from aliquot.kubelet_api.podresources_pb2 import AllocatableResourcesRequest, ContainerDevices, ListPodResourcesRequest
from aliquot.kubelet_api.podresources_pb2_grpc import PodResourcesListerStub

TIMEOUT_SECONDS = 5.0
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class KubeletPodResources:
    """Implements ``ports.PodResources``."""

    def __init__(self, socket: Path) -> None:
        """Must be called in the event loop."""
        self._socket = socket
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
        self._stub = PodResourcesListerStub(self._channel)

    async def held(self) -> Sequence[HeldDevices]:
        """See ``ports.PodResources``. Waits for a kubelet that is starting."""
        with self._translated():
            response = await self._stub.List(ListPodResourcesRequest(), timeout=TIMEOUT_SECONDS, wait_for_ready=True)
        return [
            HeldDevices(pod.namespace, pod.name, container.name, resource, frozenset(device_ids))
            for pod in response.pod_resources
            for container in pod.containers
            for resource, device_ids in _by_resource(container.devices).items()
        ]

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """See ``ports.PodResources``. Does not wait for a starting kubelet, because registration must not wait."""
        with self._translated():
            response = await self._stub.GetAllocatableResources(AllocatableResourcesRequest(), timeout=TIMEOUT_SECONDS)
        return _by_resource(response.devices).get(resource, [])

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            # kubelet limits the call rate of all clients together: pkg/kubelet/apis/grpc/ratelimit.go
            kind = KubeletBusyError if exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else KubeletError
            raise kind(f"kubelet's PodResources ({self._socket}): {exc.code().name}: {exc.details()}") from exc


def _by_resource(devices: Sequence[ContainerDevices]) -> dict[str, list[str]]:
    """Merge the entries of each resource: kubelet returns one per NUMA node."""
    joined: dict[str, list[str]] = {}
    for entry in devices:
        joined.setdefault(entry.resource_name, []).extend(entry.device_ids)
    return joined
