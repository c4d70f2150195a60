# SPDX-License-Identifier: Apache-2.0
"""The requests that future pods are likely to make. By them, free room is rated as useful or useless.

A demand is a list of shapes with weights: of the known pods, the shapes that request the most GPUs. Before enough pods are known it is
GENERIC: an eighth, a quarter, half and all of any GPU, and two, four and eight whole GPUs, with equal weights. Weights are integers that
add up to WEIGHT_SUM, so that results are exact, and equal in the scalar and the columnar form.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, Isolation, PodRequest
from aliquot.placement import model_name
from aliquot.placement.device import UNRESERVED_MIN_PERCENT

PPM: Final = 1_000_000
WEIGHT_SUM: Final = 1_000_000
MAX_SHAPES: Final = 96
"""The time to rate a node grows with the number of shapes; the weight of rarer ones is negligible."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The request of one kind of pod to each of its devices, and to the host. The order decides between equally frequent ones."""

    vgpus: int = 1
    memory_mib: int = 0
    memory_ppm: int = 0
    """Device memory as a part of the device; the larger of ``memory_mib`` and this counts."""
    cores_percent: int = UNRESERVED_MIN_PERCENT
    cpu_milli: int = 0
    ram_mib: int = 0
    gpu_type: tuple[str, ...] = ()
    gpu_type_not: tuple[str, ...] = ()

    @property
    def names_models(self) -> bool:
        """Whether pods of this kind can use some models only."""
        return bool(self.gpu_type or self.gpu_type_not)

    def memory_on(self, capacity_mib: int) -> int:
        """Return the MiB that one vGPU takes of a device with this much memory."""
        return max(self.memory_mib, -(-capacity_mib * self.memory_ppm // PPM))

    def wants(self, model: str) -> bool:
        """Whether pods of this kind can use devices of a model."""
        return model_name.wanted(model, self.gpu_type, self.gpu_type_not)


class Seat(NamedTuple):
    """What one vGPU needs of a device, and the weight of the shapes that need it."""

    memory_mib: int
    cores_percent: int
    weight: int


@dataclass(frozen=True, slots=True)
class Demand:
    """Shapes and their weights, which add up to WEIGHT_SUM."""

    shapes: tuple[tuple[Shape, int], ...]
    _seats: dict[tuple[str, int], tuple[Seat, ...]] = field(default_factory=dict, compare=False, repr=False)

    def seats_on(self, model: str, capacity_mib: int) -> tuple[Seat, ...]:
        """Return what the shapes need of a device of this kind, without those that do not fit; computed once for each kind."""
        known = self._seats.get((model, capacity_mib))
        if known is None:
            weights: Counter[tuple[int, int]] = Counter()
            for shape, weight in self.shapes:
                if shape.wants(model) and shape.memory_on(capacity_mib) <= capacity_mib:
                    weights[shape.memory_on(capacity_mib), shape.cores_percent] += weight
            known = self._seats[model, capacity_mib] = tuple(Seat(*need, weight) for need, weight in weights.items())
        return known

    @classmethod
    def of(cls, counts: Mapping[Shape, int]) -> "Demand":
        """Weigh the shapes that request the most GPUs by their counts. At least one count must be above 0.

        By counts alone, a few pods with eight GPUs would not be among them, and no node would be kept for these.
        """
        frequent = sorted((item for item in counts.items() if item[1] > 0), key=lambda item: (-item[1] * item[0].vgpus, item[0]))[
            :MAX_SHAPES
        ]
        total = sum(count for _, count in frequent)
        weights = [count * WEIGHT_SUM // total for _, count in frequent]
        weights[0] += WEIGHT_SUM - sum(weights)
        return cls(tuple((shape, weight) for (shape, _), weight in zip(frequent, weights, strict=True)))


_PARTS: Final = {Shape(memory_ppm=PPM // part, cores_percent=units.WHOLE_GPU_PERCENT // part): 1 for part in (1, 2, 4, 8)}
_SETS: Final = {Shape(vgpus=vgpus, memory_ppm=PPM, cores_percent=units.WHOLE_GPU_PERCENT): 1 for vgpus in (2, 4, 8)}
GENERIC: Final = Demand.of(_PARTS | _SETS)


def shape_of(request: PodRequest, cpu_milli: int, ram_mib: int) -> Shape | None:
    """Reduce a pod to its shape: that of its largest request. None for a pod with MIG instances only."""
    lasting = [container for container in request.containers if not container.init and not container.mig]
    if not lasting:
        return None
    largest = max(lasting, key=_size)
    preferences = request.preferences
    is_exclusive = preferences.isolation is Isolation.EXCLUSIVE
    memory_mib, memory_ppm, cores_percent = _WHOLE if is_exclusive else _part_of_device(largest)
    return Shape(
        vgpus=largest.vgpus,
        memory_mib=memory_mib,
        memory_ppm=memory_ppm,
        cores_percent=cores_percent,
        cpu_milli=cpu_milli,
        ram_mib=ram_mib,
        gpu_type=preferences.gpu_type,
        gpu_type_not=preferences.gpu_type_not,
    )


_WHOLE: Final = (0, PPM, units.WHOLE_GPU_PERCENT)


def _part_of_device(request: ContainerRequest) -> tuple[int, int, int]:
    """Return the fields ``memory_mib``, ``memory_ppm`` and ``cores_percent`` of the shape of a request that shares devices."""
    cores_percent = UNRESERVED_MIN_PERCENT if request.cores_percent_per_vgpu is None else request.cores_percent_per_vgpu
    if request.memory_bytes_per_vgpu is not None:
        return request.memory_bytes_per_vgpu // units.MIB, 0, cores_percent
    memory_percent = request.memory_percent_per_vgpu or units.WHOLE_GPU_PERCENT
    return 0, memory_percent * PPM // units.WHOLE_GPU_PERCENT, cores_percent


def _size(container: ContainerRequest) -> tuple[int, bool, int, int]:
    return container.vgpus, container.asks_whole_memory, container.memory_percent or 0, container.memory_bytes or 0
