# SPDX-License-Identifier: Apache-2.0
"""Kernels for small CUDA programs that tests run in a container: a kernel that uses the device for a given time, in every form of launch.

It uses ``tests.fakes.cuda``, and does not know the shim. ``spin`` launches a kernel of the given microseconds and returns.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

from tests.fakes.cuda import into, must, out

_IMAGE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry aliquot_spin(.param .u64 microseconds)
{
  .reg .pred %again;
  .reg .u64 %length, %start, %end, %now;
  ld.param.u64 %length, [microseconds];
  mul.lo.u64 %length, %length, 1000;
  mov.u64 %start, %globaltimer;
  add.u64 %end, %start, %length;
spin:
  mov.u64 %now, %globaltimer;
  setp.lt.u64 %again, %now, %end;
  @%again bra spin;
  ret;
}
"""
"""A loop on the device's nanosecond timer; the simulated driver recognises it by name."""

PER_THREAD = "_ptsz"
GRID = (1, 1, 1, 1, 1, 1)
GLOBAL, THREAD_LOCAL = 0, 1  # CU_STREAM_CAPTURE_MODE_*


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def load() -> int:
    """Return the spinning kernel in the current context."""
    return load_module()[0]


def load_module() -> tuple[int, int]:
    """Return the spinning kernel in the current context, and its module."""
    result, module = into("cuModuleLoadData", _IMAGE)
    if result:
        raise SystemExit(f"cuModuleLoadData: {result}")
    function = out()
    must("cuModuleGetFunction", ctypes.byref(function), module, b"aliquot_spin")
    return function.value, module


def arguments(microseconds: int) -> Any:
    """Return the kernel's arguments, which have to live until the launch."""
    value = ctypes.c_uint64(microseconds)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    pointers.kept = value  # type: ignore[attr-defined]  # the driver reads it during the call
    return pointers


def spin(function: int, microseconds: int, stream: int = 0, suffix: str = "") -> None:
    """Launch with cuLaunchKernel."""
    must(f"cuLaunchKernel{suffix}", function, *GRID, 0, stream, arguments(microseconds), None)


def spin_ex(function: int, microseconds: int, stream: int = 0, suffix: str = "") -> None:
    """Launch with cuLaunchKernelEx."""
    ones = (ctypes.c_uint * 3)(1, 1, 1)
    config = LaunchConfig(grid=ones, block=ones, stream=stream or None)
    must(f"cuLaunchKernelEx{suffix}", ctypes.byref(config), function, arguments(microseconds), None)


def spin_cooperative(function: int, microseconds: int, stream: int = 0, suffix: str = "") -> None:
    """Launch with cuLaunchCooperativeKernel."""
    must(f"cuLaunchCooperativeKernel{suffix}", function, *GRID, 0, stream, arguments(microseconds))


def make_stream() -> int:
    """Create a non-blocking stream."""
    result, stream = into("cuStreamCreate", 1)
    if result:
        raise SystemExit(f"cuStreamCreate: {result}")
    return stream


def capture(stream: int, work: Callable[[], None], suffix: str = "", mode: int = THREAD_LOCAL) -> int:
    """Capture what ``work`` submits to the stream; return the graph."""
    must(f"cuStreamBeginCapture_v2{suffix}", stream, mode)
    work()
    graph = out()
    must(f"cuStreamEndCapture{suffix}", stream, ctypes.byref(graph))
    return graph.value


def instantiate(graph: int) -> int:
    """Return the executable graph."""
    result, ready = into("cuGraphInstantiateWithFlags", graph, 0)
    if result:
        raise SystemExit(f"cuGraphInstantiateWithFlags: {result}")
    return ready


def work_for(seconds: float, microseconds: int, submit: Callable[[], None], at_once: int = 8) -> int:
    """Launch and wait repeatedly; return the total device time in microseconds."""
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for _ in range(at_once):
            submit()
        must("cuCtxSynchronize")
        done += at_once * microseconds
    return done
