# SPDX-License-Identifier: Apache-2.0
"""Why a pod waits, and the smallest changes that would help.

Reasons are counted by the sentences of filter, and by kube-scheduler's own filters as far as they are known (``kube_filters``). Each change
is of one kind, and the smallest of its kind over all nodes in scope: ask for less, free room on devices, lift a cordon, drop a preference,
end pods. If a node lacks only CPU or RAM, the change is to ask for less of it or to free some; no other change is proposed for such a node.
tests/unit/scheduler_plugin/core/explain/test_one.py compares with brute force on small clusters.

The search for pods to end covers the SEARCHED_NODES nodes that lack least. So its result is the smallest of all only if no more nodes than
that can help and no host lacks CPU or RAM: pods are chosen for the GPUs that they free, and a node is skipped if they do not free enough of
the host. The search is returned as a value, because it can take a tenth of a second.

One container with vGPUs is computed over all nodes at once, and for one with MIG instances the preferences and the pods to end. Pods of
several containers or with MIG instances are tried node by node (``several``).
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, Isolation, NumaMode, PodRequest, Preferences
from aliquot.placement.device import UNRESERVED_MIN_PERCENT
from scheduler_plugin.core.cluster.columns import NO_NUMA, Bools, Columns, Ints, Rows
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.several import PREFERENCES, REPAIR, TRIED_NODES, SeveralQuestion, TriedNode
from scheduler_plugin.core.fit.change import Change, Kind, Room, host_text, memory_text, room_text
from scheduler_plugin.core.fit.columnar import RatingQuery, asked_mib, judge_devices, offers
from scheduler_plugin.core.fit.judge import REASON_OF, reasons_for
from scheduler_plugin.core.fit.kube_filters import LEFT_OUT, NO_HOST_ROOM, Scope, host_has_room
from scheduler_plugin.core.fit.shapes import PodShape, Shapes, Verdict
from scheduler_plugin.core.gang.preempt import Cost, Preemption, Victim, cheapest_victims, cost_of
from scheduler_plugin.core.gang.victims import ending_on
from scheduler_plugin.core.score.cost import HostDemand

SEARCHED_NODES: Final = 16
EXAMPLES: Final = 5
_NEVER: Final = np.iinfo(np.int64).max // 256
"""More than any cost; the sum of 256 of them fits into 64 bits."""
_FEWEST: Final = {("", "fewest"): 0}
"""A budget that covers every pod and allows 0 to end: the set that exceeds it least has the fewest pods."""
_MIB_BIT, _CORES_BIT, _SHARES_BIT = 35, 21, 7
"""Bit positions of memory, cores and shares in the cost of freeing room; the number of devices is in the lowest bits."""


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """The number of nodes with one reason, and a few examples."""

    reason: str
    nodes: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """The search for the pods that would have to end on a node."""

    node: str
    preemption: Preemption
    pods: tuple[PodFacts, ...]
    lacking: HostDemand
    """The CPU and RAM that the host lacks while no pod ends."""


def count_reasons(state: ClusterState, verdict: Verdict, demand: HostDemand, scope: Scope) -> tuple[int, tuple[ReasonCount, ...]]:
    """Return how many nodes fit, and the reasons of the others, the most frequent first."""
    rows = scope.judged
    reasons = reasons_for(verdict, rows)
    failed = {REASON_OF[value].sentence: rows[reasons == value] for value in np.unique(reasons).tolist() if value != NodeReason.FITS.value}
    with_gpus = rows[reasons == NodeReason.FITS.value]
    roomy = host_has_room(state.columns, with_gpus, demand)
    failed[NO_HOST_ROOM] = with_gpus[~roomy]
    if scope.left_out is not None:
        failed[LEFT_OUT] = scope.left_out
    counts = [
        ReasonCount(sentence, len(those), tuple(sorted(state.names[row] for row in those[:EXAMPLES].tolist())))
        for sentence, those in failed.items()
        if len(those)
    ]
    return int(roomy.sum()), tuple(sorted(counts, key=lambda count: (-count.nodes, count.reason)))


def smallest_changes(state: ClusterState, shapes: Shapes, shape: PodShape, scope: Scope) -> tuple[Change, ...]:
    """Return the smallest change of each kind that would make a pod of this shape fit. It must fit nowhere now."""
    verdict = shapes.verdict(shape)
    changes = [*_host_changes(state, verdict, shape.demand, scope), *_dropped_preferences(state, shapes, shape, scope)]
    containers, preferences = shape.request.containers, shape.request.preferences
    if len(containers) == 1 and not containers[0].mig:
        rows = scope.with_host_room(state.columns, shape.demand)
        search = _Search(state, RatingQuery(containers[0], preferences, shape.policy, shape.demand), rows)
        found = (search.less_memory(), search.less_cores(), search.fewer_gpus(), search.free_room(), search.lift_cordon())
        changes = [change for change in found if change is not None] + changes
    return tuple(changes)


def victim_questions(state: ClusterState, shapes: Shapes, shape: PodShape, scope: Scope) -> tuple[NodeQuestion, ...]:
    """Return the searches for pods to end, for the nodes on which that can help and that lack least."""
    verdict = shapes.verdict(shape)
    rows = scope.judged
    rows = rows[verdict.curable[rows] & (verdict.reason[rows] != NodeReason.FITS.value)]
    containers, preferences = shape.request.containers, shape.request.preferences
    missing = np.zeros(len(state.names), dtype=np.int64)
    if len(containers) == 1 and not containers[0].mig and len(rows) > SEARCHED_NODES:
        missing = _Search(state, RatingQuery(containers[0], preferences, shape.policy, shape.demand), rows).missing()
    rows = rows[np.lexsort((missing[rows], ~host_has_room(state.columns, rows, shape.demand)))]
    return tuple(_question(state, shape, row) for row in rows[:SEARCHED_NODES].tolist())


def several_question(state: ClusterState, shape: PodShape, request: PodRequest, scope: Scope) -> SeveralQuestion | None:
    """Return the search for a pod of several containers or with MIG instances, on the nodes that lack least; None for other pods.

    Args: request: the pod's, with its containers' names.
    """
    if len(request.containers) < 2 and not any(container.mig for container in request.containers):
        return None
    state.columns.derive()
    rows = scope.with_host_room(state.columns, shape.demand)
    missing = np.zeros(len(state.names), dtype=np.float64)
    for container in request.containers:
        if container.mig:
            missing += _missing_instances(state.columns, len(missing), container)
        else:
            missing += _Search(state, RatingQuery(container, request.preferences, shape.policy, shape.demand), rows).missing()
    used = state.columns.used_shares[: len(missing)].sum(axis=1)
    nearest = rows[np.lexsort((used[rows], missing[rows]))][:TRIED_NODES].tolist()
    known = [(name, gpu) for row in nearest if (gpu := state.gpu_node(name := state.names[row])) is not None]
    return SeveralQuestion(tuple(TriedNode(gpu, state.device_states(name)) for name, gpu in known), request, shape.policy)


def _missing_instances(columns: Columns, rows: int, container: ContainerRequest) -> Ints:
    """Return how many MIG instances each of the first rows lacks; a very large number if a row can never have the profile."""
    missing = np.zeros(rows, dtype=np.int64)
    for profile, count in container.mig:
        if profile not in columns.profiles:
            missing += _NEVER // 256
            continue
        number = columns.profiles.index(profile)
        possible, free = (of_profile[number][:rows].sum(axis=1) for of_profile in (columns.mig_capacity, columns.mig_room))
        missing += np.where(possible > 0, np.maximum(0, count - free), _NEVER // 256)
    return missing


def fewest_pods(questions: Iterable[NodeQuestion]) -> Change | None:
    """Return the fewest pods to end; of equally few, those with the lowest highest priority. Pure, and slow."""
    found = [answer for question in questions if (answer := _answer(question)) is not None]
    return min(found, key=lambda answer: answer[:2])[2] if found else None


def _answer(question: NodeQuestion) -> tuple[Cost, str, Change] | None:
    """Search one node; return the cost of its victims, the node and the change, or None if ending pods does not help."""
    preemption, victims = question.preemption, cheapest_victims(question.preemption)
    if not victims:
        return None
    # The victims are chosen for their GPUs alone: if they free too little CPU or RAM, the pod still does not fit.
    ended = [pod for pod in question.pods if pod.uid in victims]
    cpu_milli, ram_mib = sum(pod.cpu_milli for pod in ended), sum(pod.memory_mib for pod in ended)
    if cpu_milli < question.lacking.cpu_milli or ram_mib < question.lacking.ram_mib:
        return None
    cost = cost_of([victim for victim in preemption.candidates if victim.uid in victims], preemption.allowed)
    names = ", ".join(sorted(f"{pod.namespace}/{pod.name}" for pod in ended))
    sentence = f"end {names} on node {question.node}"
    return cost, question.node, Change(Kind.END_PODS, sentence, question.node, pods=tuple(sorted(victims)))


def _question(state: ClusterState, shape: PodShape, row: int) -> NodeQuestion:
    node = state.names[row]
    ending = ending_on(state, (), state.pods_on(node))
    bands = () if ending is None else ending.bands
    in_gangs = {uid for band in bands for uid in band.members}
    pods = tuple(pod for pod in state.pods_on(node) if state.footprint_of(pod.uid) or pod.uid in in_gangs)
    gpu = state.gpu_node(node)
    candidates = tuple(Victim(pod.uid, pod.priority, state.footprint_of(pod.uid), frozenset(_FEWEST)) for pod in pods)
    links = () if gpu is None else gpu.links
    preemption = Preemption(state.device_states(node), links, shape.request, shape.policy, candidates, bands, _FEWEST)
    cpu, ram = (int(lacking[0]) for lacking in _lacking(state.columns, np.array([row]), shape.demand))
    return NodeQuestion(node, preemption, pods, HostDemand(cpu, ram))


def _lacking(columns: Columns, rows: Rows, demand: HostDemand) -> tuple[Ints, Ints]:
    """Return what the hosts of rows lack of a pod's CPU and RAM; 0 for a resource that it does not request."""
    cpu = np.maximum(0, demand.cpu_milli - columns.cpu_free_milli[rows]) if demand.cpu_milli else np.zeros(len(rows), dtype=np.int64)
    ram = np.maximum(0, demand.ram_mib - columns.ram_free_mib[rows]) if demand.ram_mib else np.zeros(len(rows), dtype=np.int64)
    return cpu, ram


def _host_changes(state: ClusterState, verdict: Verdict, demand: HostDemand, scope: Scope) -> Iterable[Change]:
    """Yield the changes for nodes that lack only CPU or RAM. Amounts of both are compared as parts of the request."""
    columns, rows = state.columns, scope.judged
    rows = rows[(verdict.reason[rows] == NodeReason.FITS.value) & ~host_has_room(columns, rows, demand)]
    cpu, ram = _lacking(columns, rows, demand)
    part = cpu / max(1, demand.cpu_milli) + ram / max(1, demand.ram_mib)
    names = [state.names[row] for row in rows.tolist()]

    def least(possible: Bools) -> int | None:
        return min(np.flatnonzero(possible).tolist(), key=lambda at: (part[at], names[at]), default=None)

    some_left = ((cpu < demand.cpu_milli) | (demand.cpu_milli == 0)) & ((ram < demand.ram_mib) | (demand.ram_mib == 0))
    if (at := least(some_left)) is not None:
        lacks = HostDemand(int(cpu[at]), int(ram[at]))
        asked = HostDemand(demand.cpu_milli if lacks.cpu_milli else 0, demand.ram_mib if lacks.ram_mib else 0)
        most = HostDemand(asked.cpu_milli - lacks.cpu_milli, asked.ram_mib - lacks.ram_mib)
        sentence = f"ask for at most {host_text(most)} instead of {host_text(asked)}: it would fit on node {names[at]}"
        yield Change(Kind.ASK_LESS_HOST, sentence, names[at], host=most)
    if (at := least((columns.cpu_milli[rows] >= demand.cpu_milli) & (columns.ram_mib[rows] >= demand.ram_mib))) is not None:
        lacks = HostDemand(int(cpu[at]), int(ram[at]))
        yield Change(Kind.FREE_HOST, f"free {host_text(lacks)} on the host of node {names[at]}", names[at], host=lacks)


def _dropped_preferences(state: ClusterState, shapes: Shapes, shape: PodShape, scope: Scope) -> Iterable[Change]:
    """Yield each single preference without which the pod fits."""
    if len(shape.request.containers) != 1:
        return  # several_question tries these: placement's search on each node would take seconds here
    preferences, nothing = shape.request.preferences, Preferences()
    rows = scope.with_host_room(state.columns, shape.demand)
    for name in PREFERENCES:
        if getattr(preferences, name) == getattr(nothing, name):
            continue
        request = replace(shape.request, preferences=replace(preferences, **{name: getattr(nothing, name)}))
        verdict = Shapes(state, shapes.weights).verdict(replace(shape, request=request))
        fitting = rows[verdict.reason[rows] == NodeReason.FITS.value]
        if len(fitting):
            annotation = name.replace("_", "-")
            sentence = f"drop the annotation {annotation}: {len(fitting)} node{'s' * (len(fitting) > 1)} would fit"
            yield Change(Kind.DROP_PREFERENCE, sentence, min(state.names[row] for row in fitting.tolist()), preference=annotation)


class _Search:
    """The smallest changes for one container with vGPUs, over all given rows at once."""

    def __init__(self, state: ClusterState, ask: RatingQuery, rows: Rows) -> None:
        self._state, self._ask = state, ask
        self._columns: Columns = state.columns
        self._columns.derive()
        self._rows = rows[offers(self._columns, rows, ask)]

    @property
    def _exclusive(self) -> bool:
        return self._ask.preferences.isolation is Isolation.EXCLUSIVE

    def less_memory(self) -> Change | None:
        """Find the largest memory request that would fit."""
        request = self._ask.request
        if self._exclusive:
            return None
        row, per_vgpu = self._most(replace(request, memory_bytes=request.vgpus * units.MIB, memory_percent=None), self._columns.free_mib)
        if row is None:
            return None
        instead = memory_text(request)
        node = self._state.names[row]
        sentence = f"ask for at most {per_vgpu} MiB of memory per vGPU instead of {instead}: it would fit on node {node}"
        return Change(Kind.ASK_LESS_MEMORY, sentence, node, per_vgpu)

    def less_cores(self) -> Change | None:
        """Find the largest cores request that would fit."""
        request = self._ask.request
        asked = request.cores_percent_per_vgpu
        if self._exclusive or asked is None:
            return None
        row, per_vgpu = self._most(replace(request, cores_percent=request.vgpus), self._columns.free_cores)
        if row is None:
            return None
        node = self._state.names[row]
        sentence = f"ask for at most {per_vgpu} % of the cores per vGPU instead of {asked} %: it would fit on node {node}"
        return Change(Kind.ASK_LESS_CORES, sentence, node, per_vgpu)

    def fewer_gpus(self) -> Change | None:
        """Find the largest number of vGPUs of the same size that would fit."""
        request = self._ask.request
        if request.vgpus == 1 or not len(self._rows):
            return None
        fitting, _ = judge_devices(self._columns, self._rows, self._ask)
        together = np.max([(fitting & pool).sum(axis=1) for pool in self._pools()], axis=0)
        counts = np.maximum(together, fitting.any(axis=1))  # one vGPU always lies on one NUMA node, even on an unknown one
        most = int(counts.max())
        if most < 1:
            return None
        node = min(self._state.names[row] for row in self._rows[counts == most].tolist())
        sentence = f"ask for {most} vGPU{'s' * (most > 1)} of this size instead of {request.vgpus}: it would fit on node {node}"
        return Change(Kind.ASK_FEWER_GPUS, sentence, node, most)

    def free_room(self) -> Change | None:
        """Find the devices on which the least memory, then cores, then shares must become free."""
        if self._exclusive or not len(self._rows):
            return None
        memory, cores, shares, cost = self._shortages()
        sums, chosen = self._cheapest(cost)
        best = int(np.argmin(sums))
        if sums[best] >= _NEVER:
            return None
        node, columns = self._state.names[self._rows[best]], chosen[best].tolist()
        rooms = tuple(
            Room(self._uuid(node, column), int(memory[best, column]), int(cores[best, column]), int(shares[best, column]))
            for column in columns
            if cost[best, column]
        )
        return Change(Kind.FREE_ROOM, f"free {'; '.join(map(room_text, rooms))}, on node {node}", node, rooms=rooms)

    def lift_cordon(self) -> Change | None:
        """Find the fewest cordoned or unhealthy devices that would be enough; healing one counts more than any number of cordons."""
        if not len(self._rows):
            return None
        usable, _ = judge_devices(self._columns, self._rows, self._ask)
        lifted, healed = copy.copy(self._columns), copy.copy(self._columns)
        lifted.cordoned = healed.cordoned = np.zeros_like(self._columns.cordoned)
        healed.healthy = np.ones_like(self._columns.healthy)
        lifted.empty = healed.empty = (
            self._columns.used_shares | self._columns.used_instances
        ) == 0  # the column counts usable devices only
        cost = np.full(usable.shape, _NEVER, dtype=np.int64)
        cost[judge_devices(healed, self._rows, self._ask)[0]] = REPAIR
        cost[judge_devices(lifted, self._rows, self._ask)[0]] = 1
        cost[usable] = 0
        sums, chosen = self._cheapest(cost)
        best = int(np.argmin(sums))
        if sums[best] >= _NEVER:
            return None
        node = self._state.names[self._rows[best]]
        devices = tuple(self._uuid(node, column) for column in chosen[best].tolist() if cost[best, column])
        verb = "heal or uncordon" if sums[best] >= REPAIR else "uncordon"
        return Change(Kind.LIFT_CORDON, f"{verb} {', '.join(devices)} on node {node}", node, devices=devices)

    def missing(self) -> Ints:
        """Rate each row of the state by what is missing; _NEVER if ending other pods does not help."""
        rated = np.full(len(self._state.names), _NEVER, dtype=np.int64)
        if self._exclusive:
            rated[self._rows] = self._columns.used_shares[self._rows].sum(axis=1)
        elif len(self._rows):
            rated[self._rows] = self._cheapest(self._shortages()[3])[0]
        return rated

    # --- parts ---

    def _most(self, request: ContainerRequest, free: Ints) -> tuple[int | None, int]:
        """Return the row and the largest amount that enough devices of one node have free. Each must fit the minimal request."""
        fitting, _ = judge_devices(self._columns, self._rows, replace(self._ask, request=request))
        if not len(self._rows) or fitting.shape[1] < request.vgpus:
            return None, 0
        amounts = np.where(fitting, free[self._rows], 0)
        kth = np.max([np.sort(amounts * pool, axis=1)[:, -request.vgpus] for pool in self._pools()], axis=0)
        if kth.max() < 1:
            return None, 0
        most = int(kth.max())
        return min(self._rows[kth == most].tolist(), key=self._state.names.__getitem__), most

    def _pools(self) -> Sequence[Bools]:
        """Return the groups of devices; all devices of a container must come from one."""
        numa = self._columns.numa[self._rows]
        if self._ask.preferences.numa is not NumaMode.STRICT or self._ask.request.vgpus == 1:
            return [np.ones(numa.shape, dtype=np.bool_)]
        return [numa == node for node in np.unique(numa).tolist() if node != NO_NUMA] or [np.zeros(numa.shape, dtype=np.bool_)]

    def _cheapest(self, cost: Ints) -> tuple[Ints, Ints]:
        """Return for each row the cheapest set of devices, and its cost first."""
        vgpus = self._ask.request.vgpus
        sums = np.full(len(cost), _NEVER, dtype=np.int64)
        chosen = np.zeros((len(cost), min(vgpus, cost.shape[1])), dtype=np.int64)
        if vgpus > cost.shape[1]:
            return sums, chosen
        for pool in self._pools():
            inside = np.where(pool, cost, _NEVER)
            order = np.argsort(inside, axis=1, kind="stable")[:, :vgpus]
            total = np.minimum(_NEVER, np.take_along_axis(inside, order, axis=1).sum(axis=1))
            better = total < sums
            sums[better], chosen[better] = total[better], order[better]
        return sums, chosen

    def _shortages(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return what each device lacks of memory, cores and shares, and all three as one cost.

        Shares without reserved cores are freed first: while one is there, some cores must stay unreserved.
        """
        columns, rows = self._columns, self._rows
        _, curable = judge_devices(columns, rows, self._ask)
        capacity = columns.capacity_mib[rows]
        memory = np.maximum(0, asked_mib(self._ask, capacity) + columns.used_mib[rows] - capacity)
        asked = self._ask.request.cores_percent_per_vgpu
        shares, unreserved = np.maximum(0, 1 + columns.used_shares[rows] - columns.max_shares[rows, None]), columns.unreserved[rows]
        if asked is None:
            wanted = np.full(shares.shape, UNRESERVED_MIN_PERCENT)
        else:
            if asked + UNRESERVED_MIN_PERCENT > units.WHOLE_GPU_PERCENT:
                shares = np.maximum(shares, unreserved)
            wanted = np.where(unreserved > shares, asked + UNRESERVED_MIN_PERCENT, asked)
        cores = np.maximum(0, wanted + columns.used_cores[rows] - units.WHOLE_GPU_PERCENT)
        cost = (memory << _MIB_BIT) + (cores << _CORES_BIT) + (shares << _SHARES_BIT)
        cost += (cost > 0).astype(np.int64)
        cost[~curable] = _NEVER
        return memory, cores, shares, cost

    def _uuid(self, node: str, column: int) -> str:
        gpu = self._state.gpu_node(node)
        return "" if gpu is None else gpu.devices[column].device.uuid
