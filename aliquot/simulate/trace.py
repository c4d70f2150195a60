"""Traces in the format of openb (Alibaba GPU trace v2023): a list of nodes, lists of pods, and the order in which pods arrive.

nodes  ``sn,cpu_milli,memory_mib,gpu,model``
pods   ``name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time]``

``gpu_milli`` is per GPU, in thousandths of one; pods of several GPUs have all of each. ``gpu_spec`` are the models a pod accepts, divided
by ``|``; empty: any. Times are in seconds.
"""

import csv
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

WHOLE_GPU_MILLI: Final = 1000
PERCENT_MILLI: Final = 10
"""A hundredth of a GPU, the least that compute is reserved by."""
CORES_PER_MEMORY_PERCENT: Final = (50, 100, 200)
NODE_LIST: Final = "openb_node_list_gpu_node.csv"
POD_LIST_PREFIX: Final = "openb_pod_list_"


class TraceError(Exception):
    """A trace that is not there or not in its format. The message says what was expected and what was found."""


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
    """All that placement needs to know of a pod."""

    cpu_milli: int
    ram_mib: int
    gpus: int
    milli: int
    """Per GPU; 0 without GPUs."""
    models: frozenset[str]
    """Those it accepts; empty: any."""
    cores_milli: int | None = None
    """Compute per GPU, where it is not as much as ``milli``, which then is memory alone."""

    @property
    def demand_milli(self) -> int:
        """What it asks of GPUs in all: the mean of memory and compute where these differ."""
        return (self.memory_milli + self.compute_milli) // 2

    @property
    def memory_milli(self) -> int:
        """What it asks of the GPUs' memory in all."""
        return self.gpus * self.milli

    @property
    def compute_milli(self) -> int:
        """What it asks of the GPUs' compute in all."""
        return self.gpus * (self.milli if self.cores_milli is None else self.cores_milli)

    def in_one_dimension(self) -> "PodClass":
        """Return what a scheduler sees that knows parts of GPUs only: the larger of memory and compute."""
        return self if self.cores_milli is None else replace(self, milli=max(self.milli, self.cores_milli), cores_milli=None)


@dataclass(frozen=True, slots=True)
class TracePod:
    """A pod of a trace."""

    name: str
    kind: PodClass
    created_seconds: float = 0.0
    deleted_seconds: float = 0.0


def read_nodes(file: Path) -> list[TraceNode]:
    """Read the nodes, in the order of their names. Raises TraceError."""
    nodes = [
        TraceNode(row["sn"], _number(row, "cpu_milli", file), _number(row, "memory_mib", file), _number(row, "gpu", file), row["model"])
        for row in _rows(file, ("sn", "cpu_milli", "memory_mib", "gpu", "model"))
    ]
    return sorted(nodes, key=lambda node: node.name)


def read_pods(file: Path) -> list[TracePod]:
    """Read the pods, in the order of the file. Raises TraceError."""
    return [_pod(row, file) for row in _rows(file, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"))]


def pod_lists(directory: Path) -> Mapping[str, Path]:
    """Find the pod lists of a directory by their short names: ``openb_pod_list_default.csv`` is ``default``."""
    return {file.stem.removeprefix(POD_LIST_PREFIX): file for file in sorted(directory.glob(f"{POD_LIST_PREFIX}*.csv"))}


def capacity_milli(nodes: Sequence[TraceNode]) -> int:
    """Add up the GPUs, in thousandths of one."""
    return sum(node.gpus for node in nodes) * WHOLE_GPU_MILLI


def arrivals(pods: Sequence[TracePod], seed: int, limit_milli: int) -> list[TracePod]:
    """Draw the order in which pods arrive, as the evaluation of FGD (USENIX ATC'23) does.

    All pods in random order, then pods drawn with replacement, until the next would ask for more than the limit in all; of a trace that
    asks for more by itself, pods are removed at random. The seed alone decides; names stay distinct.
    """
    rng = random.Random(seed)  # noqa: S311 (draws lots, keeps no secret)
    order = rng.sample(pods, len(pods))
    asked = sum(pod.kind.demand_milli for pod in order)
    while asked > limit_milli:
        asked -= order.pop(rng.randrange(len(order))).kind.demand_milli
    while True:
        pod = rng.choice(pods)
        asked += pod.kind.demand_milli
        if asked > limit_milli:
            return order
        order.append(replace(pod, name=f"{pod.name}-again-{len(order)}"))


def with_own_cores(pods: Sequence[TracePod], seed: int) -> list[TracePod]:
    """Give pods of a part of a GPU compute of their own, which openb does not tell: half, as much as, or twice their memory's part."""
    rng = random.Random(seed)  # noqa: S311 (draws lots, keeps no secret)
    changed = []
    for pod in pods:
        percent = pod.kind.milli * rng.choice(CORES_PER_MEMORY_PERCENT) // (PERCENT_MILLI * 100)
        cores_milli = min(WHOLE_GPU_MILLI, max(1, percent) * PERCENT_MILLI)
        shared = 0 < pod.kind.milli < WHOLE_GPU_MILLI
        changed.append(replace(pod, kind=replace(pod.kind, cores_milli=cores_milli)) if shared else pod)
    return changed


def _pod(row: Mapping[str, str], file: Path) -> TracePod:
    gpus = _number(row, "num_gpu", file)
    milli = WHOLE_GPU_MILLI if gpus > 1 else 0
    if gpus == 1:
        milli = _number(row, "gpu_milli", file)
        if not 0 < milli <= WHOLE_GPU_MILLI or milli % PERCENT_MILLI:
            raise TraceError(f"{file}: expected gpu_milli to be a multiple of {PERCENT_MILLI} up to {WHOLE_GPU_MILLI}, found {milli}")
    models = frozenset(model for model in (row.get("gpu_spec") or "").split("|") if model)
    kind = PodClass(_number(row, "cpu_milli", file), _number(row, "memory_mib", file), gpus, milli, models)
    return TracePod(row["name"], kind, float(row.get("creation_time") or 0), float(row.get("deletion_time") or 0))


def _rows(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{file}: expected the columns {', '.join(columns)}, found none called {', '.join(missing)}")
            return list(reader)
    except OSError as exc:
        raise TraceError(f"{file}: expected a list of a trace, {exc.strerror or exc}") from exc


def _number(row: Mapping[str, str], column: str, file: Path) -> int:
    try:
        number = int(row[column])
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise TraceError(f"{file}: expected a whole number of at least 0 in {column}, found {row[column]!r}")
    return number
