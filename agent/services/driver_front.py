# SPDX-License-Identifier: Apache-2.0
"""The driver's sockets of one agent, which may be there before the agent has the node's ledger.

In an update the next agent registers first, so kubelet has a driver at every moment. It holds kubelet's calls until the last agent has
finished its own and has given up the ledger. Kubelet prefers the driver that registered last, also for claims that another one prepared.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc.aio

from agent.ports.dra import DriverSockets, HealthStreams
from agent.services.changes import Changes
from agent.services.dra_registrar import DraRegistrar
from agent.services.telemetry import Telemetry
from aliquot import contract
from aliquot.kubelet_api import dra_pb2 as pb
from aliquot.kubelet_api import drahealth_pb2
from aliquot.kubelet_api.dra_pb2_grpc import DRAPluginServicer

Context = grpc.aio.ServicerContext[Any, Any]
HOLD_SECONDS: Final = 40.0
"""How long a call waits for the ledger. Kubelet gives up after 45 s, and then shows no reason."""
DRAIN_SECONDS: Final = 45.0
"""How long an agent that gives up its place finishes calls. None takes longer."""
QUIET_SECONDS: Final = 1.0
"""Kubelet may have chosen this agent for a call just before the next one registered."""
_HELD: Final = f"{contract.PRODUCT}: another agent of this node still has its ledger. The agent tries again when kubelet retries"


class DriverFront(DRAPluginServicer, HealthStreams):
    """Serves kubelet from the start, and passes its calls on once ``open`` was called."""

    def __init__(self, sockets: DriverSockets, telemetry: Telemetry) -> None:
        self._opened = asyncio.Event()
        self._driver: DRAPluginServicer | None = None
        self._health: HealthStreams | None = None
        self._ends = 0
        """How often all streams were ended."""
        self._calls = 0
        self._changes = Changes()
        self._running: asyncio.Future[None] | None = None
        self.registrar = DraRegistrar(sockets, self, self, telemetry)

    def open(self, driver: DRAPluginServicer, health: HealthStreams) -> None:
        """Pass calls on from now, those that wait included."""
        self._driver, self._health = driver, health
        self._opened.set()
        self._changes.notify()

    def start(self) -> None:
        """Begin to serve and register."""
        if self._running is None:
            self._running = asyncio.ensure_future(self.registrar.run())

    async def run(self) -> None:
        """Serve until cancelled."""
        self.start()
        if self._running is not None:
            await self._running

    async def drain(self) -> None:
        """Return when no call was in progress for ``QUIET_SECONDS``, or after ``DRAIN_SECONDS``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                seen = -1
                while self._calls or seen != self._changes.count:
                    seen = self._changes.count
                    await self._changes.after(seen, QUIET_SECONDS)

    async def stop(self) -> None:
        """Stop serving."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.registrar.stop()

    def end_streams(self) -> None:
        """End the open streams; a stopping server waits for them."""
        self._ends += 1
        self._changes.notify()
        if self._health is not None:
            self._health.end_streams()

    async def NodePrepareResources(self, request: pb.NodePrepareResourcesRequest, context: Context) -> pb.NodePrepareResourcesResponse:
        """Prepare claims, as soon as that is possible."""
        with self._call():
            if (driver := await self._in_place()) is not None:
                return await driver.NodePrepareResources(request, context)
        return pb.NodePrepareResourcesResponse(claims={one.uid: pb.NodePrepareResourceResponse(error=_HELD) for one in request.claims})

    async def NodeUnprepareResources(
        self, request: pb.NodeUnprepareResourcesRequest, context: Context
    ) -> pb.NodeUnprepareResourcesResponse:
        """Release claims, as soon as that is possible."""
        with self._call():
            if (driver := await self._in_place()) is not None:
                return await driver.NodeUnprepareResources(request, context)
        return pb.NodeUnprepareResourcesResponse(claims={one.uid: pb.NodeUnprepareResourceResponse(error=_HELD) for one in request.claims})

    async def NodeWatchResources(
        self, request: drahealth_pb2.NodeWatchResourcesRequest, context: Context
    ) -> AsyncIterator[drahealth_pb2.NodeWatchResourcesResponse]:
        """Send the health of all devices once it is known. Until then kubelet keeps what the last agent sent."""
        ends = self._ends
        while self._health is None and ends == self._ends:
            await self._changes.after(self._changes.count)
        if self._health is not None and ends == self._ends:
            async for response in self._health.NodeWatchResources(request, context):
                yield response

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._calls += 1
        self._changes.notify()
        try:
            yield
        finally:
            self._calls -= 1
            self._changes.notify()

    async def _in_place(self) -> DRAPluginServicer | None:
        """Return the driver once it is there; None if that takes too long."""
        if self._opened.is_set():
            return self._driver
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                await self._opened.wait()
        except TimeoutError:
            return None
        return self._driver
