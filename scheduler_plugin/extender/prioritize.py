"""prioritize: how good each node is for the pod, 0 to MAX_SCORE, the same for the same node whatever the others are.

Of several nodes with the best score one gets a point more, chosen by a hash of pod and node, because kube-scheduler would draw lots: a
decision can be replayed. The pod is then expected on that node, softly, so that the next pod does not count on the same devices while
this one's binding is on its way. When kube-scheduler chooses another node, for its own reasons, bind moves the reservation.

A pod without GPUs takes CPU and RAM that GPUs may need. Nodes with GPUs are rated by what it costs them; all others are best, and
alike, so that kube-scheduler's own preferences decide among those.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from placement.request import RequestError
from scheduler_plugin.core.judge import best_row, reasons_for
from scheduler_plugin.core.objects import NodeObject
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import MAX_SCORE
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Asked, Desk
from scheduler_plugin.extender.full_nodes import judge_full, read_full


def prioritize_nodes(desk: Desk, body: bytes) -> bytes:
    """Answer one prioritize call; the nodes come in any order, each once. Raises WireError."""
    args = wire.decode_args(body)
    asked, named = desk.asked(args.pod), desk.named(args.node_names)
    if named is None:
        return _prioritize_full(desk, asked, read_full(args))
    request, rows = asked.request, named.rows
    if isinstance(request, RequestError):
        return _nothing(desk.names_of(named))
    verdict = desk.verdict_for(asked.pod, asked.shape)
    fits = reasons_for(verdict, rows, all_known=not named.strange) == NodeReason.FITS.value
    if not fits.any():
        return _nothing(desk.names_of(named))
    fitting, others = (rows, ()) if fits.all() else (rows[fits], desk.names_of(named, np.flatnonzero(~fits)))
    winner = best_row(desk.shapes, verdict, fitting, asked.pod.uid)
    shown = np.zeros(len(verdict.score), dtype=np.bool_)
    shown[fitting] = True
    rest = [wire.entry(name, 0 if request is not None else MAX_SCORE) for name in others]
    wins = request is not None or not rest
    score = int(verdict.score[winner]) + wins
    answer = desk.scores_of(asked.shape, verdict).answer(shown, winner, score, rest)
    if wins:
        desk.note_choice(asked.pod.uid, named, winner, score)
        desk.expect(asked.pod, asked.shape.request if request is None else request, verdict, winner)
    return answer


def _prioritize_full(desk: Desk, asked: Asked, full: Sequence[tuple[msgspec.Raw, NodeObject]]) -> bytes:
    """Rate full nodes, as filter judges them; of equal ones, one that exists comes before those that are imagined. Nothing is reserved."""
    if isinstance(asked.request, RequestError):
        return _nothing([item.metadata.name for _, item in full])
    judged = judge_full(desk, asked, full)
    fitting = [node for node in judged if node.reason is NodeReason.FITS]
    if not fitting:
        return _nothing([node.name for node in judged])
    beside = 0 if asked.request is not None else MAX_SCORE
    wins = asked.request is not None or len(fitting) == len(judged)
    winner = max(fitting, key=lambda node: (node.score, node.exists, _lot(asked.pod.uid, node.name)))
    entries = [
        wire.entry(node.name, (node.score if node.reason is NodeReason.FITS else beside) + (wins and node is winner)) for node in judged
    ]
    return b"[" + b",".join(entries) + b"]"


def _lot(pod_uid: str, node: str) -> bytes:
    """Draw lots that fall the same whenever a pod is asked about."""
    return hashlib.blake2b(f"{pod_uid}/{node}".encode(errors="surrogatepass"), digest_size=8).digest()


def _nothing(names: Sequence[str]) -> bytes:
    return b"[" + b",".join([wire.entry(name, 0) for name in names]) + b"]"
