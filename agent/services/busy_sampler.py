# SPDX-License-Identifier: Apache-2.0
"""Samples how busy the processes of containers with cores are, for the audit. ``core.over_cores`` decides what the samples mean.

It samples only GPUs on which a container has cores and the last census found a process. A process that is shorter than the time between
two censuses counts too: its container is read from /proc when the driver first names it.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Set

from agent.core.cgroups import container_of
from agent.core.over_cores import LOOKBACK_SAMPLES, BusyHistory, Key
from agent.core.overhead import HostProcess
from agent.errors import DriverError
from agent.ports.driver import Driver
from agent.ports.processes import Processes
from agent.services.grant_manager import GrantManager
from agent.services.process_census import ProcessCensus

logger = logging.getLogger(__name__)

LONGEST_INTERVAL_SECONDS, SHORTEST_INTERVAL_SECONDS = 1.0, 0.1
INTERVALS_PER_PERIOD = 3
"""Samples in a reconcile period, if it is short."""


class BusySampler:
    """The samples of the last window, and the loop that takes them."""

    def __init__(
        self,
        period_seconds: float,
        *,
        driver: Driver,
        processes: Processes,
        manager: GrantManager,
        census: ProcessCensus,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args: period_seconds: the reconcile period. pause: waits for about this many seconds."""
        self.interval_seconds = min(max(period_seconds / INTERVALS_PER_PERIOD, SHORTEST_INTERVAL_SECONDS), LONGEST_INTERVAL_SECONDS)
        self._driver = driver
        self._processes = processes
        self._manager = manager
        self._census = census
        self._pause = pause
        self._known: Mapping[int, HostProcess] = {}
        self.history = BusyHistory()
        """Replaced as a whole, so any thread may read it."""

    async def run(self) -> None:
        """Sample until cancelled; rest while no container with cores uses a GPU."""
        while True:
            seen = self._census.attempts.count
            devices = self._devices()
            if not devices:
                self.history = BusyHistory()
                await self._census.attempts.after(seen)
                continue
            await self.look(devices)
            await self._pause(self.interval_seconds)

    async def look(self, devices: Set[str]) -> None:
        """Take one sample. A driver that does not answer gives none."""
        try:
            found = await self._driver.busy(devices, LOOKBACK_SAMPLES * self.interval_seconds)
        except DriverError as exc:
            logger.debug("how busy processes are: %s", exc)  # the census logs it
            return
        await self._identify({pid for ratios in found.values() for pid in ratios})
        sample: dict[Key, float] = defaultdict(float)
        for device_uuid, ratios in found.items():
            for pid, ratio in ratios.items():
                container = container_of(self._known[pid].cgroup) if pid in self._known else None
                if container is not None:
                    sample[container, device_uuid] += ratio
        self.history = self.history.after(dict(sample))

    async def _identify(self, pids: Set[int]) -> None:
        """Read the containers of processes that the last sample did not have."""
        known = {pid: process for pid, process in self._known.items() if pid in pids}
        if new := pids - known.keys():
            known |= {process.pid: process for process in await asyncio.to_thread(self._processes.read, new)}
        self._known = known

    def _devices(self) -> Set[str]:
        listed = {entry.device_uuid for entry in self._census.latest.listed}
        return {
            share.device_uuid
            for grant in self._manager.ledger.grants.values()
            if grant.under_shim
            for share in grant.shares
            if share.cores_percent and share.device_uuid in listed
        }
