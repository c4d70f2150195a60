"""What the agent makes of the driver's answers about memory limits; that a limit holds is for the simulated driver to show."""

from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from agent.adapters.nvml_limits import LIMIT_RIGHTS, NvmlLimits
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


async def test_a_cgroup_that_the_driver_does_not_know_has_no_limit():
    assert await NvmlLimits(AnsweringDriver(pynvml.NVML_ERROR_NOT_FOUND)).limit_bytes("GPU-0", "/sys/fs/cgroup/a") is None


async def test_a_limit_that_cannot_be_read_is_an_error_and_not_none():
    with pytest.raises(DriverError, match="/sys/fs/cgroup/a on GPU-0"):
        await NvmlLimits(AnsweringDriver(pynvml.NVML_ERROR_UNKNOWN)).limit_bytes("GPU-0", "/sys/fs/cgroup/a")


async def test_a_lack_of_rights_says_what_would_cure_it():
    with pytest.raises(DriverError) as caught:
        await NvmlLimits(AnsweringDriver(pynvml.NVML_ERROR_NO_PERMISSION)).set_limit("GPU-0", "/sys/fs/cgroup/a", 1 << 30)
    assert str(caught.value) == f"limiting /sys/fs/cgroup/a to 1073741824 bytes on GPU-0: {LIMIT_RIGHTS}"


async def test_the_limit_on_a_gpu_that_does_not_answer_is_not_known():
    with pytest.raises(DriverError, match="GPU-1 did not answer"):
        await NvmlLimits(AnsweringDriver(pynvml.NVML_ERROR_NOT_FOUND)).limit_bytes("GPU-1", "/sys/fs/cgroup/a")
