"""``aliquot region dump``: the limits and the usage region of one container, as its processes and the agent see them at this moment.

The files are found by directory (the agent's, below its runtimeDir, or a container's ``/run/aliquot``) or by the pid of a process in the
container. Only looks: F_OFD_GETLK tells who lives, and nothing is written.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.adapters.container_files import read_region
from agent.core.region_layout import MEMORY_UNLIMITED, DeviceLimit, Limits, RegionError, Slot, SlotDevice, decode_limits
from agent.ports import RegionView
from proto import contract, units
from proto.units import format_memory

_PARTS = ("context", "module", "managed", "pool", "array")
"""Of the bytes in use; the rest is linear memory."""


class RegionDumpError(Exception):
    """There is nothing to show; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class ContainerPages:
    """Both files of one container, decoded."""

    directory: Path
    limits: Limits
    view: RegionView


def directory_of_process(pid: int, proc: Path = Path("/proc")) -> Path:
    """Return the directory with the files of the container a process is in.

    A process that uses the shim has its region mapped, which names the place also where the container's root is a plain directory.

    Raises: RegionDumpError.
    """
    root = proc / str(pid) / "root"
    try:
        maps = (proc / str(pid) / "maps").read_text()
    except OSError as exc:
        raise RegionDumpError(f"process {pid}: {exc.strerror}; want the pid of a living process, as this host sees it") from exc
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5] if line.count(" ") >= 5 and "/" in line else ""
        if path.endswith(contract.CONTAINER_REGION):
            return root / Path(path).parent.relative_to("/")
    return root / contract.CONTAINER_DIR.lstrip("/")


def read_pages(directory: Path) -> ContainerPages:
    """Read and decode both files. Raises RegionDumpError."""
    try:
        return ContainerPages(directory, decode_limits((directory / "limits").read_bytes()), read_region(directory / "region"))
    except OSError as exc:
        raise RegionDumpError(
            f"{exc.filename}: {exc.strerror}; want a directory with the files limits and region of a container, such as "
            f"{contract.RUNTIME_DIR}/containers/<grant> on the host"
        ) from exc
    except RegionError as exc:
        raise RegionDumpError(f"{directory}: {exc}") from exc


def document(pages: ContainerPages) -> Mapping[str, Any]:
    """Return everything as plain data; per process, only the devices it has touched."""
    count = len(pages.limits.devices)
    snapshot = pages.view.snapshot
    return {
        "directory": str(pages.directory),
        "fail_open": pages.limits.fail_open,
        "devices": [
            {
                **asdict(device),
                "memory_bytes": None if device.memory_bytes == MEMORY_UNLIMITED else device.memory_bytes,
                "line_used_bytes": snapshot.line_used_bytes[index],
                "line_virtual_bytes": snapshot.line_virtual_bytes[index],
                "measured_context_bytes": snapshot.measured_context_bytes[index],
            }
            for index, device in enumerate(pages.limits.devices)
        ],
        "processes": [
            {
                "slot": slot.index,
                "pid": slot.pid,
                "host_pid": slot.host_pid or None,
                "alive": slot.index not in pages.view.dead,
                "devices": {
                    pages.limits.devices[index].uuid: asdict(slot.devices[index]) for index in range(count) if _touched(slot.devices[index])
                },
            }
            for slot in snapshot.slots
        ],
        "reaped_slots": snapshot.reaped_slots,
        "repaired_bytes": snapshot.repaired_bytes,
    }


def to_json(pages: ContainerPages) -> str:
    """Return the document as one JSON object."""
    return json.dumps(document(pages), indent=2)


def lines(pages: ContainerPages) -> Iterator[str]:
    """Describe everything for a reader, a line at a time."""
    yield f"{pages.directory}"
    yield f"when the shim cannot work: {'run without limits' if pages.limits.fail_open else 'refuse'}"
    for index, device in enumerate(pages.limits.devices):
        yield ""
        yield device.uuid
        yield f"  limits   {_limits_text(device)}"
        snapshot = pages.view.snapshot
        line = f"  in use   {format_memory(snapshot.line_used_bytes[index])} on the line that grants are compared with"
        yield line + (f", {format_memory(snapshot.line_virtual_bytes[index])} virtual" if snapshot.line_virtual_bytes[index] else "")
        if measured := snapshot.measured_context_bytes[index]:
            yield f"  context  {format_memory(measured)}, as the shim measured it"
        for slot in snapshot.slots:
            yield from _process_lines(slot, slot.devices[index], device, alive=slot.index not in pages.view.dead)
    yield ""
    yield f"credited after kills: {pages.view.snapshot.reaped_slots} processes, {pages.view.snapshot.repaired_bytes} bytes of leaks"


def _limits_text(device: DeviceLimit) -> str:
    parts = ["no memory limit" if device.memory_bytes == MEMORY_UNLIMITED else format_memory(device.memory_bytes)]
    if device.burst_bytes:
        parts.append(f"{format_memory(device.burst_bytes)} with oversubscription")
    if device.overhead_bytes:
        parts.append(f"less {format_memory(device.overhead_bytes)} driver overhead")
    if device.context_bytes:
        parts.append(f"a context counts {format_memory(device.context_bytes)}")
    parts.append(f"{device.sm_percent} percent of the cores" if 0 < device.sm_percent < 100 else "no ceiling of cores")
    if device.sm_weight:
        parts.append(f"weight {device.sm_weight}")
    if device.priority:
        parts.append(f"priority {'high' if device.priority > 0 else 'low'}, line {device.priority_line or 'none'}")
    if device.paused:
        parts.append("paused")
    return ", ".join(parts)


def _is_paced(limit: DeviceLimit) -> bool:
    """Whether the shim looks at each launch, and so counts it. Source: is_paced() of cuda_shim/interpose/pace.c."""
    has_line = bool(limit.priority_line) and bool(limit.priority or limit.burst_bytes)
    return 0 < limit.sm_percent < units.WHOLE_GPU_PERCENT or limit.paused or has_line


def _process_lines(slot: Slot, held: SlotDevice, limit: DeviceLimit, *, alive: bool) -> Iterator[str]:
    if not _touched(held):
        return
    host = f", {slot.host_pid} on the host" if slot.host_pid else ""
    yield f"  process  {slot.pid} in the container{host} (slot {slot.index}, {'alive' if alive else 'dead, not yet reaped'})"
    amounts = {part: getattr(held, f"{part}_bytes") for part in _PARTS}
    parts = ", ".join(f"{part} {format_memory(amount)}" for part, amount in amounts.items() if amount)
    virtual = f", and {format_memory(held.virtual_bytes)} virtual" if held.virtual_bytes else ""
    yield f"    memory   {format_memory(held.used_bytes)}" + (f" ({parts})" if parts else "") + f", {held.contexts} contexts{virtual}"
    if held.refusals:
        yield f"    refused  {held.refusals} allocations, the last of {held.last_refused_bytes} bytes"
    if held.launches:
        busy, waited = held.busy_ns / 1e9, held.throttled_ns / 1e9
        yield f"    work     {held.launches} launches, {busy:.3f} s of GPU time paid, {waited:.3f} s waited for the right to launch"
    if not _is_paced(limit):
        yield "    work     not counted now: launches are free without a ceiling of cores, a priority or a memory burst"
    if held.waiting:
        yield f"    waiting  {held.waiting} threads, for the right to launch"


def _touched(held: SlotDevice) -> bool:
    return any(asdict(held).values())
