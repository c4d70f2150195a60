"""How good a device is for a share, by policy: the lower the cost, the better. Integers, so that equal means equal.

The three dimensions of a device (memory, compute, share count) are measured in parts per million of what it has.
"""

from typing import Final

from placement.device import DeviceState
from proto import units
from proto.model import DeviceShare, Policy

_PPM: Final = 1_000_000
_SHAPES_PPM: Final = (125_000, 250_000, 500_000, 1_000_000)
"""What the next containers may want: an eighth, a quarter, half and all of a GPU, memory and compute alike."""


def cost(policy: Policy, state: DeviceState, share: DeviceShare) -> int:
    """Rate the device for the share, which must fit. Topology rates sets of devices, so to it all devices cost the same."""
    after = state.with_share(share)
    match policy:
        case Policy.BINPACK:
            return free_ppm(after)
        case Policy.SPREAD:
            return -free_ppm(after)
        case Policy.FRAG:
            return fragmentation(after) - fragmentation(state)
        case Policy.TOPOLOGY:
            return 0


def fragmentation(state: DeviceState) -> int:
    """Measure how much of what is free is of no use to the shapes that may come, in parts per million of a device.

    For each shape: place as many containers of it as still fit; what they leave free of memory and compute is stranded. An
    empty device and a full one have none. A share that lowers the sum fills a gap: memory left over beside busy cores, or the
    other half of a device.
    """
    memory_ppm = _ppm(state.free_memory_bytes, state.capacity_bytes)
    cores_ppm = _ppm(state.free_cores_percent, units.WHOLE_GPU_PERCENT)
    stranded_ppm = 0
    for shape_ppm in _SHAPES_PPM:
        fitting = min(memory_ppm // shape_ppm, cores_ppm // shape_ppm, state.free_shares)
        stranded_ppm += memory_ppm + cores_ppm - 2 * fitting * shape_ppm
    return stranded_ppm


def free_ppm(state: DeviceState) -> int:
    """Add up what is free of memory, compute and share count: 3,000,000 on an empty device."""
    return (
        _ppm(state.free_memory_bytes, state.capacity_bytes)
        + _ppm(state.free_cores_percent, units.WHOLE_GPU_PERCENT)
        + _ppm(state.free_shares, state.max_shares)
    )


def _ppm(part: int, whole: int) -> int:
    return part * _PPM // whole
