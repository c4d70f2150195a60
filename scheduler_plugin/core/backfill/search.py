# SPDX-License-Identifier: Apache-2.0
"""Finds the room to hold for a waiting pod or gang: where it fits first, if running pods end in the expected order.

The search ends pods on a copy of the state, in their order, until all members fit at once. It depends on the state and the expected ends
only, so the next leader finds it again without any record.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Final

import numpy as np

from scheduler_plugin.core.backfill.hold import Hold, Place
from scheduler_plugin.core.backfill.lifetimes import LASTING_KINDS
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.hold_uids import HOLD_PREFIX
from scheduler_plugin.core.cluster.journal import Snapshot
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.replay import restore
from scheduler_plugin.core.fit.judge import best_row
from scheduler_plugin.core.fit.kube_filters import host_has_room
from scheduler_plugin.core.fit.shapes import Shapes
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.score.cost import HostDemand

MAX_TRIALS: Final = 512
"""How often the pods are tried. With more running pods than this, several end between two trials."""


def importance(pod: PodFacts) -> tuple[int, float, str]:
    """Return a key that sorts waiting pods: the most important first, of these the one that waits longest."""
    return -pod.priority, pod.created_at or 0.0, pod.uid


def ending_order(pods: Sequence[PodFacts], ends: Mapping[str, float | None]) -> list[str]:
    """Return the UIDs of bound pods in the order in which they probably end.

    Pods without an expected end come last, the oldest first. Pods of services without an expected end are left out: they do not end.

    Args: ends: by pod UID, in seconds since 1970; None if unknown.
    """
    known = sorted((end, pod.uid) for pod in pods if (end := ends.get(pod.uid)) is not None)
    unknown = [pod for pod in pods if ends.get(pod.uid) is None and pod.controller_kind not in LASTING_KINDS]
    return [uid for _, uid in known] + [pod.uid for pod in sorted(unknown, key=lambda pod: (pod.started_at or inf, pod.uid))]


def find_hold(snapshot: Snapshot, member_uids: Sequence[str], order: Sequence[str], allowed: Collection[str] | None = None) -> Hold | None:
    """Find the room for waiting pods that start together; None if there is none even without the pods that end.

    Args:   order: the UIDs of the pods that end (``ending_order``). allowed: the names of the nodes that all the waiting pods may use;
            None for all nodes.
    Raises: SnapshotError.
    """
    state = restore(snapshot)
    shapes = Shapes(state, snapshot.rules.weights)
    members = [pod for uid in member_uids if (pod := state.pods.get(uid)) is not None and not pod.node_name]
    if len(members) < len(member_uids) or not members:
        return None
    kept = _names(state) - state.closed_nodes if allowed is None else frozenset(allowed)
    return search(state, Planner(state, shapes, snapshot.rules.default_policy), members, order, kept)


def search(
    state: ClusterState, planner: Planner, members: Sequence[PodFacts], order: Sequence[str], allowed: frozenset[str]
) -> Hold | None:
    """Do the same on a state that belongs to the search. Args: allowed: the names of the nodes that all members may use."""
    for uid in [*(uid for uid in state.reservations if uid.startswith(HOLD_PREFIX)), *(pod.uid for pod in members)]:
        state.release(uid)
    _drop_nodes(state, allowed)
    size = max(1, -(-len(order) // MAX_TRIALS))
    for start in range(0, len(order) + size, size):
        if _fit_together(state, planner, members):
            return _hold(state, members)
        for uid in order[start : start + size]:
            state.drop_pod(uid)
    return None


def _drop_nodes(state: ClusterState, allowed: frozenset[str]) -> None:
    """Drop nodes that are not allowed. Also drop a node if it is unknown which devices one of its pods has."""
    unclear = {state.pods[uid].node_name for uid in state.unaccounted if uid in state.pods}
    for name in unclear | (_names(state) - allowed):
        state.drop_gpu_node(name)


def _fit_together(state: ClusterState, planner: Planner, members: Sequence[PodFacts]) -> bool:
    """Reserve room for all members; without room for all of them, reserve none."""
    gang = gang_of_pod(members[0])
    if gang is not None and gang.domain is not None:
        return planner.reserve_all(members, _names(state), inf)
    for number, pod in enumerate(members):
        if not _reserve(state, planner, pod):
            for planned in members[:number]:
                state.release(planned.uid)
            return False
    return True


def _names(state: ClusterState) -> frozenset[str]:
    return frozenset(name for name in state.names if name)


def _reserve(state: ClusterState, planner: Planner, pod: PodFacts) -> bool:
    shape = planner.shape_of(pod)
    if shape is None:
        return False
    verdict = planner.shapes.verdict(shape)
    rows = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
    rows = rows[host_has_room(state.columns, rows, HostDemand(pod.cpu_milli, pod.memory_mib))]
    if not len(rows):
        return False
    return not planner.reserve_on(pod, state.names[best_row(planner.shapes, verdict, rows, pod.uid)], inf)


def _hold(state: ClusterState, members: Sequence[PodFacts]) -> Hold:
    first = min(members, key=importance)
    placed = [state.reservations[pod.uid] for pod in members]
    places = tuple(Place(held.pod_uid, held.node, dict(held.footprint), held.demand) for held in placed)
    since = min((pod.created_at for pod in members if pod.created_at is not None), default=0.0)
    return Hold(f"{first.namespace}/{first.name}", first.priority, since, places)
