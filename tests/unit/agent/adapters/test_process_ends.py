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
    reported: asyncio.Queue[Any] = asyncio.Queue()
    PidfdProcessEnds().watch(process.pid, lambda: reported.put_nowait("end"))
    await asyncio.sleep(0)
    assert reported.empty()
    process.kill()
    await asyncio.wait_for(reported.get(), 60)
    await asyncio.sleep(0.05)
    assert reported.empty()


async def test_already_ended_process_is_reported_at_once(process):
    process.kill()
    process.wait()
    reported = asyncio.Event()
    PidfdProcessEnds().watch(process.pid, reported.set)
    await asyncio.wait_for(reported.wait(), 60)


async def test_after_stop_no_end_is_reported_and_no_descriptor_stays(process):
    before = open_descriptors()
    reported = asyncio.Event()
    stop = PidfdProcessEnds().watch(process.pid, reported.set)
    stop()
    stop()
    process.kill()
    process.wait()
    await asyncio.sleep(0.05)
    assert not reported.is_set()
    assert open_descriptors() == before


async def test_a_process_that_cannot_be_watched_is_named():
    with pytest.raises(ProcessError, match="watching process 0"):
        PidfdProcessEnds().watch(0, lambda: None)
