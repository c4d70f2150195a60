# SPDX-License-Identifier: Apache-2.0
"""The certificate of a plan: the state it was made on, the moves, and the state at the end. Anyone can replay it without a cluster.

A replay places each seat and each pod again with the present code, compares, and checks after every step that no device is over-given. The
digest finds a changed document. It is no signature: who makes a new document can compute it.
"""

import hashlib
from collections.abc import Collection
from typing import Final

import msgspec

from aliquot.contract import units
from scheduler_plugin.core.cluster.journal import Snapshot
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.consolidate.plan import Move, Plan, Trial, replacement_of, seat_uid

VERSION: Final = 2
"""Version 1 had no labels and taints of nodes."""


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan with all that is needed to check it."""

    version: int
    snapshot: Snapshot
    plan: Plan
    end: str
    """Digest of what is promised on the devices of all nodes of the plan after the last move."""
    digest: str
    """Digest of everything above."""


class CertificateError(ValueError):
    """A certificate that does not replay. The message says at which step, what was expected and what was found."""


def certify(snapshot: Snapshot, plan: Plan) -> Certificate:
    """Walk through a plan and return its certificate. Raises CertificateError, SnapshotError."""
    end = walk(snapshot, plan)
    return Certificate(VERSION, snapshot, plan, end, _digest(VERSION, snapshot, plan, end))


def check(certificate: Certificate) -> None:
    """Replay a certificate to the same end. Raises CertificateError, SnapshotError."""
    if certificate.version != VERSION:
        raise CertificateError(f"expected a certificate of version {VERSION}, found {certificate.version}: use aliquot of that version")
    if certificate.digest != _digest(certificate.version, certificate.snapshot, certificate.plan, certificate.end):
        raise CertificateError("the document was changed: its digest is another")
    end = walk(certificate.snapshot, certificate.plan)
    if end != certificate.end:
        raise CertificateError(f"expected the end {certificate.end}, found {end}")


def walk(snapshot: Snapshot, plan: Plan) -> str:
    """Reserve all seats and then make the moves, with a check after each step; return the digest of the end. Raises CertificateError."""
    trial = Trial.of(snapshot)
    state, goal = trial.state, state_goal(trial.state, plan)
    _check_pods(trial, plan, goal)
    if goal is not None and not trial.reserve_place(goal, plan.nodes[0], [move.pod_uid for move in plan.moves]):
        raise CertificateError(f"the waiting pod does not fit on node {plan.nodes[0]} without the pods that move")
    seats = {move.pod_uid: replacement_of(state.pods[move.pod_uid]) for move in plan.moves}
    waiting = [] if goal is None else [goal.uid]
    for number, move in enumerate(plan.moves, 1):
        if not trial.reserve_seat(seats[move.pod_uid], move.to_node):
            raise CertificateError(f"move {number}: no seat for {move.pod} on node {move.to_node}")
        if dict(state.footprint_of(seat_uid(move.pod_uid))) != dict(move.seat):
            raise CertificateError(f"move {number}: {move.pod} has another seat on node {move.to_node} than the certificate says")
        _check_amounts(state, _nodes(plan), waiting, f"seat {number}")
    for number, move in enumerate(plan.moves, 1):
        state.drop_pod(move.pod_uid)
        _check_amounts(state, _nodes(plan), waiting, f"move {number}")
    _check_amounts(state, _nodes(plan), (), "the end")
    _check_goal(state, plan, goal)
    return _end(state, plan)


def state_goal(state: ClusterState, plan: Plan) -> PodFacts | None:
    """Return the waiting pod of a plan; None for whole nodes. Raises CertificateError."""
    if plan.goal.whole_nodes:
        return None
    pod = state.pods.get(plan.goal.pod_uid)
    if pod is None or pod.node_name or len(plan.nodes) != 1:
        raise CertificateError("expected a plan with one node for a pod that waits")
    return pod


def _check_pods(trial: Trial, plan: Plan, goal: PodFacts | None) -> None:
    """Check that each pod is where the plan says, and may move."""
    if len({move.pod_uid for move in plan.moves}) != len(plan.moves):
        raise CertificateError("a pod moves twice")
    if closed := [node for node in plan.nodes if goal is None and not trial.is_open(node)]:
        raise CertificateError(f"node {closed[0]} cannot count as whole: a taint closes it, or its GPU use is unknown")
    for number, move in enumerate(plan.moves, 1):
        if why := _refusal(trial, plan, goal, move):
            raise CertificateError(f"move {number}: {move.pod} {why}")


def _refusal(trial: Trial, plan: Plan, goal: PodFacts | None, move: Move) -> str:
    """Say why a plan must not have this move; empty if it may."""
    pod = trial.state.pods.get(move.pod_uid)
    if pod is None or pod.node_name != move.from_node or f"{pod.namespace}/{pod.name}" != move.pod:
        return f"does not run on node {move.from_node}"
    if why := trial.staying_because(pod, None if goal is None else goal.priority):
        return f"must not move: {why}"
    if goal is None and move.to_node in plan.nodes:
        return f"would move to node {move.to_node}, which is to be free"
    return ""


def _check_amounts(state: ClusterState, nodes: Collection[str], uncounted: Collection[str], step: str) -> None:
    """Check that no device of these nodes is promised beyond what it has."""
    with state.without_all(uncounted):
        for node in nodes:
            for device in state.device_states(node):
                left = device.capacity_bytes - device.used_memory_bytes, units.WHOLE_GPU_PERCENT - device.used_cores_percent
                if min(*left, device.max_shares - device.used_shares) < 0:
                    raise CertificateError(f"{step}: device {device.device.uuid} on node {node} would be over-given")


def _check_goal(state: ClusterState, plan: Plan, goal: PodFacts | None) -> None:
    if goal is not None:
        if dict(state.footprint_of(goal.uid)) != dict(plan.place):
            raise CertificateError(f"the waiting pod has another place on node {plan.nodes[0]} than the certificate says")
        return
    if len(set(plan.nodes)) != plan.goal.whole_nodes:
        raise CertificateError(f"expected {plan.goal.whole_nodes} whole nodes, found {len(set(plan.nodes))}")
    for node in plan.nodes:
        devices = state.device_states(node)
        if not devices or any(device.used_shares or device.used_instances for device in devices):
            raise CertificateError(f"node {node} is not free after the last move")


def _nodes(plan: Plan) -> list[str]:
    return sorted({*plan.nodes, *(move.from_node for move in plan.moves), *(move.to_node for move in plan.moves)})


def _end(state: ClusterState, plan: Plan) -> str:
    rows = [
        (node, device.device.uuid, device.used_memory_bytes, device.used_cores_percent, device.used_shares)
        for node in _nodes(plan)
        for device in state.device_states(node)
    ]
    return hashlib.blake2b(msgspec.json.encode(rows), digest_size=16).hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=16).hexdigest()
