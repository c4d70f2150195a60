# SPDX-License-Identifier: Apache-2.0
"""What an agent needs before it may build anything else: the locks on the node's directories, and the sockets that kubelet calls."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from agent.adapters.directory_locks import DirectoryLocks
from agent.adapters.dra_grpc import DriverDirectories, driver_directory
from agent.adapters.durable import make_directory
from agent.adapters.http_server import StatusServer
from agent.adapters.succession import Succession
from agent.errors import StorageError
from agent.services.driver_front import DriverFront
from agent.services.standby import Standby
from agent.services.telemetry import Telemetry
from agent.settings import Settings
from aliquot.contract.features import Gate
from aliquot.process.settings import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """This agent's place on its node: what it needs to take it, and to give it to the next agent."""

    locks: DirectoryLocks
    succession: Succession
    telemetry: Telemetry
    front: DriverFront | None
    """The sockets of the driver; None where claims are not served."""

    async def leave(self) -> None:
        """Let the next agent have the place, after the services have ended."""
        if self.front is not None:
            await self.front.stop()
        self.succession.withdraw()
        self.locks.close()


def build_place(settings: Settings, environ: Mapping[str, str]) -> Place:
    """Create the directories that the agent writes, and what keeps two agents apart; on the event loop. Raises StorageError."""
    pod = environ.get("HOSTNAME") or socket.gethostname()
    state, runtime, cdi = Path(settings.state_dir), Path(settings.runtime_dir), Path(settings.cdi_dir)
    make_directory(state, 0o700)
    make_directory(runtime, 0o755)
    try:  # shared with the container runtime, so its mode is not ours to set
        cdi.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageError(f"creating {cdi}: {exc.strerror}") from exc
    since = datetime.now(UTC).isoformat(timespec="seconds")
    directories = list(dict.fromkeys((state, runtime, cdi)))
    locks = DirectoryLocks(directories, [state, runtime], f"{pod}, process {os.getpid()}, since {since}")
    telemetry = Telemetry(settings.node_name_or_host)
    return Place(locks, Succession(state, pod), telemetry, _front(settings, telemetry))


def _front(settings: Settings, telemetry: Telemetry) -> DriverFront | None:
    """Return the driver's sockets; None where kubelet may not call the agent about claims.

    It may also after a change to the device plugin, until the last claim has ended. The component ``dra`` mounts the driver's directory. A
    node that only has the gate open stays without a driver.
    """
    kubelet = Path(settings.kubelet_dir)
    if Gate.DYNAMIC_RESOURCE_ALLOCATION not in settings.gates:
        return None
    if not settings.allocation.by_claims and not driver_directory(kubelet).is_dir():
        return None
    return DriverFront(DriverDirectories(kubelet, f"{os.getpid():x}-{time.time_ns() // 1_000_000:x}"), telemetry)


async def wait_to_be_alone(settings: Settings, place: Place, stop: asyncio.Event) -> bool:
    """Wait until no other agent uses the directories; return False if ``stop`` was set before. Raises StorageError."""
    succession = place.succession
    standby = Standby(place.locks, lambda: succession.retired and succession.is_asked_for())
    if standby.is_alone():
        return True
    server = _serve(settings, standby)
    try:
        return await standby.wait(stop, lambda: _ask(place))
    finally:
        succession.withdraw()
        if server is not None:
            server.stop()


def _ask(place: Place) -> None:
    """Ask the working agent for its place once kubelet knows this one, unless this pod has just given the place away."""
    if place.front is None or place.succession.retired:
        return
    place.front.start()
    if not place.front.registrar.trouble:
        place.succession.ask()


def _serve(settings: Settings, standby: Standby) -> StatusServer | None:
    """Serve the probes; None if the other agent has the port, as two agents in the host's network have."""
    pages = {"/healthz": standby.health, **dict.fromkeys(("/readyz", "/metrics", "/drift"), standby.page)}
    try:
        server = StatusServer(*settings.metrics_host_port, pages)
    except SettingsError as exc:
        logger.warning("no probes are served while this agent waits: %s", exc)
        return None
    server.start()
    logger.info("status server listens", extra={"address": server.address})
    return server
