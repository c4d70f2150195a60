"""Asks NVML once and prints one JSON document: a program of its own, because a call into a sick driver may never come back.

python -m aliquot.doctor.nvml_probe LIBRARY...

The first library that can be opened is asked.
"""

import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any

import pynvml

from agent.core.driver_limits import NVML_CALLS

_CURES = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the NVIDIA kernel module: `modprobe nvidia`",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and loaded module are of different versions: reload the module or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "run as root, with access to /dev/nvidiactl",
}
_UNREACHED = (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN)
"""What NVML says where it cannot open the device nodes."""


def main(libraries: Sequence[str]) -> dict[str, Any]:
    """Return what NVML says of the driver and each GPU, or why it says nothing and whether it reached the driver."""
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
        return {"error": str(exc), "fix": _CURES.get(exc.value, "look for XIDs in the kernel log"), "reached": exc.value not in _UNREACHED}


def _open(libraries: Sequence[str]) -> ctypes.CDLL:
    """Open the first that can be. Raises OSError with what was wrong with each."""
    troubles = []
    for library in libraries:
        try:
            return ctypes.CDLL(library)
        except OSError as exc:
            troubles.append(str(exc))
    raise OSError("; ".join(troubles))


def _gpu(index: int) -> dict[str, Any]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        remapped = _ask("nvmlDeviceGetRemappedRows", handle)
        return {
            "index": index,
            "uuid": pynvml.nvmlDeviceGetUUID(handle),
            "model": pynvml.nvmlDeviceGetName(handle),
            "compute_mode": _ask("nvmlDeviceGetComputeMode", handle),
            "persistence": _flag(_ask("nvmlDeviceGetPersistenceMode", handle)),
            "remap_pending": bool(remapped[2]) if remapped else None,
            "remap_failed": bool(remapped[3]) if remapped else None,
        }
    except pynvml.NVMLError as exc:
        return {"index": index, "error": str(exc)}


def _ask(name: str, handle: Any) -> Any:
    """Call a function that not every GPU has."""
    try:
        return getattr(pynvml, name)(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
