# SPDX-License-Identifier: Apache-2.0
"""Pods that request GPUs: what they request, from the API server, and what they use, from the agents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.errors import ContractError, QuantityError
from aliquot.contract.model import DeviceShare
from aliquot_cli.access import Cluster, listed
from aliquot_cli.model import Node, Share

_DOMAIN = f"{contract.RESOURCE_DOMAIN}/"
_PARSERS = {
    contract.RESOURCE_VGPU: units.parse_count,
    contract.RESOURCE_VGPU_MEMORY: units.parse_memory_bytes,
    contract.RESOURCE_VGPU_CORES: units.parse_percent,
}


@dataclass(frozen=True, slots=True)
class GpuPod:
    """One pod that requests GPUs."""

    namespace: str
    name: str
    uid: str
    node: str
    phase: str
    vgpus: int
    memory_bytes: int | None
    cores_percent: int | None
    other: Mapping[str, str]
    """Other GPU resources, with the quantity as written, such as MIG instances."""
    waits_for: str
    """Why it does not run, in the API server's words; empty when it runs."""
    assigned: tuple[str, ...]
    """UUIDs of the devices that the scheduler chose."""
    annotations: Mapping[str, str]
    shares: tuple[Share, ...] = ()

    @property
    def used_bytes(self) -> float | None:
        """Return the device memory that its containers hold; None when unknown."""
        known = [share.used_bytes for share in self.shares if share.used_bytes is not None]
        return sum(known) if known else None


def gpu_pods(cluster: Cluster, namespace: str | None = None) -> list[GpuPod]:
    """Return the pods that request GPUs, sorted by namespace and name, without their shares. Raises AccessError."""
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    found = [pod_of(item) for item in listed(cluster, path) if requests_gpus(item)]
    return sorted(found, key=lambda pod: (pod.namespace, pod.name))


def with_shares(pods: Sequence[GpuPod], nodes: Sequence[Node]) -> list[GpuPod]:
    """Return the pods with their shares on these nodes."""
    shares: dict[str, list[Share]] = {}
    for node in nodes:
        for share in node.shares:
            shares.setdefault(share.uid, []).append(share)
    return [replace(pod, shares=tuple(shares.get(pod.uid, ()))) for pod in pods]


def requests_gpus(pod: Mapping[str, Any]) -> bool:
    """Whether a container of the pod has a GPU resource in its limits."""
    return any(name.startswith(_DOMAIN) for limits in _limits(pod) for name in limits)


def pod_of(pod: Mapping[str, Any]) -> GpuPod:
    """Parse one pod object."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    totals, other = _requested(_limits(pod))
    annotations = metadata.get("annotations") or {}
    shares = _assigned(annotations, metadata.get("uid", ""))
    memory_bytes = totals.get(contract.RESOURCE_VGPU_MEMORY)
    if contract.RESOURCE_VGPU_MEMORY_PERCENT in other and shares:  # a percentage is an amount once the devices are chosen
        memory_bytes = sum(share.memory_bytes for share in shares)
    return GpuPod(
        metadata.get("namespace", ""),
        metadata.get("name", ""),
        metadata.get("uid", ""),
        spec.get("nodeName", ""),
        status.get("phase", "Unknown"),
        totals.get(contract.RESOURCE_VGPU, 0),
        memory_bytes,
        totals.get(contract.RESOURCE_VGPU_CORES),
        other,
        _waits_for(status),
        tuple(dict.fromkeys(share.device_uuid for share in shares)),
        {key: value for key, value in annotations.items() if key.startswith(contract.ANNOTATION_PREFIX)},
    )


def _requested(limits_of_containers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the sum of each resource of ours, and the other GPU resources as written. An invalid quantity counts as another resource."""
    totals: dict[str, int] = {}
    other: dict[str, str] = {}
    for limits in limits_of_containers:
        for name, value in limits.items():
            if not name.startswith(_DOMAIN):
                continue
            try:
                totals[name] = totals.get(name, 0) + _PARSERS[name](str(value))
            except (KeyError, QuantityError):
                other[name] = str(value)
    return totals, other


def _limits(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    spec = pod.get("spec", {})
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    return [(container.get("resources") or {}).get("limits") or {} for container in containers]


def _waits_for(status: Mapping[str, Any]) -> str:
    if status.get("phase") not in ("Pending", "Failed", None):
        return ""
    for state in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
        waiting = state.get("state", {}).get("waiting") or {}
        if waiting.get("message"):
            return str(waiting["message"])
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return str(status.get("message", ""))


def _assigned(annotations: Mapping[str, str], pod_uid: str) -> tuple[DeviceShare, ...]:
    text = annotations.get(contract.ANNOTATION_ASSIGNMENT)
    if not text:
        return ()
    try:
        assignment = codec.decode_assignment(text, pod_uid=pod_uid)
    except ContractError:
        return ()
    return tuple(share for container in assignment.containers for share in container.shares)
