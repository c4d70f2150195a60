# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that the driver counts for a container and the shim does not, and corrects ``overhead_bytes`` in its limits.

Compares the driver's list of processes with the usage regions. This also gives the memory of one CUDA context, and what containers use
as the driver counts it. Runs with every census of the processes, and for a scrape that would show old figures. Reads only the regions of
containers on GPUs with listed processes. ``core.overhead`` and ``core.holdings`` decide.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from agent.core.holdings import Holdings, holdings_of
from agent.core.ledger import Grant
from agent.core.overhead import Reading, bare_context_bytes, holds_unlisted, host_pids, living, next_overhead, read_device
from agent.core.owners import pod_uids_of
from agent.core.region_layout import Limits
from agent.errors import DriverError, StorageError
from agent.ports.clock import Clock
from agent.ports.grants import ContainerFiles, RegionView
from agent.services.process_census import Census, ProcessCensus
from agent.services.state import AgentState

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""A scrape uses figures up to this age."""
SCRAPE_WAIT_SECONDS = 0.5
"""How long a scrape waits for new figures before it uses those of the last pass."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The region of one container compared with the driver."""

    readings: Mapping[str, Reading]
    """By device UUID."""
    pids: Set[int]
    """Host pids of the processes that the shim counts."""
    unlisted: Set[str]
    """UUIDs of the devices on which one of them uses memory and is not listed."""


class OverheadMeter:
    """One pass, and the loop of passes."""

    def __init__(self, *, census: ProcessCensus, state: AgentState, files: ContainerFiles, clock: Clock) -> None:
        self._census = census
        self._watch = state.watch
        self._manager = state.manager
        self._pods = state.pods
        self._files = files
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._passing = asyncio.Lock()
        self._passed_at = -math.inf
        self._context_bytes: dict[str, int] = {}
        self.overhead_bytes: Mapping[tuple[str, str], int] = {}
        """What is subtracted from a limit, by grant id and device UUID, as of the last pass."""
        self.holdings = Holdings()
        """What containers use as the driver counts it, as of the last pass; replaced as a whole."""

    async def run(self) -> None:
        """Compare after each census, until cancelled."""
        self._loop = asyncio.get_running_loop()
        seen = self._census.changes.count
        while True:
            seen = await self._census.changes.after(seen)
            try:
                await self.reconcile(self._census.latest)
            except DriverError as exc:
                logger.warning("overhead: %s", exc)

    def context_bytes(self, device_uuid: str) -> int:
        """Return the memory of one context on a device of this model; 0 while it is unknown."""
        return self._context_bytes.get(self._model(device_uuid), 0)

    def fresh_overhead_bytes(self) -> Mapping[tuple[str, str], int]:
        """Return ``overhead_bytes``, after another pass if the last is old. Call it in any thread except the event loop's."""
        if self._loop is not None and self._clock.monotonic() - self._passed_at > FRESH_SECONDS:
            passing = asyncio.run_coroutine_threadsafe(self._refresh(), self._loop)
            with suppress(TimeoutError, DriverError):  # the loop's own passes log a driver that does not answer
                passing.result(SCRAPE_WAIT_SECONDS)
        return self.overhead_bytes

    async def reconcile(self, census: Census) -> None:
        """Do one pass. Raises DriverError.

        Args: census: its processes tell which containers to compare.
        """
        async with self._passing:
            await self._reconcile(census)
            self._passed_at = self._clock.monotonic()

    async def _refresh(self) -> None:
        try:
            await self.reconcile(await self._census.take())
        except DriverError:
            self.holdings = replace(self.holdings, recent=False)  # the amounts stay valid until new ones are known
            raise

    async def _reconcile(self, census: Census) -> None:
        grants = self._concerned(census)
        before = await self._manager.on_regions(lambda: self._live_regions(grants)) if grants else {}
        between = await self._census.take() if before else census
        looks, self.overhead_bytes = await self._compare(grants, before, between)
        self.holdings = holdings_of(
            between.listed,
            between.processes,
            {entry.device.uuid for entry in self._watch.inventory.devices if entry.answers} - between.unknown,
            grants=tuple(self._manager.ledger.grants.values()),
            pods_by_uid=self._pods.by_uid,
            counted_pids={grant_id: look.pids for grant_id, look in looks.items()},
            silent={(grant_id, uuid) for grant_id, look in looks.items() for uuid in look.unlisted},
        )

    async def _compare(
        self, grants: Sequence[Grant], before: Mapping[str, RegionView], between: Census
    ) -> tuple[Mapping[str, _Look], Mapping[tuple[str, str], int]]:
        """Compare the regions before and after a census with it, and correct the limits.

        Returns: by grant id, what was found; by grant id and device UUID, the overhead in bytes.
        """
        overhead: dict[tuple[str, str], int] = {}
        looks: dict[str, _Look] = {}
        for grant in grants:
            if grant.grant_id not in before or grant is not self._manager.ledger.grants.get(grant.grant_id):
                continue
            try:
                look = await self._manager.on_regions(partial(self._look, grant, before[grant.grant_id], between))
                if look is not None:
                    looks[grant.grant_id] = look
                    overhead |= await self._adjust(grant, look)
            except StorageError as exc:  # the other containers are not affected
                logger.warning("overhead: %s", exc, extra={"grant": grant.grant_id})
        return looks, overhead

    def _concerned(self, census: Census) -> list[Grant]:
        """Return the grants on GPUs with listed or unknown processes, and those that had listed processes at the last pass."""
        busy = {entry.device_uuid for entry in census.listed} | census.unknown
        listed = {identifier for identifier, _ in self.holdings.listed}
        return [
            grant
            for grant in self._manager.ledger.grants.values()
            if grant.under_shim and (grant.grant_id in listed or any(share.device_uuid in busy for share in grant.shares))
        ]

    def _live_regions(self, grants: Sequence[Grant]) -> Mapping[str, RegionView]:
        views = ((grant.grant_id, self._files.region(grant.grant_id)) for grant in grants)
        return {identifier: view for identifier, view in views if view is not None and view.live}

    async def _adjust(self, grant: Grant, look: _Look) -> Mapping[tuple[str, str], int]:
        """Correct the limits of one container, except on GPUs that did not answer; return its overhead. Raises StorageError."""
        if grant is not self._manager.ledger.grants.get(grant.grant_id):  # its successor has the same file
            return {}
        readings = look.readings

        def are_of_grant(limits: Limits) -> bool:
            """Whether the file is not that of another container that had these IDs before."""
            return tuple(device.uuid for device in limits.devices) == grant.device_names

        def corrected(limits: Limits) -> Limits:
            if not are_of_grant(limits):
                return limits
            return replace(
                limits,
                devices=tuple(
                    replace(device, overhead_bytes=next_overhead(device.overhead_bytes, readings[device.uuid], device.memory_bytes))
                    if device.uuid in readings
                    else device
                    for device in limits.devices
                ),
            )

        limits = await self._manager.on_disk(partial(self._files.amend_limits, grant.grant_id, corrected))
        return {(grant.grant_id, device.uuid): device.overhead_bytes for device in limits.devices} if are_of_grant(limits) else {}

    def _look(self, grant: Grant, earlier: RegionView, census: Census) -> _Look | None:
        """Compare a region with the driver's list, and write the host pids into it; None when it cannot be read. Raises StorageError."""
        view = self._files.region(grant.grant_id)
        if view is None:
            return None
        before, after = living(earlier.snapshot, earlier.dead), living(view.snapshot, view.dead)
        pids = host_pids(after, census.processes, pod_uids_of(grant, tuple(self._pods.by_uid.values())))
        used = {(entry.device_uuid, entry.pid): entry.used_bytes for entry in census.listed}
        self._files.store_host_pids(
            grant.grant_id, {slot.index: pids[slot.index] for slot in after if pids.get(slot.index, slot.host_pid) != slot.host_pid}
        )
        for position, share in enumerate(grant.shares):
            self._learn(share.device_uuid, bare_context_bytes(position, share.device_uuid, after, pids, used))
        readings = {
            share.device_uuid: read_device(position, share.device_uuid, before, after, pids, used)
            for position, share in enumerate(grant.shares)
            if share.device_uuid not in census.unknown
        }
        unlisted = {
            share.device_uuid
            for position, share in enumerate(grant.shares)
            if holds_unlisted(position, share.device_uuid, after, pids, used)
        }
        return _Look(readings, frozenset(pids.values()), unlisted)

    def _learn(self, device_uuid: str, found_bytes: int | None) -> None:
        if not found_bytes:
            return
        model = self._model(device_uuid)
        if found_bytes < self._context_bytes.get(model, found_bytes + 1):
            self._context_bytes[model] = found_bytes
            logger.info("memory of a CUDA context corrected", extra={"model": model, "context_bytes": found_bytes})

    def _model(self, device_uuid: str) -> str:
        return next((entry.device.model for entry in self._watch.inventory.devices if entry.device.uuid == device_uuid), "")
