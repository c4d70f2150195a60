# SPDX-License-Identifier: Apache-2.0
"""Decides whether a container uses more compute than its cores, from the driver's samples of its processes.

A sample is the fraction of a moment in which kernels of a process ran. It is not a sum over time: a program that works in bursts has
samples of 100 % between samples of 0 %, and a few of them prove nothing. So a verdict needs most samples of a window, and an average that
is too high even if it is lowered by the uncertainty of such samples. A steady excess is found although it is small, and bursts are no
excess.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.core.cgroups import ContainerRef

WINDOW_SAMPLES = 60
LEAST_SAMPLES = 45
"""Samples of a window that a verdict needs: looks can fail, and a container may have begun to use the GPU later."""
LOOKBACK_SAMPLES = 2
"""Each sample covers so many intervals: the driver makes a new one at least once a second."""
SLACK_PERCENT = 5.0
"""The shim keeps a container within 3 percentage points of its cores over seconds; the driver rounds."""
STANDARD_ERRORS = 3.0
DOUBT_SAMPLES = 4
"""Idle samples that are added to those of a window: a driver that measures a part of each second can miss every pause of a busy program.
So a container with most of a device's cores is never above them."""

Key = tuple[ContainerRef, str]
"""A container and a device UUID."""


@dataclass(frozen=True, slots=True)
class Busy:
    """How busy a container was over the window, in percent of one device."""

    percent: float
    certain_percent: float
    """The average less its uncertainty."""

    def exceeds(self, cores_percent: int) -> bool:
        """Whether it was certainly above its cores."""
        return self.certain_percent > cores_percent + SLACK_PERCENT

    def throttled_percent(self, cores_percent: int) -> int:
        """Return the SM limit that would bring the container back to its cores, if its excess stays in proportion."""
        return max(1, int(cores_percent * cores_percent / max(self.percent, 1.0)))


@dataclass(frozen=True, slots=True)
class BusyHistory:
    """The samples of the last window, the newest last. Each has the fraction of every container that was busy; others were idle."""

    samples: tuple[Mapping[Key, float], ...] = ()

    def after(self, sample: Mapping[Key, float]) -> "BusyHistory":
        """Return the history with one more sample."""
        return BusyHistory((*self.samples, sample)[-WINDOW_SAMPLES:])

    def busy(self) -> Mapping[Key, Busy]:
        """Return the containers with enough samples since they were first busy."""
        keys = {key for sample in self.samples for key in sample}
        ratios = {key: self._since_first(key) for key in keys}
        return {key: _average(found) for key, found in ratios.items() if len(found) >= LEAST_SAMPLES}

    def _since_first(self, key: Key) -> Sequence[float]:
        first = next(index for index, sample in enumerate(self.samples) if key in sample)
        return [sample.get(key, 0.0) for sample in self.samples[first:]]


def _average(ratios: Sequence[float]) -> Busy:
    doubted = [*ratios, *[0.0] * DOUBT_SAMPLES]
    mean = sum(doubted) / len(doubted)
    variance = sum((ratio - mean) ** 2 for ratio in doubted) / (len(doubted) - 1)
    # neighbouring samples overlap, so there are fewer independent ones
    error = math.sqrt(variance * LOOKBACK_SAMPLES / len(doubted))
    return Busy(100 * sum(ratios) / len(ratios), 100 * max(0.0, mean - STANDARD_ERRORS * error))
