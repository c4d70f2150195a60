# SPDX-License-Identifier: Apache-2.0
"""The fragmentation measure of FGD (Weng et al., USENIX ATC'23), on arrays.

A node's fragmentation is the part of its free GPU thousandths that a pod drawn from the classes cannot use. That is all of them when the
pod needs no GPU, another model, more CPU than is free, or more GPUs than have enough free. Otherwise it is what is free on GPUs that have
less than the pod requests.
"""

from collections.abc import Sequence

import numpy as np

from aliquot_lab.simulate.engine import Bools, Floats, Ints
from aliquot_lab.simulate.trace import WHOLE_GPU_MILLI, PodClass


class Measure:
    """The measure for one list of classes."""

    def __init__(self, classes: Sequence[tuple[PodClass, float]], models: Sequence[str]) -> None:
        """Args: models: names of the GPU models, in the order of their numbers in ``model``."""
        kinds = [(kind, weight) for kind, weight in classes if kind.gpus]
        self._cpu: Ints = np.array([kind.cpu_milli for kind, _ in kinds], dtype=np.int64)
        self._accepts: Bools = np.array([[_accepts(kind, model) for kind, _ in kinds] for model in models], dtype=np.bool_)
        sizes = sorted({kind.milli for kind, _ in kinds if kind.gpus == 1})
        counts = sorted({kind.gpus for kind, _ in kinds if kind.gpus > 1})
        self._counts: Ints = np.array(counts, dtype=np.int64)
        self._single, self._several = _weights_by_size(kinds, sizes, counts)
        self._level: Ints = np.searchsorted(np.array(sizes), np.arange(WHOLE_GPU_MILLI + 1), side="right")
        """Number of sizes that fit, by the free thousandths of a GPU."""

    def weights(self, cpu_free: Ints, model: Ints) -> tuple[Floats, Floats]:
        """Return by node the weight of pods that a GPU of each level serves, and of pods with several GPUs."""
        served = ((cpu_free[:, None] >= self._cpu) & self._accepts[model]).astype(np.float64)
        return np.cumsum(served @ self._single, axis=1), served @ self._several

    def useful_of_gpus(self, free: Ints, single: Floats) -> Floats:
        """Return the thousandths of each GPU that single-GPU pods can use."""
        return np.take_along_axis(single, self._level[np.maximum(free, 0)], axis=1) * np.maximum(free, 0)

    def useful_whole(self, whole: Ints, several: Floats) -> Floats:
        """Return the thousandths that pods with several GPUs can use, by the number of free whole GPUs (in any shape)."""
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


def _accepts(kind: PodClass, model: str) -> bool:
    return not kind.models or model in kind.models


def _weights_by_size(kinds: Sequence[tuple[PodClass, float]], sizes: Sequence[int], counts: Sequence[int]) -> tuple[Floats, Floats]:
    """Return the weight of each class in the column of its size (1 GPU or less), and in the column of its number of GPUs (several)."""
    single, several = np.zeros((len(kinds), len(sizes) + 1)), np.zeros((len(kinds), len(counts)))
    for number, (kind, weight) in enumerate(kinds):
        if kind.gpus == 1:
            single[number, sizes.index(kind.milli) + 1] = weight
        else:
            several[number, counts.index(kind.gpus)] = weight
    return single, several
