# SPDX-License-Identifier: Apache-2.0
"""How long pods run: what their owners state, or what pods of the same template did before.

Of each template (``core.cluster.pod_template``) the latest lifetimes are kept. Pods that still
run count too, as longer than they have run so far: otherwise short pods, which end first, would stand for all. For pods with the annotation
``aliquot.dev/expected-runtime`` the ratio of the real to the stated runtime is kept instead.

An estimate is a set of possible total runtimes. For a pod that has run for some time, only the longer ones remain. If too few remain, the
pod is expected to run on for about as long as it has run, with a long tail.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler_plugin.core.cluster.durations import expected_runtime
from scheduler_plugin.core.cluster.pod_template import MAX_TEMPLATES, Template, template_of
from scheduler_plugin.core.cluster.pods import PodFacts

KEPT: Final = 256
"""Lifetimes kept for each template."""
MIN_ENDED: Final = 8
"""Fewer pods do not predict the next one."""
MIN_LONGER: Final = 4
"""Fewer lifetimes longer than a pod's age do not predict its end."""
LASTING_KINDS: Final = ("DaemonSet", "Node", "ReplicaSet", "ReplicationController", "StatefulSet")
"""Controllers of services: their pods do not end by themselves."""
_EARLY_RATIOS: Final = (0.6, 0.8, 0.9, 0.95, 1.0, 1.0, 1.0, 1.02, 1.1, 1.3)
"""Real to stated runtime, before a template has its own ratios."""
_TAIL: Final = (1.05, 1.11, 1.25, 1.43, 1.67, 2.0, 2.5, 3.3, 5.0, 10.0)
"""Total runtime to present age of a pod about which nothing else is known: its survival falls as the inverse of the age."""
_POINTS: Final = 64
"""In how many equally likely runtimes a distribution is expressed."""
_MAX_FACTOR: Final = 20.0
"""The longest runtime that is thought possible, as a multiple of the longest that was seen."""
_UPPER: Final = 0.9
"""The quantile by which a pod that backfills is expected to have ended."""
_OVERDUE: Final = 0.95

Seconds: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The possible total runtimes of one pod, sorted, in seconds."""

    totals: tuple[float, ...]
    stated: float | None = None
    """What the annotation says."""

    @property
    def usual(self) -> float:
        """The stated runtime, or else the median."""
        return float(np.median(self.totals)) if self.stated is None else self.stated

    @property
    def most(self) -> float:
        """The stated runtime, or else one that few pods exceed."""
        return float(np.quantile(self.totals, _UPPER)) if self.stated is None else self.stated

    def is_overdue(self, age_seconds: float) -> bool:
        """Whether a pod runs longer than stated, or longer than 19 of 20 pods like it."""
        return age_seconds > (float(np.quantile(self.totals, _OVERDUE)) if self.stated is None else self.stated)

    def left_at(self, age_seconds: float, parts: Seconds) -> Seconds:
        """Return how much longer a pod runs, at these parts of the distribution (0: shortest, 1: longest)."""
        longer = [total for total in self.totals if total > age_seconds]
        if len(longer) < MIN_LONGER:
            longer = sorted([*longer, *(factor * max(age_seconds, 1.0) for factor in _TAIL)])
        left: Seconds = np.maximum(np.quantile(np.array(longer), parts) - age_seconds, 0.0)
        return left


class Lifetimes:
    """What was learned from pods that ended by themselves."""

    def __init__(self) -> None:
        self._totals: OrderedDict[Template, deque[float]] = OrderedDict()
        self._ratios: OrderedDict[Template, deque[float]] = OrderedDict()
        self._ages: Mapping[Template, Sequence[float]] = {}
        self._known: dict[Template, tuple[float, ...]] = {}
        """What was computed since the last change, by template."""

    def learn(self, pod: PodFacts, total_seconds: float) -> None:
        """Note how long a pod ran that ended by itself."""
        template, stated = template_of(pod), expected_runtime(pod)
        if template is not None and total_seconds > 0:
            kept = self._totals if stated is None else self._ratios
            samples = kept.setdefault(template, deque(maxlen=KEPT))
            samples.append(total_seconds / (stated or 1.0))
            self._known.pop(template, None)
            kept.move_to_end(template)
            if len(kept) > MAX_TEMPLATES:
                kept.popitem(last=False)

    def set_ages(self, ages: Mapping[Template, Sequence[float]]) -> None:
        """Store how long the pods of each template have run that still run, in seconds."""
        self._ages = ages
        self._known.clear()

    def of(self, pod: PodFacts) -> Lifetime | None:
        """Return what is known of the runtime of a pod; None if nothing is."""
        template, stated = template_of(pod), expected_runtime(pod)
        if template is None:
            return None
        if stated is not None:
            known = self._ratios.get(template, ())
            ratios = known if len(known) >= MIN_ENDED else _EARLY_RATIOS
            return Lifetime(tuple(sorted(stated * ratio for ratio in ratios)), stated)
        totals = self._totals.get(template, ())
        if len(totals) < MIN_ENDED:
            return None
        if template not in self._known:
            self._known[template] = runtimes(totals, self._ages.get(template, ()))
        return Lifetime(self._known[template])


def runtimes(ended: Iterable[float], running: Iterable[float]) -> tuple[float, ...]:
    """Return equally likely runtimes, sorted, from those of pods that ended and from the present ages of pods that run.

    It is the estimate of Kaplan and Meier. Beyond the longest age that was seen, survival falls as the inverse of the age.
    """
    ends = np.sort(np.fromiter(ended, dtype=np.float64))
    ages = np.sort(np.fromiter(running, dtype=np.float64))
    times, deaths = np.unique(ends, return_counts=True)
    at_risk = (len(ends) - np.searchsorted(ends, times)) + (len(ages) - np.searchsorted(ages, times))
    survival = np.cumprod(1.0 - deaths / at_risk)
    parts = (np.arange(_POINTS) + 0.5) / _POINTS
    positions = np.searchsorted(1.0 - survival, parts)
    longest = max(times[-1], ages[-1] if len(ages) else 0.0)
    # The part of the survivors at the longest age that is still alive at each point.
    left = np.maximum((1.0 - parts) / max(survival[-1], 1e-9), 1.0 / _MAX_FACTOR)
    found = np.where(positions < len(times), times[np.minimum(positions, len(times) - 1)], longest / left)
    return tuple(np.sort(found).tolist())


def ages_by_template(pods: Iterable[PodFacts], now: float) -> dict[Template, list[float]]:
    """Return how long running pods without a stated runtime have run. Args: now: seconds since 1970."""
    ages: dict[Template, list[float]] = {}
    for pod in pods:
        template = None if pod.started_at is None or not pod.node_name or expected_runtime(pod) else template_of(pod)
        if template is not None:
            ages.setdefault(template, []).append(age_of(pod, now))
    return ages


def age_of(pod: PodFacts, now: float) -> float:
    """Return how long a pod has run, in seconds; 0 before it started. Args: now: seconds since 1970."""
    return 0.0 if pod.started_at is None else max(0.0, now - pod.started_at)


def usual_end(pod: PodFacts, lifetime: Lifetime | None, now: float) -> float | None:
    """Return when a bound pod probably ends, in seconds since 1970; now for an overdue one, None if nothing is known."""
    if lifetime is None:
        return None
    age_seconds = age_of(pod, now)
    if lifetime.stated is not None:
        return now + max(0.0, lifetime.stated - age_seconds)
    return now + float(lifetime.left_at(age_seconds, np.array([0.5]))[0])
