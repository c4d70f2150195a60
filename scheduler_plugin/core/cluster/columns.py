# SPDX-License-Identifier: Apache-2.0
"""The devices of all nodes as arrays: one row per node, one column per device, padded to the widest node.

Facts (capacities, sums of shares) are written device by device as events come. Derived values (free memory, fragmentation, open links) are
computed for all changed rows together, before they are read. A sum may exceed its capacity, as in placement.device: facts are not checked
here, but free amounts never go below 0. Memory is in MiB, as in inventories and assignments.

Each change of a row gives it a new number from one counter, so that cached results can tell which rows are out of date.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aliquot.contract import units
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import Device, Isolation, Utilization
from aliquot.placement import mig
from aliquot.placement.demand import GENERIC, PPM, Demand
from aliquot.placement.device import UNRESERVED_MIN_PERCENT
from aliquot.placement.partition import Partition
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.score.cost import Kind, coarse
from scheduler_plugin.core.score.demand_table import UNLIMITED, DemandTable, room_ppm
from scheduler_plugin.core.score.links import LinkClass, Matrix, matrix_of

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = Ints
"""Numbers of rows."""

NO_NUMA: Final = -1
OPEN_BITS: Final = 24
COLUMN_BITS: Final = 6
"""Devices are ordered by one number: the lowest bits are the column, then the open links; the rest is the cost."""
ISOLATION_BITS: Final = {backend: 1 << bit for bit, backend in enumerate(Isolation)}
_INVENTORY_DRIFT: Final = 8
"""The scarcity of kinds of devices is stale once an eighth of the nodes changed."""
_CHUNK_CELLS: Final = 1 << 18
"""Devices times seats of the demand in one chunk, so that the chunk stays in the processor's cache."""
_ALL: Final = 1 << 40
_FIRST_ROWS: Final = 64
_FIRST_WIDTH: Final = 8


class Columns:
    """The arrays, and the tables of their indices."""

    def __init__(self) -> None:
        self.rows = 0
        """Rows that are in use or free to use again; rows beyond are room to grow."""
        self.width = _FIRST_WIDTH
        self.change_count = 0
        self.rating_count = 0
        self.models: list[str] = []
        """Lower-case model names; ``model`` holds positions in it."""
        self.kinds: dict[Kind, int] = {Kind(): 0}
        """The kinds of devices and their numbers, which ``kind`` holds. The first means no device."""
        self.demand_table = DemandTable(GENERIC, self.kinds)
        self._inventory_changes = 0
        """Since the table was made; _ALL if there is a kind that it does not know."""
        self._has_own_supply = True
        """Whether the table rates by the devices here, and not by given ones."""
        self._free_ppm_of_kind: list[int] | None = None
        """The sums of ``free_ppm``; None if they have to be computed again."""
        self.link_classes: list[LinkClass] = [LinkClass(())]
        self._class_of_matrix: dict[Matrix, int] = {(): 0}
        self.profiles: list[str] = []
        self.mig_capacity: list[Ints] = []
        """Per profile, how many instances each device has or can have while it is unused."""
        self.mig_room: list[Ints] = []
        """Per profile, how many more instances each device can give out now, if no other profile is used; derived. If instances are created
        on demand, profiles share room, so these numbers do not add up over profiles."""
        self.mig_growth: list[Ints] = []
        """Per profile, by how much the fragmentation of each device grows by its best instance, in parts per million of the device;
        derived, and invalid without room."""
        self.mig_size: list[Ints] = []
        """Per profile, the memory slices of an instance; 0 for a device without this profile."""
        self._partitions: dict[tuple[int, int], Partition] = {}
        """By row and column, for devices with instances or places for them."""
        self._stale_partitions: set[tuple[int, int]] = set()
        self.places_of: dict[str, set[tuple[int, int]]] = {}
        """Row and column of a device by its UUID in lower case; several only if nodes were cloned with their UUIDs."""
        self._uuids: dict[int, tuple[str, ...]] = {}
        self._free_rows: list[int] = []
        self._stale: set[int] = set()
        self._derived_count = 0
        """How often derived columns were computed."""
        self._allocate(_FIRST_ROWS, _FIRST_WIDTH)

    def _allocate(self, rows: int, width: int) -> None:
        shape = (rows, width)
        self.present = np.zeros(shape, dtype=np.bool_)
        self.healthy = np.zeros(shape, dtype=np.bool_)
        self.cordoned = np.zeros(shape, dtype=np.bool_)
        self.mig = np.zeros(shape, dtype=np.bool_)
        self.usable = np.zeros(shape, dtype=np.bool_)
        """Present, healthy and not cordoned."""
        self.shareable = np.zeros(shape, dtype=np.bool_)
        """Usable and not in MIG mode."""
        self.capacity_mib = np.zeros(shape, dtype=np.int64)
        self.used_mib = np.zeros(shape, dtype=np.int64)
        self.used_cores = np.zeros(shape, dtype=np.int64)
        self.used_shares = np.zeros(shape, dtype=np.int64)
        self.unreserved = np.zeros(shape, dtype=np.int64)
        self.busy_sm = np.zeros(shape, dtype=np.int64)
        """What the pods on each device use of its multiprocessors, in percent, added up; 0 unless interference counts. ``busy_dram`` alike
        for the bandwidth of its memory."""
        self.busy_dram = np.zeros(shape, dtype=np.int64)
        self.used_instances = np.zeros(shape, dtype=np.int64)
        self.instances = np.zeros(shape, dtype=np.int64)
        self.slices = np.zeros(shape, dtype=np.int64)
        """Memory slices that MIG instances have or can have."""
        self.numa = np.full(shape, NO_NUMA, dtype=np.int64)
        self.model = np.zeros(shape, dtype=np.int64)
        self.kind = np.zeros(shape, dtype=np.int64)
        self.alive = np.zeros(rows, dtype=np.bool_)
        self.devices = np.zeros(rows, dtype=np.int64)
        self.max_shares = np.zeros(rows, dtype=np.int64)
        self.by_place = np.zeros(rows, dtype=np.bool_)
        """Whether the node creates MIG instances on demand, so that profiles compete for room."""
        self.isolation = np.zeros(rows, dtype=np.int64)
        self.oversubscription = np.zeros(rows, dtype=np.float64)
        self.link_class = np.zeros(rows, dtype=np.int64)
        self.tie = np.zeros(rows, dtype=np.uint64)
        self.cpu_milli = np.zeros(rows, dtype=np.int64)
        self.cpu_used_milli = np.zeros(rows, dtype=np.int64)
        self.ram_mib = np.zeros(rows, dtype=np.int64)
        self.ram_used_mib = np.zeros(rows, dtype=np.int64)
        self.changed = np.zeros(rows, dtype=np.int64)
        self.rated = np.zeros(rows, dtype=np.int64)
        """As ``changed``, also for what only the cost of a row depends on: a verdict is as old as the rated number it was made at."""
        # derived
        self.free_mib = np.zeros(shape, dtype=np.int64)
        self.free_cores = np.zeros(shape, dtype=np.int64)
        self.free_shares = np.zeros(shape, dtype=np.int64)
        self.empty = np.zeros(shape, dtype=np.bool_)
        """For shareable devices only, as are room, seats and fragmentation."""
        self.room = np.zeros(shape, dtype=np.int64)
        self.free_ppm = np.zeros(shape, dtype=np.int64)
        """The free part of each device, by the scarcer of memory and cores; only while the demand names models."""
        self.free_slices = np.zeros(shape, dtype=np.int64)
        self.seated = np.zeros((*shape, self.demand_table.seats), dtype=np.bool_)
        """Which seats of the demand have room on each device."""
        self.fragmentation = np.zeros(shape, dtype=np.int64)
        self.order = np.zeros(shape, dtype=np.int64)
        """Decides between devices of equal cost: open links, then the column, packed from high to low bits."""
        self.node_free_mib = np.zeros(rows, dtype=np.int64)
        self.node_capacity_mib = np.zeros(rows, dtype=np.int64)
        self.node_unused = np.zeros(rows, dtype=np.bool_)
        self.node_whole = np.zeros(rows, dtype=np.bool_)
        """As score.NodeView.whole; also true without devices."""
        self.node_fragmentation = np.zeros(rows, dtype=np.float64)
        self.cpu_free_milli = np.zeros(rows, dtype=np.int64)
        """Below 0 if pods request more than there is; UNLIMITED for an unknown host. ``ram_free_mib`` alike."""
        self.ram_free_mib = np.zeros(rows, dtype=np.int64)

    # --- rows ---

    def add_row(self) -> int:
        """Return a row for a new node."""
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
        """Clear a row, for use by another node."""
        self._inventory_changes, self._free_ppm_of_kind = self._inventory_changes + 1, None
        self._name_devices(row, ())
        self._drop_partitions(row)
        for array in (*self._arrays(), *self._profile_arrays()):
            if array is not self.changed and array is not self.rated:
                array[row] = 0
        self.numa[row] = NO_NUMA
        self._free_rows.append(row)
        self.touch(row)

    def touch(self, row: int) -> None:
        """Note that a row changed."""
        self.change_count += 1
        self.changed[row] = self.change_count
        self._note_cost(row)
        self._stale.add(row)

    def _note_cost(self, row: int) -> None:
        """Note that the cost of a row changed."""
        self.rating_count += 1
        self.rated[row] = self.rating_count

    @contextmanager
    def unchanged(self, rows: Collection[int]) -> Iterator[None]:
        """Forget that these rows changed in the block, which leaves them as they were and changes no others. If derived columns were
        computed inside, nothing is forgotten."""
        change_count, rating_count, derived_count = self.change_count, self.rating_count, self._derived_count
        before, fresh = [(row, self.changed[row], self.rated[row]) for row in rows], set(rows) - self._stale
        yield
        if self._derived_count == derived_count:
            self.change_count, self.rating_count = change_count, rating_count
            for row, changed, rated in before:
                self.changed[row], self.rated[row] = changed, rated
            self._stale -= fresh

    def set_inventory(self, row: int, node: GpuNode) -> None:
        """Write a node's inventory. The caller then adds what its pods take again."""
        width = len(node.devices)
        self._free_ppm_of_kind = None  # devices may leave their kinds
        self._drop_partitions(row)
        if width > self.width:
            self._grow(len(self.alive), width)
        for array in (*self._device_arrays(), *self._profile_arrays()):
            array[row] = 0
        self.numa[row] = NO_NUMA
        self.devices[row] = width
        self.max_shares[row] = node.shares_per_gpu
        self.isolation[row] = sum(ISOLATION_BITS[backend] for backend in set(node.isolation))
        self.oversubscription[row] = node.memory_oversubscription
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
            if device.mig_instances:
                self._set_partition(row, column, device)
        self._set_kinds(row)
        self.usable[row] = self.present[row] & self.healthy[row] & ~self.cordoned[row]
        self.shareable[row] = self.usable[row] & ~self.mig[row]
        self._name_devices(row, tuple(entry.device.uuid.lower() for entry in node.devices))
        self.link_class[row] = self._link_class(matrix_of([entry.device for entry in node.devices], node.links))
        self.touch(row)

    def add_use(self, row: int, column: int, use: Use, sign: int = 1) -> None:
        """Add what a pod takes of a device; with ``sign`` -1, subtract it."""
        self.used_mib[row, column] += sign * use.memory_mib
        self.used_cores[row, column] += sign * use.cores_percent
        self.used_shares[row, column] += sign * use.shares
        self.unreserved[row, column] += sign * use.unreserved
        self.touch(row)

    def add_busy(self, row: int, column: int, used: Utilization, sign: int) -> None:
        """Add what a pod uses of a device; with ``sign`` -1, subtract it."""
        self.busy_sm[row, column] += sign * used.sm_percent
        self.busy_dram[row, column] += sign * used.dram_percent
        self.touch(row)

    def set_instance_used(self, row: int, column: int, uuid: str, used: bool) -> None:
        """Note that an instance, or a place for one, is used or free."""
        before = self._partitions[row, column]
        partition = self._partitions[row, column] = before.using([uuid]) if used else before.releasing(uuid)
        self.used_instances[row, column] = len(partition.used)
        self._stale_partitions.add((row, column))
        self.touch(row)

    def set_host(self, row: int, cpu_milli: int, ram_mib: int) -> None:
        """Write a node's allocatable CPU and RAM."""
        self.cpu_milli[row], self.ram_mib[row] = cpu_milli, ram_mib
        self._set_kinds(row)
        self.touch(row)

    def add_host_use(self, row: int, cpu_milli: int, ram_mib: int) -> None:
        """Add what a pod requests of the host; negative when it ends."""
        self.cpu_used_milli[row] += cpu_milli
        self.ram_used_mib[row] += ram_mib
        self.touch(row)

    def allocated_mib(self) -> Ints:
        """Return the promised memory of each device, by row. For a device in MIG mode it is the memory of its used slices."""
        rows = slice(self.rows)
        capacity, total = self.capacity_mib[rows], self.slices[rows]
        cut = capacity * (total - self.free_slices[rows]) // np.maximum(1, total)
        return np.where(self.mig[rows], cut, self.used_mib[rows])

    # --- tables ---

    def profile(self, name: str) -> int:
        """Return the number of a MIG profile; a new one is added."""
        if name not in self.profiles:
            self.profiles.append(name)
            for tables in self._profile_tables():
                tables.append(np.zeros(self.present.shape, dtype=np.int64))
        return self.profiles.index(name)

    def profile_slices(self, rows: Rows, profile: str) -> Ints:
        """Return the memory slices of an instance of a profile, by row: the smallest number of its devices; 0 without such a device."""
        if profile not in self.profiles:
            return np.zeros(len(rows), dtype=np.int64)
        size = self.mig_size[self.profiles.index(profile)][rows]
        least: Ints = np.where(size > 0, size, _ALL).min(axis=1)
        return np.where(least < _ALL, least, 0)

    def _set_partition(self, row: int, column: int, device: Device) -> None:
        partition = self._partitions[row, column] = Partition.of(device)
        for profile, count in partition.rooms.items():
            self.mig_capacity[self.profile(profile)][row, column] = count
        for profile, size in mig.sizes(partition.layout.instances).items():
            self.mig_size[self.profile(profile)][row, column] = size
        self.slices[row, column] = partition.slices.total
        self.by_place[row] |= any(instance.on_demand for instance in device.mig_instances)
        self._stale_partitions.add((row, column))

    def _drop_partitions(self, row: int) -> None:
        for column in np.flatnonzero(self.instances[row]).tolist():
            del self._partitions[row, column]
            self._stale_partitions.discard((row, column))
        self.by_place[row] = False

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

    def _set_kinds(self, row: int) -> None:
        """Write the kinds of a node's devices, which depend on its host."""
        gpus, host = int(self.devices[row]), (int(self.cpu_milli[row]), int(self.ram_mib[row]))
        of_devices = zip(self.model[row, :gpus].tolist(), self.capacity_mib[row, :gpus].tolist(), strict=True)
        numbers = [self._kind(Kind.of(self.models[model], capacity_mib, gpus, *host)) for model, capacity_mib in of_devices]
        if numbers != self.kind[row, :gpus].tolist():
            self.kind[row, :gpus] = numbers
            self._inventory_changes, self._free_ppm_of_kind = self._inventory_changes + 1, None

    def _kind(self, kind: Kind) -> int:
        if kind not in self.kinds:
            self.kinds[kind] = len(self.kinds)
            self._inventory_changes = _ALL
        return self.kinds[kind]

    def _link_class(self, matrix: Matrix) -> int:
        if not any(map(any, matrix)):
            return 0
        if matrix not in self._class_of_matrix:
            self._class_of_matrix[matrix] = len(self.link_classes)
            self.link_classes.append(LinkClass(matrix))
        return self._class_of_matrix[matrix]

    @property
    def devices_of_kinds(self) -> dict[Kind, int]:
        """The present number of devices of each kind, in the order of the kinds' numbers."""
        counts = np.bincount(self.kind[self.present], minlength=len(self.kinds)).tolist()
        return dict(zip(self.kinds, counts, strict=True))

    @property
    def free_of_kinds(self) -> dict[Kind, int]:
        """The free devices of each kind, roughly: parts of devices are added up. Only for a demand that names models, after ``derive``."""
        if self._free_ppm_of_kind is None:
            self._free_ppm_of_kind = self._by_kind(slice(None), self.free_ppm)
        return {kind: coarse(ppm // PPM) for kind, ppm in zip(self.kinds, self._free_ppm_of_kind, strict=True)}

    def _by_kind(self, rows: Rows | slice, amounts: Ints) -> list[int]:
        """Add up an amount of each device by kind. The sums are whole numbers below 2^53."""
        sums: list[float] = np.bincount(self.kind[rows].ravel(), amounts.ravel(), len(self.kinds)).tolist()
        return list(map(int, sums))

    def set_demand(self, demand: Demand, supply: DemandTable | None = None) -> None:
        """Rate free room by another demand from now on.

        Args: supply: has the devices that meet the demand; None for those here.
        """
        counts, free = self.devices_of_kinds, None
        if supply is not None:
            counts, free = {**dict.fromkeys(self.kinds, 0), **supply.counts}, supply.free
        self.demand_table, self._has_own_supply, self._free_ppm_of_kind = DemandTable(demand, counts, free), supply is None, None
        self.seated = np.zeros((*self.present.shape, self.demand_table.seats), dtype=np.bool_)
        self._inventory_changes = 0
        for row in np.flatnonzero(self.alive).tolist():
            self.touch(row)

    # --- derivation ---

    def derive(self) -> None:
        """Update the derived columns of all changed rows."""
        if self._inventory_changes * _INVENTORY_DRIFT > self.rows:
            self.set_demand(self.demand_table.demand)
        if not self._stale:
            return
        for row, column in self._stale_partitions:
            partition = self._partitions[row, column]
            growths = partition.growths
            for profile, count in partition.rooms.items():
                number = self.profile(profile)
                self.mig_room[number][row, column], self.mig_growth[number][row, column] = count, growths.get(profile, 0)
            self.free_slices[row, column] = partition.slices.free
        self._stale_partitions.clear()
        self._derived_count += 1
        rows = np.fromiter(self._stale, dtype=np.int64, count=len(self._stale))
        self._stale.clear()
        if len(rows) == 1:  # the usual case: a slice is a view, so nothing is copied
            self._derive(slice(rows[0], rows[0] + 1))
        else:
            for chunk in self.chunks(rows):
                self._derive(chunk)
        if self.demand_table.names_models and self._has_own_supply:
            self._follow_supply()

    def _follow_supply(self) -> None:
        """Rate by what is free now. The derived columns do not depend on it, only the cost of rows with such devices."""
        if (free := self.free_of_kinds) != self.demand_table.free and len(kinds := self.demand_table.set_free(free)):
            for row in np.flatnonzero(np.isin(self.kind, kinds).any(axis=1)).tolist():
                self._note_cost(row)

    def chunks(self, rows: Rows) -> Sequence[Rows]:
        """Split rows into chunks that fit into the cache."""
        size = max(1, _CHUNK_CELLS // (self.width * self.demand_table.seats))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _derive(self, rows: Rows | slice) -> None:
        capacity, shares, present, table = self.capacity_mib[rows], self.used_shares[rows], self.present[rows], self.demand_table
        # A share without reserved cores needs some that stay unreserved.
        kept = UNRESERVED_MIN_PERCENT * (self.unreserved[rows] > 0)
        free_mib = np.maximum(0, capacity - self.used_mib[rows])
        free_cores = np.maximum(0, units.WHOLE_GPU_PERCENT - self.used_cores[rows] - kept)
        free_shares = np.maximum(0, self.max_shares[rows, None] - shares)
        shareable, used = self.shareable[rows], (shares | self.used_instances[rows]) > 0
        empty = shareable & ~used
        room, (cpu_free, ram_free) = room_ppm(free_mib, capacity, free_cores) * shareable, self._host_free(rows)
        seated = table.fits(self.kind[rows], free_mib, free_cores, free_shares * shareable)
        if table.names_models:
            parts = np.minimum(free_mib * PPM // np.maximum(1, capacity), free_cores * (PPM // units.WHOLE_GPU_PERCENT))
            parts *= shareable & (free_shares > 0)
            if self._free_ppm_of_kind is not None:
                more = self._by_kind(rows, parts - self.free_ppm[rows])
                self._free_ppm_of_kind = [known + own for known, own in zip(self._free_ppm_of_kind, more, strict=True)]
            self.free_ppm[rows] = parts
        self.free_mib[rows], self.free_cores[rows], self.free_shares[rows], self.empty[rows] = free_mib, free_cores, free_shares, empty
        self.room[rows], self.seated[rows], self.fragmentation[rows] = room, seated, table.left_of_devices(room, seated)
        self.cpu_free_milli[rows], self.ram_free_mib[rows] = cpu_free, ram_free
        self.node_fragmentation[rows] = table.left_of_nodes(room, seated, cpu_free, ram_free)
        self.order[rows] = (self._open_links(rows, empty) << COLUMN_BITS) | np.arange(self.width)
        # A device in MIG mode has no shares of its own: for the node's sum, its free memory is that of its free slices.
        if (cut := self.mig[rows]).any():
            slices = self.slices[rows]
            free_mib = np.where(cut & (slices > 0), capacity * self.free_slices[rows] // np.maximum(1, slices), free_mib)
        self.node_free_mib[rows] = free_mib.sum(axis=1)
        self.node_capacity_mib[rows] = capacity.sum(axis=1)
        self.node_unused[rows] = ~used.any(axis=1)
        self.node_whole[rows] = (empty == present).all(axis=1)

    def _host_free(self, rows: Rows | slice) -> tuple[Ints, Ints]:
        cpu, ram = self.cpu_milli[rows], self.ram_mib[rows]
        known = (cpu > 0) & (ram > 0)
        return np.where(known, cpu - self.cpu_used_milli[rows], UNLIMITED), np.where(known, ram - self.ram_used_mib[rows], UNLIMITED)

    def _open_links(self, rows: Rows | slice, empty: Bools) -> Ints:
        open_links = np.zeros(empty.shape, dtype=np.int64)
        for number, of_class in by_class(self.link_class[rows]):
            matrix = self.link_classes[number].matrix
            mine = empty[of_class, : len(matrix)].astype(np.int64)
            open_links[of_class, : len(matrix)] = (mine @ matrix) * mine
        return open_links

    # --- growth ---

    def _device_arrays(self) -> Sequence[npt.NDArray[np.generic]]:
        facts = (self.present, self.healthy, self.cordoned, self.mig, self.capacity_mib, self.used_mib, self.used_cores, self.used_shares)
        more = (self.unreserved, self.used_instances, self.instances, self.slices, self.free_slices, self.numa, self.model, self.kind)
        return (*facts, *more, self.usable, self.shareable, self.busy_sm, self.busy_dram)

    def _profile_tables(self) -> Sequence[list[Ints]]:
        return self.mig_capacity, self.mig_room, self.mig_growth, self.mig_size

    def _profile_arrays(self) -> Sequence[Ints]:
        return [table for tables in self._profile_tables() for table in tables]

    def _arrays(self) -> Sequence[npt.NDArray[np.generic]]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def _grow(self, rows: int, width: int) -> None:
        old = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        self._allocate(rows, width)
        self.width = width
        for name, value in old.items():
            _copy_to_corner(value, getattr(self, name))
        for tables in self._profile_tables():
            for position, table in enumerate(tables):
                tables[position] = np.zeros((rows, width), dtype=np.int64)
                _copy_to_corner(table, tables[position])


def by_class(classes: Ints) -> Iterable[tuple[int, Bools | slice]]:
    """Return each class of links among rows, with its rows; rows without links are skipped."""
    numbers = set(classes.tolist())
    if len(numbers) == 1:
        return ((number, slice(None)) for number in numbers if number)
    return ((number, classes == number) for number in numbers if number)


def ppm(part: Ints, whole: Ints | int) -> Ints:
    """Return a part in parts per million of the whole; 0 for a whole of 0."""
    result: Ints = part * PPM // np.maximum(1, whole)
    return result


def _copy_to_corner(values: npt.NDArray[np.generic], room: npt.NDArray[np.generic]) -> None:
    room[tuple(slice(size) for size in values.shape)] = values
