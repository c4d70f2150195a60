# SPDX-License-Identifier: Apache-2.0
"""Sums up what a container's processes use of its devices. The tenant writes the region; its decoder has checked all bounds."""

from collections.abc import Collection
from dataclasses import dataclass

from agent.core.region_layout import RegionSnapshot
from agent.core.tally import Counts, Tally

NOTHING_DONE = Counts()


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """One container on one device: what its live processes hold, and the work of all its processes."""

    used_bytes: int = 0
    context_bytes: int = 0
    """Contexts' part of the bytes in use."""
    module_bytes: int = 0
    """Modules' part of the bytes in use."""
    virtual_bytes: int = 0
    """Managed memory that the driver may move to the host (oversubscription). Not part of the bytes in use."""
    counts: Counts = NOTHING_DONE
    waiting: int = 0
    """Threads of live processes with a launch that waits for compute; at least 1 if a launch waited a moment ago."""


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """One container, by device in the order of its shares."""

    devices: tuple[DeviceUsage, ...]
    processes: int = 0
    """Live processes that use the driver."""


def usage_of(snapshot: RegionSnapshot, dead: Collection[int], tally: Tally, starved: Collection[int] = ()) -> ContainerUsage:
    """Sum up a region.

    Args: dead: slots of processes that are gone. starved: positions of the devices on which a launch waited a moment ago.
    """
    living = [slot for slot in snapshot.slots if slot.index not in dead]

    def device(position: int, counts: Counts) -> DeviceUsage:
        held = [slot.devices[position] for slot in living]
        return DeviceUsage(
            used_bytes=sum(one.used_bytes for one in held),
            context_bytes=sum(one.context_bytes for one in held),
            module_bytes=sum(one.module_bytes for one in held),
            virtual_bytes=sum(one.virtual_bytes for one in held),
            counts=counts,
            waiting=max(sum(one.waiting for one in held), int(position in starved)),
        )

    return ContainerUsage(tuple(device(position, counts) for position, counts in enumerate(tally.totals)), len(living))


@dataclass(frozen=True, slots=True)
class BusySample:
    """A container's GPU time up to a moment, per device, as the shim counted it."""

    at: float
    busy_ns: tuple[int, ...]


def utilization_between(earlier: BusySample, later: BusySample) -> tuple[float, ...]:
    """Return the fraction of time in which each device was used between two samples of a tally."""
    elapsed_ns = (later.at - earlier.at) * 1e9
    return tuple(min(1.0, max(0.0, (after - before) / elapsed_ns)) for before, after in zip(earlier.busy_ns, later.busy_ns, strict=True))
