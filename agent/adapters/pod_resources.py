"""The kubelet's PodResources API: which container holds which device IDs.

One channel for all calls, because making one costs more than a call. It reconnects by itself when kubelet was restarted, and with a short
backoff: a container that starts is waiting.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio

from agent.core.identity import HeldDevices
from agent.errors import KubeletBusyError, KubeletError
from proto.kubelet.podresources_pb2 import AllocatableResourcesRequest, ContainerDevices, ListPodResourcesRequest
from proto.kubelet.podresources_pb2_grpc import PodResourcesListerStub

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
        """Made on the event loop."""
        self._socket = socket
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
        self._stub = PodResourcesListerStub(self._channel)

    async def held(self) -> Sequence[HeldDevices]:
        """See ``ports.PodResources``. Waits for a kubelet that is just coming up."""
        with self._translated():
            response = await self._stub.List(ListPodResourcesRequest(), timeout=TIMEOUT_SECONDS, wait_for_ready=True)
        return [
            HeldDevices(pod.namespace, pod.name, container.name, resource, frozenset(device_ids))
            for pod in response.pod_resources
            for container in pod.containers
            for resource, device_ids in _by_resource(container.devices).items()
        ]

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """See ``ports.PodResources``. Waits for nobody: registration must not."""
        with self._translated():
            response = await self._stub.GetAllocatableResources(AllocatableResourcesRequest(), timeout=TIMEOUT_SECONDS)
        return _by_resource(response.devices).get(resource, [])

    async def close(self) -> None:
        """Leave the socket."""
        await self._channel.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            # kubelet limits its clients' calls together, and refuses more: pkg/kubelet/apis/grpc/ratelimit.go
            kind = KubeletBusyError if exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else KubeletError
            raise kind(f"the kubelet's PodResources ({self._socket}): {exc.code().name}: {exc.details()}") from exc


def _by_resource(devices: Sequence[ContainerDevices]) -> dict[str, list[str]]:
    """Join the entries of one resource: kubelet writes one per NUMA node."""
    joined: dict[str, list[str]] = {}
    for entry in devices:
        joined.setdefault(entry.resource_name, []).extend(entry.device_ids)
    return joined
