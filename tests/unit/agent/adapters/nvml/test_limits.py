# SPDX-License-Identifier: Apache-2.0
"""What the agent makes of the driver's answers about memory limits; that a limit holds is for the simulated driver to show."""

from collections.abc import Callable
from typing import Any, cast

import pynvml
import pytest

from agent.adapters.nvml.driver import NvmlDriver
from agent.adapters.nvml.limits import LIMIT_RIGHTS, NvmlLimits
from agent.errors import DriverError


class AnsweringDriver:
    """A session with one GPU, in which each call about limits ends with the same code."""

    def __init__(self, code: int) -> None:
        self._code = code

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()

    def handle_of(self, uuid: str) -> Any:
        if uuid != "GPU-0":
            raise DriverError(f"{uuid} did not answer")
        return uuid

    def call(self, name: str, *arguments: Any, of: str, expected: tuple[int, ...] = ()) -> Any:
        assert arguments[0] == of == "GPU-0"
        raise pynvml.NVMLError(self._code)


def answering(code: int) -> NvmlLimits:
    # NvmlLimits calls only these three methods of the driver.
    return NvmlLimits(cast(NvmlDriver, AnsweringDriver(code)))


async def test_a_cgroup_that_the_driver_does_not_know_has_no_limit():
    assert await answering(pynvml.NVML_ERROR_NOT_FOUND).limit_bytes("GPU-0", "/sys/fs/cgroup/a") is None


async def test_unreadable_limit_is_error_and_not_none():
    with pytest.raises(DriverError, match="/sys/fs/cgroup/a on GPU-0"):
        await answering(pynvml.NVML_ERROR_UNKNOWN).limit_bytes("GPU-0", "/sys/fs/cgroup/a")


async def test_missing_permission_is_reported_with_what_to_do():
    with pytest.raises(DriverError) as caught:
        await answering(pynvml.NVML_ERROR_NO_PERMISSION).set_limit("GPU-0", "/sys/fs/cgroup/a", 1 << 30)
    assert str(caught.value) == f"limiting /sys/fs/cgroup/a to 1073741824 bytes on GPU-0: {LIMIT_RIGHTS}"


async def test_limit_on_an_unresponsive_gpu_is_unknown():
    with pytest.raises(DriverError, match="GPU-1 did not answer"):
        await answering(pynvml.NVML_ERROR_NOT_FOUND).limit_bytes("GPU-1", "/sys/fs/cgroup/a")
