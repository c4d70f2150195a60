# SPDX-License-Identifier: Apache-2.0
"""The cluster as the dashboard shows it, drawn from the scheduler's state.

Amounts are those of the state, in MiB and percent. A sum can exceed the capacity for a moment, for example after a GPU lost memory; the
page shows the sum. Names are short because one reply has a thousand nodes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from aliquot.contract import units
from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot.contract.model import Link, LinkKind, PodRequest
from aliquot.placement.device import DeviceState
from aliquot.placement.score import FRAG_PPM, fragmentation
from scheduler_plugin.core.backfill.hold import Hold, Outlook
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.hold_uids import HOLD_PREFIX, holds_of, is_of_claim
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage

MAX_WAITING: Final = 500
"""Waiting pods that are listed; the others are only counted."""
NODES_AT_ONCE: Final = 10
"""About 3 ms of drawing; an extender call never waits longer for it."""


class Slice(msgspec.Struct, rename="camel", omit_defaults=True):
    """The share of one pod on one GPU, or its MIG instance."""

    pod: str
    """``namespace/name``; empty for a reservation of an unknown pod."""
    memory_mib: int
    cores_percent: int
    stage: str = ""
    """For a pod that is not bound yet: how certain its reservation is."""
    instance: str = ""
    """The MIG profile of the instance."""


class Gpu(msgspec.Struct, rename="camel", omit_defaults=True):
    """One GPU of a node, with the shares on it."""

    uuid: str
    minor: int
    model: str
    memory_mib: int
    used_mib: int
    used_cores_percent: int
    slices: list[Slice]
    fragmentation: float
    """0: all free room is useful to a usual shape; 1: all of it is useless."""
    numa: int | None = None
    mig: bool = False
    cordoned: bool = False
    state: str = ""
    trouble: str = ""


class Node(msgspec.Struct, rename="camel", omit_defaults=True):
    """One node with an inventory."""

    name: str
    driver: str
    agent: str
    gpus: list[Gpu]
    links: list[str]
    """The NVLinks between GPUs: ``0-1 NVLink x4``."""
    cordoned: bool = False


class Waiting(msgspec.Struct, rename="camel"):
    """A pod that fitted nowhere at the last attempt."""

    pod: str
    priority: int
    asks: str
    tried_at: float
    reasons: list[tuple[str, int]]
    """Each reason with its number of nodes, the most frequent first."""
    start: tuple[float, float, float] | None = None
    """When it probably starts, and the interval that holds in 8 of 10 cases, in seconds since 1970; None if no room is held for it, or the
    time is unknown."""
    holds: tuple[str, ...] = ()
    """The nodes with room that is held for it."""


class Picture(msgspec.Struct, rename="camel"):
    """All that the page shows."""

    leads: bool
    history: bool
    """Whether the page can show the history."""
    trouble: str
    """Why the picture is not current; empty while it is."""
    nodes: list[msgspec.Raw]
    """Each is an encoded ``Node``."""
    waiting: list[Waiting]
    waiting_count: int
    unaccounted: list[tuple[str, str]]
    """Bound GPU pods with unknown devices, and why they are unknown."""


class Painter:
    """Draws the cluster node by node, and redraws only nodes that changed, because the scheduler decides in the same thread."""

    def __init__(self, state: ClusterState, held: Callable[[], tuple[Hold | None, Outlook]] = lambda: (None, Outlook())) -> None:
        """Args: held: the room that is held for waiting pods, and when it is free."""
        self._state = state
        self._held = held
        self._drawn: dict[str, tuple[object, msgspec.Raw]] = {}
        """The last drawing of each node, with its inputs."""

    def draw(self, waiting: Iterable[Decision], *, leads: bool, trouble: str, history: bool = False) -> Iterator[Picture | None]:
        """Draw the present cluster.

        Yields: None after a few nodes each, so that the caller can let other work run; at the end the picture.
        """
        state = self._state
        coming: dict[str, list[Reservation]] = defaultdict(list)
        for reservation in state.reservations.values():
            if not reservation.pod_uid.startswith(HOLD_PREFIX):
                coming[reservation.node].append(reservation)
        names = sorted(node.name for node in state.gpu_nodes())
        drawn: dict[str, tuple[object, msgspec.Raw]] = {}
        for number, name in enumerate(names, 1):
            if (row := state.row_of(name)) is not None:  # the node may have gone since the last step
                drawn[name] = self._drawing(name, row, coming[name])
            if number % NODES_AT_ONCE == 0:
                yield None
        self._drawn = drawn
        pods = list(waiting)
        yield Picture(
            leads=leads,
            history=history,
            trouble=trouble,
            nodes=[raw for _, raw in drawn.values()],
            waiting=[_waiting(decision, *self._held()) for decision in pods[:MAX_WAITING]],
            waiting_count=len(pods),
            unaccounted=[(_pod_name(state, uid), why) for uid, why in sorted(state.unaccounted.items())],
        )

    def _drawing(self, name: str, row: int, coming: Sequence[Reservation]) -> tuple[object, msgspec.Raw]:
        """Return the drawing of a node with its inputs: the last one if these are equal, or else a new one."""
        source = (row, int(self._state.columns.changed[row]), tuple((held.pod_uid, held.stage) for held in coming))
        known = self._drawn.get(name)
        return known if known is not None and known[0] == source else (source, self._draw_node(name, coming))

    def _draw_node(self, name: str, coming: Iterable[Reservation]) -> msgspec.Raw:
        state = self._state
        node = state.gpu_node(name)
        if node is None:
            raise LookupError(f"node {name} has a row, but no inventory")
        held: dict[str, list[tuple[str, str, Use]]] = defaultdict(list)
        holders = [(pod.uid, "") for pod in state.pods_on(name)]
        holders += [(one.pod_uid, "" if is_of_claim(one.pod_uid) else _STAGE_WORDS[one.stage]) for one in coming]
        for uid, stage in holders:
            for uuid, use in state.footprint_of(uid).items():
                held[uuid].append((_pod_name(state, uid), stage, use))
        with state.without_all(holds_of(state.reservations)):  # the owner of held room waits, and others use that room
            devices = state.device_states(name)
        return msgspec.Raw(msgspec.json.encode(_node(node, devices, held)))


_STAGE_WORDS: Final = {
    Stage.SOFT: "expected",
    Stage.READY: "waits for its gang",
    Stage.STARTING: "starts with its gang",
    Stage.BINDING: "being bound",
    Stage.BOUND: "bound",
}


def _pod_name(state: ClusterState, uid: str) -> str:
    pod = state.pods.get(uid)
    unknown = "ResourceClaim" if is_of_claim(uid) else ""
    return unknown if pod is None else f"{pod.namespace}/{pod.name}"


def _node(node: GpuNode, states: Sequence[DeviceState], held: Mapping[str, Sequence[tuple[str, str, Use]]]) -> Node:
    return Node(
        name=node.name,
        driver=node.driver_version,
        agent=node.agent_version,
        gpus=[_gpu(entry, device, held) for entry, device in zip(node.devices, states, strict=True)],
        links=_links(node),
        cordoned=node.cordoned,
    )


def _gpu(entry: GpuDevice, state: DeviceState, held: Mapping[str, Sequence[tuple[str, str, Use]]]) -> Gpu:
    device = entry.device
    slices = [Slice(pod, use.memory_mib, use.cores_percent, stage) for pod, stage, use in held.get(device.uuid, ())]
    for instance in device.mig_instances:
        size = instance.memory_bytes // units.MIB
        slices += [Slice(pod, size, 0, stage, instance.profile) for pod, stage, _ in held.get(instance.uuid, ())]
    return Gpu(
        uuid=device.uuid,
        minor=device.minor,
        model=device.model,
        memory_mib=device.memory_bytes // units.MIB,
        used_mib=sum(part.memory_mib for part in slices),
        used_cores_percent=state.used_cores_percent,
        slices=sorted(slices, key=lambda part: (-part.memory_mib, part.pod)),
        fragmentation=0.0 if device.mig_enabled else round(fragmentation(state) / FRAG_PPM, 3),
        numa=device.numa_node,
        mig=device.mig_enabled,
        cordoned=state.cordoned,
        state=entry.state,
        trouble=entry.trouble,
    )


def _links(node: GpuNode) -> list[str]:
    """Describe the NVLinks of a node; PCIe paths are not shown."""
    minor_of = {entry.device.uuid: entry.device.minor for entry in node.devices}
    links: list[Link] = [link for link in node.links if link.kind is LinkKind.NVLINK]
    pairs = len(node.devices) * (len(node.devices) - 1) // 2
    if pairs > 1 and len(links) == pairs and len({link.lanes for link in links}) == 1:
        return [f"all to all NVLink x{links[0].lanes}"]
    return [f"{minor_of[link.a_uuid]}-{minor_of[link.b_uuid]} NVLink x{link.lanes}" for link in links]


def _waiting(decision: Decision, hold: Hold | None, outlook: Outlook) -> Waiting:
    is_owner = hold is not None and decision.pod.uid in hold.owners
    middle, low, high = outlook.middle, outlook.low, outlook.high
    reasons = sorted(((reason.sentence, count) for reason, count in decision.failed.items()), key=lambda pair: (-pair[1], pair[0]))
    return Waiting(
        pod=f"{decision.pod.namespace}/{decision.pod.name}",
        priority=decision.pod.priority,
        asks=_asks(decision.request),
        tried_at=decision.at,
        reasons=reasons,
        start=(middle, low, high) if is_owner and middle is not None and low is not None and high is not None else None,
        holds=tuple(sorted(hold.nodes)) if is_owner and hold is not None else (),
    )


def _asks(request: PodRequest) -> str:
    parts = []
    for container in request.containers:
        if container.mig:
            parts += [f"{count} × MIG {profile}" for profile, count in container.mig]
            continue
        per_gpu, percent = container.memory_bytes_per_vgpu, container.memory_percent_per_vgpu
        memory = "whole memory" if per_gpu is None else f"{units.bytes_to_mib(per_gpu)} MiB"
        if percent is not None:
            memory = f"{percent} % memory"
        cores = "" if container.cores_percent_per_vgpu is None else f", {container.cores_percent_per_vgpu} % cores"
        parts.append(f"{container.vgpus} × {memory}{cores}")
    return "; ".join(parts)
