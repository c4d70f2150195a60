# SPDX-License-Identifier: Apache-2.0
"""Decides how devices get into containers on this node: by a CDI name, or by the response of Allocate (legacy).

The runtime resolves a CDI name when it creates the container. Legacy is for a runtime or kubelet that is too old for CDI. In legacy mode
the agent knows only the IDs when it responds, so the container gets the GPUs in the IDs; PreStart then refuses a container that was
assigned others. The legacy response depends on the IDs alone. Kubelet remembers a response as long as the pod exists: a container that was
admitted before its node changed the mode still starts with the first response.
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
from aliquot import contract
from aliquot.contract.model import Isolation, Preferences

_LEGACY_BACKENDS = (Isolation.SHIM, Isolation.EXCLUSIVE, Isolation.MIG)
_FIRST_KUBELET = (1, 29)
"""The first version that passes on CDI names of device plugins by default."""
_FIRST_RUNTIMES: Mapping[str, tuple[int, int]] = {"containerd": (1, 7), "cri-o": (1, 28)}
_CONFIGURED_FROM = (2, 0)
"""From this version on containerd resolves CDI names unless its configuration disables it; older ones need it enabled."""
_MOUNTED_FILES = (
    ("limits", contract.CONTAINER_LIMITS, True),
    ("region", contract.CONTAINER_REGION, False),
    (PRELOAD_ARTEFACT, contract.CONTAINER_PRELOAD, True),
    (PRELOAD_LIST_ARTEFACT, contract.LD_SO_PRELOAD, True),
)
"""The files of its grant's directory that a container without CDI gets: name there, path in the container, whether it is read-only."""


class DeviceInjection(StrEnum):
    """The configured mode."""

    AUTO = "auto"
    """CDI if the node's kubelet and runtime support it."""
    CDI = "cdi"
    LEGACY = "legacy"


@dataclass(frozen=True, slots=True)
class NodeVersions:
    """The versions that decide in mode ``auto``, from the Node object: such as ``containerd://2.1.4`` and ``v1.34.1``; empty if unknown."""

    runtime: str = ""
    kubelet: str = ""


VERSION_ROWS = RowFormat("record of a node's versions", "versions", NodeVersions, version=1)


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of Allocate for one container."""

    cdi_name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[tuple[str, str, bool]] = ()
    """Host path, container path, and whether it is read-only."""
    nodes: Sequence[str] = ()


def injects_by_cdi(configured: DeviceInjection, runtime: str, kubelet: str, *, host_has_spec: bool) -> bool:
    """Whether containers get their devices by CDI name.

    Args:
        runtime, kubelet: the versions in the Node object, such as ``containerd://2.1.4`` and ``v1.34.1``; empty if unknown.
        host_has_spec: whether the host has NVIDIA's own spec, a sign that CDI is set up on this node. containerd 1.7 may be configured
            not to resolve CDI names even so; see ``named_answer`` for that case.
    """
    if configured is not DeviceInjection.AUTO:
        return configured is DeviceInjection.CDI
    if not runtime or not kubelet:
        return True
    if _too_old(runtime, kubelet):
        return False
    return host_has_spec or not decided_by_host_spec(runtime)


def resolves_no_name(configured: DeviceInjection, runtime: str, kubelet: str) -> bool:
    """Whether this node certainly ignores a CDI name from an earlier response, without an error.

    Args: as in ``injects_by_cdi``.
    """
    if configured is DeviceInjection.CDI or not runtime or not kubelet:
        return False
    return _too_old(runtime, kubelet) or (configured is DeviceInjection.LEGACY and decided_by_host_spec(runtime))


def _too_old(runtime: str, kubelet: str) -> bool:
    name, _, version = runtime.partition("://")
    first = _FIRST_RUNTIMES.get(name)
    return _version(kubelet) < _FIRST_KUBELET or first is None or _version(version) < first


def decided_by_host_spec(runtime: str) -> bool:
    """Whether a runtime's version does not show if it resolves CDI names, so that the host's spec decides."""
    name, _, version = runtime.partition("://")
    return name == "containerd" and _version(version) < _CONFIGURED_FROM


def has_version(runtime: str) -> bool:
    """Whether the Node object has the runtime's version. Kubelet writes ``containerd://Unknown`` while the runtime does not answer."""
    _, _, version = runtime.partition("://")
    return _version(version) != (0, 0)


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match is not None else (0, 0)


def named_answer(cdi_name: str) -> Answer:
    """Return the response with CDI.

    containerd with ``enable_cdi`` false ignores the name without an error. The variable then prevents NVIDIA's runtime from giving the
    container the GPUs that its image requests, without a limit. A resolved spec overwrites the variable.
    Source: ``containerSpecOpts``, pkg/cri/sbserver/container_create_linux.go of containerd 1.7
    """
    return Answer(cdi_name=cdi_name, env={contract.ENV_NVIDIA_VISIBLE_DEVICES: contract.NO_VISIBLE_DEVICES})


def legacy_answer(
    resource: str, device_ids: Iterable[str], minors: Mapping[str, int], present_nodes: Iterable[str], directory: str
) -> Answer:
    """Return the response without CDI.

    The NVIDIA runtime mounts the driver's files for the requested devices. A request is a mount of /dev/null, if the runtime is configured
    to accept such mounts, and else the environment variable. The response lists device nodes too, because kubelet's CPU manager removes
    unknown ones. The shim is preloaded: the runtime mounts the driver later and would overwrite a front.

    Args:
        minors: by GPU UUID. present_nodes: the host's /dev/nvidia* nodes.
        directory: the directory of the container's grant, where PreStart puts the shim.
    """
    uuids = sorted({device_uuid_of(device_id) for device_id in device_ids})
    env = {contract.ENV_NVIDIA_VISIBLE_DEVICES: ",".join(uuids), "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    requests = tuple((contract.NVIDIA_DEVICES_SOURCE, f"{contract.NVIDIA_DEVICES_DIR}/{uuid}", True) for uuid in uuids)
    if resource != contract.RESOURCE_VGPU:  # the hardware limits MIG instances, and the runtime knows their nodes
        return Answer(env=env, mounts=requests)
    control = [node for node in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools") if node in set(present_nodes)]
    mounts = (*requests, *((f"{directory}/{name}", inside, read_only) for name, inside, read_only in _MOUNTED_FILES))
    nodes = [f"/dev/nvidia{minors[uuid]}" for uuid in uuids if uuid in minors]
    return Answer(env=env, mounts=mounts, nodes=(*nodes, *control))


def admission_trouble(answer: Answer, container: str, resource: str, name: str, directory: str, *, name_leads_nowhere: bool) -> str:
    """Return why a container cannot get its grant by the Allocate response from its admission; empty if it can.

    Such a container must not start: it would have no GPU, or a whole GPU without limits.

    Args: name: the grant's CDI name. directory: the directory of the grant's files. name_leads_nowhere: the node ignores CDI names.
    """
    what = f"kubelet repeats the response from the admission of container {container}"
    cure = "Delete the pod so that it is admitted again"
    if answer.cdi_name:
        if answer.cdi_name != name:
            return f"{what}: CDI name {answer.cdi_name}. Its grant has the name {name}, because the node's secret was lost. {cure}"
        if name_leads_nowhere:
            return f"{what}: a CDI name. The container runtime or kubelet of this node now ignores CDI names. {cure}"
    elif resource == contract.RESOURCE_VGPU:
        inside = {path for _, path, _ in _MOUNTED_FILES}
        found = {host.rpartition("/")[0] for host, path, _ in answer.mounts if path in inside}
        if found != {directory}:
            where = ", ".join(sorted(found)) or "nowhere"
            return (
                f"{what}: the files of its share from {where}. They are now in {directory}: the node's secret or the agent's runtimeDir "
                f"has changed. {cure}"
            )
    return ""


def legacy_trouble(grant: Grant, preferences: Preferences) -> Refusal | None:
    """Return why a container cannot get its grant by a legacy response, which was made before the grant; None if it can."""
    named = {device_uuid_of(device_id) for device_id in grant.device_ids}
    if named != set(grant.device_names):
        return Refusal(
            Reason.ASSIGNMENT_INVALID,
            f"kubelet chose IDs of {', '.join(sorted(named))} for container {grant.container}, but its pod was assigned "
            f"{', '.join(grant.device_names)}. A container that was admitted without CDI gets exactly the devices in its IDs "
            "(deviceInjection: legacy). Delete the pod so that it is admitted again",
        )
    asks_more = preferences.priority is not None or (preferences.memory_burst or 1.0) > 1.0
    if grant.backend not in _LEGACY_BACKENDS or asks_more:
        annotations = (contract.ANNOTATION_ISOLATION, contract.ANNOTATION_PRIORITY, contract.ANNOTATION_MEMORY_BURST)
        return Refusal(
            Reason.ISOLATION_UNAVAILABLE,
            f"container {grant.container} requests by {', '.join(annotations)} what a node without CDI cannot provide "
            "(deviceInjection: legacy). Remove the annotation, or use another node",
        )
    return None
