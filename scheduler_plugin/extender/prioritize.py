"""prioritize: how good each node is for the pod, 0 to MAX_SCORE, the same for the same node whatever the others are.

Of several nodes with the best score one gets a point more, chosen by a hash of pod and node, because kube-scheduler would draw lots: a
decision can be replayed. The pod is then expected on that node, softly, so that the next pod does not count on the same devices while
this one's binding is on its way. When kube-scheduler chooses another node, for its own reasons, bind moves the reservation.

A pod without GPUs takes CPU and RAM that GPUs may need. Nodes with GPUs are rated by what it costs them; all others are best, and
alike, so that kube-scheduler's own preferences decide among those.
"""

from collections.abc import Sequence

import numpy as np

from placement.request import RequestError
from scheduler_plugin.core.decisions import Choice
from scheduler_plugin.core.judge import best_row, reasons_for
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import MAX_SCORE
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Desk


def prioritize_nodes(desk: Desk, body: bytes) -> bytes:
    """Answer one prioritize call; the nodes come in any order, each once. Raises WireError."""
    args = wire.decode_args(body)
    asked, named = desk.asked(args.pod), desk.named(args.node_names)
    real = named is not None
    if named is None:
        full = (args.nodes.items if args.nodes is not None else None) or []
        named = desk.look_up([wire.decode_node(raw).metadata.name for raw in full])
    request, rows = asked.request, named.rows
    everywhere = np.arange(len(rows))
    if isinstance(request, RequestError):
        return _nothing(desk.names_of(named, everywhere))
    verdict = desk.verdict_for(asked.pod, asked.shape)
    fits = reasons_for(verdict, rows, all_known=not named.strange) == NodeReason.FITS.value
    if not fits.any():
        return _nothing(desk.names_of(named, everywhere))
    fitting = rows if fits.all() else rows[fits]
    winner = best_row(desk.shapes, verdict, fitting, asked.pod.uid)
    shown = np.zeros(len(verdict.score), dtype=np.bool_)
    shown[fitting] = True
    others = desk.names_of(named, np.flatnonzero(~fits))
    rest = [wire.entry(name, 0 if request is not None else MAX_SCORE) for name in others]
    wins = request is not None or not rest
    score = int(verdict.score[winner]) + wins
    answer = desk.scores_of(asked.shape, verdict).answer(shown, winner, score, rest)
    if real and wins:
        desk.decisions.chose(asked.pod.uid, Choice(desk.state.names[winner], score, desk.state.moment()))
        desk.expect(asked.pod, asked.shape.request if request is None else request, verdict, winner)
    return answer


def _nothing(names: Sequence[str]) -> bytes:
    return b"[" + b",".join([wire.entry(name, 0) for name in names]) + b"]"
