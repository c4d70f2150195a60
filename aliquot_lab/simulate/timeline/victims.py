# SPDX-License-Identifier: Apache-2.0
"""Which pods must end so that a more important workload can start: the scheduler's own search for victims, on every node.

In a cluster, kube-scheduler proposes victims by CPU and RAM, and the extender adds those that free a GPU. Here both steps are done for each
node with less important pods: first the least important pods that free enough CPU and RAM, then ``plan_eviction`` for the devices and the
rules of gangs. Pods of the first step that are not needed any longer stay. For a gang, ``plan_over_nodes`` also frees several nodes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from aliquot.contract.model import PodAssignment, PodRequest
from aliquot_lab.simulate.timeline.cluster import SimulatedCluster
from aliquot_lab.simulate.timeline.model import Workload
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.gang.plan import finish
from scheduler_plugin.core.gang.preempt import Cost, Victim, cost_of
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.gang_evictions import plan_over_nodes
from scheduler_plugin.extender.preempt import plan_eviction

ENOUGH_NODES: Final = 50
"""Once this many nodes help, the cheapest of them is taken, as the extender does."""


class Eviction(NamedTuple):
    """Pods that must end, and the node of the workload's first pod."""

    cost: Cost
    node: str
    uids: frozenset[str]


class SimulatedClock:
    """The clock of the simulation, as the scheduler's code reads it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        """Return the simulated seconds."""
        return self.seconds

    def now(self) -> float:
        """Return the simulated seconds."""
        return self.seconds


class Victims:
    """The search, on one cluster."""

    def __init__(self, cluster: SimulatedCluster, clock: SimulatedClock) -> None:
        self._cluster = cluster
        self._state = cluster.state
        rules = Rules(default_policy=cluster.policy, weights=cluster.shapes.weights)
        self._context = ExtenderContext.create(cluster.state, rules, clock)
        self._priorities: Counter[int] = Counter()

    def note_started(self, workload: Workload) -> None:
        """Count a workload that runs."""
        self._priorities[workload.priority] += 1

    def note_ended(self, workload: Workload) -> None:
        """Count a workload no longer."""
        self._priorities[workload.priority] -= 1
        if not self._priorities[workload.priority]:
            del self._priorities[workload.priority]

    def evictions(self, workload: Workload) -> list[Eviction]:
        """Return the evictions that make room for a workload, the cheapest first; empty if that is impossible."""
        if all(priority >= workload.priority for priority in self._priorities):
            return []
        found: list[Eviction] = []
        pod = self._state.pods[self._cluster.uid_of(workload.pods[0])]
        for node in self._nodes_with_less_important(workload.priority):
            eviction = self._on_node(pod, node)
            if eviction is not None:
                found.append(eviction)
            if len(found) == ENOUGH_NODES:
                break
        if workload.is_gang and (plan := finish(plan_over_nodes(self._context, pod, self._cluster.nodes, ()))) is not None:
            found.append(Eviction(plan.cost, plan.node, plan.ended))
        return sorted(found, key=lambda eviction: (eviction.cost, eviction.node))

    def _nodes_with_less_important(self, priority: int) -> Iterator[str]:
        names = dict.fromkeys(placement.node for placement in self._cluster.running.values() if placement.pod.priority < priority)
        yield from sorted(names)

    def _on_node(self, pod: PodFacts, node: str) -> Eviction | None:
        for_host = self._for_host(pod, node)
        if for_host is None:
            return None
        with self._state.without_all(for_host):
            plan = plan_eviction(self._context, pod, node, for_host)
        if plan is None:
            return None
        ended = plan.ended | for_host
        for uid in sorted(for_host, key=lambda uid: (-self._state.pods[uid].priority, uid)):
            if self._fits_without(pod, node, ended - {uid}):
                ended -= {uid}
        victims = [Victim(uid, self._state.pods[uid].priority, self._state.footprint_of(uid)) for uid in sorted(ended)]
        return Eviction(cost_of(victims, {}), node, ended) if ended else None

    def _for_host(self, pod: PodFacts, node: str) -> frozenset[str] | None:
        """Return the least important pods in no gang that free enough CPU and RAM; None if all of them are not enough."""
        cpu, ram = self._lacking(pod, node)
        chosen: list[str] = []
        for other in self._less_important(pod, node):
            if cpu <= 0 and ram <= 0:
                break
            if min(cpu, other.cpu_milli) > 0 or min(ram, other.memory_mib) > 0:
                chosen.append(other.uid)
                cpu, ram = cpu - other.cpu_milli, ram - other.memory_mib
        return frozenset(chosen) if cpu <= 0 and ram <= 0 else None

    def _less_important(self, pod: PodFacts, node: str) -> Sequence[PodFacts]:
        """Return the pods of a node that may end for its CPU and RAM: those with the lowest priority first, then the largest."""
        others = [other for other in self._state.pods_on(node) if other.priority < pod.priority and gang_of_pod(other) is None]
        return sorted(others, key=lambda other: (other.priority, -other.cpu_milli, -other.memory_mib, other.uid))

    def _lacking(self, pod: PodFacts, node: str) -> tuple[int, int]:
        """Return how much CPU (thousandths) and RAM (MiB) a node lacks for a pod."""
        columns, row = self._state.columns, self._state.rows_by_name[node]
        cpu = pod.cpu_milli - int(columns.cpu_milli[row] - columns.cpu_used_milli[row])
        return cpu, pod.memory_mib - int(columns.ram_mib[row] - columns.ram_used_mib[row])

    def _fits_without(self, pod: PodFacts, node: str, ended: frozenset[str]) -> bool:
        """Whether a pod fits once these pods have ended."""
        with self._state.without_all(ended):
            cpu, ram = self._lacking(pod, node)
            if cpu > 0 or ram > 0:
                return False
            request = self._context.verdicts.requests.of(pod)
            return not isinstance(request, PodRequest) or isinstance(
                self._state.plan(node, request, self._cluster.policy, pod.uid), PodAssignment
            )
