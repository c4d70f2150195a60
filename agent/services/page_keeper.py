"""Mends the pages that containers share, which those who may write them may also cut off or let grow.

While a page is not whole, its containers do as if there were none: no priorities, or no turns. Not part of the reconciler's pass: a
container that is writing gigabytes into the file holds this up for as long, and must hold up nothing else.
"""

import asyncio
import logging
from collections.abc import Sequence

from agent.errors import StorageError
from agent.ports import SharedPage

logger = logging.getLogger(__name__)


class PageKeeper:
    """Looks at each page every period, first at the start."""

    def __init__(self, pages: Sequence[SharedPage], period_seconds: float) -> None:
        self._pages = pages
        self._period_seconds = period_seconds

    async def run(self) -> None:
        """Mend for ever, each page by itself."""
        async with asyncio.TaskGroup() as group:
            for page in self._pages:
                group.create_task(self._keep(page))

    async def _keep(self, page: SharedPage) -> None:
        while True:
            try:
                mended = await asyncio.to_thread(page.mend)
            except StorageError as exc:
                logger.warning("%s", exc)
            else:
                if mended:
                    logger.warning("a page that containers share was damaged, and is mended", extra={"path": str(page.path)})
            await asyncio.sleep(self._period_seconds)
