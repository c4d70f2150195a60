"""Keeps containers from filling the node's memory by their usage regions, which are files in it that they may write.

Not part of the reconciler's pass, and not in the thread for files: cutting a file waits for whoever is writing into it, and must hold up
no container that starts.
"""

import asyncio
import logging
from collections.abc import Iterable

from agent.core.ledger import Grant
from agent.errors import StorageError
from agent.ports import ContainerFiles
from agent.services.grant_book import GrantBook

logger = logging.getLogger(__name__)


class RegionKeeper:
    """Looks at the region of each grant every period."""

    def __init__(self, period_seconds: float, *, book: GrantBook, files: ContainerFiles) -> None:
        self._period_seconds = period_seconds
        self._book = book
        self._files = files

    async def run(self) -> None:
        """Cut for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._period_seconds)

    async def look(self) -> None:
        """Cut what containers wrote behind their regions."""
        grants = tuple(self._book.ledger.grants.values())
        await asyncio.to_thread(self._cut_all, grants)

    def _cut_all(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self._cut(grant)

    def _cut(self, grant: Grant) -> None:
        about = {"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id}
        try:
            cut_bytes = self._files.cut_region(grant.grant_id)
        except StorageError as exc:
            logger.warning("a usage region stays larger than any that is made: %s", exc, extra=about)
            return
        if cut_bytes:
            logger.warning("container %s wrote %d bytes behind its usage region: they are cut off", grant.container, cut_bytes, extra=about)
