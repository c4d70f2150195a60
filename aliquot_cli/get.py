# SPDX-License-Identifier: Apache-2.0
"""``aliquot get`` lists GPUs, nodes and pods; ``aliquot describe`` shows one of them in full."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TypeVar

import click

from aliquot_cli import live
from aliquot_cli.access import Cluster, Target, connect, current_namespace
from aliquot_cli.errors import NotFoundError
from aliquot_cli.model import Gpu, Node
from aliquot_cli.names import find_gpu
from aliquot_cli.options import cluster_options, namespace_options, node_option, output_option
from aliquot_cli.output import UNKNOWN, Cell, Column, Output, document, memory, number, percent, table, terminal_width
from aliquot_cli.pods import GpuPod, gpu_pods, with_shares
from aliquot_cli.source import nodes
from aliquot_cli.top import GPU_COLUMNS, NODE_COLUMNS, SHARE_COLUMNS, Row

T = TypeVar("T", Gpu, Node, GpuPod)

_PHASE_COLOURS = {"Running": "green", "Succeeded": "green", "Pending": "yellow", "Failed": "red"}

POD_COLUMNS: Sequence[Column[GpuPod]] = (
    Column("NAMESPACE", lambda pod: pod.namespace),
    Column("POD", lambda pod: pod.name),
    Column("PHASE", lambda pod: Cell(pod.phase, _PHASE_COLOURS.get(pod.phase))),
    Column("NODE", lambda pod: pod.node or UNKNOWN),
    Column("GPUS", lambda pod: _gpus(pod)),
    Column("USED/REQUESTED", lambda pod: f"{memory(pod.used_bytes)}/{memory(pod.memory_bytes)}"),
    Column("CORES", lambda pod: number(pod.cores_percent, "%")),
    Column("DEVICES", lambda pod: ",".join(pod.assigned) or UNKNOWN, wide=True),
    Column("REASON", lambda pod: pod.waits_for, is_sentence=True),
)


@click.command(name="get")
@click.argument("kind", type=click.Choice(["gpus", "gpu", "nodes", "node", "pods", "pod"]), metavar="{gpus|nodes|pods}")
@click.argument("names", nargs=-1, shell_complete=live.of_kind)
@node_option
@namespace_options
@output_option
@cluster_options
def get(*, kind: str, names: tuple[str, ...], node_names: tuple[str, ...], namespace: str | None, output: Output, target: Target) -> None:
    """List GPUs, nodes with GPUs, or pods that request GPUs.

    NAMES selects some of them: GPUs by UUID, the beginning of a UUID, or NODE/NUMBER; nodes and pods by name.
    """
    cluster = connect(target)
    if kind in ("pods", "pod"):
        rows = _pods(cluster, names, namespace, node_names)
        click.echo(_listing(POD_COLUMNS, rows, "pods", output))
        return
    found = nodes(cluster, names if kind in ("nodes", "node") else node_names)
    if kind in ("nodes", "node"):
        click.echo(_listing(NODE_COLUMNS, found, "nodes", output))
        return
    gpus = [find_gpu(found, name) for name in names] if names else [gpu for node in found for gpu in node.gpus]
    click.echo(_listing(GPU_COLUMNS, gpus, "gpus", output))


@click.command(name="describe")
@click.argument("kind", type=click.Choice(["gpu", "node", "pod"]))
@click.argument("name", shell_complete=live.of_kind)
@click.option("-n", "--namespace", metavar="NAME", shell_complete=live.namespaces, help="The pod's namespace.  [default: the context's]")
@output_option
@cluster_options
def describe(*, kind: str, name: str, namespace: str | None, output: Output, target: Target) -> None:
    """Show one GPU (UUID or NODE/NUMBER), node or pod in full."""
    cluster = connect(target)
    subject: Gpu | Node | GpuPod
    if kind == "pod":
        namespace, _, name = name.rpartition("/") if "/" in name else (namespace or current_namespace(target), "", name)
        (subject,) = _pods(cluster, (name,), namespace, ())
        lines = _describe_pod(subject)
    elif kind == "gpu":
        node_name = name.partition("/")[0]
        subject = find_gpu(nodes(cluster, (node_name,) if "/" in name else ()), name)
        lines = _describe_gpu(subject)
    else:
        (subject,) = nodes(cluster, (name,))
        lines = _describe_node(subject)
    click.echo(document(asdict(subject), output) if output.for_programs else "\n".join(lines))


def _pods(cluster: Cluster, names: Sequence[str], namespace: str | None, node_names: Sequence[str]) -> list[GpuPod]:
    listed = gpu_pods(cluster, namespace)
    chosen = [pod for pod in listed if _is_chosen(pod, names, node_names)]
    if missing := set(names) - {pod.name for pod in chosen}:
        where = f" in {namespace}" if namespace else ""
        raise NotFoundError(f"no pod that requests GPUs is named {', '.join(sorted(missing, key=names.index))}{where}")
    on_nodes = sorted({pod.node for pod in chosen if pod.node})
    return with_shares(chosen, nodes(cluster, on_nodes, all_of_them=False)) if on_nodes else chosen


def _is_chosen(pod: GpuPod, names: Sequence[str], node_names: Sequence[str]) -> bool:
    """Whether the pod is one of those named on the command line; no name means all."""
    return (not names or pod.name in names) and (not node_names or pod.node in node_names)


def _listing(columns: Sequence[Column[T]], rows: Sequence[T], what: str, output: Output) -> str:
    if output.for_programs:
        return document({what: [asdict(row) for row in rows]}, output)
    return "\n".join(table(columns, rows, output, width=terminal_width()))


def _gpus(pod: GpuPod) -> str:
    whole = [str(pod.vgpus)] if pod.vgpus else []
    return ",".join(whole + [f"{name.rpartition('/')[2]}={count}" for name, count in pod.other.items()]) or UNKNOWN


# --- describe -------------------------------------------------------------------------------------------------------


def _facts(*facts: tuple[str, str]) -> Iterator[str]:
    width = max(len(name) for name, _ in facts) + 2
    return (f"{name + ':':<{width}}{value}" for name, value in facts if value)


def _share_table(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield "Shares:" if rows else "No shares"
    if rows:
        yield from table(SHARE_COLUMNS, rows, Output.WIDE, indent="  ")


def _describe_gpu(gpu: Gpu) -> Iterator[str]:
    yield from _facts(
        ("GPU", gpu.name),
        ("UUID", gpu.uuid),
        ("Model", gpu.model),
        ("State", gpu.state),
        ("Problem", gpu.trouble),
        ("MIG mode", "on" if gpu.mig_enabled else "off"),
        ("Memory", f"{memory(gpu.used_bytes)} used, {memory(gpu.allocated_bytes)} allocated, {memory(gpu.total_bytes)} in total"),
        ("Cores", f"{percent(gpu.cores_allocated_ratio)} allocated"),
        ("Utilisation", percent(gpu.utilization_ratio)),
        ("Sensors", f"{number(gpu.temperature_celsius, ' C')}, {number(gpu.power_watts, ' W')}"),
        ("Shares", f"{number(gpu.shares_allocated)} of {number(gpu.shares_total)} allocated"),
    )
    yield from _share_table([Row(gpu, share) for share in gpu.shares])


def _describe_node(node: Node) -> Iterator[str]:
    yield from _facts(
        ("Node", node.name),
        ("Driver", node.driver_version or UNKNOWN),
        ("Agent", node.agent_version or UNKNOWN),
        ("Cordoned", "yes" if node.cordoned else "no"),
        ("Problem", node.trouble),
    )
    yield ""
    yield from table(GPU_COLUMNS, node.gpus, Output.WIDE)
    yield from _share_table([Row(gpu, share) for gpu in node.gpus for share in gpu.shares])


def _describe_pod(pod: GpuPod) -> Iterator[str]:
    yield from _facts(
        ("Pod", f"{pod.namespace}/{pod.name}"),
        ("UID", pod.uid),
        ("Phase", pod.phase),
        ("Node", pod.node or UNKNOWN),
        ("GPUs", _gpus(pod)),
        ("Memory", f"{memory(pod.used_bytes)} used of {memory(pod.memory_bytes)} requested"),
        ("Cores", number(pod.cores_percent, "%")),
        ("Devices", ", ".join(pod.assigned)),
        ("Reason", " ".join(pod.waits_for.split())),
    )
    for name, value in pod.annotations.items():
        yield f"Annotation:  {name}={value}"
    yield from _share_table([Row(Gpu(share.node, share.gpu_uuid), share) for share in pod.shares])
