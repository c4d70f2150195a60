"""One thread that owns NVML, and a watchdog over it.

A call into the driver can block for seconds, or for ever, when a GPU hangs. So no other thread calls NVML, the event loop only
awaits results, and a call that takes too long makes the driver count as not answering: later requests fail at once until the call
comes back. A blocked thread cannot be ended, and a second one would block too; so there is always exactly one. A job that nobody waits
for any more is not begun.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from agent.errors import DriverTimeoutError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunningCall:
    """The NVML call the thread is in."""

    name: str
    device_uuid: str | None
    started: float


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"


class NvmlThread:
    """Runs jobs one after another; each NVML call within a job has ``timeout_seconds``."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._running: RunningCall | None = None
        self._thread = threading.Thread(target=self._work, name="nvml", daemon=True)
        self._thread.start()

    def entering(self, call: str, device_uuid: str | None) -> None:
        """Note which NVML call follows; for the jobs themselves."""
        self._running = RunningCall(call, device_uuid, time.monotonic())

    def hung_call(self) -> RunningCall | None:
        """Return the call that is overdue, if one is."""
        running = self._running
        if running is not None and time.monotonic() - running.started > self._timeout_seconds:
            return running
        return None

    async def run(self, work: Callable[[], T]) -> T:
        """Run a job in the thread.

        Raises: DriverTimeoutError when an NVML call is overdue, this job's or an earlier one's; whatever the job raises.
        """
        self._check_answering()
        job = self.submit(work)
        try:
            return await self.result(job)
        finally:
            job.cancel()

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Put a job in the thread's queue, for ``result`` to be asked for, as often as that takes."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(work, loop, future))
        return future

    async def result(self, job: "asyncio.Future[T]") -> T:
        """Wait for a job that was submitted.

        Raises: DriverTimeoutError when an NVML call is overdue, and the job goes on; whatever the job raises.
        """
        while not job.done():
            self._check_answering()
            await asyncio.wait([job], timeout=self._timeout_seconds / 4)
        return job.result()

    def _check_answering(self) -> None:
        hung = self.hung_call()
        if hung is not None:
            subject = f" on {hung.device_uuid}" if hung.device_uuid else ""
            raise DriverTimeoutError(
                f"the NVIDIA driver does not answer: {hung.name}{subject} has not returned for {time.monotonic() - hung.started:.1f} s"
            )

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job.future.cancelled():
                continue
            try:
                outcome, failure = job.work(), None
            except Exception as exc:  # noqa: BLE001 - carried to the awaiting coroutine, which decides
                outcome, failure = None, exc
            self._running = None
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, outcome, failure)
            except RuntimeError:  # the loop was closed: the process is ending and nobody waits
                return


def _settle(future: "asyncio.Future[Any]", outcome: Any, failure: Exception | None) -> None:
    if future.done():  # the awaiting coroutine gave up
        return
    if failure is None:
        future.set_result(outcome)
    else:
        future.set_exception(failure)
