# SPDX-License-Identifier: Apache-2.0
import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from agent.adapters.nvml.thread import MOST_HELD, HeldCalls, NvmlThread, entering, left
from agent.errors import DriverTimeoutError
from tests.unit.agent.fakes import until

MEMORY = "nvmlDeviceGetMemoryInfo"


class Hang:
    """A job with one NVML call, which comes back when it is released."""

    def __init__(self, device_uuid: str | None = "GPU-1") -> None:
        self.device_uuid = device_uuid
        self.released = threading.Event()
        self.went_on = threading.Event()

    def __call__(self) -> str:
        entering(MEMORY, self.device_uuid)
        try:
            self.released.wait(60)
        finally:
            left()
        self.went_on.set()
        return "late"


@pytest.fixture
def hang() -> Iterator[Callable[..., Hang]]:
    made: list[Hang] = []

    def make(*arguments: str | None) -> Hang:
        made.append(Hang(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.released.set()


def make_thread(timeout_seconds: float = 0.1, held: HeldCalls | None = None) -> NvmlThread:
    return NvmlThread(timeout_seconds, held or HeldCalls())


def call_about(device_uuid: str | None) -> str:
    entering(MEMORY, device_uuid)
    left()
    return f"answer of {device_uuid}"


def nvml_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "nvml"}


async def test_jobs_run_in_one_thread_of_their_own():
    thread = make_thread(1.0)
    names = {await thread.run(lambda: threading.current_thread().name) for _ in range(3)}
    assert names == {"nvml"}


async def test_what_a_job_raises_reaches_the_caller():
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await make_thread(1.0).run(fails)


async def test_hanging_call_is_reported_by_name_and_never_blocks_event_loop(hang):
    turns = 0

    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    turning = asyncio.ensure_future(turn())
    with pytest.raises(DriverTimeoutError, match=r"nvmlDeviceGetMemoryInfo on GPU-1 has not returned") as caught:
        await make_thread().run(hang())
    turning.cancel()
    assert turns > 0
    assert caught.value.device_uuid == "GPU-1"


async def test_gpu_with_hanging_call_is_refused_while_others_are_read(hang):
    held = HeldCalls()
    thread, hanging = make_thread(held=held), hang("GPU-1")
    with pytest.raises(DriverTimeoutError):
        await thread.run(hanging)
    assert await thread.run(lambda: call_about("GPU-0")) == "answer of GPU-0"
    assert await thread.run(lambda: call_about(None)) == "answer of None"
    with pytest.raises(DriverTimeoutError, match="GPU-1") as caught:
        await thread.run(lambda: call_about("GPU-1"))
    assert caught.value.device_uuid == "GPU-1"
    hanging.released.set()
    await until(lambda: held.on("GPU-1") is None)
    assert await thread.run(lambda: call_about("GPU-1")) == "answer of GPU-1"
    late = held.take_late("GPU-1")
    assert late is not None
    assert (late.name, late.seconds > 0.1) == (MEMORY, True)
    assert held.take_late("GPU-1") is None


async def test_job_waiting_behind_a_hang_is_still_done(hang):
    thread = make_thread()
    hung, waiting = thread.submit(hang()), thread.submit(lambda: "done")
    assert await thread.result(waiting) == "done"
    with pytest.raises(DriverTimeoutError):
        await thread.result(hung)


async def test_abandoned_job_ends_with_its_call_while_another_finishes(hang):
    held = HeldCalls()
    for finish in (False, True):
        thread, hanging = make_thread(held=held), hang()
        with pytest.raises(DriverTimeoutError):
            await thread.run(hanging, finish=finish)
        hanging.released.set()
        await until(lambda: held.any() is None)
        assert hanging.went_on.is_set() is finish


async def test_returned_hangs_leave_no_threads(hang):
    before, held = nvml_threads(), HeldCalls()
    thread = make_thread(0.02, held)
    for _ in range(20):
        hanging = hang()
        with pytest.raises(DriverTimeoutError):
            await thread.run(hanging)
        assert len(nvml_threads() - before) == 2
        hanging.released.set()
        await until(lambda: held.any() is None)
    await until(lambda: len(nvml_threads() - before) == 1)


async def test_endless_hangs_use_a_limited_number_of_threads(hang):
    before = nvml_threads()
    thread = make_thread(0.02)
    for number in range(MOST_HELD + 5):
        for _ in range(2):
            with pytest.raises(DriverTimeoutError):
                await thread.run(hang(f"GPU-{number}"))
    assert len(nvml_threads() - before) == MOST_HELD + 1


async def test_hanging_call_without_gpu_blocks_all_until_it_returns(hang):
    thread, hanging = make_thread(), hang(None)
    with pytest.raises(DriverTimeoutError) as caught:
        await thread.run(hanging)
    assert caught.value.device_uuid is None
    with pytest.raises(DriverTimeoutError):  # at once: the thread is still inside
        await thread.run(lambda: "next")
    hanging.released.set()
    await until(hanging.went_on.is_set)
    assert await thread.run(lambda: "back") == "back"


async def test_hanging_call_without_gpu_is_attributed_to_hanging_gpu_call(hang):
    thread = make_thread()
    for hanging in (hang("GPU-1"), hang(None)):
        with pytest.raises(DriverTimeoutError) as caught:
            await thread.run(hanging)
    assert caught.value.device_uuid == "GPU-1"


@pytest.mark.parametrize("device_uuid", ["GPU-1", None])
async def test_hanging_call_is_reported_with_age_until_it_returns(hang, device_uuid):
    held = HeldCalls()
    thread, hanging = make_thread(held=held), hang(device_uuid)

    def out():
        return [*held.overdue(), *filter(None, [thread.overdue()])]

    job = thread.submit(hanging)
    assert out() == []
    with pytest.raises(DriverTimeoutError):
        await thread.result(job)
    (call,) = out()
    assert (call.name, call.device_uuid, call.seconds > 0.1, call.uninterruptible) == (MEMORY, device_uuid, True, False)
    hanging.released.set()
    await until(lambda: not out())


async def test_call_unreachable_by_signal_is_reported_as_such(tmp_path):
    """Who starts a process sleeps so until that executes its program, which this one does after it has opened a pipe."""
    pipe, libc = tmp_path / "pipe", ctypes.CDLL(None)
    os.mkfifo(pipe)
    before, pid = ctypes.create_string_buffer(256), ctypes.c_int()
    libc.posix_spawn_file_actions_init(before)
    libc.posix_spawn_file_actions_addopen(before, 9, os.fsencode(pipe), os.O_RDONLY, 0)
    words = (ctypes.c_char_p * 2)(b"true", None)

    def sleeps():
        entering("nvmlInitWithFlags", None)
        try:
            return libc.posix_spawn(ctypes.byref(pid), b"/bin/true", before, None, words, words)
        finally:
            left()

    thread = make_thread()
    job = thread.submit(sleeps)
    try:
        await until(lambda: (call := thread.overdue()) is not None and call.uninterruptible)
    finally:
        os.close(os.open(pipe, os.O_RDWR))
    await until(job.done)
    assert job.result() == 0
    assert (await asyncio.to_thread(os.waitpid, pid.value, 0))[1] == 0
    assert thread.overdue() is None


async def test_overdue_job_gives_result_to_next_caller(hang):
    thread, hanging = make_thread(), hang(None)
    job = thread.submit(hanging)
    for _ in range(2):
        with pytest.raises(DriverTimeoutError):
            await thread.result(job)
    hanging.released.set()
    await until(job.done)
    assert await thread.result(job) == "late"


async def test_job_without_waiting_caller_is_not_started(hang):
    thread, hanging, begun = make_thread(), hang(None), threading.Event()
    before = thread.submit(hanging)
    with pytest.raises(DriverTimeoutError):
        await thread.run(begun.set)
    hanging.released.set()
    await until(before.done)
    assert await thread.run(lambda: "next") == "next"
    assert not begun.is_set()


async def test_a_long_job_of_short_calls_is_not_hung():
    thread = make_thread(1.0)

    def steady():
        for _ in range(12):
            entering("nvmlDeviceGetUUID", None)
            time.sleep(0.1)
        return "done"

    assert await thread.run(steady) == "done"


async def test_nvml_is_not_called_outside_its_threads():
    with pytest.raises(RuntimeError, match="want a job of NvmlThread"):
        entering(MEMORY, None)
