# SPDX-License-Identifier: Apache-2.0
"""Installs the shim at the start, after registration, and removes versions that no container uses."""

import asyncio
import logging
from collections.abc import Iterable, Set

from agent.errors import ShimError, StorageError
from agent.ports.grants import CdiFiles, ContainerFiles
from agent.ports.node_files import ShimInstaller

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


SWEEP_SECONDS = 600.0
"""How long an unused version may stay."""


class ShimController:
    """Retries until the shim is installed, then removes versions of earlier agents that no container uses."""

    def __init__(self, installer: ShimInstaller, cdi: CdiFiles, files: ContainerFiles) -> None:
        self._installer = installer
        self._cdi = cdi
        self._files = files
        self.trouble = "the shim is not installed yet"

    async def run(self) -> None:
        """Install, then sweep until cancelled."""
        while self.trouble:
            try:
                directory = await asyncio.to_thread(self._installer.installed)
            except ShimError as exc:
                if str(exc) != self.trouble:
                    logger.error("%s", exc)  # noqa: TRY400 - the sentence says it all
                self.trouble = str(exc)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                logger.info("shim installed", extra={"directory": str(directory)})
                self.trouble = ""
        while True:
            await self._sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    async def _sweep(self) -> None:
        try:
            removed = await asyncio.to_thread(self._installer.sweep, self._used)
        except (ShimError, StorageError) as exc:
            logger.warning("%s", exc)
            return
        for directory in removed:
            logger.info("shim of an earlier version removed: no container uses it", extra={"directory": directory})

    def _used(self, directories: Iterable[str]) -> Set[str]:
        some = tuple(directories)
        return self._cdi.mentioned(some) | self._files.linked(some)
