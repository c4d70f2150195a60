# SPDX-License-Identifier: Apache-2.0
"""The columnar form of a demand: the useless room of devices and nodes, for many at once.

Invariant: it equals placement.score.fragmentation and score.node_fragmentation on each row; tests/property/test_columnar.py compares them.
All sums are whole numbers below 2^53, so that floating point, which has the fast matrix product, is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aliquot.contract import units
from aliquot.placement.demand import PPM, WEIGHT_SUM, Demand, Shape
from scheduler_plugin.core.score.cost import MAX_SEAT_VALUE, Kind, Scarcity, insistence, seat_values

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]

_CORES_PPM: Final = PPM // units.WHOLE_GPU_PERCENT
_TOO_MUCH: Final = np.iinfo(np.int64).max
UNLIMITED: Final = np.iinfo(np.int64).max
"""The free CPU and RAM of an unknown host."""


class DemandTable:
    """A demand, prepared for the present kinds of devices."""

    def __init__(self, demand: Demand, counts: Mapping[Kind, int], free: Mapping[Kind, int] | None = None) -> None:
        """Args: counts: the number of devices of each kind, in the order of the kinds' numbers; at least one. free: for ``scarcity``."""
        self.demand = demand
        self.counts = counts
        self._insistence = insistence(demand, counts)
        self.scarcity_of_kind: Scarcity = {}
        self.scarcity: Floats = np.zeros(len(counts))
        """By kind."""
        self.free = counts if free is None else free
        self.set_free(self.free)
        self.seat_values = seat_values(demand, counts)
        self.seat_part: Floats = np.array([self.seat_values.get(kind, 1.0) for kind in counts]) / MAX_SEAT_VALUE
        """By kind, as score.NodeView.seat_part."""
        seats: dict[tuple[object, ...], int] = {}
        seat_of = [seats.setdefault(_seat(shape), len(seats)) for shape, _ in demand.shapes]
        firsts = [demand.shapes[seat_of.index(seat)][0] for seat in range(len(seats))]
        self.seats = len(firsts)
        """Number of different needs of the shapes on a device."""
        self._need_mib = np.array([_needs(firsts, kind) for kind in counts], dtype=np.int64)
        """By kind and seat; more than any device has if the shape cannot use the kind, or if the kind means no device."""
        self._need_cores = np.array([shape.cores_percent for shape in firsts], dtype=np.int64)
        self._vgpus = np.array([shape.vgpus for shape in firsts], dtype=np.int64)
        self._cpu_milli = np.array([shape.cpu_milli for shape, _ in demand.shapes], dtype=np.int64)
        self._ram_mib = np.array([shape.ram_mib for shape, _ in demand.shapes], dtype=np.int64)
        self._weights = np.zeros((len(demand.shapes), len(seats)))
        """By shape and seat."""
        self._weights[np.arange(len(seat_of)), seat_of] = [weight for _, weight in demand.shapes]
        self._seat_weights: Floats = self._weights.sum(axis=0)

    @property
    def names_models(self) -> bool:
        """Whether scarcity depends on what is free."""
        return bool(self._insistence.named)

    def set_free(self, free: Mapping[Kind, int]) -> Ints:
        """Use these free devices from now on. Return the numbers of the kinds with a new scarcity."""
        self.free, self.scarcity_of_kind = free, self._insistence.at(free)
        before, self.scarcity = self.scarcity, np.array([self.scarcity_of_kind.get(kind, 0.0) for kind in self.counts])
        return np.flatnonzero(before != self.scarcity)

    def fits(self, kind: Ints, mib: Ints, cores: Ints, shares: Ints) -> Bools:
        """Return for each device, with these free amounts, and each seat whether it fits: by row, device and seat."""
        fits: Bools = self._need_mib.take(kind, axis=0) <= (mib * (shares > 0))[:, :, None]
        fits &= self._need_cores <= cores[:, :, None]
        return fits

    def left_of_devices(self, room: Ints, fits: Bools) -> Ints:
        """Return aliquot.placement.score.fragmentation of each device. Args: room: as ``room_ppm`` returns it."""
        useful = fits.reshape(-1, self.seats) @ self._seat_weights
        left: Ints = (WEIGHT_SUM - useful).astype(np.int64).reshape(room.shape)
        left *= room
        left //= WEIGHT_SUM
        return left

    def left_of_nodes(self, room: Ints, fits: Bools, cpu_free: Ints, ram_free: Ints) -> Floats:
        """Return score.node_fragmentation of each row, in GPUs."""
        summed = np.empty((len(room), 2, room.shape[1]))  # per seat: the room of the devices that fit, and their number
        summed[:, 0], summed[:, 1] = room, 1
        useful, seated = np.matmul(summed, fits.astype(np.float64)).swapaxes(0, 1)
        useful *= seated >= self._vgpus
        fed = (cpu_free[:, None] >= self._cpu_milli) & (ram_free[:, None] >= self._ram_mib)
        useful *= fed @ self._weights
        left: Floats = (room.sum(axis=1) - useful.sum(axis=1) / WEIGHT_SUM) / PPM
        return left


def room_ppm(mib: Ints, capacity_mib: Ints, cores: Ints) -> Ints:
    """Return aliquot.placement.score.room_ppm of devices; 0 for a capacity of 0, which means no device."""
    room: Ints = mib * PPM // np.maximum(1, capacity_mib)
    room += cores * _CORES_PPM
    room >>= 1
    room *= capacity_mib > 0
    return room


def _seat(shape: Shape) -> tuple[object, ...]:
    """Return the part of a shape that matters on devices: shapes that differ only on the host share a seat."""
    return shape.vgpus, shape.memory_mib, shape.memory_ppm, shape.cores_percent, shape.gpu_type, shape.gpu_type_not


def _needs(shapes: Sequence[Shape], kind: Kind) -> list[int]:
    capacity_mib = kind.memory_mib
    return [shape.memory_on(capacity_mib) if capacity_mib and shape.wants(kind.model) else _TOO_MUCH for shape in shapes]
