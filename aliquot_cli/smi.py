# SPDX-License-Identifier: Apache-2.0
"""A listing like nvidia-smi's, made with the real nvidia-ml-py: what NVML shows to a process in a container.

``python -m aliquot_cli.smi`` prints a table, with ``--json`` a document. A GPU in MIG mode is listed as its instances, as CUDA sees it.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pynvml

MIB = 1 << 20
RULE = "+" + "-" * 86 + "+"


@dataclass(frozen=True, slots=True)
class VisibleProcess:
    """A process that NVML lists on a device. ``memory_bytes`` is None where NVML does not report it."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A GPU or MIG instance as NVML shows it."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    utilization_percent: int | None
    processes: tuple[VisibleProcess, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything NVML shows."""

    driver_version: str
    cuda_version: str
    devices: tuple[VisibleDevice, ...]


def read_listing() -> Listing:
    """Read the listing from NVML. Raises pynvml.NVMLError."""
    pynvml.nvmlInit()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        devices = (_device(index, handle) for index, handle in enumerate(_handles()))
        return Listing(pynvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}", tuple(devices))
    finally:
        pynvml.nvmlShutdown()


def render(listing: Listing) -> str:
    """Return the listing as text."""
    lines = [RULE, _row(f"Driver Version: {listing.driver_version}", f"CUDA Version: {listing.cuda_version}"), RULE]
    for device in listing.devices:
        memory = f"{device.used_bytes // MIB:>7}MiB / {device.total_bytes // MIB}MiB"
        busy = "  N/A" if device.utilization_percent is None else f"{device.utilization_percent:>4}%"
        lines.append(_row(f"{device.index:>3}  {device.name}", f"{memory}  {busy}"))
        lines.append(_row(f"     {device.uuid}", f"{len(device.processes)} process{'' if len(device.processes) == 1 else 'es'}"))
    return "\n".join([*lines, RULE])


def _row(left: str, right: str) -> str:
    return f"| {left:<50}{right:>34} |"


def _handles() -> Iterator[Any]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        instances = list(_instances(handle))
        yield from instances or [handle]


def _instances(handle: Any) -> Iterator[Any]:
    try:
        enabled = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if enabled else 0
    except pynvml.NVMLError_NotSupported:
        return
    for index in range(count):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue


def _device(index: int, handle: Any) -> VisibleDevice:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return VisibleDevice(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        used_bytes=memory.used,
        free_bytes=memory.free,
        utilization_percent=_utilization(handle),
        processes=tuple(VisibleProcess(item.pid, item.usedGpuMemory) for item in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


def _utilization(handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError_NotSupported:
        return None


def main(arguments: list[str]) -> int:
    """Print the listing. Return 0, or 1 when NVML fails."""
    try:
        listing = read_listing()
    except pynvml.NVMLError as exc:
        print(f"NVML: {exc}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(listing).decode() if "--json" in arguments else render(listing))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
