# SPDX-License-Identifier: Apache-2.0
"""Translates the resources of systems with amounts per GPU: HAMi, Volcano and vgpu-manager. Our amounts are a container's totals.

In mode ``mig``, a container gets instances of the smallest profile that has its memory, one for each GPU that it asks for.
"""

from fractions import Fraction
from typing import Final

from aliquot import contract
from aliquot.contract import units
from aliquot.placement import mig
from aliquot.placement.request import RequestError, pod_preferences
from scheduler_plugin.webhook.amounts import HAMI, NATIVE, Memory, Options, PerGpu, memory_or_zero, part_of_memory, take_amount, whole
from scheduler_plugin.webhook.draft import Draft, DraftContainer

NVIDIA_GPU: Final = HAMI.count
NVIDIA_SHARED: Final = "nvidia.com/gpu.shared"
VOLCANO: Final = PerGpu(
    "Volcano",
    "volcano.sh/vgpu-number",
    "volcano.sh/vgpu-memory",
    "volcano.sh/vgpu-memory-percentage",
    "volcano.sh/vgpu-cores",
    whole_alone=True,
)
VOLCANO_SHARING: Final = PerGpu("Volcano", "volcano.sh/gpu-number", "volcano.sh/gpu-memory", whole_alone=True)
"""Volcano's own GPU sharing, before it took over HAMi's."""
VGPU_MANAGER: Final = PerGpu(
    "vgpu-manager",
    "nvidia.com/vgpu-number",
    contract.RESOURCE_VGPU_MEMORY,
    cores=contract.RESOURCE_VGPU_CORES,
    whole_alone=True,
)
MODES: Final = ("nvidia.com/vgpu-mode", "volcano.sh/vgpu-mode")
"""The annotations with which a pod chooses the backend in HAMi and Volcano."""
MIG_MODE: Final = "mig"


def systems(options: Options) -> tuple[PerGpu, ...]:
    """Return the systems, with the names that the settings give."""
    return options.hami, VOLCANO, VOLCANO_SHARING, VGPU_MANAGER


def asking_system(container: DraftContainer, options: Options) -> PerGpu | None:
    """Return the system in which a container asks for GPUs; None without one. With a number of 0 it asks for none."""
    return next((system for system in systems(options) if _is_asked(container, system, options)), None)


def has_words(container: DraftContainer, system: PerGpu, options: Options) -> bool:
    """Whether a container names a resource of a system, with any amount."""
    adopted = (NVIDIA_GPU, NVIDIA_SHARED) if options.adopt_nvidia_gpu and system is options.hami else ()
    return any(map(container.has, (*system.marks, *adopted)))


def _is_asked(container: DraftContainer, system: PerGpu, options: Options) -> bool:
    if not has_words(container, system, options):
        return False
    shared = (NVIDIA_SHARED,) if system is options.hami else ()
    return any(map(container.wants, (*shared, *((system.count,) if container.has(system.count) else system.amounts))))


def remove_zeros(container: DraftContainer, options: Options) -> None:
    """Remove the words of a system in which a container asks for no GPU, as templates write them."""
    for system in systems(options):
        if has_words(container, system, options) and not _is_asked(container, system, options):
            ours = container.wants(contract.RESOURCE_VGPU) and system.count not in NATIVE
            for resource in (*system.names, *((NVIDIA_SHARED,) if system is options.hami else ())):
                if not (ours and resource in NATIVE):
                    container.take(resource)


def translate(draft: Draft, container: DraftContainer, system: PerGpu, options: Options) -> None:
    """Set a container's totals from its amounts per GPU. Raises RequestError."""
    if container.has(NVIDIA_SHARED):
        raise RequestError(
            f"container {container.name} asks for {NVIDIA_SHARED}, which states no amount: set "
            f"{contract.RESOURCE_VGPU_MEMORY} and {contract.RESOURCE_VGPU_CORES} instead"
        )
    vgpus = take_amount(container, system.count, whole) or 1
    memory = _memory(draft, container, system, options)
    cores = take_amount(container, system.cores, whole)
    if asks_mig_mode(draft):
        if cores:
            draft.warnings.append(f"container {container.name}: {system.cores} has no effect: an instance has the compute of its profile")
        _ask_instances(draft, container, vgpus, memory, options)
        return
    container.ask(contract.RESOURCE_VGPU, vgpus)
    if memory is not None:
        container.ask(memory.resource, vgpus * memory.amount)
    if cores:
        container.ask(contract.RESOURCE_VGPU_CORES, vgpus * cores)


def asks_mig_mode(draft: Draft) -> bool:
    """Whether the pod chooses MIG instances by their memory."""
    return any(draft.annotations.get(name) == MIG_MODE for name in MODES)


def _memory(draft: Draft, container: DraftContainer, system: PerGpu, options: Options) -> Memory | None:
    """Remove the memory per GPU from a container and return it; None asks for the whole memory. Raises RequestError."""
    memory_bytes = take_amount(container, system.memory, memory_or_zero)
    percent = take_amount(container, system.percent, whole)
    if memory_bytes and percent:
        raise RequestError(f"container {container.name} sets both {system.memory} and {system.percent}: keep one")
    if percent and not 1 <= percent <= units.WHOLE_GPU_PERCENT:
        raise RequestError(f"container {container.name}, {system.percent}: expected 1 to 100, found {percent}")
    if percent and percent < units.WHOLE_GPU_PERCENT:
        return part_of_memory(draft, Fraction(percent, 100), f"{system.percent}: {percent}", options)
    return Memory(contract.RESOURCE_VGPU_MEMORY, units.bytes_to_mib(memory_bytes)) if memory_bytes else None


def _ask_instances(draft: Draft, container: DraftContainer, vgpus: int, memory: Memory | None, options: Options) -> None:
    profiles = options.mig_profiles(pod_preferences(draft.pod().annotations))
    wanted_mib = memory.amount if memory is not None and memory.resource == contract.RESOURCE_VGPU_MEMORY else 0
    fitting = [(size, name) for name, size in profiles.items() if size >= wanted_mib]
    if not profiles:
        raise RequestError(
            f"container {container.name} asks in mode {MIG_MODE} for instances with {wanted_mib or 'all the'} MiB, and no node offers MIG "
            f"instances now, so no profile can be chosen: ask for the instance by its resource, such as "
            f"{contract.RESOURCE_MIG_PREFIX}1g.10gb: 1, or have the scheduler's setting migProfiles name what new nodes will offer"
        )
    if not wanted_mib or not fitting:
        found = ", ".join(f"{name} with {size} MiB" for name, size in sorted(profiles.items(), key=lambda item: item[1]))
        raise RequestError(
            f"container {container.name} asks in mode {MIG_MODE} for instances with {wanted_mib or 'all the'} MiB, and the nodes offer "
            f"{found}: state the memory of one of these, or ask for the instance by its resource, such as "
            f"{contract.RESOURCE_MIG_PREFIX}1g.10gb: 1"
        )
    _, profile = min(fitting)
    container.ask(mig.resource_of_profile(profile), vgpus)
