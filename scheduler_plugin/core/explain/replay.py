# SPDX-License-Identifier: Apache-2.0
"""Repeats a decision: rebuilds the state from its history and decides with the same code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import msgspec
import numpy as np

from aliquot.placement.demand import Demand
from aliquot.placement.request import RequestError, pod_request
from scheduler_plugin.core.cluster.decisions import Record
from scheduler_plugin.core.cluster.gang import Standing, gang_of_pod
from scheduler_plugin.core.cluster.journal import VERSION, Event, Held, Host, Rules, Snapshot, snapshot_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.fit.judge import best_row, counts_of, reasons_for
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.score.cost import HostDemand

_Document = TypeVar("_Document", Snapshot, "Recorded")


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decision on a pod."""

    fitting: int
    failed: Mapping[str, int]
    """Number of nodes by the label of their reason."""
    chosen: str = ""
    score: int = 0
    refusal: str = ""
    """Why the pod's gang could not start."""


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision as a document: the call, the state at that time, and the answer."""

    snapshot: Snapshot
    pod: PodFacts
    asked: list[str]
    answer: Answer
    rated: Snapshot | None = None
    """The state at the call of prioritize, if it was another."""
    gang: Standing | None = None
    """The state of the pod's gang; None for a pod without one."""
    prioritized: list[str] | None = None
    """The nodes of the call of prioritize; None if they are those of filter, or in an older record."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The answer of the present code."""

    answer: Answer
    differences: tuple[str, ...]
    """The differences from the record; empty if the decision is the same."""


class SnapshotError(ValueError):
    """A document is not a snapshot or recorded decision of this version."""


def recorded(record: Record, rules: Rules) -> Recorded:
    """Return a decision as a document; cheap, because the entries of the state are shared."""
    decision, choice, of_gang = record.decision, record.choice, record.gang
    snapshot = snapshot_of(record.moment, rules, decision.at, decision.generation)
    asked, failed = record.asked, _failed(record)
    if of_gang is not None and (of_gang.node or of_gang.refusal):
        answer = Answer(decision.fitting, {}, of_gang.node, refusal=of_gang.refusal)
        return Recorded(snapshot, decision.pod, asked, answer, gang=of_gang.standing)
    standing = None if of_gang is None else of_gang.standing
    if choice is None:
        return Recorded(snapshot, decision.pod, asked, Answer(decision.fitting, failed), gang=standing)
    answer = Answer(decision.fitting, failed, choice.node, choice.score)
    rated = None if choice.moment == record.moment else snapshot_of(choice.moment, rules, decision.at)
    prioritized = None if choice.rows is record.rows else choice.asked
    return Recorded(snapshot, decision.pod, asked, answer, rated, standing, prioritized)


def _failed(record: Record) -> dict[str, int]:
    """Return the number of nodes of each reason, without those that have no inventory: the document does not name these."""
    decision = record.decision
    failed = {reason.label: count for reason, count in decision.failed.items()}
    if NodeReason.NO_GPU.label in failed:
        failed[NodeReason.NO_GPU.label] -= decision.fitting + sum(decision.failed.values()) - len(record.asked)
    return {label: count for label, count in failed.items() if count}


def restore(snapshot: Snapshot) -> ClusterState:
    """Rebuild the state of a snapshot. Raises SnapshotError."""
    if snapshot.version != VERSION:
        raise SnapshotError(f"expected a snapshot of version {VERSION}, found {snapshot.version}: use aliquot of the scheduler's version")
    state, picture = ClusterState(), snapshot.picture
    state.utilizations.weigh(snapshot.rules.weights)
    state.replace_gpu_nodes(picture.nodes.values())
    state.replace_hosts(picture.hosts)
    for name, labels in picture.places.items():
        state.set_place(name, labels)
    state.replace_pods(picture.pods.values())
    for held in picture.held.values():
        _apply(state, Event(held=held))
    for uid, holds in picture.passes.items():
        state.let_pass(uid, holds)
    for event in snapshot.events:
        _apply(state, event)
    for node in snapshot.closed_nodes:
        state.set_closed(node, closed=True)
    state.read_utilization()
    state.wanted.take()
    state.columns.set_demand(Demand(snapshot.shapes))
    return state


def replay(document: Recorded) -> Replayed:
    """Repeat the decision. Raises SnapshotError."""
    first = _answer(document.snapshot, document, document.asked, document.gang)
    # prioritize may have seen another state or other nodes than filter: node and score come from what it saw.
    if (document.rated is not None or document.prioritized is not None) and first.chosen and first.score:
        rated = _answer(document.rated or document.snapshot, document, document.prioritized or document.asked, None)
        first = Answer(first.fitting, first.failed, rated.chosen, rated.score)
    if not document.answer.chosen and first.score:
        first = Answer(first.fitting, first.failed)
    pairs = zip(Answer.__struct_fields__, msgspec.structs.astuple(document.answer), msgspec.structs.astuple(first), strict=True)
    return Replayed(first, tuple(f"{name}: recorded {was}, now {now}" for name, was, now in pairs if was != now))


def read_document(data: bytes, form: type[_Document]) -> _Document:
    """Decode a document. Raises SnapshotError."""
    try:
        return msgspec.json.decode(data, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise SnapshotError(f"expected a {form.__name__.lower()} document: {exc}") from exc


def _answer(snapshot: Snapshot, document: Recorded, asked: Sequence[str], standing: Standing | None) -> Answer:
    state, pod = restore(snapshot), document.pod
    if pod.gpu is None:
        raise SnapshotError("expected a decision on a pod that asks for GPUs")
    try:
        request = pod_request(pod.gpu)
    except RequestError as exc:
        raise SnapshotError(f"expected a pod that can be placed: {exc}") from exc
    shapes = Shapes(state, snapshot.rules.weights)
    with state.without(pod.uid):
        demand, used = HostDemand(pod.cpu_milli, pod.memory_mib), state.utilizations.of(pod)
        verdict = shapes.verdict(PodShape.of(request, snapshot.rules.default_policy, demand, used))
    rows = rows_of(state, asked)
    reasons = reasons_for(verdict, rows)
    fitting = rows[reasons == NodeReason.FITS.value]
    if standing is not None:
        planner = Planner(state, shapes, snapshot.rules.default_policy)
        together = _with_its_gang(planner, pod, standing, asked, [state.names[row] for row in fitting.tolist()])
        if together is not None:
            return together
    failed = {reason.label: count for reason, count in counts_of(reasons).items()}
    if not len(fitting):
        return Answer(0, failed)
    row = best_row(shapes, verdict, fitting, pod.uid)
    return Answer(len(fitting), failed, state.names[row], int(verdict.score[row]) + 1)


def _with_its_gang(planner: Planner, pod: PodFacts, standing: Standing, offered: Sequence[str], fitting: Sequence[str]) -> Answer | None:
    """Plan a member with its gang; None if it need not wait for others, or fits nowhere itself."""
    gang = gang_of_pod(pod)
    if gang is None:
        raise SnapshotError("the recorded decision has a gang, but its pod has no gang annotations")
    node = planner.place(pod, gang, frozenset(offered), fitting, standing, inf)
    if node is None and fitting:
        return Answer(0, {}, refusal=planner.sentence(pod, gang, standing))
    return Answer(1, {}, node) if node else None


def rows_of(state: ClusterState, names: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Look up the rows of names."""
    return np.fromiter(map(state.rows_by_name.__getitem__, names), dtype=np.int64, count=len(names))


def _apply(state: ClusterState, event: Event) -> None:
    if event.node is not None:
        state.set_gpu_node(event.node)
    elif event.node_gone is not None:
        state.drop_gpu_node(event.node_gone)
    elif event.host is not None:
        _apply_host(state, event.host)
    elif event.place is not None:
        state.set_place(event.place.name, event.place.labels)
    else:
        _apply_pod(state, event)


def _apply_pod(state: ClusterState, event: Event) -> None:
    """Apply a change of a pod or a reservation."""
    if event.pod is not None:
        state.set_pod(event.pod)
    elif event.pod_gone is not None:
        state.drop_pod(event.pod_gone)
    elif event.held is not None:
        _apply_held(state, event.held)
    elif event.let_go is not None:
        state.release(event.let_go)
    elif event.let_pass is not None:
        state.let_pass(event.let_pass.pod_uid, event.let_pass.holds)


def _apply_host(state: ClusterState, host: Host) -> None:
    if host.cpu_milli is None or host.ram_mib is None:
        state.drop_host(host.name)
    else:
        state.set_host(host.name, host.cpu_milli, host.ram_mib)


def _apply_held(state: ClusterState, held: Held) -> None:
    stage = Stage.BINDING if held.firm else Stage.READY if held.ready else Stage.SOFT
    state.reserve(Reservation(held.pod_uid, held.node, held.footprint, held.demand, stage))
