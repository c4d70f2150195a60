"""As much of PyTorch as tests/bench/real_gpu.py asks for, on the driver API.

Memory comes from cuMemAlloc; a product of matrices is a kernel of a fixed length.
"""

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

from tests.fakes import cuda as driver
from tests.fakes import kernels

uint8, float16 = 1, 2
PRODUCT_US = 1000


class OutOfMemoryError(RuntimeError):
    """The device has no such amount left."""


@dataclass
class Tensor:
    """So many bytes of the device."""

    size: int

    def numel(self) -> int:
        """Its elements, of a byte each."""
        return self.size


def empty(size: int, *, dtype: int, device: str) -> Tensor:
    """Memory without content."""
    del dtype, device
    result, _ = driver.into("cuMemAlloc_v2", size)
    if result == driver.OUT_OF_MEMORY:
        raise OutOfMemoryError
    if result:
        raise RuntimeError(f"cuMemAlloc: {result}")
    return Tensor(size)


def randn(rows: int, columns: int, *, device: str, dtype: int) -> Tensor:
    """A matrix."""
    return empty(rows * columns * dtype, dtype=dtype, device=device)


def mm(left: Tensor, right: Tensor) -> None:
    """The product of two matrices."""
    del left, right
    kernels.spin(_function, PRODUCT_US)


def _mem_get_info() -> tuple[int, int]:
    free, total = driver.out(), driver.out()
    driver.must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


cuda = SimpleNamespace(OutOfMemoryError=OutOfMemoryError, mem_get_info=_mem_get_info, synchronize=lambda: driver.must("cuCtxSynchronize"))
driver.start()
_function = kernels.load()
