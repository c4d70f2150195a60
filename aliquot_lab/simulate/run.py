# SPDX-License-Identifier: Apache-2.0
"""Runs replays. Each has a trace, a policy and a seed, and returns what was allocated. Replays are independent and run in parallel.

``replay_arrivals`` is the procedure of FGD's evaluation. Pods arrive in random order and stay; a pod that does not fit is not retried. The
allocation is noted when the arrived demand reaches 100 % of the GPUs, and at the end, 130 %. For every tenth, the curve has the allocation,
the nodes that can still take a pod with eight GPUs, and the pods refused so far.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import numpy as np

from aliquot.contract.model import Policy
from aliquot_lab.simulate import baselines
from aliquot_lab.simulate.engine import Engine, most_frequent
from aliquot_lab.simulate.extender import ExtenderEngine
from aliquot_lab.simulate.fragmentation import Measure
from aliquot_lab.simulate.trace import (
    MIXES,
    WHOLE_GPU_MILLI,
    PodClass,
    TraceNode,
    TracePod,
    arrivals,
    capacity_milli,
    read_nodes,
    read_pods,
)
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, Weights

POLICIES: Final = (*(policy.value for policy in Policy), *baselines.BASELINES)
"""The extender's policies, then the published ones."""
NOTED_PERCENT: Final = (100, 130)
CURVE_PERCENT: Final = tuple(range(10, NOTED_PERCENT[-1] + 1, 10))
LARGE_POD_GPUS: Final = 8
"""The GPUs of the pods for which whole nodes are counted."""
TICK_PODS: Final = 50
TYPICAL_PART: Final = 0.95
"""Fragmentation is measured with the classes that cover this part of the pods, for all policies."""

_R = TypeVar("_R", covariant=True)

Tick = Callable[[float], None]
"""Called periodically with the done part of a replay, from 0 to 1."""


def no_progress(_: float) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, slots=True)
class Task:
    """One replay."""

    nodes_file: Path
    pods_file: Path
    trace: str
    policy: str
    seed: int
    rates_cpu_pods: bool = True
    """Whether the extender's policies place pods without GPUs too; if not, kube-scheduler's defaults do."""

    mix: str = ""
    """A change of the trace, one of MIXES; empty: none."""

    def read(self) -> tuple[list[TraceNode], list[TracePod]]:
        """Read the nodes and the pods. Raises TraceError."""
        nodes, pods = read_nodes(self.nodes_file), read_pods(self.pods_file)
        return MIXES[self.mix](nodes, pods, self.seed) if self.mix else (nodes, pods)

    @property
    def own_cores(self) -> bool:
        """Whether compute is a separate dimension."""
        return self.mix in ("own-compute", "much-memory")


@dataclass(frozen=True, slots=True)
class Point:
    """The state of a replay when some demand has arrived."""

    arrived_percent: int
    """Of all GPUs, one of CURVE_PERCENT."""
    allocated_percent: float
    whole_nodes: int
    """Nodes with eight free GPUs and the CPU that the smallest pod with eight GPUs requests."""
    refused: Mapping[str, int]
    """Pods that were not placed so far, by their size (``PodClass.size``)."""

    @property
    def refused_large(self) -> int:
        """How many pods with several GPUs were not placed."""
        return sum(count for size, count in self.refused.items() if size not in ("share", "0", "1"))


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a replay. Percentages are of all GPUs."""

    trace: str
    policy: str
    seed: int
    allocated_percent: tuple[float, ...]
    """At NOTED_PERCENT of arrived demand; the mean of memory and compute where these are separate dimensions."""
    fragmented_percent: tuple[float, ...]
    seconds: float
    curve: tuple[Point, ...] = ()
    memory_percent: tuple[float, ...] = ()
    """Allocated memory, and in ``cores_percent`` compute, where these are separate dimensions."""
    cores_percent: tuple[float, ...] = ()
    decision_p50_ms: float | None = None
    decision_p99_ms: float | None = None
    """Time of a decision, from the scores to the plan; only for the extender's policies."""


class PolicyError(ValueError):
    """A policy that does not exist, or weights that it does not have. The message says what was expected and what was found."""


def weights_of(policy: str) -> tuple[Policy, Weights] | None:
    """Read a policy with changed weights, such as ``frag:cpu_used=0,whole_node=0.01``; None for a published one. Raises PolicyError."""
    name, _, changes = policy.partition(":")
    if name in baselines.BASELINES and not changes:
        return None
    try:
        known, changed = Policy(name), dict[str, float]()
    except ValueError as exc:
        raise PolicyError(f"expected a policy of {', '.join(POLICIES)}, found {policy!r}") from exc
    for change in changes.split(",") if changes else ():
        term, _, value = change.partition("=")
        try:
            changed[term] = float(value)
        except ValueError as exc:
            raise PolicyError(f"{policy}: expected TERM=NUMBER, found {change!r}") from exc
    try:
        return known, replace(DEFAULT_WEIGHTS[known], **changed)
    except TypeError as exc:
        terms = ", ".join(field.name for field in fields(Weights))
        raise PolicyError(f"{policy}: expected terms of {terms}, found {', '.join(changed)}") from exc


def make_engine(policy: str, nodes: Sequence[TraceNode], pods: Sequence[TracePod], seed: int, *, rates_cpu_pods: bool = True) -> Engine:
    """Create the engine of a policy. Args: pods: the trace, from which FGD takes its classes. Raises PolicyError."""
    ours = weights_of(policy)
    if ours is None:
        return baselines.make(policy, nodes, pods, seed)
    return ExtenderEngine(nodes, ours[0], {**DEFAULT_WEIGHTS, ours[0]: ours[1]}, rates_cpu_pods=rates_cpu_pods)


class Replayer(Protocol[_R]):
    """Runs one replay."""

    def __call__(self, task: Task, /, *, tick: Tick = ...) -> _R:
        """Args: tick: called with the progress. Raises TraceError."""


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """The state at NOTED_PERCENT of arrived demand, in percent of all GPUs, and the curve."""

    memory: tuple[float, ...]
    cores: tuple[float, ...]
    fragmented: tuple[float, ...]
    curve: tuple[Point, ...]

    @property
    def allocated(self) -> tuple[float, ...]:
        """Return the mean of memory and compute, which are equal where pods request only parts of GPUs."""
        return tuple((memory + cores) / 2 for memory, cores in zip(self.memory, self.cores, strict=True))


def replay(task: Task, *, tick: Tick = no_progress) -> Result:
    """Run one replay. Raises TraceError."""
    nodes, pods = task.read()
    begun = time.perf_counter()
    engine = make_engine(task.policy, nodes, pods, task.seed, rates_cpu_pods=task.rates_cpu_pods)
    noted = replay_arrivals(engine, nodes, pods, task.seed, tick=tick)
    seconds = time.perf_counter() - begun
    memory, cores = (noted.memory, noted.cores) if task.own_cores else ((), ())
    result = Result(task.trace, task.policy, task.seed, noted.allocated, noted.fragmented, seconds, noted.curve, memory, cores)
    if not isinstance(engine, ExtenderEngine):
        return result
    p50, p99 = (1000 * float(value) for value in np.quantile(engine.decision_seconds, (0.5, 0.99)))
    return replace(result, decision_p50_ms=p50, decision_p99_ms=p99)


def replay_arrivals(
    engine: Engine, nodes: Sequence[TraceNode], pods: Sequence[TracePod], seed: int, *, tick: Tick = no_progress
) -> ReplayFigures:
    """Place arriving pods until the demand is NOTED_PERCENT[-1] of the GPUs."""
    capacity = capacity_milli(nodes)
    notes = _Notes(engine, nodes, pods)
    arrived, due = 0, list(CURVE_PERCENT)
    arriving = arrivals(pods, seed, NOTED_PERCENT[-1] * capacity // 100)
    for number, pod in enumerate(arriving):
        arrived += pod.kind.demand_milli
        notes.count(pod.kind, placed=engine.place(pod))
        while len(due) > 1 and arrived * 100 >= due[0] * capacity:
            notes.take(due.pop(0))
        if not number % TICK_PODS:
            tick(number / len(arriving))
    for percent in due:
        notes.take(percent)
    return notes.figures()


class _Notes:
    """What a replay notes of its engine."""

    def __init__(self, engine: Engine, nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> None:
        models = sorted({node.model for node in nodes})
        self._engine = engine
        self._capacity = capacity_milli(nodes)
        self._model = np.array([models.index(node.model) for node in nodes])
        self._measure = Measure(most_frequent(pods, TYPICAL_PART), models)
        self._large_cpu = min((pod.kind.cpu_milli for pod in pods if pod.kind.gpus == LARGE_POD_GPUS), default=0)
        self._memory = self._cores = 0
        self._refused: Counter[str] = Counter()
        self._curve: list[Point] = []
        self._noted: list[tuple[float, float, float]] = []

    def count(self, kind: PodClass, *, placed: bool) -> None:
        """Count a pod that arrived."""
        if placed:
            self._memory += kind.memory_milli
            self._cores += kind.compute_milli
        else:
            self._refused[kind.size] += 1

    def take(self, percent: int) -> None:
        """Note the state when this part of the demand has arrived."""
        room = self._engine.room()
        memory, cores = 100 * self._memory / self._capacity, 100 * self._cores / self._capacity
        if percent in NOTED_PERCENT:
            fragmented = float(self._measure.fragmentation(room.cpu_milli, room.gpu_milli, self._model).sum())
            self._noted.append((memory, cores, 100 * fragmented / self._capacity))
        free_gpus = (room.gpu_milli == WHOLE_GPU_MILLI).sum(axis=1)
        whole = int(((free_gpus >= LARGE_POD_GPUS) & (room.cpu_milli >= self._large_cpu)).sum())
        self._curve.append(Point(percent, (memory + cores) / 2, whole, dict(sorted(self._refused.items()))))

    def figures(self) -> ReplayFigures:
        """Return all that was noted."""
        memory, cores, fragmented = zip(*self._noted, strict=True)
        return ReplayFigures(memory, cores, fragmented, tuple(self._curve))


def run_all(
    replayer: Replayer[_R], tasks: Sequence[Task], jobs: int, done: Callable[[Task], None], part: Callable[[Task, float], None]
) -> list[_R]:
    """Run replays in ``jobs`` processes, or in this process when ``jobs`` is 1. Results are in the order of the tasks.

    Args: done: called for every finished replay. part: called with the progress of a replay in this process.
    """
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            running = {pool.submit(replayer, task): task for task in tasks}
            for ended in as_completed(running):
                done(running[ended])
            return [replayed.result() for replayed in running]
    results = []
    for task in tasks:
        results.append(replayer(task, tick=partial(part, task)))
        done(task)
    return results
