"""Counters of containers that never run backwards, made from regions whose processes come and go.

A process takes its counters along when it ends, so their sum over the living falls, and a monitoring system would read that as work.
Kept true: what a process was once seen to have done stays counted as long as its container has its grant. What it does after it was
last looked at and before its slot is used again is not seen; the slot of a dead process is still read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.region_layout import RegionSnapshot, SlotDevice

_Process = tuple[int, int, int]
"""Slot, pid and start time: what tells a process from a later one in its slot."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What was done on one device."""

    busy_ns: int = 0
    throttled_ns: int = 0
    launches: int = 0
    refusals: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.busy_ns + other.busy_ns,
            self.throttled_ns + other.throttled_ns,
            self.launches + other.launches,
            self.refusals + other.refusals,
        )

    def since(self, earlier: "Counts") -> "Counts":
        """Return what was added; nothing where the count fell, which only a program that writes over its own counters does."""
        return Counts(
            max(0, self.busy_ns - earlier.busy_ns),
            max(0, self.throttled_ns - earlier.throttled_ns),
            max(0, self.launches - earlier.launches),
            max(0, self.refusals - earlier.refusals),
        )


@dataclass(frozen=True, slots=True)
class Tally:
    """One container's counts, by device in the order of its shares."""

    totals: tuple[Counts, ...]
    _seen: Mapping[_Process, tuple[Counts, ...]] = field(default_factory=dict)

    @classmethod
    def empty(cls, device_count: int) -> "Tally":
        """Return the tally of a container that has done nothing."""
        return cls((Counts(),) * device_count)

    def after(self, snapshot: RegionSnapshot) -> "Tally":
        """Return the tally with what a look at the region adds."""
        nothing = (Counts(),) * len(self.totals)
        totals, seen = self.totals, {}
        for slot in snapshot.slots:
            process = (slot.index, slot.pid, slot.start_ticks)
            counts = tuple(_counts(device) for device in slot.devices[: len(self.totals)])
            earlier = self._seen.get(process, nothing)
            totals = tuple(total + now.since(then) for total, now, then in zip(totals, counts, earlier, strict=True))
            seen[process] = counts
        return Tally(totals, seen)


def _counts(device: SlotDevice) -> Counts:
    return Counts(device.busy_ns, device.throttled_ns, device.launches, device.refusals)
