# SPDX-License-Identifier: Apache-2.0
"""Rates a device for a share, by policy: the lower the cost, the better. Costs are integers, so that equal costs compare as equal.

The three dimensions of a device (memory, cores, number of shares) are measured in parts per million of its capacity.
"""

from typing import Final

from aliquot.contract import units
from aliquot.contract.model import DeviceShare, Policy
from aliquot.placement.demand import GENERIC, PPM, WEIGHT_SUM, Demand, Shape
from aliquot.placement.device import DeviceState

FRAG_PPM: Final = PPM
"""The largest fragmentation of one device."""


def cost(policy: Policy, state: DeviceState, share: DeviceShare, demand: Demand = GENERIC) -> int:
    """Rate the device for the share, which must fit. The policy topology rates sets of devices, so by it all devices cost the same.

    A device that the pod avoids costs more with every policy (``DeviceState.aversion_ppm``).
    """
    return cost_of_change(policy, state, state.with_share(share), demand)


def cost_of_change(policy: Policy, state: DeviceState, after: DeviceState, demand: Demand = GENERIC) -> int:
    """Rate the device by its state now and with the share."""
    return state.aversion_ppm + _cost_by_policy(policy, state, after, demand)


def _cost_by_policy(policy: Policy, state: DeviceState, after: DeviceState, demand: Demand) -> int:
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
    """Measure the free room that is useless to future pods, in parts per million of a device.

    The free room counts in full for a shape that does not fit, and with 0 for one that fits. So the result is the expected useless room for
    a pod drawn from the demand. It is 0 on a full device, and on an empty device that every shape fits. A share that lowers it fills a gap:
    the other half of a device, or memory that is left while the cores are in use.
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
    """Return the mean of the free parts of memory and cores."""
    memory_ppm, cores_ppm = _ppm(state.free_memory_bytes, state.capacity_bytes), _ppm(state.free_cores_percent, units.WHOLE_GPU_PERCENT)
    return (memory_ppm + cores_ppm) // 2


def free_ppm(state: DeviceState) -> int:
    """Add up the free parts of memory, cores and number of shares: 3,000,000 on an empty device."""
    return (
        _ppm(state.free_memory_bytes, state.capacity_bytes)
        + _ppm(state.free_cores_percent, units.WHOLE_GPU_PERCENT)
        + _ppm(state.free_shares, state.max_shares)
    )


def _ppm(part: int, whole: int) -> int:
    return part * PPM // whole
