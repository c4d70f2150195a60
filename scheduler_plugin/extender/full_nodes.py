"""Full ``Nodes`` of a call: those that exist are judged as they are known here, the others by what their labels and allocatable promise.

An autoscaler imagines nodes to learn whether a new one would help. They are judged in a state of their own, by the same code and the same
demand, so that their scores compare with those of real ones; nothing is reserved for such a call. Filter and prioritize both ask here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from scheduler_plugin.core.judge import REASON_OF
from scheduler_plugin.core.objects import NodeObject
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.core.template import template_host, template_node
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Asked, Desk


@dataclass(frozen=True, slots=True)
class FullNode:
    """One node of a call, and what it is to the pod."""

    raw: msgspec.Raw
    name: str
    reason: NodeReason
    curable: bool
    """Whether it would fit once other pods are gone."""
    score: int
    """0 for one that does not fit."""
    exists: bool


def read_full(args: wire.Question) -> list[tuple[msgspec.Raw, NodeObject]]:
    """Read the full nodes of a call; none where it has none. Raises WireError."""
    full = (args.nodes.items if args.nodes is not None else None) or []
    wire.check_count(len(full))
    return [(raw, wire.decode_node(raw)) for raw in full]


def judge_full(desk: Desk, asked: Asked, nodes: Sequence[tuple[msgspec.Raw, NodeObject]]) -> list[FullNode]:
    """Judge full nodes in their order."""
    on_real = desk.verdict_for(asked.pod, asked.shape)  # first, because it may learn the demand anew
    imagined = ClusterState()
    for _, item in nodes:
        if desk.state.row_of(item.metadata.name) is None and (node := template_node(item)) is not None:
            imagined.set_gpu_node(node)
            imagined.set_host(node.name, *template_host(item))
    imagined.columns.set_demand(desk.state.columns.demand_table.demand)
    on_imagined = Shapes(imagined, desk.shapes.weights).verdict(asked.shape)
    judged: list[FullNode] = []
    for raw, item in nodes:
        name = item.metadata.name
        exists = desk.state.row_of(name) is not None
        state, verdict = (desk.state, on_real) if exists else (imagined, on_imagined)
        if (row := state.row_of(name)) is None:
            judged.append(FullNode(raw, name, NodeReason.NO_GPU, curable=False, score=0, exists=False))
            continue
        reason = REASON_OF[int(verdict.reason[row])]
        score = int(verdict.score[row]) if reason is NodeReason.FITS else 0
        judged.append(FullNode(raw, name, reason, bool(verdict.curable[row]), score, exists))
    return judged
