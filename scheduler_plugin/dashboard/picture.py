"""The cluster as the dashboard shows it, drawn from the scheduler's state.

Amounts are those of the state, in MiB and percent. Sums can exceed a capacity for a moment (a GPU that shrank); the page shows what is
there. Names are short because a thousand nodes travel in one answer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from placement.device import DeviceState
from placement.score import FRAG_PPM, fragmentation
from proto import units
from proto.gpunode import GpuDevice, GpuNode
from proto.model import Link, LinkKind, PodRequest
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.pods import Use
from scheduler_plugin.core.state import ClusterState, Reservation, Stage

MAX_WAITING: Final = 500
"""Shown at once; the rest is a number."""
NODES_AT_ONCE: Final = 10
"""Some 3 ms of drawing; a verb of the extender waits no longer."""


class Slice(msgspec.Struct, rename="camel", omit_defaults=True):
    """What one pod holds of one GPU, or of one MIG instance."""

    pod: str
    """``namespace/name``; empty while the pod of a reservation is not known."""
    memory_mib: int
    cores_percent: int
    stage: str = ""
    """For a pod that is not bound yet: how sure it is to come."""
    instance: str = ""
    """The MIG profile it holds."""


class Gpu(msgspec.Struct, rename="camel", omit_defaults=True):
    """One GPU of a node, and what fills it."""

    uuid: str
    minor: int
    model: str
    memory_mib: int
    used_mib: int
    used_cores_percent: int
    slices: list[Slice]
    fragmentation: float
    """0: everything free is of use to some usual shape; 1: nothing is."""
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
    """Each GPU's best paths to the others: ``0-1 NVLink x4``."""
    cordoned: bool = False


class Waiting(msgspec.Struct, rename="camel"):
    """A pod that fitted nowhere when it was last tried."""

    pod: str
    priority: int
    asks: str
    tried_at: float
    reasons: list[tuple[str, int]]
    """A sentence and the number of nodes it holds for, the most common first."""


class Picture(msgspec.Struct, rename="camel"):
    """Everything the page shows."""

    leads: bool
    history: bool
    """Whether there is a past to ask for."""
    trouble: str
    """Why the picture is not current; empty while it is."""
    nodes: list[msgspec.Raw]
    """Each a ``Node``."""
    waiting: list[Waiting]
    waiting_count: int
    unaccounted: list[tuple[str, str]]
    """Bound GPU pods whose devices are not known, and why."""


class Painter:
    """Draws the cluster, node by node, and draws again only the nodes that changed: the scheduler decides in the same thread."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._drawn: dict[str, tuple[object, msgspec.Raw]] = {}
        """The last drawing of each node, and what it was drawn from."""

    def draw(self, waiting: Iterable[Decision], *, leads: bool, trouble: str, history: bool = False) -> Iterator[Picture | None]:
        """Draw the cluster as it is now.

        Yields: None after every few nodes, so that the caller can let others run; the picture at last.
        """
        state = self._state
        coming: dict[str, list[Reservation]] = defaultdict(list)
        for reservation in state.reservations.values():
            coming[reservation.node].append(reservation)
        names = sorted(node.name for node in state.gpu_nodes())
        drawn: dict[str, tuple[object, msgspec.Raw]] = {}
        for number, name in enumerate(names, 1):
            if (row := state.row_of(name)) is not None:
                source = (row, int(state.columns.changed[row]), tuple((held.pod_uid, held.stage) for held in coming[name]))
                known = self._drawn.get(name)
                drawn[name] = known if known is not None and known[0] == source else (source, self._draw_node(name, coming[name]))
            if number % NODES_AT_ONCE == 0:
                yield None
        self._drawn = drawn
        pods = list(waiting)
        yield Picture(
            leads=leads,
            history=history,
            trouble=trouble,
            nodes=[raw for _, raw in drawn.values()],
            waiting=[_waiting(decision) for decision in pods[:MAX_WAITING]],
            waiting_count=len(pods),
            unaccounted=[(_pod_name(state, uid), why) for uid, why in sorted(state.unaccounted.items())],
        )

    def _draw_node(self, name: str, coming: Iterable[Reservation]) -> msgspec.Raw:
        state = self._state
        node = state.gpu_node(name)
        if node is None:
            raise LookupError(f"node {name} has a row and no inventory")
        held: dict[str, list[tuple[str, str, Use]]] = defaultdict(list)
        holders = [(pod.uid, "") for pod in state.pods_on(name)]
        holders += [(reservation.pod_uid, _STAGE_WORDS[reservation.stage]) for reservation in coming]
        for uid, stage in holders:
            for uuid, use in state.footprint_of(uid).items():
                held[uuid].append((_pod_name(state, uid), stage, use))
        return msgspec.Raw(msgspec.json.encode(_node(node, state.device_states(name), held)))


_STAGE_WORDS: Final = {
    Stage.SOFT: "expected",
    Stage.READY: "waits for its gang",
    Stage.STARTING: "starts with its gang",
    Stage.BINDING: "being bound",
    Stage.BOUND: "bound",
}


def _pod_name(state: ClusterState, uid: str) -> str:
    pod = state.pods.get(uid)
    return "" if pod is None else f"{pod.namespace}/{pod.name}"


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
    """Write the NVLinks of a node for people; PCIe paths are every machine's."""
    minor_of = {entry.device.uuid: entry.device.minor for entry in node.devices}
    links: list[Link] = [link for link in node.links if link.kind is LinkKind.NVLINK]
    pairs = len(node.devices) * (len(node.devices) - 1) // 2
    if pairs > 1 and len(links) == pairs and len({link.lanes for link in links}) == 1:
        return [f"all to all NVLink x{links[0].lanes}"]
    return [f"{minor_of[link.a_uuid]}-{minor_of[link.b_uuid]} NVLink x{link.lanes}" for link in links]


def _waiting(decision: Decision) -> Waiting:
    reasons = sorted(((reason.sentence, count) for reason, count in decision.failed.items()), key=lambda pair: (-pair[1], pair[0]))
    return Waiting(
        pod=f"{decision.pod.namespace}/{decision.pod.name}",
        priority=decision.pod.priority,
        asks=_asks(decision.request),
        tried_at=decision.at,
        reasons=reasons,
    )


def _asks(request: PodRequest) -> str:
    parts = []
    for container in request.containers:
        if container.mig:
            parts += [f"{count} × MIG {profile}" for profile, count in container.mig]
            continue
        per_gpu = container.memory_bytes_per_vgpu
        memory = "whole memory" if per_gpu is None else f"{units.bytes_to_mib(per_gpu)} MiB"
        cores = "" if container.cores_percent_per_vgpu is None else f", {container.cores_percent_per_vgpu} % cores"
        parts.append(f"{container.vgpus} × {memory}{cores}")
    return "; ".join(parts)
