# SPDX-License-Identifier: Apache-2.0
"""Reads the lists of a simulation: nodes, pods and queues. docs/use/simulate.md describes the columns. openb's lists are understood too.

A list of nodes with a column ``sn``, or of pods with a column ``num_gpu``, is openb's (``aliquot_lab.simulate.trace`` has its columns). Its
GPUs count as 1,000 MiB each, because it has parts of GPUs and no memory; a pod with a part of a GPU reserves as much compute.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from aliquot.contract import units
from aliquot_lab.simulate.timeline.mig_layout import LayoutError, check_layout, check_profile
from aliquot_lab.simulate.timeline.model import DEFAULT_SHARES_PER_GPU, WHOLE_MILLI, PodKind, Queue, SimNode, SimPod
from aliquot_lab.simulate.timeline.table import Row, Table, read_table
from aliquot_lab.simulate.trace import PERCENT_MILLI, TraceError, read_nodes, read_pods

NODE_COLUMNS: Final = ("name", "count", "cpu", "ram_mib", "gpus", "gpu_memory_mib", "model", "mig", "shares_per_gpu")
POD_COLUMNS: Final = (
    *("name", "count", "arrival_seconds", "duration_seconds", "cpu", "ram_mib", "gpus", "gpu_memory_mib", "gpu_share_percent"),
    *("cores_percent", "models", "mig", "priority", "queue", "gang", "gang_size"),
)
QUEUE_COLUMNS: Final = ("name", "gpus", "borrow_gpus", "reclaim")
_AMOUNTS: Final = ("gpu_memory_mib", "gpu_share_percent", "cores_percent")
MAX_GPUS: Final = 64
MAX_ROWS: Final = 1_000_000
OPENB_SHARES_PER_GPU: Final = 100
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,200}[a-z0-9])?", re.ASCII)
_MIN_PRIORITY, _MAX_PRIORITY = -(2**31), 2**31 - 1


def load_nodes(file: Path) -> list[SimNode]:
    """Read the nodes, sorted by name. Raises TraceError."""
    table = read_table(file)
    if "sn" in table.columns:
        openb = read_nodes(file)
        nodes = [SimNode(n.name, n.cpu_milli, n.ram_mib, n.gpus, WHOLE_MILLI, n.model, (), OPENB_SHARES_PER_GPU) for n in openb]
    else:
        table.expect(("name", "cpu", "ram_mib", "gpus"), NODE_COLUMNS)
        nodes = [node for row in table.rows for node in _copies(_node(row), row)]
    if not any(node.gpus for node in nodes):
        raise TraceError(f"{file}: expected a node with GPUs, found {len(nodes)} nodes without")
    _expect_once(file, [node.name for node in nodes])
    return sorted(nodes, key=lambda node: node.name)


def load_pods(file: Path, nodes: Sequence[SimNode]) -> list[SimPod]:
    """Read the pods, in the order of the file. Args: nodes: a pod with all memory of the largest GPU has no share. Raises TraceError."""
    table = read_table(file)
    if "num_gpu" in table.columns:
        pods = _openb_pods(file)
    else:
        table.expect(("name",), POD_COLUMNS)
        pods = _pods(table, nodes)
    if not pods:
        raise TraceError(f"{file}: expected at least one pod, found no row")
    _expect_once(file, [pod.name for pod in pods])
    return pods


def load_queues(file: Path) -> list[Queue]:
    """Read the queues. Raises TraceError."""
    table = read_table(file)
    table.expect(("name", "gpus"), QUEUE_COLUMNS)
    queues = [
        Queue(
            row.required("name"),
            round(row.number("gpus") * WHOLE_MILLI),
            None if (more := row.number_or_none("borrow_gpus")) is None else round(more * WHOLE_MILLI),
            row.choice("reclaim", ("no", "yes")) == "yes",
        )
        for row in table.rows
    ]
    _expect_once(file, [queue.name for queue in queues])
    return queues


def _node(row: Row) -> SimNode:
    gpus = row.whole("gpus", most=MAX_GPUS)
    memory = row.whole("gpu_memory_mib", None if gpus else 0, least=1 if gpus else 0)
    layout = tuple(part.strip() for part in row.text("mig").split("+")) if row.text("mig") else ()
    if layout:
        try:
            check_layout(layout, memory)
        except LayoutError as exc:
            expected, _, found = str(exc).partition(", found ")
            raise row.error("mig", expected, found) from exc
    shares = row.whole("shares_per_gpu", DEFAULT_SHARES_PER_GPU, least=1, most=1000)
    return SimNode(_name(row), _cpu(row), row.whole("ram_mib"), gpus, memory, row.text("model"), layout, shares)


def _copies(node: SimNode, row: Row) -> list[SimNode]:
    count = row.whole("count", 1, least=1, most=MAX_ROWS)
    return [node] if count == 1 else [replace(node, name=f"{node.name}-{number}") for number in range(count)]


def _pods(table: Table, nodes: Sequence[SimNode]) -> list[SimPod]:
    pods: list[SimPod] = []
    gangs: dict[str, list[tuple[Row, SimPod, int]]] = {}
    for row in table.rows:
        pod, count = _pod(row, nodes), row.whole("count", 1, least=1, most=MAX_ROWS)
        if len(pods) + count > MAX_ROWS:
            raise row.error("count", f"at most {MAX_ROWS} pods in all")
        pods += [pod] if count == 1 else [replace(pod, name=f"{pod.name}-{number}") for number in range(count)]
        if pod.gang:
            gangs.setdefault(pod.gang, []).append((row, pod, count))
        elif row.text("gang_size"):
            raise row.error("gang", "the name of the gang that gang_size belongs to")
    for rows in gangs.values():
        _check_gang(rows)
    return pods


def _check_gang(rows: Sequence[tuple[Row, SimPod, int]]) -> None:
    """Check the rows of one gang. Args: rows: each with its pod and count."""
    total, first = sum(count for _, _, count in rows), rows[0][1]
    for row, pod, _ in rows:
        _check_member(row, pod, first)
        if row.whole_or_none("gang_size", least=1) not in (None, total):
            raise row.error("gang_size", f"the number of pods of gang {pod.gang}, which is {total}")


def _pod(row: Row, nodes: Sequence[SimNode]) -> SimPod:
    pod = SimPod(
        _name(row),
        _kind(row, nodes),
        row.number("arrival_seconds", 0.0),
        row.number_or_none("duration_seconds"),
        row.whole("priority", 0, least=_MIN_PRIORITY, most=_MAX_PRIORITY),
        row.text("queue"),
        row.text("gang"),
    )
    if pod.gang and not _NAME.fullmatch(pod.gang):
        raise row.error("gang", "lower-case letters, digits, - and .")
    return pod


def _check_member(row: Row, pod: SimPod, first: SimPod) -> None:
    """Check that a pod can be in a gang with another one."""
    if not pod.kind.has_gpu:
        raise row.error("gang", "members that request a GPU")
    for column, found, expected in (("priority", pod.priority, first.priority), ("queue", pod.queue, first.queue)):
        if found != expected:
            raise row.error(column, f"{expected!r} as for {first.name} of the same gang")


def _kind(row: Row, nodes: Sequence[SimNode]) -> PodKind:
    cpu, ram = _cpu(row), row.whole("ram_mib", 0)
    models = frozenset(model.strip() for model in row.text("models").split("|") if model.strip())
    if row.text("mig"):
        _expect_empty(row, ("gpus", *_AMOUNTS), "the pod requests a MIG instance")
        return PodKind(cpu, ram, models=models, mig=_profile(row))
    gpus = row.whole("gpus", 0, most=MAX_GPUS)
    if not gpus:
        _expect_empty(row, _AMOUNTS, "gpus is 0")
        return PodKind(cpu, ram)
    if row.text("gpu_memory_mib"):
        _expect_empty(row, ("gpu_share_percent",), "gpu_memory_mib is set")
    percent = row.whole_or_none("gpu_share_percent", least=1, most=units.WHOLE_GPU_PERCENT)
    kind = PodKind(
        *(cpu, ram, gpus),
        row.whole_or_none("gpu_memory_mib", least=1),
        None if percent == units.WHOLE_GPU_PERCENT else percent,
        row.whole_or_none("cores_percent", least=1, most=units.WHOLE_GPU_PERCENT),
        models,
    )
    return replace(kind, shared=_is_share(kind, max(node.gpu_memory_mib for node in nodes)))


def _is_share(kind: PodKind, largest_mib: int) -> bool:
    """Whether a request leaves a part of the largest GPU to others."""
    if kind.memory_mib is None:
        return kind.memory_percent is not None
    return kind.memory_mib < largest_mib or (kind.cores_percent is not None and kind.cores_percent < units.WHOLE_GPU_PERCENT)


def _profile(row: Row) -> str:
    try:
        return check_profile(row.text("mig"))
    except LayoutError as exc:
        raise row.error("mig", "a MIG profile such as 1g.10gb") from exc


def _expect_empty(row: Row, columns: Sequence[str], because: str) -> None:
    for column in columns:
        if row.text(column) not in ("", "0"):
            raise row.error(column, f"an empty cell, because {because}")


def _openb_pods(file: Path) -> list[SimPod]:
    pods = []
    for pod in read_pods(file):
        of = pod.kind
        shared = 0 < of.milli < WHOLE_MILLI
        memory, cores = (of.milli, of.milli // PERCENT_MILLI) if of.gpus else (None, None)
        kind = PodKind(of.cpu_milli, of.ram_mib, of.gpus, memory, None, cores, of.models, shared=shared)
        lasts = pod.deleted_seconds - pod.created_seconds if pod.deleted_seconds else None
        pods.append(SimPod(pod.name, kind, pod.created_seconds, lasts))
    return pods


def _name(row: Row) -> str:
    name = row.required("name")
    if not _NAME.fullmatch(name):
        raise row.error("name", "lower-case letters, digits, - and ., as Kubernetes requires")
    return name


def _cpu(row: Row) -> int:
    """Return thousandths of a core; the column has cores."""
    return round(row.number("cpu", 0.0) * 1000)


def _expect_once(file: Path, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise TraceError(f"{file}, column name: expected each name once, also with the numbers that count adds, found {name} twice")
        seen.add(name)
