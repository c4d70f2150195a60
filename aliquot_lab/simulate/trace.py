# SPDX-License-Identifier: Apache-2.0
"""Reads traces in the format of openb (Alibaba GPU trace v2023): a list of nodes and lists of pods. Draws the order of arrival.

nodes  ``sn,cpu_milli,memory_mib,gpu,model``
pods   ``name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time]``

``gpu_milli`` is per GPU, in thousandths of one; pods with several GPUs have whole ones. ``gpu_spec`` has the models that a pod accepts,
separated by ``|``; empty: any. Times are in seconds.
"""

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Final

WHOLE_GPU_MILLI: Final = 1000
PERCENT_MILLI: Final = 10
"""A hundredth of a GPU, the smallest amount of compute."""
CORES_PER_MEMORY_PERCENT: Final = (50, 100, 200)
_LINE: Final = " line"
"""Under this name each row has its line number; no column has a name that begins with a space."""
NODE_LIST: Final = "openb_node_list_gpu_node.csv"
POD_LIST_PREFIX: Final = "openb_pod_list_"


NODES_WITHOUT_GPUS: Final = 310
NODE_WITHOUT_GPUS: Final = (96_000, 384 * 1024, 0, "")
"""CPU in milli, RAM in MiB, GPUs and model."""


class TraceError(Exception):
    """A missing or invalid trace. The message says what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A node of a trace."""

    name: str
    cpu_milli: int
    ram_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class PodClass:
    """What placement needs of a pod."""

    cpu_milli: int
    ram_mib: int
    gpus: int
    milli: int
    """Per GPU; 0 without GPUs."""
    models: frozenset[str]
    """Accepted models; empty: any."""
    cores_milli: int | None = None
    """Compute per GPU, if it differs from ``milli``, which is then memory only."""

    @property
    def demand_milli(self) -> int:
        """Return the requested GPU thousandths: the mean of memory and compute where these differ."""
        return (self.memory_milli + self.compute_milli) // 2

    @property
    def memory_milli(self) -> int:
        """Return the requested thousandths of GPU memory."""
        return self.gpus * self.milli

    @property
    def compute_milli(self) -> int:
        """Return the requested thousandths of GPU compute."""
        return self.gpus * (self.milli if self.cores_milli is None else self.cores_milli)

    @property
    def size(self) -> str:
        """Return the class by which waits and refusals are counted: ``share``, or the number of whole GPUs."""
        return "share" if 0 < self.milli < WHOLE_GPU_MILLI else str(self.gpus)

    def in_one_dimension(self) -> "PodClass":
        """Return the class for a scheduler that knows parts of GPUs only: the larger of memory and compute."""
        return self if self.cores_milli is None else replace(self, milli=max(self.milli, self.cores_milli), cores_milli=None)


@dataclass(frozen=True, slots=True)
class TracePod:
    """A pod of a trace."""

    name: str
    kind: PodClass
    created_seconds: float = 0.0
    deleted_seconds: float = 0.0


_Trace = tuple[list[TraceNode], list[TracePod]]


def read_nodes(file: Path) -> list[TraceNode]:
    """Read the nodes, sorted by name. Raises TraceError."""
    nodes = [
        TraceNode(row["sn"], _number(row, "cpu_milli", file), _number(row, "memory_mib", file), _number(row, "gpu", file), row["model"])
        for row in _rows(file, ("sn", "cpu_milli", "memory_mib", "gpu", "model"))
    ]
    return sorted(nodes, key=lambda node: node.name)


def read_pods(file: Path) -> list[TracePod]:
    """Read the pods, in the order of the file. Raises TraceError."""
    return [_pod(row, file) for row in _rows(file, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"))]


def pod_lists(directory: Path) -> Mapping[str, Path]:
    """Return the pod lists of a directory by short name: ``openb_pod_list_default.csv`` is ``default``."""
    return {file.stem.removeprefix(POD_LIST_PREFIX): file for file in sorted(directory.glob(f"{POD_LIST_PREFIX}*.csv"))}


def capacity_milli(nodes: Sequence[TraceNode]) -> int:
    """Return the GPUs of all nodes, in thousandths of one."""
    return sum(node.gpus for node in nodes) * WHOLE_GPU_MILLI


def arrivals(pods: Sequence[TracePod], seed: int, limit_milli: int) -> list[TracePod]:
    """Draw the order in which pods arrive, as the evaluation of FGD (USENIX ATC'23) does.

    First all pods in random order, then pods drawn with replacement, until the next one would exceed the limit of the total demand. If the
    trace alone exceeds it, pods are removed at random. The result depends on the seed only; names stay distinct.
    """
    rng = random.Random(seed)  # noqa: S311 (random numbers of a simulation, not a secret)
    order = rng.sample(pods, len(pods))
    demand = sum(pod.kind.demand_milli for pod in order)
    while demand > limit_milli:
        demand -= order.pop(rng.randrange(len(order))).kind.demand_milli
    while True:
        pod = rng.choice(pods)
        demand += pod.kind.demand_milli
        if demand > limit_milli:
            return order
        order.append(replace(pod, name=f"{pod.name}-again-{len(order)}"))


def with_own_cores(pods: Sequence[TracePod], seed: int) -> list[TracePod]:
    """Draw compute for pods with a part of a GPU, which openb does not have: half, equal to, or twice their part of memory."""
    rng = random.Random(seed)  # noqa: S311 (random numbers of a simulation, not a secret)
    changed = []
    for pod in pods:
        percent = pod.kind.milli * rng.choice(CORES_PER_MEMORY_PERCENT) // (PERCENT_MILLI * 100)
        cores_milli = min(WHOLE_GPU_MILLI, max(1, percent) * PERCENT_MILLI)
        shared = 0 < pod.kind.milli < WHOLE_GPU_MILLI
        changed.append(replace(pod, kind=replace(pod.kind, cores_milli=cores_milli)) if shared else pod)
    return changed


def _with_much_memory(nodes: list[TraceNode], pods: list[TracePod], _: int) -> _Trace:
    def less(kind: PodClass) -> PodClass:
        return replace(kind, cores_milli=max(PERCENT_MILLI, kind.milli // 4 // PERCENT_MILLI * PERCENT_MILLI))

    return nodes, [replace(pod, kind=less(pod.kind)) if pod.kind.size == "share" else pod for pod in pods]


def _with_much_cpu(nodes: list[TraceNode], pods: list[TracePod], _: int) -> _Trace:
    def more(kind: PodClass) -> PodClass:
        return replace(kind, cpu_milli=kind.cpu_milli * 8 // 5)

    return nodes, [replace(pod, kind=more(pod.kind)) if pod.kind.gpus else pod for pod in pods]


def _with_nodes_without_gpus(nodes: list[TraceNode], pods: list[TracePod], _: int) -> _Trace:
    return [*nodes, *(TraceNode(f"without-gpus-{number:03}", *NODE_WITHOUT_GPUS) for number in range(NODES_WITHOUT_GPUS))], pods


MIXES: Final[Mapping[str, Callable[[list[TraceNode], list[TracePod], int], _Trace]]] = {
    "own-compute": lambda nodes, pods, seed: (nodes, with_own_cores(pods, seed)),
    "much-memory": _with_much_memory,
    "much-cpu": _with_much_cpu,
    "nodes-without-gpus": _with_nodes_without_gpus,
}
"""Changes of a trace, from its nodes, its pods and a seed: compute that differs from memory; a quarter of the memory's part as compute
(both for pods with a part of a GPU); 1.6 times the CPU for pods with GPUs; additional nodes without GPUs."""


def _pod(row: Mapping[str, str], file: Path) -> TracePod:
    gpus = _number(row, "num_gpu", file)
    milli = WHOLE_GPU_MILLI if gpus > 1 else 0
    if gpus == 1:
        milli = _number(row, "gpu_milli", file)
        if not 0 < milli <= WHOLE_GPU_MILLI or milli % PERCENT_MILLI:
            raise _error(row, "gpu_milli", file, f"a multiple of {PERCENT_MILLI} up to {WHOLE_GPU_MILLI}")
    models = frozenset(model for model in (row.get("gpu_spec") or "").split("|") if model)
    kind = PodClass(_number(row, "cpu_milli", file), _number(row, "memory_mib", file), gpus, milli, models)
    return TracePod(row["name"], kind, _seconds(row, "creation_time", file), _seconds(row, "deletion_time", file))


def _rows(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{file}: expected the columns {', '.join(columns)}; missing: {', '.join(missing)}")
            return [{**row, _LINE: str(reader.line_num)} for row in reader]
    except OSError as exc:
        raise TraceError(f"{file}: expected a list of a trace: {exc.strerror or exc}") from exc


def _number(row: Mapping[str, str], column: str, file: Path) -> int:
    try:
        number = int(row[column])
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise _error(row, column, file, "a whole number of at least 0")
    return number


def _seconds(row: Mapping[str, str], column: str, file: Path) -> float:
    """Return a time; 0 for an empty cell or without the column."""
    try:
        seconds = float(row.get(column) or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        raise _error(row, column, file, "seconds of at least 0")
    return seconds


def _error(row: Mapping[str, str], column: str, file: Path, expected: str) -> TraceError:
    return TraceError(f"{file}, line {row[_LINE]}, column {column}: expected {expected}, found {row[column]!r}")
