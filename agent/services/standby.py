# SPDX-License-Identifier: Apache-2.0
"""Waits while another agent uses this node's directories, and touches nothing meanwhile.

Two agents on one node would remove each other's files as strays: after a second installation, or when a pod was deleted by force and its
container still runs. The waiting agent is alive and not ready, so an update waits for it, and it takes over when the other one ends.
With claims, the waiting agent asks for the place of the other one, so that an update leaves no moment without a driver.
"""

import asyncio
import logging
from collections.abc import Callable

from agent.ports.node_files import DirectoryLocks, Succession
from agent.ports.status_page import Page

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class Standby:
    """The wait, and the pages of the status server in that time."""

    def __init__(self, locks: DirectoryLocks, leaves_room: Callable[[], bool] = lambda: False) -> None:
        """Args: leaves_room: whether this agent must not take the directories now, because it has just given them to another one."""
        self._locks = locks
        self._leaves_room = leaves_room
        self.trouble = ""
        """Why this agent does nothing; empty when no other agent is known."""

    def is_alone(self) -> bool:
        """Try to take the directories; return whether this agent has them now. Raises StorageError."""
        holder = "another agent takes over" if self._leaves_room() else self._locks.take()
        advice = "this agent waits until that one ends, and changes nothing. Remove one of the two installations unless this is an update"
        trouble = f"{holder}: {advice}" if holder else ""
        if trouble and trouble != self.trouble:
            logger.warning("%s", trouble)
        self.trouble = trouble
        return not trouble

    async def wait(self, stop: asyncio.Event, ask: Callable[[], None] = lambda: None) -> bool:
        """Wait until this agent has the directories, or ``stop`` is set; return whether it has them. Raises StorageError.

        Args: ask: is called before each look; it may ask the other agent for its place.
        """
        while not stop.is_set():
            ask()
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


async def asked_to_leave(succession: Succession) -> None:
    """Return when another agent asks for the place of this one."""
    while not succession.is_asked_for():  # noqa: ASYNC110 - a lock of another process wakes no task
        await asyncio.sleep(LOOK_SECONDS)


async def _until_set(stop: asyncio.Event, most_seconds: float) -> None:
    try:
        async with asyncio.timeout(most_seconds):
            await stop.wait()
    except TimeoutError:
        return
