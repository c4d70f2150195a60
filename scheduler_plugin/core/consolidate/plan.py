# SPDX-License-Identifier: Apache-2.0
"""Finds the moves that lose the least work and free room for one waiting pod, or free whole nodes.

All seats are reserved before the first pod ends, while all pods still count. So each prefix of a plan is feasible: every pod that ended has
its seat, and the others still run. A seat can be on another GPU of the same node. The waiting pod's place is reserved at the same time, so
no seat is on it.

Per node, pods are left out of the set that ends while the rest is enough, so no move of a plan can be spared. The cheapest of the nodes
wins. Another set on the same node may be cheaper still: the search does not try all.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Final, NamedTuple

import msgspec
import numpy as np

from aliquot import contract
from scheduler_plugin.core.cluster.budgets import Budgets
from scheduler_plugin.core.cluster.hold_uids import holds_of
from scheduler_plugin.core.cluster.journal import Snapshot
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.consolidate.movable import gpus_of, lost_gpu_seconds, staying_because
from scheduler_plugin.core.consolidate.reach import Reach, unknown_because
from scheduler_plugin.core.explain.replay import restore
from scheduler_plugin.core.fit.judge import best_row, curable
from scheduler_plugin.core.fit.kube_filters import host_has_room
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.score.cost import HostDemand

MAX_MOVES: Final = 16
"""Moves for one pod, or for each whole node: every move is an eviction and a restart."""
MAX_NODES: Final = 256
"""Nodes that are searched for one pod, those with the least work to lose first."""
MAX_SEATS_TRIED: Final = 8
"""Nodes on which the columns saw a seat and placement finds none."""
SEAT_PREFIX: Final = "seat/"
"""Before the UID of a pod: the UID under which its replacement's seat is reserved, because the replacement's own is unknown yet."""


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the moves are for: exactly one field is set."""

    pod_uid: str = ""
    """A waiting pod."""
    whole_nodes: int = 0
    """This many nodes without a pod on their GPUs."""


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pod ends, and its replacement starts on a seat that is reserved before."""

    pod_uid: str
    pod: str
    """``namespace/name``."""
    from_node: str
    to_node: str
    seat: Mapping[str, Use]
    """What is reserved there, by device UUID."""
    gpus: float
    lost_gpu_seconds: float


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moves in their order."""

    goal: Goal
    nodes: tuple[str, ...]
    """The node of the waiting pod, or the whole nodes."""
    moves: tuple[Move, ...]
    place: Mapping[str, Use] = {}
    """What the waiting pod gets at the end, by device UUID."""

    @property
    def lost_gpu_seconds(self) -> float:
        """The work that all moves lose."""
        return sum(move.lost_gpu_seconds for move in self.moves)

    @property
    def gpus(self) -> float:
        """How many GPUs the pods that move hold."""
        return sum(move.gpus for move in self.moves)


class NoPlan(msgspec.Struct, frozen=True):
    """Why no moves help."""

    sentence: str
    nodes: Mapping[str, int] = {}
    """Number of nodes by what was found there."""


class _Weight(NamedTuple):
    """What a move costs; lower is better."""

    lost: float
    gpus: float


@dataclass(frozen=True, slots=True)
class _Split:
    """The pods with GPUs on a node."""

    movable: tuple[PodFacts, ...]
    staying: tuple[str, ...]
    """Why each of the others must stay."""


def seat_uid(pod_uid: str) -> str:
    """Return the UID under which the seat for a pod's replacement is reserved."""
    return SEAT_PREFIX + pod_uid


def replacement_of(pod: PodFacts) -> PodFacts:
    """Return a pod as its controller recreates it, with the UID of its seat."""
    uid = seat_uid(pod.uid)
    if pod.gpu is None:
        return replace(pod, uid=uid, node_name="")
    annotations = {name: value for name, value in pod.gpu.annotations.items() if name != contract.ANNOTATION_ASSIGNMENT}
    gpu = replace(pod.gpu, uid=uid, node_name="", phase="Pending", annotations=annotations)
    return replace(pod, uid=uid, node_name="", gpu=gpu, deletion_requested=False, started_at=None)


class Trial:
    """A state on which moves are tried; it belongs to the trial, or every change is undone."""

    def __init__(self, state: ClusterState, planner: Planner, budgets: Budgets, now: float, directory: NodeDirectory | None = None) -> None:
        """Args: now: seconds since 1970. directory: labels and taints of nodes; None or empty if they are unknown."""
        self.state = state
        self.planner = planner
        self.budgets = budgets
        self.directory = NodeDirectory() if directory is None else directory
        self._reach = Reach(state, self.directory)
        self._now = now
        held = set(holds_of(state.reservations))
        self._expected = Counter(one.node for uid, one in state.reservations.items() if one.footprint and uid not in held)
        """Reservations by node, before those of the trial, without room that is held for a waiting pod."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Trial":
        """Rebuild the state of a snapshot. Raises SnapshotError."""
        state, budgets = restore(snapshot), Budgets()
        budgets.replace(snapshot.budgets)
        directory, rules = NodeDirectory(), snapshot.rules
        for node in snapshot.node_facts:
            directory.put(node)
        return cls(state, Planner(state, Shapes(state, rules.weights), rules.default_policy), budgets, snapshot.taken_at, directory)

    # --- single steps ---

    def staying_because(self, pod: PodFacts, most_priority: int | None) -> str:
        """Say why a pod must not move; empty if it may."""
        return staying_because(self.state, self.directory, self.budgets, pod, self._now, most_priority)

    def may_use(self, pod: PodFacts, node: str) -> bool:
        """Whether a pod that waits or moves may use a node, as far as its rules about nodes are concerned."""
        return node in self._reach.nodes_for(pod)

    def is_open(self, node: str) -> bool:
        """Whether a node counts as a whole node: no taint closes it, and all its GPU use is known."""
        return node in self._reach.open

    def reserve_place(self, pod: PodFacts, node: str, ending: Iterable[str], expires_at: float = inf) -> bool:
        """Reserve room for the waiting pod as if the ending pods were gone; return whether there is any."""
        with self.state.without_all([pod.uid, *ending]):
            if not self._takes(pod, node):
                return False
        with self.state.without_all(ending):
            return not self.planner.reserve_on(pod, node, expires_at)

    def reserve_seat(self, replacement: PodFacts, node: str, expires_at: float = inf) -> bool:
        """Reserve room for a replacement beside all pods and reservations; return whether there is any."""
        return self._takes(replacement, node) and not self.planner.reserve_on(replacement, node, expires_at)

    def _takes(self, pod: PodFacts, node: str) -> bool:
        """Whether a pod may use a node, and the node has the CPU and RAM for it."""
        row = self.state.row_of(node)
        if row is None or not self.may_use(pod, node):
            return False
        self.state.columns.derive()
        return bool(host_has_room(self.state.columns, np.array([row]), HostDemand(pod.cpu_milli, pod.memory_mib))[0])

    # --- the search ---

    def for_pod(self, pod: PodFacts) -> Plan | NoPlan:
        """Find the cheapest plan for a waiting pod."""
        shape = self.planner.shape_of(pod)
        if shape is None:
            return NoPlan("the pod asks for no GPU, or its request is invalid")
        if unknown := unknown_because(pod, self.directory):
            return NoPlan(unknown)
        usable = self._reach.nodes_for(pod)
        if free := self._seats_for(shape, usable):
            return NoPlan(f"it fits on node {free[0]} without a move, as far as GPUs, CPU, RAM, node labels and taints are concerned")
        best: Plan | None = None
        found: Counter[str] = Counter()
        for node, split in self._candidates(pod, shape, usable):
            plan = self._on_node(pod, node, split, best)
            if isinstance(plan, Plan):
                best = plan
            elif plan:
                found[plan] += 1
        if best is not None:
            return best
        too_small = "no node that it may use is large enough, also without other pods"
        return NoPlan("no node can be freed by moves" if found else too_small, dict(found))

    def for_whole_nodes(self, count: int) -> Plan | NoPlan:
        """Find moves after which this many nodes have no pod on their GPUs; nodes that are free already count."""
        empty = [node.name for node in self.state.gpu_nodes() if self._is_empty(node.name)]
        freed, moves = sorted(empty)[:count], list[Move]()
        found: Counter[str] = Counter()
        for node, split in self._used_nodes(empty):
            if len(freed) >= count:
                break
            seated = split.staying[0] if split.staying else self._seated(split.movable, {*freed, node})
            if isinstance(seated, str):
                found[seated] += 1
            elif not {move.to_node for move in moves} & {node}:
                freed.append(node)
                moves += seated
            else:
                self._release(seated)
        if len(freed) < count:
            return NoPlan(f"moves free {len(freed)} of {count} nodes", dict(found))
        return Plan(Goal(whole_nodes=count), tuple(freed), tuple(moves))

    def _used_nodes(self, empty: Collection[str]) -> list[tuple[str, _Split]]:
        """Return the other open nodes with their pods; the least work first."""
        used = [node.name for node in self.state.gpu_nodes() if self.is_open(node.name) and node.name not in empty]
        return self._least_work_first((name, self._split(name, None)) for name in used)

    def _candidates(self, pod: PodFacts, shape: PodShape, usable: frozenset[str]) -> list[tuple[str, _Split]]:
        """Return the usable nodes that would take the pod without others, with their pods; the least work first."""
        verdict = self.planner.shapes.verdict(shape)
        rows = np.arange(len(verdict.reason))
        possible = rows[curable(verdict, rows) | (verdict.reason == NodeReason.FITS.value)]
        names = [self.state.names[row] for row in possible.tolist() if self.state.names[row] in usable]
        splits = [(name, self._split(name, pod.priority)) for name in names]
        return self._least_work_first(splits)[:MAX_NODES]

    def _least_work_first(self, splits: Iterable[tuple[str, _Split]]) -> list[tuple[str, _Split]]:
        """Sort nodes by what the moves of all their movable pods would cost."""
        return sorted(splits, key=lambda item: (self._weight_of(item[1].movable), item[0]))

    def _on_node(self, pod: PodFacts, node: str, split: _Split, best: Plan | None) -> Plan | str:
        """Find the cheapest moves on one node; a text says why there are none, and is empty if another plan is as cheap."""
        with self._undone(pod):
            if not self._fits(pod, node, split.movable):
                return split.staying[0] if split.staying else "too few GPUs, CPU or RAM also without movable pods"
            why = ""
            for ending in self._spared(pod, node, split.movable):
                if best is not None and self._weight_of(ending) >= _Weight(best.lost_gpu_seconds, best.gpus):
                    continue
                plan = self._with_seats(pod, node, ending)
                if isinstance(plan, Plan):
                    return plan
                why = plan
            return why

    def _with_seats(self, pod: PodFacts, node: str, ending: Sequence[PodFacts]) -> Plan | str:
        """Find seats for these pods beside the waiting pod's place; a text says why there are none."""
        if len(ending) > MAX_MOVES:
            return f"more than {MAX_MOVES} moves"
        self.reserve_place(pod, node, [victim.uid for victim in ending])
        place = dict(self.state.footprint_of(pod.uid))
        seated = self._seated(ending, frozenset())
        if isinstance(seated, str):
            return seated
        self._release(seated)
        return Plan(Goal(pod.uid), (node,), tuple(seated), place)

    @contextmanager
    def _undone(self, pod: PodFacts) -> Iterator[None]:
        """Release the waiting pod's place at the end of the block."""
        try:
            yield
        finally:
            self.state.release(pod.uid)

    def _spared(self, pod: PodFacts, node: str, movable: Sequence[PodFacts]) -> Iterator[list[PodFacts]]:
        """Yield sets of pods that are enough without one to spare: once the most work is spared first, once the most GPUs are."""
        lightest_last = sorted(movable, key=lambda victim: (self._weight(victim), victim.uid), reverse=True)
        smallest_last = sorted(movable, key=lambda victim: (gpus_of(self.state, victim), victim.uid), reverse=True)
        first = self._without_spare(pod, node, lightest_last)
        yield first
        second = self._without_spare(pod, node, smallest_last)
        if {victim.uid for victim in second} != {victim.uid for victim in first}:
            yield second

    def _without_spare(self, pod: PodFacts, node: str, spared_first: Sequence[PodFacts]) -> list[PodFacts]:
        """Leave out one pod after the other, in this order, while the rest is enough."""
        ending = list(spared_first)
        for victim in spared_first:
            rest = [other for other in ending if other is not victim]
            if self._fits(pod, node, rest):
                ending = rest
        return ending

    def _fits(self, pod: PodFacts, node: str, ending: Iterable[PodFacts]) -> bool:
        """Whether the waiting pod fits on a node once these pods have ended."""
        fits = self.reserve_place(pod, node, [victim.uid for victim in ending])
        self.state.release(pod.uid)
        return fits

    def _seated(self, ending: Sequence[PodFacts], excluded: Iterable[str]) -> list[Move] | str:
        """Reserve a seat for each pod, the largest first; without seats for all, reserve none and say which pod has none."""
        closed, moves = frozenset(excluded), list[Move]()
        for pod in sorted(ending, key=lambda pod: (-gpus_of(self.state, pod), pod.uid)):
            replacement = replacement_of(pod)
            shape = self.planner.shape_of(replacement)
            nodes = [] if shape is None else self._seats_for(shape, self._reach.nodes_for(replacement) - closed, replacement.uid)
            node = next((node for node in nodes if self.reserve_seat(replacement, node)), "")
            if not node:
                self._release(moves)
                return "a pod that would have to move has no seat elsewhere"
            weight, seat = self._weight(pod), dict(self.state.footprint_of(replacement.uid))
            moves.append(Move(pod.uid, f"{pod.namespace}/{pod.name}", pod.node_name, node, seat, weight.gpus, weight.lost))
        return moves

    def _seats_for(self, shape: PodShape, usable: frozenset[str], uid: str = "") -> list[str]:
        """Return the usable nodes with free room for a shape, the best first, and not many."""
        verdict = self.planner.shapes.verdict(shape)
        rows = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
        rows = rows[host_has_room(self.state.columns, rows, shape.demand)]
        rows = rows[[self.state.names[row] in usable for row in rows.tolist()]] if len(rows) else rows
        nodes: list[str] = []
        while len(rows) and len(nodes) < MAX_SEATS_TRIED:
            row = best_row(self.planner.shapes, verdict, rows, uid)
            nodes.append(self.state.names[row])
            rows = rows[rows != row]
        return nodes

    def _release(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self.state.release(seat_uid(move.pod_uid))

    def _split(self, node: str, most_priority: int | None) -> _Split:
        held = [pod for pod in self.state.pods_on(node) if self.state.footprint_of(pod.uid)]
        because = {pod.uid: self.staying_because(pod, most_priority) for pod in held}
        movable = sorted((pod for pod in held if not because[pod.uid]), key=lambda pod: pod.uid)
        common = Counter(text for text in because.values() if text)
        expected = self._expected[node]
        staying = [text for text, _ in common.most_common()]
        return _Split(tuple(movable), (*staying, *(("a pod is expected there",) if expected else ())))

    def _is_empty(self, node: str) -> bool:
        split = self._split(node, None)
        return not split.movable and not split.staying and self.is_open(node)

    def _weight(self, pod: PodFacts) -> _Weight:
        return _Weight(lost_gpu_seconds(self.state, pod, self._now), gpus_of(self.state, pod))

    def _weight_of(self, pods: Iterable[PodFacts]) -> _Weight:
        weights = [self._weight(pod) for pod in pods]
        return _Weight(sum(weight.lost for weight in weights), sum(weight.gpus for weight in weights))


def find_plan(snapshot: Snapshot, goal: Goal) -> Plan | NoPlan:
    """Find the cheapest moves for a goal. Raises SnapshotError."""
    trial = Trial.of(snapshot)
    if goal.whole_nodes:
        return trial.for_whole_nodes(goal.whole_nodes)
    pod = trial.state.pods.get(goal.pod_uid)
    if pod is None or pod.node_name:
        return NoPlan("the pod does not wait: it is bound or gone")
    return trial.for_pod(pod)
