"""How devices get into containers on this node: by a CDI name, which the runtime resolves when the container is created, or by the answer
of Allocate itself, where the runtime or kubelet is too old for CDI.

The old way knows no more than the IDs when it answers, so that the GPUs are those the IDs name; PreStart then refuses a container that was
assigned others. Its answer is a function of the IDs alone, as kubelet remembers it for as long as the container's pod lives: a container
that was admitted before its node changed from one way to the other still starts by the first.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.cdi import PRELOAD_ARTEFACT, PRELOAD_LIST_ARTEFACT
from agent.core.identity import device_uuid_of
from agent.core.ledger import Grant
from agent.core.refusal import Reason, Refusal
from agent.core.rows import RowFormat
from proto import contract
from proto.model import Isolation, Preferences

_LEGACY_BACKENDS = (Isolation.SHIM, Isolation.EXCLUSIVE, Isolation.MIG)
_FIRST_KUBELET = (1, 29)
"""The first that passes CDI names of device plugins on by default."""
_FIRST_RUNTIMES: Mapping[str, tuple[int, int]] = {"containerd": (1, 7), "cri-o": (1, 28)}
_CONFIGURED_FROM = (2, 0)
"""From here on containerd resolves CDI names unless it is told not to; before, only where it is told to."""
_MOUNTED_FILES = (
    ("limits", contract.CONTAINER_LIMITS, True),
    ("region", contract.CONTAINER_REGION, False),
    (PRELOAD_ARTEFACT, contract.CONTAINER_PRELOAD, True),
    (PRELOAD_LIST_ARTEFACT, contract.LD_SO_PRELOAD, True),
)
"""What a container without CDI has of its grant's directory: the name there, the path in the container, whether it is read-only."""


class DeviceInjection(StrEnum):
    """What is configured."""

    AUTO = "auto"
    """As kubelet and the runtime of the node allow."""
    CDI = "cdi"
    LEGACY = "legacy"


@dataclass(frozen=True, slots=True)
class NodeVersions:
    """What decides under ``auto``, as the Node object states it: such as ``containerd://2.1.4`` and ``v1.34.1``; empty while not known."""

    runtime: str = ""
    kubelet: str = ""


VERSION_ROWS = RowFormat("record of a node's versions", "versions", NodeVersions, version=1)


@dataclass(frozen=True, slots=True)
class Answer:
    """What Allocate answers for one container."""

    cdi_name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[tuple[str, str, bool]] = ()
    """Host path, container path, and whether it is read-only."""
    nodes: Sequence[str] = ()


def injects_by_cdi(configured: DeviceInjection, runtime: str, kubelet: str, *, host_has_spec: bool) -> bool:
    """Whether containers get their devices by CDI name.

    Args:
        runtime, kubelet: the versions that the Node object states, such as ``containerd://2.1.4`` and ``v1.34.1``; empty while not known.
        host_has_spec: whether somebody has set CDI up on this node: there is NVIDIA's own spec. containerd 1.7 may be
            told not to resolve it all the same; ``named_answer`` has what happens then.
    """
    if configured is not DeviceInjection.AUTO:
        return configured is DeviceInjection.CDI
    if not runtime or not kubelet:
        return True
    if _too_old(runtime, kubelet):
        return False
    return host_has_spec or not is_told_by_spec(runtime)


def resolves_no_name(configured: DeviceInjection, runtime: str, kubelet: str) -> bool:
    """Whether a CDI name that was answered earlier certainly leads nowhere on this node, without an error from anybody.

    Args: as of ``injects_by_cdi``.
    """
    if configured is DeviceInjection.CDI or not runtime or not kubelet:
        return False
    return _too_old(runtime, kubelet) or (configured is DeviceInjection.LEGACY and is_told_by_spec(runtime))


def _too_old(runtime: str, kubelet: str) -> bool:
    name, _, version = runtime.partition("://")
    first = _FIRST_RUNTIMES.get(name)
    return _version(kubelet) < _FIRST_KUBELET or first is None or _version(version) < first


def is_told_by_spec(runtime: str) -> bool:
    """Whether a runtime's version leaves open if it resolves CDI names, so that the host's spec has to be the sign."""
    name, _, version = runtime.partition("://")
    return name == "containerd" and _version(version) < _CONFIGURED_FROM


def tells_version(runtime: str) -> bool:
    """Whether the Node object says which runtime there is: kubelet writes ``containerd://Unknown`` while it cannot ask it."""
    _, _, version = runtime.partition("://")
    return _version(version) != (0, 0)


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match is not None else (0, 0)


def named_answer(cdi_name: str) -> Answer:
    """Return the answer with CDI.

    containerd whose ``enable_cdi`` is false passes the name over without an error. The variable then keeps NVIDIA's runtime from giving the
    container, without a limit, the GPUs that its image asks for; a spec that is resolved sets the variable anew.
    Source: ``containerSpecOpts``, pkg/cri/sbserver/container_create_linux.go of containerd 1.7
    """
    return Answer(cdi_name=cdi_name, env={contract.ENV_NVIDIA_VISIBLE_DEVICES: contract.NO_VISIBLE_DEVICES})


def legacy_answer(
    resource: str, device_ids: Iterable[str], minors: Mapping[str, int], present_nodes: Iterable[str], directory: str
) -> Answer:
    """Return the answer without CDI.

    The NVIDIA runtime mounts the driver's files for the devices that it is asked for: by mounts of /dev/null, which it prefers where it is
    set to take them, and by the environment, where it is not. Device nodes are listed too, because kubelet's CPU manager takes away what it
    does not know of. The shim is preloaded, as no front can stand where that runtime mounts the driver later.

    Args:
        minors: by GPU UUID. present_nodes: the host's /dev/nvidia* nodes.
        directory: of the files of the container's grant, where PreStart puts the shim.
    """
    uuids = sorted({device_uuid_of(device_id) for device_id in device_ids})
    env = {contract.ENV_NVIDIA_VISIBLE_DEVICES: ",".join(uuids), "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    asking = tuple((contract.NVIDIA_DEVICES_SOURCE, f"{contract.NVIDIA_DEVICES_DIR}/{uuid}", True) for uuid in uuids)
    if resource != contract.RESOURCE_VGPU:  # the hardware keeps MIG instances apart, and the runtime knows their nodes
        return Answer(env=env, mounts=asking)
    control = [node for node in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools") if node in set(present_nodes)]
    mounts = (*asking, *((f"{directory}/{name}", inside, read_only) for name, inside, read_only in _MOUNTED_FILES))
    nodes = [f"/dev/nvidia{minors[uuid]}" for uuid in uuids if uuid in minors]
    return Answer(env=env, mounts=mounts, nodes=(*nodes, *control))


def admission_trouble(answer: Answer, container: str, resource: str, name: str, directory: str, *, name_leads_nowhere: bool) -> str:
    """Say why a container cannot have its grant by what Allocate answered when it was admitted; empty when it can.

    Such a container is never to start: it would have no GPU, or a whole one without its limits.

    Args: name: of the grant by CDI. directory: of the grant's files.
    """
    what = f"the kubelet repeats what container {container} was admitted with"
    cure = "Delete the pod so that it is admitted anew"
    if answer.cdi_name:
        if answer.cdi_name != name:
            return f"{what}, the CDI name {answer.cdi_name}, and its grant has the name {name}: the node's secret was lost since. {cure}"
        if name_leads_nowhere:
            return f"{what}, a CDI name, and the container runtime or kubelet of this node passes such names over by now. {cure}"
    elif resource == contract.RESOURCE_VGPU:
        inside = {path for _, path, _ in _MOUNTED_FILES}
        found = {host.rpartition("/")[0] for host, path, _ in answer.mounts if path in inside}
        if found != {directory}:
            where = ", ".join(sorted(found)) or "nowhere"
            return (
                f"{what}, the files of its share from {where}, and they are in {directory}: the node's secret or the agent's runtimeDir "
                f"changed since. {cure}"
            )
    return ""


def legacy_trouble(grant: Grant, preferences: Preferences) -> Refusal | None:
    """Say why a container cannot have its grant by an answer that was made before the grant."""
    named = {device_uuid_of(device_id) for device_id in grant.device_ids}
    if named != set(grant.device_names):
        return Refusal(
            Reason.ASSIGNMENT_INVALID,
            f"kubelet took IDs of {', '.join(sorted(named))} for container {grant.container}, its pod was assigned "
            f"{', '.join(grant.device_names)}, and a container that was admitted without CDI gets no others than its IDs name "
            "(deviceInjection: legacy). Delete the pod so that it is admitted anew",
        )
    asks_more = preferences.priority is not None or (preferences.memory_burst or 1.0) > 1.0
    if grant.backend not in _LEGACY_BACKENDS or asks_more:
        annotations = (contract.ANNOTATION_ISOLATION, contract.ANNOTATION_PRIORITY, contract.ANNOTATION_MEMORY_BURST)
        return Refusal(
            Reason.ISOLATION_UNAVAILABLE,
            f"container {grant.container} asks by {', '.join(annotations)} for what a node without CDI cannot give "
            "(deviceInjection: legacy). Remove the annotation, or use another node",
        )
    return None
