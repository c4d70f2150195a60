# SPDX-License-Identifier: Apache-2.0
"""Kubelet's device plugin directory over gRPC: serves and registers our plugins, and probes the sockets there."""

import asyncio
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio

from agent.core.conflict import Evidence
from agent.core.registration import FileIdentity
from agent.errors import KubeletError
from agent.ports.kubelet import PluginServer, PodResources
from aliquot import contract
from aliquot.kubelet_api.deviceplugin_pb2 import DevicePluginOptions, Empty, RegisterRequest
from aliquot.kubelet_api.deviceplugin_pb2_grpc import (
    DevicePluginServicer,
    DevicePluginStub,
    RegistrationStub,
    add_DevicePluginServicer_to_server,
)

RECEIVE_LIMIT_BYTES = 64 << 20
"""Kubelet sends all available IDs in GetPreferredAllocation. gRPC's default of 4 MiB is too small for many shares."""
REGISTER_TIMEOUT_SECONDS = 10.0
PROBE_TIMEOUT_SECONDS = 0.5
STOP_GRACE_SECONDS = 2.0
MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit for the path of a Unix socket."""


class RunningServer:
    """Implements ``ports.PluginServer``."""

    def __init__(self, server: grpc.aio.Server, path: Path) -> None:
        self._server = server
        self._path = path

    async def stop(self) -> None:
        """See ``ports.PluginServer``."""
        await self._server.stop(STOP_GRACE_SECONDS)
        with suppress(OSError):  # in a read-only directory the socket stays; no process listens on it, and the next agent removes it
            self._path.unlink(missing_ok=True)


class KubeletDirectory:
    """Implements ``ports.Kubelet``."""

    def __init__(self, directory: Path, pod_resources: PodResources) -> None:
        self._directory = directory
        self._pod_resources = pod_resources

    async def serve(self, socket_name: str, plugin: DevicePluginServicer) -> PluginServer:
        """See ``ports.Kubelet``."""
        path = self._directory / socket_name
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise KubeletError(f"the socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter kubeletDir")
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", RECEIVE_LIMIT_BYTES)])
        add_DevicePluginServicer_to_server(plugin, server)
        try:
            server.add_insecure_port(f"unix:{path}")
            await server.start()
        except RuntimeError as exc:
            raise KubeletError(f"cannot listen on {path}: {exc}; kubelet's plugin directory must exist and be writable") from exc
        return RunningServer(server, path)

    async def register(self, socket_name: str, resource: str) -> None:
        """See ``ports.Kubelet``."""
        request = RegisterRequest(
            version=contract.DEVICE_PLUGIN_API_VERSION,
            endpoint=socket_name,
            resource_name=resource,
            options=DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True),
        )
        path = self._directory / contract.KUBELET_SOCKET_NAME
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            try:
                await RegistrationStub(channel).Register(request, timeout=REGISTER_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as exc:
                raise KubeletError(f"kubelet did not register {resource} ({path}): {exc.code().name}: {exc.details()}") from exc

    def identity(self, socket_name: str) -> FileIdentity | None:
        """See ``ports.Kubelet``."""
        try:
            status = os.lstat(self._directory / socket_name)
        except OSError:
            return None
        return FileIdentity(status.st_dev, status.st_ino, status.st_ctime_ns)

    async def evidence(self, resource: str, own_sockets: frozenset[str]) -> Evidence:
        """See ``ports.Kubelet``."""
        names = [name for name in self._sockets() if name != contract.KUBELET_SOCKET_NAME and name not in own_sockets]
        answers = await asyncio.gather(*(self._is_plugin(name) for name in names))
        try:
            allocatable: Sequence[str] = await self._pod_resources.allocatable_ids(resource)
        except KubeletError:  # a starting kubelet offers no IDs yet; the next registration queries it again
            allocatable = ()
        return Evidence(tuple(name for name, answered in zip(names, answers, strict=True) if answered), allocatable)

    async def remove_dead_sockets(self, prefix: str) -> None:
        """See ``ports.Kubelet``."""
        for name in self._sockets():
            if name.startswith(prefix) and not await is_listening(self._directory / name):
                try:
                    (self._directory / name).unlink(missing_ok=True)
                except OSError as exc:
                    raise KubeletError(f"removing the socket {self._directory / name}: {exc.strerror}") from exc

    def _sockets(self) -> list[str]:
        return [path.name for path in sockets_in(self._directory)]

    async def _is_plugin(self, name: str) -> bool:
        if not await is_listening(self._directory / name):
            return False
        async with grpc.aio.insecure_channel(f"unix:{self._directory / name}") as channel:
            try:
                await DevicePluginStub(channel).GetDevicePluginOptions(Empty(), timeout=PROBE_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError:
                return False
        return True


def sockets_in(directory: Path) -> list[Path]:
    """Return the sockets in one of kubelet's directories, sorted by name. Raises KubeletError."""
    try:
        entries = sorted(directory.iterdir())
    except OSError as exc:
        raise KubeletError(f"kubelet's plugin directory {directory}: {exc.strerror}") from exc
    return [path for path in entries if _is_socket(path)]


async def is_listening(path: Path) -> bool:
    """Whether a process listens on a socket. One that does not accept in time counts as listening."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_unix_connection(path)
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False
