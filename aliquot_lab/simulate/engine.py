# SPDX-License-Identifier: Apache-2.0
"""The interface of a policy in a replay, and the state of its cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aliquot_lab.simulate.trace import PodClass, TracePod

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Room:
    """The free amounts of every node, in the order of the trace's nodes."""

    cpu_milli: Ints
    gpu_milli: Ints
    """By node and GPU; -1 where there is no GPU."""


class Engine(Protocol):
    """A cluster with a policy."""

    def place(self, pod: TracePod) -> bool:
        """Place a pod; False when it fits nowhere."""

    def remove(self, pod: TracePod) -> None:
        """Free what a placed pod holds."""

    def room(self) -> Room:
        """Return what is free now."""


def most_frequent(pods: Sequence[TracePod], part: float) -> list[tuple[PodClass, float]]:
    """Return the classes that cover a part of the pods, the most frequent first, with weights that sum up to 1.

    Classes do not differ by memory here: FGD (ATC'23) has no such dimension.
    """
    counts: dict[PodClass, int] = {}
    for pod in pods:
        kind = replace(pod.kind.in_one_dimension(), ram_mib=0)
        counts[kind] = counts.get(kind, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    kept: list[tuple[PodClass, int]] = []
    for kind, count in ordered:
        if sum(taken for _, taken in kept) >= part * len(pods):
            break
        kept.append((kind, count))
    total = sum(count for _, count in kept)
    return [(kind, count / total) for kind, count in kept]
