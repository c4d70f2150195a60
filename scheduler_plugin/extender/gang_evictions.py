# SPDX-License-Identifier: Apache-2.0
"""Plans evictions for a gang on several nodes, where the pods of one node are not enough or cost more.

kube-scheduler's protocol frees one node for one pod, so only our own evictions can do this. The members are placed one after the other,
each on the node where the cheapest pods make room for it. Then ``core.gang.over_nodes`` looks for a cheaper set.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Final

import numpy as np

from scheduler_plugin.core.cluster.columns import Rows
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.shapes import PodShape
from scheduler_plugin.core.gang.over_nodes import MAX_CHECKS, OverNodes, cheapest_over_nodes
from scheduler_plugin.core.gang.plan import Steps
from scheduler_plugin.core.gang.preempt import Cost
from scheduler_plugin.core.gang.standing import needs_one_domain
from scheduler_plugin.core.gang.victims import ending_on
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.preempt import (
    LAST_SECONDS,
    EvictionPlan,
    MayEnd,
    added_victims,
    allowed_after,
    candidates_of,
    ending_cost,
    members_with,
    not_evictable,
    without,
)

MAX_NODES: Final = 64
"""Nodes that are looked at, those with the least important pods first."""
MAX_DOMAINS: Final = 8
"""Domains that are looked at for a gang that must be in one."""


def plan_over_nodes(
    context: ExtenderContext, pod: PodFacts, nodes: Collection[str], spared: Collection[str], max_checks: int = MAX_CHECKS
) -> Steps[EvictionPlan | None]:
    """Return the cheapest pods that must end, on any nodes, so that a gang can start; with a step after each try.

    Args: nodes: those that the pod may use. spared: UIDs of pods that must not end. max_checks: how many members are planned at most; a
          plan of the whole gang counts all of them.
    Returns: None for a pod that waits for no other member, and if ending pods does not help or disruption budgets forbid it.
    """
    members = members_with(context, pod)
    if len(members) < 2:
        return None
    search = _Search(context, members, nodes, spared)
    if not search.fits(frozenset(search.candidates)):
        return None
    yield
    question = search.question()
    found = yield from search.first_set(question)
    ended = yield from cheapest_over_nodes(question, found, max(1, max_checks // len(members)))
    return None if ended is None else search.plan(ended)


class _Search:
    def __init__(self, context: ExtenderContext, members: Sequence[PodFacts], nodes: Collection[str], spared: Collection[str]) -> None:
        self._context = context
        self._members = members
        self._nodes = nodes
        self._may_end = MayEnd(frozenset(spared), elsewhere=True)
        near = [pod for pods in self._evictable_by_node().values() for pod in pods]
        self._may_end = MayEnd(frozenset((*spared, *not_evictable(context, near))), elsewhere=True)
        self._evictable = self._evictable_by_node()
        self.candidates: Mapping[str, PodFacts] = {pod.uid: pod for pods in self._evictable.values() for pod in pods}
        self._cheapest: dict[tuple[PodShape | None, str], frozenset[str] | None] = {}
        """Pods that make room for one member, by its shape and the node; without nodes on which pods end since."""
        self._until = context.clock.monotonic() + LAST_SECONDS
        now = context.clock.now()
        self._ending = [pod.uid for pod in context.state.pods.values() if pod.node_name and pod.is_ending(now)]

    def question(self) -> OverNodes:
        """Return the input of the search for the cheapest set."""
        context, pods = self._context, list(self.candidates.values())
        ending = ending_on(context.state, frozenset(), pods, self._members[0])
        bands = () if ending is None else ending.bands
        candidates = candidates_of(context, pods, {uid for band in bands for uid in band.members})
        return OverNodes(candidates, bands, allowed_after(context, (), candidates), self.fits)

    def fits(self, ended: frozenset[str]) -> bool:
        """Whether the gang can start once these pods have ended."""
        planner = self._context.gangs.planner
        with planner.trying(self._members), without(self._context, [*ended, *self._ending]):
            return planner.reserve_all(self._members, self._nodes, inf) and self._hosts_have_room()

    def plan(self, ended: frozenset[str]) -> EvictionPlan | None:
        """Return the plan to end these pods, with the node that the first member gets."""
        planner, cost = self._context.gangs.planner, ending_cost(self._context, (), ended)
        with planner.trying(self._members), without(self._context, [*ended, *self._ending]):
            if cost[0] or not planner.reserve_all(self._members, self._nodes, inf):
                return None
            node = self._context.state.reservations[self._members[0].uid].node
        return EvictionPlan(node, ended, cost)

    def first_set(self, question: OverNodes) -> Steps[frozenset[str] | None]:
        """Return pods that are enough; None if none were found."""
        best: tuple[Cost, frozenset[str]] | None = None
        for allows in self._regions():
            ended = self._enough_in(allows)
            if ended is not None and question.keeps_gangs(ended) and self.fits(ended):
                cost = ending_cost(self._context, (), ended)
                best = (cost, ended) if not cost[0] and (best is None or cost < best[0]) else best
            yield
        return None if best is None else best[1]

    def _regions(self) -> Iterable[Callable[[str], bool]]:
        """Return the parts of the cluster to try: all of it, or one domain after the other for a gang that must be in one."""
        gang, state = gang_of_pod(self._members[0]), self._context.state
        if gang is None or gang.domain is None or not needs_one_domain(gang):
            return (lambda _: True,)
        level = gang.domain.level
        domains = dict.fromkeys(state.domain_of(node, level) for node in self._evictable if node in self._nodes)
        return [partial(_is_in, state, level, domain) for domain in list(domains)[:MAX_DOMAINS]]

    def _enough_in(self, allows: Callable[[str], bool]) -> frozenset[str] | None:
        """Place one member after the other, each where the cheapest pods make room; None if one finds no node, or time is over."""
        self._cheapest.clear()
        everywhere = [node for node in self._context.state.names if node and allows(node)]
        ended = frozenset[str]()
        with self._context.gangs.planner.trying(self._members):
            for member in self._members:
                allowed = [node for node in everywhere if member is not self._members[0] or node in self._nodes]
                enough = self._ended_with(member, allowed, ended)
                if enough is None:
                    return None
                ended = enough
        return ended

    def _ended_with(self, member: PodFacts, allowed: Collection[str], ended: frozenset[str]) -> frozenset[str] | None:
        """Place a member where the cheapest pods make room; return all that have ended then, None if it finds no node or time is over."""
        if self._expect(member, allowed, ended):
            return ended
        more = self._cheapest_for(member, allowed, ended) if member.preempts else None
        if more is None or self._context.clock.monotonic() > self._until:
            return None
        node, victims = more
        self._forget_on(node, victims)
        return ended | victims if self._expect(member, (node,), ended | victims) else None

    def _cheapest_for(self, member: PodFacts, allowed: Collection[str], ended: frozenset[str]) -> tuple[str, frozenset[str]] | None:
        """Return the node on which the cheapest pods end for a member, and these pods."""
        among, shape = frozenset(allowed), self._context.gangs.planner.shape_of(member)
        found = [
            (ending_cost(self._context, ended, more), node, more)
            for node in self._evictable
            if node in among and (more := self._victims_on(node, member, shape, ended)) is not None
        ]
        best = min((one for one in found if not one[0][0]), key=lambda one: one[:2], default=None)
        return None if best is None else best[1:]

    def _victims_on(self, node: str, member: PodFacts, shape: PodShape | None, ended: frozenset[str]) -> frozenset[str] | None:
        """Return the cheapest pods that make room for a member on a node. Searching each node for each member would take too long."""
        if (shape, node) not in self._cheapest:
            self._cheapest[shape, node] = added_victims(self._context, member, node, ended, self._may_end)
        return self._cheapest[shape, node]

    def _forget_on(self, node: str, ended: frozenset[str]) -> None:
        """Search again where these pods ended, and where other members of their gangs run."""
        state = self._context.state
        pods = [state.pods[uid] for uid in ended]
        gangs = {gang.key for pod in pods if (gang := gang_of_pod(pod)) is not None}
        mates = [member for key in gangs for member in state.gang_members(key)]
        nodes = {node, *(pod.node_name for pod in (*pods, *mates))}
        self._cheapest = {key: more for key, more in self._cheapest.items() if key[1] not in nodes}

    def _expect(self, member: PodFacts, allowed: Collection[str], ended: frozenset[str]) -> bool:
        with without(self._context, [*ended, *self._ending]):
            return self._context.gangs.planner.expect(member, allowed, inf)

    def _evictable_by_node(self) -> dict[str, list[PodFacts]]:
        """Return the pods that may end, by node, for the nodes that can take a member once all of them have ended."""
        context, found = self._context, dict[str, list[PodFacts]]()
        for row in self._curable().tolist():
            node = context.state.names[row]
            if pods := self._may_end.evictable(context, node, self._members[0]):
                found[node] = pods
        order = sorted(found, key=lambda node: (min(pod.priority for pod in found[node]), len(found[node]), node))
        return {node: found[node] for node in order[:MAX_NODES]}

    def _curable(self) -> Rows:
        """Return the rows on which a member fits, or would fit without other pods."""
        context, rows = self._context, np.zeros(0, dtype=np.int64)
        shapes = {shape for member in self._members if (shape := context.gangs.planner.shape_of(member)) is not None}
        for shape in shapes:
            verdict = context.verdicts.shapes.verdict(shape)
            rows = np.union1d(rows, np.flatnonzero(verdict.curable | (verdict.reason == NodeReason.FITS.value)))
        return rows

    def _hosts_have_room(self) -> bool:
        """Whether the nodes of the members have the CPU and RAM that all pods on them request; a node of unknown size has."""
        columns, reservations = self._context.state.columns, self._context.state.reservations
        rows = [self._context.state.rows_by_name[reservations[member.uid].node] for member in self._members]
        cpu = (columns.cpu_milli[rows] == 0) | (columns.cpu_used_milli[rows] <= columns.cpu_milli[rows])
        ram = (columns.ram_mib[rows] == 0) | (columns.ram_used_mib[rows] <= columns.ram_mib[rows])
        return bool((cpu & ram).all())


def _is_in(state: ClusterState, level: str, domain: str, node: str) -> bool:
    return state.domain_of(node, level) == domain
