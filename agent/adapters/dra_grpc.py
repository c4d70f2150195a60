# SPDX-License-Identifier: Apache-2.0
"""The sockets of the agent as a DRA driver: one on which kubelet calls it, and one by which kubelet finds it.

Kubelet watches ``plugins_registry``: a socket that appears there is asked who serves it. It removes no socket, so those of agents that
were killed stay until the next agent removes them.
"""

from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from agent.adapters.durable import make_directory
from agent.adapters.kubelet_grpc import MAX_SOCKET_PATH_BYTES, RunningServer, is_listening, sockets_in
from agent.errors import KubeletError, StorageError
from agent.ports.kubelet import PluginServer
from aliquot import contract
from aliquot.kubelet_api import dra_pb2, drahealth_pb2
from aliquot.kubelet_api.dra_pb2_grpc import DRAPluginServicer
from aliquot.kubelet_api.drahealth_pb2_grpc import DRAResourceHealthServicer
from aliquot.kubelet_api.pluginregistration_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server

DRIVER_PACKAGES: Final = ("k8s.io.kubelet.pkg.apis.dra.v1", "k8s.io.kubelet.pkg.apis.dra.v1beta1")
"""The same messages under two names; kubelets before 1.34 know the second only."""
HEALTH_PACKAGES: Final = ("v1", "v1alpha1")


def driver_directory(kubelet_directory: Path) -> Path:
    """Return the directory of the sockets on which kubelet calls this driver."""
    return kubelet_directory / "plugins" / contract.DRA_DRIVER


class DriverDirectories:
    """Implements ``ports.DriverSockets``."""

    def __init__(self, kubelet_directory: Path, instance: str) -> None:
        """Args: instance: unique to this process and start; part of the sockets' names."""
        self._plugin = driver_directory(kubelet_directory) / f"dra-{instance}.sock"
        self._registration = kubelet_directory / "plugins_registry" / f"{contract.DRA_DRIVER}-{instance}-reg.sock"

    @property
    def endpoint(self) -> str:
        """See ``ports.DriverSockets``."""
        return str(self._plugin)

    async def serve(self, driver: DRAPluginServicer, health: DRAResourceHealthServicer) -> PluginServer:
        """See ``ports.DriverSockets``."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((*_driver_handlers(driver), *_health_handlers(health)))
        return await _listen(server, self._plugin)

    async def announce(self, registration: RegistrationServicer) -> PluginServer:
        """See ``ports.DriverSockets``."""
        server = grpc.aio.server()
        add_RegistrationServicer_to_server(registration, server)
        return await _listen(server, self._registration)

    def exist(self) -> bool:
        """See ``ports.DriverSockets``."""
        return self._plugin.exists() and self._registration.exists()

    async def remove_dead_sockets(self) -> None:
        """See ``ports.DriverSockets``."""
        found = [path for path in sockets_in(self._plugin.parent) if path.name.startswith("dra-")]
        found += [path for path in sockets_in(self._registration.parent) if path.name.startswith(f"{contract.DRA_DRIVER}-")]
        for path in found:
            if not await is_listening(path):
                try:
                    path.unlink(missing_ok=True)
                except OSError as exc:
                    raise KubeletError(f"removing the socket {path}: {exc.strerror}") from exc


async def _listen(server: grpc.aio.Server, path: Path) -> PluginServer:
    if len(str(path)) > MAX_SOCKET_PATH_BYTES:
        raise KubeletError(f"the socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter kubeletDir")
    try:
        _bind(server, path)
        await server.start()
    except (RuntimeError, OSError, StorageError) as exc:
        raise KubeletError(f"cannot listen on {path}: {exc}; kubelet's directory must be mounted writable at the same path") from exc
    return RunningServer(server, path)


def _bind(server: grpc.aio.Server, path: Path) -> None:
    make_directory(path.parent, 0o750)
    path.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{path}")


def _driver_handlers(driver: DRAPluginServicer) -> list[grpc.GenericRpcHandler]:
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "NodePrepareResources": grpc.unary_unary_rpc_method_handler(
            driver.NodePrepareResources,
            request_deserializer=dra_pb2.NodePrepareResourcesRequest.FromString,
            response_serializer=dra_pb2.NodePrepareResourcesResponse.SerializeToString,
        ),
        "NodeUnprepareResources": grpc.unary_unary_rpc_method_handler(
            driver.NodeUnprepareResources,
            request_deserializer=dra_pb2.NodeUnprepareResourcesRequest.FromString,
            response_serializer=dra_pb2.NodeUnprepareResourcesResponse.SerializeToString,
        ),
    }
    return [grpc.method_handlers_generic_handler(f"{package}.DRAPlugin", methods) for package in DRIVER_PACKAGES]


def _health_handlers(health: DRAResourceHealthServicer) -> list[grpc.GenericRpcHandler]:
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
            health.NodeWatchResources,
            request_deserializer=drahealth_pb2.NodeWatchResourcesRequest.FromString,
            response_serializer=drahealth_pb2.NodeWatchResourcesResponse.SerializeToString,
        )
    }
    return [grpc.method_handlers_generic_handler(f"{package}.DRAResourceHealth", methods) for package in HEALTH_PACKAGES]
