# SPDX-License-Identifier: Apache-2.0
"""Full ``Nodes`` of a call. Known nodes are judged by the scheduler's state, others by their labels and allocatable amounts.

An autoscaler invents nodes to learn whether a new one would help. They are judged in a separate state by the same code and the same demand,
so their scores compare with those of real nodes. Such a call makes no reservation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from scheduler_plugin.core.cluster.objects import NodeObject
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.cluster.template import template_host, template_node
from scheduler_plugin.core.fit.judge import REASON_OF
from scheduler_plugin.core.fit.shapes import Shapes
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.pod_query import PodQuery
from scheduler_plugin.extender.verdicts import Verdicts


@dataclass(frozen=True, slots=True)
class FullNode:
    """The verdict on one node of a call."""

    raw: msgspec.Raw
    name: str
    reason: NodeReason
    curable: bool
    """Whether the pod fits once other pods are gone."""
    score: int
    """0 if the pod does not fit."""
    exists: bool


def read_full(args: wire.CallArgs) -> list[tuple[msgspec.Raw, NodeObject]]:
    """Read the full nodes of a call, if it has any. Raises WireError."""
    full = (args.nodes.items if args.nodes is not None else None) or []
    wire.check_count(len(full))
    return [(raw, wire.decode_node(raw)) for raw in full]


def judge_full(state: ClusterState, verdicts: Verdicts, query: PodQuery, nodes: Sequence[tuple[msgspec.Raw, NodeObject]]) -> list[FullNode]:
    """Judge full nodes in their order."""
    on_known = verdicts.of(query.pod, query.shape)  # first, because it may update the demand
    invented = _invented(state, [item for _, item in nodes])
    on_invented = Shapes(invented, verdicts.shapes.weights).verdict(query.shape)
    judged: list[FullNode] = []
    for raw, item in nodes:
        name = item.metadata.name
        exists = state.row_of(name) is not None
        owner, verdict = (state, on_known) if exists else (invented, on_invented)
        if (row := owner.row_of(name)) is None:
            judged.append(FullNode(raw, name, NodeReason.NO_GPU, curable=False, score=0, exists=False))
            continue
        reason = REASON_OF[int(verdict.reason[row])]
        score = int(verdict.score[row]) if reason is NodeReason.FITS else 0
        judged.append(FullNode(raw, name, reason, bool(verdict.curable[row]), score, exists))
    return judged


def _invented(state: ClusterState, items: Iterable[NodeObject]) -> ClusterState:
    """Make a state of the nodes that are not known and promise GPUs.

    They are rated by the supply of the real cluster: what a template is worth must not depend on the other templates of a call.
    """
    invented = ClusterState()
    for item in items:
        if state.row_of(item.metadata.name) is None and (node := template_node(item)) is not None:
            invented.set_gpu_node(node)
            invented.set_host(node.name, *template_host(item))
    invented.columns.set_demand(state.columns.demand_table.demand, state.columns.demand_table)
    return invented
