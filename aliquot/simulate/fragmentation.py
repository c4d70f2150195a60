"""The fragmentation measure of FGD (Weng et al., USENIX ATC'23), on arrays.

A node's fragmentation is the part of its free GPU thousandths that a pod drawn from the classes cannot use: all of them when the pod needs
no GPU, another model, more CPU or more GPUs than are free enough; else those on GPUs that have less free than the pod asks for.
"""

from collections.abc import Sequence

import numpy as np

from aliquot.simulate.engine import Bools, Floats, Ints
from aliquot.simulate.trace import WHOLE_GPU_MILLI, PodClass


class Measure:
    """The measure for one list of classes."""

    def __init__(self, classes: Sequence[tuple[PodClass, float]], models: Sequence[str]) -> None:
        """Args: models: their names, by the numbers that nodes have."""
        asking = [(kind, weight) for kind, weight in classes if kind.gpus]
        self._cpu: Ints = np.array([kind.cpu_milli for kind, _ in asking], dtype=np.int64)
        self._wants: Bools = np.array([[not kind.models or model in kind.models for kind, _ in asking] for model in models], dtype=np.bool_)
        sizes = sorted({kind.milli for kind, _ in asking if kind.gpus == 1})
        counts = sorted({kind.gpus for kind, _ in asking if kind.gpus > 1})
        self._single = np.zeros((len(asking), len(sizes) + 1))
        self._several = np.zeros((len(asking), len(counts)))
        self._counts: Ints = np.array(counts, dtype=np.int64)
        for number, (kind, weight) in enumerate(asking):
            if kind.gpus == 1:
                self._single[number, sizes.index(kind.milli) + 1] = weight
            else:
                self._several[number, counts.index(kind.gpus)] = weight
        self._level: Ints = np.searchsorted(np.array(sizes), np.arange(WHOLE_GPU_MILLI + 1), side="right")
        """How many of the sizes fit, by what is free of a GPU."""

    def weights(self, cpu_free: Ints, model: Ints) -> tuple[Floats, Floats]:
        """Return, by node, the weight of pods that a GPU of each level serves, and of those that want several GPUs."""
        fed = ((cpu_free[:, None] >= self._cpu) & self._wants[model]).astype(np.float64)
        return np.cumsum(fed @ self._single, axis=1), fed @ self._several

    def useful_of_gpus(self, free: Ints, single: Floats) -> Floats:
        """Return what single-GPU pods find useful on each GPU."""
        return np.take_along_axis(single, self._level[np.maximum(free, 0)], axis=1) * np.maximum(free, 0)

    def useful_whole(self, whole: Ints, several: Floats) -> Floats:
        """Return what pods of several GPUs find useful, given how many GPUs are wholly free (in any shape)."""
        enough = whole[..., None] >= self._counts
        expanded = several.reshape(several.shape[0], *(1,) * (whole.ndim - 1), several.shape[1])
        total: Floats = (expanded * enough).sum(axis=-1) * whole * WHOLE_GPU_MILLI
        return total

    def fragmentation(self, cpu_free: Ints, free: Ints, model: Ints) -> Floats:
        """Return every node's fragmentation, in thousandths of a GPU."""
        single, several = self.weights(cpu_free, model)
        whole = (free == WHOLE_GPU_MILLI).sum(axis=1)
        useful = self.useful_of_gpus(free, single).sum(axis=1) + self.useful_whole(whole, several)
        left: Floats = np.maximum(free, 0).sum(axis=1) - useful
        return left
