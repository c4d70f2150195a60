"""What would become of pods if something were different: a copy of the cluster on which changes are tried, by the code that decides.

Pods are placed one after the other, each on what the earlier ones left, the most important first. Nothing is evicted to make room. Of a
gang, either enough of the new pods get a place for it to start, beside those that run, or none does. A node takes a pod when its GPUs do
and its host has the CPU and RAM free; what else kube-scheduler looks at (``kube_filters.NOT_CHECKED``) a snapshot does not have.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from placement.refusal import Refusal
from placement.request import RequestError, pod_request
from proto import contract
from proto.gpunode import GpuNode
from proto.model import PodAssignment, Policy
from scheduler_plugin.core.columns import Rows
from scheduler_plugin.core.explain import ReasonCount, count_reasons
from scheduler_plugin.core.gang import Gang, gang_of_pod
from scheduler_plugin.core.gang_plan import is_placed
from scheduler_plugin.core.journal import Snapshot
from scheduler_plugin.core.judge import best_row
from scheduler_plugin.core.kube_filters import Scope, host_has_room
from scheduler_plugin.core.pods import PodFacts, footprint
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.replay import restore
from scheduler_plugin.core.score import FRAG_PPM, HostDemand
from scheduler_plugin.core.shapes import PodShape, Shapes, Verdict
from scheduler_plugin.core.state import Reservation, Stage


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod would go, or why nowhere."""

    pod: str
    """``namespace/name``."""
    node: str = ""
    devices: tuple[str, ...] = ()
    score: int = 0
    reasons: tuple[ReasonCount, ...] = ()
    refusal: str = ""
    """A sentence, when no cluster could give what it asks for, or no pod with GPUs is meant."""


@dataclass(frozen=True, slots=True)
class Figures:
    """How full and how broken up the cluster is."""

    gpus: int
    memory_allocated_ratio: float
    fragmentation_ratio: float
    waiting_pods_that_fit: int
    waiting_pods: int


class UnknownNameError(LookupError):
    """There is no such node or GPU in the snapshot."""


class WhatIf:
    """One copy of the cluster."""

    def __init__(self, snapshot: Snapshot, policy: Policy | None = None) -> None:
        """Args: policy: instead of the scheduler's default. Raises SnapshotError."""
        self._state = restore(snapshot)
        self._policy = policy or snapshot.rules.default_policy
        self._shapes = Shapes(self._state, snapshot.rules.weights)

    @property
    def gpu_nodes(self) -> tuple[GpuNode, ...]:
        """Return all inventories."""
        return tuple(self._state.gpu_nodes())

    def figures(self) -> Figures:
        """Return the figures as things stand. A waiting pod is counted as fitting if it would fit alone."""
        columns = self._state.columns
        columns.derive()
        present = columns.present[: columns.rows]
        used, capacity = int(columns.allocated_mib().sum()), int(columns.capacity_mib[: columns.rows].sum())
        fragmented = float(columns.fragmentation[: columns.rows].sum()) / (FRAG_PPM * max(1, int(present.sum())))
        waiting = [pod for pod in self._state.pods.values() if pod.gpu is not None and not pod.node_name]
        fit = sum(self._fits(pod) for pod in waiting)
        return Figures(int(present.sum()), round(used / max(1, capacity), 4), round(fragmented, 4), fit, len(waiting))

    def add(self, pods: Iterable[PodFacts]) -> tuple[Placement, ...]:
        """Place pods that do not exist yet, the most important first, equals as given; their UIDs must be new."""
        new = sorted(pods, key=lambda pod: -pod.priority)
        placed = {pod.uid: self._place(pod) for pod in new}
        for gang in dict.fromkeys(gang for pod in new if (gang := gang_of_pod(pod)) is not None):
            members = [pod for pod in new if (other := gang_of_pod(pod)) is not None and other.key == gang.key]
            running = sum(is_placed(self._state, pod) and not pod.deletion_requested for pod in self._state.gang_members(gang.key))
            if running + sum(bool(placed[pod.uid].node) for pod in members) < gang.minimum:
                for pod in members:
                    self._state.release(pod.uid)
                    placed[pod.uid] = Placement(placed[pod.uid].pod, refusal=self._gang_sentence(gang, running + len(members)))
        return tuple(placed.values())

    def cordon(self, device_uuid: str) -> None:
        """Keep new pods off a GPU. Raises UnknownNameError."""
        for gpu in self._state.gpu_nodes():
            if any(entry.device.uuid.lower() == device_uuid.lower() for entry in gpu.devices):
                uuid = next(entry.device.uuid for entry in gpu.devices if entry.device.uuid.lower() == device_uuid.lower())
                self._state.set_gpu_node(replace(gpu, cordoned_devices=(*gpu.cordoned_devices, uuid)))
                return
        raise UnknownNameError(f"no GPU {device_uuid} in the snapshot")

    def drain(self, nodes: Collection[str]) -> tuple[Placement, ...]:
        """Take all GPU pods off some nodes at once and place them elsewhere. Raises UnknownNameError."""
        leaving: list[PodFacts] = []
        for node in dict.fromkeys(nodes):
            gpu = self._state.gpu_node(node)
            if gpu is None:
                known = ", ".join(sorted(other.name for other in self.gpu_nodes)) or "none"
                raise UnknownNameError(f"no node {node} with GPUs in the snapshot; there are {known}")
            self._state.set_gpu_node(replace(gpu, cordoned=True))
            expected = (self._state.pods.get(held.pod_uid) for held in self._state.reservations.values() if held.node == node)
            here = (*self._state.pods_on(node), *expected)
            leaving += [pod for pod in here if pod is not None and pod.gpu is not None]
        for pod in leaving:
            self._state.drop_pod(pod.uid)
        ordered = sorted(leaving, key=lambda pod: (-pod.priority, pod.namespace, pod.name))
        return tuple(self._place(_unbound(pod)) for pod in ordered)

    def _gang_sentence(self, gang: Gang, known: int) -> str:
        why = "fewer with GPUs exist" if known < gang.minimum else "no room for enough members at once"
        return f"gang {gang.name}: {gang.minimum} members must start together, {why}"

    def _fits(self, pod: PodFacts) -> bool:
        shape = self._shape(pod)
        if not isinstance(shape, PodShape):
            return False
        with self._state.without(pod.uid):
            return len(self._fitting(shape, self._shapes.verdict(shape))) > 0

    def _fitting(self, shape: PodShape, verdict: Verdict) -> Rows:
        """Return the rows whose GPUs and host take a pod."""
        rows = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
        return rows[host_has_room(self._state.columns, rows, shape.demand)]

    def _shape(self, pod: PodFacts) -> PodShape | str:
        if pod.gpu is None:
            return "it asks for no GPU"
        try:
            return PodShape.of(pod_request(pod.gpu), self._policy, HostDemand(pod.cpu_milli, pod.memory_mib))
        except RequestError as exc:
            return str(exc)

    def _place(self, pod: PodFacts) -> Placement:
        name, shape = f"{pod.namespace}/{pod.name}", self._shape(pod)
        if isinstance(shape, str) or pod.gpu is None:
            return Placement(name, refusal=str(shape))
        verdict = self._shapes.verdict(shape)
        fitting = self._fitting(shape, verdict)
        if not len(fitting):
            return Placement(name, reasons=count_reasons(self._state, verdict, shape.demand, Scope.of(self._state))[1])
        row = best_row(self._shapes, verdict, fitting, pod.uid)
        node, score = self._state.names[row], int(verdict.score[row])
        plan = self._state.plan(node, pod_request(pod.gpu), self._policy, pod.uid)
        if isinstance(plan, Refusal):
            return Placement(name, refusal=plan.sentence)
        held = Reservation(pod.uid, node, footprint(pod.gpu.containers, plan), HostDemand(pod.cpu_milli, pod.memory_mib), Stage.BINDING)
        self._state.reserve(held)
        return Placement(name, node, _devices(plan), score)


def _unbound(pod: PodFacts) -> PodFacts:
    """Return a pod as it is before it is placed."""
    if pod.gpu is None:
        return replace(pod, node_name="")
    annotations = {name: value for name, value in pod.gpu.annotations.items() if name != contract.ANNOTATION_ASSIGNMENT}
    return replace(pod, node_name="", gpu=replace(pod.gpu, node_name="", phase="Pending", annotations=annotations))


def _devices(plan: PodAssignment) -> tuple[str, ...]:
    return tuple(dict.fromkeys(share.device_uuid for container in plan.containers for share in container.shares))
