# SPDX-License-Identifier: Apache-2.0
"""What-if: a copy of the cluster on which changes are tried, with the code that makes the real decisions.

Pods are placed one after the other, by priority, each on what the earlier ones left. No pod is evicted. A gang gets either enough new
members to start, together with those that run, or no new member. A node can take a pod if its GPUs fit and its host has enough CPU and RAM.
A snapshot does not have what else kube-scheduler checks (``kube_filters.NOT_CHECKED``).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aliquot import contract
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import PodAssignment, Policy
from aliquot.placement.refusal import Refusal
from aliquot.placement.request import RequestError, pod_request
from scheduler_plugin.core.cluster.columns import Rows
from scheduler_plugin.core.cluster.gang import Gang, gang_of_pod
from scheduler_plugin.core.cluster.hold_uids import holds_of
from scheduler_plugin.core.cluster.journal import Snapshot
from scheduler_plugin.core.cluster.pods import PodFacts, footprint
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.roles import counted, lacking_roles
from scheduler_plugin.core.cluster.state import Reservation, Stage
from scheduler_plugin.core.explain.one import ReasonCount, count_reasons
from scheduler_plugin.core.explain.replay import restore
from scheduler_plugin.core.fit.judge import best_row
from scheduler_plugin.core.fit.kube_filters import Scope, host_has_room
from scheduler_plugin.core.fit.shapes import PodShape, Shapes, Verdict
from scheduler_plugin.core.gang.victims import running_members
from scheduler_plugin.core.score.cost import FRAG_PPM, HostDemand


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod would run, or why it fits nowhere."""

    pod: str
    """``namespace/name``."""
    node: str = ""
    devices: tuple[str, ...] = ()
    score: int = 0
    reasons: tuple[ReasonCount, ...] = ()
    refusal: str = ""
    """Why the pod cannot run on any cluster, or that it asks for no GPU."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The use and the fragmentation of the cluster."""

    gpus: int
    memory_allocated_ratio: float
    fragmentation_ratio: float
    waiting_pods_that_fit: int
    waiting_pods: int


class UnknownNameError(LookupError):
    """The snapshot has no such node or GPU."""


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
        """Return the figures of the present state. A waiting pod counts as fitting if it would fit alone."""
        columns = self._state.columns
        with self._state.without_all(holds_of(self._state.reservations)):
            columns.derive()
            present = columns.present[: columns.rows]
            used, capacity = int(columns.allocated_mib().sum()), int(columns.capacity_mib[: columns.rows].sum())
            fragmented = float(columns.fragmentation[: columns.rows].sum()) / (FRAG_PPM * max(1, int(present.sum())))
        waiting = [pod for pod in self._state.pods.values() if pod.gpu is not None and not pod.node_name]
        fit = sum(self._fits(pod) for pod in waiting)
        return Figures(int(present.sum()), round(used / max(1, capacity), 4), round(fragmented, 4), fit, len(waiting))

    def add(self, pods: Iterable[PodFacts]) -> tuple[Placement, ...]:
        """Place pods that do not exist yet, by priority, and with equal priority in their order; their UIDs must be new."""
        new = sorted(pods, key=lambda pod: -pod.priority)
        placed = {pod.uid: self._place(pod) for pod in new}
        for gang in dict.fromkeys(gang for pod in new if (gang := gang_of_pod(pod)) is not None):
            self._give_up_incomplete(gang, new, placed)
        return tuple(placed.values())

    def _give_up_incomplete(self, gang: Gang, new: Iterable[PodFacts], placed: dict[str, Placement]) -> None:
        """Release all new members of a gang if it is not complete."""
        members = [pod for pod in new if (other := gang_of_pod(pod)) is not None and other.key == gang.key]
        running = running_members(self._state, gang.key)
        if counted([*running, *(pod for pod in members if placed[pod.uid].node)]) >= gang.minimum:
            return
        for pod in members:
            self._state.release(pod.uid)
            placed[pod.uid] = Placement(placed[pod.uid].pod, refusal=self._gang_sentence(gang, [*running, *members]))

    def cordon(self, device_uuid: str) -> None:
        """Keep new pods off a GPU. Raises UnknownNameError."""
        for gpu in self._state.gpu_nodes():
            if any(entry.device.uuid.lower() == device_uuid.lower() for entry in gpu.devices):
                uuid = next(entry.device.uuid for entry in gpu.devices if entry.device.uuid.lower() == device_uuid.lower())
                self._state.set_gpu_node(replace(gpu, cordoned_devices=(*gpu.cordoned_devices, uuid)))
                return
        raise UnknownNameError(f"the snapshot has no GPU {device_uuid}")

    def drain(self, nodes: Collection[str]) -> tuple[Placement, ...]:
        """Remove all GPU pods from some nodes at once and place them on others. Raises UnknownNameError."""
        leaving: list[PodFacts] = []
        for node in dict.fromkeys(nodes):
            gpu = self._state.gpu_node(node)
            if gpu is None:
                known = ", ".join(sorted(other.name for other in self.gpu_nodes)) or "no nodes"
                raise UnknownNameError(f"the snapshot has no node {node} with GPUs: it has {known}")
            self._state.set_gpu_node(replace(gpu, cordoned=True))
            leaving += [pod for pod in self._bound_and_expected_on(node) if pod.gpu is not None]
        for pod in leaving:
            self._state.drop_pod(pod.uid)
        ordered = sorted(leaving, key=lambda pod: (-pod.priority, pod.namespace, pod.name))
        return tuple(self._place(_unbound(pod)) for pod in ordered)

    def _bound_and_expected_on(self, node: str) -> Iterator[PodFacts]:
        """Yield the pods of a node, and those with a reservation there."""
        yield from self._state.pods_on(node)
        expected = (self._state.pods.get(held.pod_uid) for held in self._state.reservations.values() if held.node == node)
        yield from (pod for pod in expected if pod is not None)

    def _gang_sentence(self, gang: Gang, known: Sequence[PodFacts]) -> str:
        lacking = gang.minimum - counted(known)
        missing = lacking_roles(known, lacking) or "fewer with GPUs exist"
        why = missing if lacking > 0 else "there is no room for enough members at once"
        return f"gang {gang.name}: {gang.minimum} members must start together, and {why}"

    def _fits(self, pod: PodFacts) -> bool:
        shape = self._shape(pod)
        if not isinstance(shape, PodShape):
            return False
        with self._state.without(pod.uid):
            return len(self._fitting(shape, self._shapes.verdict(shape))) > 0

    def _fitting(self, shape: PodShape, verdict: Verdict) -> Rows:
        """Return the rows with enough GPUs, CPU and RAM for a pod."""
        rows = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
        return rows[host_has_room(self._state.columns, rows, shape.demand)]

    def _shape(self, pod: PodFacts) -> PodShape | str:
        if pod.gpu is None:
            return "it asks for no GPU"
        try:
            demand, used = HostDemand(pod.cpu_milli, pod.memory_mib), self._state.utilizations.of(pod)
            return PodShape.of(pod_request(pod.gpu), self._policy, demand, used)
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
    """Return a pod as it was before it was placed."""
    if pod.gpu is None:
        return replace(pod, node_name="")
    annotations = {name: value for name, value in pod.gpu.annotations.items() if name != contract.ANNOTATION_ASSIGNMENT}
    return replace(pod, node_name="", gpu=replace(pod.gpu, node_name="", phase="Pending", annotations=annotations))


def _devices(plan: PodAssignment) -> tuple[str, ...]:
    return tuple(dict.fromkeys(share.device_uuid for container in plan.containers for share in container.shares))
