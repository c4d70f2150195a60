# SPDX-License-Identifier: Apache-2.0
"""Turns the counters of a container's processes into counters that never decrease.

The counters of a process vanish when it ends. So their sum over the live processes falls, and a monitoring system would read that as new
work. Invariant: work that was once seen stays counted as long as the container has its grant. The slot of a dead process is still read, but
work between the last reading and the reuse of its slot is missed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.region_layout import RegionSnapshot, SlotDevice

_Process = tuple[int, int, int]
"""Slot, pid and start time. They distinguish a process from a later one in the same slot."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The work on one device."""

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
        """Return the increase; 0 for a count that fell. A count falls only if a program overwrites its own counters."""
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
        """Return the tally of a container without any work."""
        return cls((Counts(),) * device_count)

    def after(self, snapshot: RegionSnapshot) -> "Tally":
        """Return the tally after a reading of the region."""
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
