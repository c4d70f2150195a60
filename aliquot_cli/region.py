# SPDX-License-Identifier: Apache-2.0
"""``aliquot region dump``: the limits and the usage region of one container, as its processes and the agent see them now.

The user names the directory (the agent's, below its runtimeDir, or a container's ``/run/aliquot``), or the pid of a process in the
container.

Invariant: read-only. F_OFD_GETLK finds which processes are alive without taking a lock.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.adapters.container_files import read_region
from agent.core.region_layout import MEMORY_UNLIMITED, DeviceLimit, Limits, RegionError, Slot, SlotDevice, decode_limits
from agent.ports.grants import RegionView
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.units import format_memory

_PARTS = ("context", "module", "managed", "pool", "array")
"""Parts of the bytes in use; the rest is linear memory."""


class RegionDumpError(Exception):
    """The files cannot be read; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class ContainerFiles:
    """Both files of one container, decoded."""

    directory: Path
    limits: Limits
    view: RegionView


def directory_of_process(pid: int, proc: Path = Path("/proc")) -> Path:
    """Return the directory with the files of the process's container.

    A process that uses the shim maps its region, and the map names the file even where the container's root is a plain directory.

    Raises: RegionDumpError.
    """
    root = proc / str(pid) / "root"
    try:
        maps = (proc / str(pid) / "maps").read_text()
    except OSError as exc:
        raise RegionDumpError(f"process {pid}: {exc.strerror}; expected the pid of a running process on this host") from exc
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5] if line.count(" ") >= 5 and "/" in line else ""
        if path.endswith(contract.CONTAINER_REGION):
            return root / Path(path).parent.relative_to("/")
    return root / contract.CONTAINER_DIR.lstrip("/")


def read_files(directory: Path) -> ContainerFiles:
    """Read and decode both files. Raises RegionDumpError."""
    try:
        return ContainerFiles(directory, decode_limits((directory / "limits").read_bytes()), read_region(directory / "region"))
    except OSError as exc:
        raise RegionDumpError(
            f"{exc.filename}: {exc.strerror}; expected a directory with the files limits and region of a container, such as "
            f"{contract.RUNTIME_DIR}/containers/<grant> on the host"
        ) from exc
    except RegionError as exc:
        raise RegionDumpError(f"{directory}: {exc}") from exc


def document(files: ContainerFiles) -> Mapping[str, Any]:
    """Return both files as plain data; for each process only the devices that it has used."""
    count = len(files.limits.devices)
    snapshot = files.view.snapshot
    return {
        "directory": str(files.directory),
        "fail_open": files.limits.fail_open,
        "devices": [
            {
                **asdict(device),
                "memory_bytes": None if device.memory_bytes == MEMORY_UNLIMITED else device.memory_bytes,
                "line_used_bytes": snapshot.line_used_bytes[index],
                "line_virtual_bytes": snapshot.line_virtual_bytes[index],
                "measured_context_bytes": snapshot.measured_context_bytes[index],
            }
            for index, device in enumerate(files.limits.devices)
        ],
        "processes": [
            {
                "slot": slot.index,
                "pid": slot.pid,
                "host_pid": slot.host_pid or None,
                "alive": slot.index not in files.view.dead,
                "devices": {
                    files.limits.devices[index].uuid: asdict(slot.devices[index]) for index in range(count) if _touched(slot.devices[index])
                },
            }
            for slot in snapshot.slots
        ],
        "reaped_slots": snapshot.reaped_slots,
        "repaired_bytes": snapshot.repaired_bytes,
    }


def to_json(files: ContainerFiles) -> str:
    """Return the document as one JSON object."""
    return json.dumps(document(files), indent=2)


def lines(files: ContainerFiles) -> Iterator[str]:
    """Yield both files as lines of text."""
    yield f"{files.directory}"
    yield f"if the shim cannot read its limits: {'run without limits' if files.limits.fail_open else 'refuse'}"
    for index, device in enumerate(files.limits.devices):
        yield ""
        yield device.uuid
        yield f"  limits   {_limits_text(device)}"
        snapshot = files.view.snapshot
        line = f"  in use   {format_memory(snapshot.line_used_bytes[index])} in total, compared with the limit"
        yield line + (f", {format_memory(snapshot.line_virtual_bytes[index])} virtual" if snapshot.line_virtual_bytes[index] else "")
        if measured := snapshot.measured_context_bytes[index]:
            yield f"  context  {format_memory(measured)}, measured by the shim"
        for slot in snapshot.slots:
            yield from _process_lines(slot, slot.devices[index], device, alive=slot.index not in files.view.dead)
    yield ""
    yield f"reaped after kills: {files.view.snapshot.reaped_slots} processes, {files.view.snapshot.repaired_bytes} leaked bytes"


def _limits_text(device: DeviceLimit) -> str:
    return ", ".join([*_memory_limits(device), *_compute_limits(device)])


def _memory_limits(device: DeviceLimit) -> Iterator[str]:
    yield "no memory limit" if device.memory_bytes == MEMORY_UNLIMITED else format_memory(device.memory_bytes)
    if device.burst_bytes:
        yield f"{format_memory(device.burst_bytes)} with oversubscription"
    if device.overhead_bytes:
        yield f"less {format_memory(device.overhead_bytes)} driver overhead"
    if device.context_bytes:
        yield f"a context counts {format_memory(device.context_bytes)}"


def _compute_limits(device: DeviceLimit) -> Iterator[str]:
    yield f"{device.sm_percent} percent of the cores" if 0 < device.sm_percent < 100 else "no limit of cores"
    if device.sm_weight:
        yield f"weight {device.sm_weight}"
    if device.priority:
        yield f"priority {'high' if device.priority > 0 else 'low'}, line {device.priority_line or '-'}"
    if device.paused:
        yield "paused"


def _is_paced(limit: DeviceLimit) -> bool:
    """Whether the shim checks each launch, and so counts it. Source: is_paced() in cuda_shim/interpose/pace.c."""
    has_line = bool(limit.priority_line) and bool(limit.priority or limit.burst_bytes)
    return 0 < limit.sm_percent < units.WHOLE_GPU_PERCENT or limit.paused or has_line


def _process_lines(slot: Slot, held: SlotDevice, limit: DeviceLimit, *, alive: bool) -> Iterator[str]:
    if not _touched(held):
        return
    host = f", {slot.host_pid} on the host" if slot.host_pid else ""
    yield f"  process  {slot.pid} in the container{host} (slot {slot.index}, {'alive' if alive else 'dead, not yet reaped'})"
    yield f"    memory   {_memory_text(held)}"
    if held.refusals:
        yield f"    refused  {held.refusals} allocations, the last of {held.last_refused_bytes} bytes"
    if held.launches:
        busy, waited = held.busy_ns / 1e9, held.throttled_ns / 1e9
        yield f"    work     {held.launches} launches, {busy:.3f} s of GPU time, {waited:.3f} s throttled"
    if not _is_paced(limit):
        yield "    work     not counted now: launches are not checked without a limit of cores, a priority or a memory burst"
    if held.waiting:
        yield f"    waiting  {held.waiting} threads wait to launch"


def _memory_text(held: SlotDevice) -> str:
    amounts = {part: getattr(held, f"{part}_bytes") for part in _PARTS}
    parts = ", ".join(f"{part} {format_memory(amount)}" for part, amount in amounts.items() if amount)
    virtual = f", and {format_memory(held.virtual_bytes)} virtual" if held.virtual_bytes else ""
    return f"{format_memory(held.used_bytes)}" + (f" ({parts})" if parts else "") + f", {held.contexts} contexts{virtual}"


def _touched(held: SlotDevice) -> bool:
    """Whether the process has used the device."""
    return any(asdict(held).values())
