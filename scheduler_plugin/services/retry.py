# SPDX-License-Identifier: Apache-2.0
"""Has waiting pods retried as soon as a pod may fit that did not fit before.

kube-scheduler retries a rejected pod on cluster events. But its event can come before ours has reached the state, and then the pod waits
for minutes. So when capacity is freed, the pods that fitted nowhere are judged again, the most important first, and only on nodes that
changed since they were last judged: hundreds of kinds of pods can wait. A node that was not in the pod's filter call counts only if the
node is new: kube-scheduler's own filters left it out, and kube-scheduler retries the pod itself once they would not.

For a pod that now fits an annotation is changed, because kube-scheduler retries a changed pod at once. Of a gang without a plan one member
of each kind is retried: once the gang is planned, the others have a place and are retried for that.

What an earlier process or the previous leader found is unknown. So each pod of the kube-scheduler that waits without a decision, once
kube-scheduler has been quiet for a while, counts as refused before everything that is known. Soft reservations expire here too, and
decisions on pods that are gone are dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from aliquot import contract
from aliquot.contract.model import PodRequest
from aliquot.kube.errors import KubeApiError, KubeRefusedError
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.columns import Bools
from scheduler_plugin.core.cluster.decisions import Decision, Queue
from scheduler_plugin.core.cluster.gang import Gang, gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.fit.shapes import PodShape, Takers
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH, in_batches
from scheduler_plugin.ports import PodApi
from scheduler_plugin.services.retry_mark import RetryMark
from scheduler_plugin.services.telemetry import Telemetry

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.25
MAX_EXAMINED: Final = 2000
"""Waiting pods judged together, each shape once. In a period all are judged, part by part, until enough of them fit."""
MAX_READ: Final = 50
"""Waiting pods read between two pauses, in which calls are served: one that was not read before takes 30 µs."""
FIRST_AT_ONCE: Final = 32
"""Pods retried in the first period. Each costs a patch and a scheduling attempt, and room for one pod fits all pods that wait for it."""
GROWTH: Final = 4
"""This many times more pods are retried in the next period if pods still fit: those retried before did not take the room."""
MAX_AT_ONCE: Final = 256
"""Pods retried in one period at most: 416 in three quarters of a second, more than kube-scheduler schedules in that time."""
MAX_UNDER_WAY: Final = 32
"""Patches sent at a time, a part of what the API server's priority and fairness gives a service account. A slow server gets them more
slowly."""
QUIET_SECONDS: Final = 5.0
"""A kube-scheduler without a call for this time has tried all pods in its queue; until then it comes to each pod by itself."""
LATEST_SECONDS: Final = 60.0
"""A kube-scheduler that calls all the time has come to all pods in its queue by then."""
FORGET_SECONDS: Final = 60.0
"""How often decisions on pods that are gone are dropped."""
EVENT_SECONDS: Final = 10.0
"""More than the time that an event takes to arrive."""


class _Waiting(NamedTuple):
    """A waiting pod."""

    decision: Decision
    shape: PodShape
    since: int
    """The state's change counter when it was last found to fit nowhere."""


class Retry:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        api: PodApi,
        leads: Callable[[], bool],
        pods_caught_up_at: Callable[[], float],
        telemetry: Telemetry,
        scheduler_name: str = contract.SCHEDULER_NAME,
    ) -> None:
        """Args: leads: whether this replica decides. pods_caught_up_at: see ``ClusterWatch``. scheduler_name: of the pods to retry."""
        self._context = context
        self._api = api
        self._leads = leads
        self._pods_caught_up_at = pods_caught_up_at
        self._seen_freed = 0
        self._unfinished = False
        """Whether work is left for the next period."""
        self._at_once = FIRST_AT_ONCE
        """How many pods are retried in the next period."""
        self._under_way = asyncio.Semaphore(MAX_UNDER_WAY)
        self._judged: dict[str, _Waiting] = {}
        """The pods judged so far, by UID."""
        self._shapes: dict[PodShape, PodShape] = {}
        """Their shapes: equal shapes are one object, so that they need not be compared."""
        self._scheduler_name = scheduler_name
        self._led_since: float | None = None
        """When this replica began to decide, in seconds since 1970."""
        self._has_read = False
        self.undecided = Queue()
        """The pods that waited without a decision when kube-scheduler was first quiet after that; they count as refused."""
        self._forgot_at = float("-inf")
        self._telemetry = telemetry
        self._mark = RetryMark(context)

    async def run(self) -> None:
        """Retry until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        await self._expire()
        if not self._leads():
            self._led_since = None
            return
        await self._read_undecided_once()
        freed_count = self._context.state.freed_count
        if freed_count == self._seen_freed and not self._unfinished:
            return
        self._seen_freed, self._unfinished = freed_count, False
        ready = await self._fitting()
        self._at_once = min(GROWTH * self._at_once, MAX_AT_ONCE) if self._unfinished else FIRST_AT_ONCE
        async with asyncio.TaskGroup() as group:
            for uid in ready:
                group.create_task(self._retry_limited(uid))

    async def _expire(self) -> None:
        """End reservations and gang attempts that are over, and every FORGET_SECONDS drop decisions on pods that are gone."""
        now, known_at = self._context.clock.monotonic(), self._pods_caught_up_at()
        self._telemetry.expired.inc(self._context.state.expire(now, known_at))
        self._context.gangs.expire()
        if now - self._forgot_at >= FORGET_SECONDS:
            self._forgot_at = now
            await self._forget_gone(self._context.clock.now() - (now - known_at) - EVENT_SECONDS)

    async def _read_undecided_once(self) -> None:
        """After this replica began to decide, read the pods without a decision once kube-scheduler is quiet."""
        now = self._context.clock.now()
        if self._led_since is None:
            self._led_since, self._has_read = now, False
        led_seconds, quiet_seconds = now - self._led_since, now - self._context.decisions.latest_at
        if not self._has_read and (min(led_seconds, quiet_seconds) >= QUIET_SECONDS or led_seconds >= LATEST_SECONDS):
            self._has_read = self._unfinished = True
            await self._read_undecided()

    async def _forget_gone(self, before: float) -> None:
        """Drop what is kept of pods that are gone. Args: before: as for ``Decisions.forget_gone``."""
        decisions = self._context.decisions
        async for decision in in_batches(list(decisions.by_uid.values()), MAX_PER_BATCH):
            decisions.forget_gone(decision, self._context.state.pods, before)
        kept = [known async for known in in_batches(list(self._judged.values()), MAX_PER_BATCH) if self._waits(known.decision)]
        self._judged = {known.decision.pod.uid: known for known in kept}
        self._shapes = {known.shape: known.shape for known in kept}

    async def _read_undecided(self) -> None:
        """Treat each pod that waits without a decision as refused before everything that is known."""
        self.undecided, context = Queue(), self._context
        async for pod in in_batches(list(context.state.pods.values()), MAX_READ):
            if pod.gpu is None or pod.gpu.scheduler_name != self._scheduler_name or not self._is_undecided(pod):
                continue
            request = context.verdicts.requests.of(pod)
            if isinstance(request, PodRequest):
                self.undecided.put(Decision(pod, request, float("-inf"), 0, 0, {}))

    def _is_undecided(self, pod: PodFacts) -> bool:
        return not pod.node_name and pod.may_start and pod.uid not in self._context.decisions.by_uid

    def _waits(self, decision: Decision) -> bool:
        """Whether a decision is current and its pod still waits. A pod without a decision is dropped once it has one."""
        uid = decision.pod.uid
        if self._context.decisions.queue.get(uid) is decision:
            return True
        if self.undecided.get(uid) is not decision:
            return False
        pod = self._context.state.pods.get(uid)
        waits = pod is not None and self._is_undecided(pod)
        if not waits:
            self.undecided.pop(uid)
        return waits

    async def _fitting(self) -> list[str]:
        """Return the UIDs of waiting pods that now fit, as many as may be retried at once; calls are served in between."""
        decisions = self.undecided.and_then(self._context.decisions.queue)
        ready: list[str] = []
        tried: set[tuple[Gang, PodShape]] = set()
        for start in range(0, len(decisions), MAX_EXAMINED):
            part = decisions[start : start + MAX_EXAMINED]
            waiting = [self._waiting(decision) async for decision in in_batches(part, MAX_READ) if self._waits(decision)]
            if not await self._add_fitting(waiting, ready, tried):
                self._unfinished = True
                break
        return ready

    async def _add_fitting(self, waiting: list[_Waiting], ready: list[str], tried: set[tuple[Gang, PodShape]]) -> bool:
        """Add the pods that now fit to ``ready``. Args: tried: as for ``_may_start``. Returns: whether all pods were judged."""
        kinds: dict[PodShape, list[_Waiting]] = {}
        async for pod in in_batches(waiting, MAX_PER_BATCH):
            kinds.setdefault(pod.shape, []).append(pod)
        fits: dict[PodShape, set[str]] = {}
        async for decision, shape, _ in in_batches(waiting, MAX_PER_BATCH):
            if len(ready) == self._at_once:
                return False
            if decision.pod.uid in self._context.state.reservations and gang_of_pod(decision.pod) is not None:
                await asyncio.sleep(0)
                if self._is_planned(decision):
                    ready.append(decision.pod.uid)
                    continue
            if shape not in fits:
                fits[shape] = await self._fitting_of(kinds[shape])
                await asyncio.sleep(0)
            if decision.pod.uid in fits[shape] and self._may_start(decision.pod, shape, tried):
                ready.append(decision.pod.uid)
        return True

    def _waiting(self, decision: Decision) -> _Waiting:
        known = self._judged.get(decision.pod.uid)
        if known is None or known.decision is not decision:
            shape = self._context.verdicts.shape_of(decision.pod, decision.request)
            known = self._judged[decision.pod.uid] = _Waiting(decision, self._shapes.setdefault(shape, shape), _judged_since(decision))
        return known

    async def _fitting_of(self, kind: list[_Waiting]) -> set[str]:
        """Return the UIDs of pods of one shape that fit on a node that changed since they were judged.

        A change while calls are served in between may be missed here; it counts as a later change.
        """
        state = self._context.state
        takers = self._context.verdicts.shapes.takers(kind[0].shape, min(pod.since for pod in kind))
        judged_at, named_at = state.columns.change_count, np.array([state.named_at[row] for row in takers.rows.tolist()], dtype=np.int64)
        found: dict[tuple[int, bytes, int], bool] = {}
        fitting: set[str] = set()
        async for pod in in_batches(kind, MAX_PER_BATCH):
            asked, uid = pod.decision.asked, pod.decision.pod.uid
            alike = (pod.since, b"", 0) if asked is None else (pod.since, asked.bits, asked.naming)
            if alike not in found:
                wanted = takers.changed_at > pod.since
                if asked is not None and wanted.any():
                    wanted &= asked.among(takers.rows, named_at)
                found[alike] = await _any_of(takers, wanted)
            if found[alike]:
                fitting.add(uid)
            else:
                self._judged[uid] = pod._replace(since=judged_at)
        return fitting

    def _is_planned(self, decision: Decision) -> bool:
        """Whether a pod's gang has a place for it. The pod itself holds that room, so no verdict shows it as free.

        A place that is kept while pods end there (``preemptor``) does not count yet.
        """
        pod, state, gangs = decision.pod, self._context.state, self._context.gangs
        gang, held = gang_of_pod(pod), state.reservations.get(pod.uid)
        if gang is None or held is None:
            return False
        if gangs.standing(gang).planned:
            return True
        if not gangs.planner.need_not_wait(pod, gang):
            return False
        return not isinstance(state.plan(held.node, decision.request, self._context.verdicts.default_policy, pod.uid), Refusal)

    def _may_start(self, pod: PodFacts, shape: PodShape, tried: set[tuple[Gang, PodShape]]) -> bool:
        """Whether a pod's gang may start. Args: tried: gangs without a plan, with the shapes of the members to retry; added to."""
        gang = gang_of_pod(pod)
        if gang is None:
            return True
        gangs = self._context.gangs
        if (gang, shape) in tried or not gangs.may_plan(gang):
            return False
        if not gangs.standing(gang).planned and not gangs.planner.need_not_wait(pod, gang):
            tried.add((gang, shape))
        return True

    async def _retry_limited(self, uid: str) -> None:
        async with self._under_way:
            await self.retry_pod(uid)

    async def retry_pod(self, uid: str) -> None:
        """Make kube-scheduler retry a waiting pod now."""
        undecided = self.undecided.pop(uid)
        decision = self._context.decisions.by_uid.get(uid, undecided)
        if decision is None or decision.fitting:
            return
        pod = decision.pod
        self._context.decisions.forget(uid)
        try:
            await self._api.annotate(pod.namespace, pod.name, pod.uid, self._mark.annotations())
            self._telemetry.retried.inc()
        except KubeRefusedError as exc:
            logger.debug("a waiting pod no longer exists: %s", exc)
        except KubeApiError as exc:
            if uid in self._context.state.pods and uid not in self._context.decisions.by_uid:
                if decision is undecided:
                    self.undecided.put(decision)
                else:
                    self._context.decisions.record(decision)  # there is no newer decision
            self._unfinished, self._at_once = True, FIRST_AT_ONCE
            logger.warning("a waiting pod cannot be retried: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}"})


async def _any_of(takers: Takers, wanted: Bools) -> bool:
    """Whether one of the wanted nodes takes a pod; calls are served between two searches."""
    for takes in takers.looks(wanted):
        if takes:
            return True
        await asyncio.sleep(0)
    return False


def _judged_since(decision: Decision) -> int:
    """Return the change counter at which all nodes were judged: 0 for a gang, which also waits for members, so each node counts again."""
    return 0 if gang_of_pod(decision.pod) is not None else decision.generation
