# SPDX-License-Identifier: Apache-2.0
"""The picture of the cluster: the state, what the verbs share, and the streams that keep both up to date."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract import gpunode
from aliquot.contract.features import Gate
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.clock import SystemClock
from scheduler_plugin.adapters.kube_watch import Stream
from scheduler_plugin.core.claims.planned import decode_planned
from scheduler_plugin.core.claims.stored import decode_claim
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.domains import place_labels
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.objects import (
    BudgetObject,
    NodeObject,
    PodObject,
    budget_facts,
    has_soft_taint,
    host_amounts,
    is_closed,
    node_facts,
    plugin_resources,
    pod_facts,
)
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.services.claim_watch import ClaimWatch, decode_object
from scheduler_plugin.services.cluster_watch import ClusterWatch, NamedHost
from scheduler_plugin.services.planned_pods import PATH as PLANNED_PATH
from scheduler_plugin.services.planned_pods import PlannedPods
from scheduler_plugin.settings import Settings

PODS_PATH: Final = "/api/v1/pods?fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
NODES_PATH: Final = "/api/v1/nodes"
BUDGETS_PATH: Final = "/apis/policy/v1/poddisruptionbudgets"
GPU_NODES_PATH: Final = f"/apis/{gpunode.API_VERSION}/{contract.GPU_NODE_PLURAL}"
RESOURCES_PATH: Final = "/apis/resource.k8s.io/v1"
_GATES_OF_LABELS: Final = (Gate.ADMISSION_CHECK, Gate.BACKFILL, Gate.CONSOLIDATION)
"""Features that need all labels and taints of nodes, besides claims."""
YOUNG_OBJECTS: Final = 20_000
"""The garbage collector runs when there are this many more objects than at its last run."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What all other parts read."""

    clock: SystemClock
    rules: Rules
    context: ExtenderContext
    watch: ClusterWatch
    pods_stream: "Stream[PodFacts]"
    streams: "Sequence[Stream[Any]]"
    """All of them, the pods' stream too."""
    claims: "ClaimStreams | None"
    """None while the feature gate is closed."""


def make_cluster(settings: Settings, connection: KubeConnection) -> Cluster:
    """Construct the state and its streams."""
    clock, rules = SystemClock(), Rules(settings.policy, settings.weights)
    context = ExtenderContext.create(ClusterState(), rules, clock, soft_seconds=settings.soft_seconds, gang_seconds=settings.gang_seconds)
    watch = ClusterWatch(context.state, context.budgets, clock)
    watch.directory = context.directory

    def forget_pod(uid: str) -> None:
        context.decisions.forget(uid)
        context.workload_seats.on_gone(uid)

    watch.on_pod_gone = forget_pod
    watch.on_nominated = context.reservations.follow_nomination
    watch.on_synced = settle_memory
    pods = Stream("pods", PODS_PATH, decode_pod, connection, watch.pods)
    claims = claim_streams(settings, connection, context)
    full_nodes = claims is not None or any(gate in settings.gates for gate in _GATES_OF_LABELS)
    streams: Sequence[Stream[Any]] = (
        Stream("gpunodes", GPU_NODES_PATH, gpunode.decode_gpu_node, connection, watch.inventories),
        Stream("nodes", NODES_PATH, decode_full_host if full_nodes else decode_host, connection, watch.hosts),
        Stream("poddisruptionbudgets", BUDGETS_PATH, decode_budget, connection, watch.budgets),
        pods,
        *(claims.all if claims is not None else ()),
    )
    return Cluster(clock, rules, context, watch, pods, streams, claims)


@dataclass(frozen=True, slots=True)
class ClaimStreams:
    """What is allocated by ResourceClaims, and the pods with claims that are allocated here."""

    watch: ClaimWatch
    planned: PlannedPods
    all: "Sequence[Stream[Any]]"

    def relist(self) -> None:
        """List again what a new leader must know."""
        for stream in self.all:
            stream.relist()

    def known_since(self, moment: float) -> bool:
        """Whether slices were listed, and claims after a moment on the monotonic clock: so it is known what claims have of the GPUs."""
        return self.watch.slices.was_listed and self.watch.claims.listed_from >= moment

    def listed_since(self, moment: float) -> bool:
        """Whether claims and pods were listed after a moment on the monotonic clock."""
        return all(one.is_current and one.listed_from >= moment for one in (self.watch.claims, self.planned.receiver))


def claim_streams(settings: Settings, connection: KubeConnection, context: ExtenderContext) -> ClaimStreams | None:
    """Construct the streams of what is allocated by ResourceClaims; None while the feature gate is closed."""
    if Gate.DYNAMIC_RESOURCE_ALLOCATION not in settings.gates:
        return None
    monotonic = context.clock.monotonic
    watch, planned = ClaimWatch(context.claims, monotonic), PlannedPods(context.planned, monotonic)
    streams: Sequence[Stream[Any]] = (
        Stream("resourceslices", f"{RESOURCES_PATH}/resourceslices", decode_object, connection, watch.slices),
        Stream("deviceclasses", f"{RESOURCES_PATH}/deviceclasses", decode_object, connection, watch.classes),
        Stream("resourceclaims", f"{RESOURCES_PATH}/resourceclaims", decode_claim, connection, watch.claims),
        Stream("pods with planned claims", PLANNED_PATH, decode_planned, connection, planned.receiver),
    )
    return ClaimStreams(watch, planned, streams)


def settle_memory() -> None:
    """Exclude the objects of the first lists from garbage collection: to scan them pauses for 100 ms and frees nothing.

    The collector also runs less often after that, because a call makes thousands of objects, all freed when it ends, and no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def decode_pod(raw: msgspec.Raw) -> PodFacts:
    """Decode a pod of the stream."""
    return pod_facts(msgspec.json.decode(raw, type=PodObject))


def decode_budget(raw: msgspec.Raw) -> Budget:
    """Decode a PodDisruptionBudget of the stream."""
    return budget_facts(msgspec.json.decode(raw, type=BudgetObject))


def decode_full_host(raw: msgspec.Raw) -> NamedHost:
    """Decode a node of the stream with all its labels and taints."""
    host = decode_host(raw)
    host.facts = node_facts(msgspec.json.decode(raw, type=NodeObject))
    return host


def decode_host(raw: msgspec.Raw) -> NamedHost:
    """Decode a node of the stream."""
    node = msgspec.json.decode(raw, type=NodeObject)
    labels, soft, resources = place_labels(node.metadata.labels or {}), has_soft_taint(node), plugin_resources(node)
    return NamedHost(node.metadata.name, host_amounts(node), tainted=soft, closed=is_closed(node), place=labels, resources=resources)
