"""Events about pods and the node, so that ``kubectl describe`` says why a container waits and what became of a GPU.

Best effort by design: an API outage must never hold up a container. A repeated sentence is posted once in a while only, because kubelet
retries a refused container every few seconds.
"""

import asyncio
import logging
from dataclasses import replace

from agent.core.lasting import lasting
from agent.errors import KubeApiError
from agent.ports import Clock, KubeApi, NodeEvent, PodEvent

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
REPEAT_AFTER_SECONDS = 300.0


class EventRecorder:
    """Posts events from a queue, one at a time."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._queue: asyncio.Queue[PodEvent | NodeEvent] = asyncio.Queue(QUEUE_LENGTH)
        self._posted_at: dict[PodEvent | NodeEvent, float] = {}

    def record(self, event: PodEvent | NodeEvent, *, happened: bool = False) -> None:
        """Take an event to be posted, unless the same was not long ago.

        Args: happened: whether it tells of something that came about just now, and is news each time that does.
        """
        now = self._clock.monotonic()
        self._posted_at = {known: at for known, at in self._posted_at.items() if now - at < REPEAT_AFTER_SECONDS}
        same = replace(event, message=lasting(event.message))
        if same in self._posted_at and not happened:
            return
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            logger.warning("event dropped: %d others wait for the API", QUEUE_LENGTH, extra=_subject(event))
        else:
            self._posted_at[same] = now

    async def run(self) -> None:
        """Post for ever."""
        while True:
            event = await self._queue.get()
            try:
                await asyncio.to_thread(self._api.post_event, event)
            except KubeApiError as exc:
                logger.warning("event not posted: %s", exc, extra=_subject(event))


def _subject(event: PodEvent | NodeEvent) -> dict[str, str]:
    return {"node": event.node} if isinstance(event, NodeEvent) else {"pod": f"{event.namespace}/{event.pod}"}
