"""``aliquot top``: who uses how much of which GPU, now or again and again."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import click

from aliquot.cli.access import Cluster, Target, connect
from aliquot.cli.model import Gpu, Node, Slice, lacks_rates, since
from aliquot.cli.options import cluster_options, namespace_options, node_option, output_option
from aliquot.cli.output import UNKNOWN, Cell, Column, Output, document, heat, memory, number, percent, table
from aliquot.cli.source import nodes

CLEAR = "\x1b[H\x1b[2J"
RATE_SECONDS = 1.0
"""Between the two looks that show a rate."""
KINDS = ("slices", "gpus", "nodes")

T = TypeVar("T")
Order = Callable[[T], float | str | None]
"""What rows are ordered by."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be shown."""

    kind: str
    node_names: tuple[str, ...]
    namespace: str | None
    words: str
    sort: str | None
    output: Output


@click.command(name="top")
@click.argument("kind", type=click.Choice(KINDS), default="slices")
@node_option
@namespace_options
@click.option("--filter", "words", metavar="TEXT", default="", help="Only rows in which this text occurs.")
@click.option(
    "--sort",
    type=click.Choice(["name", "used", "limit", "utilisation", "throttled"]),
    help="Largest first, names in their order.  [default: by node, GPU and pod]",
)
@click.option("--watch", is_flag=True, help="Show again and again until Ctrl-C.")
@click.option("--seconds", type=click.FloatRange(min=0.5), default=5.0, show_default=True, help="Between two looks with --watch.")
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks with --watch.")
@output_option
@cluster_options
def command(
    *,
    kind: str,
    node_names: tuple[str, ...],
    namespace: str | None,
    words: str,
    sort: str | None,
    watch: bool,
    seconds: float,
    count: int | None,
    output: Output,
    target: Target,
) -> None:
    """Show slices, gpus or nodes with what is used of them.

    A slice is one container's share of one GPU. USED is what its processes hold, against LIMIT; UTIL the share of the GPU's time it used
    lately; THROTTLED how long its work has waited for its share of compute so far, and with --watch which part of the time it waits; of a
    pod with aliquot.dev/paused it is "paused".
    """
    ask = Ask(kind, node_names, namespace, words, sort, output)
    cluster = connect(target)
    with suppress(KeyboardInterrupt):  # how a watch is ended
        for page in looks(cluster, ask, seconds, (count or -1) if watch else 1):
            click.echo((CLEAR if watch and sys.stdout.isatty() else "") + page)


def looks(cluster: Cluster, ask: Ask, seconds: float, count: int) -> Iterator[str]:
    """Look so many times (below zero: for ever), so many seconds apart; each look as text.

    Where nobody scrapes the agents, they have no earlier look to tell a rate by: then the first takes a second one.
    """
    looked_at, before = time.monotonic(), nodes(cluster, ask.node_names)
    if lacks_rates(before):
        time.sleep(RATE_SECONDS)
        now, found = time.monotonic(), nodes(cluster, ask.node_names)
        yield show(since(found, before, now - looked_at), ask)
        looked_at, before = now, found
    else:
        yield show(before, ask)
    while count := count - 1:
        time.sleep(max(0.0, seconds - (time.monotonic() - looked_at)))
        now, found = time.monotonic(), nodes(cluster, ask.node_names)
        yield show(since(found, before, now - looked_at), ask)
        looked_at, before = now, found


def show(found: Sequence[Node], ask: Ask) -> str:
    """Return one look as text."""
    chosen = [_in_namespace(node, ask.namespace) for node in found] if ask.namespace else list(found)
    if ask.output in (Output.JSON, Output.YAML):
        return document({"nodes": [asdict(node) for node in chosen]}, ask.output)
    if ask.kind == "nodes":
        lines = _lines(NODE_COLUMNS, chosen, _NODE_ORDERS, ask)
    elif ask.kind == "gpus":
        lines = _lines(GPU_COLUMNS, [gpu for node in chosen for gpu in node.gpus], _GPU_ORDERS, ask)
    else:
        lines = _lines(SLICE_COLUMNS, [Row(gpu, one) for node in chosen for gpu in node.gpus for one in gpu.slices], _SLICE_ORDERS, ask)
    return "\n".join(lines + [f"{node.name}: {node.trouble}" for node in chosen if node.trouble])


def _in_namespace(node: Node, namespace: str) -> Node:
    return replace(
        node, gpus=tuple(replace(gpu, slices=tuple(one for one in gpu.slices if one.namespace == namespace)) for gpu in node.gpus)
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A slice, and the GPU it is of."""

    gpu: Gpu
    one: Slice


def _lines(columns: Sequence[Column[T]], rows: Sequence[T], orders: Mapping[str, Order[T]], ask: Ask) -> list[str]:
    ordered = rows
    if ask.sort is not None:
        order = orders[ask.sort]
        ordered = sorted(rows, key=lambda row: _rank(order(row)))
    title, *lines = table(columns, ordered, ask.output)
    return [title, *(line for line in lines if ask.words.lower() in click.unstyle(line).lower())]


def _rank(value: float | str | None) -> tuple[bool, float, str]:
    """Order texts as they are and numbers from the largest, what is not known last."""
    if isinstance(value, str):
        return False, 0.0, value
    return value is None, -(value or 0.0), ""


def _utilisation(ratio: float | None) -> Cell:
    return heat(ratio, percent(ratio))


def _used_of(used: float | None, total: float | None) -> Cell:
    share = used / total if used is not None and total else None
    return heat(share, f"{memory(used)}/{memory(total)}")


def _throttled(one: Slice) -> Cell:
    if one.paused:
        return Cell("paused", "yellow")
    if one.throttled_ratio is not None:
        return Cell(percent(one.throttled_ratio), "yellow" if one.throttled_ratio >= 0.5 else None)
    return Cell(UNKNOWN if one.throttled_seconds is None else f"{one.throttled_seconds:.1f}s")


def _in_force(one: Slice) -> Cell:
    if one.in_force is None:
        return Cell(UNKNOWN)
    return Cell("yes") if one.in_force else Cell("NO", "red")


def _state(gpu: Gpu) -> Cell:
    return Cell(gpu.state, {"healthy": "green", "unknown": None}.get(gpu.state, "red"))


def _total(value: str) -> Order[Node]:
    return lambda node: node.total(value)


def _mean_utilisation(node: Node) -> float | None:
    total = node.total("utilization_ratio")
    return None if total is None else total / len(node.gpus)


def _throttled_of(slices: Sequence[Slice]) -> float | None:
    known = [one.throttled_seconds for one in slices if one.throttled_seconds is not None]
    return sum(known) if known else None


SLICE_COLUMNS: Sequence[Column[Row]] = (
    Column("NODE", lambda row: row.gpu.node),
    Column("GPU", lambda row: "?" if row.gpu.minor is None else str(row.gpu.minor)),
    Column("NAMESPACE", lambda row: row.one.namespace),
    Column("POD", lambda row: row.one.pod),
    Column("CONTAINER", lambda row: row.one.container),
    Column("USED/LIMIT", lambda row: heat(row.one.used_of_limit, f"{memory(row.one.used_bytes)}/{memory(row.one.limit_bytes)}")),
    Column("MEM%", lambda row: heat(row.one.used_of_limit, percent(row.one.used_of_limit))),
    Column("CORES", lambda row: percent(row.one.cores_limit_ratio)),
    Column("UTIL", lambda row: percent(row.one.utilization_ratio)),
    Column("THROTTLED", lambda row: _throttled(row.one)),
    Column("REFUSED", lambda row: number(row.one.refusals)),
    Column("BACKEND", lambda row: row.one.backend, wide=True),
    Column("IN FORCE", lambda row: _in_force(row.one), wide=True),
    Column("DRIVER SAYS", lambda row: memory(row.one.driver_bytes), wide=True),
    Column("DEVICE", lambda row: row.one.device_uuid, wide=True),
)
GPU_COLUMNS: Sequence[Column[Gpu]] = (
    Column("NODE", lambda gpu: gpu.node),
    Column("GPU", lambda gpu: "?" if gpu.minor is None else str(gpu.minor)),
    Column("MODEL", lambda gpu: gpu.model),
    Column("STATE", _state),
    Column("SLICES", lambda gpu: f"{number(gpu.shares_allocated)}/{number(gpu.shares)}"),
    Column("PROMISED/TOTAL", lambda gpu: _used_of(gpu.allocated_bytes, gpu.total_bytes)),
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
    Column("SLICES", lambda node: f"{number(node.total('shares_allocated'))}/{number(node.total('shares'))}"),
    Column("PROMISED/TOTAL", lambda node: _used_of(node.total("allocated_bytes"), node.total("total_bytes"))),
    Column("USED", lambda node: memory(node.total("used_bytes"))),
    Column("UTIL", lambda node: _utilisation(_mean_utilisation(node))),
    Column("THROTTLED", lambda node: number(_rounded(_throttled_of(node.slices)), "s")),
    Column("DRIVER", lambda node: node.driver_version or UNKNOWN, wide=True),
    Column("AGENT", lambda node: node.agent_version or UNKNOWN, wide=True),
    Column("CORDONED", lambda node: "yes" if node.cordoned else "no", wide=True),
)


def _healthy(node: Node) -> Cell:
    healthy = sum(bool(gpu.healthy) for gpu in node.gpus)
    return Cell(f"{healthy}/{len(node.gpus)}", None if healthy == len(node.gpus) else "red")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


_SLICE_ORDERS: Mapping[str, Order[Row]] = {
    "name": lambda row: f"{row.one.namespace}/{row.one.pod}/{row.one.container}",
    "used": lambda row: row.one.used_bytes,
    "limit": lambda row: row.one.limit_bytes,
    "utilisation": lambda row: row.one.utilization_ratio,
    "throttled": lambda row: row.one.throttled_seconds if row.one.throttled_ratio is None else row.one.throttled_ratio,
}
_GPU_ORDERS: Mapping[str, Order[Gpu]] = {
    "name": lambda gpu: gpu.name,
    "used": lambda gpu: gpu.used_bytes,
    "limit": lambda gpu: gpu.allocated_bytes,
    "utilisation": lambda gpu: gpu.utilization_ratio,
    "throttled": lambda gpu: _throttled_of(gpu.slices),
}
_NODE_ORDERS: Mapping[str, Order[Node]] = {
    "name": lambda node: node.name,
    "used": _total("used_bytes"),
    "limit": _total("allocated_bytes"),
    "utilisation": _mean_utilisation,
    "throttled": lambda node: _throttled_of(node.slices),
}
