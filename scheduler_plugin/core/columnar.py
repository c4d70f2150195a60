"""Fit and cost of one container's request on many nodes at once: the columnar form of placement.fit and of score.py.

The scalar functions are the specification; tests/property/test_columnar.py compares the two on random nodes. Everything here is a pure
function of the columns and the rows it is asked about.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from placement.device import UNRESERVED_MIN_PERCENT
from placement.fit import Reject
from proto import units
from proto.model import ContainerRequest, Isolation, NumaMode, Policy, Preferences
from scheduler_plugin.core.columns import ISOLATION_BITS, NO_NUMA, Bools, Columns, Ints, Rows, fragmentation_ppm, ppm
from scheduler_plugin.core.links import REFERENCE_QUALITY
from scheduler_plugin.core.reasons import OF_REJECT, NodeReason
from scheduler_plugin.core.score import FRAG_PPM, FREE_PPM, HostDemand, Weights

_REJECTS: Final = tuple(Reject)
_FIT: Final = 0
_CODE: Final = {reject: position for position, reject in enumerate(_REJECTS, start=1)}
_ABSENT: Final = len(_REJECTS) + 1
_REASON_OF_CODE: Final = np.array([0, *(OF_REJECT[reject].value for reject in _REJECTS)], dtype=np.int64)

_COST_BIAS: Final = FRAG_PPM
_OPEN_BITS: Final = 24
_COLUMN_BITS: Final = 6
_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The verdict on some rows, in their order."""

    reason: npt.NDArray[np.int64]
    """Values of NodeReason; 0 fits."""
    curable: Bools
    """Of a row that does not fit: whether it would once other pods are gone."""
    cost: npt.NDArray[np.float64]
    """Meaningful where the row fits."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One container's request with what else the rating depends on."""

    request: ContainerRequest
    preferences: Preferences
    policy: Policy
    demand: HostDemand


def evaluate(columns: Columns, rows: Rows, ask: Ask, weights: Weights) -> Evaluation:
    """Judge rows for one container. Derived columns must be up to date."""
    codes, curable = _device_codes(columns, rows, ask)
    if ask.request.mig:
        enough, enough_when_empty = _enough_instances(columns, rows, ask, codes == _FIT, curable)
        aligned = enough
    else:
        enough, enough_when_empty, aligned = _enough_devices(columns, rows, ask, codes == _FIT, curable)
    offered = _offers_isolation(columns, rows, ask.preferences.isolation)
    reason = _node_reason(columns, rows, ask, codes)
    reason[enough] = np.where(aligned[enough], NodeReason.FITS.value, NodeReason.NUMA.value)
    reason[~offered] = NodeReason.ISOLATION.value
    reason[columns.devices[rows] == 0] = NodeReason.NO_GPU.value
    fits = np.flatnonzero(reason == NodeReason.FITS.value)
    cost = np.zeros(len(rows), dtype=np.float64)
    if len(fits):
        rate = _mig_cost if ask.request.mig else _vgpu_cost
        cost[fits] = rate(columns, rows[fits], ask, weights, codes[fits] == _FIT)
    return Evaluation(reason, enough_when_empty & offered, cost)


def asked_mib(ask: Ask, capacity_mib: Ints) -> Ints:
    """Return the memory of one vGPU on each device: all of it when nothing less is asked."""
    memory_bytes = ask.request.memory_bytes_per_vgpu
    if memory_bytes is None or ask.preferences.isolation is Isolation.EXCLUSIVE:
        return capacity_mib
    return np.full_like(capacity_mib, memory_bytes // units.MIB)


# --- fit ----------------------------------------------------------------------------------------------------------


def _device_codes(columns: Columns, rows: Rows, ask: Ask) -> tuple[Ints, Bools]:
    """Say of each device why it cannot take one vGPU or instance, and whether it could if no other pod used it.

    Later marks win, so they are made in the reverse of the order in which placement.fit looks.
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
    preferences = ask.preferences
    if preferences.gpu_uuid or preferences.gpu_uuid_not:
        mark(_unwanted_uuids(columns, rows, preferences), Reject.UUID)
    if preferences.gpu_type or preferences.gpu_type_not:
        mark(_unwanted_types(columns, rows, preferences), Reject.TYPE)
    mark(columns.cordoned[rows], Reject.CORDONED)
    mark(~columns.healthy[rows], Reject.UNHEALTHY)
    absent = ~columns.present[rows]
    codes[absent] = _ABSENT
    return codes, ~(hopeless | absent)


def _mark_shortages(columns: Columns, rows: Rows, ask: Ask, codes: Ints, hopeless: Bools) -> None:
    capacity = columns.capacity_mib[rows]
    asked, cores = asked_mib(ask, capacity), _asked_cores(ask)
    if cores is None:
        codes[columns.used_cores[rows] > units.WHOLE_GPU_PERCENT - UNRESERVED_MIN_PERCENT] = _CODE[Reject.CORES]
    else:
        codes[columns.free_cores[rows] < cores] = _CODE[Reject.CORES]
    codes[(asked > columns.free_mib[rows]) | (asked < 1)] = _CODE[Reject.MEMORY]
    codes[columns.free_shares[rows] < 1] = _CODE[Reject.SHARES]
    if ask.preferences.isolation is Isolation.EXCLUSIVE:
        codes[~columns.empty[rows]] = _CODE[Reject.EXCLUSIVE]
    hopeless |= (asked > capacity) | (asked < 1)


def _mark_instances(columns: Columns, rows: Rows, request: ContainerRequest, codes: Ints, hopeless: Bools) -> None:
    free, there = np.zeros(codes.shape, dtype=np.bool_), np.zeros(codes.shape, dtype=np.bool_)
    for profile, _ in request.mig:
        total, unused = _instances(columns, rows, profile)
        there |= total > 0
        free |= unused > 0
    codes[~free] = _CODE[Reject.MIG_PROFILE]
    hopeless |= ~there


def _instances(columns: Columns, rows: Rows, profile: str) -> tuple[Ints, Ints]:
    """Return how many instances of a profile each device has, and how many of them are free."""
    if profile not in columns.profiles:
        none = np.zeros((len(rows), columns.width), dtype=np.int64)
        return none, none
    number = columns.profiles.index(profile)
    total = columns.mig_total[number][rows]
    return total, total - columns.mig_used[number][rows]


def _asked_cores(ask: Ask) -> int | None:
    return units.WHOLE_GPU_PERCENT if ask.preferences.isolation is Isolation.EXCLUSIVE else ask.request.cores_percent_per_vgpu


def _unwanted_types(columns: Columns, rows: Rows, preferences: Preferences) -> Bools:
    wanted: Bools = np.array([type_wanted(model, preferences) for model in columns.models] or [True], dtype=np.bool_)
    unwanted: Bools = ~wanted[columns.model[rows]]
    return unwanted


def type_wanted(model: str, preferences: Preferences) -> bool:
    """Whether a pod wants GPUs of this model, given in lower case."""
    if preferences.gpu_type and not any(name.lower() in model for name in preferences.gpu_type):
        return False
    return not any(name.lower() in model for name in preferences.gpu_type_not)


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


def _enough_devices(columns: Columns, rows: Rows, ask: Ask, fitting: Bools, curable: Bools) -> tuple[Bools, Bools, Bools]:
    """Say whether enough devices fit, whether they would if no other pod used them, and whether NUMA strict is served."""
    vgpus = ask.request.vgpus
    enough: Bools = fitting.sum(axis=1) >= vgpus
    when_empty: Bools = curable.sum(axis=1) >= vgpus
    if ask.preferences.numa is not NumaMode.STRICT or vgpus == 1:
        return enough, when_empty, enough
    numa = columns.numa[rows]
    return enough, _any_pool(numa, curable, vgpus), _any_pool(numa, fitting, vgpus)


def _enough_instances(columns: Columns, rows: Rows, ask: Ask, fitting: Bools, curable: Bools) -> tuple[Bools, Bools]:
    enough, when_empty = np.ones(len(rows), dtype=np.bool_), np.ones(len(rows), dtype=np.bool_)
    for profile, count in ask.request.mig:
        total, unused = _instances(columns, rows, profile)
        enough &= (unused * fitting).sum(axis=1) >= count
        when_empty &= (total * curable).sum(axis=1) >= count
    return enough, when_empty


def _any_pool(numa: Ints, usable: Bools, count: int) -> Bools:
    found = np.zeros(len(numa), dtype=np.bool_)
    for node in _numa_nodes(numa):
        found |= (usable & (numa == node)).sum(axis=1) >= count
    return found


def _numa_nodes(numa: Ints) -> Sequence[int]:
    return [int(node) for node in np.unique(numa) if node != NO_NUMA]


def _offers_isolation(columns: Columns, rows: Rows, isolation: Isolation | None) -> Bools:
    if isolation is None:
        return np.ones(len(rows), dtype=np.bool_)
    offered: Bools = (columns.isolation[rows] & ISOLATION_BITS[isolation]) != 0
    return offered


def _node_reason(columns: Columns, rows: Rows, ask: Ask, codes: Ints) -> Ints:
    """Pick, for rows that do not fit, the most frequent reason of their devices, the first in the enum among equals."""
    counts = np.stack([(codes == code).sum(axis=1) for code in range(1, _ABSENT)], axis=1)
    reason: Ints = _REASON_OF_CODE[np.argmax(counts, axis=1) + 1]
    if ask.request.mig:
        reason[(codes == _FIT).any(axis=1)] = NodeReason.MIG_PROFILE.value
    else:
        reason[columns.devices[rows] < ask.request.vgpus] = NodeReason.COUNT.value
    return reason


# --- cost ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Nominal:
    """The devices by which rows are rated, as score.nominal chooses them."""

    chosen: Ints
    """Their columns, one row of ``vgpus`` per node."""
    cost: Ints
    """By placement.score, added up."""
    open_links: Ints
    aligned: Bools
    """Whether they lie on one NUMA node because the pod asked for it."""
    pool: Bools
    """The devices among which they were chosen."""


def _vgpu_cost(columns: Columns, rows: Rows, ask: Ask, weights: Weights, fitting: Bools) -> npt.NDArray[np.float64]:
    vgpus = ask.request.vgpus
    nominal = _choose(_keys(columns, rows, ask, fitting), fitting, columns.numa[rows], ask)
    asked = np.take_along_axis(asked_mib(ask, columns.capacity_mib[rows]), nominal.chosen, axis=1)
    left_mib = np.take_along_axis(columns.free_mib[rows], nominal.chosen, axis=1) - asked
    opened = np.take_along_axis(columns.empty[rows], nominal.chosen, axis=1) & (left_mib > 0)
    devices, capacity = columns.devices[rows], np.maximum(1, columns.node_capacity_mib[rows])
    before = columns.node_free_mib[rows] / capacity
    after = (columns.node_free_mib[rows] - asked.sum(axis=1)) / capacity
    norm = FRAG_PPM if ask.policy is Policy.FRAG else FREE_PPM
    cost = weights.policy * (nominal.cost / (norm * vgpus))
    cost += weights.host * _host_term(columns, rows, ask.demand, before, after)
    if vgpus > 1:
        quality = _best_quality(columns, rows, nominal.pool, vgpus)
        cost += weights.links * np.maximum(0.0, 1 - quality / (vgpus * (vgpus - 1) // 2 * REFERENCE_QUALITY))
        if ask.preferences.numa is not None:
            cost += weights.numa * ~nominal.aligned
    cost += weights.open_links * (nominal.open_links / (vgpus * np.maximum(1, devices - 1) * REFERENCE_QUALITY))
    cost += weights.open_device * (opened.sum(axis=1) / vgpus)
    cost += weights.whole_node * (columns.node_empty[rows] & (devices > vgpus))
    cost += weights.free * after
    result: npt.NDArray[np.float64] = cost
    return result


def _mig_cost(columns: Columns, rows: Rows, ask: Ask, weights: Weights, fitting: Bools) -> npt.NDArray[np.float64]:
    del fitting  # instances are counted over the whole node
    total = columns.instances[rows].sum(axis=1)
    asked = sum(count for _, count in ask.request.mig)
    part = (total - columns.used_instances[rows].sum(axis=1) - asked) / np.maximum(1, total)
    cost = weights.policy * (-part if ask.policy is Policy.SPREAD else part)
    cost += weights.whole_node * columns.node_empty[rows]
    cost += weights.free * (columns.node_free_mib[rows] / np.maximum(1, columns.node_capacity_mib[rows]))
    result: npt.NDArray[np.float64] = cost
    return result


def _keys(columns: Columns, rows: Rows, ask: Ask, fitting: Bools) -> Ints:
    """Return one number per device by which score.nominal orders them: cost, open links and column, packed from high to low bits."""
    cost = _device_cost(columns, rows, ask)
    keys = ((cost + _COST_BIAS) << (_OPEN_BITS + _COLUMN_BITS)) | (columns.open_links[rows] << _COLUMN_BITS)
    keys |= np.arange(columns.width, dtype=np.int64)
    keys[~fitting] = _NEVER
    return keys


def _device_cost(columns: Columns, rows: Rows, ask: Ask) -> Ints:
    """Rate every device as placement.score.cost does; where the request does not fit the number means nothing."""
    capacity = columns.capacity_mib[rows]
    if ask.policy is Policy.TOPOLOGY:
        return np.zeros_like(capacity)
    cores = _asked_cores(ask)
    kept = UNRESERVED_MIN_PERCENT if cores is None else np.where(columns.unreserved[rows] > 0, UNRESERVED_MIN_PERCENT, 0)
    free_cores = np.maximum(0, units.WHOLE_GPU_PERCENT - columns.used_cores[rows] - (cores or 0) - kept)
    memory_ppm = ppm(np.maximum(0, columns.free_mib[rows] - asked_mib(ask, capacity)), capacity)
    cores_ppm = ppm(free_cores, units.WHOLE_GPU_PERCENT)
    free_shares = np.maximum(0, columns.free_shares[rows] - 1)
    if ask.policy is Policy.FRAG:
        change: Ints = fragmentation_ppm(memory_ppm, cores_ppm, free_shares) - columns.fragmentation[rows]
        return change
    sign = -1 if ask.policy is Policy.SPREAD else 1
    free: Ints = sign * (memory_ppm + cores_ppm + ppm(free_shares, columns.max_shares[rows, None]))
    return free


def _choose(keys: Ints, fitting: Bools, numa: Ints, ask: Ask) -> _Nominal:
    vgpus = ask.request.vgpus
    best = _lowest(keys, vgpus)
    pool, aligned = fitting, np.zeros(len(keys), dtype=np.bool_)
    if ask.preferences.numa is None or vgpus == 1:
        return _unpack(best, aligned, pool)
    rank = np.full((len(keys), 2), _NEVER, dtype=np.int64)
    pool = fitting.copy()
    for node in _numa_nodes(numa):
        inside = fitting & (numa == node)
        lowest = _lowest(np.where(inside, keys, _NEVER), vgpus)
        whole = _unpack(lowest, aligned, inside)
        better = lowest[:, -1] != _NEVER
        better &= (whole.cost < rank[:, 0]) | ((whole.cost == rank[:, 0]) & (whole.open_links < rank[:, 1]))
        best[better], pool[better], aligned[better] = lowest[better], inside[better], True
        rank[better, 0], rank[better, 1] = whole.cost[better], whole.open_links[better]
    return _unpack(best, aligned, pool)


def _lowest(keys: Ints, count: int) -> Ints:
    if count > keys.shape[1]:
        return np.full((len(keys), count), _NEVER, dtype=np.int64)
    lowest: Ints = keys.min(axis=1, keepdims=True) if count == 1 else np.sort(keys, axis=1)[:, :count]
    return lowest


def _unpack(keys: Ints, aligned: Bools, pool: Bools) -> _Nominal:
    return _Nominal(
        chosen=np.minimum(keys & ((1 << _COLUMN_BITS) - 1), pool.shape[1] - 1),
        cost=((keys >> (_OPEN_BITS + _COLUMN_BITS)) - _COST_BIAS).sum(axis=1),
        open_links=((keys >> _COLUMN_BITS) & ((1 << _OPEN_BITS) - 1)).sum(axis=1),
        aligned=aligned,
        pool=pool,
    )


def _host_term(
    columns: Columns, rows: Rows, demand: HostDemand, gpu_before: npt.NDArray[np.float64], gpu_after: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    cpu, ram = np.maximum(1, columns.cpu_milli[rows]), np.maximum(1, columns.ram_mib[rows])
    cpu_free = np.maximum(0, columns.cpu_milli[rows] - columns.cpu_used_milli[rows]) / cpu
    ram_free = np.maximum(0, columns.ram_mib[rows] - columns.ram_used_mib[rows]) / ram
    cpu_after, ram_after = np.maximum(0.0, cpu_free - demand.cpu_milli / cpu), np.maximum(0.0, ram_free - demand.ram_mib / ram)
    known = (columns.cpu_milli[rows] > 0) & (columns.ram_mib[rows] > 0)
    term: npt.NDArray[np.float64] = _stranded(gpu_after, cpu_after, ram_after) - _stranded(gpu_before, cpu_free, ram_free)
    return np.where(known, term, 0.0)


def _stranded(
    gpu_free: npt.NDArray[np.float64], cpu_free: npt.NDArray[np.float64], ram_free: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    behind_cpu, behind_ram = np.maximum(0.0, gpu_free - cpu_free), np.maximum(0.0, gpu_free - ram_free)
    left: npt.NDArray[np.float64] = (behind_cpu + behind_ram + np.maximum(0.0, cpu_free - gpu_free)) / 3
    return left


def _best_quality(columns: Columns, rows: Rows, pool: Bools, count: int) -> Ints:
    classes = columns.link_class[rows]
    quality = np.zeros(len(rows), dtype=np.int64)
    for number in np.unique(classes):
        of_class = classes == number
        quality[of_class] = columns.link_classes[number].best_quality(pool[of_class], count)
    return quality
