# SPDX-License-Identifier: Apache-2.0
"""Computes a container's overhead: what the driver uses for its processes beyond what the shim counts.

Overhead is modules, local memory, and the unused rest of 2 MiB pages. The driver lists each process with its memory; the region has what
the shim counted for each. The difference is subtracted from the container's limit, so that the limit matches the driver's count. Invariant:
the tenant writes the region, and a false region changes only the tenant's own overhead. The cost of a context comes from the driver's
figure
alone, as the minimum ever seen: no tenant can make it too small, and the first honest process corrects a value that is too large.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.cgroups import container_of
from agent.core.region_layout import RegionSnapshot, Slot
from aliquot.contract.units import MIB

STEP_BYTES = 2 * MIB
"""The driver's page size: a smaller difference is noise."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process on one GPU, as the driver lists it."""

    device_uuid: str
    pid: int
    used_bytes: int
    utilization_ratio: float | None = None
    """Fraction of the last seconds in which its kernels ran; None if this GPU or driver does not report it."""
    memory_ratio: float | None = None
    """Fraction in which the GPU's memory was busy for it, alike."""


@dataclass(frozen=True, slots=True)
class ProcessList:
    """The driver's process lists at one moment."""

    listed: tuple[GpuProcess, ...] = ()
    unknown: frozenset[str] = frozenset()
    """UUIDs of the GPUs that did not report their processes."""


@dataclass(frozen=True, slots=True)
class HostProcess:
    """The identity of a process of the host."""

    pid: int
    namespace_pids: tuple[int, ...]
    """Its pid in each of its pid namespaces, the innermost last."""
    start_ticks: int
    cgroup: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One container on one device."""

    driver_bytes: int
    counted_bytes: int
    """What the shim counted for the same processes."""
    steady: bool
    """Whether no value changed during the reading, and the driver listed every process that holds memory."""


def host_pids(slots: Iterable[Slot], processes: Sequence[HostProcess], pod_uids: Set[str]) -> Mapping[int, int]:
    """Return the process of each slot: slot index to host pid.

    A process matches a slot if its innermost pid and its start time are equal to the slot's, and its cgroup, if kubelet made it, is of
    one of the pods. A slot that matches two processes is omitted.
    """
    found = {}
    for slot in slots:
        fitting = [process.pid for process in processes if _is_of(slot, process) and _may_be_of_pod(process.cgroup, pod_uids)]
        if len(fitting) == 1:
            found[slot.index] = fitting[0]
    return found


def _is_of(slot: Slot, process: HostProcess) -> bool:
    return slot.pid == process.namespace_pids[-1] and slot.start_ticks in (0, process.start_ticks)


def _may_be_of_pod(cgroup: str, pod_uids: Set[str]) -> bool:
    container = container_of(cgroup)
    return container is None or container.pod_uid in pod_uids


def living(snapshot: RegionSnapshot, dead: Sequence[int]) -> tuple[Slot, ...]:
    """Return the slots with live processes."""
    return tuple(slot for slot in snapshot.slots if slot.index not in dead)


def read_device(
    position: int, uuid: str, before: Sequence[Slot], after: Sequence[Slot], pids: Mapping[int, int], used: Mapping[tuple[str, int], int]
) -> Reading:
    """Compare the driver's figures with the shim's on one device.

    Args: position: the device's in the region. before, after: the live slots before and after the driver query.
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
    """Whether a process holds memory on a device on which the driver does not list it."""
    return any(slot.devices[position].used_bytes > 0 and (uuid, pids.get(slot.index, 0)) not in used for slot in slots)


def next_overhead(current_bytes: int, reading: Reading, limit_bytes: int) -> int:
    """Return the new overhead, at most the limit. It changes by at least one page, and falls only after a steady reading."""
    found = min(max(0, reading.driver_bytes - reading.counted_bytes), limit_bytes)
    if abs(found - current_bytes) < STEP_BYTES or (found < current_bytes and not reading.steady):
        return current_bytes
    return found


def bare_context_bytes(
    position: int, uuid: str, slots: Sequence[Slot], pids: Mapping[int, int], used: Mapping[tuple[str, int], int]
) -> int | None:
    """Return the driver's smallest figure for a process that holds only one context; None without such a process."""
    bare = [
        driver
        for slot in slots
        if slot.devices[position].contexts == 1
        and slot.devices[position].used_bytes == slot.devices[position].context_bytes
        and (driver := used.get((uuid, pids.get(slot.index, 0)))) is not None
    ]
    return min(bare, default=None)
