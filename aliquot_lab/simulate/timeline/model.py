# SPDX-License-Identifier: Apache-2.0
"""Nodes, pods and queues of a simulation, as the lists describe them. A workload is what starts as a whole: one pod, or a gang."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aliquot.contract import units
from aliquot.placement.mig import parse_profile

WHOLE_MILLI: Final = 1000
"""One GPU, in thousandths."""
MIG_COMPUTE_SLICES: Final = 7
"""Compute slices of a GPU that supports MIG."""
DEFAULT_SHARES_PER_GPU: Final = 16


@dataclass(frozen=True, slots=True)
class SimNode:
    """One node."""

    name: str
    cpu_milli: int
    ram_mib: int
    gpus: int
    gpu_memory_mib: int
    """Per GPU."""
    model: str = ""
    mig: tuple[str, ...] = ()
    """Profiles of the instances on each GPU, or ``on-demand`` alone; empty: no GPU is in MIG mode."""
    shares_per_gpu: int = DEFAULT_SHARES_PER_GPU


@dataclass(frozen=True, slots=True)
class PodKind:
    """What placement needs of a pod. Pods of one kind are interchangeable."""

    cpu_milli: int = 0
    ram_mib: int = 0
    gpus: int = 0
    memory_mib: int | None = None
    """Per GPU."""
    memory_percent: int | None = None
    """Per GPU, of the memory of the GPU that is chosen. Without both amounts the pod takes all memory of each."""
    cores_percent: int | None = None
    """Per GPU; None: no reserved compute."""
    models: frozenset[str] = frozenset()
    """Accepted models; empty: any."""
    mig: str = ""
    """The profile of one MIG instance; such a pod has no other GPUs."""
    shared: bool = False
    """Whether it requests less than whole GPUs."""

    @property
    def has_gpu(self) -> bool:
        """Whether the pod requests a GPU, a share of one, or a MIG instance."""
        return bool(self.gpus or self.mig)

    @property
    def size(self) -> str:
        """Return the class by which waits are counted."""
        if self.mig:
            return f"MIG {self.mig}"
        if not self.gpus:
            return "no GPU"
        return "share" if self.shared and self.gpus == 1 else f"{self.gpus} {'shares' if self.shared else 'GPU' + 's' * (self.gpus > 1)}"

    def memory_mib_on(self, gpu_memory_mib: int) -> int:
        """Return the MiB that the pod takes of one GPU with this much memory."""
        if self.memory_percent is not None:
            return max(1, gpu_memory_mib * self.memory_percent // units.WHOLE_GPU_PERCENT)
        return gpu_memory_mib if self.memory_mib is None else self.memory_mib

    def demand_milli(self, gpu_memory_mib: int) -> int:
        """Return the thousandths of GPUs that the pod takes: the mean of memory and compute. Args: gpu_memory_mib: of one GPU."""
        if self.mig:
            return parse_profile(self.mig).gpu_slices * WHOLE_MILLI // MIG_COMPUTE_SLICES
        memory = WHOLE_MILLI * self.memory_mib_on(gpu_memory_mib) // max(1, gpu_memory_mib)
        cores = memory if self.cores_percent is None else self.cores_percent * WHOLE_MILLI // units.WHOLE_GPU_PERCENT
        return self.gpus * (memory + cores) // 2


@dataclass(frozen=True, slots=True)
class SimPod:
    """One pod."""

    name: str
    kind: PodKind
    arrival_seconds: float = 0.0
    duration_seconds: float | None = None
    """None: it runs until the end of the simulation."""
    priority: int = 0
    queue: str = ""
    gang: str = ""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue with a quota, as a ClusterQueue of Kueue. All queues of a simulation can lend to each other."""

    name: str
    quota_milli: int
    """Thousandths of GPUs."""
    borrow_milli: int | None = None
    """How much more it may use while other queues do not use their quota; None: no limit."""
    reclaims: bool = False
    """Whether it may end workloads of queues above their quota when it needs its own."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What starts as a whole. All its pods have one priority and one queue, and they end together."""

    name: str
    pods: tuple[SimPod, ...]
    number: int
    """Its position in the order of arrival."""
    is_gang: bool = False

    @property
    def arrival_seconds(self) -> float:
        """Return when the last of its pods arrives."""
        return max(pod.arrival_seconds for pod in self.pods)

    @property
    def duration_seconds(self) -> float | None:
        """Return the longest duration of its pods; None: it never ends."""
        durations = [pod.duration_seconds for pod in self.pods if pod.duration_seconds is not None]
        return max(durations) if len(durations) == len(self.pods) else None

    @property
    def priority(self) -> int:
        """Return its priority; higher is more important."""
        return self.pods[0].priority

    @property
    def queue(self) -> str:
        """Return the name of its queue; empty: it needs no quota."""
        return self.pods[0].queue

    @property
    def size(self) -> str:
        """Return the class by which waits are counted, such as ``share`` or ``gang 4 x 8 GPUs``."""
        if not self.is_gang:
            return self.pods[0].kind.size
        return "gang " + " + ".join(f"{count} x {size}" for size, count in sorted(Counter(pod.kind.size for pod in self.pods).items()))

    @property
    def kinds(self) -> tuple[PodKind, ...]:
        """Return the kinds of its pods, which decide where it fits."""
        return tuple(pod.kind for pod in self.pods)

    def demand_milli(self, gpu_memory_mib: int) -> int:
        """Return the thousandths of GPUs of all its pods. Args: gpu_memory_mib: of one GPU."""
        return sum(pod.kind.demand_milli(gpu_memory_mib) for pod in self.pods)


def size_order(size: str) -> tuple[int, int, str]:
    """Sort sizes: pods without GPU, shares, MIG instances, whole GPUs by number, gangs."""
    kinds = ("no GPU", "share", "MIG", "gang")
    at = next((position for position, kind in enumerate(kinds) if size.startswith(kind)), -1)
    number = int(size.split()[0]) if size[:1].isdigit() else 0
    return (at if 0 <= at < len(kinds) - 1 else len(kinds) + at), number, size


def capacity_milli(nodes: Sequence[SimNode]) -> int:
    """Return all GPUs, in thousandths."""
    return sum(node.gpus for node in nodes) * WHOLE_MILLI
