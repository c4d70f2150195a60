"""Pods that ask for GPUs, as their specs and the API server tell, beside what they use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aliquot.cli.access import Cluster, listed
from aliquot.cli.model import Node, Slice
from proto import codec, contract, units
from proto.errors import ContractError, QuantityError

_DOMAIN = f"{contract.RESOURCE_DOMAIN}/"
_PARSERS = {
    contract.RESOURCE_VGPU: units.parse_count,
    contract.RESOURCE_VGPU_MEMORY: units.parse_memory_bytes,
    contract.RESOURCE_VGPU_CORES: units.parse_percent,
}


@dataclass(frozen=True, slots=True)
class GpuPod:
    """One pod that asks for GPUs."""

    namespace: str
    name: str
    uid: str
    node: str
    phase: str
    vgpus: int
    memory_bytes: int | None
    cores_percent: int | None
    other: Mapping[str, str]
    """Further GPU resources as they are written, such as MIG instances."""
    waits_for: str
    """Why it does not run, as the API server says; empty when it does."""
    assigned: tuple[str, ...]
    """UUIDs of the devices the scheduler chose."""
    annotations: Mapping[str, str]
    slices: tuple[Slice, ...] = ()

    @property
    def used_bytes(self) -> float | None:
        """Device memory its containers hold."""
        known = [one.used_bytes for one in self.slices if one.used_bytes is not None]
        return sum(known) if known else None


def gpu_pods(cluster: Cluster, namespace: str | None = None) -> list[GpuPod]:
    """Return the pods that ask for GPUs, by namespace and name, without what they use. Raises AccessError."""
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    found = [pod_of(item) for item in listed(cluster, path) if asks_for_gpus(item)]
    return sorted(found, key=lambda pod: (pod.namespace, pod.name))


def with_slices(pods: Sequence[GpuPod], nodes: Sequence[Node]) -> list[GpuPod]:
    """Return the pods with what they use."""
    slices: dict[str, list[Slice]] = {}
    for node in nodes:
        for one in node.slices:
            slices.setdefault(one.uid, []).append(one)
    return [replace(pod, slices=tuple(slices.get(pod.uid, ()))) for pod in pods]


def asks_for_gpus(pod: Mapping[str, Any]) -> bool:
    """Whether a container of the pod has a GPU resource among its limits."""
    return any(name.startswith(_DOMAIN) for limits in _limits(pod) for name in limits)


def pod_of(pod: Mapping[str, Any]) -> GpuPod:
    """Read one pod."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    totals, other = _asked(_limits(pod))
    annotations = metadata.get("annotations") or {}
    return GpuPod(
        metadata.get("namespace", ""),
        metadata.get("name", ""),
        metadata.get("uid", ""),
        spec.get("nodeName", ""),
        status.get("phase", "Unknown"),
        totals.get(contract.RESOURCE_VGPU, 0),
        totals.get(contract.RESOURCE_VGPU_MEMORY),
        totals.get(contract.RESOURCE_VGPU_CORES),
        other,
        _waits_for(status),
        _assigned(annotations, metadata.get("uid", "")),
        {key: value for key, value in annotations.items() if key.startswith(contract.ANNOTATION_PREFIX)},
    )


def _asked(limits_of_containers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, str]]:
    """Add up what containers ask of our resources; return it, and the others as they are written. What is no amount counts among those."""
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


def _assigned(annotations: Mapping[str, str], pod_uid: str) -> tuple[str, ...]:
    text = annotations.get(contract.ANNOTATION_ASSIGNMENT)
    if not text:
        return ()
    try:
        assignment = codec.decode_assignment(text, pod_uid=pod_uid)
    except ContractError:
        return ()
    return tuple(dict.fromkeys(share.device_uuid for container in assignment.containers for share in container.shares))
