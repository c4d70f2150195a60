"""What the pods that are known ask for, counted by shape: the demand by which the policy frag rates what is free.

Bound and waiting pods count alike, each once, for as long as they are known. What follows from it depends on the pods alone, not on the
order in which they came, so that every replica finds the same after a restart.
"""

from collections import Counter
from typing import Final, TypeAlias

from placement.demand import GENERIC, Demand, Shape, shape_of
from placement.request import RequestError, pod_request
from proto import contract
from proto.model import Pod
from scheduler_plugin.core.pods import PodFacts

MIN_PODS: Final = 32
"""Fewer say nothing about those to come."""
_DRIFT: Final = 4
"""The demand is out of date once a quarter of the pods came or went since it was last taken."""


_MAX_READ: Final = 4096
_Text: TypeAlias = tuple[int, int, tuple[object, ...], tuple[object, ...]]


class Wanted:
    """The counts, kept up pod by pod."""

    def __init__(self) -> None:
        self._counts: Counter[Shape] = Counter()
        self._shapes: dict[str, Shape] = {}
        self._read: dict[_Text, Shape | None] = {}
        self._changes = 0

    def see(self, pod: PodFacts) -> None:
        """Count a pod, in place of what it was before."""
        shape = self._shape(pod)
        if self._shapes.get(pod.uid) == shape:
            return
        self.forget(pod.uid)
        if shape is not None:
            self._shapes[pod.uid] = shape
            self._counts[shape] += 1
            self._changes += 1

    def forget(self, pod_uid: str) -> None:
        """Count a pod no longer."""
        shape = self._shapes.pop(pod_uid, None)
        if shape is not None:
            self._changes += 1
            self._counts[shape] -= 1
            if not self._counts[shape]:
                del self._counts[shape]

    @property
    def drifted(self) -> bool:
        """Whether the demand is worth taking anew."""
        return self._changes >= max(MIN_PODS, len(self._shapes) // _DRIFT)

    def take(self) -> Demand:
        """Return the demand of the pods as they are."""
        self._changes = 0
        return Demand.of(self._counts) if len(self._shapes) >= MIN_PODS else GENERIC

    def _shape(self, pod: PodFacts) -> Shape | None:
        """Read a pod's shape; pods come in few, and reading the limits of each anew would double the time a restart takes."""
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
    wishes = tuple(item for item in gpu.annotations.items() if item[0] != contract.ANNOTATION_ASSIGNMENT)
    return pod.cpu_milli, pod.memory_mib, limits, wishes


def _read(pod: PodFacts, gpu: Pod) -> Shape | None:
    """Reduce a pod; None for one that asks for no vGPU, or for what nobody can give."""
    try:
        return shape_of(pod_request(gpu), pod.cpu_milli, pod.memory_mib)
    except RequestError:
        return None
