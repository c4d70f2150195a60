# SPDX-License-Identifier: Apache-2.0
"""Counts the requests of all known pods by shape: the demand by which the policy frag rates free room.

Bound and waiting pods count equally, each once, for as long as they are known. Invariant: the demand depends on the pods alone and not on
their order, so that each replica computes the same after a restart.
"""

from collections import Counter
from typing import Final, TypeAlias

from aliquot import contract
from aliquot.contract.model import Pod
from aliquot.placement.demand import GENERIC, Demand, Shape, shape_of
from aliquot.placement.request import RequestError, pod_request
from scheduler_plugin.core.cluster.pods import PodFacts

MIN_PODS: Final = 32
"""Fewer pods do not predict the next ones."""
_DRIFT: Final = 4
"""The demand is stale once a quarter of the pods came or went since it was taken."""


_MAX_READ: Final = 4096
_Text: TypeAlias = tuple[int, int, tuple[object, ...], tuple[object, ...]]


class Wanted:
    """The counts, updated pod by pod."""

    def __init__(self) -> None:
        self._counts: Counter[Shape] = Counter()
        self._shapes: dict[str, Shape] = {}
        self._read: dict[_Text, Shape | None] = {}
        self._changes = 0

    def see(self, pod: PodFacts) -> None:
        """Count a pod, in place of its earlier shape."""
        shape = self._shape(pod)
        if self._shapes.get(pod.uid) == shape:
            return
        self.forget(pod.uid)
        if shape is not None:
            self._shapes[pod.uid] = shape
            self._counts[shape] += 1
            self._changes += 1

    def forget(self, pod_uid: str) -> None:
        """Stop counting a pod."""
        shape = self._shapes.pop(pod_uid, None)
        if shape is not None:
            self._changes += 1
            self._counts[shape] -= 1
            if not self._counts[shape]:
                del self._counts[shape]

    @property
    def drifted(self) -> bool:
        """Whether the demand that was taken last is stale."""
        return self._changes >= max(MIN_PODS, len(self._shapes) // _DRIFT)

    def take(self) -> Demand:
        """Return the present demand."""
        self._changes = 0
        return Demand.of(self._counts) if len(self._shapes) >= MIN_PODS else GENERIC

    def _shape(self, pod: PodFacts) -> Shape | None:
        """Return a pod's shape. Cached by content: most pods are alike, and parsing each would double the time of a restart."""
        if pod.gpu is None:
            return None
        text = _text(pod, pod.gpu)
        if text not in self._read:
            if len(self._read) >= _MAX_READ:
                self._read.clear()
            self._read[text] = _read(pod, pod.gpu)
        return self._read[text]


def _text(pod: PodFacts, gpu: Pod) -> _Text:
    """Return all that a shape can depend on."""
    limits = tuple((spec.init, spec.restartable, *spec.limits.items()) for spec in gpu.containers)
    preferences = tuple(item for item in gpu.annotations.items() if item[0] != contract.ANNOTATION_ASSIGNMENT)
    return pod.cpu_milli, pod.memory_mib, limits, preferences


def _read(pod: PodFacts, gpu: Pod) -> Shape | None:
    """Reduce a pod; None if it asks for no vGPU or is invalid."""
    try:
        return shape_of(pod_request(gpu), pod.cpu_milli, pod.memory_mib)
    except RequestError:
        return None
