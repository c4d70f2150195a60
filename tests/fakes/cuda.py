# SPDX-License-Identifier: Apache-2.0
"""The driver API by ctypes, for small CUDA programs that tests run in a container: calls by exported name, results as integers.

It opens ``libcuda.so.1`` as any program does, and does not know the shim. A program prints its results with ``tell``, as JSON.
"""

import ctypes
import json
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
NOT_PERMITTED = 800
MIB = 2**20
DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
UNTOUCHED = 0xDEADBEEF

_library: list[ctypes.CDLL] = []


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class PoolProps(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("max_size", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    )


def tell(**facts: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(facts), flush=True)


def call(name: str, *arguments: Any) -> int:
    """Call a driver function; integers are passed as 64 bits, which is correct for smaller integer arguments too."""
    if not _library:
        _library.append(ctypes.CDLL("libcuda.so.1"))
    converted = [ctypes.c_uint64(argument & (2**64 - 1)) if isinstance(argument, int) else argument for argument in arguments]
    return int(getattr(_library[0], name)(*converted))


def out(initial: int = UNTOUCHED) -> ctypes.c_uint64:
    """Return a variable for the driver to write; pass it with ``ctypes.byref`` or through ``into``."""
    return ctypes.c_uint64(initial)


def into(name: str, *arguments: Any) -> tuple[int, int]:
    """Call a function with an output as the first argument; return its result and the output."""
    variable = out()
    return call(name, ctypes.byref(variable), *arguments), variable.value


def start(device: int = 0) -> None:
    """Initialise the driver, and make the device's primary context current."""
    must("cuInit", 0)
    use(device)


def use(device: int) -> None:
    """Make the device's primary context current."""
    result, context = into("cuDevicePrimaryCtxRetain", device)
    if result:
        raise SystemExit(f"cuDevicePrimaryCtxRetain: {result}")
    must("cuCtxSetCurrent", context)


def must(name: str, *arguments: Any) -> None:
    """Call a function; end the program when it fails."""
    result = call(name, *arguments)
    if result:
        raise SystemExit(f"{name}: {result}")


def alloc(size: int) -> tuple[int, int]:
    """Call cuMemAlloc; return result and address."""
    return into("cuMemAlloc_v2", size)


def info() -> tuple[int, int]:
    """Return free and total bytes from cuMemGetInfo."""
    free, total = out(), out()
    must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def create_physical(size: int, device: int = 0) -> tuple[int, int]:
    """Call cuMemCreate for device memory; return result and handle."""
    prop = AllocationProp(type=1, location_type=DEVICE, location_id=device)
    return into("cuMemCreate", size, ctypes.byref(prop), 0)


def reserve(size: int) -> int:
    """Return an address range without memory."""
    result, address = into("cuMemAddressReserve", size, 0, 0, 0)
    if result:
        raise SystemExit(f"cuMemAddressReserve: {result}")
    return address
