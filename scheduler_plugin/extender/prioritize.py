# SPDX-License-Identifier: Apache-2.0
"""prioritize: rates each node for the pod from 0 to MAX_SCORE. A node's score does not depend on the other nodes of the call.

If several nodes have the best score, one of them gets an extra point. A hash of pod and node chooses it, so the decision can be replayed;
kube-scheduler would choose at random. The pod then gets a soft reservation on that node, so that the next pod does not count on the same
devices while this pod's binding is on its way. If kube-scheduler chooses another node for its own reasons, bind moves the reservation.

A pod without GPUs takes CPU and RAM that GPU pods may need. A node with GPUs is rated by that cost. All other nodes get the best score, so
kube-scheduler's own preferences decide among them.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.objects import NodeObject
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.fit.judge import best_row, reasons_for
from scheduler_plugin.core.fit.shapes import MAX_SCORE, Verdict
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.full_nodes import FullNode, judge_full, read_full
from scheduler_plugin.extender.node_list import NodeList
from scheduler_plugin.extender.pod_query import PodQuery


def prioritize_nodes(context: ExtenderContext, body: bytes) -> bytes:
    """Reply to one prioritize call; the nodes come in any order, each once. Raises WireError."""
    args = wire.decode_args(body)
    query, nodes = context.calls.pods.read(args.pod), context.calls.nodes.read(args.node_names)
    if nodes is None:
        return _prioritize_full(context, query, read_full(args))
    names_of = context.calls.nodes.names_of
    if isinstance(query.request, RequestError):
        return _all_zero(names_of(nodes))
    if query.request is None and (query.pod.claims or query.pod.extended) and (judged := context.claims.verdict(query.pod)) is not None:
        return _prioritize_by_claims(context, query, nodes, judged)
    verdict = context.verdicts.of(query.pod, query.shape)
    fits = reasons_for(verdict, nodes.rows, all_known=not nodes.unknown_nodes) == NodeReason.FITS.value
    if not fits.any():
        return _all_zero(names_of(nodes))
    fitting, others = (nodes.rows, ()) if fits.all() else (nodes.rows[fits], names_of(nodes, np.flatnonzero(~fits)))
    winner = best_row(context.verdicts.shapes, verdict, fitting, query.pod.uid)
    shown = np.zeros(len(verdict.score), dtype=np.bool_)
    shown[fitting] = True
    rest = [wire.entry(name, 0 if query.request is not None else MAX_SCORE) for name in others]
    wins = query.request is not None or not rest
    reply = context.calls.scores.of(query.shape, verdict).answer(shown, winner, int(verdict.score[winner]) + wins, rest)
    if wins:
        keep_choice(context, query, nodes, verdict, winner)
    return reply


def _prioritize_by_claims(context: ExtenderContext, query: PodQuery, nodes: NodeList, verdict: Verdict) -> bytes:
    """Rate each node by the devices that the pod's ResourceClaims will get there, and expect the pod on the best one."""
    fits = reasons_for(verdict, nodes.rows, all_known=not nodes.unknown_nodes) == NodeReason.FITS.value
    names = context.calls.nodes.names_of(nodes)
    if not fits.any():
        return _all_zero(names)
    winner = best_row(context.verdicts.shapes, verdict, nodes.rows[fits], query.pod.uid)
    scores = np.where(fits, verdict.score[nodes.rows] + (nodes.rows == winner), 0)
    context.claims.assume(query.pod, winner)
    return b"[" + b",".join([wire.entry(name, score) for name, score in zip(names, scores.tolist(), strict=True)]) + b"]"


def keep_choice(context: ExtenderContext, query: PodQuery, nodes: NodeList, verdict: Verdict, winner: int) -> None:
    """Note the best node of a call, and reserve the pod's room there. Args: winner: its row."""
    context.log.note_choice(query.pod.uid, nodes, winner, int(verdict.score[winner]) + 1)
    request = query.shape.request if query.request is None else query.request
    if not isinstance(request, RequestError):
        context.reservations.make(query.pod, request, verdict, winner)


def _prioritize_full(context: ExtenderContext, query: PodQuery, full: Sequence[tuple[msgspec.Raw, NodeObject]]) -> bytes:
    """Rate full nodes, as filter judges them. Among equal ones a node that exists comes first. There is no reservation."""
    if isinstance(query.request, RequestError):
        return _all_zero([item.metadata.name for _, item in full])
    judged = judge_full(context.state, context.verdicts, query, full)
    fitting = [node for node in judged if node.reason is NodeReason.FITS]
    if not fitting:
        return _all_zero([node.name for node in judged])
    asks_gpu = query.request is not None
    unfit_score = 0 if asks_gpu else MAX_SCORE
    wins = asks_gpu or len(fitting) == len(judged)
    winner = max(fitting, key=lambda node: (node.score, node.exists, _tie_break(query.pod.uid, node.name)))
    return b"[" + b",".join([_full_entry(node, unfit_score, is_winner=wins and node is winner) for node in judged]) + b"]"


def _full_entry(node: FullNode, unfit_score: int, *, is_winner: bool) -> bytes:
    return wire.entry(node.name, (node.score if node.reason is NodeReason.FITS else unfit_score) + is_winner)


def _tie_break(pod_uid: str, node: str) -> bytes:
    """Return a value that orders equal nodes for a pod, the same in each call."""
    return hashlib.blake2b(f"{pod_uid}/{node}".encode(errors="surrogatepass"), digest_size=8).digest()


def _all_zero(names: Sequence[str]) -> bytes:
    return b"[" + b",".join([wire.entry(name, 0) for name in names]) + b"]"
