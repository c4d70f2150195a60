# SPDX-License-Identifier: Apache-2.0
"""Writes an event to a pod that fits on no node: what the nodes lack, and the smallest changes that would help.

kube-scheduler's own event only counts reasons. While nothing changes for a pod, it gets at most one event in REPEAT_SECONDS, and all pods
together PER_SECOND. Further pods get theirs later, or no event if they are bound by then.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aliquot import contract
from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.ports import EventApi
from scheduler_plugin.services.explainer import Explainer

logger = logging.getLogger(__name__)

REPEAT_SECONDS: Final = 600.0
PERIOD_SECONDS: Final = 1.0
PER_SECOND: Final = 1
MAX_REMEMBERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Reported:
    at: float
    reasons: frozenset[NodeReason]


class WaitingEvents:
    """The loop."""

    def __init__(self, explainer: Explainer, api: EventApi, decisions: Mapping[str, Decision], monotonic: Callable[[], float]) -> None:
        """Args: decisions: by pod UID, the latest decision on each pod that is not bound."""
        self._explainer = explainer
        self._api = api
        self._decisions = decisions
        self._monotonic = monotonic
        self._due: OrderedDict[str, None] = OrderedDict()
        self._reported: OrderedDict[str, _Reported] = OrderedDict()

    def note(self, decision: Decision) -> None:
        """Queue a pod for an event if a new decision found no node for it."""
        uid = decision.pod.uid
        if decision.fitting:
            self._due.pop(uid, None)
            return
        reported = self._reported.get(uid)
        if reported is None or reported.reasons != frozenset(decision.failed) or self._monotonic() - reported.at >= REPEAT_SECONDS:
            self._due[uid] = None
            if len(self._due) > MAX_REMEMBERED:
                self._due.popitem(last=False)

    async def run(self) -> None:
        """Write events until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Write the events of the pods that are queued longest."""
        for _ in range(min(PER_SECOND, len(self._due))):
            uid, _ = self._due.popitem(last=False)
            decision = self._decisions.get(uid)
            if decision is None or decision.fitting:
                continue
            try:
                await self._report(decision)
            except Exception:  # a failed explanation must not end the scheduler, at each restart again
                logger.exception("a waiting pod cannot be explained", extra={"pod_uid": uid})

    async def _report(self, decision: Decision) -> None:
        pod = decision.pod
        self._reported[pod.uid] = _Reported(self._monotonic(), frozenset(decision.failed))
        self._reported.move_to_end(pod.uid)
        if len(self._reported) > MAX_REMEMBERED:
            self._reported.popitem(last=False)
        why = await self._explainer.explain(pod)
        if not why.waits:
            return
        try:
            await self._api.post_event(pod.namespace, pod.name, pod.uid, contract.EVENT_REASON_NO_GPU_FITS, why.sentence)
        except KubeApiError as exc:
            logger.warning("an event cannot be written: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}", "pod_uid": pod.uid})
