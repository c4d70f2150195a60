"""Keeps the device board true: reads the driver at a steady period, through whatever states the driver goes.

A missing driver is waited for, a hung one is marked, a lost GPU is probed until it answers again. Each change is logged once.
"""

import asyncio
import logging

from agent.core.inventory import DeviceBoard, unnamed_instances
from agent.errors import DriverError, DriverMissingError, DriverTimeoutError
from agent.ports import Driver
from agent.services.changes import Changes

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 5.0
"""A driver that is being installed is found within this time of being ready."""
RESTART_EVERY_POLLS = 6
"""While a GPU is in trouble, NVML is left and entered again at every so many reads: after a reset a GPU is seen by new sessions only."""


class DriverWatch:
    """The board, and the loop that keeps it."""

    def __init__(self, driver: Driver, poll_seconds: float) -> None:
        self._driver = driver
        self._poll_seconds = poll_seconds
        self._trouble = "the driver has not been read yet"
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._troubled_polls = 0
        self._linked: frozenset[str] = frozenset()
        self.board = DeviceBoard()
        self.changes = Changes()

    @property
    def trouble(self) -> str:
        """Why the driver as a whole does not work; empty while it does."""
        return self._trouble

    async def run(self) -> None:
        """Read for ever."""
        while True:
            await self.poll()
            if self._trouble:
                await asyncio.sleep(min(self._retry_seconds, self._poll_seconds))
                self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            else:
                self._retry_seconds = FIRST_RETRY_SECONDS
                await asyncio.sleep(self._poll_seconds)

    async def poll(self) -> None:
        """Read once and take in what is found."""
        try:
            reading = await self._driver.read()
        except DriverTimeoutError as exc:
            hung = self._driver.hung_device()
            self._take(self.board.after_device_trouble(hung, str(exc)) if hung else self.board.after_driver_trouble(str(exc)), str(exc))
        except DriverMissingError as exc:
            self._take(self.board.after_driver_trouble(str(exc)), f"no usable NVIDIA driver: {exc}")
        except DriverError as exc:
            self._take(self.board.after_driver_trouble(str(exc)), str(exc))
        else:
            self._take(self.board.after_reading(reading), "")
            await self._look_closer()

    def _take(self, board: DeviceBoard, trouble: str) -> None:
        if _first_words(trouble) != _first_words(self._trouble):
            logger.log(logging.WARNING if trouble else logging.INFO, "driver: %s", trouble or "it answers")
        self._trouble = trouble
        before = {entry.device.uuid: entry for entry in self.board.devices}
        for entry in board.devices:
            known = before.get(entry.device.uuid)
            if known is None:
                logger.info("device found", extra={"device_uuid": entry.device.uuid, "model": entry.device.model})
            elif entry.healthy and not known.healthy:
                logger.info("device answers again", extra={"device_uuid": entry.device.uuid})
            elif known.healthy and not entry.healthy:
                logger.warning("device in trouble: %s", entry.trouble, extra={"device_uuid": entry.device.uuid})
        for instance in set(unnamed_instances(board)) - set(unnamed_instances(self.board)):
            logger.warning(
                "MIG instance not offered: its profile %r is not known here", instance.profile, extra={"device_uuid": instance.uuid}
            )
        changed = [(entry.device, entry.healthy) for entry in board.devices] != [
            (entry.device, entry.healthy) for entry in self.board.devices
        ]
        self.board = board
        if changed:
            self.changes.notify()

    async def _look_closer(self) -> None:
        """Do what a plain read does not: links when devices came or went, a new NVML session when one stays in trouble."""
        healthy = frozenset(entry.device.uuid for entry in self.board.devices if entry.healthy)
        try:
            if not healthy <= self._linked:
                self.board = self.board.with_links(await self._driver.links())
                self._linked = healthy
            self._troubled_polls = self._troubled_polls + 1 if len(healthy) < len(self.board.devices) else 0
            if self._troubled_polls >= RESTART_EVERY_POLLS:
                self._troubled_polls = 0
                await self._driver.restart()
        except DriverError as exc:  # the next read meets the same trouble and says what it means for the devices
            logger.warning("driver: %s", exc)


def _first_words(trouble: str) -> str:
    """Cut what changes while the trouble stays the same, such as the seconds a call hangs."""
    return trouble.partition(" has not returned for ")[0]
