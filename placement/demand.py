"""What the pods to come are likely to ask for, by which free room is worth something or is left over.

A demand is a list of shapes with their weights, the most frequent ones of the pods that are known. Before enough pods are known it is
GENERIC: an eighth, a quarter, half and all of any GPU, and two, four and eight of them, alike. Weights are integers that add up to
WEIGHT_SUM, so that what is computed from them is exact, and the same in every form it is computed in.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from placement.device import UNRESERVED_MIN_PERCENT
from proto import units
from proto.model import ContainerRequest, Isolation, PodRequest

PPM: Final = 1_000_000
WEIGHT_SUM: Final = 1_000_000
MAX_SHAPES: Final = 96
"""The cost of rating a node grows with the shapes; those beyond the 96 most frequent ones hardly weigh anything."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What one kind of pod asks of each of its devices, and of the host. The order tells equally frequent ones apart."""

    vgpus: int = 1
    memory_mib: int = 0
    memory_ppm: int = 0
    """Device memory as a part of the device; the larger of both counts."""
    cores_percent: int = UNRESERVED_MIN_PERCENT
    cpu_milli: int = 0
    ram_mib: int = 0
    gpu_type: tuple[str, ...] = ()
    gpu_type_not: tuple[str, ...] = ()

    def memory_on(self, capacity_mib: int) -> int:
        """Return the MiB that one vGPU takes of a device with this much memory."""
        return max(self.memory_mib, -(-capacity_mib * self.memory_ppm // PPM))

    def wants(self, model: str) -> bool:
        """Whether pods of this kind can use devices of a model."""
        lower = model.lower()
        if self.gpu_type and not any(name.lower() in lower for name in self.gpu_type):
            return False
        return not any(name.lower() in lower for name in self.gpu_type_not)


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
        """Return what the shapes need of a device of this kind, those that it cannot serve left out; worked out once for each kind."""
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
        """Weigh the most frequent shapes by how often they occur. At least one count must be above 0."""
        frequent = sorted((item for item in counts.items() if item[1] > 0), key=lambda item: (-item[1], item[0]))[:MAX_SHAPES]
        total = sum(count for _, count in frequent)
        weights = [count * WEIGHT_SUM // total for _, count in frequent]
        weights[0] += WEIGHT_SUM - sum(weights)
        return cls(tuple((shape, weight) for (shape, _), weight in zip(frequent, weights, strict=True)))


_PARTS: Final = {Shape(memory_ppm=PPM // part, cores_percent=units.WHOLE_GPU_PERCENT // part): 1 for part in (1, 2, 4, 8)}
_SETS: Final = {Shape(vgpus=vgpus, memory_ppm=PPM, cores_percent=units.WHOLE_GPU_PERCENT): 1 for vgpus in (2, 4, 8)}
GENERIC: Final = Demand.of(_PARTS | _SETS)


def shape_of(request: PodRequest, cpu_milli: int, ram_mib: int) -> Shape | None:
    """Reduce a pod to its shape: that of the container that asks for most. None when it asks for MIG instances only."""
    lasting = [container for container in request.containers if not container.init and not container.mig]
    if not lasting:
        return None
    largest = max(lasting, key=_size)
    preferences = request.preferences
    exclusive = preferences.isolation is Isolation.EXCLUSIVE
    memory_bytes = None if exclusive else largest.memory_bytes_per_vgpu
    cores = units.WHOLE_GPU_PERCENT if exclusive else largest.cores_percent_per_vgpu
    return Shape(
        vgpus=largest.vgpus,
        memory_mib=0 if memory_bytes is None else memory_bytes // units.MIB,
        memory_ppm=PPM if memory_bytes is None else 0,
        cores_percent=UNRESERVED_MIN_PERCENT if cores is None else cores,
        cpu_milli=cpu_milli,
        ram_mib=ram_mib,
        gpu_type=preferences.gpu_type,
        gpu_type_not=preferences.gpu_type_not,
    )


def _size(container: ContainerRequest) -> tuple[int, bool, int]:
    return container.vgpus, container.memory_bytes is None, container.memory_bytes or 0
