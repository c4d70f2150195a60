# SPDX-License-Identifier: Apache-2.0
"""The processes on the GPUs and their facts from /proc, read once a period for all services that compare them.

The driver's lists are the most expensive call of the agent, and two loops with a call each would also compare different moments. /proc is
not read in the thread for files, so that no starting container waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from agent.core.overhead import GpuProcess, HostProcess
from agent.core.without_duration import without_duration
from agent.errors import DriverError, DriverLeftError, DriverMissingError
from agent.ports.driver import Driver
from agent.ports.processes import Processes
from agent.services.changes import Changes

logger = logging.getLogger(__name__)

LEAST_CALM = 0.1
"""Least part of a period between two looks, even if they are slow."""


@dataclass(frozen=True, slots=True)
class Census:
    """One look."""

    listed: tuple[GpuProcess, ...] = ()
    processes: tuple[HostProcess, ...] = ()
    """Those of ``listed`` that were still there when /proc was read."""
    unknown: frozenset[str] = frozenset()
    """UUIDs of GPUs that did not answer: their processes are unknown."""
    heard: bool = True
    """Whether the driver has answered, or is known to be missing; otherwise all processes are unknown."""


class ProcessCensus:
    """The last look, and the loop of looks."""

    def __init__(
        self,
        period_seconds: float,
        *,
        driver: Driver,
        processes: Processes,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args: pause: waits for about this many seconds of the clock."""
        self._period_seconds = period_seconds
        self._driver = driver
        self._processes = processes
        self._monotonic = monotonic
        self._pause = pause
        self.latest = Census(heard=False)
        """The result of the last look."""
        self.changes = Changes()
        """Counts successful looks."""
        self.attempts = Changes()
        """Counts all looks, with the failed ones."""
        self.failed_in_a_row = 0
        """Failed looks since the last successful one."""
        self._trouble = ""

    async def run(self) -> None:
        """Look once a period, from beginning to beginning, until cancelled."""
        while True:
            begun = self._monotonic()
            if await self._look():
                self.failed_in_a_row = 0
                self.changes.notify()
            else:
                self.failed_in_a_row += 1
            self.attempts.notify()
            await self._pause(max(begun + self._period_seconds - self._monotonic(), LEAST_CALM * self._period_seconds))

    async def _look(self) -> bool:
        """Look once; return whether it succeeded."""
        try:
            self._remember(await self.take())
        except DriverMissingError as exc:
            logger.debug("processes on the GPUs: %s", exc)  # the driver watch logs it, once
            self.latest = replace(self.latest, heard=True)
        except DriverLeftError as exc:
            logger.debug("processes on the GPUs: %s", exc)
        except DriverError as exc:
            if without_duration(str(exc)) != self._trouble:
                logger.warning("processes on the GPUs: %s", exc)
            self._trouble = without_duration(str(exc))
        else:
            self._trouble = ""
            return True
        return False

    async def take(self) -> Census:
        """Look now. Raises DriverError."""
        found = await self._driver.processes()
        pids = {entry.pid for entry in found.listed}
        processes = await asyncio.to_thread(self._processes.read, pids) if pids else ()
        return Census(found.listed, tuple(processes), found.unknown)

    def _remember(self, census: Census) -> None:
        if silent := census.unknown - self.latest.unknown:
            logger.warning(
                "processes unknown on GPUs that did not answer: their memory does not count as free", extra={"device_uuids": sorted(silent)}
            )
        self.latest = census
