# SPDX-License-Identifier: Apache-2.0
"""Keeps every file open that containers of the node share: the pages of priorities and time slots."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.ports.node_files import HeldFiles


class FileHolder:
    """Looks for new and removed files every period, and at the start."""

    def __init__(self, held: HeldFiles, shared: Callable[[], Mapping[Path, bool]], period_seconds: float) -> None:
        """Args: shared: returns the files, and whether containers write them. It may read directories."""
        self._held = held
        self._shared = shared
        self._period_seconds = period_seconds

    async def run(self) -> None:
        """Hold the files until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(self._period_seconds)

    def look(self) -> None:
        """Hold what is there now, and let go what is not."""
        self._held.hold(self._shared())
