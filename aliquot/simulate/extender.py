"""The extender's own code as an engine: verdicts on all nodes, tie-break, plan on the node, state kept by events.

A trace's node becomes a GpuNode whose GPUs have 1,000 MiB, a pod asks for its thousandths as MiB and as compute,
so that memory and compute fit exactly when the trace says so. As in a cluster, a waiting pod is known from its arrival, kube-scheduler's
own test of CPU and RAM comes first, and what a bound pod holds is read from its assignment. The highest score wins.

Pods without GPUs can be left to the cluster's own scheduler, as they are unless they name ours. It is taken for its defaults that tell
nodes apart here: the least allocated, and CPU and RAM in balance (NodeResourcesFit and NodeResourcesBalancedAllocation, of equal weight).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aliquot.simulate.engine import Ints, Room
from aliquot.simulate.trace import PERCENT_MILLI, WHOLE_GPU_MILLI, PodClass, TraceNode, TracePod
from placement.refusal import Refusal
from placement.request import pod_request
from proto import codec, contract, units
from proto.gpunode import GpuDevice, GpuNode
from proto.model import ContainerSpec, Device, Isolation, Pod, PodAssignment, PodRequest, Policy
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.score import DEFAULT_WEIGHTS, HostDemand, Weights
from scheduler_plugin.core.shapes import PodShape, Shapes
from scheduler_plugin.core.state import ClusterState

SHARES_PER_GPU: Final = 100
"""More than the trace's pods can use up: it has no such limit."""
_KEPT_SHAPES: Final = 1024


class DisagreementError(Exception):
    """Two forms of the same rule disagree: a bug."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What pods of a class have in common."""

    gpu: Pod | None
    request: PodRequest
    shape: PodShape


class ExtenderEngine:
    """See the module."""

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
        self.decision_seconds: list[float] = []
        """How long each decision took, from the verdict to the plan."""

    def place(self, pod: TracePod) -> bool:
        """Decide on a pod and bind it."""
        kind = self._kinds.get(pod.kind)
        if kind is None:
            kind = self._kinds[pod.kind] = _kind(pod.kind, self._policy)
        facts = _facts(pod, kind, node="", assignment=None)
        self._state.set_pod(facts)
        begun = time.perf_counter()
        node = self._choose(kind.shape, pod.name)
        assignment = self._state.plan(node, kind.request, self._policy, pod.name) if node and kind.gpu is not None else None
        self.decision_seconds.append(time.perf_counter() - begun)
        if isinstance(assignment, Refusal):
            raise DisagreementError(f"the columns said that {pod} fits on {node}, placement said: {assignment.sentence}")
        if node:
            self._state.set_pod(_facts(pod, kind, node, assignment))
        return bool(node)

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

    def _choose(self, shape: PodShape, uid: str) -> str:
        """Return the node with the highest score of those that fit; empty when there is none."""
        rated = self._rates_cpu_pods or bool(shape.request.containers)
        verdict, columns = self._shapes.verdict(shape), self._state.columns
        rows = slice(columns.rows)
        fits = verdict.reason[rows] == NodeReason.FITS.value
        fits &= columns.cpu_milli[rows] - columns.cpu_used_milli[rows] >= shape.demand.cpu_milli
        fits &= columns.ram_mib[rows] - columns.ram_used_mib[rows] >= shape.demand.ram_mib
        fitting = np.flatnonzero(fits)
        if not len(fitting):
            return ""
        scores = verdict.score[fitting] if rated else _default_scores(self._state, fitting, shape.demand)
        best = fitting[scores == scores.max()]
        return self._state.names[int(best[self._shapes.tie_break(best, uid)])]


def _default_scores(state: ClusterState, rows: Ints, demand: HostDemand) -> Ints:
    """Score nodes as kube-scheduler does by default, each plugin from 0 to 100 in whole numbers."""
    columns = state.columns
    cpu = (columns.cpu_used_milli[rows] + demand.cpu_milli) / columns.cpu_milli[rows]
    ram = (columns.ram_used_mib[rows] + demand.ram_mib) / columns.ram_mib[rows]
    least: Ints = ((100 * (1 - cpu)).astype(np.int64) + (100 * (1 - ram)).astype(np.int64)) // 2
    return least + (100 * (1 - abs(cpu - ram) / 2)).astype(np.int64)


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
    annotations = {contract.ANNOTATION_GPU_TYPE: codec.encode_list(tuple(sorted(kind.models)))} if kind.models else {}
    gpu = Pod("trace", "", "", "", "Pending", annotations, (ContainerSpec("main", limits),))
    request = pod_request(gpu)
    return _Kind(gpu, request, PodShape.of(request, policy, demand))


def _facts(pod: TracePod, kind: _Kind, node: str, assignment: PodAssignment | None) -> PodFacts:
    gpu = kind.gpu
    if gpu is not None:
        ours = {} if assignment is None else {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(assignment)}
        gpu = replace(gpu, name=pod.name, uid=pod.name, node_name=node, annotations={**gpu.annotations, **ours})
    return PodFacts(pod.name, "trace", pod.name, node, True, False, 0, pod.kind.cpu_milli, pod.kind.ram_mib, gpu)
