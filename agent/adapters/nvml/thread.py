# SPDX-License-Identifier: Apache-2.0
"""Threads that call NVML, with a watchdog.

A driver call can block for seconds, or for ever, if a GPU hangs. So only these threads call NVML, and the event loop only awaits results.
The thread of a hanging call cannot be ended. If the call is about one GPU, the thread is abandoned, and a new one continues with the
waiting
work: several threads may call NVML at once. Until the call returns, the GPU is held: no further call about it starts, so a GPU blocks at
most one thread of each kind. If the call is about the driver as a whole, a second call would block too. Then the driver counts as not
answering, and requests fail at once until the call returns. A job without a waiting caller is not started.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from agent.core.inventory import OverdueCall
from agent.errors import DriverTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_HELD = 16
"""The most abandoned threads at one time. With more, the problem is not in single GPUs, and the driver counts as not answering."""


class AbandonedError(Exception):
    """Ends a job in an abandoned thread. Its result would be stale, and another thread now uses its state."""


@dataclass(frozen=True, slots=True)
class RunningCall:
    """An NVML call that a thread is executing."""

    name: str
    device_uuid: str | None
    started: float
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True)
class LateCall:
    """A call that returned after its thread was abandoned, with its duration."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    finish: bool


class HeldCalls:
    """The calls of abandoned threads that have not returned. One object for all threads that call the same NVML."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Protects ``calls`` and each thread's current call. Do not hold it during an NVML call."""
        self.calls: dict[threading.Thread, RunningCall] = {}
        self._late: dict[str, LateCall] = {}

    def on(self, device_uuid: str) -> RunningCall | None:
        """Return a call that holds a GPU, if any."""
        with self.lock:
            return self.on_locked(device_uuid)

    def on_locked(self, device_uuid: str) -> RunningCall | None:
        """Return the same, for a caller that has the lock."""
        return next((call for call in self.calls.values() if call.device_uuid == device_uuid), None)

    def any(self) -> RunningCall | None:
        """Return one of the calls, if any."""
        with self.lock:
            return next(iter(self.calls.values()), None)

    def overdue(self) -> Sequence[OverdueCall]:
        """Return all of them. May be called from any thread."""
        with self.lock:
            calls = dict(self.calls)
        return [_described(thread, call) for thread, call in calls.items()]

    def came_back(self, thread: threading.Thread) -> None:
        """Record that an abandoned thread has finished its call."""
        with self.lock:
            call = self.calls.pop(thread)
            late = LateCall(call.name, time.monotonic() - call.started)
            if call.device_uuid is not None:
                self._late[call.device_uuid] = late
        logger.info("%s has returned after %.1f s", late.name, late.seconds, extra={"device_uuid": call.device_uuid})

    def take_late(self, device_uuid: str) -> LateCall | None:
        """Return the last call that held a GPU and has returned; only once."""
        with self.lock:
            return self._late.pop(device_uuid, None)

    def forget_late(self) -> None:
        """Forget the returned calls, because a new session starts."""
        with self.lock:
            self._late.clear()


class _Worker(threading.Thread):
    """Runs jobs until it is abandoned."""

    def __init__(self, name: str, jobs: "SimpleQueue[_Job]", held: HeldCalls) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs = jobs
        self._held = held
        self.job: _Job | None = None
        self.running: RunningCall | None = None
        self.abandoned = False
        self.start()

    def run(self) -> None:
        while not self.abandoned:
            job = self._jobs.get()
            if job.future.cancelled():
                continue
            self.job = job
            try:
                outcome, failure = job.work(), None
            except Exception as exc:  # noqa: BLE001 - carried to the awaiting coroutine, which decides
                outcome, failure = None, exc
            with self._held.lock:
                self.job = self.running = None
            if self.abandoned:
                self._held.came_back(self)
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, outcome, failure)
            except RuntimeError:  # the loop is closed: the process is ending and no caller waits
                return

    def entering(self, call: str, device_uuid: str | None) -> None:
        with self._held.lock:
            self._go_on()
            other = self._held.on_locked(device_uuid) if device_uuid is not None and not self.abandoned else None
            if other is not None:
                raise _overdue(other)
            self.running = RunningCall(call, device_uuid, time.monotonic())

    def left(self) -> None:
        with self._held.lock:
            self.running = None
            self._go_on()

    def _go_on(self) -> None:
        """Raise AbandonedError if the job must not go on."""
        if self.abandoned and self.job is not None and not self.job.finish:
            raise AbandonedError


class NvmlThread:
    """Runs jobs one after another; each NVML call within a job has ``timeout_seconds``."""

    def __init__(self, timeout_seconds: float, held: HeldCalls, name: str = "nvml") -> None:
        self._timeout_seconds = timeout_seconds
        self._held = held
        self._name = name
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._worker = _Worker(name, self._jobs, held)

    async def run(self, work: Callable[[], T], *, finish: bool = False) -> T:
        """Run a job in the thread.

        Args:   finish: whether the job runs to its end even in an abandoned thread. Such a job must share no state with others.
        Raises: DriverTimeoutError if an NVML call is overdue: a call of this job, or one about the driver as a whole. Any error of the job.
        """
        self._watch()
        job = self.submit(work, finish=finish)
        try:
            return await self.result(job)
        finally:
            job.cancel()

    def overdue(self) -> OverdueCall | None:
        """Return the thread's current call if it is overdue and the thread is not abandoned. May be called from any thread."""
        with self._held.lock:
            worker, call = self._worker, self._worker.running
        return _described(worker, call) if call is not None and not worker.abandoned and self._is_overdue(call) else None

    def submit(self, work: Callable[[], T], *, finish: bool = False) -> "asyncio.Future[T]":
        """Put a job into the thread's queue. Get its result with ``result``, which may be called repeatedly."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(work, loop, future, finish))
        return future

    async def result(self, job: "asyncio.Future[T]") -> T:
        """Wait for a submitted job.

        Raises: DriverTimeoutError if an NVML call is overdue. A call of this job about one GPU ends the job; after a call about the driver
                as a whole the job goes on. Any error of the job.
        """
        while not job.done():
            self._watch()
            await asyncio.wait([job], timeout=self._timeout_seconds / 4)
        return job.result()

    def _watch(self) -> None:
        """Replace the thread by a new one if its call is overdue; raise DriverTimeoutError if that would not help."""
        worker, held = self._worker, self._held
        with held.lock:
            call, job = worker.running, worker.job
            if call is None or job is None or not self._is_overdue(call):
                return
            worker.abandoned = call.device_uuid is not None and len(held.calls) < MOST_HELD
            others = [other.device_uuid for other in held.calls.values()]
            if worker.abandoned:
                held.calls[worker] = call
        if not worker.abandoned:
            raise _overdue(call, others)
        logger.warning(
            "%s has not returned for %.1f s: the agent makes no calls about its GPU until it does; a new thread continues with the other "
            "GPUs (%d threads now hang like this)",
            call.name,
            self._timeout_seconds,
            len(others) + 1,
            extra={"device_uuid": call.device_uuid},
        )
        self._worker = _Worker(self._name, self._jobs, held)
        _settle(job.future, None, _overdue(call))

    def _is_overdue(self, call: RunningCall) -> bool:
        return time.monotonic() - call.started > self._timeout_seconds


def entering(call: str, device_uuid: str | None) -> None:
    """Record the NVML call that follows. For jobs. Raises DriverTimeoutError if the GPU is held, AbandonedError."""
    _this_worker().entering(call, device_uuid)


def left() -> None:
    """Record that the call has returned. Raises AbandonedError if the thread was abandoned during the call."""
    _this_worker().left()


def _this_worker() -> _Worker:
    worker = threading.current_thread()
    if not isinstance(worker, _Worker):
        raise RuntimeError(f"NVML is called in thread {worker.name}: want a job of NvmlThread")  # noqa: TRY004 - the place is wrong, not a type
    return worker


def _overdue(call: RunningCall, held: Sequence[str | None] = ()) -> DriverTimeoutError:
    """Return the error for an overdue call. Args: held: the held GPUs; one of them may be why a call about the whole driver waits."""
    subject = f" on {call.device_uuid}" if call.device_uuid else ""
    seconds = time.monotonic() - call.started
    text = f"the NVIDIA driver does not answer: {call.name}{subject} has not returned for {seconds:.1f} s"
    return DriverTimeoutError(text, call.device_uuid or next(iter(held), None))


def _described(thread: threading.Thread, call: RunningCall) -> OverdueCall:
    return OverdueCall(call.name, call.device_uuid, time.monotonic() - call.started, _is_uninterruptible(thread))


def _is_uninterruptible(thread: threading.Thread) -> bool:
    try:
        state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    return state == "D"


def _settle(future: "asyncio.Future[Any]", outcome: Any, failure: Exception | None) -> None:
    if future.done():  # the waiting coroutine was cancelled, or the thread was abandoned
        return
    if failure is None:
        future.set_result(outcome)
    else:
        future.set_exception(failure)
