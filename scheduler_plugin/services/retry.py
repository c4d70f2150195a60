"""Has pods that wait tried again as soon as something may fit that did not.

kube-scheduler retries a rejected pod on cluster events, but its event can come before ours has reached the state, and then the pod waits
for minutes. So when capacity frees, the pods that fitted nowhere are judged again, the most important first, and only on the nodes that
changed since they were judged last: hundreds of kinds of pods can wait. Nodes that kube-scheduler did not ask about count only if they came
since: its own filters left them out, and it tries the pod itself once they would not. For pods that now fit an annotation is changed,
because a pod that changed is tried again at once. Of a gang without a plan one member of each kind is tried: once it is planned the others
have a place, and are tried for that. What an earlier process or the replica that led before found is not known: every pod of the
kube-scheduler that waits without a decision when that first asks nothing for a while counts as refused before all that is known. Soft
reservations expire here too, and decisions on pods that are gone are dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from placement.refusal import Refusal
from proto import contract
from proto.model import PodRequest
from scheduler_plugin.core.columns import Bools
from scheduler_plugin.core.decisions import Decision, Queue
from scheduler_plugin.core.gang import Gang, gang_of_pod
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.shapes import PodShape, Takers
from scheduler_plugin.errors import KubeApiError, KubeRefusedError
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.ports import PodApi
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.services.turns import MAX_PASSED, in_turns

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.25
MAX_EXAMINED: Final = 2000
"""Waiting pods looked at together, each shape once; in a period all are, part by part, until enough are found that fit."""
MAX_READ: Final = 50
"""Waiting pods that are read without a pause, in which verbs are answered: one that was not read before takes 30 µs."""
FIRST_AT_ONCE: Final = 32
"""Pods poked in the first period; each costs a patch and a scheduling attempt, and room for one pod fits every pod that waits for it."""
GROWTH: Final = 4
"""So many times more are poked in the next period where pods still fit: those poked before did not take the room."""
MAX_AT_ONCE: Final = 256
"""Pods poked in one period at most: 416 in three quarters of a second, which is more than kube-scheduler tries in that time."""
MAX_UNDER_WAY: Final = 32
"""Patches that the API server is asked for at a time, a part of what its priority and fairness gives a service account: a slow server
gets them more slowly."""
QUIET_SECONDS: Final = 5.0
"""A kube-scheduler that asks nothing for so long has tried what was to be tried; before, it comes to every pod by itself."""
LATEST_SECONDS: Final = 60.0
"""One that asks all the time has come by now to every pod that it comes to by itself."""
FORGET_SECONDS: Final = 60.0
"""How often the decisions on pods that are gone are looked for."""
EVENT_SECONDS: Final = 10.0
"""More than an event takes to come."""


class _Waiting(NamedTuple):
    """A pod that waits."""

    decision: Decision
    shape: PodShape
    since: int
    """The state's change counter when it was last found to fit nowhere."""


class Retry:
    """The loop."""

    def __init__(
        self,
        desk: Desk,
        api: PodApi,
        leads: Callable[[], bool],
        pods_current_at: Callable[[], float],
        telemetry: Telemetry,
        scheduler_name: str = contract.SCHEDULER_NAME,
    ) -> None:
        """Args: scheduler_name: of the pods that are asked about here."""
        self._desk = desk
        self._api = api
        self._leads = leads
        self._pods_current_at = pods_current_at
        self._seen_freed = 0
        self._unfinished = False
        """Whether pods were left for the next period."""
        self._at_once = FIRST_AT_ONCE
        """How many pods are poked in the next period."""
        self._under_way = asyncio.Semaphore(MAX_UNDER_WAY)
        self._judged: dict[str, _Waiting] = {}
        """The pods looked at, by UID."""
        self._shapes: dict[PodShape, PodShape] = {}
        """Theirs, so that equal ones are the same and need not be compared."""
        self._scheduler_name = scheduler_name
        self._led_since: float | None = None
        """When this replica began to decide, in seconds since 1970."""
        self._has_read = False
        self.undecided = Queue()
        """The pods that waited without a decision when kube-scheduler was first quiet after that, as if refused then."""
        self._forgot_at = float("-inf")
        self._telemetry = telemetry
        self._started_at = round(desk.now())

    async def run(self) -> None:
        """Retry until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        state = self._desk.state
        now, known_at = self._desk.monotonic(), self._pods_current_at()
        self._telemetry.expired.inc(state.expire(now, known_at))
        self._desk.gangs.expire()
        if now - self._forgot_at >= FORGET_SECONDS:
            self._forgot_at = now
            await self._forget_gone(self._desk.now() - (now - known_at) - EVENT_SECONDS)
        if not self._leads():
            self._led_since = None
            return
        if self._led_since is None:
            self._led_since, self._has_read = self._desk.now(), False
        led_seconds, asked_at = self._desk.now() - self._led_since, self._desk.decisions.latest_at
        if not self._has_read and (min(led_seconds, self._desk.now() - asked_at) >= QUIET_SECONDS or led_seconds >= LATEST_SECONDS):
            self._has_read = self._unfinished = True
            await self._read_undecided()
        if state.freed_count == self._seen_freed and not self._unfinished:
            return
        self._seen_freed, self._unfinished = state.freed_count, False
        ready = await self._fitting()
        self._at_once = min(GROWTH * self._at_once, MAX_AT_ONCE) if self._unfinished else FIRST_AT_ONCE
        async with asyncio.TaskGroup() as group:
            for uid in ready:
                group.create_task(self._poke_in_turn(uid))

    async def _forget_gone(self, before: float) -> None:
        """Drop what is known of pods that are gone. Args: before: as for ``Decisions.forget_gone``."""
        decisions = self._desk.decisions
        async for decision in in_turns(list(decisions.by_uid.values()), MAX_PASSED):
            decisions.forget_gone(decision, self._desk.state.pods, before)
        kept = [known async for known in in_turns(list(self._judged.values()), MAX_PASSED) if self._waits(known.decision)]
        self._judged = {known.decision.pod.uid: known for known in kept}
        self._shapes = {known.shape: known.shape for known in kept}

    async def _read_undecided(self) -> None:
        """Take every pod that waits without a decision for one that was refused before all that is known."""
        self.undecided, desk = Queue(), self._desk
        async for pod in in_turns(list(desk.state.pods.values()), MAX_READ):
            if pod.gpu is None or pod.gpu.scheduler_name != self._scheduler_name or not self._is_undecided(pod):
                continue
            request = desk.request_of(pod)
            if isinstance(request, PodRequest):
                self.undecided.put(Decision(pod, request, float("-inf"), 0, 0, {}))

    def _is_undecided(self, pod: PodFacts) -> bool:
        return not pod.node_name and pod.may_start and pod.uid not in self._desk.decisions.by_uid

    def _waits(self, decision: Decision) -> bool:
        """Whether this is still what is known of a pod that waits; one that was without a decision is left out once it is not."""
        uid = decision.pod.uid
        if self._desk.decisions.queue.get(uid) is decision:
            return True
        if self.undecided.get(uid) is not decision:
            return False
        pod = self._desk.state.pods.get(uid)
        waits = pod is not None and self._is_undecided(pod)
        if not waits:
            self.undecided.pop(uid)
        return waits

    async def _fitting(self) -> list[str]:
        """Return the waiting pods that now fit, as many as may be poked at once; verbs are answered in between."""
        decisions = self.undecided.and_then(self._desk.decisions.queue)
        ready: list[str] = []
        tried: set[tuple[Gang, PodShape]] = set()
        for start in range(0, len(decisions), MAX_EXAMINED):
            part = decisions[start : start + MAX_EXAMINED]
            waiting = [self._waiting(decision) async for decision in in_turns(part, MAX_READ) if self._waits(decision)]
            if not await self._add_fitting(waiting, ready, tried):
                self._unfinished = True
                break
        return ready

    async def _add_fitting(self, waiting: list[_Waiting], ready: list[str], tried: set[tuple[Gang, PodShape]]) -> bool:
        """Add those of some waiting pods that now fit. Returns: whether all were looked at."""
        kinds: dict[PodShape, list[_Waiting]] = {}
        async for pod in in_turns(waiting, MAX_PASSED):
            kinds.setdefault(pod.shape, []).append(pod)
        fits: dict[PodShape, set[str]] = {}
        async for decision, shape, _ in in_turns(waiting, MAX_PASSED):
            if len(ready) == self._at_once:
                return False
            if decision.pod.uid in self._desk.state.reservations and gang_of_pod(decision.pod) is not None:
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
            shape = self._desk.shape_of(decision.pod, decision.request)
            known = self._judged[decision.pod.uid] = _Waiting(decision, self._shapes.setdefault(shape, shape), _judged_since(decision))
        return known

    async def _fitting_of(self, kind: list[_Waiting]) -> set[str]:
        """Return which pods of one shape fit on a node that changed since they were judged; what was found before is not judged again.

        What changes while others work in between is not seen, or half, and counts as changed since.
        """
        state = self._desk.state
        takers = self._desk.shapes.takers(kind[0].shape, min(pod.since for pod in kind))
        judged_at, named_at = state.columns.change_count, np.array([state.named_at[row] for row in takers.rows.tolist()], dtype=np.int64)
        found: dict[tuple[int, bytes, int], bool] = {}
        fitting: set[str] = set()
        async for pod in in_turns(kind, MAX_PASSED):
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
        """Whether a pod's gang has a place for it: the room is there and, being taken by it, fits nobody.

        A place that is kept while others end there (see ``preemptor``) is not one yet.
        """
        pod, state, gangs = decision.pod, self._desk.state, self._desk.gangs
        gang, held = gang_of_pod(pod), state.reservations.get(pod.uid)
        if gang is None or held is None:
            return False
        if gangs.standing(gang).planned:
            return True
        if not gangs.planner.goes_alone(pod, gang):
            return False
        return not isinstance(state.plan(held.node, decision.request, self._desk.default_policy, pod.uid), Refusal)

    def _may_start(self, pod: PodFacts, shape: PodShape, tried: set[tuple[Gang, PodShape]]) -> bool:
        """Whether a pod is worth a try for its gang's sake. Args: tried: the gangs without a plan, and who of each is tried; added to."""
        gang = gang_of_pod(pod)
        if gang is None:
            return True
        gangs = self._desk.gangs
        if (gang, shape) in tried or not gangs.may_plan(gang):
            return False
        if not gangs.standing(gang).planned and not gangs.planner.goes_alone(pod, gang):
            tried.add((gang, shape))
        return True

    async def _poke_in_turn(self, uid: str) -> None:
        async with self._under_way:
            await self.poke(uid)

    async def poke(self, uid: str) -> None:
        """Have kube-scheduler try a waiting pod again now."""
        undecided = self.undecided.pop(uid)
        decision = self._desk.decisions.by_uid.get(uid, undecided)
        if decision is None or decision.fitting:
            return
        pod = decision.pod
        self._desk.decisions.forget(uid)
        value = f"{self._started_at}-{self._desk.state.columns.change_count}"  # the counter alone begins anew with each process
        annotations = {contract.ANNOTATION_RETRY: value}
        try:
            await self._api.annotate(pod.namespace, pod.name, pod.uid, annotations)
            self._telemetry.retried.inc()
        except KubeRefusedError as exc:
            logger.debug("a waiting pod is gone: %s", exc)
        except KubeApiError as exc:
            if uid in self._desk.state.pods and uid not in self._desk.decisions.by_uid:
                if decision is undecided:
                    self.undecided.put(decision)
                else:
                    self._desk.decisions.record(decision)  # nothing newer is known of it
            self._unfinished, self._at_once = True, FIRST_AT_ONCE
            logger.warning("a waiting pod cannot be retried: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}"})


async def _any_of(takers: Takers, wanted: Bools) -> bool:
    """Say whether one of the wanted nodes takes a pod, and let others work between two searches."""
    for takes in takers.looks(wanted):
        if takes:
            return True
        await asyncio.sleep(0)
    return False


def _judged_since(decision: Decision) -> int:
    """Return the change counter at which all nodes were judged. A gang waits for its members too, so any node counts for a part of it."""
    return 0 if gang_of_pod(decision.pod) is not None else decision.generation
