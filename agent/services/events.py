# SPDX-License-Identifier: Apache-2.0
"""Posts events about pods and the node, so that ``kubectl describe`` shows why a container waits and what happened to a GPU.

An API outage must not delay a container, so events wait in a queue with the time at which they were recorded, and are posted when the API
is back. An event that is too old by then is dropped, and so is one that the API refuses. A repeated event is posted only once in
``REPEAT_AFTER_SECONDS``, because kubelet retries a refused container every few seconds.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from agent.core.metrics import Family, Kind, family
from agent.core.without_duration import without_duration
from agent.ports.clock import Clock
from agent.ports.kube import KubeApi, NodeEvent, PodEvent
from aliquot.kube.errors import KubeApiError, KubeRefusedError

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
REPEAT_AFTER_SECONDS = 300.0
GIVE_UP_AFTER_SECONDS = 600.0
"""An outage of some minutes loses no event. Older events are of no use: logs and metrics have shown the problem since."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An event to post, and when it was recorded: calendar time and monotonic."""

    event: PodEvent | NodeEvent
    happened_at: float
    since: float


class EventRecorder:
    """Posts events from a queue, one at a time and in order."""

    def __init__(self, api: KubeApi, clock: Clock, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Args: pause: waits for about this many seconds of the clock."""
        self._api = api
        self._clock = clock
        self._pause = pause
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(QUEUE_LENGTH)
        self._recorded_at: dict[PodEvent | NodeEvent, float] = {}
        """In this order, with the oldest first."""
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._dropped = Counter({"full": 0, "old": 0, "refused": 0})

    def record(self, event: PodEvent | NodeEvent, *, happened: bool = False) -> None:
        """Queue an event, unless the same event was recorded recently.

        Args: happened: whether it reports something that happened just now, so that it is posted each time.
        """
        now = self._clock.monotonic()
        self._forget_old(now)
        same = replace(event, message=without_duration(event.message))
        if same in self._recorded_at and not happened:
            return
        try:
            self._queue.put_nowait(_Waiting(event, self._clock.now(), now))
        except asyncio.QueueFull:
            self._drop(event, "full", f"{QUEUE_LENGTH} events wait for the API already")
        else:
            self._recorded_at.pop(same, None)  # it takes its place at the end
            self._recorded_at[same] = now

    def _forget_old(self, now: float) -> None:
        while self._recorded_at:
            oldest, recorded_at = next(iter(self._recorded_at.items()))
            if now - recorded_at < REPEAT_AFTER_SECONDS:
                return
            del self._recorded_at[oldest]

    async def run(self) -> None:
        """Post until cancelled."""
        while True:
            waiting = await self._queue.get()
            while self._clock.monotonic() - waiting.since < GIVE_UP_AFTER_SECONDS:
                if await self._post(waiting):
                    break
            else:
                self._drop(waiting.event, "old", f"the API has not accepted it for {GIVE_UP_AFTER_SECONDS:g} s")

    def families(self) -> Iterable[Family]:
        """Return how many events were dropped; for any thread."""
        samples = [((reason,), float(count)) for reason, count in self._dropped.items()]
        text = "Events that were not posted: the queue was full (full), the API was down for too long (old), or it refused them (refused)."
        yield family("events_dropped", text, ("reason",), samples, Kind.COUNTER)

    async def _post(self, waiting: _Waiting) -> bool:
        """Try once, and wait after a failure; return whether the event is done."""
        try:
            await asyncio.to_thread(self._api.post_event, waiting.event, waiting.happened_at)
        except KubeRefusedError as exc:
            self._drop(waiting.event, "refused", str(exc))
        except KubeApiError as exc:
            logger.warning("event not posted yet: %s", exc, extra=_subject(waiting.event))
            wait_seconds = random.uniform(self._retry_seconds / 2, self._retry_seconds)  # noqa: S311 - spreads load
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            await self._pause(max(wait_seconds, exc.retry_after_seconds))
            return False
        self._retry_seconds = FIRST_RETRY_SECONDS
        return True

    def _drop(self, event: PodEvent | NodeEvent, reason: str, why: str) -> None:
        self._dropped[reason] += 1
        logger.warning("event dropped: %s", why, extra=_subject(event))


def _subject(event: PodEvent | NodeEvent) -> dict[str, str]:
    return {"node": event.node} if isinstance(event, NodeEvent) else {"pod": f"{event.namespace}/{event.pod}"}
