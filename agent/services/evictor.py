# SPDX-License-Identifier: Apache-2.0
"""Evicts pods where a policy requires it. A failed eviction (a disruption budget, an API outage) is retried later."""

import asyncio
import logging

from agent.core.identity import Holder
from agent.ports.clock import Clock
from agent.ports.kube import KubeApi
from aliquot.kube.errors import KubeApiError

logger = logging.getLogger(__name__)

AGAIN_AFTER_SECONDS = 60.0
"""Seconds between two attempts for one pod: it needs its grace period to end, and a disruption budget changes slowly."""


class Evictor:
    """Evicts each pod at most once in ``AGAIN_AFTER_SECONDS``."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._asked_at: dict[str, float] = {}

    async def evict(self, holder: Holder, pod_uid: str, why: str) -> bool:
        """Evict a pod; True when the API agreed, False when it refused or the last attempt was recent."""
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
