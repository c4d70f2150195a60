# SPDX-License-Identifier: Apache-2.0
import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.adapters.process_ends import PidfdProcessEnds
from agent.errors import ProcessError


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


async def test_end_of_process_is_reported_once(process):
    told: asyncio.Queue[Any] = asyncio.Queue()
    PidfdProcessEnds().watch(process.pid, lambda: told.put_nowait("end"))
    await asyncio.sleep(0)
    assert told.empty()
    process.kill()
    await asyncio.wait_for(told.get(), 20)
    await asyncio.sleep(0.05)
    assert told.empty()


async def test_already_ended_process_is_reported_at_once(process):
    process.kill()
    process.wait()
    told = asyncio.Event()
    PidfdProcessEnds().watch(process.pid, told.set)
    await asyncio.wait_for(told.wait(), 20)


async def test_after_stop_no_end_is_reported_and_no_descriptor_stays(process):
    before = open_descriptors()
    told = asyncio.Event()
    stop = PidfdProcessEnds().watch(process.pid, told.set)
    stop()
    stop()
    process.kill()
    process.wait()
    await asyncio.sleep(0.05)
    assert not told.is_set()
    assert open_descriptors() == before


async def test_a_process_that_cannot_be_watched_is_named():
    with pytest.raises(ProcessError, match="watching process 0"):
        PidfdProcessEnds().watch(0, lambda: None)
