# SPDX-License-Identifier: Apache-2.0
"""How often the times that ``aliquot why`` states come true: a replay with departures, held room and backfill, by the scheduler's own code.

The pods state no runtimes, so lifetimes are learned from pods that ended in the replay. Each statement is about the future, and nothing of
it is known when it is made. To have no pod whose copy has ended already, each copy has the lifetime of another pod of its class.

The oldest waiting pod that fits nowhere gets held room. When it gets it, and then once an hour, the interval is noted. It hits if the pod
starts within it. Pods that wait without held room state nothing.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from aliquot.contract.model import Policy
from aliquot_lab.simulate.departures import RETRY_SECONDS, Waits, busy_time, denser, fewer_nodes, placeable
from aliquot_lab.simulate.extender import HoldingEngine
from aliquot_lab.simulate.run import TICK_PODS, PolicyError, Task, Tick, no_progress, weights_of
from aliquot_lab.simulate.trace import PodClass, TraceError, TracePod
from scheduler_plugin.core.score.cost import Weights

STATE_SECONDS: Final = 3600.0
"""How often a pod's interval is noted while it waits."""
LEVEL: Final = 0.8
"""What part of the intervals should hit."""


@dataclass(frozen=True, slots=True)
class StartsResult:
    """The result of one replay."""

    trace: str
    seed: int
    load: float
    holds: bool
    """Whether room was held; without it nothing is stated."""
    nodes: int
    allocated_percent: float
    owners: int
    """Pods that got held room and started in the replay."""
    stated: int
    """Intervals that were noted for them."""
    first_hit_percent: float
    """Of the first interval of each owner."""
    hit_percent: float
    """Of all intervals."""
    early_percent: float
    """Of all intervals: the pod started earlier."""
    median_width_hours: float
    waits: Mapping[str, Waits]
    """By the size of the pods."""


@dataclass(frozen=True, slots=True)
class _Stated:
    number: int
    low: float
    high: float
    is_first: bool


def replay_starts(
    task: Task, load: float, most_pods: int | None = None, *, holds: bool = True, drifts: bool = False, tick: Tick = no_progress
) -> StartsResult:
    """Run one replay.

    Args:   as for ``replay_departures``. drifts: whether the classes exchange their lifetimes half way.
    Raises: TraceError: the list has no times.
    """
    every_node, listed = task.read()
    if not any(pod.deleted_seconds for pod in listed):
        raise TraceError(f"{task.pods_file}: expected the columns creation_time and deletion_time, found no times")
    pods = with_lifetimes_of_others(denser(listed, task.seed), task.seed)
    begin, _ = busy_time(pods)
    pods = [pod for pod in pods if pod.kind.gpus and pod.created_seconds >= begin][:most_pods]
    pods = with_lifetimes_of_other_classes(pods, task.seed) if drifts else pods
    begin, end = busy_time(pods)
    if begin == end:
        raise TraceError(f"{task.pods_file}: expected arrivals at several times, found {len(pods)} at once")
    nodes = fewer_nodes(every_node, pods, load, task.seed)
    pods = placeable(nodes, pods)
    replay = _Replay(HoldingEngine(nodes, *_policy(task.policy)), pods, holds=holds)
    replay.run(tick)
    return replay.result(task, load, len(nodes))


def _policy(text: str) -> tuple[Policy, Weights]:
    found = weights_of(text)
    if found is None:
        raise PolicyError(f"expected one of the extender's policies with held room, found {text}")
    return found


def with_lifetimes_of_others(pods: Sequence[TracePod], seed: int) -> list[TracePod]:
    """Exchange the lifetimes of pods of one class among each other."""
    rng = random.Random(seed)  # noqa: S311 (random numbers of a simulation, not a secret)
    lifetimes: dict[PodClass, list[float]] = defaultdict(list)
    for pod in pods:
        lifetimes[pod.kind].append(pod.deleted_seconds - pod.created_seconds)
    for kind in lifetimes.values():
        rng.shuffle(kind)
    return [replace(pod, deleted_seconds=pod.created_seconds + lifetimes[pod.kind].pop()) for pod in pods]


def with_lifetimes_of_other_classes(pods: Sequence[TracePod], seed: int) -> list[TracePod]:
    """Give each pod of the later half a lifetime of another class: the most frequent class and the next one exchange, and so on."""
    rng, half = random.Random(seed), len(pods) // 2  # noqa: S311 (random numbers of a simulation, not a secret)
    lifetimes: dict[PodClass, list[float]] = defaultdict(list)
    for pod in pods:
        lifetimes[pod.kind].append(pod.deleted_seconds - pod.created_seconds)
    order = sorted(lifetimes, key=lambda kind: len(lifetimes[kind]), reverse=True)
    partners = dict(pair for one, other in zip(order[::2], order[1::2], strict=False) for pair in ((one, other), (other, one)))
    later = [
        replace(pod, deleted_seconds=pod.created_seconds + rng.choice(lifetimes[partners.get(pod.kind, pod.kind)])) for pod in pods[half:]
    ]
    return [*pods[:half], *later]


class _Replay:
    """The state of a replay."""

    def __init__(self, engine: HoldingEngine, pods: Sequence[TracePod], *, holds: bool) -> None:
        self._engine = engine
        self._pods = pods
        self._holds = holds
        self._waiting: dict[int, None] = {}
        self._ending: list[tuple[float, int]] = []
        self._tried_at = -RETRY_SECONDS
        self._owner: int | None = None
        self._stated_at = -inf
        self._stated: list[_Stated] = []
        self._started: dict[int, float] = {}
        self._waits: dict[str, list[float]] = {}
        self._begin, self._end = busy_time(pods)
        self._held = self._at = self._area = 0.0

    def run(self, tick: Tick) -> None:
        """Run until all pods have arrived."""
        for number, pod in enumerate(self._pods):
            if not number % TICK_PODS:
                tick(number / len(self._pods))
            now = pod.created_seconds
            self._end_pods(now)
            self._advance(now)
            self._engine.arrive(pod, now)
            if not self._place(number, now):
                self._waiting[number] = None
                self._hold(now)
        self._end_pods(inf)

    def result(self, task: Task, load: float, nodes: int) -> StartsResult:
        """Sum up a replay that has ended."""
        noted = [(one, self._started[one.number]) for one in self._stated if one.number in self._started]
        hits = [one.low <= at <= one.high for one, at in noted]
        first = [hit for (one, _), hit in zip(noted, hits, strict=True) if one.is_first]
        early = [at < one.low for one, at in noted]
        widths = sorted((one.high - one.low) / 3600 for one, _ in noted)
        return StartsResult(
            task.trace,
            task.seed,
            load,
            self._holds,
            nodes,
            100 * self._area / ((self._end - self._begin) * self._engine.capacity_milli),
            len(first),
            len(noted),
            _percent(first),
            _percent(hits),
            _percent(early),
            widths[len(widths) // 2] if widths else 0.0,
            {size: Waits.of(waits) for size, waits in sorted(self._waits.items())},
        )

    def _advance(self, now: float) -> None:
        self._area += self._held * max(0.0, min(now, self._end) - max(self._at, self._begin))
        self._at = now

    def _end_pods(self, until: float) -> None:
        while self._ending and self._ending[0][0] <= until:
            now, number = heapq.heappop(self._ending)
            self._advance(now)
            self._engine.end(self._pods[number], now)
            self._held -= self._pods[number].kind.demand_milli
            if self._waiting and now >= self._tried_at + RETRY_SECONDS:
                self._tried_at = now
                self._retry(now)

    def _retry(self, now: float) -> None:
        """Try all waiting pods in their order, then hold room for the first that still waits."""
        self._note(now)
        unfit: set[PodClass] = set()
        for number in list(self._waiting):
            kind = self._pods[number].kind
            if number == self._owner or kind not in unfit:
                if self._place(number, now):
                    del self._waiting[number]
                elif number != self._owner:
                    unfit.add(kind)
        self._hold(now)

    def _place(self, number: int, now: float) -> bool:
        pod = self._pods[number]
        if not self._engine.try_placing(pod, now):
            return False
        if number == self._owner:
            self._owner = None
            self._engine.drop_hold()
        self._held += pod.kind.demand_milli
        self._started[number] = now
        heapq.heappush(self._ending, (now + pod.deleted_seconds - pod.created_seconds, number))
        if self._begin <= pod.created_seconds <= self._end:
            self._waits.setdefault(pod.kind.size, []).append(now - pod.created_seconds)
        return True

    def _hold(self, now: float) -> None:
        """Hold room for the oldest waiting pod, if none is held."""
        if self._owner is not None or not self._holds:
            return
        for number in self._waiting:
            if self._engine.hold_for(self._pods[number], now):
                self._owner, self._stated_at = number, -inf
                self._note(now, is_first=True)
                return

    def _note(self, now: float, *, is_first: bool = False) -> None:
        """Note the interval of the pod with held room, if it is time."""
        if self._owner is None or now < self._stated_at + STATE_SECONDS:
            return
        interval = self._engine.interval(now)
        if interval is not None:
            self._stated_at = now
            has_stated = any(one.number == self._owner for one in self._stated)
            self._stated.append(_Stated(self._owner, *interval, is_first or not has_stated))


def _percent(found: Sequence[bool]) -> float:
    return 100 * sum(found) / len(found) if found else 0.0
