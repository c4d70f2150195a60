# SPDX-License-Identifier: Apache-2.0
"""Makes copies of the shim ahead, while no container starts or ends. A start is faster with one, and many starts at once gain most."""

import logging
from typing import Final

from agent.errors import StorageError
from agent.ports.grants import ContainerFiles
from agent.services.grant_manager import GrantManager

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0
"""Until the next look, when a container started or ended meanwhile: its last step is no change that could be waited for."""


class SpareMaker:
    """Brings the spare copies up to their number after each change of the ledger."""

    def __init__(self, manager: GrantManager, files: ContainerFiles) -> None:
        self._manager = manager
        self._files = files
        self._failed = False

    async def run(self) -> None:
        """Make copies until cancelled."""
        seen, has_enough = self._manager.changes.count, True
        while True:
            seen = await self._manager.changes.paced_after(seen, None if has_enough else RETRY_SECONDS)
            has_enough = await self.fill()

    async def fill(self) -> bool:
        """Make copies until there are enough, or a container starts or ends; return False in that case."""
        try:
            while self._manager.settled and await self._manager.on_disk(self._files.add_spare):
                self._failed = False
        except StorageError as exc:
            if not self._failed:
                logger.warning("no copy of the shim is made ahead, so each container's own is made when it starts: %s", exc)
            self._failed = True
            return True  # the next change tries again
        return self._manager.settled
