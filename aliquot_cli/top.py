# SPDX-License-Identifier: Apache-2.0
"""``aliquot top``: how much of each GPU each container uses, once or repeatedly."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import click

from aliquot_cli.access import Cluster, Target, connect
from aliquot_cli.model import Gpu, Node, Share, lacks_rates, with_rates
from aliquot_cli.options import cluster_options, namespace_options, node_option, output_option
from aliquot_cli.output import UNKNOWN, Cell, Column, Output, document, heat, memory, number, percent, table
from aliquot_cli.source import nodes

CLEAR = "\x1b[H\x1b[2J"
RATE_SECONDS = 1.0
"""Time between the two samples that give a rate."""
KINDS = ("shares", "gpus", "nodes")

T = TypeVar("T")
Order = Callable[[T], float | str | None]
"""What rows are sorted by."""


@dataclass(frozen=True, slots=True)
class Query:
    """What to show."""

    kind: str
    node_names: tuple[str, ...]
    namespace: str | None
    text: str
    """Only rows that contain it, in any case."""
    sort: str | None
    output: Output


@click.command(name="top")
@click.argument("kind", type=click.Choice(KINDS), default="shares")
@node_option
@namespace_options
@click.option("--filter", "text", metavar="TEXT", default="", help="Only rows that contain this text.")
@click.option(
    "--sort",
    type=click.Choice(["name", "used", "limit", "utilisation", "throttled"]),
    help="Sort by this column: largest first, names from A to Z.  [default: by node, GPU and pod]",
)
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--seconds", type=click.FloatRange(min=0.5), default=5.0, show_default=True, help="Time between two samples with --watch.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many samples with --watch.")
@output_option
@cluster_options
def command(
    *,
    kind: str,
    node_names: tuple[str, ...],
    namespace: str | None,
    text: str,
    sort: str | None,
    watch: bool,
    seconds: float,
    count: int | None,
    output: Output,
    target: Target,
) -> None:
    """Show shares, gpus or nodes, and how much of them is used.

    A share is one container's part of one GPU. USED is the memory that its processes hold, LIMIT what they may hold. UTIL is the part of
    the GPU's time that it used recently. THROTTLED is how long its launches have waited for compute; with --watch, the part of the time
    they wait. A pod with aliquot.dev/paused shows "paused" there.
    """
    query = Query(kind, node_names, namespace, text, sort, output)
    cluster = connect(target)
    with suppress(KeyboardInterrupt):  # Ctrl-C ends --watch
        for page in pages(cluster, query, seconds, (count or -1) if watch else 1):
            click.echo((CLEAR if watch and sys.stdout.isatty() else "") + page)


def pages(cluster: Cluster, query: Query, seconds: float, count: int) -> Iterator[str]:
    """Yield one page of text for each sample.

    Agents report no rate when nothing else scrapes them. The first page then needs two samples, RATE_SECONDS apart.

    Args: seconds: time between two samples. count: number of pages; below zero: without end.
    """
    sampled_at, before = time.monotonic(), nodes(cluster, query.node_names)
    if lacks_rates(before):
        time.sleep(RATE_SECONDS)
        now, found = time.monotonic(), nodes(cluster, query.node_names)
        yield render(with_rates(found, before, now - sampled_at), query)
        sampled_at, before = now, found
    else:
        yield render(before, query)
    while count := count - 1:
        time.sleep(max(0.0, seconds - (time.monotonic() - sampled_at)))
        now, found = time.monotonic(), nodes(cluster, query.node_names)
        yield render(with_rates(found, before, now - sampled_at), query)
        sampled_at, before = now, found


def render(found: Sequence[Node], query: Query) -> str:
    """Return one sample as text: the table or document, then a line for each node without an answer."""
    chosen = [_in_namespace(node, query.namespace) for node in found] if query.namespace else list(found)
    if query.output.for_programs:
        return document({"nodes": [asdict(node) for node in chosen]}, query.output)
    return "\n".join([*_table(chosen, query), *(f"{node.name}: {node.trouble}" for node in chosen if node.trouble)])


def _table(found: Sequence[Node], query: Query) -> list[str]:
    if query.kind == "nodes":
        return _lines(NODE_COLUMNS, found, _NODE_ORDERS, query)
    if query.kind == "gpus":
        return _lines(GPU_COLUMNS, [gpu for node in found for gpu in node.gpus], _GPU_ORDERS, query)
    return _lines(SHARE_COLUMNS, [Row(gpu, share) for node in found for gpu in node.gpus for share in gpu.shares], _SHARE_ORDERS, query)


def _in_namespace(node: Node, namespace: str) -> Node:
    def reduced(gpu: Gpu) -> Gpu:
        return replace(gpu, shares=tuple(share for share in gpu.shares if share.namespace == namespace))

    return replace(node, gpus=tuple(map(reduced, node.gpus)))


@dataclass(frozen=True, slots=True)
class Row:
    """A share and its GPU."""

    gpu: Gpu
    share: Share


def _lines(columns: Sequence[Column[T]], rows: Sequence[T], orders: Mapping[str, Order[T]], query: Query) -> list[str]:
    ordered = rows
    if query.sort is not None:
        order = orders[query.sort]
        ordered = sorted(rows, key=lambda row: _rank(order(row)))
    title, *lines = table(columns, ordered, query.output)
    return [title, *(line for line in lines if query.text.lower() in click.unstyle(line).lower())]


def _rank(value: float | str | None) -> tuple[bool, float, str]:
    """Return the sort key: texts from A to Z, numbers from the largest, unknown values last."""
    if isinstance(value, str):
        return False, 0.0, value
    return value is None, -(value or 0.0), ""


def _utilisation(ratio: float | None) -> Cell:
    return heat(ratio, percent(ratio))


def _used_of(used: float | None, total: float | None) -> Cell:
    ratio = used / total if used is not None and total else None
    return heat(ratio, f"{memory(used)}/{memory(total)}")


def _throttled(share: Share) -> Cell:
    if share.paused:
        return Cell("paused", "yellow")
    if share.throttled_ratio is not None:
        return Cell(percent(share.throttled_ratio), "yellow" if share.throttled_ratio >= 0.5 else None)
    return Cell(UNKNOWN if share.throttled_seconds is None else f"{share.throttled_seconds:.1f}s")


def _in_force(share: Share) -> Cell:
    if share.in_force is None:
        return Cell(UNKNOWN)
    return Cell("yes") if share.in_force else Cell("NO", "red")


def _state(gpu: Gpu) -> Cell:
    return Cell(gpu.state, {"healthy": "green", "unknown": None}.get(gpu.state, "red"))


def _total(value: str) -> Order[Node]:
    return lambda node: node.total(value)


def _mean_utilisation(node: Node) -> float | None:
    total = node.total("utilization_ratio")
    return None if total is None else total / len(node.gpus)


def _throttled_of(shares: Sequence[Share]) -> float | None:
    known = [share.throttled_seconds for share in shares if share.throttled_seconds is not None]
    return sum(known) if known else None


SHARE_COLUMNS: Sequence[Column[Row]] = (
    Column("NODE", lambda row: row.gpu.node),
    Column("GPU", lambda row: "?" if row.gpu.minor is None else str(row.gpu.minor)),
    Column("NAMESPACE", lambda row: row.share.namespace),
    Column("POD", lambda row: row.share.pod),
    Column("CONTAINER", lambda row: row.share.container),
    Column("USED/LIMIT", lambda row: heat(row.share.used_of_limit, f"{memory(row.share.used_bytes)}/{memory(row.share.limit_bytes)}")),
    Column("MEM%", lambda row: heat(row.share.used_of_limit, percent(row.share.used_of_limit))),
    Column("CORES", lambda row: percent(row.share.cores_limit_ratio)),
    Column("UTIL", lambda row: percent(row.share.utilization_ratio)),
    Column("THROTTLED", lambda row: _throttled(row.share)),
    Column("REFUSED", lambda row: number(row.share.refusals)),
    Column("BACKEND", lambda row: row.share.backend, wide=True),
    Column("ENFORCED", lambda row: _in_force(row.share), wide=True),
    Column("USED (DRIVER)", lambda row: memory(row.share.driver_bytes), wide=True),
    Column("DEVICE", lambda row: row.share.device_uuid, wide=True),
)
GPU_COLUMNS: Sequence[Column[Gpu]] = (
    Column("NODE", lambda gpu: gpu.node),
    Column("GPU", lambda gpu: "?" if gpu.minor is None else str(gpu.minor)),
    Column("MODEL", lambda gpu: gpu.model),
    Column("STATE", _state),
    Column("SHARES", lambda gpu: f"{number(gpu.shares_allocated)}/{number(gpu.shares_total)}"),
    Column("ALLOCATED/TOTAL", lambda gpu: _used_of(gpu.allocated_bytes, gpu.total_bytes)),
    Column("USED", lambda gpu: memory(gpu.used_bytes)),
    Column("CORES", lambda gpu: percent(gpu.cores_allocated_ratio)),
    Column("UTIL", lambda gpu: _utilisation(gpu.utilization_ratio)),
    Column("TEMP", lambda gpu: number(gpu.temperature_celsius, "C"), wide=True),
    Column("POWER", lambda gpu: UNKNOWN if gpu.power_watts is None else f"{gpu.power_watts:.0f}W", wide=True),
    Column("UUID", lambda gpu: gpu.uuid, wide=True),
)
NODE_COLUMNS: Sequence[Column[Node]] = (
    Column("NODE", lambda node: node.name),
    Column("GPUS", lambda node: str(len(node.gpus))),
    Column("HEALTHY", lambda node: _healthy(node)),
    Column("SHARES", lambda node: f"{number(node.total('shares_allocated'))}/{number(node.total('shares_total'))}"),
    Column("ALLOCATED/TOTAL", lambda node: _used_of(node.total("allocated_bytes"), node.total("total_bytes"))),
    Column("USED", lambda node: memory(node.total("used_bytes"))),
    Column("UTIL", lambda node: _utilisation(_mean_utilisation(node))),
    Column("THROTTLED", lambda node: number(_rounded(_throttled_of(node.shares)), "s")),
    Column("DRIVER", lambda node: node.driver_version or UNKNOWN, wide=True),
    Column("AGENT", lambda node: node.agent_version or UNKNOWN, wide=True),
    Column("CORDONED", lambda node: "yes" if node.cordoned else "no", wide=True),
)


def _healthy(node: Node) -> Cell:
    healthy = sum(bool(gpu.healthy) for gpu in node.gpus)
    return Cell(f"{healthy}/{len(node.gpus)}", None if healthy == len(node.gpus) else "red")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


_SHARE_ORDERS: Mapping[str, Order[Row]] = {
    "name": lambda row: f"{row.share.namespace}/{row.share.pod}/{row.share.container}",
    "used": lambda row: row.share.used_bytes,
    "limit": lambda row: row.share.limit_bytes,
    "utilisation": lambda row: row.share.utilization_ratio,
    "throttled": lambda row: row.share.throttled_seconds if row.share.throttled_ratio is None else row.share.throttled_ratio,
}
_GPU_ORDERS: Mapping[str, Order[Gpu]] = {
    "name": lambda gpu: gpu.name,
    "used": lambda gpu: gpu.used_bytes,
    "limit": lambda gpu: gpu.allocated_bytes,
    "utilisation": lambda gpu: gpu.utilization_ratio,
    "throttled": lambda gpu: _throttled_of(gpu.shares),
}
_NODE_ORDERS: Mapping[str, Order[Node]] = {
    "name": lambda node: node.name,
    "used": _total("used_bytes"),
    "limit": _total("allocated_bytes"),
    "utilisation": _mean_utilisation,
    "throttled": lambda node: _throttled_of(node.shares),
}
