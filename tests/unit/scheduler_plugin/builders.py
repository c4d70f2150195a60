# SPDX-License-Identifier: Apache-2.0
"""Nodes, pods and states with defaults, so that a test shows only what matters to it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot.contract.model import (
    ContainerAssignment,
    ContainerSpec,
    Device,
    DeviceShare,
    Isolation,
    Link,
    LinkKind,
    MediaEngines,
    MigInstance,
    Pod,
    PodAssignment,
    PodRequest,
    Policy,
)
from aliquot.placement.request import pod_request
from scheduler_plugin.core.cluster.gang import Gang
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.pods import PodFacts, asks_gpu
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.gang import gang_or_error
from scheduler_plugin.settings import Answer

OFFERED = (Isolation.SHIM, Isolation.EXCLUSIVE, Isolation.MIG)
PROFILES = {
    "1g.10gb": (1, 7, range(7), MediaEngines()),
    "1g.10gb+me": (1, 1, range(7), MediaEngines(1, jpegs=1, ofas=1)),
    "1g.20gb": (2, 4, range(0, 8, 2), MediaEngines(1)),
    "1g.20gb+me": (2, 1, range(0, 8, 2), MediaEngines(2, jpegs=1, ofas=1)),
    "3g.40gb": (4, 2, (0, 4), MediaEngines(2)),
    "7g.80gb": (8, 1, (0,), MediaEngines(5, jpegs=1, ofas=1)),
}
"""As of an A100: size in memory slices, how many at most, where they may begin, media engines. No A100 has 1g.20gb+me, which makes two
profiles compete for its one JPEG engine, as on an A30."""
PLACES = tuple((profile, start) for profile, (_, _, starts, _) in PROFILES.items() for start in starts)


def make_device(node: str, minor: int, *, mib: int = 1000, model: str = "NVIDIA H200", numa: int | None = 0, instances: int = 0) -> Device:
    uuid = f"GPU-{node}-{minor}"
    mig = tuple(MigInstance(f"MIG-{node}-{minor}-{i}", uuid, "1g.10gb", 100 * units.MIB, i, 0, i, 1) for i in range(instances))
    return Device(uuid, model, minor, f"00000000:{minor:02X}:00.0", mib * units.MIB, numa, None, bool(mig), mig)


def make_place(device_uuid: str, profile: str, start: int) -> MigInstance:
    size, most, _, engines = PROFILES[profile]
    return MigInstance(f"{device_uuid}/{profile}@{start}", device_uuid, profile, 8 * units.MIB, 0, 0, start, size, most, engines)


def make_node(name: str = "n1", devices: int | Iterable[Device] = 2, *, linked: bool = False, **fields) -> GpuNode:
    if isinstance(devices, int):
        devices = [make_device(name, minor) for minor in range(devices)]
    entries = tuple(GpuDevice(device) for device in devices)
    links = tuple(Link(a.device.uuid, b.device.uuid, LinkKind.NVLINK, 18) for a, b in combinations(entries, 2)) if linked else ()
    return replace(GpuNode(name, entries, links, isolation=OFFERED), **fields)


def make_pod(
    uid: str = "u1",
    *specs: ContainerSpec,
    node: str = "",
    annotations: Mapping[str, str] | None = None,
    shares: Mapping[str, Iterable[DeviceShare]] | None = None,
    priority: int = 0,
    cpu_milli: int = 0,
    memory_mib: int = 0,
    phase: str = "Pending",
    **limits: Any,
) -> PodFacts:
    """Make a pod with one container of these limits (``vgpu="1", vgpu_memory="400"``), or with the given ones; bound when it has a node."""
    specs = specs or (make_spec("main", **limits),)
    annotations = dict(annotations or {})
    if shares is not None:
        placed = tuple(ContainerAssignment(name, tuple(given)) for name, given in shares.items())
        annotations[contract.ANNOTATION_ASSIGNMENT] = codec.encode_assignment(PodAssignment(uid, placed))
    gpu = Pod("team", f"pod-{uid}", uid, node, phase, annotations, specs) if any(asks_gpu(spec.limits) for spec in specs) else None
    return PodFacts(uid, "team", f"pod-{uid}", node, phase not in ("Succeeded", "Failed"), False, priority, cpu_milli, memory_mib, gpu)


def make_spec(name: str = "main", *, init: bool = False, sidecar: bool = False, **limits: Any) -> ContainerSpec:
    full = {f"{contract.RESOURCE_DOMAIN}/{short.replace('_', '-')}": amount for short, amount in limits.items()}
    return ContainerSpec(name, full, init=init or sidecar, restartable=sidecar)


def make_share(node: str, minor: int, mib: int = 100, cores: int | None = None) -> DeviceShare:
    return DeviceShare(f"GPU-{node}-{minor}", mib * units.MIB, cores)


def request_of(pod: PodFacts) -> PodRequest:
    assert pod.gpu is not None
    return pod_request(pod.gpu)


@dataclass
class FakeClock:
    monotonic: Callable[[], float] = lambda: 0.0
    now: Callable[[], float] = lambda: 0.0


def make_context(
    state: ClusterState,
    *,
    monotonic: Callable[[], float] = lambda: 0.0,
    now: Callable[[], float] = lambda: 0.0,
    soft_seconds: float = 10.0,
    gang_seconds: float = 60.0,
) -> ExtenderContext:
    clock = FakeClock(monotonic, now)
    return ExtenderContext.create(state, Rules(Policy.FRAG, DEFAULT_WEIGHTS), clock, soft_seconds=soft_seconds, gang_seconds=gang_seconds)


def filter_body(context: ExtenderContext, body: bytes, now: float, answer: Answer = Answer.ALL) -> bytes:
    """Reply to a filter call from body to body."""
    return filter_nodes(context, wire.decode_args(body), now, answer)


def known_gang(pod: PodFacts) -> Gang:
    """The gang of a pod that is in one."""
    gang = gang_or_error(pod)
    assert isinstance(gang, Gang)
    return gang
