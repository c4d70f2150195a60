"""Keeps each container's ``overhead_bytes`` true, and learns what a context costs: the driver's list of processes against the regions.

Runs every reconcile period, and for a scrape whose figures would be old. Nothing is asked of the driver while no process of a
container lives. Deciding is in ``core.overhead``.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from agent.core.ledger import Grant
from agent.core.overhead import HostProcess, bare_context_bytes, host_pids, living, next_overhead, read_device
from agent.core.region_layout import Limits
from agent.errors import DriverError, StorageError
from agent.ports import Clock, ContainerFiles, Driver, Processes, RegionView
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""Figures no older than this serve a scrape as they are."""
SCRAPE_WAIT_SECONDS = 0.5
"""How long a scrape waits for new figures before it shows those of the last pass."""

_Used = Mapping[tuple[str, int], int]


class OverheadKeeper:
    """One pass, and the loop of passes."""

    def __init__(
        self,
        period_seconds: float,
        *,
        driver: Driver,
        processes: Processes,
        watch: DriverWatch,
        book: GrantBook,
        files: ContainerFiles,
        clock: Clock,
    ) -> None:
        self._period_seconds = period_seconds
        self._driver = driver
        self._processes = processes
        self._watch = watch
        self._book = book
        self._files = files
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._passing = asyncio.Lock()
        self._passed_at = clock.monotonic()
        self._context_bytes: dict[str, int] = {}
        self.overhead_bytes: Mapping[tuple[str, str], int] = {}
        """What is taken off a limit, by grant id and device UUID, as of the last pass."""

    async def run(self) -> None:
        """Compare for ever."""
        self._loop = asyncio.get_running_loop()
        while True:
            try:
                await self.reconcile()
            except DriverError as exc:
                logger.warning("overhead: %s", exc)
            await asyncio.sleep(self._period_seconds)

    def context_bytes(self, device_uuid: str) -> int:
        """Return what one context costs on a device of this model; 0 while it is not known."""
        return self._context_bytes.get(self._model(device_uuid), 0)

    def fresh_overhead_bytes(self) -> Mapping[tuple[str, str], int]:
        """Return ``overhead_bytes`` after another pass if the last is old; to be called in any thread but the event loop's."""
        if self._loop is not None and self._clock.monotonic() - self._passed_at > FRESH_SECONDS:
            passing = asyncio.run_coroutine_threadsafe(self.reconcile(), self._loop)
            with suppress(TimeoutError, DriverError):  # the loop's own passes tell of a driver that does not answer
                passing.result(SCRAPE_WAIT_SECONDS)
        return self.overhead_bytes

    async def reconcile(self) -> None:
        """Do one pass. Raises DriverError."""
        async with self._passing:
            await self._reconcile()
            self._passed_at = self._clock.monotonic()

    async def _reconcile(self) -> None:
        grants = [grant for grant in self._book.ledger.grants.values() if grant.under_shim]
        before = await self._book.on_disk(lambda: self._live_regions(grants))
        if not before:
            self.overhead_bytes = {}
            return
        used = {(entry.device_uuid, entry.pid): entry.used_bytes for entry in await self._driver.processes()}
        known = await self._book.on_disk(lambda: self._processes.read(pid for _, pid in used))
        overhead: dict[tuple[str, str], int] = {}
        for grant in grants:
            if grant.grant_id in before and grant is self._book.ledger.grants.get(grant.grant_id):
                try:
                    overhead |= await self._book.on_disk(partial(self._adjust, grant, before[grant.grant_id], known, used))
                except StorageError as exc:  # the others' are none the worse for it
                    logger.warning("overhead: %s", exc, extra={"grant": grant.grant_id})
        self.overhead_bytes = overhead

    def _live_regions(self, grants: Sequence[Grant]) -> Mapping[str, RegionView]:
        views = ((grant.grant_id, self._files.region(grant.grant_id)) for grant in grants)
        return {identifier: view for identifier, view in views if view is not None and view.live}

    def _adjust(self, grant: Grant, earlier: RegionView, known: Sequence[HostProcess], used: _Used) -> Mapping[tuple[str, str], int]:
        """Store the host pids of one container and correct its limits; return its overhead per device."""
        view = self._files.region(grant.grant_id)
        if view is None:
            return {}
        before, after = living(earlier.snapshot, earlier.dead), living(view.snapshot, view.dead)
        pids = host_pids(after, known, grant.pod_uid)
        self._files.store_host_pids(
            grant.grant_id, {slot.index: pids[slot.index] for slot in after if pids.get(slot.index, slot.host_pid) != slot.host_pid}
        )
        for position, share in enumerate(grant.shares):
            self._learn(share.device_uuid, bare_context_bytes(position, share.device_uuid, after, pids, used))

        def corrected(limits: Limits) -> Limits:
            return replace(
                limits,
                devices=tuple(
                    replace(
                        device,
                        overhead_bytes=next_overhead(
                            device.overhead_bytes, read_device(position, device.uuid, before, after, pids, used), device.memory_bytes
                        ),
                    )
                    for position, device in enumerate(limits.devices)
                ),
            )

        limits = self._files.amend_limits(grant.grant_id, corrected)
        return {(grant.grant_id, device.uuid): device.overhead_bytes for device in limits.devices}

    def _learn(self, device_uuid: str, found_bytes: int | None) -> None:
        if not found_bytes:
            return
        model = self._model(device_uuid)
        if found_bytes < self._context_bytes.get(model, found_bytes + 1):
            self._context_bytes[model] = found_bytes
            logger.info("a context costs less than was known", extra={"model": model, "context_bytes": found_bytes})

    def _model(self, device_uuid: str) -> str:
        return next((entry.device.model for entry in self._watch.board.devices if entry.device.uuid == device_uuid), "")
