"""The columnar form of a demand: what is left over of devices and nodes, for many at once.

Equals placement.score.fragmentation and score.node_fragmentation on every row; tests/property/test_columnar.py compares them. All sums
are whole numbers below 2^53, so that floating point, which has the fast matrix product, is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from placement.demand import PPM, WEIGHT_SUM, Demand, Shape
from proto import units
from scheduler_plugin.core.score import Kind, scarcity

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]

_CORES_PPM: Final = PPM // units.WHOLE_GPU_PERCENT
_TOO_MUCH: Final = np.iinfo(np.int64).max
UNLIMITED: Final = np.iinfo(np.int64).max
"""What is free of a host that nothing is known of."""


class DemandTable:
    """A demand, worked out for the kinds of devices there are."""

    def __init__(self, demand: Demand, counts: Mapping[Kind, int]) -> None:
        """Args: counts: how many devices there are of each kind, in the order of their numbers; at least one kind."""
        self.demand = demand
        self.scarcity_of_kind = scarcity(demand, counts)
        self.scarcity = np.array([self.scarcity_of_kind.get(kind, 0.0) for kind in counts])
        seats: dict[tuple[object, ...], int] = {}
        seat_of = [seats.setdefault(_seat(shape), len(seats)) for shape, _ in demand.shapes]
        firsts = [demand.shapes[seat_of.index(seat)][0] for seat in range(len(seats))]
        self.seats = len(firsts)
        """What shapes need of a device, each kind of need once."""
        self._need_mib = np.array([_needs(firsts, kind) for kind in counts], dtype=np.int64)
        """By kind and seat; too much for every device when the shape does not want the kind, or there is no device."""
        self._need_cores = np.array([shape.cores_percent for shape in firsts], dtype=np.int64)
        self._vgpus = np.array([shape.vgpus for shape in firsts], dtype=np.int64)
        self._cpu_milli = np.array([shape.cpu_milli for shape, _ in demand.shapes], dtype=np.int64)
        self._ram_mib = np.array([shape.ram_mib for shape, _ in demand.shapes], dtype=np.int64)
        self._weights = np.zeros((len(demand.shapes), len(seats)))
        """By shape and seat."""
        self._weights[np.arange(len(seat_of)), seat_of] = [weight for _, weight in demand.shapes]
        self._seat_weights: Floats = self._weights.sum(axis=0)

    def fits(self, kind: Ints, mib: Ints, cores: Ints, shares: Ints) -> Bools:
        """Say of every device, with so much free, and every seat whether it fits: by row, device and seat."""
        fits: Bools = self._need_mib.take(kind, axis=0) <= (mib * (shares > 0))[:, :, None]
        fits &= self._need_cores <= cores[:, :, None]
        return fits

    def left_of_devices(self, room: Ints, fits: Bools) -> Ints:
        """Return placement.score.fragmentation of every device. Args: room: as ``room_ppm`` gives it."""
        useful = fits.reshape(-1, self.seats) @ self._seat_weights
        left: Ints = (WEIGHT_SUM - useful).astype(np.int64).reshape(room.shape)
        left *= room
        left //= WEIGHT_SUM
        return left

    def left_of_nodes(self, room: Ints, fits: Bools, cpu_free: Ints, ram_free: Ints) -> Floats:
        """Return score.node_fragmentation of every row, in GPUs."""
        summed = np.empty((len(room), 2, room.shape[1]))  # of the devices with each seat, the room and the number
        summed[:, 0], summed[:, 1] = room, 1
        useful, seated = np.matmul(summed, fits.astype(np.float64)).swapaxes(0, 1)
        useful *= seated >= self._vgpus
        fed = (cpu_free[:, None] >= self._cpu_milli) & (ram_free[:, None] >= self._ram_mib)
        useful *= fed @ self._weights
        left: Floats = (room.sum(axis=1) - useful.sum(axis=1) / WEIGHT_SUM) / PPM
        return left


def room_ppm(mib: Ints, capacity_mib: Ints, cores: Ints) -> Ints:
    """Return placement.score.room_ppm of devices; 0 where the capacity is 0, as there is none."""
    room: Ints = mib * PPM // np.maximum(1, capacity_mib)
    room += cores * _CORES_PPM
    room >>= 1
    room *= capacity_mib > 0
    return room


def _seat(shape: Shape) -> tuple[object, ...]:
    """What matters of a shape on the devices: shapes that only differ on the host share a seat."""
    return shape.vgpus, shape.memory_mib, shape.memory_ppm, shape.cores_percent, shape.gpu_type, shape.gpu_type_not


def _needs(shapes: Sequence[Shape], kind: Kind) -> list[int]:
    model, capacity_mib = kind
    return [shape.memory_on(capacity_mib) if capacity_mib and shape.wants(model) else _TOO_MUCH for shape in shapes]
