# SPDX-License-Identifier: Apache-2.0
"""Calls NVML once and prints one JSON document. It is a separate program because a call into a faulty driver may never return.

python -m aliquot_cli.doctor.nvml_probe LIBRARY...

It uses the first library that can be opened.
"""

import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any

import pynvml

from agent.core.driver_limits import NVML_CALLS

_FIXES = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the NVIDIA kernel module: `modprobe nvidia`",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and loaded module have different versions: reload the module or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "run as root, with access to /dev/nvidiactl",
}
_UNREACHED = (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN)
"""NVML's errors where it cannot open the device nodes."""


def main(libraries: Sequence[str]) -> dict[str, Any]:
    """Return NVML's data of the driver and each GPU; or ``error``, ``fix`` and whether NVML ``reached`` the driver."""
    try:
        pynvml.nvmlLib = _open(libraries)
    except OSError as exc:
        return {"error": str(exc), "fix": "install the driver's user-space libraries", "reached": False}
    try:
        pynvml.nvmlInitWithFlags(0)
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cgroup_limits": all(hasattr(pynvml.nvmlLib, name) for name in NVML_CALLS),
            "gpus": [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())],
        }
    except pynvml.NVMLError as exc:
        return {"error": str(exc), "fix": _FIXES.get(exc.value, "check the kernel log for XIDs"), "reached": exc.value not in _UNREACHED}


def _open(libraries: Sequence[str]) -> ctypes.CDLL:
    """Open the first library that loads. Raises OSError with the error of each."""
    errors = []
    for library in libraries:
        try:
            return ctypes.CDLL(library)
        except OSError as exc:
            errors.append(str(exc))
    raise OSError("; ".join(errors))


def _gpu(index: int) -> dict[str, Any]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        remapped = _optional("nvmlDeviceGetRemappedRows", handle)
        return {
            "index": index,
            "uuid": pynvml.nvmlDeviceGetUUID(handle),
            "model": pynvml.nvmlDeviceGetName(handle),
            "compute_mode": _optional("nvmlDeviceGetComputeMode", handle),
            "persistence": _flag(_optional("nvmlDeviceGetPersistenceMode", handle)),
            "remap_pending": bool(remapped[2]) if remapped else None,
            "remap_failed": bool(remapped[3]) if remapped else None,
        }
    except pynvml.NVMLError as exc:
        return {"index": index, "error": str(exc)}


def _optional(name: str, handle: Any) -> Any:
    """Call a function that not every GPU supports; None where it does not."""
    try:
        return getattr(pynvml, name)(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
