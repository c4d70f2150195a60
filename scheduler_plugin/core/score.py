"""What it costs a node to take a pod, by policy: the scalar specification of the columnar form in columnar.py.

A cost is the weighted sum of terms, each between -1 and 1, about the node before and after. The lower, the better. Which devices of the
node count is fixed by ``nominal``: the ones that cost least by placement.score, then break the fewest free links, then come first.
Placement may take others that cost the same (it looks at links and a hash too), so terms only say what holds for either.

policy       frag: by how much the node's fragmentation grows; binpack, spread: what is left free of the devices taken
host         free GPUs that CPU and RAM can no longer feed afterwards, and the reverse: CPU beyond what the free GPUs need
cpu_used     the part of the host's CPU that is in use afterwards
scarce       what the pod takes of devices that others insist on (by type or size), times how much more they want of them than there is
links        how far the best linked set falls short of full NVLink (several GPUs)
numa         1 when the pod prefers one NUMA node and the devices lie on several
open_links   links between free devices that the pod breaks, by quality
open_device  part of the devices that were empty and now are shared
whole_node   1 when the node was whole and keeps free devices; for MIG instances when nothing on it was in use
free         what is free of the node's GPU memory afterwards

A pod of several containers is rated by the mean over those that last, each as if it came alone.

Fragmentation, host and scarce are amounts of GPUs, so that nodes of different size compare, as parts of REFERENCE_GPUS. A node is as
fragmented as the part of its free GPUs that a pod drawn from the demand (placement.demand) finds useless: because its share does not
fit on the device, there are too few such devices, or the host's CPU or RAM do not suffice.

Free is what shares can be given of now: devices that are out of service, cordoned or in MIG mode are no room in fragmentation, have no open
links, and a node with one of them is not whole, for no pod can have all of it. In host and free they count by what is used of them, those
in MIG mode by their memory slices if they have any: CPU that goes with a device that may come back is not beyond what is needed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, TypeAlias

from placement import mig
from placement import score as device_score
from placement.choose import with_shares
from placement.demand import GENERIC, PPM, WEIGHT_SUM, Demand
from placement.device import DeviceState
from placement.fit import reject_reason, share_on
from proto import units
from proto.model import ContainerRequest, DeviceShare, NumaMode, Policy, Preferences
from scheduler_plugin.core.links import REFERENCE_QUALITY, Matrix

FRAG_PPM: Final = device_score.FRAG_PPM
FREE_PPM: Final = 3_000_000
"""placement.score.free_ppm of an empty device."""
REFERENCE_GPUS: Final = 16
"""Amounts of GPUs are terms as parts of this, the largest node sold; of the node's own number where it has more."""
MAX_SCARCITY: Final = 2.0
"""Twice as much wanted as there is; beyond it a term would drown the others."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What each term counts. Terms are explained in the module."""

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

    @property
    def reach(self) -> float:
        """The largest cost that can be, and as a negative number the smallest."""
        return float(sum(abs(getattr(self, term.name)) for term in fields(self)))


DEFAULT_WEIGHTS: Final[Mapping[Policy, Weights]] = {
    Policy.FRAG: Weights(1.0, 0.3, 0.008, 0.6, 0.25, 0.25, 0.02, 0.001, 0.0025, 0.0),
    Policy.BINPACK: Weights(1.0, 0.05, 0.0, 0.2, 0.1, 0.5, 0.05, 0.1, 0.2, 0.5),
    Policy.SPREAD: Weights(1.0, 0.05, 0.0, 0.2, 0.1, 0.5, 0.001, 0.0, 0.0001, -1.0),
    Policy.TOPOLOGY: Weights(1.0, 0.05, 0.0, 0.2, 4.0, 1.0, 0.5, 0.1, 0.1, 0.05),
}
"""How those of frag were found, and what they do on public traces, is in docs/placement.md. To spread, links count as much as a thousandth
of a node's memory, and a whole node as a tenth of that: they decide between nodes that are equally empty."""


Kind: TypeAlias = tuple[str, int]
"""What devices have in common that a demand can tell apart: the model in lower case, and MiB of memory."""
Scarcity: TypeAlias = Mapping[Kind, float]


@dataclass(frozen=True, slots=True)
class Host:
    """A node's CPU and RAM. Zero capacity: not known, and then it does not count."""

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
        """The part of the CPU that is in use; 0 when the host does not count."""
        return 1 - self.cpu_free if self.known else 0.0

    @property
    def ram_free(self) -> float:
        """The free part of the RAM."""
        return max(0, self.ram_mib - self.ram_used_mib) / max(1, self.ram_mib)

    def fits(self, cpu_milli: int, ram_mib: int) -> bool:
        """Whether so much is free, or not known to be used."""
        return not self.known or (self.cpu_used_milli + cpu_milli <= self.cpu_milli and self.ram_used_mib + ram_mib <= self.ram_mib)

    def with_demand(self, demand: "HostDemand") -> "Host":
        """Take what a pod asks for."""
        return replace(self, cpu_used_milli=self.cpu_used_milli + demand.cpu_milli, ram_used_mib=self.ram_used_mib + demand.ram_mib)


@dataclass(frozen=True, slots=True)
class HostDemand:
    """What the pod asks of CPU and RAM."""

    cpu_milli: int = 0
    ram_mib: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as it is: its devices in inventory order, the qualities of their links, and its host."""

    states: tuple[DeviceState, ...]
    matrix: Matrix = ()
    host: Host = Host()
    demand: Demand = GENERIC
    scarcity: Scarcity = field(default_factory=dict)

    @property
    def unit(self) -> int:
        """What amounts of GPUs are divided by."""
        return max(REFERENCE_GPUS, len(self.states))

    @property
    def whole(self) -> bool:
        """Whether a pod could have all devices of the node: there are some, and each is empty and shareable."""
        return bool(self.states) and all(state.empty and state.shareable for state in self.states)

    def scarcity_of(self, index: int) -> float:
        """Return how scarce the device's kind is; 0 when that is not known."""
        device = self.states[index].device
        return self.scarcity.get((device.model.lower(), units.floor_to_mib(device.memory_bytes) // units.MIB), 0.0)

    def open_links(self, index: int) -> int:
        """Add up the links between this device and others, where both are empty and shareable."""
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

    def cost(self, weights: Weights) -> float:
        """Return the weighted sum."""
        total = 0.0
        for term in fields(self):
            total += getattr(weights, term.name) * getattr(self, term.name)
        return total


def nominal(view: NodeView, request: ContainerRequest, preferences: Preferences, policy: Policy) -> tuple[int, ...] | None:
    """Return the positions of the devices by which a node is rated for a vGPU request, or None when it does not fit."""
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
    pools = [
        sorted((index for index in keys if view.states[index].device.numa_node == node), key=keys.__getitem__)[: request.vgpus]
        for node in sorted({state.device.numa_node for state in view.states if state.device.numa_node is not None})
    ]
    aligned = [pool for pool in pools if len(pool) == request.vgpus]
    if not aligned:
        return None if preferences.numa is NumaMode.STRICT else tuple(best)
    return tuple(min(aligned, key=lambda pool: (sum(keys[index][0] for index in pool), sum(keys[index][1] for index in pool))))


def vgpu_terms(
    view: NodeView,
    taken: Sequence[tuple[int, DeviceShare]],
    *,
    policy: Policy,
    demand: HostDemand = HostDemand(),
    prefer_numa: bool = False,
    best_quality: int = 0,
) -> Terms:
    """Rate shares taken on devices of a node.

    Args: taken: the position of each share's device. prefer_numa: whether the pod prefers one NUMA node.
          best_quality: of the best linked set of as many devices that fit.
    """
    shares = [share for _, share in taken]
    after = with_shares(view.states, shares)
    touched = sorted({index for index, _ in taken})
    free_mib, capacity = _free_mib(view.states), max(1, sum(state.capacity_bytes // units.MIB for state in view.states))
    gpu_after = (free_mib - sum(share.memory_bytes // units.MIB for share in shares)) / capacity
    numa_nodes = {view.states[index].device.numa_node for index in touched}
    host = view.host.with_demand(demand)
    return Terms(
        policy=_policy_term(policy, view, after, host, touched),
        host=stranded(len(after), gpu_after, host) / view.unit,
        cpu_used=host.cpu_used,
        scarce=sum(view.scarcity_of(index) * (_room(view.states[index]) - _room(after[index])) for index in touched)
        / (MAX_SCARCITY * view.unit),
        links=links_term(best_quality, len(touched)),
        numa=float(prefer_numa and len(touched) > 1 and (len(numa_nodes) > 1 or None in numa_nodes)),
        open_links=sum(map(view.open_links, touched)) / (len(touched) * max(1, len(view.states) - 1) * REFERENCE_QUALITY),
        open_device=sum(view.states[i].empty and after[i].free_memory_bytes > 0 for i in touched) / len(touched),
        whole_node=float(len(touched) < len(view.states) and view.whole),
        free=gpu_after,
    )


def mig_terms(view: NodeView, asked: Iterable[tuple[str, int]], policy: Policy) -> Terms:
    """Rate taking MIG instances: the fewer memory slices stay free beside them, the better, or the reverse when spreading.

    Args: asked: profiles, and how many of each.
    """
    found = [mig.slices(state.device.mig_instances, state.used_instances) for state in view.states]
    total, free = sum(device.total for device in found), sum(device.free for device in found)
    sizes = [mig.sizes(state.device.mig_instances) for state in view.states]
    taken = sum(count * min((device[profile] for device in sizes if profile in device), default=0) for profile, count in asked)
    part = (free - taken) / max(1, total)
    capacity = sum(state.capacity_bytes // units.MIB for state in view.states)
    return Terms(
        policy=-part if policy is Policy.SPREAD else part,
        whole_node=float(all(state.empty for state in view.states)),
        free=_free_mib(view.states) / max(1, capacity),
    )


def host_terms(view: NodeView, demand: HostDemand, policy: Policy) -> Terms:
    """Rate a pod that takes no GPU but CPU and RAM, which the node's free GPUs may need.

    Of the host it counts what changes, not what is left: a node whose GPUs are in use has CPU to spare, which is where such a pod belongs.
    """
    host = view.host.with_demand(demand)
    gpu_free = _free_mib(view.states) / max(1, sum(state.capacity_bytes // units.MIB for state in view.states))
    return Terms(
        policy=_policy_term(policy, view, view.states, host, ()),
        host=(stranded(len(view.states), gpu_free, host) - stranded(len(view.states), gpu_free, view.host)) / view.unit,
        cpu_used=host.cpu_used - view.host.cpu_used,
        whole_node=float(view.whole),
        free=gpu_free,
    )


def node_fragmentation(states: Sequence[DeviceState], host: Host, demand: Demand) -> float:
    """Measure how many of the free GPUs a pod drawn from the demand finds useless on this node."""
    useful, states = 0, [state for state in states if state.shareable]
    for shape, weight in demand.shapes:
        fitting = [state for state in states if device_score.fits(state, shape)]
        if len(fitting) >= shape.vgpus and host.fits(shape.cpu_milli, shape.ram_mib):
            useful += weight * sum(map(device_score.room_ppm, fitting))
    return (sum(map(device_score.room_ppm, states)) - useful / WEIGHT_SUM) / PPM


def stranded(devices: int, gpu_free: float, host: Host) -> float:
    """Count the GPUs that one resource's shortage leaves behind, were all used in the node's own proportion. None on an unknown host."""
    if not host.known:
        return 0.0
    fed = min(host.cpu_free, host.ram_free)
    return devices * (max(0.0, gpu_free - fed) + max(0.0, host.cpu_free - gpu_free))


def scarcity(demand: Demand, counts: Mapping[Kind, int]) -> Scarcity:
    """Say of each kind of device how much of the demand insists on it, by type or size, as a multiple of its share of the devices.

    1 when those who insist would use all of it, were all demand as large as the cluster. Who may use several kinds is counted for each
    by how many there are. At most MAX_SCARCITY; kinds that nobody insists on are left out.
    """
    there = {kind: count for kind, count in counts.items() if count and kind[1]}
    insisting, total = dict.fromkeys(counts, 0.0), 0.0
    for shape, weight in demand.shapes:
        allowed = {kind: count for kind, count in there.items() if shape.wants(kind[0]) and shape.memory_on(kind[1]) <= kind[1]}
        for kind, count in allowed.items():
            part = (shape.memory_on(kind[1]) / kind[1] + shape.cores_percent / units.WHOLE_GPU_PERCENT) / 2
            amount = weight * shape.vgpus * part * count / sum(allowed.values())
            total += amount
            insisting[kind] += amount if len(allowed) < len(there) else 0.0
    devices = sum(there.values())
    return {kind: min(MAX_SCARCITY, amount / total * devices / there[kind]) for kind, amount in insisting.items() if amount}


def links_term(best_quality: int, count: int) -> float:
    """Say how far ``count`` devices fall short of full NVLink between all of them."""
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


def _free_mib(states: Sequence[DeviceState]) -> int:
    """Add up the free memory; of a device in MIG mode the part whose memory slices are free, where it has any."""
    total = 0
    for state in states:
        if state.device.mig_enabled and (slices := mig.slices(state.device.mig_instances, state.used_instances)).total:
            total += state.capacity_bytes // units.MIB * slices.free // slices.total
        else:
            total += state.free_memory_bytes // units.MIB
    return total
