# SPDX-License-Identifier: Apache-2.0
"""What a simulation found: the end of each workload, waits by class, and curves over time."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from aliquot_lab.simulate.engine import Floats
from aliquot_lab.simulate.timeline.model import Workload, size_order

MAX_POINTS: Final = 240
"""Points of a curve in a report."""


class End(StrEnum):
    """The state of a workload at the end of the simulation. Each workload has exactly one."""

    ENDED = "ended"
    RUNNING = "running"
    """It has no duration."""
    WAITING = "waiting"
    """It had quota, if it needs any, and no node had room."""
    QUEUED = "queued"
    """It waited for quota."""
    REFUSED = "refused"
    """No node could take one of its pods, even without other pods."""


class Sample(NamedTuple):
    """The state after an event. Amounts are thousandths of GPUs."""

    seconds: float
    held_milli: int
    whole_nodes: int
    waiting: int
    """Workloads."""


class Point(NamedTuple):
    """Averages over one part of the time."""

    seconds: float
    """When the part begins."""
    allocated_percent: float
    whole_nodes: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Record:
    """What happened to one workload."""

    workload: Workload
    end: End
    started_seconds: float | None
    """The first start."""
    wait_seconds: float
    """Until the first start; without one, until the end of the simulation."""
    preempted: int
    """How often it was ended for another one, and started from its beginning."""
    reason: str
    """Why it did not start when it was tried first; empty: it did."""


@dataclass(frozen=True, slots=True)
class ClassWaits:
    """The waits of one class, in seconds. Workloads that never started count with their wait so far."""

    size: str
    workloads: int
    waited: int
    never_started: int
    mean: float
    p50: float
    p95: float
    longest: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one policy."""

    policy: str
    seed: int
    nodes: int
    gpus: int
    records: Sequence[Record]
    samples: Sequence[Sample]
    begin_seconds: float
    """The first arrival."""
    arrived_seconds: float
    """The last arrival. Averages are over the time from the first one to here, or to the end if all arrive at once."""
    end_seconds: float
    """The last arrival, start or end."""
    preemptions: int
    """Workloads ended for more important ones."""
    reclaims: int
    """Workloads ended because their queue had borrowed."""
    lost_gpu_seconds: float
    """GPU time of ended workloads that must be repeated."""

    @property
    def allocated_percent(self) -> float:
        """Return the mean allocated part of all GPUs."""
        return self._mean(lambda sample: sample.held_milli) / (10 * self.gpus)

    @property
    def mean_whole_nodes(self) -> float:
        """Return the mean number of nodes without a pod on a GPU."""
        return self._mean(lambda sample: sample.whole_nodes)

    @property
    def ends(self) -> Mapping[End, int]:
        """Return the number of workloads by their end."""
        counts = Counter(record.end for record in self.records)
        return {end: counts[end] for end in End}

    @property
    def reasons(self) -> Mapping[str, int]:
        """Return why workloads did not start at once, the most frequent reason first."""
        counts = Counter(record.reason for record in self.records if record.reason)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def waits(self) -> list[ClassWaits]:
        """Return the waits by class. Refused workloads do not count: they would wait forever."""
        by_size: dict[str, list[Record]] = {}
        for record in self._startable:
            by_size.setdefault(record.workload.size, []).append(record)
        return [_waits(size, by_size[size]) for size in sorted(by_size, key=size_order)]

    @property
    def all_waits(self) -> ClassWaits:
        """Return the waits of all classes together."""
        return _waits("all", self._startable)

    @property
    def _startable(self) -> list[Record]:
        return [record for record in self.records if record.end is not End.REFUSED]

    def curve(self, points: int = MAX_POINTS) -> list[Point]:
        """Return averages over equal parts of the time."""
        span = self.end_seconds - self.begin_seconds
        if span <= 0:
            return []
        edges = self.begin_seconds + span * np.arange(points + 1) / points
        at = np.array([sample.seconds for sample in self.samples])
        columns = [
            _averages(edges, at, np.array([sample[field] for sample in self.samples], dtype=np.float64))
            for field in range(1, len(Sample._fields))
        ]
        return [
            Point(float(edge), float(held) / (10 * self.gpus), float(whole), float(waiting))
            for edge, held, whole, waiting in zip(edges, *columns, strict=False)
        ]

    def _mean(self, field: Callable[[Sample], float]) -> float:
        until = self.arrived_seconds if self.arrived_seconds > self.begin_seconds else self.end_seconds
        if until <= self.begin_seconds:
            return field(self.samples[-1])
        moments = [min(sample.seconds, until) for sample in self.samples] + [until]
        area = sum(field(sample) * (end - begin) for sample, begin, end in zip(self.samples, moments, moments[1:], strict=False))
        return area / (until - self.begin_seconds)


def _waits(size: str, records: Sequence[Record]) -> ClassWaits:
    seconds = np.array([record.wait_seconds for record in records] or [0.0])
    p50, p95 = (float(value) for value in np.quantile(seconds, (0.5, 0.95)))
    never = sum(record.started_seconds is None for record in records)
    return ClassWaits(size, len(records), int((seconds > 0).sum()), never, float(seconds.mean()), p50, p95, float(seconds.max()))


def _averages(edges: Floats, at: Floats, values: Floats) -> Floats:
    """Return the averages of a step function between the edges."""
    # The integral up to any moment is linear between two samples, so its differences at the edges are exact.
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(at))])
    last = np.searchsorted(at, edges, side="right") - 1
    integral = area[last] + values[last] * (edges - at[last])
    means: Floats = np.diff(integral) / np.diff(edges)
    return means
