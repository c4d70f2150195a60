# SPDX-License-Identifier: Apache-2.0
"""Dynamic resource allocation: the sockets that kubelet calls, and the objects of resource.k8s.io."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent.core.slices import FoundSlice
from agent.ports.kubelet import PluginServer
from aliquot.kubelet_api.dra_pb2_grpc import DRAPluginServicer
from aliquot.kubelet_api.drahealth_pb2_grpc import DRAResourceHealthServicer
from aliquot.kubelet_api.pluginregistration_pb2_grpc import RegistrationServicer


class HealthStreams(DRAResourceHealthServicer):
    """Sends the health of the devices to kubelet."""

    @abstractmethod
    def end_streams(self) -> None:
        """End the open streams; a stopping server waits for them."""


class DriverSockets(Protocol):
    """Kubelet's directories for drivers. Calls raise KubeletError."""

    @property
    def endpoint(self) -> str:
        """The path of the socket on which kubelet calls the driver."""
        ...

    async def serve(self, driver: DRAPluginServicer, health: DRAResourceHealthServicer) -> PluginServer:
        """Serve the driver on its endpoint, in all versions that kubelets speak."""
        ...

    async def announce(self, registration: RegistrationServicer) -> PluginServer:
        """Serve the registration in the directory that kubelet watches; kubelet then calls it."""
        ...

    def exist(self) -> bool:
        """Whether both sockets are still there."""
        ...

    async def remove_dead_sockets(self) -> None:
        """Remove sockets of earlier agents without a listener."""
        ...


class SliceListener(Protocol):
    """Receives this node's ResourceSlices of the driver. Called in the watching thread."""

    def slices_listed(self, slices: Sequence[FoundSlice]) -> None:
        """Take all slices. Slices that are not in the list have gone."""
        ...

    def slice_changed(self, one: FoundSlice) -> None:
        """A slice was added or changed."""
        ...

    def slice_deleted(self, one: FoundSlice) -> None:
        """A slice was deleted."""
        ...

    def api_trouble(self, what: str, trouble: str) -> None:
        """List-watch fails with this error; empty when it works again."""
        ...


class SliceWatch(Protocol):
    """The list-watch of slices, in its own thread."""

    def start(self, listener: SliceListener) -> None:
        """Start it; it runs until ``stop`` or the end of the process."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


class ResourceApi(Protocol):
    """Requests about claims and slices, called in a thread. They raise KubeApiError."""

    def read_claim(self, namespace: str, name: str) -> bytes:
        """Read a ResourceClaim, as JSON."""
        ...

    def report_devices(self, namespace: str, name: str, uid: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write this driver's part of ``status.devices``, if the claim still has this UID."""
        ...

    def create_slice(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create a ResourceSlice; return its spec as the API stored it."""
        ...

    def replace_slice(self, name: str, resource_version: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace a ResourceSlice, if it is still of this version; return its spec as the API stored it."""
        ...

    def delete_slice(self, name: str) -> None:
        """Delete a ResourceSlice, if it exists."""
        ...
