"""filter: which nodes can take the pod. Pure but for one soft reservation, made when a single node is left.

kube-scheduler asks speculatively: with one node first and then with all, for groups it then takes apart, never followed by bind. So
nothing is written anywhere, and asking twice answers twice the same. All feasible nodes are returned, because the scheduler's other
preferences choose among them too. With one feasible node kube-scheduler skips prioritize, so the pod is expected there from here.

Full ``Nodes`` come from the cluster autoscaler, which asks about nodes that do not exist: those are judged by what their labels and
allocatable promise, and nothing is reserved.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from placement.request import RequestError
from proto.model import PodRequest
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import UNKNOWN_ROW, ClusterState
from scheduler_plugin.core.template import template_node
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Asked, Desk, Named

_REASONS: Final = {reason.value: reason for reason in NodeReason}


def filter_nodes(desk: Desk, body: bytes, now: float) -> bytes:
    """Answer one filter call. Raises WireError."""
    args = wire.decode(body, wire.ExtenderArgs)
    asked, named = desk.asked(args.pod), desk.named(args.node_names)
    if named is None and args.nodes is None:
        named = desk.look_up([], msgspec.Raw(b"[]"))
    if named is not None:
        return _filter_names(desk, asked, named, now)
    full = (args.nodes.items if args.nodes is not None else None) or []
    wire.check_count(len(full))
    names = [wire.decode_node(raw).metadata.name for raw in full]
    match asked.request:
        case None:
            return wire.filter_result(nodes=full)
        case RequestError() as error:
            return wire.filter_result(nodes=[], unresolvable=dict.fromkeys(names, str(error)))
        case request:
            return _filter_full(desk, asked.pod, request, full, names)


def _filter_names(desk: Desk, asked: Asked, named: Named, now: float) -> bytes:
    pod, request = asked.pod, asked.request
    if request is None:
        return wire.filter_result(node_names=named.text)
    if isinstance(request, RequestError):
        return wire.filter_result(node_names=[], unresolvable=dict.fromkeys(named.names, str(request)))
    verdict = desk.verdict_for(pod, request)
    if not len(verdict.reason):
        return wire.filter_result(node_names=[], unresolvable=dict.fromkeys(named.names, NodeReason.NO_GPU.sentence))
    reasons = np.where(named.rows == UNKNOWN_ROW, NodeReason.NO_GPU.value, verdict.reason[named.rows])
    failed = np.flatnonzero(reasons)
    feasible = named if not len(failed) else desk.keep_names(named, np.flatnonzero(reasons == NodeReason.FITS.value))
    curable: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    helps = (verdict.curable[named.rows[failed]] & (named.rows[failed] != UNKNOWN_ROW)).tolist()
    for position, reason, is_curable in zip(failed.tolist(), reasons[failed].tolist(), helps, strict=True):
        (curable if is_curable else unresolvable)[named.names[position]] = _REASONS[reason].sentence
    if len(feasible.names) == 1:
        desk.expect(pod, request, feasible.names[0])
    counts = {_REASONS[value]: count for value, count in Counter(reasons[failed].tolist()).items()}
    desk.record(Decision(pod, request, now, desk.state.columns.change_count, len(feasible.names), counts))
    return wire.filter_result(node_names=feasible.text, failed=curable, unresolvable=unresolvable)


def _filter_full(desk: Desk, pod: PodFacts, request: PodRequest, full: Sequence[msgspec.Raw], names: Sequence[str]) -> bytes:
    """Judge nodes that may exist only in a simulation, in a state of their own."""
    imagined = ClusterState()
    for raw, name in zip(full, names, strict=True):
        if desk.state.row_of(name) is None and (node := template_node(wire.decode_node(raw))) is not None:
            imagined.set_gpu_node(node)
    on_real = desk.verdict_for(pod, request)
    on_imagined = Shapes(imagined, desk.shapes.weights).verdict(desk.shape_of(pod, request))
    kept: list[msgspec.Raw] = []
    failed: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    for raw, name in zip(full, names, strict=True):
        state, verdict = (desk.state, on_real) if desk.state.row_of(name) is not None else (imagined, on_imagined)
        row = state.row_of(name)
        reason = NodeReason.NO_GPU if row is None else _REASONS[int(verdict.reason[row])]
        if reason is NodeReason.FITS:
            kept.append(raw)
        else:
            (failed if row is not None and verdict.curable[row] else unresolvable)[name] = reason.sentence
    return wire.filter_result(nodes=kept, failed=failed, unresolvable=unresolvable)
