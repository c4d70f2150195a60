# SPDX-License-Identifier: Apache-2.0
"""Reads the GPUs of this machine from NVML, in a child process so that ``LD_LIBRARY_PATH`` can choose the library.

``python -m aliquot_lab.standin.inventory`` prints them as JSON; ``read_inventory`` runs that and parses it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pynvml

from aliquot.paths import SOURCE_ROOT

TIMEOUT_SECONDS = 30.0


class InventoryError(Exception):
    """NVML failed; the message is NVML's."""


@dataclass(frozen=True, slots=True)
class MigDevice:
    """One MIG instance."""

    uuid: str
    name: str
    gpu_instance_id: int
    compute_instance_id: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU."""

    uuid: str
    model: str
    minor: int
    memory_bytes: int
    mig_enabled: bool
    mig_devices: tuple[MigDevice, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All GPUs, in the order of their minor numbers, and the driver's version."""

    driver_version: str
    gpus: tuple[Gpu, ...]


def read_inventory(env: Mapping[str, str]) -> Inventory:
    """Read NVML in a child process, with ``env`` added to this process's environment. Raises InventoryError."""
    child_env = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT), **env}
    result = subprocess.run(
        [sys.executable, "-m", "aliquot_lab.standin.inventory"],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if result.returncode != 0:
        raise InventoryError(result.stderr.strip())
    return msgspec.json.decode(result.stdout, type=Inventory)


def _query() -> Inventory:
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = sorted((_gpu(handle) for handle in handles), key=lambda gpu: gpu.minor)
        return Inventory(pynvml.nvmlSystemGetDriverVersion(), tuple(gpus))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> Gpu:
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        model=pynvml.nvmlDeviceGetName(handle),
        minor=pynvml.nvmlDeviceGetMinorNumber(handle),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        mig_enabled=_mig_enabled(handle),
        mig_devices=tuple(_mig_devices(handle)) if _mig_enabled(handle) else (),
    )


def _mig_enabled(handle: Any) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _mig_devices(handle: Any) -> Iterator[MigDevice]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        yield MigDevice(
            uuid=pynvml.nvmlDeviceGetUUID(mig),
            name=pynvml.nvmlDeviceGetName(mig),
            gpu_instance_id=pynvml.nvmlDeviceGetGpuInstanceId(mig),
            compute_instance_id=pynvml.nvmlDeviceGetComputeInstanceId(mig),
            memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(mig).total,
        )


if __name__ == "__main__":
    try:
        sys.stdout.buffer.write(msgspec.json.encode(_query()))
    except pynvml.NVMLError as error:
        sys.exit(str(error))
