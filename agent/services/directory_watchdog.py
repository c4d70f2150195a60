# SPDX-License-Identifier: Apache-2.0
"""Ends the agent when a directory that it shares with the host was removed there.

Without kubelet's new sockets no pod gets a device, and no runtime finds CDI specs that are written into a removed directory. Only a new
container mounts the host's current directories, and kubelet creates one when this process ends.
"""

import asyncio

from agent.errors import StorageError
from agent.ports.node_files import HostDirectories

LOOK_SECONDS = 5.0


class DirectoryWatchdog:
    """Checks the directories every few seconds."""

    def __init__(self, directories: HostDirectories) -> None:
        self._directories = directories

    async def run(self) -> None:
        """Check until a directory was removed. Raises StorageError then."""
        while True:
            removed = self._directories.removed()
            if removed:
                which = ", ".join(map(str, removed))
                raise StorageError(
                    f"removed on the host: {which}. A new directory of this name is not visible here. "
                    "The agent exits, so that kubelet restarts it with the host's current directories"
                )
            await asyncio.sleep(LOOK_SECONDS)
