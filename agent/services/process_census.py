"""The processes on the GPUs and who they are, looked at once a period for all who compare them with something.

The driver's lists are the costliest question the agent asks, and two loops that each ask it would also speak of different moments. /proc
is not looked at in the thread for files: no container that starts is to wait for that.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from agent.core.lasting import lasting
from agent.core.overhead import GpuProcess, HostProcess
from agent.errors import DriverError, DriverLeftError, DriverMissingError
from agent.ports import Driver, Processes
from agent.services.changes import Changes

logger = logging.getLogger(__name__)

LEAST_CALM = 0.1
"""So much of a period at least is between looks, however long they take."""


@dataclass(frozen=True, slots=True)
class Census:
    """One look."""

    listed: tuple[GpuProcess, ...] = ()
    processes: tuple[HostProcess, ...] = ()
    """Those of ``listed`` that were still there when /proc was read."""
    unknown: frozenset[str] = frozenset()
    """UUIDs of GPUs that did not tell: who is on them nobody knows."""
    heard: bool = True
    """Whether the driver has answered, or is known to be none; otherwise nobody knows who is on the GPUs."""


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
        """Args: pause: waits for about so many seconds of the clock."""
        self._period_seconds = period_seconds
        self._driver = driver
        self._processes = processes
        self._monotonic = monotonic
        self._pause = pause
        self.latest = Census(heard=False)
        """What the loop saw last."""
        self.changes = Changes()
        """Counts the looks of the loop; one that fails is none."""
        self.attempts = Changes()
        """Counts them with those that fail."""
        self.failed_in_a_row = 0
        """How many looks of the loop have failed since the last that did not."""
        self._trouble = ""

    async def run(self) -> None:
        """Look for ever: once a period from beginning to beginning, however long a look takes."""
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
        """Look once; False when that fails."""
        try:
            self._remember(await self.take())
        except DriverMissingError as exc:
            logger.debug("processes on the GPUs: %s", exc)  # the driver watch says it, once
            self.latest = replace(self.latest, heard=True)
        except DriverLeftError as exc:
            logger.debug("processes on the GPUs: %s", exc)
        except DriverError as exc:
            if lasting(str(exc)) != self._trouble:
                logger.warning("processes on the GPUs: %s", exc)
            self._trouble = lasting(str(exc))
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
                "processes not known of GPUs that did not tell: memory is not taken for free there", extra={"device_uuids": sorted(silent)}
            )
        self.latest = census
