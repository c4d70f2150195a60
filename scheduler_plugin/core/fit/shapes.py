# SPDX-License-Identifier: Apache-2.0
"""Verdicts on all nodes for each shape of pods, cached and updated for changed nodes only.

Pods come in shapes: all pods of a deployment are equal, and kube-scheduler makes two calls for each pod. The verdict for a shape is
computed once over all rows, and later only for rows that changed, so the usual decision does not depend on the size of the cluster.
The first verdict on a shape takes tens of milliseconds with 20,000 nodes. So it is computed in pieces as soon as such a pod is known.
Invariant: a cached verdict equals one that is computed from scratch; tests/property/test_columnar.py checks that over random histories.

For a pod of one container the columns are enough. For several containers, and for several MIG profiles on nodes that create instances on
demand, the columns say where each container fits by itself, and where all certainly fit together or certainly do not. Placement's own
search decides the rest. It takes half a millisecond per container, too long for thousands of nodes in one call. So each call searches a few
nodes, the best first; the others count as fitting until a later call searches them. bind plans again in any case. A replay of such a
decision may count other nodes as fitting.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from aliquot.contract.model import IDLE, PodRequest, Policy, Utilization
from aliquot.placement.choose import choose_pod
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.columns import Bools, Ints, Rows
from scheduler_plugin.core.cluster.plan import FILTER_SEED, shape_of, takes_several_profiles
from scheduler_plugin.core.cluster.reasons import OF_REJECT, NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import (
    Evaluation,
    RatingQuery,
    cost_on,
    evaluate,
    fits_alone,
    host_cost,
    lacking_together,
    surely_fit_together,
)
from scheduler_plugin.core.score.cost import HostDemand, Weights

MAX_KEPT: Final = 128
"""Cached shapes. Each takes 14 bytes per node, and 8 for each vGPU: 14 MB in all for 5,000 nodes and one vGPU."""
MAX_SCORE: Final = 1_000_000
"""The best score of a node. kube-scheduler adds ten times this to the scores of its plugins, and a plugin adds 0 to 100 times its weight.
So a plugin needs a weight of 10,000 to count as much as a tenth of our range (NodeAffinity, PodTopologySpread)."""
MAX_SEARCHED: Final = 256
"""Containers in the searches of one update of a verdict: a tenth of a second."""
MAX_AHEAD: Final = 1024
"""Rows judged ahead at a time: a millisecond or two for each container, which a call may have to wait for."""
_SETS_PER_CONTAINER: Final = 8
"""Sets of devices that placement tries in the time that it needs to place one container."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
"""An odd factor, which spreads a difference in any bit over the higher bits."""


@dataclass(frozen=True, slots=True)
class PodShape:
    """All on which a verdict depends, except the nodes."""

    request: PodRequest
    policy: Policy
    demand: HostDemand
    used: Utilization = IDLE
    """What the pod will probably use of each of its GPUs, as far as that counts."""
    _hash: int = field(init=False, repr=False, compare=False)
    """Computed once: a decision makes half a dozen look-ups by its shape."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.request, self.policy, self.demand, self.used)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, request: PodRequest, default_policy: Policy, demand: HostDemand, used: Utilization = IDLE) -> "PodShape":
        """Reduce a pod's request to its shape."""
        return cls(shape_of(request), request.preferences.policy or default_policy, demand, used)


@dataclass(slots=True)
class Verdict:
    """The verdict on all rows for one shape: arrays by row. Rows without a node do not fit."""

    reason: npt.NDArray[np.int8]
    curable: Bools
    cost: npt.NDArray[np.float64]
    score: npt.NDArray[np.int32]
    computed_at: int = 0
    unjudged: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rows that the first verdict has not come to yet; empty once a call used it."""
    chosen: Ints | None = None
    """For each row that fits, the columns of the devices that placement probably takes; None if unknown."""
    unsearched: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rows on which each part fits by itself, and that were not searched yet for all parts together: they count as fitting."""


@dataclass(slots=True)
class Takers:
    """Nodes that can take a pod of some shape, as far as columns say; valid until the state changes."""

    rows: Rows
    changed_at: Ints
    """The state's change counter at the last change of each row."""
    _doubtful: Bools
    """Whether only a search can decide."""
    _search: Callable[[int], tuple[NodeReason, int]]
    _left: int
    """How many containers further searches may have."""
    _found: dict[int, bool] = field(default_factory=dict)

    def looks(self, wanted: Bools) -> Iterator[bool]:
        """Search the wanted nodes one by one for room; yield True and end at the first node with room, and False for each without.

        As in a verdict, nodes beyond the limit of searches count as fitting. The state may change between two searches.
        """
        if (wanted & ~self._doubtful).any():
            yield True
            return
        for row in self.rows[wanted].tolist():
            if row not in self._found:
                if self._left <= 0:
                    yield True
                    return
                reason, cost = self._search(row)
                self._found[row], self._left = reason is NodeReason.FITS, self._left - cost
            yield self._found[row]
            if self._found[row]:
                return


class Shapes:
    """The cached verdicts, most recently used last."""

    def __init__(self, state: ClusterState, weights: Mapping[Policy, Weights], max_kept: int = MAX_KEPT) -> None:
        self._state = state
        self.weights = weights
        self._reach = {policy: weighing.reach for policy, weighing in weights.items()}
        self._max_kept = max_kept
        self._kept: OrderedDict[PodShape, Verdict] = OrderedDict()
        self._expected: deque[PodShape] = deque(maxlen=max_kept // 2)
        """Shapes of known pods for which no call came yet. Half of what is kept, so that they do not push each other out."""

    def verdict(self, shape: PodShape) -> Verdict:
        """Return the up-to-date verdict for a shape; valid until the state changes."""
        columns, verdict = self._state.columns, self._kept_or_begun(shape)
        self._kept.move_to_end(shape)
        if verdict.computed_at != columns.rating_count or len(verdict.unjudged) or len(verdict.unsearched):
            rows = np.union1d(np.flatnonzero(columns.rated[: columns.rows] > verdict.computed_at), verdict.unjudged)
            for chunk in columns.chunks(rows):
                self._judge(shape, chunk, verdict)
            if _has_parts(shape):
                self._judge_together(shape, rows, verdict)
            verdict.computed_at, verdict.unjudged = columns.rating_count, rows[:0]
        return verdict

    def refresh(self) -> None:
        """Bring the derived columns up to date, by the present demand."""
        if self._state.wanted.drifted:
            self.learn()
        self._state.columns.derive()

    def rated_on(self, rows: Rows, parts: "Sequence[tuple[RatingQuery, Bools]]") -> tuple[npt.NDArray[np.float64], Ints]:
        """Return cost and score of rows where each container gets given devices. Call ``refresh`` first.

        Args: parts: each container, and by row and column whether it gets the device.
        """
        policy = parts[0][0].policy
        cost = np.mean([cost_on(self._state.columns, rows, ask, self.weights[policy], devices) for ask, devices in parts], axis=0)
        return cost, self._scores(cost, policy)

    def rated_by_host(self, rows: Rows, policy: Policy, demand: HostDemand) -> tuple[npt.NDArray[np.float64], Ints]:
        """Return cost and score of rows where a pod takes only CPU and RAM. Call ``refresh`` first."""
        cost = host_cost(self._state.columns, rows, policy, demand, self.weights[policy])
        return cost, self._scores(cost, policy)

    def _scores(self, cost: npt.NDArray[np.float64], policy: Policy) -> Ints:
        part = np.minimum(np.maximum(0.5 - cost / (2 * self._reach[policy]), 0.0), 1.0)
        scores: Ints = np.rint(part * MAX_SCORE).astype(np.int64)
        return scores

    def _kept_or_begun(self, shape: PodShape) -> Verdict:
        """Return the verdict as it was left, with room for all rows, or begin one that has judged no row."""
        columns = self._state.columns
        self.refresh()
        verdict = self._kept.get(shape)
        if verdict is None:
            verdict = self._kept[shape] = blank(columns.rows)
            verdict.computed_at, verdict.unjudged = columns.rating_count, np.flatnonzero(columns.rated[: columns.rows])
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        if len(verdict.reason) < columns.rows:
            verdict = self._kept[shape] = grown(verdict, columns.rows)
        return verdict

    def expect(self, shape: PodShape) -> None:
        """Note that a call for this shape probably comes, so that ``foresee`` judges it."""
        if shape not in self._kept and shape not in self._expected:
            self._expected.append(shape)

    def foresee(self) -> bool:
        """Judge a few rows for an expected shape; return whether there was anything to do.

        Rows that need a search are left to the call, as in ``catch_up``.
        """
        if not self._expected:
            return False
        shape, columns = self._expected[0], self._state.columns
        verdict = self._kept_or_begun(shape)
        for piece in columns.chunks(verdict.unjudged[:MAX_AHEAD])[:1]:
            self._judge(shape, piece, verdict)
            if _has_parts(shape):
                verdict.unsearched = np.concatenate([verdict.unsearched, self._doubtful(shape, piece, verdict)])
            verdict.unjudged = verdict.unjudged[len(piece) :]
        if not len(verdict.unjudged):
            self._expected.popleft()
        return True

    def catch_up(self, shape: PodShape) -> bool:
        """Update a cached verdict in advance of the next call; return whether there was anything to do.

        A verdict that may need a search of nodes is not updated here: a search takes long, and calls would wait for it.
        """
        verdict, state = self._kept.get(shape), self._state
        if (
            verdict is None
            or len(verdict.unjudged)
            or _has_parts(shape)
            or (verdict.computed_at == state.columns.rating_count and not state.wanted.drifted)
        ):
            return False
        self.verdict(shape)
        return True

    def takers(self, shape: PodShape, since: int) -> "Takers":
        """Find the nodes that changed after ``since``, a value of the state's change counter, and that can take a pod with GPUs.

        Only those nodes are evaluated, without caching, so that it can be called for many shapes, one after the other.
        """
        columns, asks = self._state.columns, _asks(shape)
        columns.derive()
        found, open_ = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.bool_)]
        for rows in columns.chunks(np.flatnonzero(columns.changed[: columns.rows] > since)):
            fitting = rows[np.logical_and.reduce([fits_alone(columns, rows, ask) for ask in asks])]
            doubtful = np.zeros(len(fitting), dtype=np.bool_)
            if _has_parts(shape):
                reason, doubtful = self._together(shape, fitting)
                fits = reason == NodeReason.FITS.value
                fitting, doubtful = fitting[fits], doubtful[fits]
            found.append(fitting)
            open_.append(doubtful)
        rows = np.concatenate(found)
        return Takers(
            rows, columns.changed[rows], np.concatenate(open_), lambda row: self._search(shape, self._state.names[row]), MAX_SEARCHED
        )

    def learn(self) -> None:
        """Rate free room by the present demand of the known pods from now on."""
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
        verdict.score[rows] = self._scores(evaluation.cost, shape.policy)
        if evaluation.chosen is not None:
            if verdict.chosen is None:
                verdict.chosen = np.zeros((len(verdict.reason), evaluation.chosen.shape[1]), dtype=np.int64)
            verdict.chosen[rows] = evaluation.chosen

    def _judge_host(self, shape: PodShape, rows: Rows, weights: Weights) -> Evaluation:
        """Judge a pod without GPUs: its CPU and RAM may be needed by the GPUs of a node."""
        columns = self._state.columns
        there = columns.alive[rows]
        reason = np.where(there, NodeReason.FITS.value, NodeReason.NO_GPU.value)
        return Evaluation(reason, there, host_cost(columns, rows, shape.policy, shape.demand, weights))

    def _judge_one(self, shape: PodShape, rows: Rows, weights: Weights) -> Evaluation:
        (ask,) = _asks(shape)
        return evaluate(self._state.columns, rows, ask, weights)

    def _judge_several(self, shape: PodShape, rows: Rows, weights: Weights) -> Evaluation:
        """Judge a pod of several containers. Its cost is the mean over the containers, init containers excepted, each as if it came
        alone."""
        asks = _asks(shape)
        parts = [evaluate(self._state.columns, rows, ask, weights) for ask in asks]
        reason, curable = parts[0].reason.copy(), parts[0].curable.copy()
        for part in parts[1:]:
            reason = np.where(reason == NodeReason.FITS.value, part.reason, reason)
            curable &= part.curable
        lasting = [part.cost for ask, part in zip(asks, parts, strict=True) if not ask.request.init]
        return Evaluation(reason, curable, np.mean(lasting, axis=0))

    def _judge_together(self, shape: PodShape, rows: Rows, verdict: Verdict) -> None:
        """Judge for the whole request the rows on which each part fits, and search the best of them and of the rows not searched before."""
        # Rows that changed are judged by columns first; of the others, those that were not searched yet are still open.
        ordered = np.concatenate([np.setdiff1d(verdict.unsearched, rows), self._doubtful(shape, rows, verdict)])
        ordered = ordered[np.argsort(-verdict.score[ordered], kind="stable")]
        # The best rows first: kube-scheduler chooses among them, so a wrong guess there costs an attempt.
        searched, left = 0, MAX_SEARCHED
        while searched < len(ordered) and left > 0:
            found, cost = self._search(shape, self._state.names[ordered[searched]])
            verdict.reason[ordered[searched]] = found.value
            searched, left = searched + 1, left - cost
        verdict.unsearched = ordered[searched:]

    def _doubtful(self, shape: PodShape, rows: Rows, verdict: Verdict) -> Rows:
        """Judge rows for the whole request as far as columns say; return those that only a search can decide."""
        doubtful = [rows[:0]]
        for chunk in self._state.columns.chunks(rows[verdict.reason[rows] == NodeReason.FITS.value]):
            verdict.reason[chunk], is_open = self._together(shape, chunk)
            doubtful.append(chunk[is_open])
        return np.concatenate(doubtful)

    def _together(self, shape: PodShape, rows: Rows) -> tuple[Ints, Bools]:
        """Return for rows on which each part fits by itself what they certainly lack for the whole request.

        Returns: values of NodeReason, FITS for rows without a known lack, and whether only a search can decide.
        """
        columns = self._state.columns
        if len(shape.request.containers) < 2:
            return np.full(len(rows), NodeReason.FITS.value, dtype=np.int64), columns.by_place[rows]
        asks = _asks(shape)
        lacking = lacking_together(columns, rows, asks)
        return lacking, (lacking == NodeReason.FITS.value) & ~surely_fit_together(columns, rows, asks)

    def _search(self, shape: PodShape, node: str) -> tuple[NodeReason, int]:
        """Place the whole request on one node by placement's search; return the result and its cost, in containers placed."""
        state, gpu = self._state, self._state.gpu_node(node)
        aversion = state.utilizations.aversion(shape.used, shape.policy)
        states, demand = state.device_states(node, aversion), state.columns.demand_table.demand
        links = () if gpu is None else gpu.links
        choice = choose_pod(states, shape.request, shape.policy, links=links, seed=FILTER_SEED, demand=demand)
        containers = len(shape.request.containers)
        if isinstance(choice, Refusal):
            return OF_REJECT[choice.reason], containers + choice.sets_tried // _SETS_PER_CONTAINER
        return NodeReason.FITS, containers


def _has_parts(shape: PodShape) -> bool:
    """Whether a request may not fit as a whole on a node on which each part fits by itself."""
    return len(shape.request.containers) > 1 or takes_several_profiles(shape.request)


def _asks(shape: PodShape) -> list[RatingQuery]:
    preferences, containers = shape.request.preferences, shape.request.containers
    return [RatingQuery(request, preferences, shape.policy, shape.demand, shape.used) for request in containers]


def blank(rows: int) -> Verdict:
    """Return a verdict for which no row fits."""
    return Verdict(
        np.full(rows, NodeReason.NO_GPU.value, dtype=np.int8), np.zeros(rows, dtype=np.bool_), np.zeros(rows), np.zeros(rows, np.int32)
    )


def grown(verdict: Verdict, rows: int) -> Verdict:
    """Return a verdict with room for more rows."""
    larger, size = blank(rows), len(verdict.reason)
    larger.reason[:size], larger.curable[:size] = verdict.reason, verdict.curable
    larger.cost[:size], larger.score[:size] = verdict.cost, verdict.score
    larger.computed_at, larger.unjudged, larger.unsearched = verdict.computed_at, verdict.unjudged, verdict.unsearched
    if verdict.chosen is not None:
        larger.chosen = np.zeros((rows, verdict.chosen.shape[1]), dtype=np.int64)
        larger.chosen[:size] = verdict.chosen
    return larger
