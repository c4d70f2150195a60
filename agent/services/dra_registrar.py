# SPDX-License-Identifier: Apache-2.0
"""Registers the agent with kubelet as a DRA driver, and keeps its sockets.

Kubelet finds the registration socket, asks who serves it, and says whether it took the driver. A restarted kubelet finds the socket again.
"""

import asyncio
import logging
from typing import Any, Final

import grpc.aio

from agent.errors import KubeletError
from agent.ports.dra import DriverSockets, HealthStreams
from agent.ports.kubelet import PluginServer
from agent.services.changes import Changes
from agent.services.telemetry import Telemetry
from aliquot import contract
from aliquot.kubelet_api import pluginregistration_pb2 as pb
from aliquot.kubelet_api.dra_pb2_grpc import DRAPluginServicer
from aliquot.kubelet_api.pluginregistration_pb2_grpc import RegistrationServicer

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
LOOK_SECONDS: Final = 0.5
PLUGIN_TYPE: Final = "DRAPlugin"
VERSIONS: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""Kubelet takes the first of each service that it knows."""


class DraRegistrar(RegistrationServicer):
    """Serves and registers the driver."""

    def __init__(self, sockets: DriverSockets, driver: DRAPluginServicer, health: HealthStreams, telemetry: Telemetry) -> None:
        self._sockets = sockets
        self._driver = driver
        self._health = health
        self._telemetry = telemetry
        self._servers: list[PluginServer] = []
        self.trouble = "not registered yet"
        """Why kubelet does not call the driver; empty while it does. For any thread."""
        self.changes = Changes()
        """Counts kubelet's answers: after its restart the node's slices are gone."""

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await self._sockets.remove_dead_sockets()
        except KubeletError as exc:
            logger.info("no sockets of earlier agents removed: %s", exc)
        while True:
            if not self._servers or not self._sockets.exist():
                await self._serve()
            await asyncio.sleep(LOOK_SECONDS)

    async def stop(self) -> None:
        """Stop serving. Kubelet deletes the node's slices 30 s later; prepared claims and running containers stay."""
        self._health.end_streams()
        while self._servers:  # the registration goes first, so that kubelet calls no socket without a listener
            await self._servers[-1].stop()
            self._servers.pop()  # not before: if this call is cancelled, the next one goes on

    async def GetInfo(self, request: pb.InfoRequest, context: Context) -> pb.PluginInfo:
        """Return who serves the socket."""
        return pb.PluginInfo(type=PLUGIN_TYPE, name=contract.DRA_DRIVER, endpoint=self._sockets.endpoint, supported_versions=list(VERSIONS))

    async def NotifyRegistrationStatus(self, request: pb.RegistrationStatus, context: Context) -> pb.RegistrationStatusResponse:
        """Note whether kubelet took the driver."""
        self._telemetry.registration(contract.DRA_DRIVER, succeeded=request.plugin_registered)
        if request.plugin_registered:
            self.trouble = ""
            logger.info("registered with kubelet as a driver", extra={"resource": contract.DRA_DRIVER})
        else:
            self._report(f"kubelet refused the driver {contract.DRA_DRIVER}: {request.error}")
        self.changes.notify()
        return pb.RegistrationStatusResponse()

    async def _serve(self) -> None:
        await self.stop()
        try:
            self._servers.append(await self._sockets.serve(self._driver, self._health))
            self._servers.append(await self._sockets.announce(self))
        except KubeletError as exc:
            self._report(str(exc))
            await self.stop()

    def _report(self, trouble: str) -> None:
        if trouble != self.trouble:
            logger.error("driver not registered: %s", trouble)
            self.trouble = trouble
