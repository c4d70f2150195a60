# SPDX-License-Identifier: Apache-2.0
"""The cost of placing a pod on a node, by policy: the scalar specification of the columnar form in columnar.py.

A cost is the weighted sum of terms, each between -1 and 1, that compare the node before and after. Lower is better. ``nominal`` chooses the
devices that count: those of least cost by aliquot.placement.score, then with the fewest open links, then the first ones. Placement may take
others of the same cost (it also compares links and a hash), so terms use only what holds for both.

policy       frag: by how much the node's fragmentation grows, or for MIG instances that of the best devices; binpack, spread: what is left
             free on the devices taken
host         free GPUs that CPU and RAM can no longer feed afterwards, and the reverse: CPU beyond what the free GPUs need
cpu_used     the part of the host's CPU that is in use afterwards
scarce       what the pod takes of devices that other pods require (by type, memory, or the size of their node), times how far their demand
             exceeds the supply, or for a named type what is left of it
links        by how much the best linked set is worse than full NVLink (several GPUs)
numa         1 when the pod prefers one NUMA node and the devices lie on several
open_links   links between free devices that the pod breaks, by quality
open_device  part of the devices that were empty and are shared now
whole_node   how much pods with several GPUs need nodes like this one, when it was whole and keeps free devices; for MIG instances when it
             was unused
free         the free part of the node's GPU memory afterwards
interference by how much the pods on the devices taken are expected to slow the pod down (``interference.py``); with weight 0 nothing of it
             is computed

The cost of a pod of several containers is the mean over its containers, init containers excepted, each as if it came alone.

Fragmentation, host and scarce are amounts of GPUs, as parts of REFERENCE_GPUS, so that nodes of different size compare. The fragmentation
of a node is the part of its free GPUs that is useless to a pod drawn from the demand (placement.demand): its share does not fit on the
device, there are too few such devices, or the host has too little CPU or RAM.

Only devices that can give out shares now are free: unhealthy, cordoned and MIG devices are no room in fragmentation and have no open links,
and a node with one of them is not whole, because no pod can have all of it. In host and free they count by their use, and MIG devices by
their memory slices if they have any: the CPU that a returning device will need is not surplus.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from math import fsum
from typing import Final, NamedTuple, TypeAlias, TypeVar

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, DeviceShare, NumaMode, Policy, Preferences
from aliquot.placement import mig
from aliquot.placement import score as device_score
from aliquot.placement.choose import with_shares
from aliquot.placement.demand import GENERIC, PPM, WEIGHT_SUM, Demand, Shape
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import reject_reason, share_on
from aliquot.placement.partition import Partition
from scheduler_plugin.core.score.links import REFERENCE_QUALITY, Matrix

FRAG_PPM: Final = device_score.FRAG_PPM
FREE_PPM: Final = 3_000_000
"""aliquot.placement.score.free_ppm of an empty device."""
REFERENCE_GPUS: Final = 16
"""The divisor of amounts of GPUs in terms: the largest node sold. A node with more GPUs uses its own number."""
MAX_SCARCITY: Final = 2.0
"""A demand of twice the supply; with more, this term would dominate the others."""
UNSEEN_PART: Final = 0.1
"""The demand of pods that need a whole node and that are not known, as a part of the demand of the known ones."""
MAX_SEAT_VALUE: Final = 4.0
"""The limit of ``seat_values``, and so the divisor of the term whole_node."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight of each term. The module explains the terms."""

    policy: float
    host: float
    cpu_used: float
    scarce: float
    links: float
    numa: float
    open_links: float
    open_device: float
    whole_node: float
    free: float
    interference: float = 0.0

    @property
    def reach(self) -> float:
        """The largest possible cost; its negative is the smallest."""
        return float(sum(abs(getattr(self, term.name)) for term in fields(self)))


DEFAULT_WEIGHTS: Final[Mapping[Policy, Weights]] = {
    Policy.FRAG: Weights(1.0, 0.3, 0.0, 1.2, 0.25, 0.25, 0.02, 0.001, 0.028, 0.04),
    Policy.BINPACK: Weights(1.0, 0.05, 0.0, 0.2, 0.1, 0.5, 0.05, 0.1, 0.8, 0.5),
    Policy.SPREAD: Weights(1.0, 0.05, 0.0, 0.2, 0.1, 0.5, 0.001, 0.0, 0.0004, -1.0),
    Policy.TOPOLOGY: Weights(1.0, 0.05, 0.0, 0.2, 4.0, 1.0, 0.5, 0.1, 0.4, 0.05),
}
"""docs/measurements/placement.md says how the weights of frag were found, and what they do on public traces. In spread, links count as much
as a thousandth of a node's memory, and a whole node as a tenth of that: they decide between equally empty nodes."""

_COARSE_BITS: Final = 3


def coarse(amount: int) -> int:
    """Round up to a number with three significant bits, so that small differences do not count.

    Hosts of one type differ by what they keep for themselves, and would be a kind each.
    """
    zeros = max(0, amount.bit_length() - _COARSE_BITS)
    return -(-amount >> zeros) << zeros


class Kind(NamedTuple):
    """The properties of a device that a demand can distinguish. Without memory: no device."""

    model: str = ""
    """In lower case."""
    memory_mib: int = 0
    gpus: int = 0
    """Devices of the node, also of other kinds."""
    cpu_milli: int = 0
    """Of the node, rounded up; 0 if unknown. ``ram_mib`` alike."""
    ram_mib: int = 0

    @classmethod
    def of(cls, model: str, memory_mib: int, gpus: int, cpu_milli: int, ram_mib: int) -> "Kind":
        """Return the kind of a device. Args: gpus, cpu_milli, ram_mib: of its node; 0 CPU or RAM means unknown."""
        known = cpu_milli > 0 and ram_mib > 0
        return cls(model.lower(), memory_mib, gpus, coarse(cpu_milli) if known else 0, coarse(ram_mib) if known else 0)

    def can_hold(self, shape: Shape) -> bool:
        """Whether a pod of this shape could run on such a node while it is empty."""
        fits_device = shape.wants(self.model) and shape.memory_on(self.memory_mib) <= self.memory_mib
        fits_host = not self.cpu_milli or (shape.cpu_milli <= self.cpu_milli and shape.ram_mib <= self.ram_mib)
        return fits_device and fits_host and shape.vgpus <= self.gpus


Scarcity: TypeAlias = Mapping[Kind, float]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Host:
    """A node's CPU and RAM. Capacity 0 means unknown; then the host does not count."""

    cpu_milli: int = 0
    cpu_used_milli: int = 0
    ram_mib: int = 0
    ram_used_mib: int = 0

    @property
    def known(self) -> bool:
        """Whether the host counts."""
        return self.cpu_milli > 0 and self.ram_mib > 0

    @property
    def cpu_free(self) -> float:
        """The free part of the CPU."""
        return max(0, self.cpu_milli - self.cpu_used_milli) / max(1, self.cpu_milli)

    @property
    def cpu_used(self) -> float:
        """The used part of the CPU; 0 if the host does not count."""
        return 1 - self.cpu_free if self.known else 0.0

    @property
    def ram_free(self) -> float:
        """The free part of the RAM."""
        return max(0, self.ram_mib - self.ram_used_mib) / max(1, self.ram_mib)

    def fits(self, cpu_milli: int, ram_mib: int) -> bool:
        """Whether this much is free; True for an unknown host."""
        return not self.known or (self.cpu_used_milli + cpu_milli <= self.cpu_milli and self.ram_used_mib + ram_mib <= self.ram_mib)

    def with_demand(self, demand: "HostDemand") -> "Host":
        """Return the host with a pod's request."""
        return replace(self, cpu_used_milli=self.cpu_used_milli + demand.cpu_milli, ram_used_mib=self.ram_used_mib + demand.ram_mib)


@dataclass(frozen=True, slots=True)
class HostDemand:
    """A pod's request of CPU and RAM."""

    cpu_milli: int = 0
    ram_mib: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: its devices in inventory order, the qualities of their links, and its host."""

    states: tuple[DeviceState, ...]
    matrix: Matrix = ()
    host: Host = Host()
    demand: Demand = GENERIC
    scarcity: Scarcity = field(default_factory=dict)
    seat_values: Mapping[Kind, float] = field(default_factory=dict)
    slowdowns_ppm: tuple[int, ...] = ()
    """By device, how much slower the pod would be there because of other pods; empty if that does not count."""

    @property
    def unit(self) -> int:
        """The divisor of amounts of GPUs."""
        return max(REFERENCE_GPUS, len(self.states))

    @property
    def whole(self) -> bool:
        """Whether a pod could get all devices of the node: it has devices, and each is empty and shareable."""
        return bool(self.states) and all(state.empty and state.shareable for state in self.states)

    @property
    def seat_part(self) -> float:
        """The value of the node as a seat, by its first device, as a part of the largest; without devices 0."""
        return self.seat_values.get(self.kind_of(0), 1.0) / MAX_SEAT_VALUE if self.states else 0.0

    def kind_of(self, index: int) -> Kind:
        """Return the kind of a device."""
        device, host = self.states[index].device, self.host
        return Kind.of(device.model, device.memory_bytes // units.MIB, len(self.states), host.cpu_milli, host.ram_mib)

    def scarcity_of(self, index: int) -> float:
        """Return the scarcity of the device's kind; 0 if unknown."""
        return self.scarcity.get(self.kind_of(index), 0.0)

    def open_links(self, index: int) -> int:
        """Add up the links between this device and others, if both are empty and shareable."""
        free = [state.empty and state.shareable for state in self.states]
        if not free[index] or not self.matrix:
            return 0
        return sum(quality for quality, other in zip(self.matrix[index], free, strict=True) if other)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one node, in the order of Weights."""

    policy: float = 0.0
    host: float = 0.0
    cpu_used: float = 0.0
    scarce: float = 0.0
    links: float = 0.0
    numa: float = 0.0
    open_links: float = 0.0
    open_device: float = 0.0
    whole_node: float = 0.0
    free: float = 0.0
    interference: float = 0.0

    def cost(self, weights: Weights) -> float:
        """Return the weighted sum."""
        total = 0.0
        for term in fields(self):
            total += getattr(weights, term.name) * getattr(self, term.name)
        return total


def nominal(view: NodeView, request: ContainerRequest, preferences: Preferences, policy: Policy) -> tuple[int, ...] | None:
    """Return the positions of the devices by which a node is rated for a vGPU request; None if the request does not fit."""
    keys = {
        index: (device_score.cost(policy, state, share_on(state.device, request, preferences), view.demand), view.open_links(index), index)
        for index, state in enumerate(view.states)
        if reject_reason(state, request, preferences) is None
    }
    if len(keys) < request.vgpus:
        return None
    best = sorted(keys, key=keys.__getitem__)[: request.vgpus]
    if preferences.numa is None or request.vgpus == 1:
        return tuple(best)
    aligned = _aligned(view, keys, request.vgpus)
    if not aligned:
        return None if preferences.numa is NumaMode.STRICT else tuple(best)
    return tuple(min(aligned, key=lambda pool: (sum(keys[index][0] for index in pool), sum(keys[index][1] for index in pool))))


def _aligned(view: NodeView, keys: Mapping[int, tuple[int, int, int]], count: int) -> list[list[int]]:
    """Return for each NUMA node with enough of the devices the best ``count`` of them. Args: keys: by position; lower is better."""
    nodes = sorted({state.device.numa_node for state in view.states if state.device.numa_node is not None})
    inside = ([index for index in keys if view.states[index].device.numa_node == node] for node in nodes)
    return [sorted(pool, key=keys.__getitem__)[:count] for pool in inside if len(pool) >= count]


def vgpu_terms(
    view: NodeView,
    taken: Sequence[tuple[int, DeviceShare]],
    *,
    policy: Policy,
    demand: HostDemand = HostDemand(),
    prefer_numa: bool = False,
    best_quality: int = 0,
) -> Terms:
    """Rate shares on devices of a node.

    Args: taken: each share with the position of its device. prefer_numa: whether the pod prefers one NUMA node.
          best_quality: that of the best linked set of as many fitting devices.
    """
    shares = [share for _, share in taken]
    after = with_shares(view.states, shares)
    touched = sorted({index for index, _ in taken})
    gpu_after = (_free_mib(view.states) - sum(share.memory_bytes // units.MIB for share in shares)) / _capacity_mib(view.states)
    host = view.host.with_demand(demand)
    return Terms(
        policy=_policy_term(policy, view, after, host, touched),
        host=stranded(len(after), gpu_after, host) / view.unit,
        cpu_used=host.cpu_used,
        scarce=_scarce_room(view, after, touched) / (MAX_SCARCITY * view.unit),
        links=links_term(best_quality, len(touched)),
        numa=float(prefer_numa and _spans_numa_nodes(view, touched)),
        open_links=sum(map(view.open_links, touched)) / (len(touched) * max(1, len(view.states) - 1) * REFERENCE_QUALITY),
        open_device=sum(view.states[i].empty and after[i].free_memory_bytes > 0 for i in touched) / len(touched),
        whole_node=view.seat_part * (len(touched) < len(view.states) and view.whole),
        free=gpu_after,
        interference=sum(view.slowdowns_ppm[i] for i in touched) / (PPM * len(touched)) if view.slowdowns_ppm else 0.0,
    )


def _scarce_room(view: NodeView, after: Sequence[DeviceState], touched: Iterable[int]) -> float:
    """Add up the room that the pod takes of devices, each times the scarcity of its kind."""
    return sum(view.scarcity_of(index) * (_room(view.states[index]) - _room(after[index])) for index in touched)


def _spans_numa_nodes(view: NodeView, touched: Sequence[int]) -> bool:
    """Whether several devices lie on several NUMA nodes, or on an unknown one."""
    nodes = {view.states[index].device.numa_node for index in touched}
    return len(touched) > 1 and (len(nodes) > 1 or None in nodes)


def mig_terms(
    view: NodeView, request: ContainerRequest, preferences: Preferences, policy: Policy, demand: HostDemand = HostDemand()
) -> Terms:
    """Rate MIG instances on a node.

    With frag, fewer fragments are better (``aliquot.placement.partition``): the mean growth per instance, in devices, as if each came
    alone. Otherwise fewer free memory slices afterwards are better; with spread, more are. The host counts by its change, as in
    ``host_terms``.
    """
    found = [mig.slices(state.device.mig_instances, state.used_instances) for state in view.states]
    total, taken = max(1, sum(device.total for device in found)), _slices_taken(view.states, request)
    part = (sum(device.free for device in found) - taken) / total
    gpu_free, devices = _free_mib(view.states) / _capacity_mib(view.states), len(view.states)
    gpu_after = gpu_free - taken * sum(device.total > 0 for device in found) / (total * devices)
    host = view.host.with_demand(demand)
    return Terms(
        policy=_instance_growth(view.states, request, preferences) if policy is Policy.FRAG else -part if policy is Policy.SPREAD else part,
        host=(stranded(devices, gpu_after, host) - stranded(devices, gpu_free, view.host)) / view.unit,
        cpu_used=host.cpu_used - view.host.cpu_used,
        whole_node=view.seat_part * all(state.empty for state in view.states),
        free=gpu_free,
    )


def _slices_taken(states: Iterable[DeviceState], request: ContainerRequest) -> int:
    """Return the memory slices of the instances that a container asks for; of different sizes, the smallest counts."""
    sizes = [mig.sizes(state.device.mig_instances) for state in states]
    return sum(count * min((device[profile] for device in sizes if profile in device), default=0) for profile, count in request.mig)


def _instance_growth(states: Iterable[DeviceState], request: ContainerRequest, preferences: Preferences) -> float:
    """Return by how much the fragmentation grows by an instance, in devices: the mean over those asked for, each on the best device."""
    fitting = [state for state in states if reject_reason(state, request, preferences) is None]
    growths = [Partition.of(state.device, state.used_instances).growths for state in fitting]
    best = [count * min(device[profile] for device in growths if profile in device) for profile, count in request.mig]
    return sum(best) / (PPM * sum(count for _, count in request.mig))


def host_terms(view: NodeView, demand: HostDemand, policy: Policy) -> Terms:
    """Rate a pod without GPUs: it takes CPU and RAM, which the node's free GPUs may need.

    The host counts by its change, not by what is left: such a pod belongs on a node with used GPUs, which has surplus CPU.
    """
    host = view.host.with_demand(demand)
    gpu_free = _free_mib(view.states) / _capacity_mib(view.states)
    return Terms(
        policy=_policy_term(policy, view, view.states, host, ()),
        host=(stranded(len(view.states), gpu_free, host) - stranded(len(view.states), gpu_free, view.host)) / view.unit,
        cpu_used=host.cpu_used - view.host.cpu_used,
        whole_node=view.seat_part * view.whole,
        free=gpu_free,
    )


def node_fragmentation(states: Sequence[DeviceState], host: Host, demand: Demand) -> float:
    """Return how many of the node's free GPUs are useless to a pod drawn from the demand."""
    useful, states = 0, [state for state in states if state.shareable]
    for shape, weight in demand.shapes:
        fitting = [state for state in states if device_score.fits(state, shape)]
        if len(fitting) >= shape.vgpus and host.fits(shape.cpu_milli, shape.ram_mib):
            useful += weight * sum(map(device_score.room_ppm, fitting))
    return (sum(map(device_score.room_ppm, states)) - useful / WEIGHT_SUM) / PPM


def stranded(devices: int, gpu_free: float, host: Host) -> float:
    """Return how many GPUs stay unused because CPU or RAM is short, and the reverse, in the node's own proportion; 0 for an unknown
    host."""
    if not host.known:
        return 0.0
    fed = min(host.cpu_free, host.ram_free)
    return devices * (max(0.0, gpu_free - fed) + max(0.0, host.cpu_free - gpu_free))


def _with_devices(counts: Mapping[Kind, int]) -> dict[Kind, int]:
    return {kind: count for kind, count in counts.items() if count and kind.memory_mib}


@dataclass(frozen=True, slots=True)
class Insistence:
    """What of a demand only some kinds of devices can serve."""

    scarcity: Scarcity
    """While enough is free of each named model."""
    named: Mapping[frozenset[Kind], float]
    """The devices that pods want which name models, by the kinds that serve them together."""

    def at(self, free: Mapping[Kind, int]) -> Scarcity:
        """Return the scarcity with these free devices."""
        gone = (kinds for kinds, devices in self.named.items() if devices > MAX_SCARCITY * sum(free.get(kind, 0) for kind in kinds))
        return {**self.scarcity, **dict.fromkeys(chain.from_iterable(gone), MAX_SCARCITY)}


def insistence(demand: Demand, counts: Mapping[Kind, int]) -> Insistence:
    """Return for each kind of device how much of the demand requires it, as a multiple of its part of all devices.

    It is 1 if these shapes would use the whole kind, with a total demand as large as the cluster. A shape that can use several kinds counts
    for each by its number of devices. At most MAX_SCARCITY; kinds that no shape requires are missing.

    UNSEEN_PART is added to the demand: for each kind of node with several GPUs, pods that need all of one such node, in equal amounts. So
    a host that can serve more pods than others is kept for them before the first of these pods is known.

    Kinds that serve a named model have MAX_SCARCITY while the demand for it is more than that many times what is free of them; devices that
    cannot give out shares are not free. Before, other pods fill them as usual: to avoid such kinds from the start would break nodes with
    many GPUs instead.
    """
    there = _with_devices(counts)
    insisting = _insisting(demand, there)
    wanted = _sums(entry for _, amounts in insisting for entry in amounts.items())
    named = _sums((frozenset(amounts), fsum(amounts.values())) for names_models, amounts in insisting if names_models)
    return Insistence({kind: min(MAX_SCARCITY, amount / there[kind]) for kind, amount in wanted.items() if amount}, named)


def _insisting(demand: Demand, there: Mapping[Kind, int]) -> list[tuple[bool, Mapping[Kind, float]]]:
    """Return what shapes want that some kind cannot serve: whether they name models, and by kind the devices if demand used them all.

    A shape that can use every kind adds to the demand, but makes no kind scarce. Sums are exact: after a restart the kinds may be known in
    another order.
    """
    large = [kind for kind in there if kind.gpus > 1]
    known = [(shape.names_models, _by_kind(shape, weight * shape.vgpus, there)) for shape, weight in demand.shapes]
    total = fsum(amount for _, amounts in known for amount in amounts.values())
    unseen = [(False, _by_kind(_all_of(kind), UNSEEN_PART * total / len(large), there)) for kind in large]
    total += UNSEEN_PART * total if large else 0.0
    devices = sum(there.values())
    return [
        (names_models, {kind: amount / total * devices for kind, amount in amounts.items()})
        for names_models, amounts in (*known, *unseen)
        if 0 < len(amounts) < len(there) and total
    ]


def _sums(amounts: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Add up the amounts of each key, exactly."""
    found: dict[K, list[float]] = {}
    for key, amount in amounts:
        found.setdefault(key, []).append(amount)
    return {key: fsum(of_key) for key, of_key in found.items()}


def _by_kind(shape: Shape, gpus: float, there: Mapping[Kind, int]) -> dict[Kind, float]:
    """Return how much of this many requested GPUs falls on each kind that can serve the shape, in whole GPUs of the kind."""
    allowed = {kind: count for kind, count in there.items() if kind.can_hold(shape)}
    choice = sum(allowed.values())
    return {kind: gpus * _part_of(kind, shape) * count / choice for kind, count in allowed.items()}


def _part_of(kind: Kind, shape: Shape) -> float:
    """Return the part of a device that a shape takes."""
    return (shape.memory_on(kind.memory_mib) / kind.memory_mib + shape.cores_percent / units.WHOLE_GPU_PERCENT) / 2


def _all_of(kind: Kind) -> Shape:
    """Return the pod that takes all of a node, of any model."""
    return Shape(kind.gpus, memory_ppm=PPM, cores_percent=units.WHOLE_GPU_PERCENT, cpu_milli=kind.cpu_milli, ram_mib=kind.ram_mib)


def seat_values(demand: Demand, counts: Mapping[Kind, int]) -> Mapping[Kind, float]:
    """Return how much the pods with several GPUs need a node of each kind: their GPUs for each device that can serve them.

    The unit is the mean over all devices, so that equal nodes have 1. At most MAX_SEAT_VALUE. Missing kinds have 1: those without devices,
    and all if no such pod is known.
    """
    there = _with_devices(counts)
    values = _wanted_per_device(demand, there)
    total = fsum(values[kind] * count for kind, count in there.items())
    if not total:
        return {}
    mean = total / sum(there.values())
    return {kind: min(MAX_SEAT_VALUE, value / mean) for kind, value in values.items()}


def _wanted_per_device(demand: Demand, there: Mapping[Kind, int]) -> dict[Kind, float]:
    """Return for each kind how many GPUs the pods with several want of one of its devices, times their weights."""
    values = dict.fromkeys(there, 0.0)
    for shape, weight in demand.shapes:
        allowed = {kind: count for kind, count in there.items() if shape.vgpus > 1 and kind.can_hold(shape)}
        devices = sum(allowed.values())
        for kind in allowed:
            values[kind] += weight * shape.vgpus / devices
    return values


def links_term(best_quality: int, count: int) -> float:
    """Return by how much ``count`` devices are worse linked than with full NVLink between all of them: 0 to 1."""
    pairs = count * (count - 1) // 2
    return max(0.0, 1 - best_quality / (pairs * REFERENCE_QUALITY)) if pairs else 0.0


def _policy_term(policy: Policy, view: NodeView, after: Sequence[DeviceState], host_after: Host, touched: Sequence[int]) -> float:
    match policy:
        case Policy.FRAG:
            before = node_fragmentation(view.states, view.host, view.demand)
            return (node_fragmentation(after, host_after, view.demand) - before) / view.unit
        case Policy.BINPACK:
            return sum(device_score.free_ppm(after[i]) for i in touched) / (FREE_PPM * max(1, len(touched)))
        case Policy.SPREAD:
            return -sum(device_score.free_ppm(after[i]) for i in touched) / (FREE_PPM * max(1, len(touched)))
        case Policy.TOPOLOGY:
            return 0.0


def _room(state: DeviceState) -> float:
    return device_score.room_ppm(state) / PPM


def _capacity_mib(states: Sequence[DeviceState]) -> int:
    """Add up the memory of devices, as a divisor: at least 1."""
    return max(1, sum(state.capacity_bytes // units.MIB for state in states))


def _free_mib(states: Sequence[DeviceState]) -> int:
    """Add up the free memory. A device in MIG mode counts with its free memory slices, if it has any."""
    total = 0
    for state in states:
        if state.device.mig_enabled and (slices := mig.slices(state.device.mig_instances, state.used_instances)).total:
            total += state.capacity_bytes // units.MIB * slices.free // slices.total
        else:
            total += state.free_memory_bytes // units.MIB
    return total
