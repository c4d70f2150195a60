# SPDX-License-Identifier: Apache-2.0
"""What becomes of a process that tries the driver and does not end well; that it finds the GPUs is for ``test_nvml`` to show."""

import asyncio
import sys

import pytest

from agent.adapters.nvml import probe as nvml_probe
from agent.adapters.nvml.probe import NvmlProbe
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


async def test_failing_process_is_an_error_with_its_last_line(program):
    program("echo Traceback >&2; echo 'NVMLError: Unknown Error' >&2; exit 1")
    with pytest.raises(DriverError, match=r"a new session of the driver fails: NVMLError: Unknown Error$"):
        await NvmlProbe("").answering()


async def test_hanging_process_is_killed_before_another_starts(program, monkeypatch):
    monkeypatch.setattr(nvml_probe, "PROBE_SECONDS", 0.2)
    probe = NvmlProbe("")
    program("exec sleep 60")
    with pytest.raises(DriverError, match=r"did not answer within 0\.2 s"):
        await probe.answering()
    with pytest.raises(DriverError, match="has not ended: it hangs in the driver"):
        await probe.answering()
    program("echo GPU-0")
    monkeypatch.setattr(nvml_probe, "PROBE_SECONDS", 20)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await probe.answering() == {"GPU-0"}
            except DriverError:  # it goes as soon as the loop hears of its end
                await asyncio.sleep(0.05)
            else:
                break
