# SPDX-License-Identifier: Apache-2.0
"""The extender's own code as an engine: scores of all nodes, tie-break, plan on the node, state from events.

A node of the trace becomes a GpuNode with GPUs of 1,000 MiB. A pod requests its thousandths as MiB and as compute, so that memory and
compute fit exactly when the trace's amounts fit. As in a cluster, the extender knows a waiting pod from its arrival, kube-scheduler's check
of CPU and RAM comes first, and the assignment says what a bound pod holds. The highest score wins.

A waiting pod can be served by moves of others (``move_for``), with the code of consolidation. All pods of the trace may move.

Pods without GPUs can be left to kube-scheduler, as in a cluster unless they name the Aliquot scheduler. Its default scores that matter here
are in ``kube_scores``.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import numpy as np

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot.contract.model import (
    ContainerAssignment,
    ContainerSpec,
    Device,
    DeviceShare,
    Isolation,
    Pod,
    PodAssignment,
    PodRequest,
    Policy,
)
from aliquot.placement.refusal import Refusal
from aliquot.placement.request import pod_request
from aliquot_lab.simulate.engine import Room
from aliquot_lab.simulate.kube_scores import default_scores
from aliquot_lab.simulate.trace import PERCENT_MILLI, WHOLE_GPU_MILLI, PodClass, TraceNode, TracePod, capacity_milli
from scheduler_plugin.core.backfill.lifetimes import ages_by_template, usual_end
from scheduler_plugin.core.backfill.search import ending_order, find_hold
from scheduler_plugin.core.cluster.budgets import Budgets
from scheduler_plugin.core.cluster.journal import VERSION, Rules, Snapshot
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.consolidate.plan import Plan, Trial
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand, Weights
from scheduler_plugin.extender.held_room import HeldRoom

SHARES_PER_GPU: Final = 100
"""More than the trace's pods can use, because the trace has no such limit."""
_KEPT_SHAPES: Final = 1024


class DisagreementError(Exception):
    """Two implementations of the same rule differ: a bug."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The common data of a class of pods."""

    gpu: Pod | None
    request: PodRequest
    shape: PodShape


class ExtenderEngine:
    """See the module's docstring."""

    def __init__(
        self,
        nodes: Sequence[TraceNode],
        policy: Policy,
        weights: Mapping[Policy, Weights] = DEFAULT_WEIGHTS,
        *,
        rates_cpu_pods: bool = True,
    ) -> None:
        self._state = ClusterState()
        for node in nodes:
            self._state.set_host(node.name, node.cpu_milli, node.ram_mib)
            self._state.set_gpu_node(_gpu_node(node))
        self._nodes = nodes
        self._policy = policy
        self._rates_cpu_pods = rates_cpu_pods
        self._shapes = Shapes(self._state, weights, _KEPT_SHAPES)
        self._kinds: dict[PodClass, _Kind] = {}
        self._planner = Planner(self._state, self._shapes, policy)
        self.decision_seconds: list[float] = []
        """Seconds of each decision, from the scores to the plan."""
        self.now = 0.0
        """The trace's time in seconds, at which placed pods start."""

    def place(self, pod: TracePod) -> bool:
        """Choose a node for a pod and bind it."""
        kind = self._kind_of(pod)
        self._state.set_pod(_facts(pod, kind, self.now))
        begun = time.perf_counter()
        node = self._choose(kind.shape, pod.name)
        assignment = self._state.plan(node, kind.request, self._policy, pod.name) if node and kind.gpu is not None else None
        self.decision_seconds.append(time.perf_counter() - begun)
        if isinstance(assignment, Refusal):
            raise DisagreementError(f"the columns said that {pod} fits on {node}, placement said: {assignment.sentence}")
        if node:
            self._state.set_pod(_facts(pod, kind, self.now, node, assignment))
        return bool(node)

    def move_for(self, pod: TracePod) -> Plan | None:
        """Move running pods and place a waiting one; None, and nothing changes, if moves do not help. A moved pod starts again now."""
        kind, state = self._kinds[pod.kind], self._state
        trial = Trial(state, self._planner, Budgets(), self.now)
        plan = trial.for_pod(state.pods[pod.name])
        if not isinstance(plan, Plan):
            return None
        for move in plan.moves:
            moved = state.pods[move.pod_uid]
            state.set_pod(_placed(moved, move.to_node, _assignment(moved.uid, move.seat), self.now))
        state.set_pod(_facts(pod, kind, self.now, plan.nodes[0], _assignment(pod.name, plan.place)))
        return plan

    def remove(self, pod: TracePod) -> None:
        """End a pod."""
        self._state.drop_pod(pod.name)

    def room(self) -> Room:
        """Return what is free."""
        columns = self._state.columns
        columns.derive()
        rows = [self._state.rows_by_name[node.name] for node in self._nodes]
        free = np.where(columns.present[rows], columns.free_mib[rows], -1)
        return Room(columns.cpu_milli[rows] - columns.cpu_used_milli[rows], free)

    def _kind_of(self, pod: TracePod) -> _Kind:
        kind = self._kinds.get(pod.kind)
        if kind is None:
            kind = self._kinds[pod.kind] = _kind(pod.kind, self._policy)
        return kind

    def _choose(self, shape: PodShape, uid: str) -> str:
        """Return the fitting node with the highest score; empty when no node fits.

        For a pod without GPUs, nodes without GPUs have equal scores, above all others. Then kube-scheduler's defaults decide.
        """
        has_gpus = bool(shape.request.containers)
        verdict, columns = self._shapes.verdict(shape), self._state.columns
        rows = slice(columns.rows)
        fits = verdict.reason[rows] == NodeReason.FITS.value
        fits &= columns.cpu_milli[rows] - columns.cpu_used_milli[rows] >= shape.demand.cpu_milli
        fits &= columns.ram_mib[rows] - columns.ram_used_mib[rows] >= shape.demand.ram_mib
        fitting = np.flatnonzero(fits)
        if not len(fitting):
            return ""
        bare = fitting[columns.devices[fitting] == 0]
        if not has_gpus and self._rates_cpu_pods and len(bare):
            fitting = bare
        rated = has_gpus or (self._rates_cpu_pods and not len(bare))
        scores = verdict.score[fitting] if rated else default_scores(self._state, fitting, shape.demand)
        best = fitting[scores == scores.max()]
        return self._state.names[int(best[self._shapes.tie_break(best, uid)])]


class HoldingEngine(ExtenderEngine):
    """The same with room that is held for one waiting pod, by the code of backfill. Pods have GPUs, and end by themselves."""

    def __init__(self, nodes: Sequence[TraceNode], policy: Policy, weights: Weights) -> None:
        every = {**DEFAULT_WEIGHTS, policy: weights}
        super().__init__(nodes, policy, every)
        self._holds = HeldRoom(self._state, self._shapes)
        self._rules = Rules(policy, every)
        self._created: dict[str, float] = {}
        self.capacity_milli = capacity_milli(nodes)

    def arrive(self, pod: TracePod, now: float) -> None:
        """Note a new pod."""
        self._created[pod.name] = now

    def try_placing(self, pod: TracePod, now: float) -> bool:
        """Choose a node for a waiting pod and bind it, also on held room if it may use that."""
        self.now = now
        self._holds.admit(self._waiting(pod), now)
        return self.place(pod)

    def end(self, pod: TracePod, now: float) -> None:
        """End a pod by itself, and learn from it."""
        facts = self._state.pods[pod.name]
        self._holds.lifetimes.learn(facts, now - (facts.started_at or 0.0))
        self.remove(pod)

    def hold_for(self, pod: TracePod, now: float) -> bool:
        """Hold room for a waiting pod; return whether there is any."""
        waiting, lifetimes = self._waiting(pod), self._holds.lifetimes
        bound = self._with_ages(now)
        order = ending_order(bound, {other.uid: usual_end(other, lifetimes.of(other), now) for other in bound})
        shapes = self._state.moment().demand.shapes
        hold = find_hold(Snapshot(VERSION, now, self._rules, shapes, self._state.picture(), []), [waiting.uid], order)
        if hold is not None:
            self._holds.put(hold, inf, now)
        return hold is not None

    def drop_hold(self) -> None:
        """Hold nothing."""
        self._holds.drop()

    def interval(self, now: float) -> tuple[float, float] | None:
        """Return between which times the pod with held room probably starts; None if that is unknown."""
        self._with_ages(now)
        self._holds.refresh(now)
        low, high = self._holds.outlook.low, self._holds.outlook.high
        return None if low is None or high is None else (low, high)

    def _with_ages(self, now: float) -> list[PodFacts]:
        """Return the bound pods, and note their ages."""
        bound = [other for other in self._state.pods.values() if other.node_name]
        self._holds.lifetimes.set_ages(ages_by_template(bound, now))
        return bound

    def _waiting(self, pod: TracePod) -> PodFacts:
        kind = self._kind_of(pod)
        return replace(_facts(pod, kind, self.now), created_at=self._created[pod.name])

    def _choose(self, shape: PodShape, uid: str) -> str:
        with self._state.without(uid):
            return super()._choose(shape, uid)


def _gpu_node(node: TraceNode) -> GpuNode:
    devices = tuple(
        GpuDevice(Device(f"GPU-{node.name}-{minor}", node.model, minor, "", WHOLE_GPU_MILLI * units.MIB)) for minor in range(node.gpus)
    )
    return GpuNode(node.name, devices, shares_per_gpu=SHARES_PER_GPU, isolation=(Isolation.SHIM,))


def _kind(kind: PodClass, policy: Policy) -> _Kind:
    demand = HostDemand(kind.cpu_milli, kind.ram_mib)
    if not kind.gpus:
        return _Kind(None, PodRequest(()), PodShape(PodRequest(()), policy, demand))
    cores_milli = kind.milli if kind.cores_milli is None else kind.cores_milli
    limits = {
        contract.RESOURCE_VGPU: str(kind.gpus),
        contract.RESOURCE_VGPU_MEMORY: str(kind.gpus * kind.milli),
        contract.RESOURCE_VGPU_CORES: str(kind.gpus * cores_milli // PERCENT_MILLI),
    }
    models = {contract.ANNOTATION_GPU_TYPE: codec.encode_list(tuple(sorted(kind.models)))} if kind.models else {}
    annotations = {contract.ANNOTATION_MOVABLE: "true", **models}
    gpu = Pod("trace", "", "", "", "Pending", annotations, (ContainerSpec("main", limits),))
    request = pod_request(gpu)
    return _Kind(gpu, request, PodShape.of(request, policy, demand))


def _facts(pod: TracePod, kind: _Kind, now: float, node: str = "", assignment: PodAssignment | None = None) -> PodFacts:
    gpu = None if kind.gpu is None else replace(kind.gpu, name=pod.name, uid=pod.name)
    facts = PodFacts(pod.name, "trace", pod.name, "", True, False, 0, pod.kind.cpu_milli, pod.kind.ram_mib, gpu)
    facts = replace(facts, controller_uid=pod.name, controller_kind="Job")
    return _placed(facts, node, assignment, now) if node else facts


def _placed(facts: PodFacts, node: str, assignment: PodAssignment | None, now: float) -> PodFacts:
    gpu = facts.gpu
    if gpu is not None:
        ours = {} if assignment is None else {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(assignment)}
        gpu = replace(gpu, node_name=node, annotations={**gpu.annotations, **ours})
    return replace(facts, node_name=node, gpu=gpu, started_at=now)


def _assignment(uid: str, uses: Mapping[str, Use]) -> PodAssignment:
    """Return what a pod of one container with these uses holds."""
    shares = (DeviceShare(uuid, use.memory_mib * units.MIB, use.cores_percent) for uuid, use in sorted(uses.items()))
    return PodAssignment(uid, (ContainerAssignment("main", tuple(shares)),))
