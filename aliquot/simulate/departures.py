"""Replays with departures: pods come and go at the trace's own times, and wait where nothing is free.

The trace's pods are few for its nodes at any moment, so it is made denser: each pod comes several times, at times of its own near the
first, and only as many nodes are kept, drawn by the seed, as make the GPUs asked for, on average over the busy time, a given part of
those there. Pods that fit on none of these nodes, even when empty, are left out. The busy time is from when a tenth of the pods came
until nine tenths did.

Waiting pods are tried again in the order they came, once a minute while pods leave. Measured over the busy time: the mean part of the
GPUs that is allocated, and how long pods waited.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Final

import numpy as np

from aliquot.simulate.engine import Engine
from aliquot.simulate.extender import ExtenderEngine
from aliquot.simulate.run import TICK_PODS, Task, Tick, make_engine, untold
from aliquot.simulate.trace import WHOLE_GPU_MILLI, PodClass, TraceError, TraceNode, TracePod, capacity_milli, read_nodes

COPIES: Final = 8
RETRY_SECONDS: Final = 60.0
JITTER_SECONDS: Final = 86_400.0
"""Copies come up to so much earlier or later."""


@dataclass(frozen=True, slots=True)
class DepartureResult:
    """What came of one replay."""

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
    """The decision's p99, of the extender's policies."""


@dataclass(slots=True)
class _Busy:
    """The allocation over the time that is measured."""

    begin: float
    end: float
    held: int = 0
    area: float = 0.0
    at: float = 0.0

    def advance(self, now: float) -> None:
        """Count what was held until now."""
        self.area += self.held * max(0.0, min(now, self.end) - max(self.at, self.begin))
        self.at = now


def denser(pods: Sequence[TracePod], seed: int) -> list[TracePod]:
    """Let each pod come COPIES times; sorted by the time it comes."""
    rng = random.Random(seed)  # noqa: S311 (draws lots, keeps no secret)
    copies = []
    for pod in pods:
        for number in range(COPIES):
            shift = rng.uniform(-JITTER_SECONDS, JITTER_SECONDS) if number else 0.0
            created = max(0.0, pod.created_seconds + shift)
            lifetime = pod.deleted_seconds - pod.created_seconds
            copies.append(replace(pod, name=f"{pod.name}-{number}", created_seconds=created, deleted_seconds=created + lifetime))
    return sorted(copies, key=lambda pod: pod.created_seconds)


def busy_time(pods: Sequence[TracePod]) -> tuple[float, float]:
    """Return when a tenth and nine tenths of the pods, which are sorted, have come."""
    return pods[len(pods) // 10].created_seconds, pods[len(pods) * 9 // 10].created_seconds


def fewer_nodes(nodes: Sequence[TraceNode], pods: Sequence[TracePod], load: float, seed: int) -> list[TraceNode]:
    """Keep as many nodes as make the mean demand of the busy time ``load`` of their GPUs."""
    begin, end = busy_time(pods)
    asked = sum(pod.kind.demand_milli * max(0.0, min(pod.deleted_seconds, end) - max(pod.created_seconds, begin)) for pod in pods)
    wanted = asked / (end - begin) / load
    order = random.Random(seed).sample(nodes, len(nodes))  # noqa: S311 (draws lots, keeps no secret)
    sums = list(accumulate(node.gpus * WHOLE_GPU_MILLI for node in order))
    count = int(np.searchsorted(sums, wanted)) + 1
    return sorted(order[:count], key=lambda node: node.name)


def replay_departures(task: Task, load: float, *, tick: Tick = untold) -> DepartureResult:
    """Run one replay. Raises TraceError: the list has no times."""
    every = task.pods()
    if not any(pod.deleted_seconds for pod in every):
        raise TraceError(f"{task.pods_file}: expected creation_time and deletion_time, found none")
    pods = denser(every, task.seed)
    nodes = fewer_nodes(read_nodes(task.nodes_file), pods, load, task.seed)
    pods = [pod for pod in pods if any(_could_hold(node, pod.kind) for node in nodes)]
    engine = make_engine(task.policy, nodes, every, task.seed, rates_cpu_pods=task.rates_cpu_pods)
    replay = _Replay(engine, pods)
    replay.run(tick)
    busy, wait = replay.busy, np.array(replay.waits or [0.0])
    allocated = 100 * busy.area / ((busy.end - busy.begin) * capacity_milli(nodes))
    p99 = 1000 * float(np.quantile(engine.decision_seconds, 0.99)) if isinstance(engine, ExtenderEngine) else None
    gpus = sum(node.gpus for node in nodes)
    found = (allocated, float(wait.mean()), float(np.quantile(wait, 0.95)), len(replay.waiting), p99)
    return DepartureResult(task.trace, task.policy, task.seed, len(nodes), gpus, *found)


class _Replay:
    """The pods that are placed and those that wait."""

    def __init__(self, engine: Engine, pods: Sequence[TracePod]) -> None:
        self._engine = engine
        self._pods = pods
        self.busy = _Busy(*busy_time(pods))
        self.waits: list[float] = []
        """Of the pods that came in the busy time and were placed, in seconds."""
        self.waiting: dict[int, None] = {}
        self._leaving: list[tuple[float, int]] = []
        self._tried_at = -RETRY_SECONDS

    def run(self, tick: Tick) -> None:
        """Let all pods come, and go."""
        for number, pod in enumerate(self._pods):
            if not number % TICK_PODS:
                tick(number / len(self._pods))
            self._let_leave(pod.created_seconds)
            self.busy.advance(pod.created_seconds)
            if not self._place(number, pod.created_seconds):
                self.waiting[number] = None
        self._let_leave(inf)

    def _let_leave(self, until: float) -> None:
        while self._leaving and self._leaving[0][0] <= until:
            now, number = heapq.heappop(self._leaving)
            self.busy.advance(now)
            self._engine.remove(self._pods[number])
            self.busy.held -= self._pods[number].kind.demand_milli
            if self.waiting and now >= self._tried_at + RETRY_SECONDS:
                self._tried_at = now
                self._try_again(now)

    def _try_again(self, now: float) -> None:
        unfit: set[PodClass] = set()
        for number in list(self.waiting):
            kind = self._pods[number].kind
            if kind not in unfit and self._place(number, now):
                del self.waiting[number]
            else:
                unfit.add(kind)

    def _place(self, number: int, now: float) -> bool:
        pod = self._pods[number]
        if not self._engine.place(pod):
            return False
        self.busy.held += pod.kind.demand_milli
        heapq.heappush(self._leaving, (now + pod.deleted_seconds - pod.created_seconds, number))
        if self.busy.begin <= pod.created_seconds <= self.busy.end:
            self.waits.append(now - pod.created_seconds)
        return True


def _could_hold(node: TraceNode, kind: PodClass) -> bool:
    enough = node.cpu_milli >= kind.cpu_milli and node.ram_mib >= kind.ram_mib and node.gpus >= kind.gpus
    return enough and (not kind.models or node.model in kind.models)
