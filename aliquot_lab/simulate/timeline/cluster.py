# SPDX-License-Identifier: Apache-2.0
"""The simulated cluster: the scheduler's state, verdicts and plan on the node, with a policy that may replace the choice.

Invariant: what a pod gets always comes from the scheduler's own rules for one device (``aliquot.placement.fit``), for every policy, and the
scheduler's state counts it. kube-scheduler's check of CPU and RAM comes first, as in a cluster.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import numpy as np

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot.contract.model import ContainerAssignment, ContainerSpec, Device, Isolation, Pod, PodAssignment, PodRequest, Policy
from aliquot.placement.fit import reject_reason, share_on
from aliquot.placement.mig import resource_of_profile
from aliquot.placement.refusal import Refusal
from aliquot.placement.request import pod_request
from aliquot_lab.simulate.engine import Bools, Ints
from aliquot_lab.simulate.extender import DisagreementError
from aliquot_lab.simulate.timeline.mig_layout import instances
from aliquot_lab.simulate.timeline.model import PodKind, SimNode, SimPod, Workload
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.judge import REASON_OF, Reasons
from scheduler_plugin.core.fit.shapes import PodShape, Shapes, Verdict
from scheduler_plugin.core.score.cost import HostDemand, Weights

NAMESPACE: Final = "simulation"
_CONTAINER: Final = "main"
_KEPT_SHAPES: Final = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """The common data of all pods of a kind."""

    gpu: Pod | None
    request: PodRequest
    shape: PodShape


class Choice(NamedTuple):
    """The node and devices of a pod."""

    row: int
    columns: tuple[int, ...] | None = None
    """Columns of the devices; None: the scheduler's plan on the node chooses them."""


class Chooser(Protocol):
    """A policy: chooses among the nodes that fit."""

    def choose(self, pod: SimPod, prepared: Prepared, verdict: Verdict, rows: Ints) -> Choice | None:
        """Choose among rows that fit, in the order of names. None: this policy finds no place, although there is room."""

    def hold(self, pod: SimPod, choice: Choice) -> None:
        """Note that a pod started."""

    def release(self, pod: SimPod) -> None:
        """Note that a pod ended."""


class Placement(NamedTuple):
    """Where a pod runs."""

    pod: SimPod
    node: str
    choice: Choice
    assignment: PodAssignment | None
    milli: int
    """Thousandths of GPUs that it takes: the mean of memory and compute."""


class SimulatedCluster:
    """The nodes, and the pods that run and wait."""

    def __init__(
        self, nodes: Sequence[SimNode], policy: Policy, weights: dict[Policy, Weights], make_chooser: "MakeChooser", seed: int
    ) -> None:
        self.state = ClusterState()
        self.nodes = {node.name: node for node in nodes}
        for number, node in enumerate(nodes):
            self.state.set_host(node.name, node.cpu_milli, node.ram_mib)
            self.state.set_gpu_node(_gpu_node(node, number))
        self.policy = policy
        self.shapes = Shapes(self.state, weights, _KEPT_SHAPES)
        self.running: dict[str, Placement] = {}
        """By the UID of the pod."""
        self.held_milli = 0
        self._chooser = make_chooser(self)
        self._seed = seed
        self._prepared: dict[tuple[PodKind, str, int], Prepared] = {}
        self._possible: dict[PodKind, bool] = {}
        """Whether some node could take a pod of a kind without other pods."""
        self._on_node: Counter[str] = Counter()
        """Pods with GPUs by node."""
        self._gpu_nodes = sum(node.gpus > 0 for node in nodes)

    @property
    def whole_nodes(self) -> int:
        """Return how many nodes with GPUs have no pod on a GPU."""
        return self._gpu_nodes - len(self._on_node)

    def uid_of(self, pod: SimPod) -> str:
        """Return a pod's UID. It contains the seed, because the scheduler breaks ties by it."""
        return f"{pod.name}.{self._seed}"

    def facts_of(self, pod: SimPod, members: int, placement: Placement | None = None) -> PodFacts:
        """Return what the scheduler knows of a pod. Args: members: of its gang."""
        prepared, uid = self.prepared(pod, members), self.uid_of(pod)
        node, gpu = placement.node if placement else "", prepared.gpu
        if gpu is not None:
            assigned = placement.assignment if placement else None
            ours = {} if assigned is None else {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(assigned)}
            gpu = replace(gpu, name=pod.name, uid=uid, node_name=node, annotations={**gpu.annotations, **ours})
        return PodFacts(uid, NAMESPACE, pod.name, node, True, False, pod.priority, pod.kind.cpu_milli, pod.kind.ram_mib, gpu)

    def announce(self, workload: Workload) -> None:
        """Let the scheduler know waiting pods: it learns the demand from them, and finds the members of a gang."""
        for pod in workload.pods:
            self.state.set_pod(self.facts_of(pod, len(workload.pods)))

    def withdraw(self, workload: Workload) -> None:
        """Let the scheduler forget pods that wait: their queue took back the quota."""
        for pod in workload.pods:
            self.state.drop_pod(self.uid_of(pod))

    def start(self, workload: Workload) -> str:
        """Start all pods of a workload, or leave all of them waiting. Returns: why it cannot start; empty if it started."""
        started: list[SimPod] = []
        for pod in workload.pods:
            why = self._place(pod, len(workload.pods))
            if why:
                for other in started:
                    self._remove(other)
                    self.state.set_pod(self.facts_of(other, len(workload.pods)))
                return f"gang: {why}" if workload.is_gang else why
            started.append(pod)
        return ""

    def stop(self, workload: Workload) -> list[Placement]:
        """End all pods of a workload; return where they ran."""
        return [self._remove(pod) for pod in workload.pods]

    def restore(self, workload: Workload, placements: Sequence[Placement]) -> None:
        """Undo ``stop``."""
        for placement in placements:
            self._bind(placement, len(workload.pods))

    def prepared(self, pod: SimPod, members: int) -> Prepared:
        """Return the request of a pod as the scheduler parses it, from a cache."""
        key = pod.kind, pod.gang, members
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = _prepare(pod.kind, pod.gang, members, self.policy)
        return found

    def could_ever_start(self, workload: Workload) -> bool:
        """Whether each of its pods would fit on some node without other pods. Exact for single pods; a gang may still be too large."""
        members = len(workload.pods)
        for pod in workload.pods:
            if pod.kind not in self._possible:
                self._possible[pod.kind] = self._could_hold(pod, members)
        return all(self._possible[pod.kind] for pod in workload.pods)

    def _could_hold(self, pod: SimPod, members: int) -> bool:
        prepared, columns = self.prepared(pod, members), self.state.columns
        verdict = self.shapes.verdict(prepared.shape)
        rows = slice(columns.rows)
        fits = (verdict.reason[rows] == NodeReason.FITS.value) | verdict.curable[rows]
        fits &= columns.cpu_milli[rows] >= pod.kind.cpu_milli
        fits &= columns.ram_mib[rows] >= pod.kind.ram_mib
        return bool(fits.any())

    def _place(self, pod: SimPod, members: int) -> str:
        prepared, columns = self.prepared(pod, members), self.state.columns
        verdict = self.shapes.verdict(prepared.shape)
        rows = slice(columns.rows)
        fits = verdict.reason[rows] == NodeReason.FITS.value
        enough = columns.cpu_milli[rows] - columns.cpu_used_milli[rows] >= pod.kind.cpu_milli
        enough &= columns.ram_mib[rows] - columns.ram_used_mib[rows] >= pod.kind.ram_mib
        fitting = np.flatnonzero(fits & enough)
        choice = self._chooser.choose(pod, prepared, verdict, fitting) if len(fitting) else None
        if choice is None:
            return _why(verdict.reason[rows], fits, fitting)
        self._bind(self._planned(pod, prepared, choice), members)
        return ""

    def _planned(self, pod: SimPod, prepared: Prepared, choice: Choice) -> Placement:
        node, uid = self.state.names[choice.row], self.uid_of(pod)
        assignment: PodAssignment | None = None
        if prepared.gpu is not None:
            plan = (
                self.state.plan(node, prepared.request, self.policy, uid)
                if choice.columns is None
                else self._assigned(node, prepared.request, choice.columns, uid)
            )
            if isinstance(plan, Refusal):
                raise DisagreementError(f"the columns said that {pod} fits on {node}, placement said: {plan.sentence}")
            assignment = plan
        return Placement(pod, node, choice, assignment, self._milli(pod.kind, node, assignment))

    def _assigned(self, node: str, request: PodRequest, chosen: Sequence[int], uid: str) -> PodAssignment:
        """Return the assignment of the devices that a policy chose; checks each by the scheduler's rule."""
        (container,), states = request.containers, self.state.device_states(node)
        for column in chosen:
            reason = reject_reason(states[column], container, request.preferences)
            if reason is not None:
                raise DisagreementError(f"the policy chose device {column} of {node}, placement said: {reason.value}")
        shares = tuple(share_on(states[column].device, container, request.preferences) for column in chosen)
        return PodAssignment(uid, (ContainerAssignment(container.container, shares),))

    def _bind(self, placement: Placement, members: int) -> None:
        pod, uid = placement.pod, self.uid_of(placement.pod)
        self.state.set_pod(self.facts_of(pod, members, placement))
        self.running[uid] = placement
        self.held_milli += placement.milli
        if pod.kind.has_gpu:
            self._on_node[placement.node] += 1
        self._chooser.hold(pod, placement.choice)

    def _remove(self, pod: SimPod) -> Placement:
        placement = self.running.pop(self.uid_of(pod))
        self.state.drop_pod(self.uid_of(pod))
        self.held_milli -= placement.milli
        if pod.kind.has_gpu:
            self._on_node[placement.node] -= 1
            if not self._on_node[placement.node]:
                del self._on_node[placement.node]
        self._chooser.release(pod)
        return placement

    def _milli(self, kind: PodKind, node: str, assignment: PodAssignment | None) -> int:
        if assignment is None:
            return 0
        return kind.demand_milli(self.nodes[node].gpu_memory_mib)


MakeChooser = Callable[[SimulatedCluster], Chooser]


def _gpu_node(node: SimNode, number: int) -> GpuNode:
    """Return a node's inventory as its agent would report it. Args: number: of the node, for UUIDs that are short and distinct."""
    devices = []
    for minor in range(node.gpus):
        uuid = f"GPU-{number}-{minor}"
        made = instances(uuid, node.mig, node.gpu_memory_mib) if node.mig else ()
        device = Device(uuid, node.model, minor, "", node.gpu_memory_mib * units.MIB, mig_enabled=bool(node.mig), mig_instances=made)
        devices.append(GpuDevice(device))
    isolation = (Isolation.MIG,) if node.mig else (Isolation.SHIM, Isolation.EXCLUSIVE)
    return GpuNode(node.name, tuple(devices), shares_per_gpu=node.shares_per_gpu, isolation=isolation)


def _prepare(kind: PodKind, gang: str, members: int, policy: Policy) -> Prepared:
    demand = HostDemand(kind.cpu_milli, kind.ram_mib)
    if not kind.has_gpu:
        return Prepared(None, PodRequest(()), PodShape(PodRequest(()), policy, demand))
    annotations: dict[str, str] = {}
    if kind.models:
        annotations[contract.ANNOTATION_GPU_TYPE] = codec.encode_list(tuple(sorted(kind.models)))
    if gang:
        annotations |= {contract.ANNOTATION_GANG: gang, contract.ANNOTATION_GANG_MIN: str(members)}
    gpu = Pod("pod", NAMESPACE, "", "", "Pending", annotations, (ContainerSpec(_CONTAINER, _limits(kind)),))
    request = pod_request(gpu)
    return Prepared(gpu, request, PodShape.of(request, policy, demand))


def _limits(kind: PodKind) -> dict[str, str]:
    if kind.mig:
        return {resource_of_profile(kind.mig): "1"}
    limits = {contract.RESOURCE_VGPU: str(kind.gpus)}
    if kind.memory_mib is not None:
        limits[contract.RESOURCE_VGPU_MEMORY] = str(kind.gpus * kind.memory_mib)
    if kind.memory_percent is not None:
        limits[contract.RESOURCE_VGPU_MEMORY_PERCENT] = str(kind.gpus * kind.memory_percent)
    if kind.cores_percent is not None:
        limits[contract.RESOURCE_VGPU_CORES] = str(kind.gpus * kind.cores_percent)
    return limits


def _why(reasons: Reasons, fits: Bools, fitting: Ints) -> str:
    """Return the most frequent reason of the nodes, as kube-scheduler would count it."""
    if len(fitting):
        return "the policy found no place, although the scheduler's rules have one"
    if fits.any():
        return "not enough CPU or RAM on the nodes that have fitting GPUs"
    counts = Counter(reasons.tolist())
    value, _ = max(counts.items(), key=lambda item: (item[0] != NodeReason.NO_GPU.value, item[1], -item[0]))
    return REASON_OF[value].sentence
