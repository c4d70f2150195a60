"""Events about pods and the node, so that ``kubectl describe`` says why a container waits and what became of a GPU.

An API outage must never hold up a container, so events wait in a queue of their own, with the time at which they were recorded: what
happened while the API was away is told once it is back. An event that is old by then is news to nobody and dropped, and so is one that the
API will never take. A repeated sentence is posted once in a while only, because kubelet retries a refused container every few seconds.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from agent.core.lasting import lasting
from agent.core.metrics import Family, Kind, family
from agent.errors import KubeAbsentError, KubeApiError, KubeRefusedError
from agent.ports import Clock, KubeApi, NodeEvent, PodEvent

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
REPEAT_AFTER_SECONDS = 300.0
GIVE_UP_AFTER_SECONDS = 600.0
"""An outage of some minutes loses nothing; kubelet and operators have read of what is older elsewhere."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An event that is to be posted, and when it was recorded: by the calendar, and monotonic."""

    event: PodEvent | NodeEvent
    happened_at: float
    since: float


class EventRecorder:
    """Posts events from a queue, one at a time and in order."""

    def __init__(self, api: KubeApi, clock: Clock, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Args: pause: waits for about so many seconds of the clock."""
        self._api = api
        self._clock = clock
        self._pause = pause
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(QUEUE_LENGTH)
        self._recorded_at: dict[PodEvent | NodeEvent, float] = {}
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._dropped = Counter({"full": 0, "old": 0, "refused": 0})

    def record(self, event: PodEvent | NodeEvent, *, happened: bool = False) -> None:
        """Take an event to be posted, unless the same was not long ago.

        Args: happened: whether it tells of something that came about just now, and is news each time that does.
        """
        now = self._clock.monotonic()
        self._recorded_at = {known: at for known, at in self._recorded_at.items() if now - at < REPEAT_AFTER_SECONDS}
        same = replace(event, message=lasting(event.message))
        if same in self._recorded_at and not happened:
            return
        try:
            self._queue.put_nowait(_Waiting(event, self._clock.now(), now))
        except asyncio.QueueFull:
            self._drop(event, "full", f"{QUEUE_LENGTH} others wait for the API")
        else:
            self._recorded_at[same] = now

    async def run(self) -> None:
        """Post for ever."""
        while True:
            waiting = await self._queue.get()
            while self._clock.monotonic() - waiting.since < GIVE_UP_AFTER_SECONDS:
                if await self._post(waiting):
                    break
            else:
                self._drop(waiting.event, "old", f"the API has not taken it for {GIVE_UP_AFTER_SECONDS:g} s")

    def families(self) -> Iterable[Family]:
        """Return how many events were dropped; for any thread."""
        samples = [((reason,), float(count)) for reason, count in self._dropped.items()]
        text = "Events that nobody will read: too many waited for the API (full), it was away for too long (old), or it refused them."
        yield family("events_dropped", text, ("reason",), samples, Kind.COUNTER)

    async def _post(self, waiting: _Waiting) -> bool:
        """Try once, and wait where that fails; True when the event need not be tried again."""
        try:
            await asyncio.to_thread(self._api.post_event, waiting.event, waiting.happened_at)
        except (KubeAbsentError, KubeRefusedError) as exc:
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
