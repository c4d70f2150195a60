# SPDX-License-Identifier: Apache-2.0
"""Reads amounts in the texts of other vocabularies, and the settings and inventory that their translation depends on."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, Final

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError, QuantityError, quote
from aliquot.contract.model import Preferences
from aliquot.placement.request import RequestError, pod_preferences
from scheduler_plugin.core.admit.queues import Queue
from scheduler_plugin.core.classes import DEFAULT_CLASSES, Profile
from scheduler_plugin.webhook.draft import Draft, DraftContainer

ONE_SIZE_PERCENT: Final = 3
"""GPUs with memory that differs by at most this much count as one size when a pod asks for a part of it. Between driver versions, as during
an upgrade, the usable memory of one model differs by less than a percent; between models sold with the same amount by little more."""

DeviceSizes = Callable[[Preferences], Collection[int]]
"""The memory sizes, in MiB, of the GPUs on which a pod with these preferences can run."""
SizesBehind = Callable[[Mapping[str, Any], Queue | None, Preferences], Collection[int]]
"""The same for a pod with this spec, of this queue."""
FindQueue = Callable[[str, str], Queue | None]
"""Finds a queue of Kueue by namespace and name."""
MigProfiles = Callable[[Preferences], Mapping[str, int]]
"""The MIG profiles that a pod with these preferences can get, each with the MiB of its smallest instance."""


def no_queue(_namespace: str, _name: str) -> None:
    """Find no queue: Kueue's are not read."""


@dataclass(frozen=True, slots=True)
class PerGpu:
    """The resources of a system that states a number of GPUs, and amounts for each of them. Empty: the system has no such resource."""

    system: str
    count: str
    memory: str = ""
    """MiB."""
    percent: str = ""
    """Memory as a percentage of the GPU's."""
    cores: str = ""
    priority: str = ""
    whole_alone: bool = False
    """Whether a number alone asks for GPUs of this system, and not of NVIDIA's device plugin."""

    @property
    def amounts(self) -> tuple[str, ...]:
        """The resources with amounts per GPU."""
        return tuple(filter(None, (self.memory, self.percent, self.cores)))

    @property
    def names(self) -> tuple[str, ...]:
        """All resources but the priority."""
        return (self.count, *self.amounts)

    def named(self, names: Mapping[str, str]) -> "PerGpu":
        """Return the system with some of its resources under other names, by the fields of this class."""
        stated: dict[str, Any] = dict(names)
        return replace(self, **stated)

    @property
    def marks(self) -> tuple[str, ...]:
        """The resources by which a container of this system is recognised: those that no other system has."""
        names = self.names if self.whole_alone else self.amounts
        return tuple(name for name in names if name not in NATIVE)


NATIVE: Final = contract.RESOURCES_OF_VGPUS
HAMI: Final = PerGpu(
    "HAMi", "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority"
)


@dataclass(frozen=True, slots=True)
class Options:
    """The settings and the inventory on which translation depends."""

    device_sizes: DeviceSizes
    adopt_nvidia_gpu: bool = False
    """Whether plain nvidia.com/gpu is ours as well: only where no other device plugin serves it."""
    count_whole_gpus: bool = False
    """Whether the memory of whole GPUs is set, for quotas: only where all present and future GPUs have one size."""
    mig_profiles: MigProfiles = field(default=lambda _: {})
    hami: PerGpu = HAMI
    """The names of HAMi's resources, which are settings there."""
    classes: Mapping[str, Profile] = field(default_factory=lambda: DEFAULT_CLASSES)
    """What the classes of work stand for."""
    scheduling_groups: bool = False
    """Whether kube-scheduler serves ``spec.schedulingGroup``."""
    gangs_from_owners: bool = False
    """Whether gangs are found in PodGroups and owners."""
    sizes_behind: SizesBehind | None = None
    """None where the labels of nodes are not known."""
    find_queue: FindQueue = field(default=no_queue)
    queue: Queue | None = None
    """The queue of the pod; None without one, or if it is not known."""

    def behind(self, spec: Mapping[str, Any], namespace: str, queue_name: str) -> "Options":
        """Return the options for a pod that its spec and its queue keep to some nodes. Args: queue_name: empty without a queue."""
        if self.sizes_behind is None:
            return self
        queue = self.find_queue(namespace, queue_name) if queue_name else None
        return replace(self, device_sizes=partial(self.sizes_behind, spec, queue), queue=queue)


def take_amount(container: DraftContainer, resource: str, read: Callable[[str], int]) -> int | None:
    """Remove a resource and return its amount; None without one. Raises RequestError."""
    text = container.take(resource) if resource else None
    if text is None:
        return None
    try:
        return read(text)
    except ContractError as exc:
        raise RequestError(f"container {container.name}, {resource}: {exc}, or remove the resource") from exc


def whole(text: str) -> int:
    """Read a whole number, also 0."""
    value = units.parse_quantity(text)
    if value.denominator != 1 or value < 0:
        raise QuantityError(f"expected a whole number, found {quote(text)}")
    return value.numerator


def memory_or_zero(text: str) -> int:
    """Read MiB, or a binary amount, into bytes; 0 is no amount, as in HAMi."""
    return 0 if units.parse_quantity(text) == 0 else units.parse_memory_bytes(text)


def count(text: str, annotation: str) -> int:
    """Read a number above 0. Raises RequestError."""
    try:
        return units.parse_count(text)
    except QuantityError as exc:
        raise RequestError(f"annotation {annotation}: {exc}") from exc


def mib(text: str, annotation: str) -> int:
    """Read MiB, or a binary amount, which KAI itself does not accept. Raises RequestError."""
    try:
        return units.bytes_to_mib(units.parse_memory_bytes(text))
    except QuantityError as exc:
        raise RequestError(f"annotation {annotation}: {exc}") from exc


def mib_up(text: str, source: str) -> int:
    """Read bytes and round up to MiB, so that the container gets at least its request. Raises RequestError."""
    try:
        value = units.parse_quantity(text)
    except QuantityError as exc:
        raise RequestError(f"{source}: {exc}") from exc
    found = -(-value // units.MIB)
    if found < 1 or found * units.MIB > units.MAX_MEMORY_BYTES:
        raise RequestError(f"{source}: expected bytes such as 4Gi, found {quote(text)}")
    return int(found)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one vGPU, by the resource that states it."""

    resource: str
    amount: int


def part_of_memory(draft: Draft, part: Fraction, source: str, options: Options) -> Memory:
    """Return a part of a GPU's memory: in MiB if the GPUs on which the pod can run have one size, or as a percentage of the chosen one.

    MiB are what quotas count; they are those of the smallest GPU, so that the share fits on each. A percentage is whole: it is rounded
    down, with a warning.
    """
    sizes = _sizes(draft, options)
    if sizes and units.WHOLE_GPU_PERCENT * sizes[0] >= (units.WHOLE_GPU_PERCENT - ONE_SIZE_PERCENT) * sizes[-1]:
        return Memory(contract.RESOURCE_VGPU_MEMORY, max(1, int(sizes[0] * part)))
    percent = max(1, int(part * units.WHOLE_GPU_PERCENT))
    if percent != part * units.WHOLE_GPU_PERCENT:
        draft.warnings.append(f"{source} is no whole percentage: the GPUs differ in size, so the pod asks for {percent} percent")
    return Memory(contract.RESOURCE_VGPU_MEMORY_PERCENT, percent)


def equal_parts(draft: Draft, part: Fraction, options: Options) -> tuple[Memory, ...]:
    """Return all forms that ``part_of_memory`` gives a part of the memory of the known GPUs: sizes come and go between two reviews."""
    percent = Memory(contract.RESOURCE_VGPU_MEMORY_PERCENT, max(1, int(part * units.WHOLE_GPU_PERCENT)))
    return percent, *(Memory(contract.RESOURCE_VGPU_MEMORY, max(1, int(size * part))) for size in _sizes(draft, options))


def _sizes(draft: Draft, options: Options) -> list[int]:
    return sorted(set(options.device_sizes(pod_preferences(draft.pod().annotations))))
