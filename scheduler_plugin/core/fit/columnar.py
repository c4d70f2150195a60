# SPDX-License-Identifier: Apache-2.0
"""Fit and cost of one container's request on many nodes at once: the columnar form of aliquot.placement.fit and of score.py.

The scalar functions are the specification; tests/property/test_columnar.py compares both forms on random nodes. Invariant: everything here
is a pure function of the columns and the given rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from aliquot.contract import units
from aliquot.contract.model import IDLE, ContainerRequest, Isolation, NumaMode, Policy, Preferences, Utilization
from aliquot.placement import model_name
from aliquot.placement.demand import PPM
from aliquot.placement.device import UNRESERVED_MIN_PERCENT
from aliquot.placement.fit import RULED_OUT, Reject
from scheduler_plugin.core.cluster.columns import COLUMN_BITS, ISOLATION_BITS, NO_NUMA, OPEN_BITS, Bools, Columns, Ints, Rows, by_class, ppm
from scheduler_plugin.core.cluster.plan import burst_of
from scheduler_plugin.core.cluster.reasons import OF_REJECT, NodeReason
from scheduler_plugin.core.score.cost import FREE_PPM, MAX_SCARCITY, REFERENCE_GPUS, HostDemand, Weights
from scheduler_plugin.core.score.demand_table import Floats, room_ppm
from scheduler_plugin.core.score.interference import (
    DRAM_KNEE_PERCENT,
    DRAM_SLOPE_PPM,
    MILLI,
    SM_KNEE_PERCENT,
    SM_SLOPE_PPM,
    Aversion,
    loss_ppm,
)
from scheduler_plugin.core.score.links import REFERENCE_QUALITY

_REJECTS: Final = tuple(Reject)
_FIT: Final = 0
_CODE: Final = {reject: position for position, reject in enumerate(_REJECTS, start=1)}
_ABSENT: Final = len(_REJECTS) + 1
_REASON_OF_CODE: Final = np.array([0, *(OF_REJECT[reject].value for reject in _REJECTS)], dtype=np.int64)

_NO_ROOM: Final = PPM
"""More than any growth of fragments."""
_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The verdict on some rows, in their order."""

    reason: npt.NDArray[np.int64]
    """Values of NodeReason; 0 means that the row fits."""
    curable: Bools
    """For a row that does not fit: whether it would fit without the other pods."""
    cost: npt.NDArray[np.float64]
    """Valid for rows that fit."""
    chosen: Ints | None = None
    """For each row that fits, the columns of the devices by which it was rated, one per vGPU; None for MIG requests."""


@dataclass(frozen=True, slots=True)
class RatingQuery:
    """One container's request, with all else on which the rating depends."""

    request: ContainerRequest
    preferences: Preferences
    policy: Policy
    demand: HostDemand
    used: Utilization = IDLE
    """What the container will probably use of each of its GPUs; only the term ``interference`` depends on it."""


def evaluate(columns: Columns, rows: Rows, ask: RatingQuery, weights: Weights) -> Evaluation:
    """Evaluate rows for one container. Derived columns must be up to date."""
    fitting = _fitting(columns, rows, ask)
    fits = _fits(columns, rows, ask, fitting)
    reason = np.zeros(len(rows), dtype=np.int64)
    if fits.all():
        return Evaluation(reason, fits, *_cost(columns, rows, ask, weights, fitting))
    # Reasons are worked out only for rows that do not fit, and costs only for rows that do: both are slow.
    short, rest, curable = np.flatnonzero(~fits), np.flatnonzero(fits), fits.copy()
    reason[short], curable[short] = _refusals(columns, rows[short], ask)
    cost, chosen = np.zeros(len(rows)), None if ask.request.mig else np.zeros((len(rows), ask.request.vgpus), dtype=np.int64)
    if len(rest):
        cost[rest], taken = _cost(columns, rows[rest], ask, weights, fitting[rest])
        if chosen is not None and taken is not None:
            chosen[rest] = taken
    return Evaluation(reason, curable, cost, chosen)


def cost_on(columns: Columns, rows: Rows, ask: RatingQuery, weights: Weights, devices: Bools) -> Floats:
    """Return the cost of rows where one container gets these devices, or MIG instances on them. Derived columns must be up to date."""
    return _cost(columns, rows, ask, weights, devices)[0]


def fits_alone(columns: Columns, rows: Rows, ask: RatingQuery) -> Bools:
    """Return which rows can take one container, as ``evaluate`` finds, but faster. Derived columns must be up to date."""
    return _fits(columns, rows, ask, _fitting(columns, rows, ask))


def surely_fit_together(columns: Columns, rows: Rows, asks: Sequence[RatingQuery]) -> Bools:
    """Return for which rows placement certainly finds devices for all containers. Each row must take each container by itself.

    In any order of placing, it finds them if each container fits on as many devices as all ask for in sum, or if as many devices as the
    largest asks for have room for one vGPU of each. Existing MIG instances, not created on demand, need only be counted.
    """
    if all(ask.request.mig for ask in asks):
        enough: Bools = ~columns.by_place[rows] & (lacking_together(columns, rows, asks) == NodeReason.FITS.value)
        return enough
    # Nothing is certain with strict NUMA, where the first container may take the wrong node, or with a mix of vGPUs and instances.
    if _is_strict(asks) or any(ask.request.mig for ask in asks):
        return np.zeros(len(rows), dtype=np.bool_)
    fitting = np.stack([_fitting(columns, rows, ask) for ask in asks])
    surely: Bools = (fitting.sum(axis=2) >= sum(ask.request.vgpus for ask in asks)).all(axis=0)
    if not any(map(_asks_whole_memory, asks)):
        surely |= _room_for_each(columns, rows, asks, fitting)
    return surely


def _is_strict(asks: Sequence[RatingQuery]) -> bool:
    """Whether several devices of one container must lie on one NUMA node."""
    return any(ask.preferences.numa is NumaMode.STRICT for ask in asks) and max(ask.request.vgpus for ask in asks) > 1


def _asks_whole_memory(ask: RatingQuery) -> bool:
    return ask.request.asks_whole_memory or ask.preferences.isolation is Isolation.EXCLUSIVE


def _room_for_each(columns: Columns, rows: Rows, asks: Sequence[RatingQuery], fitting: Bools) -> Bools:
    """Return which rows have as many devices as the largest container asks for, with room for one vGPU of each container on each."""
    cores = [ask.request.cores_percent_per_vgpu for ask in asks]
    wanted_mib = sum(asked_mib(ask, columns.capacity_mib[rows]) for ask in asks)
    wanted_cores = sum(amount or 0 for amount in cores) + (UNRESERVED_MIN_PERCENT if None in cores else 0)
    roomy = fitting.all(axis=0) & (columns.free_mib[rows] >= wanted_mib) & (columns.free_shares[rows] >= len(asks))
    roomy &= columns.free_cores[rows] >= wanted_cores
    has_room: Bools = roomy.sum(axis=1) >= max(ask.request.vgpus for ask in asks)
    return has_room


def lacking_together(columns: Columns, rows: Rows, asks: Sequence[RatingQuery]) -> Ints:
    """Return for which rows the containers, init containers excepted, certainly do not fit together: they ask for more than is free in sum.

    Returns: values of NodeReason; FITS for rows with enough of everything in sum.
    """
    lasting = [ask for ask in asks if not ask.request.init]
    reason = np.full(len(rows), NodeReason.FITS.value, dtype=np.int64)
    for profile, wanted in _counts_of_profiles(lasting).items():
        devices = _wanted(columns, rows, lasting[0].preferences)
        reason[(_instances(columns, rows, profile)[1] * devices).sum(axis=1) < wanted] = NodeReason.MIG_PROFILE.value
    several = [ask for ask in lasting if not ask.request.mig]
    if several:
        _mark_lacking(columns, rows, several, reason)
    return reason


def _counts_of_profiles(asks: Sequence[RatingQuery]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for ask in asks:
        counts.update(dict(ask.request.mig))
    return counts


def _mark_lacking(columns: Columns, rows: Rows, asks: Sequence[RatingQuery], reason: Ints) -> None:
    """Write why rows have less free in sum than the vGPUs of these containers ask for. The last reason that is written wins."""
    fitting = np.logical_or.reduce([_fitting(columns, rows, ask) for ask in asks])
    free = (columns.free_cores, columns.free_mib, columns.free_shares)
    cores, mib, shares = ((amounts[rows] * fitting).sum(axis=1) for amounts in free)
    reason[cores < sum(ask.request.vgpus * (_asked_cores(ask) or 0) for ask in asks)] = NodeReason.CORES.value
    # Whole memory counts with the smallest device that fits: with a larger one, a row could be refused that has room.
    smallest = np.where(fitting, columns.capacity_mib[rows], columns.capacity_mib[rows].max(axis=1, keepdims=True)).min(axis=1)
    reason[mib < sum(ask.request.vgpus * asked_mib(ask, smallest) for ask in asks)] = NodeReason.MEMORY.value
    reason[shares < sum(ask.request.vgpus for ask in asks)] = NodeReason.SHARES.value


def judge_devices(columns: Columns, rows: Rows, ask: RatingQuery) -> tuple[Bools, Bools]:
    """Return for each device whether it can take one vGPU or instance, and whether it could without the other pods."""
    codes, curable = _device_codes(columns, rows, ask)
    return codes == _FIT, curable


def asked_mib(ask: RatingQuery, capacity_mib: Ints) -> Ints | np.int64:
    """Return the memory of one vGPU on each device: the device's memory or a part of it, or one number for all devices."""
    memory_bytes, percent = ask.request.memory_bytes_per_vgpu, ask.request.memory_percent
    if ask.preferences.isolation is not Isolation.EXCLUSIVE and percent is not None:
        part: Ints = np.minimum(capacity_mib, np.maximum(1, capacity_mib * percent // ask.request.vgpus // units.WHOLE_GPU_PERCENT))
        return part
    if memory_bytes is None or ask.preferences.isolation is Isolation.EXCLUSIVE:
        return capacity_mib
    return np.int64(memory_bytes // units.MIB)


# --- fit ----------------------------------------------------------------------------------------------------------


def _fitting(columns: Columns, rows: Rows, ask: RatingQuery) -> Bools:
    """Return for each device whether it can take one vGPU or instance. It can if _device_codes finds no reason; this takes fewer steps."""
    fitting, preferences = _wanted(columns, rows, ask.preferences), ask.preferences
    if ask.request.mig:
        some_room = np.zeros(fitting.shape, dtype=np.bool_)
        for profile, _ in ask.request.mig:
            some_room |= _instances(columns, rows, profile)[1] > 0
        return fitting & some_room
    cores = _asked_cores(ask)
    asked = asked_mib(ask, columns.capacity_mib[rows])
    fitting &= ~columns.mig[rows]
    fitting &= asked <= columns.free_mib[rows]
    fitting &= columns.free_shares[rows] > 0
    if isinstance(asked, np.ndarray) or asked < 1:  # a column without a device has 0 MiB
        fitting &= asked > 0
    if cores is None:
        fitting &= columns.used_cores[rows] <= units.WHOLE_GPU_PERCENT - UNRESERVED_MIN_PERCENT
    else:
        fitting &= columns.free_cores[rows] >= cores
    if preferences.isolation is Isolation.EXCLUSIVE:
        fitting &= columns.empty[rows] & ~_understated(ask.request, columns.capacity_mib[rows])
    return fitting


def _wanted(columns: Columns, rows: Rows, preferences: Preferences) -> Bools:
    """Return for each device whether it is usable, and the pod's gpu-type and gpu-uuid allow it."""
    wanted = columns.usable[rows]
    if preferences.gpu_uuid or preferences.gpu_uuid_not:
        wanted &= ~_unwanted_uuids(columns, rows, preferences)
    if preferences.gpu_type or preferences.gpu_type_not:
        wanted &= ~_unwanted_types(columns, rows, preferences)
    return wanted


def _fits(columns: Columns, rows: Rows, ask: RatingQuery, fitting: Bools) -> Bools:
    """Return whether enough devices fit, on one NUMA node if the pod requires that, and the node offers isolation and burst."""
    if ask.request.mig:
        enough, _ = _enough_instances(columns, rows, ask, fitting, fitting)
    else:
        enough = _enough_devices(columns, rows, ask, fitting)
    return enough & offers(columns, rows, ask)


def _refusals(columns: Columns, rows: Rows, ask: RatingQuery) -> tuple[Ints, Bools]:
    """Return for rows that do not fit the reason, and whether they would fit without the other pods."""
    codes, curable = _device_codes(columns, rows, ask)
    if ask.request.mig:
        enough, enough_when_empty = _enough_instances(columns, rows, ask, codes == _FIT, curable)
    else:
        enough = (codes == _FIT).sum(axis=1) >= ask.request.vgpus
        enough_when_empty = _enough_devices(columns, rows, ask, curable)
    offered = offers(columns, rows, ask)
    reason = np.full(len(rows), NodeReason.NUMA.value, dtype=np.int64)
    if len(short := np.flatnonzero(~enough)):
        reason[short] = _node_reason(columns, rows[short], ask, codes[short])
    reason[~offered] = NodeReason.ISOLATION.value
    reason[columns.devices[rows] == 0] = NodeReason.NO_GPU.value
    return reason, enough_when_empty & offered


def _device_codes(columns: Columns, rows: Rows, ask: RatingQuery) -> tuple[Ints, Bools]:
    """Return for each device why it cannot take one vGPU or instance, and whether it could without the other pods.

    Later marks overwrite earlier ones, so they come in the reverse of the order in which aliquot.placement.fit checks.
    """
    codes = np.zeros((len(rows), columns.width), dtype=np.int64)
    hopeless = np.zeros(codes.shape, dtype=np.bool_)

    def mark(where: Bools, reject: Reject) -> None:
        codes[where] = _CODE[reject]
        np.logical_or(hopeless, where, out=hopeless)

    if ask.request.mig:
        _mark_instances(columns, rows, ask.request, codes, hopeless)
    else:
        _mark_shortages(columns, rows, ask, codes, hopeless)
        mark(columns.mig[rows], Reject.MIG_MODE)
    mark(columns.cordoned[rows], Reject.CORDONED)
    mark(~columns.healthy[rows], Reject.UNHEALTHY)
    preferences = ask.preferences
    if preferences.gpu_uuid or preferences.gpu_uuid_not:
        mark(_unwanted_uuids(columns, rows, preferences), Reject.UUID)
    if preferences.gpu_type or preferences.gpu_type_not:
        mark(_unwanted_types(columns, rows, preferences), Reject.TYPE)
    absent = ~columns.present[rows]
    codes[absent] = _ABSENT
    return codes, ~(hopeless | absent)


def _mark_shortages(columns: Columns, rows: Rows, ask: RatingQuery, codes: Ints, hopeless: Bools) -> None:
    capacity = columns.capacity_mib[rows]
    asked, cores = asked_mib(ask, capacity), _asked_cores(ask)
    if cores is None:
        codes[columns.used_cores[rows] > units.WHOLE_GPU_PERCENT - UNRESERVED_MIN_PERCENT] = _CODE[Reject.CORES]
    else:
        codes[columns.free_cores[rows] < cores] = _CODE[Reject.CORES]
    codes[(asked > columns.free_mib[rows]) | (asked < 1)] = _CODE[Reject.MEMORY]
    codes[columns.free_shares[rows] < 1] = _CODE[Reject.SHARES]
    hopeless |= (asked > capacity) | (asked < 1)
    if ask.preferences.isolation is Isolation.EXCLUSIVE:
        understated = _understated(ask.request, capacity)
        codes[~columns.empty[rows]] = _CODE[Reject.EXCLUSIVE]
        codes[understated] = _CODE[Reject.MEMORY]
        hopeless |= understated


def _mark_instances(columns: Columns, rows: Rows, request: ContainerRequest, codes: Ints, hopeless: Bools) -> None:
    free, there = np.zeros(codes.shape, dtype=np.bool_), np.zeros(codes.shape, dtype=np.bool_)
    for profile, _ in request.mig:
        capacity, room = _instances(columns, rows, profile)
        there |= capacity > 0
        free |= room > 0
    codes[~free] = _CODE[Reject.MIG_PROFILE]
    hopeless |= ~there


def _instances(columns: Columns, rows: Rows, profile: str) -> tuple[Ints, Ints]:
    """Return how many instances of a profile each device can give out while it is unused, and how many now."""
    if profile not in columns.profiles:
        none = np.zeros((len(rows), columns.width), dtype=np.int64)
        return none, none
    number = columns.profiles.index(profile)
    return columns.mig_capacity[number][rows], columns.mig_room[number][rows]


def _asked_cores(ask: RatingQuery) -> int | None:
    return units.WHOLE_GPU_PERCENT if ask.preferences.isolation is Isolation.EXCLUSIVE else ask.request.cores_percent_per_vgpu


def _understated(request: ContainerRequest, capacity_mib: Ints) -> Bools:
    """Return for which devices a request for whole devices states too little memory, as aliquot.placement.fit.understates does."""
    memory_bytes = request.memory_bytes_per_vgpu
    if memory_bytes is None:
        return np.zeros(capacity_mib.shape, dtype=np.bool_)
    understated: Bools = capacity_mib > memory_bytes // units.MIB
    return understated


def _unwanted_types(columns: Columns, rows: Rows, preferences: Preferences) -> Bools:
    names, names_not = preferences.gpu_type, preferences.gpu_type_not
    wanted: Bools = np.array([model_name.wanted(model, names, names_not) for model in columns.models] or [True], dtype=np.bool_)
    unwanted: Bools = ~wanted[columns.model[rows]]
    return unwanted


def device_sizes(columns: Columns, preferences: Preferences, on: Sequence[int] | None = None) -> set[int]:
    """Return the memory sizes, in MiB, of the GPUs that a pod with these preferences can share, including used and unhealthy ones.

    Args:
        on: only in these rows, of nodes.
    """
    wanted = columns.present & ~columns.mig
    if on is not None:
        elsewhere = np.ones(len(wanted), dtype=np.bool_)
        elsewhere[on] = False
        wanted[elsewhere] = False
    rows = np.arange(len(wanted))
    if preferences.gpu_uuid or preferences.gpu_uuid_not:
        wanted &= ~_unwanted_uuids(columns, rows, preferences)
    if preferences.gpu_type or preferences.gpu_type_not:
        wanted &= ~_unwanted_types(columns, rows, preferences)
    return set(np.unique(columns.capacity_mib[wanted]).tolist())


def _unwanted_uuids(columns: Columns, rows: Rows, preferences: Preferences) -> Bools:
    unwanted = np.zeros(columns.present.shape, dtype=np.bool_)
    if preferences.gpu_uuid:
        unwanted[:] = True
        for place in _places(columns, preferences.gpu_uuid):
            unwanted[place] = False
    for place in _places(columns, preferences.gpu_uuid_not):
        unwanted[place] = True
    selected: Bools = unwanted[rows]
    return selected


def _places(columns: Columns, uuids: Sequence[str]) -> Sequence[tuple[int, int]]:
    return [place for uuid in uuids for place in columns.places_of.get(uuid.lower(), ())]


def _enough_devices(columns: Columns, rows: Rows, ask: RatingQuery, usable: Bools) -> Bools:
    """Return whether enough devices are usable, on one NUMA node if the pod requires that."""
    vgpus = ask.request.vgpus
    if vgpus > 1 and ask.preferences.numa is NumaMode.STRICT:
        return _any_pool(columns.numa[rows], usable, vgpus)
    enough: Bools = usable.sum(axis=1) >= vgpus
    return enough


def _enough_instances(columns: Columns, rows: Rows, ask: RatingQuery, fitting: Bools, curable: Bools) -> tuple[Bools, Bools]:
    """Check each profile by itself. With instances that are created on demand, several that fit may not fit together (see shapes.py)."""
    enough, when_empty = np.ones(len(rows), dtype=np.bool_), np.ones(len(rows), dtype=np.bool_)
    for profile, count in ask.request.mig:
        capacity, room = _instances(columns, rows, profile)
        enough &= (room * fitting).sum(axis=1) >= count
        when_empty &= (capacity * curable).sum(axis=1) >= count
    return enough, when_empty


def _any_pool(numa: Ints, usable: Bools, count: int) -> Bools:
    found = np.zeros(len(numa), dtype=np.bool_)
    for node in _numa_nodes(numa):
        found |= (usable & (numa == node)).sum(axis=1) >= count
    return found


def _numa_nodes(numa: Ints) -> Sequence[int]:
    return [int(node) for node in np.unique(numa) if node != NO_NUMA]


def offers(columns: Columns, rows: Rows, ask: RatingQuery) -> Bools:
    """Return for each row whether its agent offers the pod's isolation and memory burst, as plan.not_offered does."""
    isolation = ask.preferences.isolation
    offered: Bools = columns.oversubscription[rows] >= burst_of((ask.request,), ask.preferences)
    if isolation is not None:
        offered &= (columns.isolation[rows] & ISOLATION_BITS[isolation]) != 0
    return offered


def _node_reason(columns: Columns, rows: Rows, ask: RatingQuery, codes: Ints) -> Ints:
    """Return for rows that do not fit the main reason, as aliquot.placement.refusal does."""
    counts = np.stack([(codes == code).sum(axis=1) for code in range(1, _ABSENT)], axis=1)
    ruled_out = np.isin(np.arange(1, _ABSENT), [_CODE[reject] for reject in RULED_OUT])
    unwanted = counts[:, ruled_out].sum(axis=1)
    # Devices that the pod excludes are the reason only if they leave too few others.
    enough = columns.devices[rows] - unwanted >= max(1, ask.request.vgpus)
    counts[np.ix_(enough, ruled_out)] = 0
    counts[np.ix_(~enough & (unwanted > 0), ~ruled_out)] = 0
    reason: Ints = _REASON_OF_CODE[np.argmax(counts, axis=1) + 1]
    if ask.request.mig:
        reason[(codes == _FIT).any(axis=1)] = NodeReason.MIG_PROFILE.value
    else:
        reason[columns.devices[rows] < ask.request.vgpus] = NodeReason.COUNT.value
    return reason


# --- cost ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Taken:
    """What each device would have left after one vGPU. The numbers are invalid for devices on which it does not fit."""

    mib: Ints
    cores: Ints
    shares: Ints
    room: Ints
    seated: Bools | None
    """Which seats of the demand would have room; for the policy frag only."""


@dataclass(frozen=True, slots=True)
class _Nominal:
    """The devices by which rows are rated, as score.nominal chooses them."""

    keys: Ints
    """Their keys: one row per node, one column per vGPU."""
    aligned: Bools
    """Whether they lie on one NUMA node because the pod asks for it."""
    pool: Bools
    """The devices from which they were chosen."""

    @property
    def chosen(self) -> Ints:
        """Their columns."""
        chosen: Ints = np.minimum(self.keys & ((1 << COLUMN_BITS) - 1), self.pool.shape[1] - 1)
        return chosen

    @property
    def cost(self) -> Ints:
        """The sum of their costs by aliquot.placement.score."""
        cost: Ints = (self.keys >> (OPEN_BITS + COLUMN_BITS)).sum(axis=1)
        return cost

    @property
    def open_links(self) -> Ints:
        """The sum of their open links."""
        open_links: Ints = ((self.keys >> COLUMN_BITS) & ((1 << OPEN_BITS) - 1)).sum(axis=1)
        return open_links


def _cost(columns: Columns, rows: Rows, ask: RatingQuery, weights: Weights, fitting: Bools) -> tuple[Floats, Ints | None]:
    """Return the cost of rows that fit, and the columns of the devices by which they were rated; None for MIG instances."""
    if ask.request.mig:
        return _mig_cost(columns, rows, ask, weights, fitting), None
    return _vgpu_cost(columns, rows, ask, weights, fitting)


def _vgpu_cost(columns: Columns, rows: Rows, ask: RatingQuery, weights: Weights, fitting: Bools) -> tuple[Floats, Ints]:
    vgpus, free_mib, room = ask.request.vgpus, columns.free_mib[rows], columns.room[rows]
    taken = _taken(columns, rows, ask, free_mib)
    averted = _Averted.of(columns, rows, ask, weights) if weights.interference else None
    nominal = _choose(columns, rows, ask, fitting, _keys(columns, rows, fitting, _device_cost(columns, rows, ask, taken, averted)))
    chosen = nominal.chosen
    at = chosen + np.arange(0, fitting.size, fitting.shape[1])[:, None]  # flat indices are faster
    left_mib, devices = taken.mib.take(at), columns.devices[rows]
    after = (columns.node_free_mib[rows] - (free_mib.take(at) - left_mib).sum(axis=1)) / np.maximum(1, columns.node_capacity_mib[rows])
    cost = _host_cost(columns, rows, ask.demand, after, weights)
    # Only the policy frag has seats: it compares the whole node before and after, with the chosen devices replaced.
    if taken.seated is not None:
        seated, left_room = columns.seated.take(rows, axis=0), room.copy()
        seats = seated.shape[2]
        seated.reshape(-1, seats)[at] = taken.seated.reshape(-1, seats).take(at, axis=0)
        left_room.put(at, taken.room.take(at))
        cost += weights.policy * _fragmentation_growth(columns, rows, ask.demand, left_room, seated)
    else:
        cost += weights.policy * (_cost_by_policy(nominal, averted, at) / (FREE_PPM * vgpus))
    # Most clusters have one kind of device: then no kind is scarce, and this pass is skipped.
    if weights.scarce and columns.demand_table.scarcity_of_kind:
        scarcity = columns.demand_table.scarcity.take(columns.kind[rows].take(at))
        used = (scarcity * ((room.take(at) - taken.room.take(at)) / PPM)).sum(axis=1)
        cost += weights.scarce * (used / (MAX_SCARCITY * _gpus(columns, rows)))
    # Links and NUMA nodes matter only between devices of the pod.
    if vgpus > 1:
        quality = _best_quality(columns, rows, nominal.pool, vgpus)
        cost += weights.links * np.maximum(0.0, 1 - quality / (vgpus * (vgpus - 1) // 2 * REFERENCE_QUALITY))
        if ask.preferences.numa is not None:
            cost += weights.numa * ~nominal.aligned
    cost += weights.open_links * (nominal.open_links / (vgpus * np.maximum(1, devices - 1) * REFERENCE_QUALITY))
    cost += weights.open_device * ((columns.empty[rows].take(at) & (left_mib > 0)).sum(axis=1) / vgpus)
    cost += weights.whole_node * _seat_part(columns, rows) * (columns.node_whole[rows] & (devices > vgpus))
    if weights.free:
        cost += weights.free * after
    if averted is not None:
        cost += weights.interference * (averted.slowdown_ppm.take(at).sum(axis=1) / (PPM * vgpus))
    return cost, chosen


@dataclass(frozen=True, slots=True)
class _Averted:
    """How much the pod avoids each device because of other pods, as score.interference.Aversion finds it."""

    slowdown_ppm: Ints
    cost_ppm: Ints

    @classmethod
    def of(cls, columns: Columns, rows: Rows, ask: RatingQuery, weights: Weights) -> "_Averted":
        """Compute it for all devices of some rows."""
        aversion = Aversion.of(ask.used, weights.interference, ask.policy)
        sm = np.maximum(0, columns.busy_sm[rows] + (ask.used.sm_percent - SM_KNEE_PERCENT))
        dram = np.maximum(0, columns.busy_dram[rows] + (ask.used.dram_percent - DRAM_KNEE_PERCENT))
        slowdown = np.minimum(PPM, SM_SLOPE_PPM * sm + DRAM_SLOPE_PPM * dram - loss_ppm(ask.used))
        return cls(slowdown, slowdown * aversion.factor_milli // MILLI)


def host_cost(columns: Columns, rows: Rows, policy: Policy, demand: HostDemand, weights: Weights) -> Floats:
    """Rate rows for a pod with CPU and RAM only, as score.host_terms does. Derived columns must be up to date."""
    free = columns.node_free_mib[rows] / np.maximum(1, columns.node_capacity_mib[rows])
    cost = _host_cost(columns, rows, demand, free, weights) - _host_cost(columns, rows, HostDemand(), free, weights)
    if policy is Policy.FRAG:
        cost += weights.policy * _fragmentation_growth(columns, rows, demand, columns.room[rows], columns.seated[rows])
    cost += weights.whole_node * _seat_part(columns, rows) * (columns.node_whole[rows] & (columns.devices[rows] > 0))
    cost += weights.free * free
    return cost


def _mig_cost(columns: Columns, rows: Rows, ask: RatingQuery, weights: Weights, fitting: Bools) -> Floats:
    """Rate rows for MIG instances, as score.mig_terms does."""
    total, taken = columns.slices[rows].sum(axis=1), np.zeros(len(rows), dtype=np.int64)
    for profile, count in ask.request.mig:
        taken += count * columns.profile_slices(rows, profile)
    if ask.policy is Policy.FRAG:
        cost = weights.policy * _instance_growth(columns, rows, ask, fitting)
    else:
        part = (columns.free_slices[rows].sum(axis=1) - taken) / np.maximum(1, total)
        cost = weights.policy * (-part if ask.policy is Policy.SPREAD else part)
    gpu_free = columns.node_free_mib[rows] / np.maximum(1, columns.node_capacity_mib[rows])
    partitioned = (columns.slices[rows] > 0).sum(axis=1)
    gpu_after = gpu_free - taken * partitioned / np.maximum(1, total * columns.devices[rows])
    cost += _host_cost(columns, rows, ask.demand, gpu_after, weights) - _host_cost(columns, rows, HostDemand(), gpu_free, weights)
    cost += weights.whole_node * _seat_part(columns, rows) * columns.node_unused[rows]
    cost += weights.free * gpu_free
    return cost


def _instance_growth(columns: Columns, rows: Rows, ask: RatingQuery, fitting: Bools) -> Floats:
    """Return score.mig_terms' growth of the fragmentation by an instance. It is invalid for rows without room for each profile."""
    total = np.zeros(len(rows), dtype=np.int64)
    for profile, count in ask.request.mig:
        if profile in columns.profiles:
            number = columns.profiles.index(profile)
            growth = np.where(fitting & (columns.mig_room[number][rows] > 0), columns.mig_growth[number][rows], _NO_ROOM)
            total += count * growth.min(axis=1)
    mean: Floats = total / (PPM * sum(count for _, count in ask.request.mig))
    return mean


def _keys(columns: Columns, rows: Rows, fitting: Bools, device_cost: Ints) -> Ints:
    """Return one number per device by which score.nominal orders them: cost, open links and column, packed from high to low bits."""
    keys = device_cost << (OPEN_BITS + COLUMN_BITS)
    keys |= columns.order[rows]
    np.copyto(keys, _NEVER, where=~fitting)
    return keys


def _taken(columns: Columns, rows: Rows, ask: RatingQuery, free_mib: Ints) -> _Taken:
    capacity, cores = columns.capacity_mib[rows], _asked_cores(ask)
    if cores is None:
        left_cores = np.maximum(0, units.WHOLE_GPU_PERCENT - UNRESERVED_MIN_PERCENT - columns.used_cores[rows])
    else:
        left_cores = np.maximum(0, columns.free_cores[rows] - cores)
    left_mib = np.maximum(0, free_mib - asked_mib(ask, capacity))
    left_shares = np.maximum(0, columns.free_shares[rows] - 1)
    frag = ask.policy is Policy.FRAG
    seated = columns.demand_table.fits(columns.kind[rows], left_mib, left_cores, left_shares) if frag else None
    return _Taken(left_mib, left_cores, left_shares, room_ppm(left_mib, capacity, left_cores), seated)


def _cost_by_policy(nominal: _Nominal, averted: _Averted | None, at: Ints) -> Ints:
    """Return the sum of the chosen devices' costs without what the pod avoids. Args: at: their flat indices."""
    return nominal.cost if averted is None else nominal.cost - averted.cost_ppm.take(at).sum(axis=1)


def _device_cost(columns: Columns, rows: Rows, ask: RatingQuery, taken: _Taken, averted: _Averted | None) -> Ints:
    """Rate each device as aliquot.placement.score.cost does. The number is invalid for devices on which the request does not fit."""
    by_policy = _device_cost_by_policy(columns, rows, ask, taken)
    return by_policy if averted is None else by_policy + averted.cost_ppm


def _device_cost_by_policy(columns: Columns, rows: Rows, ask: RatingQuery, taken: _Taken) -> Ints:
    if ask.policy is Policy.TOPOLOGY:
        return np.zeros_like(taken.mib)
    if taken.seated is not None:
        change: Ints = columns.demand_table.left_of_devices(taken.room, taken.seated) - columns.fragmentation[rows]
        return change
    sign = -1 if ask.policy is Policy.SPREAD else 1
    memory_ppm, cores_ppm = ppm(taken.mib, columns.capacity_mib[rows]), ppm(taken.cores, units.WHOLE_GPU_PERCENT)
    free: Ints = sign * (memory_ppm + cores_ppm + ppm(taken.shares, columns.max_shares[rows, None]))
    return free


def _choose(columns: Columns, rows: Rows, ask: RatingQuery, fitting: Bools, keys: Ints) -> _Nominal:
    vgpus = ask.request.vgpus
    best = _lowest(keys, vgpus)
    pool, aligned = fitting, np.zeros(len(keys), dtype=np.bool_)
    if ask.preferences.numa is None or vgpus == 1:
        return _Nominal(best, aligned, pool)
    # The best devices of one NUMA node replace the best of all, if a node has enough; between nodes, cost decides, then open links.
    numa = columns.numa[rows]
    rank = np.full((len(keys), 2), _NEVER, dtype=np.int64)
    pool = fitting.copy()
    for node in _numa_nodes(numa):
        inside = fitting & (numa == node)
        lowest = _lowest(np.where(inside, keys, _NEVER), vgpus)
        whole = _Nominal(lowest, aligned, inside)
        cost, open_links = whole.cost, whole.open_links
        better = lowest[:, -1] != _NEVER
        better &= (cost < rank[:, 0]) | ((cost == rank[:, 0]) & (open_links < rank[:, 1]))
        best[better], pool[better], aligned[better] = lowest[better], inside[better], True
        rank[better, 0], rank[better, 1] = cost[better], open_links[better]
    return _Nominal(best, aligned, pool)


def _lowest(keys: Ints, count: int) -> Ints:
    if count > keys.shape[1]:
        return np.full((len(keys), count), _NEVER, dtype=np.int64)
    lowest: Ints = keys.min(axis=1, keepdims=True) if count == 1 else np.sort(keys, axis=1)[:, :count]
    return lowest


def _seat_part(columns: Columns, rows: Rows) -> Floats:
    """Return the value of each node as a seat, as score.NodeView.seat_part does; invalid for a node without devices."""
    part: Floats = columns.demand_table.seat_part.take(columns.kind[rows, 0])
    return part


def _gpus(columns: Columns, rows: Rows) -> Ints:
    """Return the divisor of amounts of GPUs."""
    unit: Ints = np.maximum(REFERENCE_GPUS, columns.devices[rows])
    return unit


def _fragmentation_growth(columns: Columns, rows: Rows, demand: HostDemand, room: Ints, seated: Bools) -> Floats:
    """Return by how much the fragmentation grows. Args: room, seated: of the devices afterwards."""
    cpu_free, ram_free = columns.cpu_free_milli[rows] - demand.cpu_milli, columns.ram_free_mib[rows] - demand.ram_mib
    left = columns.demand_table.left_of_nodes(room, seated, cpu_free, ram_free)
    growth: Floats = (left - columns.node_fragmentation[rows]) / _gpus(columns, rows)
    return growth


def _host_cost(columns: Columns, rows: Rows, demand: HostDemand, gpu_free: Floats, weights: Weights) -> Floats:
    """Rate stranded GPUs and used CPU with the pod's CPU and RAM, as score.stranded and Host.cpu_used do."""
    cpu, ram = columns.cpu_milli[rows], columns.ram_mib[rows]
    cpu_free = np.maximum(0, columns.cpu_free_milli[rows] - demand.cpu_milli) / np.maximum(1, cpu)
    ram_free = np.maximum(0, columns.ram_free_mib[rows] - demand.ram_mib) / np.maximum(1, ram)
    left = np.maximum(0.0, gpu_free - np.minimum(cpu_free, ram_free)) + np.maximum(0.0, cpu_free - gpu_free)
    cost: Floats = weights.host * (columns.devices[rows] * left / _gpus(columns, rows)) + weights.cpu_used * (1 - cpu_free)
    cost *= (cpu > 0) & (ram > 0)
    return cost


def _best_quality(columns: Columns, rows: Rows, pool: Bools, count: int) -> Ints:
    quality = np.zeros(len(rows), dtype=np.int64)
    for number, of_class in by_class(columns.link_class[rows]):
        quality[of_class] = columns.link_classes[number].best_quality(pool[of_class], count)
    return quality
