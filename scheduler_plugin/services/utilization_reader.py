# SPDX-License-Identifier: Apache-2.0
"""Reads what the agents report of the use of GPUs, for the term ``interference`` of a policy.

A report changes what all pods of a template count, on all nodes. So reports are read together, once a minute.
"""

import asyncio
from typing import Final

from scheduler_plugin.core.cluster.state import ClusterState

PERIOD_SECONDS: Final = 60.0


class UtilizationReader:
    """The loop."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    async def run(self) -> None:
        """Read once a period, until cancelled."""
        while True:
            for _ in self._state.utilization_steps():
                await asyncio.sleep(0)  # calls are served between two pieces
            await asyncio.sleep(PERIOD_SECONDS)
