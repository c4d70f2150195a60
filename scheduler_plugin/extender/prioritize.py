"""prioritize: how good each node is for the pod, 0 to MAX_SCORE, the same for the same node whatever the others are.

Of several nodes with the best score one gets a point more, chosen by a hash of pod and node, because kube-scheduler would draw lots: a
decision can be replayed. The pod is then expected on that node, softly, so that the next pod does not count on the same devices while
this one's binding is on its way. When kube-scheduler chooses another node, for its own reasons, bind moves the reservation.
"""

import numpy as np

from placement.request import RequestError
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import Verdict
from scheduler_plugin.core.state import UNKNOWN_ROW
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Desk, Named


def prioritize_nodes(desk: Desk, body: bytes) -> bytes:
    """Answer one prioritize call. Raises WireError."""
    args = wire.decode(body, wire.ExtenderArgs)
    asked, named = desk.asked(args.pod), desk.named(args.node_names)
    real = named is not None
    if named is None:
        full = (args.nodes.items if args.nodes is not None else None) or []
        named = desk.look_up([wire.decode_node(raw).metadata.name for raw in full])
    request = asked.request
    known = named.rows != UNKNOWN_ROW
    if request is None or isinstance(request, RequestError) or not known.any():
        return _answer([wire.entry(name, 0) for name in named.names])
    verdict = desk.verdict_for(asked.pod, request)
    fits = known & (verdict.reason[named.rows] == NodeReason.FITS.value)
    if not fits.any():
        return _answer([wire.entry(name, 0) for name in named.names])
    scores = np.where(fits, verdict.score[named.rows], -1)
    best = np.flatnonzero(scores == scores.max())
    winner = int(best[desk.shapes.tie_break(named.rows[best], asked.pod.uid)])
    winning = wire.entry(named.names[winner], int(scores[winner]) + 1)
    if fits.all() and _is_everybody(desk, named):
        entries = _entries(desk, verdict).copy()
        entries[named.rows[winner]] = winning
        entries = list(filter(None, entries))
    else:
        entries = list(map(_entries(desk, verdict).__getitem__, named.rows.tolist()))
        for position in np.flatnonzero(~fits).tolist():
            entries[position] = wire.entry(named.names[position], 0)
        entries[winner] = winning
    if real:
        desk.expect(asked.pod, request, named.names[winner])
    return _answer(entries)


def _is_everybody(desk: Desk, named: Named) -> bool:
    """Whether the call is about all our nodes, once each: then the answer can be in our order, which is much cheaper to write."""
    if len(named.rows) != desk.state.node_count:
        return False
    seen = np.zeros(desk.state.columns.rows, dtype=np.bool_)
    seen[named.rows] = True
    return int(seen.sum()) == len(named.rows)


def _entries(desk: Desk, verdict: Verdict) -> list[bytes]:
    """Return the entries of all rows, writing those whose score changed since the last time."""
    entries, names = verdict.entries, desk.state.names
    entries.extend(b"" for _ in range(len(names) - len(entries)))
    stale = list(verdict.stale_entries)
    for row, score in zip(stale, verdict.score[stale].tolist(), strict=True):
        entries[row] = wire.entry(names[row], score) if names[row] else b""
    verdict.stale_entries.clear()
    return entries


def _answer(entries: list[bytes]) -> bytes:
    return b"[" + b",".join(entries) + b"]"
