"""Ends pods by the Eviction API, where a policy asks for it. A refusal (a disruption budget, the API's absence) is tried again later."""

import asyncio
import logging

from agent.core.identity import Holder
from agent.errors import KubeApiError
from agent.ports import Clock, KubeApi

logger = logging.getLogger(__name__)

AGAIN_AFTER_SECONDS = 60.0
"""Between two attempts for one pod: it takes its grace time to end, and a budget does not change from one second to the next."""


class Evictor:
    """Evicts each pod once in a while at most."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._asked_at: dict[str, float] = {}

    async def evict(self, holder: Holder, pod_uid: str, why: str) -> bool:
        """Ask for a pod's end; True when the API agreed, False when it did not or was asked lately."""
        now = self._clock.monotonic()
        self._asked_at = {uid: at for uid, at in self._asked_at.items() if now - at < AGAIN_AFTER_SECONDS}
        if pod_uid in self._asked_at:
            return False
        self._asked_at[pod_uid] = now
        about = {"pod": f"{holder.namespace}/{holder.pod}", "pod_uid": pod_uid}
        try:
            await asyncio.to_thread(self._api.evict_pod, holder.namespace, holder.pod, pod_uid)
        except KubeApiError as exc:
            logger.warning("pod not evicted: %s", exc, extra=about)
            return False
        logger.warning("pod evicted: %s", why, extra=about)
        return True
