# SPDX-License-Identifier: Apache-2.0
"""Refusals: the request, what is wrong with each device, and what would help, in one sentence for the pod's events."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, Isolation, Preferences
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import RULED_OUT, Reject, reject_reason, understates


class DeviceReject(NamedTuple):
    """One device and the reason why it does not fit."""

    device_uuid: str
    reject: Reject


@dataclass(frozen=True, slots=True)
class Refusal:
    """No devices for a container: the main reason, the reason of each device that does not fit, and the sentence."""

    container: str
    reason: Reject
    by_device: tuple[DeviceReject, ...]
    sentence: str
    sets_tried: int = 0
    """How many sets of devices were tried, without success, for all containers of the pod together."""


_FOUND: Final[Mapping[Reject, str]] = {
    Reject.UNHEALTHY: "unhealthy",
    Reject.CORDONED: "cordoned",
    Reject.MIG_MODE: "in MIG mode",
    Reject.TYPE: "excluded by the pod's gpu-type",
    Reject.UUID: "excluded by the pod's gpu-uuid",
    Reject.SHARES: "without a free share",
    Reject.EXCLUSIVE: "used by other containers",
    Reject.MEMORY: "without enough free memory",
    Reject.CORES: "without enough free cores",
    Reject.MIG_PROFILE: "without a free instance of it",
}
_CURE: Final[Mapping[Reject, str]] = {
    Reject.UNHEALTHY: "Wait for the device to recover, or use another node",
    Reject.CORDONED: "Uncordon the device, or use another node",
    Reject.MIG_MODE: f"Ask for an instance ({contract.RESOURCE_MIG_PREFIX}<profile>), or use a node without MIG",
    Reject.TYPE: f"Change {contract.ANNOTATION_GPU_TYPE} or {contract.ANNOTATION_GPU_TYPE_NOT}, or use another node",
    Reject.UUID: f"Change {contract.ANNOTATION_GPU_UUID} or {contract.ANNOTATION_GPU_UUID_NOT}, or use another node",
    Reject.SHARES: "Wait for a container there to end, or raise the agent's sharesPerGpu",
    Reject.EXCLUSIVE: f"Wait for them to end, or remove {contract.ANNOTATION_ISOLATION}: exclusive",
    Reject.MEMORY: f"Ask for less {contract.RESOURCE_VGPU_MEMORY}, or wait for a container there to end",
    Reject.CORES: f"Ask for less {contract.RESOURCE_VGPU_CORES}, or wait for a container there to end",
    Reject.MIG_PROFILE: "Wait for one to be freed, ask for another profile, or have an administrator create more",
    Reject.NUMA: f"Ask for fewer vGPUs, or set {contract.ANNOTATION_NUMA}: prefer",
    Reject.COUNT: "Ask for fewer vGPUs, or use a node with more GPUs",
}
_CURE_PERCENT: Final = f"Ask for less {contract.RESOURCE_VGPU_MEMORY_PERCENT}, or wait for a container there to end"
_CURE_WHOLE_MEMORY: Final = f"Set {contract.RESOURCE_VGPU_MEMORY} to ask for a part of a GPU's memory, or wait for the others to end"
_CURE_UNDERSTATED: Final = (
    f"Recreate the pod with all the memory of such a GPU as {contract.RESOURCE_VGPU_MEMORY}, or without that resource, because "
    f"{contract.ANNOTATION_ISOLATION}: exclusive gives whole GPUs; or without that annotation"
)
_CURE_UNRESERVED: Final = "Wait for a container there to end: all cores are reserved"


def refuse(states: Sequence[DeviceState], request: ContainerRequest, preferences: Preferences, overall: Reject | None = None) -> Refusal:
    """Explain why these devices cannot take the container.

    Args: overall: the reason if enough devices fit one by one, but not together.
    """
    rejects = [(state, reject_reason(state, request, preferences)) for state in states]
    by_device = tuple(DeviceReject(state.device.uuid, reject) for state, reject in rejects if reject is not None)
    reason = overall or _main_reason(states, request, by_device)
    sentence = (
        f"container {request.container} asks for {describe_request(request, preferences)}; "
        f"{_findings(rejects, reason, request, preferences)}. {_cure(reason, request, preferences)}."
    )
    return Refusal(request.container, reason, by_device, sentence)


def describe_request(request: ContainerRequest, preferences: Preferences) -> str:
    """Describe a request in words: ``2 vGPUs with 40 GiB and 50 percent of the cores each``."""
    if request.mig:
        return " and ".join(f"{count} x MIG {profile}" for profile, count in request.mig)
    memory_bytes, cores_percent, each = request.memory_bytes_per_vgpu, request.cores_percent_per_vgpu, " each" * (request.vgpus > 1)
    if preferences.isolation is Isolation.EXCLUSIVE:
        named = "" if memory_bytes is None else f" with {units.format_memory(memory_bytes)}{each}"
        return f"{_plural(request.vgpus, 'whole GPU')}{named} for itself"
    if (percent := request.memory_percent_per_vgpu) is not None:
        memory = f"{percent} percent of a GPU's memory"
    else:
        memory = "all the memory of a GPU" if memory_bytes is None else units.format_memory(memory_bytes)
    cores = "" if cores_percent is None else f" and {cores_percent} percent of the cores"
    return f"{_plural(request.vgpus, 'vGPU')} with {memory}{cores}{each}"


def _main_reason(states: Sequence[DeviceState], request: ContainerRequest, by_device: Sequence[DeviceReject]) -> Reject:
    """Return the most frequent reason; of equally frequent ones the first in the enum.

    Devices that the pod itself excludes are the reason only if they leave too few others. A pod that names one device, which is full, lacks
    memory, even if it excludes a hundred other devices.
    """
    if request.mig and len(by_device) < len(states):
        return Reject.MIG_PROFILE
    if len(states) < max(1, request.vgpus):
        return Reject.COUNT
    counts = Counter(reject for _, reject in by_device)
    ruled_out = {reject: counts[reject] for reject in RULED_OUT if counts[reject]}
    if ruled_out:
        enough = len(states) - sum(ruled_out.values()) >= max(1, request.vgpus)
        counts = counts - Counter(ruled_out) if enough else Counter(ruled_out)
    return max(Reject, key=lambda reject: counts[reject])


def _findings(
    rejects: Sequence[tuple[DeviceState, Reject | None]], reason: Reject, request: ContainerRequest, preferences: Preferences
) -> str:
    """Count the devices that fit, and the others by what is wrong: ``0 of 3 GPUs fit: 1 cordoned, 2 in MIG mode``."""
    if not rejects:
        return "this node has no GPU"
    fitting: list[DeviceState] = []
    unfit: dict[Reject, list[DeviceState]] = defaultdict(list)
    for state, reject in rejects:
        (fitting if reject is None else unfit[reject]).append(state)
    count = f"{len(fitting)} of {len(rejects)} GPUs fit" + (_numa_detail(fitting) if reason is Reject.NUMA else "")
    found = [f"{len(unfit[reject])} {_found(unfit[reject], reject, request, preferences)}" for reject in Reject if reject in unfit]
    return f"{count}: {', '.join(found)}" if found else count


def _found(unfit: Sequence[DeviceState], reject: Reject, request: ContainerRequest, preferences: Preferences) -> str:
    """Say what is wrong with devices that were refused for the same reason."""
    if reject is Reject.MEMORY and all(understates(state.device, request, preferences) for state in unfit):
        return _larger(unfit)
    return _FOUND[reject] + _detail(unfit, reject)


def _detail(unfit: Sequence[DeviceState], reject: Reject) -> str:
    match reject:
        case Reject.MEMORY:
            most = max(unfit, key=lambda state: state.free_memory_bytes)
            free, capacity = units.format_memory(most.free_memory_bytes), units.format_memory(most.capacity_bytes)
            return f" (at most {free} of {capacity}, on {most.device.uuid})"
        case Reject.CORES:
            most = max(unfit, key=lambda state: state.free_cores_percent)
            return f" (at most {most.free_cores_percent} of {units.WHOLE_GPU_PERCENT} percent, on {most.device.uuid})"
        case Reject.TYPE:
            return f" ({', '.join(sorted({state.device.model for state in unfit}))})"
        case _:
            return ""


def _larger(unfit: Sequence[DeviceState]) -> str:
    least = min(unfit, key=lambda state: state.capacity_bytes)
    return f"with more memory than that (at least {units.format_memory(least.capacity_bytes)}, {least.device.uuid})"


def _numa_detail(fitting: Sequence[DeviceState]) -> str:
    counts = Counter(state.device.numa_node for state in fitting)
    known = [f"{counts[node]} on NUMA node {node}" for node in sorted(node for node in counts if node is not None)]
    unknown = [f"{counts[None]} on an unknown NUMA node"] if counts[None] else []
    return f", but only {', '.join(known + unknown)}"


def _cure(reason: Reject, request: ContainerRequest, preferences: Preferences) -> str:
    if reason is Reject.MEMORY and request.asks_whole_memory:
        return _CURE_WHOLE_MEMORY
    if reason is Reject.MEMORY and request.memory_percent is not None:
        return _CURE_PERCENT
    if reason is Reject.MEMORY and preferences.isolation is Isolation.EXCLUSIVE:
        return _CURE_UNDERSTATED
    if reason is Reject.CORES and request.cores_percent is None:
        return _CURE_UNRESERVED
    return _CURE[reason]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
