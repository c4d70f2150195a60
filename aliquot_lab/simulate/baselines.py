# SPDX-License-Identifier: Apache-2.0
"""The policies that FGD was compared with (Weng et al., USENIX ATC'23), and FGD, re-implemented on arrays.

All have the same requirements of a node (CPU, memory, model, GPUs). Among equally good nodes they take the first by name, as the published
evaluation does. Pods with several GPUs get the completely free ones with the lowest numbers. The policy chooses the GPU of a smaller pod,
by default the fullest that fits. Where pods request compute and memory, the larger part counts. Scores of a class of pods are cached, and
computed again for changed nodes.

Scores are whole numbers from 0 to 100, as in kube-scheduler and in the published evaluation, so many nodes are equally good; HAMi's are
not rounded.

random         any node and GPU that fits
bestfit        the least CPU and GPU left, each as a part of the largest node's
dotprod        the least product of the free amounts of the node and the amounts that the pod requests
gpupacking     a GPU in use, the fuller the better, before a free one on a node in use before a node that is free, the fewer GPUs the better
gpuclustering  nodes with pods of the same number of GPUs (or part of one) alone, then among others, then nodes without such pods, then
               those with pods of other kinds; in each the ones with the fewest GPUs free
fgd            the least growth of fragmentation, over the classes that make up 95 % of the pods
fgd100         the same over all classes
hami-binpack   HAMi's formula for nodes and GPUs: what is in use before the pod, of shares (ten for each GPU), compute and memory; pods
               without GPUs go where most CPU is free
kai-binpack    KAI Scheduler's formulas: for a share a GPU that is shared already, then the node with the fewest idle GPUs; pods without
               GPUs go where least CPU is free
kube-least-allocated, kube-most-allocated
               kube-scheduler's defaults, which count CPU and RAM; or MostAllocated over CPU, RAM and GPUs. Both take the lowest GPUs

For gpupacking and gpuclustering, all nodes are equal for a pod without GPUs.
Sources: hkust-adsl/kubernetes-scheduler-simulator, pkg/simulator/plugin, with the options of its experiments/run_scripts; HAMi
pkg/scheduler/policy/{node,gpu}_policy.go; KAI pkg/scheduler/plugins/{nodeplacement,gpusharingorder,gpupack}.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aliquot_lab.simulate.engine import Bools, Floats, Ints, Room, most_frequent
from aliquot_lab.simulate.fragmentation import Measure
from aliquot_lab.simulate.kube_scores import least_allocated, most_allocated
from aliquot_lab.simulate.trace import WHOLE_GPU_MILLI, PodClass, TraceNode, TracePod

MAX_CPU_MILLI: Final = 128_000
MAX_GPU_MILLI: Final = 8_000
"""The largest node of the trace, for normalised scores."""
MAX_SCORE: Final = 100
HAMI_SHARES: Final = 10
"""HAMi's default number of shares of a GPU."""
_KAI_SHARED: Final = 1000
_UNFIT: Final = -np.inf


@dataclass(slots=True)
class _Kept:
    """The cached scores of every node for a class."""

    score: Floats
    gpu: Ints
    """The GPU for a pod with one GPU or less."""
    computed_at: int = -1


class ArrayEngine(ABC):
    """The cluster as arrays, by node in the order of names. Subclasses score and choose."""

    def __init__(self, nodes: Sequence[TraceNode]) -> None:
        self.models = sorted({node.model for node in nodes})
        self.model: Ints = np.array([self.models.index(node.model) for node in nodes], dtype=np.int64)
        self.cpu: Ints = np.array([node.cpu_milli for node in nodes], dtype=np.int64)
        self.ram: Ints = np.array([node.ram_mib for node in nodes], dtype=np.int64)
        self.cpu_of_host: Ints = self.cpu.copy()
        self.ram_of_host: Ints = self.ram.copy()
        self.gpus: Ints = np.array([node.gpus for node in nodes], dtype=np.int64)
        width = int(self.gpus.max())
        self.free: Ints = np.where(np.arange(width) < self.gpus[:, None], WHOLE_GPU_MILLI, -1)
        self._changed: Ints = np.zeros(len(nodes), dtype=np.int64)
        self._clock = 0
        self._kept: dict[PodClass, _Kept] = {}
        self._placed: dict[str, tuple[PodClass, int, Ints]] = {}

    def place(self, pod: TracePod) -> bool:
        """Place a pod on the best node."""
        kind = pod.kind.in_one_dimension()
        choice = self.best_place(kind)
        if choice is None:
            return False
        self.hold(pod.name, kind, *choice)
        return True

    def best_place(self, kind: PodClass) -> tuple[int, Ints] | None:
        """Return the number of the best node, and those of its GPUs, for a pod that requests parts of GPUs only; None without room."""
        kept = self._kept.setdefault(kind, _Kept(np.full(len(self.cpu), _UNFIT), np.zeros(len(self.cpu), dtype=np.int64)))
        rows = np.flatnonzero(self._changed > kept.computed_at)
        if len(rows):
            kept.score[rows], kept.gpu[rows] = self._judge(rows, kind)
        kept.computed_at = self._clock
        node = self._best(kept)
        if kept.score[node] == _UNFIT:
            return None
        gpus = np.flatnonzero(self.free[node] == WHOLE_GPU_MILLI)[: kind.gpus] if kind.gpus != 1 else kept.gpu[node : node + 1].copy()
        return node, gpus

    def hold(self, name: str, kind: PodClass, node: int, gpus: Ints) -> None:
        """Let a pod of this name take these GPUs of a node."""
        self._take(node, gpus, kind, 1)
        self._placed[name] = (kind, node, gpus)

    def remove(self, pod: TracePod) -> None:
        """Free what a placed pod holds."""
        self.release(pod.name)

    def release(self, name: str) -> None:
        """Free what the pod of this name holds."""
        kind, node, gpus = self._placed.pop(name)
        self._take(node, gpus, kind, -1)

    def room(self) -> Room:
        """Return what is free."""
        return Room(self.cpu.copy(), self.free.copy())

    @abstractmethod
    def choose(self, rows: Ints, kind: PodClass, usable: Bools) -> tuple[Floats, Ints]:
        """Score nodes that fit; higher is better. Also choose the GPU for a pod with one GPU or less."""

    def note(self, node: int, kind: PodClass, sign: int) -> None:  # noqa: B027 - most policies need no notice
        """Called when a pod was placed, or with sign -1 removed."""

    def _best(self, kept: _Kept) -> int:
        return int(np.argmax(kept.score))

    def _take(self, node: int, gpus: Ints, kind: PodClass, sign: int) -> None:
        self.cpu[node] -= sign * kind.cpu_milli
        self.ram[node] -= sign * kind.ram_mib
        self.free[node, gpus] -= sign * kind.milli
        self.note(node, kind, sign)
        self._clock += 1
        self._changed[node] = self._clock

    def _judge(self, rows: Ints, kind: PodClass) -> tuple[Floats, Ints]:
        fits = (self.cpu[rows] >= kind.cpu_milli) & (self.ram[rows] >= kind.ram_mib)
        if kind.models:
            fits &= np.array([model in kind.models for model in self.models])[self.model[rows]]
        usable = self.free[rows] >= max(1, kind.milli)
        if kind.gpus:
            fits &= usable.sum(axis=1) >= kind.gpus
        score, gpu = np.full(len(rows), _UNFIT), np.zeros(len(rows), dtype=np.int64)
        if fits.any():
            score[fits], gpu[fits] = self.choose(rows[fits], kind, usable[fits])
        return score, gpu

    def _gpu_free(self, rows: Ints) -> Ints:
        total: Ints = np.maximum(self.free[rows], 0).sum(axis=1)
        return total


class FullestGpu(ArrayEngine):
    """Chooses the fullest GPU that fits. Subclasses score nodes."""

    @abstractmethod
    def rate(self, rows: Ints, kind: PodClass, gpu: Ints) -> Floats:
        """Score nodes that fit; higher is better. Args: gpu: the fullest that fits, for a pod with one GPU or less."""

    def choose(self, rows: Ints, kind: PodClass, usable: Bools) -> tuple[Floats, Ints]:
        """Choose the fullest GPU, and score the nodes with it."""
        gpu: Ints = np.argmin(np.where(usable, self.free[rows], WHOLE_GPU_MILLI + 1), axis=1)
        return self.rate(rows, kind, gpu), gpu


class BestFit(FullestGpu):
    """See the module's docstring."""

    def rate(self, rows: Ints, kind: PodClass, gpu: Ints) -> Floats:
        """Score by the CPU and GPU that are left."""
        cpu_left, gpu_left = self.cpu[rows] - kind.cpu_milli, self._gpu_free(rows) - kind.demand_milli
        return _whole(1 - (cpu_left / MAX_CPU_MILLI + gpu_left / MAX_GPU_MILLI) / 2)


class DotProd(FullestGpu):
    """See the module's docstring."""

    def rate(self, rows: Ints, kind: PodClass, gpu: Ints) -> Floats:
        """Score by the product of free and requested amounts."""
        cpu = self.cpu[rows] / MAX_CPU_MILLI * (kind.cpu_milli / MAX_CPU_MILLI)
        gpu_product = self._gpu_free(rows) / MAX_GPU_MILLI * (kind.demand_milli / MAX_GPU_MILLI)
        return _whole(1 - (cpu + gpu_product) / 2)


class GpuPacking(FullestGpu):
    """See the module's docstring."""

    def rate(self, rows: Ints, kind: PodClass, gpu: Ints) -> Floats:
        """Score by level: above half of the scale for GPUs in use, above a third for nodes in use, less for others."""
        if not kind.gpus:
            return np.zeros(len(rows))
        free, gpus = self.free[rows], self.gpus[rows]
        empty = (free == WHOLE_GPU_MILLI).sum(axis=1) == gpus
        left = np.take_along_axis(free, gpu[:, None], axis=1)[:, 0]
        shared = (left < WHOLE_GPU_MILLI) & (kind.gpus == 1)
        score: Floats = np.where(shared, MAX_SCORE - left // 100, MAX_SCORE // 2 - kind.gpus).astype(np.float64)
        score[empty] = MAX_SCORE // 3 - gpus[empty]
        return score


class GpuClustering(FullestGpu):
    """See the module's docstring."""

    def __init__(self, nodes: Sequence[TraceNode]) -> None:
        super().__init__(nodes)
        self._pods: Ints = np.zeros((len(nodes), MAX_GPU_MILLI // WHOLE_GPU_MILLI + 1), dtype=np.int64)
        """Number of pods by node and number of GPUs; 0 means a part of one."""

    def rate(self, rows: Ints, kind: PodClass, gpu: Ints) -> Floats:
        """Score by the pods on the node, and among equals by what is in use."""
        if not kind.gpus:
            return np.zeros(len(rows))
        pods = self._pods[rows]
        same, kinds = pods[:, self._column(kind)] > 0, (pods > 0).sum(axis=1)
        level = np.where(same, 2 + (kinds == 1), np.where(kinds == 0, 1, 0))
        quarter = MAX_SCORE // 4
        score: Floats = (level * quarter + quarter * (MAX_GPU_MILLI - self._gpu_free(rows)) // MAX_GPU_MILLI).astype(np.float64)
        return score

    def note(self, node: int, kind: PodClass, sign: int) -> None:
        """Count the pods on the node."""
        if kind.gpus:
            self._pods[node, self._column(kind)] += sign

    @staticmethod
    def _column(kind: PodClass) -> int:
        return 0 if kind.milli < WHOLE_GPU_MILLI else kind.gpus


class HamiBinpack(FullestGpu):
    """See the module's docstring."""

    def __init__(self, nodes: Sequence[TraceNode]) -> None:
        super().__init__(nodes)
        self._shares: Ints = np.zeros(len(nodes), dtype=np.int64)

    def rate(self, rows: Ints, kind: PodClass, gpu: Ints) -> Floats:
        """Score by the parts in use; compute and memory are one amount here."""
        if not kind.gpus:
            free: Floats = (self.cpu[rows] - kind.cpu_milli) / self.cpu_of_host[rows]
            return free
        gpus = self.gpus[rows]
        used: Floats = 1 - self._gpu_free(rows) / (gpus * WHOLE_GPU_MILLI)
        return self._shares[rows] / (gpus * HAMI_SHARES) + 2 * used

    def note(self, node: int, kind: PodClass, sign: int) -> None:
        """Count the shares on the node."""
        self._shares[node] += sign * kind.gpus


class KaiBinpack(FullestGpu):
    """See the module's docstring."""

    def rate(self, rows: Ints, kind: PodClass, gpu: Ints) -> Floats:
        """Score by idle GPUs, or by CPU. KAI scales this to at most 9, and a shared GPU with room counts 1,000: the order is the same."""
        if not kind.gpus:
            free: Floats = (self.cpu[rows] - kind.cpu_milli) / self.cpu_of_host[rows]
            return -free
        score: Floats = -(self.free[rows] == WHOLE_GPU_MILLI).sum(axis=1).astype(np.float64)
        if 0 < kind.milli < WHOLE_GPU_MILLI:
            score += _KAI_SHARED * (self.free[rows, gpu] < WHOLE_GPU_MILLI)
        return score


class KubeLeastAllocated(ArrayEngine):
    """See the module's docstring."""

    def choose(self, rows: Ints, kind: PodClass, usable: Bools) -> tuple[Floats, Ints]:
        """Score the hosts, and take the first GPU that fits."""
        first: Ints = np.argmax(usable, axis=1)
        return self.rate(rows, kind).astype(np.float64), first

    def rate(self, rows: Ints, kind: PodClass) -> Ints:
        """Score nodes that fit; higher is better."""
        return least_allocated(*self._used_parts(rows, kind))

    def _used_parts(self, rows: Ints, kind: PodClass) -> tuple[Floats, Floats]:
        """Return the used parts of CPU and RAM with the pod."""
        cpu: Floats = 1 - (self.cpu[rows] - kind.cpu_milli) / self.cpu_of_host[rows]
        ram: Floats = 1 - (self.ram[rows] - kind.ram_mib) / self.ram_of_host[rows]
        return cpu, ram


class KubeMostAllocated(KubeLeastAllocated):
    """See the module's docstring."""

    def rate(self, rows: Ints, kind: PodClass) -> Ints:
        """Score by the used parts of CPU, RAM and GPUs."""
        gpu = np.full(len(rows), np.nan)
        if kind.gpus:
            gpu = 1 - (self._gpu_free(rows) - kind.demand_milli) / (self.gpus[rows] * WHOLE_GPU_MILLI)
        return most_allocated(*self._used_parts(rows, kind), gpu)


class RandomChoice(ArrayEngine):
    """See the module's docstring."""

    def __init__(self, nodes: Sequence[TraceNode], seed: int) -> None:
        super().__init__(nodes)
        self._rng = random.Random(seed)  # noqa: S311 (random numbers of a simulation, not a secret)
        self._numpy_rng = np.random.default_rng(seed)

    def choose(self, rows: Ints, kind: PodClass, usable: Bools) -> tuple[Floats, Ints]:
        """Give all nodes the same score."""
        gpu: Ints = np.argmax(np.where(usable, self._numpy_rng.random(usable.shape), -1.0), axis=1)
        return np.zeros(len(rows)), gpu

    def _best(self, kept: _Kept) -> int:
        fitting = np.flatnonzero(kept.score != _UNFIT)
        return int(fitting[self._rng.randrange(len(fitting))]) if len(fitting) else 0


class Fgd(ArrayEngine):
    """See the module's docstring."""

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod], part: float) -> None:
        super().__init__(nodes)
        self._measure = Measure(most_frequent(pods, part), self.models)

    def choose(self, rows: Ints, kind: PodClass, usable: Bools) -> tuple[Floats, Ints]:
        """Score every GPU; for pods with several GPUs or without one, the node."""
        before = self._measure.fragmentation(self.cpu[rows], self.free[rows], self.model[rows])
        if kind.gpus != 1:
            after_free = self.free[rows].copy()
            whole = after_free == WHOLE_GPU_MILLI
            after_free[whole & (np.cumsum(whole, axis=1) <= kind.gpus)] = 0
            after = self._measure.fragmentation(self.cpu[rows] - kind.cpu_milli, after_free, self.model[rows])
            return _score_of(before - after), np.zeros(len(rows), dtype=np.int64)
        score = np.where(usable, _score_of(before[:, None] - self._after_each(rows, kind)), _UNFIT)
        gpu: Ints = np.argmax(score, axis=1)
        return np.take_along_axis(score, gpu[:, None], axis=1)[:, 0], gpu

    def _after_each(self, rows: Ints, kind: PodClass) -> Floats:
        """Return the fragmentation after the pod took each GPU; the value is invalid for GPUs that do not fit."""
        free = self.free[rows]
        single, several = self._measure.weights(self.cpu[rows] - kind.cpu_milli, self.model[rows])
        now = self._measure.useful_of_gpus(free, single)
        then = self._measure.useful_of_gpus(free - kind.milli, single)
        is_whole = free == WHOLE_GPU_MILLI
        whole = self._measure.useful_whole(is_whole.sum(axis=1)[:, None] - is_whole, several)
        left: Floats = (self._gpu_free(rows) - kind.milli - now.sum(axis=1))[:, None] + now - then - whole
        return left


def _score_of(gain: Floats) -> Floats:
    score: Floats = np.floor(MAX_SCORE / (1 + np.exp(-gain / WHOLE_GPU_MILLI)))
    return score


def _whole(part: Floats) -> Floats:
    """Convert a part of 1 to a whole number from 0 to 100."""
    score: Floats = np.floor(MAX_SCORE * part)
    return score


BASELINES: Final[Mapping[str, str]] = {
    "random": "01-Random",
    "dotprod": "02-DotProd",
    "gpuclustering": "03-GpuClustering",
    "gpupacking": "04-GpuPacking",
    "bestfit": "05-BestFit",
    "fgd": "06-FGD",
    "fgd100": "",
    "hami-binpack": "",
    "kai-binpack": "",
    "kube-least-allocated": "",
    "kube-most-allocated": "",
}
"""The policies, with their names in the published results; empty for those that are not among them."""


_BY_NODES: Final[Mapping[str, Callable[[Sequence[TraceNode]], ArrayEngine]]] = {
    "dotprod": DotProd,
    "gpuclustering": GpuClustering,
    "gpupacking": GpuPacking,
    "bestfit": BestFit,
    "hami-binpack": HamiBinpack,
    "kai-binpack": KaiBinpack,
    "kube-least-allocated": KubeLeastAllocated,
    "kube-most-allocated": KubeMostAllocated,
}
"""The policies that know nothing but the nodes."""


def make(policy: str, nodes: Sequence[TraceNode], pods: Sequence[TracePod], seed: int) -> ArrayEngine:
    """Create the engine of a policy of BASELINES. Args: pods: the trace, from which FGD takes its classes."""
    if policy in _BY_NODES:
        return _BY_NODES[policy](nodes)
    if policy == "random":
        return RandomChoice(nodes, seed)
    if policy in ("fgd", "fgd100"):
        return Fgd(nodes, pods, 0.95 if policy == "fgd" else 1.0)
    raise ValueError(f"expected one of {', '.join(BASELINES)}, found {policy!r}")
