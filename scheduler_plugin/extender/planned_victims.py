# SPDX-License-Identifier: Apache-2.0
"""Chooses the pods that are evicted for pods with planned claims, by the rules of ``extender.preempt``.

Less important pods that ran for their minimum may end. A gang keeps its minimum of members or ends whole, on whatever nodes they are. No
disruption budget is exceeded. Only pods with planned claims, and pods with vGPUs on nodes that plan claims, are chosen.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from scheduler_plugin.core.claims.planned import PlannedPod
from scheduler_plugin.core.cluster.durations import may_end_from
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.gang.over_nodes import OverNodes, cheapest_over_nodes
from scheduler_plugin.core.gang.plan import finish
from scheduler_plugin.core.gang.preempt import Band, Victim, cost_of
from scheduler_plugin.core.gang.victims import roles_of, spare_without
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.planned import ClaimPlacer, Want

MOST_CHECKS: Final = 64
"""Plans of one search. It starts from a set that works, so fewer checks mean a dearer set."""
MOST_NODES: Final = 16
"""Nodes that are searched for a single pod."""
SHOWN_SECONDS: Final = 30.0
"""After this time the watch has shown that an evicted pod ends."""


class Victims:
    """The search, and what was evicted lately."""

    def __init__(self, context: ExtenderContext, placer: ClaimPlacer, pods: Mapping[str, PlannedPod]) -> None:
        self._context = context
        self._placer = placer
        self._pods = pods
        self._evicted: dict[str, float] = {}
        """By UID, until when a pod counts as ending though the watch has not shown it."""

    def expire(self, now: float) -> None:
        """Forget evictions that the watch has shown. Args: now: on the monotonic clock."""
        self._evicted = {uid: until for uid, until in self._evicted.items() if until > now}

    def note(self, pods: Iterable[PodFacts], now: float) -> None:
        """Remember pods that were evicted. Args: now: on the monotonic clock."""
        self._evicted.update({pod.uid: now + SHOWN_SECONDS for pod in pods})

    def ending(self, now: float) -> frozenset[str]:
        """Return the UIDs of the pods that end already. Args: now: in seconds since 1970."""
        return frozenset(uid for uid, pod in self._facts().items() if pod.is_ending(now) or uid in self._evicted)

    def _facts(self) -> Mapping[str, PodFacts]:
        """Return the pods that may hold devices for claims, by UID."""
        state = self._context.state
        nodes = [name for name in self._context.claims.pools.planned_nodes if (gpu := state.gpu_node(name)) and gpu.allocation.by_ids]
        with_ids = {pod.uid: pod for node in nodes for pod in state.pods_on(node) if pod.gpu is not None}
        return with_ids | {uid: pod.facts for uid, pod in self._pods.items()}

    def choose(self, wants: Sequence[Want], ending: AbstractSet[str], spared: Collection[str], now: float) -> Sequence[PodFacts]:
        """Return the pods to evict so that all wants have a place; empty if there is no such set.

        Args: spared: UIDs of pods that stay. now: in seconds since 1970.
        """
        nodes = frozenset[str]().union(*(want.nodes for want in wants))
        may_end = self._may_end(wants, {*spared, *ending}, now)
        if len(wants) > 1:
            return self._search(wants, may_end, ending, nodes)
        tried = sorted({pod.node_name for pod in may_end.values()} & nodes)[:MOST_NODES]
        found = [chosen for node in tried if (chosen := self._search(wants, self._around(may_end, node), ending, {node}))]
        return min(found, key=lambda chosen: (self._cost(chosen), chosen[0].node_name), default=())

    def _may_end(self, wants: Sequence[Want], spared: AbstractSet[str], now: float) -> Mapping[str, PodFacts]:
        """Return the less important pods that may end, by UID; of the gang of the wants no member may."""
        priority, own = min(want.pod.facts.priority for want in wants), _gang_key(wants[0].pod.facts)
        members = {pod.uid for pod in self._running(own)} if own is not None else ()
        running = [pod for uid, pod in self._facts().items() if uid not in spared and uid not in members and _runs(pod)]
        return {pod.uid: pod for pod in running if pod.priority < priority and may_end_from(pod) <= now}

    def _around(self, may_end: Mapping[str, PodFacts], node: str) -> Mapping[str, PodFacts]:
        """Return the pods of a node, and the other members of their gangs."""
        gangs = {_gang_key(pod) for pod in may_end.values() if pod.node_name == node} - {None}
        return {uid: pod for uid, pod in may_end.items() if pod.node_name == node or _gang_key(pod) in gangs}

    def _search(
        self, wants: Sequence[Want], may_end: Mapping[str, PodFacts], ending: AbstractSet[str], nodes: Collection[str]
    ) -> Sequence[PodFacts]:
        victims = {uid: self._victim(pod) for uid, pod in may_end.items()}
        keys = [key for victim in victims.values() for key in victim.budgets]
        question = OverNodes(
            tuple(victims.values()),
            tuple(self._bands(may_end)),
            self._context.budgets.allowed_after((), keys),
            lambda ended: bool(self._placer.place(wants, ended | ending, nodes)),
        )
        most = self._most(question)
        works = question.fits(most)
        if not works:
            return ()
        in_budgets = not cost_of([victims[uid] for uid in most], question.allowed)[0]
        chosen = finish(cheapest_over_nodes(question, most if in_budgets else None, MOST_CHECKS))
        return [may_end[uid] for uid in sorted(chosen or ())]

    def _most(self, question: OverNodes) -> frozenset[str]:
        """Return as many pods as can end without breaking a gang."""
        found = {victim.uid for victim in question.candidates}
        for band in question.bands:
            found -= band.members - band.most()
        return frozenset(found)

    def _bands(self, may_end: Mapping[str, PodFacts]) -> Iterable[Band]:
        for key in {_gang_key(pod) for pod in may_end.values()} - {None}:
            running = self._running(key)
            here = frozenset(uid for uid, pod in may_end.items() if _gang_key(pod) == key)
            yield Band(here, max(0, spare_without(running)), len(here) == len(running), roles_of(running, here))

    def _running(self, key: tuple[str, str] | None) -> Sequence[PodFacts]:
        members = {} if key is None else {pod.uid: pod for pod in self._context.state.gang_members(key)}
        members |= {uid: pod.facts for uid, pod in self._pods.items()}
        return [pod for pod in members.values() if _runs(pod) and pod.uid not in self._evicted and _gang_key(pod) == key]

    def _victim(self, pod: PodFacts) -> Victim:
        running = self._running(key) if (key := _gang_key(pod)) is not None else ()
        is_extra = bool(running) and spare_without(running, {pod.uid}) >= 0
        return Victim(pod.uid, pod.priority, {}, self._context.budgets.covering(pod), is_extra=is_extra)

    def _cost(self, chosen: Sequence[PodFacts]) -> object:
        victims = [self._victim(pod) for pod in chosen]
        return cost_of(victims, self._context.budgets.allowed_after((), [key for victim in victims for key in victim.budgets]))


def _runs(pod: PodFacts) -> bool:
    return bool(pod.node_name) and not pod.deletion_requested


def _gang_key(pod: PodFacts) -> tuple[str, str] | None:
    gang = gang_of_pod(pod)
    return None if gang is None else gang.key
