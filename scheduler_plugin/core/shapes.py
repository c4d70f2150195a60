"""Verdicts on all nodes for each shape of pod, kept and brought up to date for the changed nodes only.

Pods come in shapes: a deployment's are all alike, and kube-scheduler asks twice for each. The verdict for a shape is computed once over all
rows, and later only for rows that changed since, which makes the usual decision independent of the cluster's size. A kept verdict is
always equal to one computed from nothing; tests/property/test_columnar.py checks that over random histories.

One container is judged by columns alone. For several, and for several MIG profiles on nodes that make instances on demand, columns say
where each would fit by itself, and placement's own search decides on those nodes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from placement.choose import choose_pod
from placement.fit import reject_reason
from placement.refusal import Refusal
from proto.model import NumaMode, PodRequest, Policy
from scheduler_plugin.core.columnar import Ask, Evaluation, evaluate, host_cost
from scheduler_plugin.core.columns import Bools, Ints, Rows
from scheduler_plugin.core.plan import FILTER_SEED, shape_of, takes_several_profiles
from scheduler_plugin.core.reasons import OF_REJECT, NodeReason
from scheduler_plugin.core.score import HostDemand, Weights, mig_terms, vgpu_terms
from scheduler_plugin.core.state import ClusterState

MAX_KEPT: Final = 128
"""Shapes kept. One takes 25 bytes per node: 16 MB in all for 5,000 nodes."""
MAX_SCORE: Final = 1_000_000
"""The best score of a node. kube-scheduler adds ten times this to its plugins' scores, each of which is 0 to 100 times the plugin's weight:
a plugin whose preference is to count as much as a tenth of our range (NodeAffinity, PodTopologySpread) needs a weight of 10,000."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
"""An odd multiplier spreads a difference in any bit over the higher ones."""


@dataclass(frozen=True, slots=True)
class PodShape:
    """All that a verdict depends on besides the nodes."""

    request: PodRequest
    policy: Policy
    demand: HostDemand

    @classmethod
    def of(cls, request: PodRequest, default_policy: Policy, demand: HostDemand) -> "PodShape":
        """Reduce a pod's request to its shape."""
        return cls(shape_of(request), request.preferences.policy or default_policy, demand)


@dataclass(slots=True)
class Verdict:
    """What every row is to a shape. Arrays by row; rows without a node do not fit."""

    reason: Ints
    curable: Bools
    cost: npt.NDArray[np.float64]
    score: Ints
    computed_at: int = 0
    chosen: Ints | None = None
    """Per row that fits, the columns of the devices that placement is likely to take; None where that is not known."""


class Shapes:
    """The verdicts, most recently used last."""

    def __init__(self, state: ClusterState, weights: Mapping[Policy, Weights], max_kept: int = MAX_KEPT) -> None:
        self._state = state
        self.weights = weights
        self._reach = {policy: weighing.reach for policy, weighing in weights.items()}
        self._max_kept = max_kept
        self._kept: OrderedDict[PodShape, Verdict] = OrderedDict()

    def verdict(self, shape: PodShape) -> Verdict:
        """Return the up-to-date verdict for a shape; valid until the state changes."""
        columns = self._state.columns
        if self._state.wanted.drifted:
            self.learn()
        columns.derive()
        verdict = self._kept.get(shape)
        if verdict is None:
            verdict = self._kept[shape] = _blank(columns.rows)
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(shape)
        if len(verdict.reason) < columns.rows:
            verdict = self._kept[shape] = _grown(verdict, columns.rows)
        if verdict.computed_at != columns.change_count:
            rows = np.flatnonzero(columns.changed[: columns.rows] > verdict.computed_at)
            for chunk in columns.chunks(rows):
                self._judge(shape, chunk, verdict)
            verdict.computed_at = columns.change_count
        return verdict

    def learn(self) -> None:
        """Rate what is free by what the pods that are known ask for, from now on."""
        self._state.columns.set_demand(self._state.wanted.take())

    def tie_break(self, rows: Rows, seed: str) -> int:
        """Return the position among rows that comes first by a hash of node name and seed."""
        salt = np.frombuffer(hashlib.blake2b(seed.encode(errors="surrogatepass"), digest_size=8).digest(), dtype=np.uint64)
        mixed = (self._state.columns.tie[rows] ^ salt) * _ODD
        return int(np.argmin(mixed ^ (mixed >> np.uint64(32))))

    def _judge(self, shape: PodShape, rows: Rows, verdict: Verdict) -> None:
        weights = self.weights[shape.policy]
        judge = (self._judge_host, self._judge_one, self._judge_several)[min(2, len(shape.request.containers))]
        evaluation = judge(shape, rows, weights)
        verdict.reason[rows], verdict.curable[rows], verdict.cost[rows] = evaluation.reason, evaluation.curable, evaluation.cost
        part = np.minimum(np.maximum(0.5 - evaluation.cost / (2 * self._reach[shape.policy]), 0.0), 1.0)
        verdict.score[rows] = np.rint(part * MAX_SCORE).astype(np.int64)
        if evaluation.chosen is not None:
            if verdict.chosen is None:
                verdict.chosen = np.zeros((len(verdict.reason), evaluation.chosen.shape[1]), dtype=np.int64)
            verdict.chosen[rows] = evaluation.chosen

    def _judge_host(self, shape: PodShape, rows: Rows, weights: Weights) -> Evaluation:
        """Judge a pod that asks for no GPU, for the sake of the GPUs that need the host it takes."""
        columns = self._state.columns
        there = columns.alive[rows]
        reason = np.where(there, NodeReason.FITS.value, NodeReason.NO_GPU.value)
        return Evaluation(reason, there, host_cost(columns, rows, shape.policy, shape.demand, weights))

    def _judge_one(self, shape: PodShape, rows: Rows, weights: Weights) -> Evaluation:
        (request,) = shape.request.containers
        columns = self._state.columns
        evaluation = evaluate(columns, rows, Ask(request, shape.request.preferences, shape.policy, shape.demand), weights)
        if takes_several_profiles(shape.request):
            fits = (evaluation.reason == NodeReason.FITS.value) & columns.by_place[rows]
            for position in np.flatnonzero(fits):
                evaluation.reason[position], evaluation.cost[position] = self._search(shape, self._state.names[rows[position]], weights)
        return evaluation

    def _judge_several(self, shape: PodShape, rows: Rows, weights: Weights) -> Evaluation:
        parts = [
            evaluate(self._state.columns, rows, Ask(request, shape.request.preferences, shape.policy, shape.demand), weights)
            for request in shape.request.containers
        ]
        reason, curable = parts[0].reason.copy(), parts[0].curable.copy()
        for part in parts[1:]:
            reason = np.where(reason == NodeReason.FITS.value, part.reason, reason)
            curable &= part.curable
        cost = np.zeros(len(rows), dtype=np.float64)
        for position in np.flatnonzero(reason == NodeReason.FITS.value):
            reason[position], cost[position] = self._search(shape, self._state.names[rows[position]], weights)
        return Evaluation(reason, curable, cost)

    def _search(self, shape: PodShape, node: str, weights: Weights) -> tuple[int, float]:
        """Let placement place all containers on one node, and rate what it took."""
        view, gpu, columns = self._state.view(node), self._state.gpu_node(node), self._state.columns
        links = () if gpu is None else gpu.links
        choice = choose_pod(view.states, shape.request, shape.policy, links=links, seed=FILTER_SEED, demand=columns.demand_table.demand)
        if isinstance(choice, Refusal):
            return OF_REJECT[choice.reason].value, 0.0
        lasting = [request for request in shape.request.containers if not request.init]
        if all(request.mig for request in lasting):
            asked = [item for request in lasting for item in request.mig]
            return NodeReason.FITS.value, mig_terms(view, asked, shape.policy).cost(weights)
        position_of = {state.device.uuid: position for position, state in enumerate(view.states)}
        vgpu_names = {request.container for request in lasting if not request.mig}
        shares = [share for placed in choice.containers if placed.container in vgpu_names for share in placed.shares]
        taken = [(position_of[share.device_uuid], share) for share in shares]
        largest = max((request for request in lasting if not request.mig), key=lambda request: request.vgpus)
        links_of = columns.link_classes[int(columns.link_class[self._state.row_of(node)])]
        fitting = np.array([[reject_reason(state, largest, shape.request.preferences) is None for state in view.states]])
        terms = vgpu_terms(
            view,
            taken,
            policy=shape.policy,
            demand=shape.demand,
            prefer_numa=shape.request.preferences.numa is NumaMode.PREFER,
            best_quality=int(links_of.best_quality(fitting, largest.vgpus)[0]),
        )
        return NodeReason.FITS.value, terms.cost(weights)


def _blank(rows: int) -> Verdict:
    return Verdict(
        np.full(rows, NodeReason.NO_GPU.value, dtype=np.int64), np.zeros(rows, dtype=np.bool_), np.zeros(rows), np.zeros(rows, np.int64)
    )


def _grown(verdict: Verdict, rows: int) -> Verdict:
    grown, size = _blank(rows), len(verdict.reason)
    grown.reason[:size], grown.curable[:size] = verdict.reason, verdict.curable
    grown.cost[:size], grown.score[:size] = verdict.cost, verdict.score
    grown.computed_at = verdict.computed_at
    if verdict.chosen is not None:
        grown.chosen = np.zeros((rows, verdict.chosen.shape[1]), dtype=np.int64)
        grown.chosen[:size] = verdict.chosen
    return grown
