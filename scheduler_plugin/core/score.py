"""What it costs a node to take a pod, by policy: the scalar specification of the columnar form in columnar.py.

A cost is the weighted sum of terms, each between -1 and 1, about the node before and after. The lower, the better. Which devices of the
node count is fixed by ``nominal``: the ones that cost least by placement.score, then break the fewest free links, then come first.
Placement may take others that cost the same (it looks at links and a hash too), so terms only say what holds for either.

policy       placement.score's cost per device taken: fragmentation, or what is left free
host         GPUs that CPU and RAM could no longer feed, and the reverse: what is stranded after, minus before
links        how far the best linked set falls short of full NVLink (several GPUs)
numa         1 when the pod prefers one NUMA node and the devices lie on several
open_links   links between free devices that the pod breaks, by quality
open_device  part of the devices that were empty and now are shared
whole_node   1 when the node was empty and keeps free devices
free         what is free of the node's GPU memory afterwards
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from placement import score as device_score
from placement.choose import with_shares
from placement.device import DeviceState
from placement.fit import reject_reason, share_on
from proto import units
from proto.model import ContainerRequest, DeviceShare, NumaMode, Policy, Preferences
from scheduler_plugin.core.links import REFERENCE_QUALITY, Matrix

FRAG_PPM: Final = 8_000_000
"""The most placement.score.fragmentation can change by: four shapes, two dimensions."""
FREE_PPM: Final = 3_000_000
"""placement.score.free_ppm of an empty device."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What each term counts. Terms are explained in the module."""

    policy: float
    host: float
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
    Policy.FRAG: Weights(1.0, 1.0, 0.5, 0.5, 0.05, 0.1, 0.2, 0.02),
    Policy.BINPACK: Weights(1.0, 0.2, 0.1, 0.5, 0.05, 0.1, 0.2, 0.5),
    Policy.SPREAD: Weights(1.0, 0.2, 0.1, 0.5, 0.0, 0.0, 0.0, -1.0),
    Policy.TOPOLOGY: Weights(1.0, 0.1, 4.0, 1.0, 0.5, 0.1, 0.1, 0.05),
}


@dataclass(frozen=True, slots=True)
class Host:
    """A node's CPU and RAM. Zero capacity: not known, and then it does not count."""

    cpu_milli: int = 0
    cpu_used_milli: int = 0
    ram_mib: int = 0
    ram_used_mib: int = 0

    @property
    def cpu_free(self) -> float:
        """The free part of the CPU."""
        return max(0, self.cpu_milli - self.cpu_used_milli) / max(1, self.cpu_milli)

    @property
    def ram_free(self) -> float:
        """The free part of the RAM."""
        return max(0, self.ram_mib - self.ram_used_mib) / max(1, self.ram_mib)


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

    def open_links(self, index: int) -> int:
        """Add up the links between this device and other empty ones; 0 when it is in use itself."""
        if not self.states[index].empty or not self.matrix:
            return 0
        return sum(quality for quality, state in zip(self.matrix[index], self.states, strict=True) if state.empty)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one node, in the order of Weights."""

    policy: float = 0.0
    host: float = 0.0
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
        index: (device_score.cost(policy, state, share_on(state.device, request, preferences)), view.open_links(index), index)
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
    before_free, capacity = _free_mib(view.states), max(1, sum(state.capacity_bytes // units.MIB for state in view.states))
    gpu_after = (before_free - sum(share.memory_bytes // units.MIB for share in shares)) / capacity
    numa_nodes = {view.states[index].device.numa_node for index in touched}
    return Terms(
        policy=_policy_term(policy, view.states, after, touched),
        host=_host_term(view.host, demand, before_free / capacity, gpu_after),
        links=links_term(best_quality, len(touched)),
        numa=float(prefer_numa and len(touched) > 1 and (len(numa_nodes) > 1 or None in numa_nodes)),
        open_links=sum(map(view.open_links, touched)) / (len(touched) * max(1, len(view.states) - 1) * REFERENCE_QUALITY),
        open_device=sum(view.states[i].empty and after[i].free_memory_bytes > 0 for i in touched) / len(touched),
        whole_node=float(len(touched) < len(view.states) and all(state.empty for state in view.states)),
        free=gpu_after,
    )


def mig_terms(view: NodeView, count: int, policy: Policy) -> Terms:
    """Rate taking ``count`` MIG instances: the fewer stay free beside them, the better, or the reverse when spreading."""
    total = sum(len(state.device.mig_instances) for state in view.states)
    free = total - sum(len(state.used_instances) for state in view.states)
    part = (free - count) / max(1, total)
    capacity = sum(state.capacity_bytes // units.MIB for state in view.states)
    return Terms(
        policy=-part if policy is Policy.SPREAD else part,
        whole_node=float(all(state.empty for state in view.states)),
        free=_free_mib(view.states) / max(1, capacity),
    )


def stranded(gpu_free: float, cpu_free: float, ram_free: float) -> float:
    """Measure how much of one resource the shortage of another leaves behind, were all used in the node's own proportion."""
    return (max(0.0, gpu_free - cpu_free) + max(0.0, gpu_free - ram_free) + max(0.0, cpu_free - gpu_free)) / 3


def links_term(best_quality: int, count: int) -> float:
    """Say how far ``count`` devices fall short of full NVLink between all of them."""
    pairs = count * (count - 1) // 2
    return max(0.0, 1 - best_quality / (pairs * REFERENCE_QUALITY)) if pairs else 0.0


def _policy_term(policy: Policy, before: Sequence[DeviceState], after: Sequence[DeviceState], touched: Sequence[int]) -> float:
    match policy:
        case Policy.FRAG:
            total = sum(device_score.fragmentation(after[i]) - device_score.fragmentation(before[i]) for i in touched)
            return total / (FRAG_PPM * len(touched))
        case Policy.BINPACK:
            return sum(device_score.free_ppm(after[i]) for i in touched) / (FREE_PPM * len(touched))
        case Policy.SPREAD:
            return -sum(device_score.free_ppm(after[i]) for i in touched) / (FREE_PPM * len(touched))
        case Policy.TOPOLOGY:
            return 0.0


def _host_term(host: Host, demand: HostDemand, gpu_before: float, gpu_after: float) -> float:
    if not host.cpu_milli or not host.ram_mib:
        return 0.0
    cpu_after = max(0.0, host.cpu_free - demand.cpu_milli / host.cpu_milli)
    ram_after = max(0.0, host.ram_free - demand.ram_mib / host.ram_mib)
    return stranded(gpu_after, cpu_after, ram_after) - stranded(gpu_before, host.cpu_free, host.ram_free)


def _free_mib(states: Sequence[DeviceState]) -> int:
    """Add up the free memory; of a device in MIG mode the part whose instances are free."""
    total = 0
    for state in states:
        if state.device.mig_enabled:
            instances = len(state.device.mig_instances)
            free = instances - len(state.used_instances)
            total += state.capacity_bytes // units.MIB * free // max(1, instances)
        else:
            total += state.free_memory_bytes // units.MIB
    return total
