"""Has pods that wait tried again as soon as something may fit that did not.

kube-scheduler retries a rejected pod on cluster events, but its event can come before ours has reached the state, and then the pod waits
for minutes. So when capacity frees, the pods that fitted nowhere are judged again, the most important first. For those that now fit an
annotation is changed, because a pod that changed is tried again at once. Soft reservations expire here too.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from proto import contract
from scheduler_plugin.core.gang import gang_of_pod
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import PodShape
from scheduler_plugin.errors import KubeApiError, KubeRefusedError
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.ports import PodApi
from scheduler_plugin.services.telemetry import Telemetry

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.25
MAX_EXAMINED: Final = 2000
"""Waiting pods looked at in one period, the most important ones; the others wait for kube-scheduler's own events."""
MAX_AT_ONCE: Final = 32
"""Pods poked in one period; each costs a patch and a scheduling attempt."""


class Retry:
    """The loop."""

    def __init__(
        self, desk: Desk, api: PodApi, leads: Callable[[], bool], pods_current_at: Callable[[], float], telemetry: Telemetry
    ) -> None:
        self._desk = desk
        self._api = api
        self._leads = leads
        self._pods_current_at = pods_current_at
        self._seen_freed = 0
        self._unfinished = False
        """Whether pods were left for the next period."""
        self._telemetry = telemetry

    async def run(self) -> None:
        """Retry until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        state = self._desk.state
        self._telemetry.expired.inc(state.expire(self._desk.monotonic(), self._pods_current_at()))
        if not self._leads() or (state.freed_count == self._seen_freed and not self._unfinished):
            return
        self._seen_freed, self._unfinished = state.freed_count, False
        ready = self._fitting()
        async with asyncio.TaskGroup() as group:
            for uid in ready:
                group.create_task(self._poke(uid))

    def _fitting(self) -> list[str]:
        """Return the waiting pods that now fit, as many as may be poked at once."""
        ready: list[str] = []
        fits: dict[PodShape, bool] = {}
        for decision in self._desk.decisions.waiting()[:MAX_EXAMINED]:
            if len(ready) == MAX_AT_ONCE:
                self._unfinished = True
                break
            shape = self._desk.shape_of(decision.pod, decision.request)
            if shape not in fits:
                fits[shape] = bool(np.any(self._desk.shapes.verdict(shape).reason == NodeReason.FITS.value))
            if fits[shape] and self._may_start(decision.pod):
                ready.append(decision.pod.uid)
        return ready

    def _may_start(self, pod: PodFacts) -> bool:
        """Whether a pod is worth a try for its gang's sake."""
        gang = gang_of_pod(pod)
        return gang is None or pod.uid in self._desk.state.reservations or self._desk.gangs.may_plan(gang)

    async def _poke(self, uid: str) -> None:
        decision = self._desk.decisions.by_uid.get(uid)
        if decision is None:
            return
        pod = decision.pod
        self._desk.decisions.forget(uid)
        annotations = {contract.ANNOTATION_RETRY: str(self._desk.state.columns.change_count)}
        try:
            await self._api.annotate(pod.namespace, pod.name, pod.uid, annotations)
            self._telemetry.retried.inc()
        except KubeRefusedError as exc:
            logger.debug("a waiting pod is gone: %s", exc)
        except KubeApiError as exc:
            self._desk.decisions.record(decision)
            self._unfinished = True
            logger.warning("a waiting pod cannot be retried: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}"})
