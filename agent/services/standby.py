# SPDX-License-Identifier: Apache-2.0
"""Waits while another agent uses this node's directories, and touches nothing meanwhile.

Two agents on one node would remove each other's files as strays: after a second installation, or when a pod was deleted by force and its
container still runs. The waiting agent is alive and not ready, so an update waits for it, and it takes over when the other one ends.
"""

import asyncio
import logging

from agent.ports.node_files import DirectoryLocks
from agent.ports.status_page import Page

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class Standby:
    """The wait, and the pages of the status server in that time."""

    def __init__(self, locks: DirectoryLocks) -> None:
        self._locks = locks
        self.trouble = ""
        """Why this agent does nothing; empty when no other agent is known."""

    def is_alone(self) -> bool:
        """Try to take the directories; return whether this agent has them now. Raises StorageError."""
        holder = self._locks.take()
        trouble = (
            f"{holder}: this agent waits until that one ends, and changes nothing. Remove one of the two installations" if holder else ""
        )
        if trouble and trouble != self.trouble:
            logger.warning("%s", trouble)
        self.trouble = trouble
        return not trouble

    async def wait(self, stop: asyncio.Event) -> bool:
        """Wait until this agent has the directories, or ``stop`` is set; return whether it has them. Raises StorageError."""
        while not stop.is_set():
            if self.is_alone():
                logger.info("the other agent has ended: this agent takes over")
                return True
            await _until_set(stop, LOOK_SECONDS)
        return False

    def page(self, accept: str) -> Page:
        """Return any page that needs a working agent, such as /readyz: not available."""
        del accept
        return Page(503, "text/plain; charset=utf-8", f"{self.trouble}\n".encode())

    def health(self, accept: str) -> Page:
        """Return /healthz: waiting is no fault of this process."""
        del accept
        return Page(200, "text/plain; charset=utf-8", b"ok\n")


async def _until_set(stop: asyncio.Event, most_seconds: float) -> None:
    try:
        async with asyncio.timeout(most_seconds):
            await stop.wait()
    except TimeoutError:
        return
