"""Ends the agent when a directory it shares with the host was removed there.

Without kubelet's new sockets no pod gets a device, and nobody finds the CDI specs that are written into a directory without a name. Only
another container gets what the host has now, and it comes when this one ends.
"""

import asyncio

from agent.errors import StorageError
from agent.ports import HostDirectories

LOOK_SECONDS = 5.0


class DirectoryGuard:
    """Looks at the directories every few seconds."""

    def __init__(self, directories: HostDirectories) -> None:
        self._directories = directories

    async def run(self) -> None:
        """Look until one was removed. Raises StorageError then."""
        while True:
            removed = self._directories.removed()
            if removed:
                which = ", ".join(map(str, removed))
                raise StorageError(
                    f"removed on the host, so that what is made there anew is not seen here: {which}. "
                    "The agent ends, to be started again with what the host has now"
                )
            await asyncio.sleep(LOOK_SECONDS)
