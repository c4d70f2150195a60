"""How good a device is for a share, by policy: the lower the cost, the better. Integers, so that equal means equal.

The three dimensions of a device (memory, compute, share count) are measured in parts per million of what it has.
"""

from typing import Final

from placement.demand import GENERIC, PPM, WEIGHT_SUM, Demand, Shape
from placement.device import DeviceState
from proto import units
from proto.model import DeviceShare, Policy

FRAG_PPM: Final = PPM
"""The most that the fragmentation of one device can be."""


def cost(policy: Policy, state: DeviceState, share: DeviceShare, demand: Demand = GENERIC) -> int:
    """Rate the device for the share, which must fit. Topology rates sets of devices, so to it all devices cost the same."""
    return cost_of_change(policy, state, state.with_share(share), demand)


def cost_of_change(policy: Policy, state: DeviceState, after: DeviceState, demand: Demand = GENERIC) -> int:
    """Rate the device by how it is and how it would be with the share."""
    match policy:
        case Policy.BINPACK:
            return free_ppm(after)
        case Policy.SPREAD:
            return -free_ppm(after)
        case Policy.FRAG:
            return fragmentation(after, demand) - fragmentation(state, demand)
        case Policy.TOPOLOGY:
            return 0


def fragmentation(state: DeviceState, demand: Demand = GENERIC) -> int:
    """Measure how much of what is free is of no use to the pods that may come, in parts per million of a device.

    What is free counts in full for a shape that does not fit and not at all for one that does, so the result is the part of the
    free room that a pod drawn from the demand would find useless. Nothing is stranded on an empty device that every shape fits,
    nor on a full one. A share that lowers it fills a gap: the other half of a device, or memory left over beside busy cores.
    """
    useful = 0
    if state.free_shares >= 1:
        free_mib, free_cores = state.free_memory_bytes // units.MIB, state.free_cores_percent
        for memory_mib, cores_percent, weight in demand.seats_on(state.device.model, state.capacity_bytes // units.MIB):
            if memory_mib <= free_mib and cores_percent <= free_cores:
                useful += weight
    return room_ppm(state) * (WEIGHT_SUM - useful) // WEIGHT_SUM


def fits(state: DeviceState, shape: Shape) -> bool:
    """Whether the device has room for one vGPU of a shape, by its amounts and its model."""
    return (
        state.free_shares >= 1
        and shape.memory_on(state.capacity_bytes // units.MIB) <= state.free_memory_bytes // units.MIB
        and shape.cores_percent <= state.free_cores_percent
        and shape.wants(state.device.model)
    )


def room_ppm(state: DeviceState) -> int:
    """Return the mean free part of memory and compute."""
    memory_ppm, cores_ppm = _ppm(state.free_memory_bytes, state.capacity_bytes), _ppm(state.free_cores_percent, units.WHOLE_GPU_PERCENT)
    return (memory_ppm + cores_ppm) // 2


def free_ppm(state: DeviceState) -> int:
    """Add up what is free of memory, compute and share count: 3,000,000 on an empty device."""
    return (
        _ppm(state.free_memory_bytes, state.capacity_bytes)
        + _ppm(state.free_cores_percent, units.WHOLE_GPU_PERCENT)
        + _ppm(state.free_shares, state.max_shares)
    )


def _ppm(part: int, whole: int) -> int:
    return part * PPM // whole
