# SPDX-License-Identifier: Apache-2.0
"""Samples what pods use of their GPUs, for the node's object (alpha feature gate ``Interference``).

How busy containers keep the multiprocessors comes from the driver's samples of their processes, or from the time that the shim charged,
as in the metrics. ``core.use_reports`` says what becomes of it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from agent.core.holdings import Holdings
from agent.core.use_reports import Key, UseHistory, next_reports, sample_of
from agent.services.changes import Changes
from agent.services.state import AgentState
from aliquot.contract.gpunode import PodUtilization

LOOKS_PER_SAMPLE: Final = 3
"""Reconcile periods between two samples: half a minute, by default."""


class UseReporter:
    """The reports, and the loop that makes them."""

    def __init__(
        self, period_seconds: float, *, state: AgentState, sm_ratios: Callable[[], Mapping[Key, float]], holdings: Callable[[], Holdings]
    ) -> None:
        """Args: period_seconds: between two samples. sm_ratios: returns how busy containers keep their GPUs; called in a thread."""
        self._period_seconds = period_seconds
        self._state = state
        self._sm_ratios = sm_ratios
        self._holdings = holdings
        self._history = UseHistory()
        self.reports: tuple[PodUtilization, ...] = ()
        self.changes = Changes()

    async def run(self) -> None:
        """Sample once a period, until cancelled."""
        while True:
            await asyncio.sleep(self._period_seconds)
            await self.look()

    async def look(self) -> None:
        """Take one sample of all pods."""
        sm_ratios = await asyncio.to_thread(self._sm_ratios)
        pods, grants = self._state.pods.by_uid, tuple(self._state.manager.ledger.grants.values())
        self._history.add(sample_of(grants, self._state.watch.inventory.devices, sm_ratios, self._holdings()), pods.keys())
        reports = next_reports(self.reports, self._history.means(), pods)
        if reports != self.reports:
            self.reports = reports
            self.changes.notify()
