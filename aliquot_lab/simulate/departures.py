# SPDX-License-Identifier: Apache-2.0
"""Replays with departures: pods arrive and end at the trace's times, and wait when no GPU is free.

The trace has few pods for its nodes at any moment, so the replay makes it denser. Each pod arrives several times, at random times near the
first. Only a part of the nodes is kept, drawn by the seed, so that the average demand over the busy time is a given part of their GPUs.
Pods that do not fit on any of these nodes, even when empty, are left out. The busy time begins when a tenth of the pods has arrived, and
ends at nine tenths.

With consolidation, running pods are moved for a waiting pod of several GPUs: at once when it comes, and every hour while it waits. A moved
pod starts from the beginning, because the trace has no checkpoints, so its work since its start is done a second time. Moves take no time.

Waiting pods are retried in the order of arrival, once a minute while pods end. The result is, over the busy time, the mean allocated part
of the GPUs, and how long pods waited.
"""

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Final

import numpy as np

from aliquot_lab.simulate.engine import Engine
from aliquot_lab.simulate.extender import ExtenderEngine
from aliquot_lab.simulate.run import TICK_PODS, Task, Tick, make_engine, no_progress
from aliquot_lab.simulate.trace import WHOLE_GPU_MILLI, PodClass, TraceError, TraceNode, TracePod, capacity_milli

COPIES: Final = 8
RETRY_SECONDS: Final = 60.0
MOVE_SECONDS: Final = 3600.0
"""How often moves are searched for a waiting pod."""
JITTER_SECONDS: Final = 86_400.0
"""A copy arrives at most this much earlier or later."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long the pods of one size waited, over those that arrived in the busy time and were placed."""

    pods: int
    waited: int
    """How many were not placed at once."""
    mean_seconds: float
    p95_seconds: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Waits":
        """Sum up waits."""
        found = np.array(seconds or [0.0])
        return cls(len(seconds), int((found > 0).sum()), float(found.mean()), float(np.quantile(found, 0.95)))


@dataclass(frozen=True, slots=True)
class DepartureResult:
    """The result of one replay."""

    trace: str
    policy: str
    seed: int
    nodes: int
    gpus: int
    allocated_percent: float
    wait_mean_seconds: float
    wait_p95_seconds: float
    never_placed: int
    decision_p99_ms: float | None
    """Time of a decision; only for the extender's policies."""
    waits: Mapping[str, Waits]
    """By the size of the pods (``PodClass.size``)."""
    moves: int = 0
    """Pods that were moved for others."""
    served_by_moves: int = 0
    """Pods for which others were moved."""
    lost_gpu_hours: float = 0.0
    """Work of the moved pods that was done a second time."""


@dataclass(slots=True)
class _Busy:
    """The allocation over the busy time."""

    begin: float
    end: float
    held: int = 0
    area: float = 0.0
    at: float = 0.0

    def advance(self, now: float) -> None:
        """Add what was allocated until now."""
        self.area += self.held * max(0.0, min(now, self.end) - max(self.at, self.begin))
        self.at = now


def denser(pods: Sequence[TracePod], seed: int) -> list[TracePod]:
    """Return COPIES of each pod, sorted by arrival."""
    rng = random.Random(seed)  # noqa: S311 (random numbers of a simulation, not a secret)
    copies = []
    for pod in pods:
        for number in range(COPIES):
            shift = rng.uniform(-JITTER_SECONDS, JITTER_SECONDS) if number else 0.0
            created = max(0.0, pod.created_seconds + shift)
            lifetime = pod.deleted_seconds - pod.created_seconds
            copies.append(replace(pod, name=f"{pod.name}-{number}", created_seconds=created, deleted_seconds=created + lifetime))
    return sorted(copies, key=lambda pod: pod.created_seconds)


def busy_time(pods: Sequence[TracePod]) -> tuple[float, float]:
    """Return the arrivals at a tenth and at nine tenths of the pods, which must be sorted."""
    return pods[len(pods) // 10].created_seconds, pods[len(pods) * 9 // 10].created_seconds


def fewer_nodes(nodes: Sequence[TraceNode], pods: Sequence[TracePod], load: float, seed: int) -> list[TraceNode]:
    """Return as many nodes as make the mean demand over the busy time the part ``load`` of their GPUs."""
    begin, end = busy_time(pods)
    demand = sum(pod.kind.demand_milli * max(0.0, min(pod.deleted_seconds, end) - max(pod.created_seconds, begin)) for pod in pods)
    wanted = demand / (end - begin) / load
    order = random.Random(seed).sample(nodes, len(nodes))  # noqa: S311 (random numbers of a simulation, not a secret)
    sums = list(accumulate(node.gpus * WHOLE_GPU_MILLI for node in order))
    count = int(np.searchsorted(sums, wanted)) + 1
    return sorted(order[:count], key=lambda node: node.name)


def placeable(nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> list[TracePod]:
    """Leave out pods that do not fit on any of these nodes, even when empty."""
    return [pod for pod in pods if any(_could_hold(node, pod.kind) for node in nodes)]


def replay_departures(
    task: Task, load: float, consolidates: bool = False, most_pods: int | None = None, *, tick: Tick = no_progress
) -> DepartureResult:
    """Run one replay.

    Args:   consolidates: move pods; only the extender's policies do. most_pods: replay only this many arrivals, on the same nodes.
    Raises: TraceError: the list has no times.
    """
    every_node, listed = task.read()
    if not any(pod.deleted_seconds for pod in listed):
        raise TraceError(f"{task.pods_file}: expected the columns creation_time and deletion_time, found no times")
    pods = denser(listed, task.seed)
    nodes = fewer_nodes(every_node, pods, load, task.seed)
    pods = placeable(nodes, pods)[:most_pods]
    engine = make_engine(task.policy, nodes, listed, task.seed, rates_cpu_pods=task.rates_cpu_pods)
    replay = _Replay(engine, pods, engine if consolidates and isinstance(engine, ExtenderEngine) else None)
    replay.run(tick)
    p99 = 1000 * float(np.quantile(engine.decision_seconds, 0.99)) if isinstance(engine, ExtenderEngine) else None
    return _result(task, nodes, replay, p99)


def _result(task: Task, nodes: Sequence[TraceNode], replay: "_Replay", decision_p99_ms: float | None) -> DepartureResult:
    """Sum up a replay that has ended."""
    busy = replay.busy
    every = Waits.of([wait for waits in replay.waits.values() for wait in waits])
    by_size = {size: Waits.of(waits) for size, waits in sorted(replay.waits.items())}
    allocated = 100 * busy.area / ((busy.end - busy.begin) * capacity_milli(nodes))
    gpus = sum(node.gpus for node in nodes)
    found = (allocated, every.mean_seconds, every.p95_seconds, len(replay.waiting), decision_p99_ms)
    moved = (replay.moves, replay.served_by_moves, replay.lost_gpu_seconds / 3600)
    return DepartureResult(task.trace, task.policy, task.seed, len(nodes), gpus, *found, by_size, *moved)


class _Replay:
    """The state of a replay: placed and waiting pods."""

    def __init__(self, engine: Engine, pods: Sequence[TracePod], mover: ExtenderEngine | None = None) -> None:
        """Args: mover: the engine, if it moves pods."""
        self._engine = engine
        self._mover = mover
        self._pods = pods
        self._number_of = {} if mover is None else {pod.name: number for number, pod in enumerate(pods)}
        self.busy = _Busy(*busy_time(pods))
        self.waits: dict[str, list[float]] = {}
        """By size, waits in seconds of placed pods that arrived in the busy time."""
        self.waiting: dict[int, float] = {}
        """When moves were searched last for each waiting pod."""
        self.moves = self.served_by_moves = 0
        self.lost_gpu_seconds = 0.0
        self._ending: list[tuple[float, int]] = []
        self._ends: dict[int, float] = {}
        """When each placed pod ends; an entry of ``_ending`` with another time is stale."""
        self._tried_at = -RETRY_SECONDS

    def run(self, tick: Tick) -> None:
        """Run until all pods have arrived and ended."""
        for number, pod in enumerate(self._pods):
            if not number % TICK_PODS:
                tick(number / len(self._pods))
            now = pod.created_seconds
            self._end_pods(now)
            self.busy.advance(now)
            if not self._place(number, now) and not self._move_for(number, now):
                self.waiting[number] = now
        self._end_pods(inf)

    def _end_pods(self, until: float) -> None:
        while self._ending and self._ending[0][0] <= until:
            now, number = heapq.heappop(self._ending)
            if self._ends.get(number) != now:
                continue
            del self._ends[number]
            self.busy.advance(now)
            self._engine.remove(self._pods[number])
            self.busy.held -= self._pods[number].kind.demand_milli
            if self.waiting and now >= self._tried_at + RETRY_SECONDS:
                self._tried_at = now
                self._retry(now)

    def _retry(self, now: float) -> None:
        unfit: set[PodClass] = set()
        for number, searched_at in list(self.waiting.items()):
            kind = self._pods[number].kind
            if kind not in unfit and self._place(number, now):
                del self.waiting[number]
                continue
            unfit.add(kind)
            if now >= searched_at + MOVE_SECONDS:
                if self._move_for(number, now):
                    del self.waiting[number]
                else:
                    self.waiting[number] = now

    def _place(self, number: int, now: float) -> bool:
        if self._mover is not None:
            self._mover.now = now
        if not self._engine.place(self._pods[number]):
            return False
        self._note_placed(number, now)
        return True

    def _move_for(self, number: int, now: float) -> bool:
        """Move others for a pod of several GPUs that was not placed; return whether it is placed now."""
        pod = self._pods[number]
        if self._mover is None or pod.kind.gpus < 2:
            return False
        plan = self._mover.move_for(pod)
        if plan is None:
            return False
        self.served_by_moves += 1
        self.moves += len(plan.moves)
        self.lost_gpu_seconds += plan.lost_gpu_seconds
        for moved in (self._number_of[move.pod_uid] for move in plan.moves):
            self._start(moved, now)
        self._note_placed(number, now)
        return True

    def _note_placed(self, number: int, now: float) -> None:
        pod = self._pods[number]
        self.busy.held += pod.kind.demand_milli
        self._start(number, now)
        if self.busy.begin <= pod.created_seconds <= self.busy.end:
            self.waits.setdefault(pod.kind.size, []).append(now - pod.created_seconds)

    def _start(self, number: int, now: float) -> None:
        pod = self._pods[number]
        self._ends[number] = now + pod.deleted_seconds - pod.created_seconds
        heapq.heappush(self._ending, (self._ends[number], number))


def _could_hold(node: TraceNode, kind: PodClass) -> bool:
    enough = node.cpu_milli >= kind.cpu_milli and node.ram_mib >= kind.ram_mib and node.gpus >= kind.gpus
    return enough and (not kind.models or node.model in kind.models)
