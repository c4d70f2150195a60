# SPDX-License-Identifier: Apache-2.0
"""What an agent needs before it may build anything else: the locks on the node's directories."""

import asyncio
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from agent.adapters.directory_locks import DirectoryLocks
from agent.adapters.durable import make_directory
from agent.adapters.http_server import StatusServer
from agent.errors import StorageError
from agent.services.standby import Standby
from agent.settings import Settings
from aliquot.process.settings import SettingsError

logger = logging.getLogger(__name__)


def directory_locks(settings: Settings) -> DirectoryLocks:
    """Return the locks on the directories that the agent writes; create the directories. Raises StorageError."""
    state, runtime, cdi = Path(settings.state_dir), Path(settings.runtime_dir), Path(settings.cdi_dir)
    make_directory(state, 0o700)
    make_directory(runtime, 0o755)
    try:  # shared with the container runtime, so its mode is not ours to set
        cdi.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageError(f"creating {cdi}: {exc.strerror}") from exc
    since = datetime.now(UTC).isoformat(timespec="seconds")
    directories = list(dict.fromkeys((state, runtime, cdi)))
    return DirectoryLocks(directories, [state, runtime], f"{socket.gethostname()}, process {os.getpid()}, since {since}")


async def wait_to_be_alone(settings: Settings, locks: DirectoryLocks, stop: asyncio.Event) -> bool:
    """Wait until no other agent uses the directories; return False if ``stop`` was set before. Raises StorageError."""
    standby = Standby(locks)
    if standby.is_alone():
        return True
    server = _serve(settings, standby)
    try:
        return await standby.wait(stop)
    finally:
        if server is not None:
            server.stop()


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
