# SPDX-License-Identifier: Apache-2.0
"""Which pods consolidation may move, and how much work a move loses.

A move is an eviction, after which the pod's controller creates a replacement. So only pods with a controller move, and only if their owner
agreed: by the annotation ``aliquot.dev/movable``, or by the priority of best-effort work. The work since the last checkpoint is lost.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.budgets import Budgets
from scheduler_plugin.core.cluster.durations import parse_duration
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.consolidate.reach import unknown_because

BEST_EFFORT_PRIORITY: Final = -100_000
"""Of the PriorityClass aliquot-best-effort (deploy/daemonset/scheduler/priority-classes.yaml)."""
MIN_RUNTIME_SECONDS: Final = 300.0
"""How long a pod without the annotation runs before it may move: a pod that just moved has lost little work, and would be moved again."""
_STAYING_KINDS: Final = ("DaemonSet", "Node")
"""Controllers that recreate a pod on the same node only."""


def check_movable(annotations: Mapping[str, str]) -> None:
    """Check the annotations of a pod that consolidation reads, except for the durations. Raises RequestError."""
    movable, saved = annotations.get(contract.ANNOTATION_MOVABLE), annotations.get(contract.ANNOTATION_LAST_CHECKPOINT)
    if movable not in (None, "true", "false"):
        raise RequestError(f"{contract.ANNOTATION_MOVABLE}: expected true or false, found {quote(str(movable))}: correct it, or remove it")
    if saved is not None and _moment(saved) is None:
        name = contract.ANNOTATION_LAST_CHECKPOINT
        raise RequestError(f"{name}: expected a time such as 2026-01-31T12:00:00Z, found {quote(saved)}: correct it, or remove it")


class AnnotationError(ValueError):
    """An annotation that cannot be read. The message says what was expected and what was found."""


def staying_because(
    state: ClusterState, directory: NodeDirectory, budgets: Budgets, pod: PodFacts, now: float, most_priority: int | None
) -> str:
    """Say why a bound pod with GPUs must not move; empty if it may.

    Args: now: seconds since 1970. most_priority: the priority of the pod that needs the room; None if no pod does.
    """
    annotations: Mapping[str, str] = {} if pod.gpu is None else pod.gpu.annotations
    if (unwilling := _unwilling(pod, annotations)) or (tied := _tied(state, directory, budgets, pod)):
        return unwilling or tied
    if most_priority is not None and pod.priority > most_priority:
        return "more important than the waiting pod"
    try:
        return "" if _ran_enough(pod, annotations, now) else f"runs for less than its {contract.ANNOTATION_MIN_RUNTIME}"
    except AnnotationError as exc:
        return str(exc)


def _unwilling(pod: PodFacts, annotations: Mapping[str, str]) -> str:
    """Say which annotation or priority would let the pod move."""
    stated = annotations.get(contract.ANNOTATION_MOVABLE)
    if stated not in (None, "true", "false"):
        return f"{contract.ANNOTATION_MOVABLE} is neither true nor false"
    if stated == "false" or (stated is None and pod.priority > BEST_EFFORT_PRIORITY):
        return f"not marked {contract.ANNOTATION_MOVABLE}: true"
    if not pod.controller_uid or pod.controller_kind in _STAYING_KINDS:
        return "no controller recreates it elsewhere"
    return ""


def _tied(state: ClusterState, directory: NodeDirectory, budgets: Budgets, pod: PodFacts) -> str:
    """Say what keeps a pod at its place."""
    if pod.deletion_requested:
        return "it is ending"
    if gang_of_pod(pod) is not None:
        return "member of a gang"
    if unknown := unknown_because(pod, directory):
        return unknown
    gpu = state.gpu_node(pod.node_name)
    devices = set() if gpu is None else {entry.device.uuid for entry in gpu.devices}
    if not devices.issuperset(state.footprint_of(pod.uid)):
        return "it has MIG instances or an unknown device"
    covering = budgets.covering(pod)
    if len(covering) > 1:
        return "two disruption budgets cover it"
    return "a disruption budget allows no disruption now" if 0 in budgets.allowed_after((), covering).values() else ""


def _ran_enough(pod: PodFacts, annotations: Mapping[str, str], now: float) -> bool:
    text = annotations.get(contract.ANNOTATION_MIN_RUNTIME)
    least = MIN_RUNTIME_SECONDS if text is None else seconds_of(text)
    _last_saved(pod, annotations, now)  # raises for a time that cannot be read
    return not least or (pod.started_at is not None and now - pod.started_at >= least)


def seconds_of(text: str) -> float:
    """Read a duration such as ``90s``, ``30m``, ``12h`` or ``2d``, in seconds. Raises AnnotationError."""
    seconds = parse_duration(text)
    if seconds is None:
        raise AnnotationError(f"{contract.ANNOTATION_MIN_RUNTIME} is not a duration such as 90s, 30m, 12h or 2d")
    return seconds


def _last_saved(pod: PodFacts, annotations: Mapping[str, str], now: float) -> float:
    """Return from when on work is lost if the pod ends, in seconds since 1970."""
    began = now if pod.started_at is None else pod.started_at
    text = annotations.get(contract.ANNOTATION_LAST_CHECKPOINT)
    if text is None:
        return min(now, began)
    saved = _moment(text)
    if saved is None:
        raise AnnotationError(f"{contract.ANNOTATION_LAST_CHECKPOINT} is not a time such as 2026-01-31T12:00:00Z")
    return min(now, max(began, saved))


def _moment(text: str) -> float | None:
    """Read a time with its zone, in seconds since 1970; None for another text."""
    try:
        found = datetime.fromisoformat(text)
        return None if found.tzinfo is None else found.timestamp()
    except (ValueError, OverflowError):
        return None


def gpus_of(state: ClusterState, pod: PodFacts) -> float:
    """Return how many GPUs a bound pod holds: of each, the larger part of memory and cores."""
    gpu = state.gpu_node(pod.node_name)
    capacity = {} if gpu is None else {entry.device.uuid: max(1, entry.device.memory_bytes // units.MIB) for entry in gpu.devices}
    uses = state.footprint_of(pod.uid).items()
    return sum(max(use.memory_mib / capacity[uuid], use.cores_percent / units.WHOLE_GPU_PERCENT) for uuid, use in uses if uuid in capacity)


def lost_gpu_seconds(state: ClusterState, pod: PodFacts, now: float) -> float:
    """Return the work that a move of a movable pod loses."""
    annotations: Mapping[str, str] = {} if pod.gpu is None else pod.gpu.annotations
    return gpus_of(state, pod) * (now - _last_saved(pod, annotations, now))
