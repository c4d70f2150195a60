"""Replays: a trace, a policy and a seed in, what was allocated out. Each is independent, so they run in as many processes as wanted.

``arrivals`` is the procedure of FGD's evaluation: pods come in random order and stay, what does not fit is not tried again, and what is
allocated is noted when the demand that arrived reaches 100 % of the GPUs and at the end, 130 %.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import numpy as np

from aliquot.simulate import baselines
from aliquot.simulate.engine import Engine, most_frequent
from aliquot.simulate.extender import ExtenderEngine
from aliquot.simulate.fragmentation import Measure
from aliquot.simulate.trace import TraceNode, TracePod, arrivals, capacity_milli, read_nodes, read_pods, with_own_cores
from proto.model import Policy

POLICIES: Final = (*(policy.value for policy in Policy), *baselines.BASELINES)
"""The extender's policies, then the others'."""
NOTED_PERCENT: Final = (100, 130)
TICK_PODS: Final = 50
TYPICAL_PART: Final = 0.95
"""Fragmentation is measured over the classes that make up this part of the pods, whatever the policy looks at."""

_R = TypeVar("_R", covariant=True)

Tick = Callable[[float], None]
"""Told, from time to time, how much of a replay is done, as a part of 1."""


def untold(_: float) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Task:
    """One replay."""

    nodes_file: Path
    pods_file: Path
    trace: str
    policy: str
    seed: int
    own_cores: bool = False
    """Whether compute is a dimension of its own (trace.with_own_cores)."""
    rates_cpu_pods: bool = True
    """Whether the extender's policies place pods without GPUs too, or kube-scheduler's defaults do."""

    def pods(self) -> list[TracePod]:
        """Read the pods. Raises TraceError."""
        pods = read_pods(self.pods_file)
        return with_own_cores(pods, self.seed) if self.own_cores else pods


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a replay. Percentages are of all GPUs."""

    trace: str
    policy: str
    seed: int
    allocated_percent: tuple[float, ...]
    """At NOTED_PERCENT of arrived demand; the mean of memory and compute where these are dimensions of their own."""
    fragmented_percent: tuple[float, ...]
    seconds: float
    memory_percent: tuple[float, ...] = ()
    """Allocated memory and, next, compute, where these are dimensions of their own."""
    cores_percent: tuple[float, ...] = ()
    decision_p50_ms: float | None = None
    decision_p99_ms: float | None = None
    """Of the extender's policies: from the verdict to the plan."""


def make_engine(policy: str, nodes: Sequence[TraceNode], pods: Sequence[TracePod], seed: int, *, rates_cpu_pods: bool = True) -> Engine:
    """Make the engine of a policy. Args: pods: the trace that FGD takes its classes from."""
    if policy in baselines.BASELINES:
        return baselines.make(policy, nodes, pods, seed)
    return ExtenderEngine(nodes, Policy(policy), rates_cpu_pods=rates_cpu_pods)


class Replayer(Protocol[_R]):
    """Runs one replay."""

    def __call__(self, task: Task, /, *, tick: Tick = ...) -> _R:
        """Args: tick: told how far it is. Raises TraceError."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What a replay of arrivals left, at NOTED_PERCENT of arrived demand, in percent of all GPUs."""

    memory: tuple[float, ...]
    cores: tuple[float, ...]
    fragmented: tuple[float, ...]

    @property
    def allocated(self) -> tuple[float, ...]:
        """The mean of memory and compute, which are the same where pods ask for parts of GPUs only."""
        return tuple((memory + cores) / 2 for memory, cores in zip(self.memory, self.cores, strict=True))


def replay(task: Task, *, tick: Tick = untold) -> Result:
    """Run one replay. Raises TraceError."""
    nodes, pods = read_nodes(task.nodes_file), task.pods()
    begun = time.perf_counter()
    engine = make_engine(task.policy, nodes, pods, task.seed, rates_cpu_pods=task.rates_cpu_pods)
    noted = replay_arrivals(engine, nodes, pods, task.seed, tick=tick)
    seconds = time.perf_counter() - begun
    memory, cores = (noted.memory, noted.cores) if task.own_cores else ((), ())
    result = Result(task.trace, task.policy, task.seed, noted.allocated, noted.fragmented, seconds, memory, cores)
    if not isinstance(engine, ExtenderEngine):
        return result
    p50, p99 = (1000 * float(value) for value in np.quantile(engine.decision_seconds, (0.5, 0.99)))
    return replace(result, decision_p50_ms=p50, decision_p99_ms=p99)


def replay_arrivals(engine: Engine, nodes: Sequence[TraceNode], pods: Sequence[TracePod], seed: int, *, tick: Tick = untold) -> Noted:
    """Let pods arrive until the demand is NOTED_PERCENT[-1] of the GPUs."""
    capacity = capacity_milli(nodes)
    models = sorted({node.model for node in nodes})
    model = np.array([models.index(node.model) for node in nodes])
    measure = Measure(most_frequent(pods, TYPICAL_PART), models)
    arrived = memory = cores = 0
    noted: list[tuple[float, float, float]] = []

    def note() -> None:
        room = engine.room()
        fragmented = float(measure.fragmentation(room.cpu_milli, room.gpu_milli, model).sum())
        noted.append((100 * memory / capacity, 100 * cores / capacity, 100 * fragmented / capacity))

    coming = arrivals(pods, seed, NOTED_PERCENT[-1] * capacity // 100)
    for number, pod in enumerate(coming):
        arrived += pod.kind.demand_milli
        if engine.place(pod):
            memory += pod.kind.memory_milli
            cores += pod.kind.compute_milli
        if not noted and arrived * 100 >= NOTED_PERCENT[0] * capacity:
            note()
        if not number % TICK_PODS:
            tick(number / len(coming))
    if not noted:
        note()
    note()
    columns = [tuple(column) for column in zip(*noted, strict=True)]
    return Noted(*columns)


def run_all(
    replayer: Replayer[_R], tasks: Sequence[Task], jobs: int, done: Callable[[Task], None], part: Callable[[Task, float], None]
) -> list[_R]:
    """Run replays in ``jobs`` processes; in this one when that is 1. Results come in the order of the tasks.

    Args: done: told every replay that ended. part: told how much of a replay is done, where it runs in this process.
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
