"""Installs the shim at the start, after registration, and says why when it cannot be."""

import asyncio
import logging

from agent.errors import ShimError
from agent.ports import ShimInstaller

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class ShimKeeper:
    """Tries until the shim is installed."""

    def __init__(self, installer: ShimInstaller) -> None:
        self._installer = installer
        self.trouble = "the shim is not installed yet"

    async def run(self) -> None:
        """Install, then wait for ever: a service ends with the process."""
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
        await asyncio.Event().wait()
