"""The devices of all nodes as arrays: one row per node, one column per device, padded to the widest node.

Plain facts (capacities, sums of shares) are written device by device as events come; what follows from them (free memory, fragmentation,
open links) is derived for the changed rows at once, when somebody asks. A sum may exceed its capacity, as in placement.device: facts are
not checked here, free amounts never go below 0. Memory is in MiB: inventory and assignments are.

Every change of a row gives it a new number from one counter, so that results computed from rows know which of them are out of date.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from placement.device import UNRESERVED_MIN_PERCENT
from proto import units
from proto.gpunode import GpuNode
from proto.model import Isolation
from scheduler_plugin.core.links import LinkClass, Matrix, matrix_of
from scheduler_plugin.core.pods import Use

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = Ints
"""Positions of rows."""

PPM: Final = 1_000_000
SHAPES_PPM: Final = (125_000, 250_000, 500_000, 1_000_000)
"""Those of placement.score; tests/property/test_columnar.py compares the results."""
NO_NUMA: Final = -1
ISOLATION_BITS: Final = {backend: 1 << bit for bit, backend in enumerate(Isolation)}
_FIRST_ROWS: Final = 64
_FIRST_WIDTH: Final = 8


class Columns:
    """The arrays, and the few tables they point into."""

    def __init__(self) -> None:
        self.rows = 0
        """Rows in use or free for use again; those beyond are room to grow."""
        self.width = _FIRST_WIDTH
        self.change_count = 0
        self.models: list[str] = []
        """Lower-case model names; ``model`` holds positions in it."""
        self.link_classes: list[LinkClass] = [LinkClass(())]
        self._class_of_matrix: dict[Matrix, int] = {(): 0}
        self.profiles: list[str] = []
        self.mig_total: list[Ints] = []
        """Per profile, instances on each device."""
        self.mig_used: list[Ints] = []
        self.places_of: dict[str, set[tuple[int, int]]] = {}
        """Row and column of a device by its UUID in lower case; several only when nodes were cloned with their UUIDs."""
        self._uuids: dict[int, tuple[str, ...]] = {}
        self._free_rows: list[int] = []
        self._stale: set[int] = set()
        self._allocate(_FIRST_ROWS, _FIRST_WIDTH)

    def _allocate(self, rows: int, width: int) -> None:
        shape = (rows, width)
        self.present = np.zeros(shape, dtype=np.bool_)
        self.healthy = np.zeros(shape, dtype=np.bool_)
        self.cordoned = np.zeros(shape, dtype=np.bool_)
        self.mig = np.zeros(shape, dtype=np.bool_)
        self.capacity_mib = np.zeros(shape, dtype=np.int64)
        self.used_mib = np.zeros(shape, dtype=np.int64)
        self.used_cores = np.zeros(shape, dtype=np.int64)
        self.used_shares = np.zeros(shape, dtype=np.int64)
        self.unreserved = np.zeros(shape, dtype=np.int64)
        self.used_instances = np.zeros(shape, dtype=np.int64)
        self.instances = np.zeros(shape, dtype=np.int64)
        self.numa = np.full(shape, NO_NUMA, dtype=np.int64)
        self.model = np.zeros(shape, dtype=np.int64)
        self.alive = np.zeros(rows, dtype=np.bool_)
        self.devices = np.zeros(rows, dtype=np.int64)
        self.max_shares = np.zeros(rows, dtype=np.int64)
        self.isolation = np.zeros(rows, dtype=np.int64)
        self.link_class = np.zeros(rows, dtype=np.int64)
        self.tie = np.zeros(rows, dtype=np.uint64)
        self.cpu_milli = np.zeros(rows, dtype=np.int64)
        self.cpu_used_milli = np.zeros(rows, dtype=np.int64)
        self.ram_mib = np.zeros(rows, dtype=np.int64)
        self.ram_used_mib = np.zeros(rows, dtype=np.int64)
        self.changed = np.zeros(rows, dtype=np.int64)
        # derived
        self.free_mib = np.zeros(shape, dtype=np.int64)
        self.free_cores = np.zeros(shape, dtype=np.int64)
        self.free_shares = np.zeros(shape, dtype=np.int64)
        self.empty = np.zeros(shape, dtype=np.bool_)
        self.fragmentation = np.zeros(shape, dtype=np.int64)
        self.open_links = np.zeros(shape, dtype=np.int64)
        self.node_free_mib = np.zeros(rows, dtype=np.int64)
        self.node_capacity_mib = np.zeros(rows, dtype=np.int64)
        self.node_empty = np.zeros(rows, dtype=np.bool_)

    # --- rows ---

    def add_row(self) -> int:
        """Return a row for a node that has none."""
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self.rows
            if row == len(self.alive):
                self._grow(2 * row, self.width)
            self.rows += 1
        self.alive[row] = True
        self.touch(row)
        return row

    def drop_row(self, row: int) -> None:
        """Empty a row and keep it for another node."""
        self._name_devices(row, ())
        for array in (*self._arrays(), *self.mig_total, *self.mig_used):
            if array is not self.changed:
                array[row] = 0
        self.numa[row] = NO_NUMA
        self._free_rows.append(row)
        self.touch(row)

    def touch(self, row: int) -> None:
        """Note that a row is no longer what it was."""
        self.change_count += 1
        self.changed[row] = self.change_count
        self._stale.add(row)

    def set_inventory(self, row: int, node: GpuNode) -> None:
        """Write what a node has; what its pods take is written anew by the caller."""
        width = len(node.devices)
        if width > self.width:
            self._grow(len(self.alive), width)
        for array in (*self._device_arrays(), *self.mig_total, *self.mig_used):
            array[row] = 0
        self.numa[row] = NO_NUMA
        self.devices[row] = width
        self.max_shares[row] = node.shares_per_gpu
        self.isolation[row] = sum(ISOLATION_BITS[backend] for backend in set(node.isolation))
        for column, entry in enumerate(node.devices):
            device = entry.device
            self.present[row, column] = True
            self.healthy[row, column] = entry.healthy
            self.cordoned[row, column] = node.is_cordoned(device.uuid)
            self.mig[row, column] = device.mig_enabled
            self.capacity_mib[row, column] = device.memory_bytes // units.MIB
            self.numa[row, column] = NO_NUMA if device.numa_node is None else device.numa_node
            self.model[row, column] = self._model(device.model)
            self.instances[row, column] = len(device.mig_instances)
            for instance in device.mig_instances:
                self.mig_total[self.profile(instance.profile)][row, column] += 1
        self._name_devices(row, tuple(entry.device.uuid.lower() for entry in node.devices))
        self.link_class[row] = self._link_class(matrix_of([entry.device.uuid for entry in node.devices], node.links))
        self.touch(row)

    def add_use(self, row: int, column: int, use: Use, sign: int = 1) -> None:
        """Count, or with ``sign`` -1 no longer count, what a pod takes of a device."""
        self.used_mib[row, column] += sign * use.memory_mib
        self.used_cores[row, column] += sign * use.cores_percent
        self.used_shares[row, column] += sign * use.shares
        self.unreserved[row, column] += sign * use.unreserved
        self.touch(row)

    def set_instance_used(self, row: int, column: int, profile: str, used: bool) -> None:
        """Note that an instance was taken, or is free again."""
        change = 1 if used else -1
        self.mig_used[self.profile(profile)][row, column] += change
        self.used_instances[row, column] += change
        self.touch(row)

    def set_host(self, row: int, cpu_milli: int, ram_mib: int) -> None:
        """Write a node's allocatable CPU and RAM."""
        self.cpu_milli[row], self.ram_mib[row] = cpu_milli, ram_mib
        self.touch(row)

    def add_host_use(self, row: int, cpu_milli: int, ram_mib: int) -> None:
        """Count what a pod requests of the host; negative when it ends."""
        self.cpu_used_milli[row] += cpu_milli
        self.ram_used_mib[row] += ram_mib
        self.touch(row)

    # --- tables ---

    def profile(self, name: str) -> int:
        """Return the position of a MIG profile, made when it is new."""
        if name not in self.profiles:
            self.profiles.append(name)
            self.mig_total.append(np.zeros(self.present.shape, dtype=np.int64))
            self.mig_used.append(np.zeros(self.present.shape, dtype=np.int64))
        return self.profiles.index(name)

    def _name_devices(self, row: int, uuids: tuple[str, ...]) -> None:
        for column, uuid in enumerate(self._uuids.pop(row, ())):
            self.places_of[uuid].discard((row, column))
            if not self.places_of[uuid]:
                del self.places_of[uuid]
        for column, uuid in enumerate(uuids):
            self.places_of.setdefault(uuid, set()).add((row, column))
        if uuids:
            self._uuids[row] = uuids

    def _model(self, name: str) -> int:
        lower = name.lower()
        if lower not in self.models:
            self.models.append(lower)
        return self.models.index(lower)

    def _link_class(self, matrix: Matrix) -> int:
        if not any(map(any, matrix)):
            return 0
        if matrix not in self._class_of_matrix:
            self._class_of_matrix[matrix] = len(self.link_classes)
            self.link_classes.append(LinkClass(matrix))
        return self._class_of_matrix[matrix]

    # --- derivation ---

    def derive(self) -> None:
        """Bring the derived columns of all changed rows up to date."""
        if not self._stale:
            return
        rows = np.fromiter(self._stale, dtype=np.int64, count=len(self._stale))
        self._stale.clear()
        capacity, shares = self.capacity_mib[rows], self.used_shares[rows]
        kept = np.where(self.unreserved[rows] > 0, UNRESERVED_MIN_PERCENT, 0)
        free_mib = np.maximum(0, capacity - self.used_mib[rows])
        free_cores = np.maximum(0, units.WHOLE_GPU_PERCENT - self.used_cores[rows] - kept)
        free_shares = np.maximum(0, self.max_shares[rows, None] - shares)
        present = self.present[rows]
        empty = present & (shares == 0) & (self.used_instances[rows] == 0)
        self.free_mib[rows], self.free_cores[rows], self.free_shares[rows], self.empty[rows] = free_mib, free_cores, free_shares, empty
        memory_ppm = ppm(free_mib, capacity)
        self.fragmentation[rows] = fragmentation_ppm(memory_ppm, ppm(free_cores, units.WHOLE_GPU_PERCENT), free_shares)
        self.open_links[rows] = self._open_links(rows, empty)
        instances = self.instances[rows]
        mig_free = capacity * (instances - self.used_instances[rows]) // np.maximum(1, instances)
        self.node_free_mib[rows] = np.where(self.mig[rows], mig_free, free_mib).sum(axis=1)
        self.node_capacity_mib[rows] = capacity.sum(axis=1)
        self.node_empty[rows] = (empty | ~present).all(axis=1)

    def _open_links(self, rows: Rows, empty: Bools) -> Ints:
        open_links = np.zeros(empty.shape, dtype=np.int64)
        classes = self.link_class[rows]
        for number in np.unique(classes):
            matrix = self.link_classes[number].matrix
            if number and len(matrix):
                of_class = classes == number
                mine = empty[of_class, : len(matrix)].astype(np.int64)
                part = np.zeros((len(mine), empty.shape[1]), dtype=np.int64)
                part[:, : len(matrix)] = (mine @ matrix) * mine
                open_links[of_class] = part
        return open_links

    # --- growth ---

    def _device_arrays(self) -> Sequence[npt.NDArray[np.generic]]:
        facts = (self.present, self.healthy, self.cordoned, self.mig, self.capacity_mib, self.used_mib, self.used_cores, self.used_shares)
        more = (self.unreserved, self.used_instances, self.instances, self.numa, self.model)
        return (*facts, *more)

    def _arrays(self) -> Sequence[npt.NDArray[np.generic]]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def _grow(self, rows: int, width: int) -> None:
        old = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        self._allocate(rows, width)
        self.width = width
        for name, value in old.items():
            _copy_to_corner(value, getattr(self, name))
        for tables in (self.mig_total, self.mig_used):
            for position, table in enumerate(tables):
                tables[position] = np.zeros((rows, width), dtype=np.int64)
                _copy_to_corner(table, tables[position])


def ppm(part: Ints, whole: Ints | int) -> Ints:
    """Express a part in parts per million of the whole; 0 where there is nothing."""
    result: Ints = part * PPM // np.maximum(1, whole)
    return result


def fragmentation_ppm(memory_ppm: Ints, cores_ppm: Ints, free_shares: Ints) -> Ints:
    """Measure what is free and of no use, as placement.score.fragmentation does."""
    free = memory_ppm + cores_ppm
    stranded = len(SHAPES_PPM) * free
    smaller = np.minimum(memory_ppm, cores_ppm)
    for shape in SHAPES_PPM:
        stranded -= 2 * shape * np.minimum(smaller // shape, free_shares)
    return stranded


def _copy_to_corner(values: npt.NDArray[np.generic], room: npt.NDArray[np.generic]) -> None:
    room[tuple(slice(size) for size in values.shape)] = values
