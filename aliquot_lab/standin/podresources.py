# SPDX-License-Identifier: Apache-2.0
"""The kubelet's PodResources v1 server: the device IDs that each pod holds.

As in the real server: it lists active pods only, without ordinary init containers. A list has one entry for each device and NUMA node, not
for each resource. All clients together have ``CALLS_PER_SECOND``; further calls are refused immediately.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from aliquot.kubelet_api import podresources_pb2 as pb
from aliquot.kubelet_api import podresources_pb2_grpc as rpc
from aliquot_lab.standin.devices import DeviceTable, PluginDevice
from aliquot_lab.standin.pods import PodSpec, Role

CALLS_PER_SECOND = 100
BURST_CALLS = 10
"""Kubelet's ``DefaultQPS`` and ``DefaultBurstTokens``, pkg/kubelet/apis/podresources/constants.go."""


class _TokenBucket:
    """The rate limit: ``BURST_CALLS`` at once, and ``CALLS_PER_SECOND`` on average."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._tokens = float(BURST_CALLS)
        self._filled = monotonic()

    def take(self) -> bool:
        """Take a token; False when no token is left."""
        now = self._monotonic()
        self._tokens = min(BURST_CALLS, self._tokens + (now - self._filled) * CALLS_PER_SECOND)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class PodResourcesServer(rpc.PodResourcesListerServicer):
    """Serves one socket from the kubelet's device table and its active pods."""

    def __init__(
        self,
        socket: Path,
        table: Callable[[], DeviceTable],
        active_pods: Callable[[], Sequence[PodSpec]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = socket
        self._table = table
        self._active_pods = active_pods
        self._server: grpc.aio.Server | None = None
        self._bucket = _TokenBucket(monotonic)

    async def start(self) -> None:
        """Bind the socket, in place of one that a killed kubelet left."""
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        rpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix://{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """Stop, and cancel all calls."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def List(self, request: pb.ListPodResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ListPodResourcesResponse:
        """Return every active pod, with or without devices."""
        del request
        await self._admit(context)
        pods = self._active_pods()
        table = self._table()
        table.release_all_but({pod.uid for pod in pods})
        return pb.ListPodResourcesResponse(pod_resources=[_pod_resources(pod, table) for pod in pods])

    async def Get(self, request: pb.GetPodResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.GetPodResourcesResponse:
        """Return one active pod by name."""
        await self._admit(context)
        for pod in self._active_pods():
            if (pod.namespace, pod.name) == (request.pod_namespace, request.pod_name):
                return pb.GetPodResourcesResponse(pod_resources=_pod_resources(pod, self._table()))
        return await context.abort(grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found")

    async def GetAllocatableResources(
        self, request: pb.AllocatableResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AllocatableResourcesResponse:
        """Return every healthy device, allocated or not."""
        del request
        await self._admit(context)
        devices = [
            entry
            for resource, advertised in self._table().advertised.items()
            for device in advertised.values()
            if device.healthy
            for entry in _entries(resource, device)
        ]
        return pb.AllocatableResourcesResponse(devices=devices)

    async def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if not self._bucket.take():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")


def _pod_resources(pod: PodSpec, table: DeviceTable) -> pb.PodResources:
    containers = []
    for container in pod.containers:
        if container.role is Role.INIT:
            continue
        devices = [
            entry
            for item in table.held(pod.uid, container.name)
            for device_id in item.ids
            for entry in _entries(
                item.resource, table.advertised.get(item.resource, {}).get(device_id, PluginDevice(device_id, healthy=False))
            )
        ]
        containers.append(pb.ContainerResources(name=container.name, devices=devices))
    return pb.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)


def _entries(resource: str, device: PluginDevice) -> Iterator[pb.ContainerDevices]:
    if not device.numa_nodes:
        yield pb.ContainerDevices(resource_name=resource, device_ids=[device.id])
    for node in device.numa_nodes:
        yield pb.ContainerDevices(resource_name=resource, device_ids=[device.id], topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)]))
