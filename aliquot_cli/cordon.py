# SPDX-License-Identifier: Apache-2.0
"""``aliquot cordon`` and ``uncordon``: keep new pods off one GPU or all GPUs of a node, through the spec of the GpuNode object.

A write carries the resource version that was read. If another administrator wrote in between, the command reads again and retries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from aliquot_cli import live
from aliquot_cli.access import Cluster, ConflictError, Target, connect
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.model import node_of
from aliquot_cli.names import find_gpu
from aliquot_cli.options import cluster_options
from aliquot_cli.source import GPU_NODES_PATH, gpu_nodes

_TRIES = 5

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """A node, and one GPU of it; ``device_uuid`` None means all its GPUs."""

    node: str
    device_uuid: str | None

    def __str__(self) -> str:
        return f"node {self.node}" if self.device_uuid is None else f"GPU {self.device_uuid} of {self.node}"


@click.command(name="cordon")
@click.argument("names", nargs=-1, required=True, shell_complete=live.gpus_and_nodes)
@cluster_options
def cordon(*, names: tuple[str, ...], target: Target) -> None:
    """Keep new pods off GPUs. Running pods continue.

    NAMES are UUIDs, beginnings of UUIDs, NODE/NUMBER, or NODE for all GPUs of a node.
    """
    _change_all(connect(target), names, _cordoned, "cordoned")


@click.command(name="uncordon")
@click.argument("names", nargs=-1, required=True, shell_complete=live.gpus_and_nodes)
@cluster_options
def uncordon(*, names: tuple[str, ...], target: Target) -> None:
    """Allow new pods on GPUs again. NAMES are as for cordon."""
    _change_all(connect(target), names, _uncordoned, "uncordoned")


def _change_all(cluster: Cluster, names: Sequence[str], change: Callable[[Spec, GpuSelection], Spec], done: str) -> None:
    for found in [select(cluster, name) for name in names]:
        changed = apply(cluster, found, change)
        click.echo(f"{found} {done}" if changed else f"{found} was {done} already")


def select(cluster: Cluster, name: str) -> GpuSelection:
    """Return the node or GPU of that name. Raises NotFoundError."""
    described = gpu_nodes(cluster)
    if not described:
        raise NotFoundError("the cluster has no GpuNode objects: install the resource definition, and check that an agent runs")
    if name in described:
        return GpuSelection(name, None)
    gpu = find_gpu([node_of(node.name, node, None) for node in described.values()], name)
    return GpuSelection(gpu.node, gpu.uuid)


def apply(cluster: Cluster, selection: GpuSelection, change: Callable[[Spec, GpuSelection], Spec]) -> bool:
    """Change one object; return whether it changed. Raises AccessError."""
    path = f"{GPU_NODES_PATH}/{selection.node}"
    for _ in range(_TRIES):
        found = cluster.get(path)
        before = found.get("spec") or {}
        after = change(dict(before), selection)
        if after == before:
            return False
        removed = dict.fromkeys(before.keys() - after.keys())  # a merge patch removes a key by null
        version = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}}
        try:
            cluster.merge(path, {**version, "spec": {**removed, **after}})
        except ConflictError:
            continue
        return True
    raise AccessError(f"{selection}: the object was changed by others during all {_TRIES} tries; run the command again")


def _cordoned(spec: Spec, selection: GpuSelection) -> Spec:
    if selection.device_uuid is None:
        return {**spec, "cordoned": True}
    known = spec.get("cordonedDevices") or []
    return spec if selection.device_uuid in known else {**spec, "cordonedDevices": [*known, selection.device_uuid]}


def _uncordoned(spec: Spec, selection: GpuSelection) -> Spec:
    if selection.device_uuid is None:
        return {key: value for key, value in spec.items() if key != "cordoned"}
    left = [uuid for uuid in spec.get("cordonedDevices") or [] if uuid != selection.device_uuid]
    kept = {key: value for key, value in spec.items() if key != "cordonedDevices"}
    return {**kept, "cordonedDevices": left} if left else kept
