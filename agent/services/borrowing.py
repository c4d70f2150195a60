"""Moves the ceilings of containers in weight mode, so that they use what others leave idle.

A loop that runs only while such a container is granted, ten times a second while one of them works, and looks at nothing but the
first page of the regions on its devices. While the agent is away ceilings stay as they are. Deciding is in ``core.borrowing``.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from agent.core.borrowing import Tenant, ceilings, observed
from agent.core.region_layout import ComputeCounters, Limits
from agent.errors import StorageError
from agent.ports import Clock, ContainerFiles
from agent.services.grant_book import GrantBook
from proto.units import WHOLE_GPU_PERCENT

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.1
IDLE_PERIOD_SECONDS = 0.5
"""While nobody borrows, everybody has what it is entitled to, and nothing is urgent."""


@dataclass(slots=True)
class _Watched:
    """One tenant on one device, between two looks."""

    grant_id: str
    device_uuid: str
    position: int
    """Of the device among the container's."""
    tenant: Tenant
    ceiling_percent: int
    counters: ComputeCounters | None = None


@dataclass(slots=True)
class _Round:
    """The devices on which somebody borrows, by UUID, and when they were last looked at."""

    devices: Mapping[str, list[_Watched]] = field(default_factory=dict)
    looked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """What one look asks for."""

    moves: tuple[tuple[_Watched, int], ...]
    """The ceilings that change, in percent."""
    working: bool
    """Whether a borrower is at work."""


class Borrower:
    """The loop."""

    def __init__(self, *, book: GrantBook, files: ContainerFiles, clock: Clock) -> None:
        self._book = book
        self._files = files
        self._clock = clock

    async def run(self) -> None:
        """Borrow and give back for ever."""
        while True:
            seen = self._book.changes.count
            current = await self._book.on_disk(self.find)
            if not current.devices:
                await self._book.changes.after(seen)
            while current.devices and self._book.changes.count == seen:
                look = await self._book.on_regions(partial(self.look, current))
                if look.moves:
                    await self._book.on_disk(partial(self.move, look.moves))
                await self._book.changes.after(seen, PERIOD_SECONDS if look.working else IDLE_PERIOD_SECONDS)

    # --- below: in the thread for regions (look) or in the one for files ---

    def find(self) -> _Round:
        """Return the devices on which a container in weight mode was granted a share, with all their tenants that have a ceiling."""
        devices: dict[str, list[_Watched]] = defaultdict(list)
        for grant in self._book.ledger.grants.values():
            limits = self._files.limits(grant.grant_id) if grant.under_shim else None
            for position, device in enumerate(limits.devices if limits is not None else ()):
                if device.sm_weight or 0 < device.sm_percent < WHOLE_GPU_PERCENT:
                    tenant = Tenant(device.sm_weight or device.sm_percent, borrows=device.sm_weight > 0)
                    devices[device.uuid].append(_Watched(grant.grant_id, device.uuid, position, tenant, device.sm_percent))
        shared = {uuid: watched for uuid, watched in devices.items() if any(one.tenant.borrows for one in watched)}
        return _Round(shared, self._clock.monotonic())

    def look(self, current: _Round) -> Look:
        """Look at what everybody used since the last time; return which ceilings follow from it."""
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
                if (percent := wanted.get(one.grant_id)) is not None:
                    working |= one.tenant.active
                    if percent != one.ceiling_percent:
                        moves.append((one, percent))
        return Look(tuple(moves), working)

    def move(self, moves: Iterable[tuple[_Watched, int]]) -> None:
        """Set the ceilings."""
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
            if found != [(one.device_uuid, one.ceiling_percent)]:  # written anew since the round began: the next round looks at them
                return limits
            devices[one.position] = replace(devices[one.position], sm_percent=percent)
            return replace(limits, devices=tuple(devices))

        try:
            self._files.amend_limits(one.grant_id, moved)
        except StorageError as exc:  # most likely it was released meanwhile; if not, the next look tries again
            logger.warning("borrowing: %s", exc, extra={"grant": one.grant_id})
        else:
            one.ceiling_percent = percent
