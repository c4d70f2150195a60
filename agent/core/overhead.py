"""What the driver uses for a container's processes beyond what the shim counts: modules, local memory, the unused rest of 2 MiB pages.

The driver lists processes with the memory each uses; the region says what the shim counted for each. The difference is taken off the
container's limit, so that the limit means what the driver means. Kept true: the region is the tenant's word, and a lie in it moves the
tenant's own overhead only. What one context costs is learnt from the driver's figure alone, as the least that was ever seen: no tenant
can make it smaller than it is, and the first honest process corrects one that is too large.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.core.cgroups import container_of
from agent.core.region_layout import RegionSnapshot, Slot
from proto.units import MIB

STEP_BYTES = 2 * MIB
"""The driver hands out pages of this size: a smaller difference is noise."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process on one GPU, as the driver lists it."""

    device_uuid: str
    pid: int
    used_bytes: int
    utilization_ratio: float | None = None
    """Share of the last seconds in which its kernels ran; None where this GPU or driver does not tell."""


@dataclass(frozen=True, slots=True)
class ProcessList:
    """What the driver lists at one moment."""

    listed: tuple[GpuProcess, ...] = ()
    unknown: frozenset[str] = frozenset()
    """UUIDs of the GPUs that did not tell: who is on them nobody knows."""


@dataclass(frozen=True, slots=True)
class HostProcess:
    """Who a process of the host is."""

    pid: int
    namespace_pids: tuple[int, ...]
    """Its pid in each pid namespace it is in, the innermost last."""
    start_ticks: int
    cgroup: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One container on one device."""

    driver_bytes: int
    counted_bytes: int
    """What the shim counted for the same processes."""
    steady: bool
    """Nothing changed while it was read, and the driver listed every process that holds something."""


def host_pids(slots: Iterable[Slot], processes: Sequence[HostProcess], pod_uid: str) -> Mapping[int, int]:
    """Say which process each slot belongs to: slot index to host pid.

    A process is a slot's when its innermost pid and its start time are the slot's, and its cgroup, if kubelet made it, is the pod's. A slot
    that two processes would fit is left out.
    """
    found = {}
    for slot in slots:
        fitting = [process.pid for process in processes if _is_of(slot, process) and _may_be_of_pod(process.cgroup, pod_uid)]
        if len(fitting) == 1:
            found[slot.index] = fitting[0]
    return found


def _is_of(slot: Slot, process: HostProcess) -> bool:
    return slot.pid == process.namespace_pids[-1] and slot.start_ticks in (0, process.start_ticks)


def _may_be_of_pod(cgroup: str, pod_uid: str) -> bool:
    container = container_of(cgroup)
    return container is None or container.pod_uid == pod_uid


def living(snapshot: RegionSnapshot, dead: Sequence[int]) -> tuple[Slot, ...]:
    """Return the slots whose processes live."""
    return tuple(slot for slot in snapshot.slots if slot.index not in dead)


def read_device(
    position: int, uuid: str, before: Sequence[Slot], after: Sequence[Slot], pids: Mapping[int, int], used: Mapping[tuple[str, int], int]
) -> Reading:
    """Compare the driver's figures with the shim's on one device.

    Args: position: of the device in the region. before, after: the living slots before and after the driver was asked.
        pids: slot index to host pid. used: the driver's figures by device UUID and pid.
    """
    earlier = {(slot.index, slot.pid, slot.start_ticks): slot.devices[position].used_bytes for slot in before}
    driver_bytes = counted_bytes = 0
    steady = len(before) == len(after)
    for slot in after:
        held = slot.devices[position]
        driver = used.get((uuid, pids.get(slot.index, 0)))
        was = earlier.get((slot.index, slot.pid, slot.start_ticks))
        steady = steady and was == held.used_bytes and (driver is not None or held.used_bytes == 0)
        if driver is not None:
            driver_bytes += driver
            counted_bytes += max(held.used_bytes, was or 0)
    return Reading(driver_bytes, counted_bytes, steady)


def holds_unlisted(position: int, uuid: str, slots: Iterable[Slot], pids: Mapping[int, int], used: Mapping[tuple[str, int], int]) -> bool:
    """Whether a process holds something on a device and the driver does not list it there."""
    return any(slot.devices[position].used_bytes > 0 and (uuid, pids.get(slot.index, 0)) not in used for slot in slots)


def next_overhead(current_bytes: int, reading: Reading, limit_bytes: int) -> int:
    """Return the overhead that shall hold now: at most the limit; moved by a page at least, and down by a steady reading only."""
    found = min(max(0, reading.driver_bytes - reading.counted_bytes), limit_bytes)
    if abs(found - current_bytes) < STEP_BYTES or (found < current_bytes and not reading.steady):
        return current_bytes
    return found


def bare_context_bytes(
    position: int, uuid: str, slots: Sequence[Slot], pids: Mapping[int, int], used: Mapping[tuple[str, int], int]
) -> int | None:
    """Return the least that the driver uses for a process that holds one context and nothing else; None when there is none."""
    bare = [
        driver
        for slot in slots
        if slot.devices[position].contexts == 1
        and slot.devices[position].used_bytes == slot.devices[position].context_bytes
        and (driver := used.get((uuid, pids.get(slot.index, 0)))) is not None
    ]
    return min(bare, default=None)
