"""What a container's processes use of its devices, from its region. The region is the tenant's own word, bounds-checked by its decoder."""

from collections.abc import Collection
from dataclasses import dataclass

from agent.core.region_layout import RegionSnapshot
from agent.core.tally import Counts, Tally

NOTHING_DONE = Counts()


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """One container on one device: what its living processes hold, and what all its processes did."""

    used_bytes: int = 0
    context_bytes: int = 0
    """Of the bytes in use: contexts. The other parts are likewise of the bytes in use, but for the virtual ones."""
    module_bytes: int = 0
    virtual_bytes: int = 0
    """Managed memory that may leave the device (oversubscription)."""
    counts: Counts = NOTHING_DONE
    waiting: int = 0
    """Launches that wait for their share of compute: threads of living processes; at least 1 where one waited a moment ago."""


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """One container, by device in the order of its shares."""

    devices: tuple[DeviceUsage, ...]
    processes: int = 0
    """Living processes that use the driver."""


def usage_of(snapshot: RegionSnapshot, dead: Collection[int], tally: Tally, starved: Collection[int] = ()) -> ContainerUsage:
    """Add up a region.

    Args: dead: slots whose process is gone. starved: positions of the devices on which a launch waited a moment ago.
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
    """A container's paid GPU time at a moment, per device."""

    at: float
    busy_ns: tuple[int, ...]


def utilization_between(earlier: BusySample, later: BusySample) -> tuple[float, ...]:
    """Return each device's share of time used between two samples of a tally."""
    elapsed_ns = (later.at - earlier.at) * 1e9
    return tuple(min(1.0, max(0.0, (after - before) / elapsed_ns)) for before, after in zip(earlier.busy_ns, later.busy_ns, strict=True))
