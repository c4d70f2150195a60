# SPDX-License-Identifier: Apache-2.0
"""A cluster's GPUs as the commands show them: nodes, GPUs and shares, from GpuNode objects and the agents' metrics.

Either source is enough to list the GPUs: the metrics without the object, or the object when the agent does not answer.

Invariant: an unknown value is None, never zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot_cli.scrape import Sample, Samples, read_metrics

_DEVICE_VALUES = {
    "device_memory_total_bytes": "total_bytes",
    "device_memory_used_bytes": "used_bytes",
    "device_memory_allocated_bytes": "allocated_bytes",
    "device_cores_allocated_ratio": "cores_allocated_ratio",
    "device_utilization_ratio": "utilization_ratio",
    "device_temperature_celsius": "temperature_celsius",
    "device_power_watts": "power_watts",
    "device_shares": "shares_total",
    "device_shares_allocated": "shares_allocated",
}
_SHARE_VALUES = {
    "container_memory_limit_bytes": "limit_bytes",
    "container_memory_used_bytes": "used_bytes",
    "container_memory_driver_bytes": "driver_bytes",
    "container_cores_limit_ratio": "cores_limit_ratio",
    "container_utilization_ratio": "utilization_ratio",
    "container_busy_seconds_total": "busy_seconds",
    "container_throttled_seconds_total": "throttled_seconds",
    "container_refusals_total": "refusals",
    "container_launches_waiting": "waiting",
    "container_paused": "paused",
    "container_enforcement_in_force": "in_force",
}
_FURTHER = ("device_info", "device_health", "device_mig_instance_info", "container_info", "build_info")
WANTED = (*_DEVICE_VALUES, *_SHARE_VALUES, *_FURTHER)
"""The metrics that ``node_of`` reads, without the prefix."""


@dataclass(frozen=True, slots=True)
class Share:
    """One container's share of one GPU or MIG instance."""

    node: str
    gpu_uuid: str
    namespace: str
    pod: str
    container: str
    device_uuid: str
    """The GPU, or the MIG instance."""
    uid: str = ""
    backend: str = ""
    limit_bytes: float | None = None
    used_bytes: float | None = None
    driver_bytes: float | None = None
    cores_limit_ratio: float | None = None
    utilization_ratio: float | None = None
    """Share of the GPU's time. None until the agent has taken two samples; see ``with_rates``."""
    busy_seconds: float | None = None
    throttled_seconds: float | None = None
    throttled_ratio: float | None = None
    """Share of the time between two samples; None in the first."""
    refusals: float | None = None
    waiting: float | None = None
    paused: float | None = None
    in_force: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Return what identifies the share in every sample."""
        return self.uid, self.container, self.device_uuid

    @property
    def used_of_limit(self) -> float | None:
        """Return the memory in use divided by the limit; None where either is unknown."""
        return None if self.used_bytes is None or not self.limit_bytes else self.used_bytes / self.limit_bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    node: str
    uuid: str
    model: str = ""
    minor: int | None = None
    mig_enabled: bool = False
    healthy: bool | None = None
    trouble: str = ""
    cordoned: bool = False
    total_bytes: float | None = None
    used_bytes: float | None = None
    allocated_bytes: float | None = None
    cores_allocated_ratio: float | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    shares_total: float | None = None
    shares_allocated: float | None = None
    shares: tuple[Share, ...] = ()

    @property
    def state(self) -> str:
        """Return the health, and whether the GPU is cordoned: ``healthy,cordoned``."""
        words = ["unknown" if self.healthy is None else "healthy" if self.healthy else "unhealthy"]
        return ",".join(words + ["cordoned"] * self.cordoned)

    @property
    def name(self) -> str:
        """Return the name that users write: NODE/NUMBER."""
        return f"{self.node}/{'?' if self.minor is None else self.minor}"


@dataclass(frozen=True, slots=True)
class Node:
    """One node. ``trouble`` says why its usage is unknown; empty when its agent answered."""

    name: str
    gpus: tuple[Gpu, ...] = ()
    driver_version: str = ""
    agent_version: str = ""
    cordoned: bool = False
    trouble: str = ""

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return the shares of all its GPUs."""
        return tuple(share for gpu in self.gpus for share in gpu.shares)

    def total(self, value: str) -> float | None:
        """Add up an attribute over its GPUs; None when it is unknown on every GPU."""
        known = [number for gpu in self.gpus if (number := getattr(gpu, value)) is not None]
        return sum(known) if known else None


def node_of(name: str, described: GpuNode | None, metrics: str | None, trouble: str = "") -> Node:
    """Combine the two sources of one node.

    Args: described: its GpuNode object. metrics: its agent's metrics page. trouble: why there is no page.
    """
    samples = read_metrics(metrics or "", WANTED)
    build = samples["build_info"][0].labels if samples["build_info"] else {}
    return Node(
        name,
        tuple(sorted(_gpus(name, described, samples), key=lambda gpu: (gpu.minor is None, gpu.minor or 0, gpu.uuid))),
        driver_version=build.get("driver_version") or (described.driver_version if described is not None else ""),
        agent_version=build.get("version") or (described.agent_version if described is not None else ""),
        cordoned=described is not None and described.cordoned,
        trouble=trouble,
    )


def _gpus(node: str, described: GpuNode | None, samples: Samples) -> Iterator[Gpu]:
    """Yield the node's GPUs: those of the object, and those that only the metrics have."""
    gpus = {entry.device.uuid: _described(node, entry, described) for entry in described.devices} if described is not None else {}
    for sample in samples["device_info"]:
        uuid = sample.labels.get("device_uuid", "")
        gpus[uuid] = _measured(gpus.get(uuid, Gpu(node, uuid)), sample)
    values = _by_device(samples, _DEVICE_VALUES)
    health = {sample.labels.get("device_uuid", ""): bool(sample.value) for sample in samples["device_health"]}
    shares: dict[str, list[Share]] = {}
    for share in _shares(node, samples):
        shares.setdefault(share.gpu_uuid, []).append(share)
    for uuid, gpu in gpus.items():
        yield replace(gpu, healthy=health.get(uuid, gpu.healthy), shares=tuple(shares.get(uuid, ())), **values.get(uuid, {}))


def with_rates(now: Sequence[Node], before: Sequence[Node], seconds: float) -> list[Node]:
    """Return the nodes of a sample with rates since the sample before it.

    The throttled part of the time is always computed. The utilisation is computed only where the agent does not report it.

    Args: seconds: time between the two samples.
    """
    earlier = {share.key: share for node in before for share in node.shares}

    def rated(share: Share) -> Share:
        then = earlier.get(share.key)
        if then is None or seconds <= 0:
            return share
        utilization = share.utilization_ratio
        if utilization is None and (busy := _added(share.busy_seconds, then.busy_seconds)) is not None:
            utilization = min(1.0, busy / seconds)
        throttled = _added(share.throttled_seconds, then.throttled_seconds)
        return replace(share, utilization_ratio=utilization, throttled_ratio=None if throttled is None else throttled / seconds)

    return [replace(node, gpus=tuple(replace(gpu, shares=tuple(map(rated, gpu.shares))) for gpu in node.gpus)) for node in now]


def lacks_rates(nodes: Sequence[Node]) -> bool:
    """Whether a second sample would give a utilisation that the first one lacks."""
    return any(share.utilization_ratio is None and share.busy_seconds for node in nodes for share in node.shares)


def _added(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else max(0.0, now - then)


def _described(node: str, entry: GpuDevice, described: GpuNode) -> Gpu:
    device = entry.device
    return Gpu(
        node,
        device.uuid,
        model=device.model,
        minor=device.minor,
        mig_enabled=device.mig_enabled,
        healthy=entry.healthy,
        trouble=entry.trouble,
        cordoned=described.is_cordoned(device.uuid),
        total_bytes=device.memory_bytes,
    )


def _measured(gpu: Gpu, sample: Sample) -> Gpu:
    minor = sample.labels.get("minor", "")
    return replace(
        gpu,
        model=sample.labels.get("model", gpu.model),
        minor=int(minor) if minor.isdigit() else gpu.minor,
        mig_enabled=sample.labels.get("mig_enabled") == "true",
    )


def _shares(node: str, samples: Samples) -> list[Share]:
    gpu_of_instance = {
        sample.labels.get("mig_uuid", ""): sample.labels.get("device_uuid", "") for sample in samples["device_mig_instance_info"]
    }
    values: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, field in _SHARE_VALUES.items():
        for sample in samples[name]:
            values.setdefault(_share_key(sample), {})[field] = sample.value
    found = []
    for sample in samples["container_info"]:
        namespace, pod, container, uuid = _share_key(sample)
        gpu_uuid = gpu_of_instance.get(uuid, uuid)
        labels = sample.labels
        share = Share(node, gpu_uuid, namespace, pod, container, uuid, uid=labels.get("uid", ""), backend=labels.get("backend", ""))
        found.append(replace(share, **values.get((namespace, pod, container, uuid), {})))
    return sorted(found, key=lambda share: (share.namespace, share.pod, share.container, share.device_uuid))


def _share_key(sample: Sample) -> tuple[str, str, str, str]:
    labels = sample.labels
    return labels.get("namespace", ""), labels.get("pod", ""), labels.get("container", ""), labels.get("device_uuid", "")


def _by_device(samples: Samples, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for name, field in names.items():
        for sample in samples[name]:
            values.setdefault(sample.labels.get("device_uuid", ""), {})[field] = sample.value
    return values
