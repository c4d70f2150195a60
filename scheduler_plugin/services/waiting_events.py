"""Tells on a pod that fits nowhere why, as an event of the pod: what the nodes lack, and the least that would help.

kube-scheduler's own event only counts reasons. Ours comes at most once in REPEAT_SECONDS for a pod while nothing changes for it, and
PER_SECOND of them at most in all; pods beyond that are told later, or not at all once they are bound.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from proto import contract
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.errors import KubeApiError
from scheduler_plugin.ports import EventApi
from scheduler_plugin.services.explainer import Explainer

logger = logging.getLogger(__name__)

REPEAT_SECONDS: Final = 600.0
PERIOD_SECONDS: Final = 1.0
PER_SECOND: Final = 1
MAX_REMEMBERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Told:
    at: float
    reasons: frozenset[NodeReason]


class WaitingEvents:
    """The loop."""

    def __init__(self, explainer: Explainer, api: EventApi, decisions: Mapping[str, Decision], monotonic: Callable[[], float]) -> None:
        """Args: decisions: the latest on each pod that is not bound."""
        self._explainer = explainer
        self._api = api
        self._decisions = decisions
        self._monotonic = monotonic
        self._due: OrderedDict[str, None] = OrderedDict()
        self._told: OrderedDict[str, _Told] = OrderedDict()

    def note(self, decision: Decision) -> None:
        """Take a decision that was just made."""
        uid = decision.pod.uid
        if decision.fitting:
            self._due.pop(uid, None)
            return
        told = self._told.get(uid)
        if told is None or told.reasons != frozenset(decision.failed) or self._monotonic() - told.at >= REPEAT_SECONDS:
            self._due[uid] = None
            if len(self._due) > MAX_REMEMBERED:
                self._due.popitem(last=False)

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Tell of the pods that wait longest for it."""
        for _ in range(min(PER_SECOND, len(self._due))):
            uid, _ = self._due.popitem(last=False)
            decision = self._decisions.get(uid)
            if decision is None or decision.fitting:
                continue
            try:
                await self._tell(decision)
            except Exception:  # an explanation that fails must not end the scheduling of everybody, at every start anew
                logger.exception("a waiting pod cannot be explained", extra={"pod_uid": uid})

    async def _tell(self, decision: Decision) -> None:
        pod = decision.pod
        self._told[pod.uid] = _Told(self._monotonic(), frozenset(decision.failed))
        self._told.move_to_end(pod.uid)
        if len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)
        why = await self._explainer.explain(pod)
        if not why.waits:
            return
        try:
            await self._api.post_event(pod.namespace, pod.name, pod.uid, contract.EVENT_REASON_NO_GPU_FITS, why.sentence)
        except KubeApiError as exc:
            logger.warning("an event cannot be written: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}", "pod_uid": pod.uid})
