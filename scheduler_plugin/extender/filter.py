# SPDX-License-Identifier: Apache-2.0
"""filter: the nodes that can take the pod. Pure, except for one soft reservation when a single node is left.

kube-scheduler calls speculatively: first with one node and then with all, or for groups that it takes apart afterwards, and bind may never
follow. So filter writes nothing, and two equal calls get equal replies.

It returns all feasible nodes if kube-scheduler has something to weigh among them besides our score (``core.cluster.soft``), and otherwise
the best one alone: the lists of names cost kube-scheduler ten times as much as the decision costs us. With one node it skips prioritize,
so filter makes the reservation.

Full ``Nodes`` may not exist: an autoscaler invents them. They are judged by their labels and allocatable amounts, without a reservation.
The cluster autoscaler calls no extender up to 1.36 (kubernetes/autoscaler#9786 would change that).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aliquot.placement.request import RequestError
from scheduler_plugin.core.backfill.hold import SENTENCE as HELD
from scheduler_plugin.core.cluster.decisions import Decision, GangDecision
from scheduler_plugin.core.cluster.gang import Gang
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import UNKNOWN_ROW
from scheduler_plugin.core.fit.judge import best_row, counts_of, curable, reasons_for
from scheduler_plugin.core.fit.shapes import Verdict
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.full_nodes import FullNode, judge_full, read_full
from scheduler_plugin.extender.gang import gang_or_error
from scheduler_plugin.extender.node_list import NodeList
from scheduler_plugin.extender.pod_query import PodQuery
from scheduler_plugin.extender.prioritize import keep_choice
from scheduler_plugin.settings import Answer

_SENTENCES: Final = {reason.value: reason.sentence for reason in NodeReason}
_FITS: Final = NodeReason.FITS.value


class _Judged(NamedTuple):
    """The nodes of a call, judged for its pod."""

    query: PodQuery
    nodes: NodeList
    verdict: Verdict
    reasons: npt.NDArray[np.int8]
    """The value of a NodeReason for each node of the call."""
    answer: Answer


def filter_nodes(context: ExtenderContext, args: wire.CallArgs, now: float, answer: Answer) -> bytes:
    """Reply to one filter call. Args: now: seconds since 1970. Raises WireError."""
    query, nodes = context.calls.pods.read(args.pod), context.calls.nodes.read(args.node_names)
    if nodes is None and args.nodes is None:
        nodes = context.calls.nodes.look_up(())
    if nodes is not None:
        return _filter_names(context, query, nodes, now, answer)
    full = read_full(args)
    match query.request:
        case None:
            return wire.filter_result(nodes=[raw for raw, _ in full])
        case RequestError() as error:
            return wire.filter_result(nodes=[], unresolvable={item.metadata.name: str(error) for _, item in full})
        case _:
            return _full_result(judge_full(context.state, context.verdicts, query, full))


def _filter_names(context: ExtenderContext, query: PodQuery, nodes: NodeList, now: float, answer: Answer) -> bytes:
    pod, request = query.pod, query.request
    context.groups.begin(pod)
    context.state.end_attempt(pod.uid)  # kube-scheduler filters a pod again only after its last attempt ended
    if request is None:
        return _filter_by_claims(context, query, nodes)
    if isinstance(request, RequestError):
        return _invalid(context, nodes, request)
    context.held_room.admit(pod, now)
    # Before the verdict: a seat's room becomes the pod's own. Members of a gang keep that room, and are placed with their gang.
    seat_row, held_row = context.seats.row_for(pod), context.workload_seats.row_for(pod, nodes.rows)
    gang = gang_or_error(pod)
    if gang is None and seat_row is None and held_row is None and _keeps_room(context, query, nodes):
        context.log.record(Decision(pod, request, now, context.state.columns.change_count, 1, {}), nodes)
        return wire.filter_result(node_names=msgspec.Raw(nodes.text))
    verdict = context.verdicts.of(pod, query.shape)
    reasons = reasons_for(verdict, nodes.rows, all_known=not nodes.unknown_nodes)
    context.groups.note_result(pod, fits=bool((reasons == _FITS).any()))
    # The outcome of a binding there is still open, or it has a seat there: from consolidation, or because Kueue admitted its workload.
    rows = (context.reservations.binding_row(pod), seat_row, held_row if gang is None else None)
    row = next((row for row in rows if row is not None), None)
    if row is not None and row in nodes.rows[reasons == _FITS]:
        return wire.filter_result(node_names=[context.state.names[row]])
    if isinstance(gang, RequestError):
        return _invalid(context, nodes, gang)
    judged = _Judged(query, nodes, verdict, reasons, answer)
    decision = Decision(pod, request, now, context.state.columns.change_count, 0, {})
    return _feasible(context, judged, decision) if gang is None else _filter_member(context, judged, decision, gang)


def _keeps_room(context: ExtenderContext, query: PodQuery, nodes: NodeList) -> bool:
    """Whether the call is about one node, where the pod has room: kube-scheduler tries the node that was nominated for it."""
    if len(nodes.rows) != 1 or (row := int(nodes.rows[0])) == UNKNOWN_ROW:
        return False
    if not context.reservations.keep(query.pod, context.state.names[row]):
        return False
    context.verdicts.note_call(query.pod, query.shape)
    context.groups.note_result(query.pod, fits=True)
    return True


def _filter_by_claims(context: ExtenderContext, query: PodQuery, nodes: NodeList) -> bytes:
    """Reply for a pod without vGPUs: all nodes, except those where its ResourceClaims do not fit.

    kube-scheduler weighs alternatives of claims itself, so it gets all nodes that fit. A node without an inventory is left to it.
    """
    verdict = context.claims.verdict(query.pod)
    if verdict is None:
        return wire.filter_result(node_names=msgspec.Raw(nodes.text))
    reasons = reasons_for(verdict, nodes.rows, all_known=not nodes.unknown_nodes)
    fits = (reasons == _FITS) | (nodes.rows == UNKNOWN_ROW)
    names_of, fitting, failed = context.calls.nodes.names_of, np.flatnonzero(fits), np.flatnonzero(~fits)
    context.claims.note_outcome(query.pod, nodes.rows, fits=bool(len(fitting)))
    if len(fitting) == 1 and (row := int(nodes.rows[fitting[0]])) != UNKNOWN_ROW:
        context.claims.assume(query.pod, row)  # kube-scheduler skips prioritize
    sentences = [_SENTENCES[reason] for reason in reasons[failed].tolist()]
    unresolvable = dict(zip(names_of(nodes, failed), sentences, strict=True))  # kube-scheduler ends no pods for claims
    return wire.filter_result(node_names=names_of(nodes, fitting), unresolvable=unresolvable)


def _filter_member(context: ExtenderContext, judged: _Judged, decision: Decision, gang: Gang) -> bytes:
    """Reply for a member of a gang: the node planned for it, all feasible nodes if it need not wait, or a refusal."""
    pod, nodes, names_of = decision.pod, judged.nodes, context.calls.nodes.names_of
    offered, fitting = frozenset(names_of(nodes)), frozenset(names_of(nodes, np.flatnonzero(judged.reasons == _FITS)))
    turn = GangDecision(context.gangs.standing_for(pod, gang, offered), context.state.moment())
    node = context.gangs.place(pod, gang, offered, fitting, turn.standing)
    decision = replace(decision, generation=context.state.columns.change_count)  # the plan changed the state
    if node is None and fitting:
        return _gang_refusal(context, nodes, gang, turn, decision)
    if node:
        context.log.record(replace(decision, fitting=1), nodes, replace(turn, node=node))
        return wire.filter_result(node_names=[node])
    hopeless = frozenset[str]()
    if node is None:
        hopeless = context.gangs.unresolvable_nodes(pod, gang, names_of(nodes, np.flatnonzero(judged.reasons)))
    return _feasible(context, judged, decision, turn, hopeless)


def _feasible(
    context: ExtenderContext, judged: _Judged, decision: Decision, turn: GangDecision | None = None, hopeless: frozenset[str] = frozenset()
) -> bytes:
    """Return the best node alone, or all feasible nodes and why the others failed.

    Args: hopeless: names of nodes where ending pods does not help.
    """
    nodes, verdict, reasons = judged.nodes, judged.verdict, judged.reasons
    failed = np.flatnonzero(reasons)
    if len(failed) < len(reasons) - 1 and judged.answer is Answer.ONE and not _weighs(context, judged):
        context.log.record(replace(decision, fitting=len(reasons) - len(failed), failed=counts_of(reasons[failed])), nodes, turn)
        return _best(context, judged)
    feasible = nodes if not len(failed) else context.calls.nodes.select(nodes, np.flatnonzero(reasons == _FITS))
    resolvable: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    names, cures = context.calls.nodes.names_of(nodes, failed), curable(verdict, nodes.rows[failed]).tolist()
    held = context.held_room.kept_from(decision.pod, judged.query.shape) if len(failed) == len(reasons) else frozenset()
    for name, reason, is_curable in zip(names, reasons[failed].tolist(), cures, strict=True):
        if name in held:
            unresolvable[name] = HELD
        else:
            (resolvable if is_curable and name not in hopeless else unresolvable)[name] = _SENTENCES[reason]
    context.log.record(replace(decision, fitting=len(feasible.rows), failed=counts_of(reasons[failed])), nodes, turn)
    if len(feasible.rows) == 1:
        context.reservations.make(decision.pod, decision.request, verdict, int(feasible.rows[0]))
    return wire.filter_result(node_names=msgspec.Raw(feasible.text), failed=resolvable, unresolvable=unresolvable)


def _weighs(context: ExtenderContext, judged: _Judged) -> bool:
    """Whether kube-scheduler weighs something else than our score among the nodes that fit."""
    pod, soft = judged.query.pod, context.state.soft
    if pod.prefers or soft.concern(pod):
        return True
    return bool(soft.tainted) and not soft.tainted.isdisjoint(
        context.calls.nodes.names_of(judged.nodes, np.flatnonzero(judged.reasons == _FITS))
    )


def _best(context: ExtenderContext, judged: _Judged) -> bytes:
    """Return the best node alone. kube-scheduler reads why others failed only if no node fits."""
    fitting = judged.nodes.rows[judged.reasons == _FITS]
    winner = best_row(context.verdicts.shapes, judged.verdict, fitting, judged.query.pod.uid)
    keep_choice(context, judged.query, judged.nodes, judged.verdict, winner)
    return wire.filter_result(node_names=[context.state.names[winner]])


def _invalid(context: ExtenderContext, nodes: NodeList, error: RequestError) -> bytes:
    """Refuse all nodes to a pod with an invalid GPU request or gang annotation."""
    context.log.on_invalid()
    return wire.filter_result(node_names=[], unresolvable=dict.fromkeys(context.calls.nodes.names_of(nodes), str(error)))


def _gang_refusal(context: ExtenderContext, nodes: NodeList, gang: Gang, turn: GangDecision, decision: Decision) -> bytes:
    """Refuse all nodes because the gang cannot start. Ending other pods can help if the gang lacks only room (``preempt``)."""
    pod = decision.pod
    turn = replace(turn, refusal=context.gangs.sentence(pod, gang))
    context.log.record(decision, nodes, turn)
    names = context.calls.nodes.names_of(nodes)
    hopeless = context.gangs.unresolvable_nodes(pod, gang, names)
    resolvable = dict.fromkeys((name for name in names if name not in hopeless), turn.refusal)
    return wire.filter_result(node_names=[], failed=resolvable, unresolvable=dict.fromkeys(hopeless, turn.refusal))


def _full_result(judged: Sequence[FullNode]) -> bytes:
    kept: list[msgspec.Raw] = []
    failed: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    for node in judged:
        if node.reason is NodeReason.FITS:
            kept.append(node.raw)
        else:
            (failed if node.curable else unresolvable)[node.name] = node.reason.sentence
    return wire.filter_result(nodes=kept, failed=failed, unresolvable=unresolvable)
