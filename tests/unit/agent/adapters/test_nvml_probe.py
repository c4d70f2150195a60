"""What becomes of a process that tries the driver and does not end well; that it finds the GPUs is for ``test_nvml`` to show."""

import asyncio
import sys

import pytest

from agent.adapters import nvml_probe
from agent.adapters.nvml_probe import NvmlProbe
from agent.errors import DriverError


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Has a shell command run in place of the process that tries the driver."""

    def replace_with(command: str) -> None:
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace_with


async def test_what_the_process_prints_are_uuids(program):
    program("printf 'GPU-0\\nGPU-1\\n'")
    assert await NvmlProbe("").answering() == {"GPU-0", "GPU-1"}


async def test_a_process_that_fails_is_an_error_with_its_last_words(program):
    program("echo Traceback >&2; echo 'NVMLError: Unknown Error' >&2; exit 1")
    with pytest.raises(DriverError, match=r"a new session of the driver fails: NVMLError: Unknown Error$"):
        await NvmlProbe("").answering()


async def test_a_process_that_hangs_is_killed_and_no_other_is_begun_before_it_is_gone(program, monkeypatch):
    monkeypatch.setattr(nvml_probe, "PROBE_SECONDS", 0.2)
    probe = NvmlProbe("")
    program("exec sleep 60")
    with pytest.raises(DriverError, match=r"has not answered for 0\.2 s"):
        await probe.answering()
    with pytest.raises(DriverError, match="is still there: the driver holds it"):
        await probe.answering()
    program("echo GPU-0")
    monkeypatch.setattr(nvml_probe, "PROBE_SECONDS", 20)
    async with asyncio.timeout(20):
        while True:
            try:
                assert await probe.answering() == {"GPU-0"}
            except DriverError:  # it goes as soon as the loop hears of its end
                await asyncio.sleep(0.05)
            else:
                break
