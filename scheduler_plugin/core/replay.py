"""Decides again what was decided: the state as it was, made from its history, judged by the very code that judged it first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import msgspec
import numpy as np

from placement.demand import Demand
from placement.request import RequestError, pod_request
from scheduler_plugin.core.decisions import Record
from scheduler_plugin.core.gang import Standing, gang_of_pod
from scheduler_plugin.core.gang_plan import Planner
from scheduler_plugin.core.journal import VERSION, Event, Rules, Snapshot, snapshot_of
from scheduler_plugin.core.judge import best_row, counts_of, reasons_for
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.shapes import PodShape, Shapes
from scheduler_plugin.core.state import ClusterState, Reservation, Stage

_Document = TypeVar("_Document", Snapshot, "Recorded")


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was said about a pod."""

    fitting: int
    failed: Mapping[str, int]
    """Nodes by the label of their reason."""
    chosen: str = ""
    score: int = 0
    refusal: str = ""
    """Why the pod's gang could not start."""


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision as a document: what was asked, the state it was asked of, and the answer."""

    snapshot: Snapshot
    pod: PodFacts
    asked: list[str]
    answer: Answer
    rated: Snapshot | None = None
    """The state that prioritize saw, when it was another."""
    gang: Standing | None = None
    """How far its gang was, for a member of one."""
    prioritized: list[str] | None = None
    """The nodes that prioritize was asked about; None where these are those of filter, or the record does not tell."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The answer of today's code."""

    answer: Answer
    differences: tuple[str, ...]
    """What is not as it was recorded; none when the decision is the same."""


class SnapshotError(ValueError):
    """A document is no snapshot or recorded decision of this version."""


def recorded(record: Record, rules: Rules) -> Recorded:
    """Write down a decision; cheap, because the rows of the state are shared."""
    decision, choice = record.decision, record.choice
    snapshot = snapshot_of(record.moment, rules, decision.at, decision.generation)
    failed = {reason.label: count for reason, count in decision.failed.items()}
    asked = record.asked
    if NodeReason.NO_GPU.label in failed and (strange := decision.fitting + sum(decision.failed.values()) - len(asked)):
        failed[NodeReason.NO_GPU.label] -= strange  # nodes without an inventory are not asked about again
    failed = {label: count for label, count in failed.items() if count}
    if (turn := record.gang) is not None and (turn.node or turn.refusal):
        answer = Answer(decision.fitting, {}, turn.node, refusal=turn.refusal)
        return Recorded(snapshot, decision.pod, asked, answer, gang=turn.standing)
    standing = None if turn is None else turn.standing
    if choice is None:
        return Recorded(snapshot, decision.pod, asked, Answer(decision.fitting, failed), gang=standing)
    answer = Answer(decision.fitting, failed, choice.node, choice.score)
    rated = None if choice.moment == record.moment else snapshot_of(choice.moment, rules, decision.at)
    prioritized = None if choice.rows is record.rows else choice.asked
    return Recorded(snapshot, decision.pod, asked, answer, rated, standing, prioritized)


def restore(snapshot: Snapshot) -> ClusterState:
    """Make the state of a snapshot. Raises SnapshotError."""
    if snapshot.version != VERSION:
        raise SnapshotError(f"expected a snapshot of version {VERSION}, found {snapshot.version}: use aliquot of the scheduler's version")
    state, picture = ClusterState(), snapshot.picture
    state.replace_gpu_nodes(picture.nodes.values())
    state.replace_hosts(picture.hosts)
    state.replace_pods(picture.pods.values())
    for held in picture.held.values():
        _apply(state, Event(held=held))
    for event in snapshot.events:
        _apply(state, event)
    state.wanted.take()
    state.columns.set_demand(Demand(snapshot.shapes))
    return state


def replay(document: Recorded) -> Replayed:
    """Decide again. Raises SnapshotError."""
    first = _answer(document.snapshot, document, document.asked, document.gang)
    if (document.rated is not None or document.prioritized is not None) and first.chosen and first.score:
        rated = _answer(document.rated or document.snapshot, document, document.prioritized or document.asked, None)
        first = Answer(first.fitting, first.failed, rated.chosen, rated.score)
    if not document.answer.chosen and first.score:
        first = Answer(first.fitting, first.failed)
    pairs = zip(Answer.__struct_fields__, msgspec.structs.astuple(document.answer), msgspec.structs.astuple(first), strict=True)
    return Replayed(first, tuple(f"{name}: recorded {was}, now {now}" for name, was, now in pairs if was != now))


def read_document(data: bytes, form: type[_Document]) -> _Document:
    """Read a document. Raises SnapshotError."""
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
        verdict = shapes.verdict(PodShape.of(request, snapshot.rules.default_policy, HostDemand(pod.cpu_milli, pod.memory_mib)))
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
    """Plan a member with its gang; None when it need not wait for others, or fits nowhere itself."""
    gang = gang_of_pod(pod)
    if gang is None:
        raise SnapshotError("expected a member of a gang, as the decision says it was one")
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
        if event.host.cpu_milli is None or event.host.ram_mib is None:
            state.drop_host(event.host.name)
        else:
            state.set_host(event.host.name, event.host.cpu_milli, event.host.ram_mib)
    elif event.pod is not None:
        state.set_pod(event.pod)
    elif event.pod_gone is not None:
        state.drop_pod(event.pod_gone)
    elif event.held is not None:
        held = event.held
        stage = Stage.BINDING if held.firm else Stage.READY if held.ready else Stage.SOFT
        state.reserve(Reservation(held.pod_uid, held.node, held.footprint, held.demand, stage))
    elif event.let_go is not None:
        state.release(event.let_go)
