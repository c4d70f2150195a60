# SPDX-License-Identifier: Apache-2.0
"""Moves the SM limits of containers in weight mode and of those that requested no cores, so that they use what others leave idle.

The loop runs only while such a container has a grant on a device with others, ten times a second while one of them works. It reads only the
first page of the regions on their devices. While the agent is down, SM limits stay as they are. ``core.borrowing`` decides.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from agent.core.borrowing import Tenant, ceilings, observed
from agent.core.ledger import Grant
from agent.core.region_layout import ComputeCounters, Limits
from agent.errors import StorageError
from agent.ports.clock import Clock
from agent.ports.grants import ContainerFiles
from agent.services.grant_manager import GrantManager

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.1
IDLE_PERIOD_SECONDS = 0.5
"""While no container borrows, each has its own part of the SMs, and no change is urgent."""


@dataclass(slots=True)
class _Watched:
    """One tenant on one device, between two looks."""

    grant_id: str
    device_uuid: str
    position: int
    """Of the device in the container's list."""
    tenant: Tenant
    ceiling_percent: int
    counters: ComputeCounters | None = None


@dataclass(slots=True)
class _Round:
    """The devices that have a container with a moving limit, by UUID, and when they were last read."""

    devices: Mapping[str, list[_Watched]] = field(default_factory=dict)
    looked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one look."""

    moves: tuple[tuple[_Watched, int], ...]
    """The SM limits that change, in percent."""
    working: bool
    """Whether a container works that makes limits move."""


class Borrower:
    """The loop."""

    def __init__(self, *, manager: GrantManager, files: ContainerFiles, clock: Clock) -> None:
        self._manager = manager
        self._files = files
        self._clock = clock

    async def run(self) -> None:
        """Borrow and give back, until cancelled."""
        while True:
            seen = self._manager.changes.count
            current = await self._manager.on_disk(self.find)
            while current.devices and self._manager.changes.count == seen:
                look = await self._manager.on_regions(partial(self.look, current))
                if look.moves:
                    await self._manager.on_disk(partial(self.move, look.moves))
                await self._manager.changes.after(seen, PERIOD_SECONDS if look.working else IDLE_PERIOD_SECONDS)
            await self._manager.changes.paced_after(seen)  # many containers start together, and wait for the thread that finds tenants

    # --- below: in the thread for regions (look) or the thread for files ---

    def find(self) -> _Round:
        """Return the devices with a container in weight mode, or with both kinds of containers: with cores and without."""
        devices: dict[str, list[_Watched]] = defaultdict(list)
        for grant in self._manager.ledger.grants.values():
            for one in self._watched_of(grant) if grant.under_shim else ():
                devices[one.device_uuid].append(one)
        shared = {uuid: watched for uuid, watched in devices.items() if _moves(watched)}
        return _Round(shared, self._clock.monotonic())

    def _watched_of(self, grant: Grant) -> Iterable[_Watched]:
        """Return the devices of a container."""
        limits = self._files.limits(grant.grant_id)
        devices = limits.devices if limits is not None else ()
        for position, (device, share) in enumerate(zip(devices, grant.shares, strict=False)):
            cores = device.sm_weight or share.cores_percent or 0
            yield _Watched(grant.grant_id, device.uuid, position, Tenant(cores, borrows=device.sm_weight > 0), device.sm_percent)

    def look(self, current: _Round) -> Look:
        """Read what each tenant used since the last look; return the SM limits that follow from it."""
        now = self._clock.monotonic()
        elapsed_ns = round((now - current.looked_at) * 1e9)
        if elapsed_ns <= 0:
            return Look((), working=False)
        current.looked_at = now
        moves, working = [], False
        for watched in current.devices.values():
            for one in watched:
                self._observe(one, elapsed_ns)
            wanted = ceilings({one.grant_id: one.tenant for one in watched})
            for one in watched:
                working |= one.tenant.active
                percent = wanted.get(one.grant_id, one.ceiling_percent)
                if percent != one.ceiling_percent:
                    moves.append((one, percent))
        return Look(tuple(moves), working)

    def move(self, moves: Iterable[tuple[_Watched, int]]) -> None:
        """Set the SM limits."""
        for one, percent in moves:
            self._set(one, percent)

    def _observe(self, one: _Watched, elapsed_ns: int) -> None:
        found = self._files.compute(one.grant_id)
        if found is None:
            return
        if one.counters is not None:
            one.tenant = observed(one.tenant, one.counters, found[one.position], elapsed_ns)
        one.counters = found[one.position]

    def _set(self, one: _Watched, percent: int) -> None:
        def moved(limits: Limits) -> Limits:
            devices = list(limits.devices)
            found = [(device.uuid, device.sm_percent) for device in devices[one.position :][:1]]
            if found != [(one.device_uuid, one.ceiling_percent)]:  # rewritten since the round began: the next round reads them
                return limits
            devices[one.position] = replace(devices[one.position], sm_percent=percent)
            return replace(limits, devices=tuple(devices))

        try:
            self._files.amend_limits(one.grant_id, moved)
        except StorageError as exc:  # probably released meanwhile; if not, the next look retries
            logger.warning("borrowing: %s", exc, extra={"grant": one.grant_id})
        else:
            one.ceiling_percent = percent


def _moves(watched: Sequence[_Watched]) -> bool:
    """Whether the SM limit of one of a device's containers may have to move."""
    entitled = [one.tenant.entitled_percent for one in watched]
    usual = all(one.ceiling_percent == one.tenant.entitled_percent for one in watched)
    return any(one.tenant.borrows for one in watched) or (0 in entitled and any(entitled)) or not usual
