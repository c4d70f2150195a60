"""``aliquot cordon`` and ``uncordon``: keep new work off a GPU or a node's GPUs, through the GpuNode object's spec.

Read, change, write with the version that was read: two administrators at once lose nothing, the later one tries again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from aliquot.cli import live
from aliquot.cli.access import Cluster, ConflictError, Target, connect
from aliquot.cli.errors import AccessError, NotFoundError
from aliquot.cli.model import node_of
from aliquot.cli.names import find_gpu
from aliquot.cli.options import cluster_options
from aliquot.cli.source import GPU_NODES_PATH, gpu_nodes

_TRIES = 5

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a name means: a node, and one GPU of it or all."""

    node: str
    device_uuid: str | None

    def __str__(self) -> str:
        return f"node {self.node}" if self.device_uuid is None else f"GPU {self.device_uuid} of {self.node}"


@click.command(name="cordon")
@click.argument("names", nargs=-1, required=True, shell_complete=live.gpus_and_nodes)
@cluster_options
def cordon(*, names: tuple[str, ...], target: Target) -> None:
    """Keep new work off GPUs; what runs there stays.

    NAMES are UUIDs, beginnings of UUIDs, NODE/NUMBER, or NODE for all GPUs of a node.
    """
    _change_all(connect(target), names, _with, "cordoned")


@click.command(name="uncordon")
@click.argument("names", nargs=-1, required=True, shell_complete=live.gpus_and_nodes)
@cluster_options
def uncordon(*, names: tuple[str, ...], target: Target) -> None:
    """Let GPUs have new work again. NAMES are as for cordon."""
    _change_all(connect(target), names, _without, "uncordoned")


def _change_all(cluster: Cluster, names: Sequence[str], change: Callable[[Spec, Aim], Spec], done: str) -> None:
    for aim in [aim_of(cluster, name) for name in names]:
        changed = apply(cluster, aim, change)
        click.echo(f"{aim} {done}" if changed else f"{aim} was {done} already")


def aim_of(cluster: Cluster, name: str) -> Aim:
    """Find out what a name means. Raises NotFoundError."""
    described = gpu_nodes(cluster)
    if not described:
        raise NotFoundError("the cluster has no GpuNode objects: is the resource definition installed, and does an agent run?")
    if name in described:
        return Aim(name, None)
    gpu = find_gpu([node_of(node.name, node, None) for node in described.values()], name)
    return Aim(gpu.node, gpu.uuid)


def apply(cluster: Cluster, aim: Aim, change: Callable[[Spec, Aim], Spec]) -> bool:
    """Change one object; return whether that made a difference. Raises AccessError."""
    path = f"{GPU_NODES_PATH}/{aim.node}"
    for _ in range(_TRIES):
        found = cluster.get(path)
        before = found.get("spec") or {}
        after = change(dict(before), aim)
        if after == before:
            return False
        removed = dict.fromkeys(before.keys() - after.keys())  # a merge patch takes a key away by null
        version = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}}
        try:
            cluster.merge(path, {**version, "spec": {**removed, **after}})
        except ConflictError:
            continue
        return True
    raise AccessError(f"{aim}: others changed the object {_TRIES} times at the same moment; try again")


def _with(spec: Spec, aim: Aim) -> Spec:
    if aim.device_uuid is None:
        return {**spec, "cordoned": True}
    known = spec.get("cordonedDevices") or []
    return spec if aim.device_uuid in known else {**spec, "cordonedDevices": [*known, aim.device_uuid]}


def _without(spec: Spec, aim: Aim) -> Spec:
    if aim.device_uuid is None:
        return {key: value for key, value in spec.items() if key != "cordoned"}
    left = [uuid for uuid in spec.get("cordonedDevices") or [] if uuid != aim.device_uuid]
    kept = {key: value for key, value in spec.items() if key != "cordonedDevices"}
    return {**kept, "cordonedDevices": left} if left else kept
