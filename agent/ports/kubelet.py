# SPDX-License-Identifier: Apache-2.0
"""Kubelet's sockets, its plugin directory and its checkpoint."""

from collections.abc import Sequence
from typing import Protocol

from agent.core.conflict import Evidence
from agent.core.identity import HeldDevices, RememberedDevices
from agent.core.injection import Answer
from agent.core.registration import FileIdentity
from aliquot.kubelet_api.deviceplugin_pb2_grpc import DevicePluginServicer


class PodResources(Protocol):
    """Kubelet's PodResources socket. Calls raise KubeletError, or KubeletBusyError above kubelet's limit of calls."""

    async def held(self) -> Sequence[HeldDevices]:
        """Return which container holds which device IDs."""
        ...

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """Return the IDs that kubelet offers under a resource name."""
        ...


class KubeletCheckpoint(Protocol):
    """Kubelet's checkpoint of allocations. It may be missing or unreadable."""

    def remembered(self) -> Sequence[RememberedDevices]:
        """Return which IDs kubelet gave to which container; empty when the checkpoint cannot be read."""
        ...

    def answer(self, kept: bytes) -> Answer | None:
        """Decode ``RememberedDevices.answer``; None when it is empty or invalid. Pure."""
        ...

    def version(self) -> object:
        """Return a value that changes with every write of the checkpoint; None when the file cannot be read."""
        ...


class PluginServer(Protocol):
    """A plugin that listens on a socket."""

    async def stop(self) -> None:
        """Stop listening, let running calls end, remove the socket."""
        ...


class Kubelet(Protocol):
    """Kubelet's device plugin directory. Calls raise KubeletError."""

    async def serve(self, socket_name: str, plugin: DevicePluginServicer) -> PluginServer:
        """Serve a plugin on a socket in the directory."""
        ...

    async def register(self, socket_name: str, resource: str) -> None:
        """Register the resource with kubelet, under that socket."""
        ...

    def identity(self, socket_name: str) -> FileIdentity | None:
        """Return which file a name in the directory is now; None when it does not exist."""
        ...

    async def evidence(self, resource: str, own_sockets: frozenset[str]) -> Evidence:
        """Gather evidence about another plugin that serves the resource."""
        ...

    async def remove_dead_sockets(self, prefix: str) -> None:
        """Remove sockets with that prefix and without a listener."""
        ...
