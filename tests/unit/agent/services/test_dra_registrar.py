# SPDX-License-Identifier: Apache-2.0
"""The driver's servers stop, also when the loop that restarts them is cancelled."""

import asyncio

from agent.services.dra_registrar import DraRegistrar
from agent.services.driver_front import DriverFront
from agent.services.telemetry import Telemetry
from tests.unit.agent.fakes import settle


class Server:
    """Stops when it may."""

    def __init__(self, name: str, stopped: list[str], may_stop: asyncio.Event) -> None:
        self._name, self._stopped, self._may_stop = name, stopped, may_stop

    async def stop(self) -> None:
        await self._may_stop.wait()
        self._stopped.append(self._name)


class Sockets:
    """Implements ``ports.DriverSockets``; the sockets are gone after each look."""

    endpoint = "/driver.sock"

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.may_stop = asyncio.Event()

    async def serve(self, driver, health) -> Server:
        return Server("driver", self.stopped, self.may_stop)

    async def announce(self, registration) -> Server:
        return Server("registration", self.stopped, self.may_stop)

    def exist(self) -> bool:
        return False

    async def remove_dead_sockets(self) -> None:
        pass


async def test_both_servers_stop_after_a_restart_of_them_was_cancelled(monkeypatch):
    monkeypatch.setattr("agent.services.dra_registrar.LOOK_SECONDS", 0)
    sockets = Sockets()
    registrar = DraRegistrar(sockets, None, DriverFront(None, Telemetry()), Telemetry())
    running = asyncio.ensure_future(registrar.run())
    await settle()  # it serves, finds that the sockets are gone, and waits for the first server to stop
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    sockets.may_stop.set()
    await registrar.stop()
    assert sockets.stopped == ["registration", "driver"]
