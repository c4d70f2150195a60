# SPDX-License-Identifier: Apache-2.0
"""Holds room for the most important pod or gang that fits nowhere; of equally important ones, for the one that waits longest.

In every period the present hold is renewed, its time is estimated again, and its owner is retried once it fits. Waiting pods that may use
the held room are retried when a device in it becomes free. Without a hold, or when a more important pod waits, the next owner is searched.

Holds are in memory and expire, so a process that is killed leaks none. Owner and room follow from the state, so the next leader holds room
again. It learns lifetimes as long as it watches, leader or not. A new process first learns from the pods that have ended and that the API
still keeps.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import numpy as np

from aliquot.contract.model import PodRequest
from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.backfill.hold import Hold
from scheduler_plugin.core.backfill.lifetimes import ages_by_template, usual_end
from scheduler_plugin.core.backfill.search import ending_order, find_hold, importance
from scheduler_plugin.core.cluster.columns import Bools
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.journal import Snapshot
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.pod_template import Template
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.fit.shapes import PodShape
from scheduler_plugin.core.gang.standing import is_placed
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH, in_batches
from scheduler_plugin.extender.gang_backoff import REST_FACTOR
from scheduler_plugin.extender.held_room import HeldRoom
from scheduler_plugin.ports import EndedPodApi

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 1.0
HOLD_SECONDS: Final = 30.0
"""How long a hold lasts; it is renewed in every period."""
LEARN_TRIES: Final = 3
"""How often the ended pods are listed at the start, if the API does not answer."""
LEARN_SECONDS: Final = 5.0
"""The time between two of these tries."""
WAIT_SECONDS: Final = 10.0
"""How long a pod waits before room is held for it: kube-scheduler and preemption come first."""
SCAN_SECONDS: Final = 5.0
"""How often waiting pods are looked for: there may be 50,000 pods."""
RETRY_SECONDS: Final = 15.0
"""How often the owner of a hold is retried while it fits."""
PAUSE_SECONDS: Final = 300.0
"""How long a pod is left out for which no room was found."""
AGES_SECONDS: Final = 60.0
"""How often the ages of running pods are read for the estimates."""
MAX_RETRIED: Final = 8
"""Waiting pods that may use held room and are retried in one period."""


class Backfiller:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        snapshot: Callable[[], Snapshot],
        retry: Callable[[str], Awaitable[None]],
        leads: Callable[[], bool],
        scheduler_name: str,
        api: EndedPodApi,
        directory: NodeDirectory,
    ) -> None:
        """Args: snapshot: takes one of the present state. leads: whether this replica decides. scheduler_name: of the pods to serve."""
        self._api = api
        self._directory = directory
        self._context = context
        self._snapshot = snapshot
        self._retry = retry
        self._leads = leads
        self._scheduler_name = scheduler_name
        self._rests_until = 0.0
        self._paused: dict[str, float] = {}
        """By pod UID, until when no room is searched for it."""
        self._retried_at = float("-inf")
        self._seen_freed = -1
        self._aged_at = float("-inf")

    @property
    def _holds(self) -> HeldRoom:
        return self._context.held_room

    def learn(self, pod: PodFacts) -> None:
        """Note that a pod ended by itself."""
        if pod.gpu is not None and pod.started_at is not None:
            self._holds.lifetimes.learn(pod, self._context.clock.now() - pod.started_at)

    async def run(self) -> None:
        """Hold room until cancelled."""
        for _ in range(LEARN_TRIES):
            if await self.learn_from_ended():
                break
            await asyncio.sleep(LEARN_SECONDS)
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def learn_from_ended(self) -> bool:
        """Learn from the pods that ended before this process watched; return whether the API listed them."""
        try:
            ended = await self._api.ended_pods()
        except KubeApiError as exc:
            logger.warning("the lifetimes of pods that have ended are unknown: %s", exc)
            return False
        for ended_at, pod in ended:
            if pod.started_at is not None and not pod.deletion_requested:
                self._holds.lifetimes.learn(pod, ended_at - pod.started_at)
        return True

    async def step(self) -> None:
        """Renew the hold, and search the next owner if it is time."""
        if not self._leads():
            self._holds.drop()
            self._paused.clear()
            self._rests_until = 0.0
            return
        if self._holds.held is not None:
            await self._keep(self._holds.held)
        now = self._context.clock.monotonic()
        if now >= self._rests_until:
            self._rests_until = now + SCAN_SECONDS
            await self._scan(now)

    # --- the present hold ---

    async def _keep(self, hold: Hold) -> None:
        """Renew a hold and retry who may use its room, or drop it if nobody needs it any longer."""
        now, clock = self._context.clock.monotonic(), self._context.clock
        if not self._is_needed(hold) or not self._holds.renew(now + HOLD_SECONDS, clock.now()):
            self._holds.drop()
            self._rests_until = 0.0
            return
        owners = [pod for pod in self._owners(hold) if not pod.node_name]
        if owners and now - self._retried_at >= RETRY_SECONDS and any(self._fits(pod) for pod in owners):
            self._retried_at = now
            await self._retry(min(owners, key=importance).uid)
        if now - self._aged_at >= AGES_SECONDS:
            await self._note_ages()
        await self._retry_passing()

    def _is_needed(self, hold: Hold) -> bool:
        """Whether each owner of a hold waits, or has got the place that was held for it."""
        state, pods = self._context.state, self._owners(hold)
        if len(pods) < len(hold.owners) or all(is_placed(state, pod) for pod in pods):
            return False
        waiting = [pod for pod in pods if not pod.node_name]
        # For a nominated pod others end.
        return all(pod.may_start and not pod.nominated_node for pod in waiting) and self._may_use(waiting, hold.nodes)

    def _owners(self, hold: Hold) -> list[PodFacts]:
        """Return the owners that exist."""
        return [pod for uid in sorted(hold.owners) if (pod := self._context.state.pods.get(uid)) is not None]

    def _may_use(self, pods: Sequence[PodFacts], nodes: frozenset[str]) -> bool:
        """Whether all pods may use these nodes: labels and taints change."""
        allowed = self._allowed(pods)
        return allowed is None or nodes <= allowed

    def _fits(self, pod: PodFacts) -> bool:
        shape = self._shape(pod)
        return shape is not None and pod.uid not in self._context.state.reservations and self._holds.is_free(pod, shape)

    async def _retry_passing(self) -> None:
        """Retry waiting pods that may use held room and fit there, after something was freed: ``Retry`` counts that room as taken."""
        if self._seen_freed == self._context.state.freed_count:
            return
        self._seen_freed = self._context.state.freed_count
        now, left = self._context.clock.now(), MAX_RETRIED
        async for decision in in_batches(self._context.decisions.waiting(), MAX_RETRIED):
            hold = self._holds.held
            if hold is None or not left:
                return
            pod = decision.pod
            if pod.uid not in hold.owners and gang_of_pod(pod) is None and self._holds.lets_pass(pod, now):
                self._holds.admit(pod, now)
                if self._fits(pod):
                    left -= 1
                    await self._retry(pod.uid)

    # --- the next owner ---

    async def _scan(self, now: float) -> None:
        """Hold room for the pod that comes first, if the present hold is not its own."""
        waiting = [pod async for pod in in_batches(list(self._context.state.pods.values()), MAX_PER_BATCH) if self._waits(pod)]
        self._paused = {uid: until for uid, until in self._paused.items() if until > now and uid in self._context.state.pods}
        hold = self._holds.held
        async for pod in in_batches(sorted(waiting, key=importance), MAX_RETRIED):
            if hold is not None and (-pod.priority >= -hold.priority or pod.uid in hold.owners):
                return  # an equally important pod that came later does not replace it
            if pod.uid not in self._paused and self._fits_nowhere(pod) and await self._serve(pod):
                return

    def _waits(self, pod: PodFacts) -> bool:
        """Whether a pod has waited long enough, and held room may help it."""
        if pod.gpu is None or pod.node_name or not pod.may_start or pod.is_picky or pod.nominated_node:
            return False
        if pod.gpu.scheduler_name != self._scheduler_name or pod.uid in self._context.state.reservations:
            return False
        return pod.created_at is not None and self._context.clock.now() - pod.created_at >= WAIT_SECONDS

    def _fits_nowhere(self, pod: PodFacts) -> bool:
        """Whether a pod fits on no node, and would fit on one if other pods ended."""
        shape = self._shape(pod)
        if shape is None:
            return False
        with self._context.state.without(pod.uid):
            verdict = self._context.verdicts.shapes.verdict(shape)
        gang = gang_of_pod(pod)
        if gang is not None:
            planner = self._context.gangs.planner
            needed = [] if planner.need_not_wait(pod, gang) else planner.needed(pod, gang)
            return bool(verdict.curable.any()) and bool(needed) and self._allowed(needed) != frozenset()
        allowed = self._allowed([pod])
        return self._has(verdict.curable, allowed) and not self._has(verdict.reason == NodeReason.FITS.value, allowed)

    def _allowed(self, pods: Iterable[PodFacts]) -> frozenset[str] | None:
        """Return the names of the nodes that all these pods may use by what they require; None if they require nothing."""
        required = {pod.nodes for pod in pods if pod.nodes is not None and pod.nodes.selects}
        found = [self._directory.allowed(rules) for rules in required]
        return frozenset.intersection(*found) if found else None

    def _has(self, rows: Bools, names: frozenset[str] | None) -> bool:
        """Whether one of the marked rows is one of these nodes. Args: names: None for all nodes."""
        return bool(rows.any()) and (names is None or any(self._context.state.names[row] in names for row in np.flatnonzero(rows).tolist()))

    def _shape(self, pod: PodFacts) -> PodShape | None:
        request = self._context.verdicts.requests.of(pod)
        return self._context.verdicts.shape_of(pod, request) if isinstance(request, PodRequest) else None

    async def _serve(self, pod: PodFacts) -> bool:
        """Search room for a pod and those that start with it, and hold it; return whether it was found."""
        members, clock = self._members(pod), self._context.clock
        begun = clock.monotonic()
        order = await self._ending_order()
        uids, allowed = [member.uid for member in members], self._allowed(members)
        hold = await asyncio.to_thread(find_hold, self._snapshot(), uids, order, allowed)
        now = clock.monotonic()
        self._rests_until = max(self._rests_until, now + REST_FACTOR * (now - begun))
        if hold is None:
            self._paused |= {member.uid: now + PAUSE_SECONDS for member in members}
            return False
        if not self._leads() or not self._still_wait(hold.owners):
            return True
        self._holds.put(hold, now + HOLD_SECONDS, clock.now())
        self._seen_freed = -1
        logger.info("room is held on nodes %s", ", ".join(sorted(hold.nodes)), extra={"pod": hold.pod})
        return True

    def _members(self, pod: PodFacts) -> Sequence[PodFacts]:
        """Return the pods that need room at the same time as a pod, this pod first."""
        gang = gang_of_pod(pod)
        return [pod] if gang is None else self._context.gangs.planner.needed(pod, gang)

    async def _ending_order(self) -> list[str]:
        """Return the running pods with GPUs in the order of their expected ends."""
        now, lifetimes, ends, bound = self._context.clock.now(), self._holds.lifetimes, dict[str, float | None](), list[PodFacts]()
        await self._note_ages()
        async for pod in in_batches(list(self._context.state.pods.values()), MAX_PER_BATCH // 20):
            if pod.gpu is not None and pod.node_name:
                bound.append(pod)
                ends[pod.uid] = usual_end(pod, lifetimes.of(pod), now)
        return ending_order(bound, ends)

    async def _note_ages(self) -> None:
        """Note how long all pods run that still run."""
        self._aged_at, now, ages = self._context.clock.monotonic(), self._context.clock.now(), dict[Template, list[float]]()
        async for pod in in_batches(list(self._context.state.pods.values()), MAX_PER_BATCH // 20):
            for template, found in ages_by_template([pod], now).items():
                ages.setdefault(template, []).extend(found)
        self._holds.lifetimes.set_ages(ages)

    def _still_wait(self, uids: frozenset[str]) -> bool:
        state = self._context.state
        return all((pod := state.pods.get(uid)) is not None and pod.may_start and not is_placed(state, pod) for uid in uids)
