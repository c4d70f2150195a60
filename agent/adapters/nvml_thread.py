"""Threads that call NVML, and a watchdog over them.

A call into the driver can block for seconds, or for ever, when a GPU hangs. So nobody else calls NVML, and the event loop only awaits
results. The thread of a call that takes too long cannot be ended. Where the call is about one GPU, the thread is given up, and a fresh
one does the work that waits: NVML may be called from several threads at once. Until the call comes back the GPU is held: no further call
about it is begun, so no GPU takes a second thread of a kind. Where the call is about the driver as a whole, a second one would block too:
then the driver counts as not answering, and requests fail at once until the call comes back. A job that nobody waits for any more is not
begun.
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
"""Threads that are given up at one time. With so many it is not the trouble of single GPUs, and the driver counts as not answering."""


class AbandonedError(Exception):
    """Ends a job in a thread that was given up: what it would bring is out of date, and another thread has its state by now."""


@dataclass(frozen=True, slots=True)
class RunningCall:
    """The NVML call a thread is in."""

    name: str
    device_uuid: str | None
    started: float
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True)
class LateCall:
    """A call that came back after its thread was given up, and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    finish: bool


class HeldCalls:
    """The calls whose threads were given up and that have not come back; one for all threads that call the same NVML."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held whenever what is in ``calls`` or which call a thread is in changes; not to be held in a call."""
        self.calls: dict[threading.Thread, RunningCall] = {}
        self._late: dict[str, LateCall] = {}

    def on(self, device_uuid: str) -> RunningCall | None:
        """Return a call that holds a GPU."""
        with self.lock:
            return self.on_locked(device_uuid)

    def on_locked(self, device_uuid: str) -> RunningCall | None:
        """Return the same, for who has the lock."""
        return next((call for call in self.calls.values() if call.device_uuid == device_uuid), None)

    def any(self) -> RunningCall | None:
        """Return one of the calls."""
        with self.lock:
            return next(iter(self.calls.values()), None)

    def overdue(self) -> Sequence[OverdueCall]:
        """Return all of them; for any thread."""
        with self.lock:
            calls = dict(self.calls)
        return [_told(thread, call) for thread, call in calls.items()]

    def came_back(self, thread: threading.Thread) -> None:
        """Take note that a thread that was given up is done."""
        with self.lock:
            call = self.calls.pop(thread)
            late = LateCall(call.name, time.monotonic() - call.started)
            if call.device_uuid is not None:
                self._late[call.device_uuid] = late
        logger.info("%s has returned after %.1f s", late.name, late.seconds, extra={"device_uuid": call.device_uuid})

    def take_late(self, device_uuid: str) -> LateCall | None:
        """Return, once, the last call that held a GPU and has come back."""
        with self.lock:
            return self._late.pop(device_uuid, None)

    def forget_late(self) -> None:
        """Forget the calls that have come back: what is entered now is another session."""
        with self.lock:
            self._late.clear()


class _Worker(threading.Thread):
    """Does jobs until it is given up."""

    def __init__(self, name: str, jobs: "SimpleQueue[_Job]", held: HeldCalls) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs = jobs
        self._held = held
        self.job: _Job | None = None
        self.running: RunningCall | None = None
        self.given_up = False
        self.start()

    def run(self) -> None:
        while not self.given_up:
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
            if self.given_up:
                self._held.came_back(self)
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, outcome, failure)
            except RuntimeError:  # the loop was closed: the process is ending and nobody waits
                return

    def entering(self, call: str, device_uuid: str | None) -> None:
        with self._held.lock:
            self._go_on()
            other = self._held.on_locked(device_uuid) if device_uuid is not None and not self.given_up else None
            if other is not None:
                raise _overdue(other)
            self.running = RunningCall(call, device_uuid, time.monotonic())

    def left(self) -> None:
        with self._held.lock:
            self.running = None
            self._go_on()

    def _go_on(self) -> None:
        """Raise AbandonedError where the job must not."""
        if self.given_up and self.job is not None and not self.job.finish:
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

        Args:   finish: whether the job goes on to its end in its thread when that was given up. It must share no state with others.
        Raises: DriverTimeoutError when an NVML call is overdue: one of this job, or one that is not about a single GPU. Whatever the
                job raises.
        """
        self._watch()
        job = self.submit(work, finish=finish)
        try:
            return await self.result(job)
        finally:
            job.cancel()

    def overdue(self) -> OverdueCall | None:
        """Return the call the thread is in, where it has taken too long and the thread was not given up for it; for any thread."""
        with self._held.lock:
            worker, call = self._worker, self._worker.running
        return _told(worker, call) if call is not None and not worker.given_up and self._is_overdue(call) else None

    def submit(self, work: Callable[[], T], *, finish: bool = False) -> "asyncio.Future[T]":
        """Put a job in the thread's queue, for ``result`` to be asked for, as often as that takes."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(work, loop, future, finish))
        return future

    async def result(self, job: "asyncio.Future[T]") -> T:
        """Wait for a job that was submitted.

        Raises: DriverTimeoutError when an NVML call is overdue: one of this job about one GPU, which ends the job, or one that is not
                about a single GPU, and the job goes on. Whatever the job raises.
        """
        while not job.done():
            self._watch()
            await asyncio.wait([job], timeout=self._timeout_seconds / 4)
        return job.result()

    def _watch(self) -> None:
        """Give the thread up for a fresh one when its call is overdue; raise DriverTimeoutError where that would not help."""
        worker, held = self._worker, self._held
        with held.lock:
            call, job = worker.running, worker.job
            if call is None or job is None or not self._is_overdue(call):
                return
            worker.given_up = call.device_uuid is not None and len(held.calls) < MOST_HELD
            others = [other.device_uuid for other in held.calls.values()]
            if worker.given_up:
                held.calls[worker] = call
        if not worker.given_up:
            raise _overdue(call, others)
        logger.warning(
            "%s has not returned for %.1f s: its GPU is left alone until it does, a new thread asks the others (%d are waiting so)",
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
    """Note which NVML call follows; for the jobs themselves. Raises DriverTimeoutError when the GPU is held, AbandonedError."""
    _this_worker().entering(call, device_uuid)


def left() -> None:
    """Note that the call is over. Raises AbandonedError when the thread was given up meanwhile."""
    _this_worker().left()


def _this_worker() -> _Worker:
    worker = threading.current_thread()
    if not isinstance(worker, _Worker):
        raise RuntimeError(f"NVML is called in thread {worker.name}: want a job of NvmlThread")  # noqa: TRY004 - the place is wrong, not a type
    return worker


def _overdue(call: RunningCall, held: Sequence[str | None] = ()) -> DriverTimeoutError:
    """Say that a call has not come back. Args: held: the GPUs that are held; one of them may be why a call about no GPU waits."""
    subject = f" on {call.device_uuid}" if call.device_uuid else ""
    seconds = time.monotonic() - call.started
    text = f"the NVIDIA driver does not answer: {call.name}{subject} has not returned for {seconds:.1f} s"
    return DriverTimeoutError(text, call.device_uuid or next(iter(held), None))


def _told(thread: threading.Thread, call: RunningCall) -> OverdueCall:
    return OverdueCall(call.name, call.device_uuid, time.monotonic() - call.started, _is_uninterruptible(thread))


def _is_uninterruptible(thread: threading.Thread) -> bool:
    try:
        state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    return state == "D"


def _settle(future: "asyncio.Future[Any]", outcome: Any, failure: Exception | None) -> None:
    if future.done():  # the awaiting coroutine gave up, or the thread was given up
        return
    if failure is None:
        future.set_result(outcome)
    else:
        future.set_exception(failure)
