# SPDX-License-Identifier: Apache-2.0
"""Cuts usage regions to their size. They are files in the node's memory that containers may write, so a container could fill it.

This is no part of the reconciler's pass and does not run in the thread for files: truncating a file waits for a process that writes into
it, and must delay no starting container.
"""

import asyncio
import logging
from collections.abc import Iterable

from agent.core.ledger import Grant
from agent.errors import StorageError
from agent.ports.grants import ContainerFiles
from agent.services.grant_manager import GrantManager

logger = logging.getLogger(__name__)


class RegionReconciler:
    """Checks the region of each grant every period."""

    def __init__(self, period_seconds: float, *, manager: GrantManager, files: ContainerFiles) -> None:
        self._period_seconds = period_seconds
        self._manager = manager
        self._files = files

    async def run(self) -> None:
        """Check and cut until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._period_seconds)

    async def look(self) -> None:
        """Cut what containers wrote after their regions."""
        grants = tuple(self._manager.ledger.grants.values())
        await asyncio.to_thread(self._cut_all, grants)

    def _cut_all(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self._cut(grant)

    def _cut(self, grant: Grant) -> None:
        about = {"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id}
        try:
            cut_bytes = self._files.cut_region(grant.grant_id)
        except StorageError as exc:
            logger.warning("usage region is too large and cannot be cut: %s", exc, extra=about)
            return
        if cut_bytes:
            logger.warning("container %s wrote %d bytes after its usage region; they were cut off", grant.container, cut_bytes, extra=about)
