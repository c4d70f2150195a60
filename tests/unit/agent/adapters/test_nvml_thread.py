import asyncio
import threading
import time

import pytest

from agent.adapters.nvml_thread import NvmlThread
from agent.errors import DriverTimeoutError
from tests.unit.agent.fakes import until


async def test_jobs_run_in_one_thread_of_their_own():
    thread = NvmlThread(1.0)
    names = {await thread.run(lambda: threading.current_thread().name) for _ in range(3)}
    assert names == {"nvml"}


async def test_what_a_job_raises_reaches_the_caller():
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await NvmlThread(1.0).run(fails)


async def test_a_call_that_hangs_is_reported_by_name_and_never_holds_up_the_event_loop():
    thread, release = NvmlThread(0.1), threading.Event()

    def hang():
        thread.entering("nvmlDeviceGetMemoryInfo", "GPU-1")
        release.wait(60)

    turns = 0

    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    turning = asyncio.ensure_future(turn())
    with pytest.raises(DriverTimeoutError, match=r"nvmlDeviceGetMemoryInfo on GPU-1 has not returned"):
        await thread.run(hang)
    turning.cancel()
    assert turns > 0
    hung = thread.hung_call()
    assert hung is not None
    assert hung.device_uuid == "GPU-1"
    with pytest.raises(DriverTimeoutError):  # at once: the thread is still inside
        await thread.run(lambda: None)
    release.set()
    await until(lambda: thread.hung_call() is None)
    assert await thread.run(lambda: "back") == "back"


async def test_a_job_that_was_overdue_has_its_result_for_whoever_asks_again():
    thread, release = NvmlThread(0.1), threading.Event()

    def hang():
        thread.entering("nvmlDeviceGetMemoryInfo", "GPU-1")
        release.wait(60)
        return "late"

    job = thread.submit(hang)
    for _ in range(2):
        with pytest.raises(DriverTimeoutError):
            await thread.result(job)
    release.set()
    await until(job.done)
    assert await thread.result(job) == "late"


async def test_a_job_that_nobody_waits_for_any_more_is_not_begun():
    thread, release, begun = NvmlThread(0.1), threading.Event(), threading.Event()

    def hang():
        thread.entering("nvmlDeviceGetMemoryInfo", "GPU-1")
        release.wait(60)

    before = thread.submit(hang)
    with pytest.raises(DriverTimeoutError):
        await thread.run(begun.set)
    release.set()
    await until(before.done)
    assert await thread.run(lambda: "next") == "next"
    assert not begun.is_set()


async def test_a_long_job_of_short_calls_is_not_hung():
    thread = NvmlThread(1.0)

    def steady():
        for _ in range(12):
            thread.entering("nvmlDeviceGetUUID", None)
            time.sleep(0.1)
        return "done"

    assert await thread.run(steady) == "done"
