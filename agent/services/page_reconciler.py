# SPDX-License-Identifier: Apache-2.0
"""Repairs the pages that containers share. A container that may write a page may also truncate or extend its file.

While a page is damaged, its containers run as if it did not exist: without priorities, or without time slots. This is no part of the
reconciler's pass: a container that writes gigabytes into the file delays the repair, and must delay no other work.
"""

import asyncio
import logging
from collections.abc import Sequence

from agent.errors import StorageError
from agent.ports.node_files import SharedPage

logger = logging.getLogger(__name__)


class PageReconciler:
    """Checks each page at the start and every period."""

    def __init__(self, pages: Sequence[SharedPage], period_seconds: float) -> None:
        self._pages = pages
        self._period_seconds = period_seconds

    async def run(self) -> None:
        """Check and repair until cancelled, each page in a task of its own."""
        async with asyncio.TaskGroup() as group:
            for page in self._pages:
                group.create_task(self._keep(page))

    async def _keep(self, page: SharedPage) -> None:
        while True:
            try:
                repaired = await asyncio.to_thread(page.repair)
            except StorageError as exc:
                logger.warning("%s", exc)
            else:
                if repaired:
                    logger.warning("a page that containers share was damaged, and is repaired", extra={"path": str(page.path)})
            await asyncio.sleep(self._period_seconds)
