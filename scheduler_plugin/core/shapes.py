"""Verdicts on all nodes for each shape of pod, kept and brought up to date for the changed nodes only.

Pods come in shapes: a deployment's are all alike, and kube-scheduler asks twice for each. The verdict for a shape is computed once over all
rows, and later only for rows that changed since, which makes the usual decision independent of the cluster's size. A kept verdict is
always equal to one computed from nothing; tests/property/test_columnar.py checks that over random histories.

One container is judged by columns alone. For several, and for several MIG profiles on nodes that make instances on demand, columns say
where each would fit by itself and where all of them certainly fit together, or certainly do not. Placement's own search decides the rest.
It takes half a millisecond for a container, which on thousands of nodes would hold up everybody: so at a time a few nodes are searched,
the best first, and the others are taken to fit until their turn comes. bind plans again anyway. A replay of a decision with so many nodes
may count others among those that fit.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from placement.choose import choose_pod
from placement.refusal import Refusal
from proto.model import PodRequest, Policy
from scheduler_plugin.core.columnar import Ask, Evaluation, evaluate, fits_alone, host_cost, lacking_together, surely_fit_together
from scheduler_plugin.core.columns import Bools, Ints, Rows
from scheduler_plugin.core.plan import FILTER_SEED, shape_of, takes_several_profiles
from scheduler_plugin.core.reasons import OF_REJECT, NodeReason
from scheduler_plugin.core.score import HostDemand, Weights
from scheduler_plugin.core.state import ClusterState

MAX_KEPT: Final = 128
"""Shapes kept. One takes 14 bytes per node, and 8 for each vGPU: 14 MB in all for 5,000 nodes and one vGPU."""
MAX_SCORE: Final = 1_000_000
"""The best score of a node. kube-scheduler adds ten times this to its plugins' scores, each of which is 0 to 100 times the plugin's weight:
a plugin whose preference is to count as much as a tenth of our range (NodeAffinity, PodTopologySpread) needs a weight of 10,000."""
MAX_SEARCHED: Final = 256
"""Containers that are searched for when a verdict is brought up to date: a tenth of a second."""
_SETS_PER_CONTAINER: Final = 8
"""Sets of devices that placement tries in the time in which it places one container."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
"""An odd multiplier spreads a difference in any bit over the higher ones."""


@dataclass(frozen=True, slots=True)
class PodShape:
    """All that a verdict depends on besides the nodes."""

    request: PodRequest
    policy: Policy
    demand: HostDemand
    _hash: int = field(init=False, repr=False, compare=False)
    """Worked out once: a decision looks half a dozen things up by its shape."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.request, self.policy, self.demand)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, request: PodRequest, default_policy: Policy, demand: HostDemand) -> "PodShape":
        """Reduce a pod's request to its shape."""
        return cls(shape_of(request), request.preferences.policy or default_policy, demand)


@dataclass(slots=True)
class Verdict:
    """What every row is to a shape. Arrays by row; rows without a node do not fit."""

    reason: npt.NDArray[np.int8]
    curable: Bools
    cost: npt.NDArray[np.float64]
    score: npt.NDArray[np.int32]
    computed_at: int = 0
    chosen: Ints | None = None
    """Per row that fits, the columns of the devices that placement is likely to take; None where that is not known."""
    unsearched: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rows that take every part by itself, and whether they take all of them together was not looked at yet: they count as fitting."""


@dataclass(slots=True)
class Takers:
    """Nodes that take a pod of some shape, as far as columns tell; valid until the state changes."""

    rows: Rows
    changed_at: Ints
    """The state's change counter when each was changed."""
    _doubtful: Bools
    """Whether only a search can tell."""
    _search: Callable[[int], tuple[NodeReason, int]]
    _left: int
    """How many containers may still be searched for."""
    _found: dict[int, bool] = field(default_factory=dict)

    def looks(self, wanted: Bools) -> Iterator[bool]:
        """Say whether one of the wanted nodes takes the pod, search by search: it is not known before the last answer, or a yes.

        As in a verdict, those that are too many to be searched count as fitting. The state may change between two searches.
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
        if verdict.computed_at != columns.change_count or len(verdict.unsearched):
            rows = np.flatnonzero(columns.changed[: columns.rows] > verdict.computed_at)
            for chunk in columns.chunks(rows):
                self._judge(shape, chunk, verdict)
            if _has_parts(shape):
                self._judge_together(shape, rows, verdict)
            verdict.computed_at = columns.change_count
        return verdict

    def catch_up(self, shape: PodShape) -> bool:
        """Bring a kept verdict up to date before anybody asks for it; return whether there was anything to do.

        One that may take a search of nodes is left until it is asked for: that is a piece of work that others would have to wait for.
        """
        verdict, state = self._kept.get(shape), self._state
        if verdict is None or _has_parts(shape) or (verdict.computed_at == state.columns.change_count and not state.wanted.drifted):
            return False
        self.verdict(shape)
        return True

    def takers(self, shape: PodShape, since: int) -> "Takers":
        """Find the nodes that changed after ``since``, a value of the state's change counter, and take a pod that asks for GPUs.

        It costs what those nodes cost, and nothing is kept, so that many shapes can be asked about in turn.
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
        verdict.score[rows] = np.rint(part * MAX_SCORE)
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
        (ask,) = _asks(shape)
        return evaluate(self._state.columns, rows, ask, weights)

    def _judge_several(self, shape: PodShape, rows: Rows, weights: Weights) -> Evaluation:
        """Judge a pod of several containers: rated by the mean over those that last, each as if it came alone."""
        asks = _asks(shape)
        parts = [evaluate(self._state.columns, rows, ask, weights) for ask in asks]
        reason, curable = parts[0].reason.copy(), parts[0].curable.copy()
        for part in parts[1:]:
            reason = np.where(reason == NodeReason.FITS.value, part.reason, reason)
            curable &= part.curable
        lasting = [part.cost for ask, part in zip(asks, parts, strict=True) if not ask.request.init]
        return Evaluation(reason, curable, np.mean(lasting, axis=0))

    def _judge_together(self, shape: PodShape, rows: Rows, verdict: Verdict) -> None:
        """Judge rows that take every part of a request by itself for all of it: these, and the best of those that were left before."""
        doubtful = [np.setdiff1d(verdict.unsearched, rows)]
        for chunk in self._state.columns.chunks(rows[verdict.reason[rows] == NodeReason.FITS.value]):
            verdict.reason[chunk], is_open = self._together(shape, chunk)
            doubtful.append(chunk[is_open])
        ordered = np.concatenate(doubtful)
        ordered = ordered[np.argsort(-verdict.score[ordered], kind="stable")]
        searched, left = 0, MAX_SEARCHED
        while searched < len(ordered) and left > 0:
            found, cost = self._search(shape, self._state.names[ordered[searched]])
            verdict.reason[ordered[searched]] = found.value
            searched, left = searched + 1, left - cost
        verdict.unsearched = ordered[searched:]

    def _together(self, shape: PodShape, rows: Rows) -> tuple[Ints, Bools]:
        """Say of rows that take every part of a request by itself what they certainly lack for all of it, and where that is not certain.

        Returns: values of NodeReason, FITS where nothing is known to be lacking, and whether only a search can tell.
        """
        columns = self._state.columns
        if len(shape.request.containers) < 2:
            return np.full(len(rows), NodeReason.FITS.value, dtype=np.int64), columns.by_place[rows]
        asks = _asks(shape)
        lacking = lacking_together(columns, rows, asks)
        return lacking, (lacking == NodeReason.FITS.value) & ~surely_fit_together(columns, rows, asks)

    def _search(self, shape: PodShape, node: str) -> tuple[NodeReason, int]:
        """Let placement place everything on one node; return also what that cost, in containers placed."""
        state, gpu = self._state, self._state.gpu_node(node)
        states, demand = state.device_states(node), state.columns.demand_table.demand
        links = () if gpu is None else gpu.links
        choice = choose_pod(states, shape.request, shape.policy, links=links, seed=FILTER_SEED, demand=demand)
        containers = len(shape.request.containers)
        if isinstance(choice, Refusal):
            return OF_REJECT[choice.reason], containers + choice.sets_tried // _SETS_PER_CONTAINER
        return NodeReason.FITS, containers


def _has_parts(shape: PodShape) -> bool:
    """Whether a node that takes every part of a request by itself may not take all of it."""
    return len(shape.request.containers) > 1 or takes_several_profiles(shape.request)


def _asks(shape: PodShape) -> list[Ask]:
    return [Ask(request, shape.request.preferences, shape.policy, shape.demand) for request in shape.request.containers]


def _blank(rows: int) -> Verdict:
    return Verdict(
        np.full(rows, NodeReason.NO_GPU.value, dtype=np.int8), np.zeros(rows, dtype=np.bool_), np.zeros(rows), np.zeros(rows, np.int32)
    )


def _grown(verdict: Verdict, rows: int) -> Verdict:
    grown, size = _blank(rows), len(verdict.reason)
    grown.reason[:size], grown.curable[:size] = verdict.reason, verdict.curable
    grown.cost[:size], grown.score[:size] = verdict.cost, verdict.score
    grown.computed_at, grown.unsearched = verdict.computed_at, verdict.unsearched
    if verdict.chosen is not None:
        grown.chosen = np.zeros((rows, verdict.chosen.shape[1]), dtype=np.int64)
        grown.chosen[:size] = verdict.chosen
    return grown
