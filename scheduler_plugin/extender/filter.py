"""filter: which nodes can take the pod. Pure but for one soft reservation, made when a single node is left.

kube-scheduler asks speculatively: with one node first and then with all, for groups it then takes apart, never followed by bind. So
nothing is written anywhere, and asking twice answers twice the same. All feasible nodes are returned, because the scheduler's other
preferences choose among them too. With one feasible node kube-scheduler skips prioritize, so the pod is expected there from here.

Full ``Nodes`` may be nodes that do not exist, as an autoscaler imagines them: those are judged by what their labels and allocatable
promise, and nothing is reserved. The cluster autoscaler asks no extender up to 1.36 (kubernetes/autoscaler#9786 would have it ask).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from placement.request import RequestError
from proto.model import PodRequest
from scheduler_plugin.core.decisions import Decision, GangTurn
from scheduler_plugin.core.gang import Gang
from scheduler_plugin.core.judge import counts_of, curable, reasons_for
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Asked, Desk, Named
from scheduler_plugin.extender.full_nodes import FullNode, judge_full, read_full
from scheduler_plugin.extender.gang import gang_asked

_SENTENCES: Final = {reason.value: reason.sentence for reason in NodeReason}


def filter_nodes(desk: Desk, body: bytes, now: float) -> bytes:
    """Answer one filter call. Raises WireError."""
    args = wire.decode_args(body)
    asked, named = desk.asked(args.pod), desk.named(args.node_names)
    if named is None and args.nodes is None:
        named = desk.look_up(())
    if named is not None:
        return _filter_names(desk, asked, named, now)
    full = read_full(args)
    match asked.request:
        case None:
            return wire.filter_result(nodes=[raw for raw, _ in full])
        case RequestError() as error:
            return wire.filter_result(nodes=[], unresolvable={item.metadata.name: str(error) for _, item in full})
        case _:
            return _full_result(judge_full(desk, asked, full))


def _filter_names(desk: Desk, asked: Asked, named: Named, now: float) -> bytes:
    pod, request = asked.pod, asked.request
    desk.state.end_attempt(pod.uid)  # kube-scheduler asks about a pod again only when its last attempt is over
    if request is None:
        return wire.filter_result(node_names=msgspec.Raw(named.text))
    if isinstance(request, RequestError):
        return _invalid(desk, named, request)
    verdict = desk.verdict_for(pod, asked.shape)
    reasons = reasons_for(verdict, named.rows, all_known=not named.strange)
    if (row := desk.binding_row(pod)) is not None and row in named.rows[reasons == NodeReason.FITS.value]:
        return wire.filter_result(node_names=[desk.state.names[row]])  # what becomes of its binding there is not known yet
    gang = gang_asked(pod)
    if isinstance(gang, RequestError):
        return _invalid(desk, named, gang)
    turn = node = None
    if gang is not None:
        offered = frozenset(desk.names_of(named))
        fitting = frozenset(desk.names_of(named, np.flatnonzero(reasons == NodeReason.FITS.value)))
        turn = GangTurn(desk.gangs.standing_for(pod, gang, offered), desk.state.moment())
        node = desk.gangs.place(pod, gang, offered, fitting, turn.standing)
        if node is None and fitting:
            return _gang_refusal(desk, pod, request, named, gang, turn, now)
        if node:
            turn = replace(turn, node=node)
            desk.record(Decision(pod, request, now, desk.state.columns.change_count, 1, {}), named, turn)
            return wire.filter_result(node_names=[node])
    failed = np.flatnonzero(reasons)
    feasible = named if not len(failed) else desk.keep_names(named, np.flatnonzero(reasons == NodeReason.FITS.value))
    resolvable: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    names, cures = desk.names_of(named, failed), curable(verdict, named.rows[failed]).tolist()
    hopeless = desk.gangs.beyond_help(pod, gang, names) if gang is not None and node is None else frozenset[str]()
    for name, reason, is_curable in zip(names, reasons[failed].tolist(), cures, strict=True):
        (resolvable if is_curable and name not in hopeless else unresolvable)[name] = _SENTENCES[reason]
    desk.record(Decision(pod, request, now, desk.state.columns.change_count, len(feasible.rows), counts_of(reasons[failed])), named, turn)
    if len(feasible.rows) == 1:
        desk.expect(pod, request, verdict, int(feasible.rows[0]))
    return wire.filter_result(node_names=msgspec.Raw(feasible.text), failed=resolvable, unresolvable=unresolvable)


def _invalid(desk: Desk, named: Named, error: RequestError) -> bytes:
    """Refuse all nodes to a pod whose request or gang annotation cannot be honoured on any."""
    desk.on_invalid()
    return wire.filter_result(node_names=[], unresolvable=dict.fromkeys(desk.names_of(named), str(error)))


def _gang_refusal(desk: Desk, pod: PodFacts, request: PodRequest, named: Named, gang: Gang, turn: GangTurn, now: float) -> bytes:
    """Refuse all nodes for the sake of the gang. Other pods' end can help where the gang lacks nothing but room (``preempt``)."""
    turn = replace(turn, refusal=desk.gangs.sentence(pod, gang))
    desk.record(Decision(pod, request, now, desk.state.columns.change_count, 0, {}), named, turn)
    names = desk.names_of(named)
    hopeless = desk.gangs.beyond_help(pod, gang, names)
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
