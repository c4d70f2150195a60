"""A cluster's GPUs as the commands show them: nodes, GPUs and slices, from GpuNode objects and the agents' metrics.

Either source alone makes a picture: without the objects the metrics name the GPUs, without an agent's answer the object does. What is not
known is None and never a zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aliquot.cli.scrape import Sample, read_metrics
from proto.gpunode import GpuDevice, GpuNode

_DEVICE_VALUES = {
    "device_memory_total_bytes": "total_bytes",
    "device_memory_used_bytes": "used_bytes",
    "device_memory_allocated_bytes": "allocated_bytes",
    "device_cores_allocated_ratio": "cores_allocated_ratio",
    "device_utilization_ratio": "utilization_ratio",
    "device_temperature_celsius": "temperature_celsius",
    "device_power_watts": "power_watts",
    "device_shares": "shares",
    "device_shares_allocated": "shares_allocated",
}
_SLICE_VALUES = {
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
WANTED = (*_DEVICE_VALUES, *_SLICE_VALUES, *_FURTHER)
"""The metrics that are read."""


@dataclass(frozen=True, slots=True)
class Slice:
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
    """None also where the agent has looked once only, which shows no rate; see ``since``."""
    busy_seconds: float | None = None
    throttled_seconds: float | None = None
    throttled_ratio: float | None = None
    """Over the time between two looks; None at the first."""
    refusals: float | None = None
    waiting: float | None = None
    paused: float | None = None
    in_force: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What names it over time."""
        return self.uid, self.container, self.device_uuid

    @property
    def used_of_limit(self) -> float | None:
        """Memory in use as a share of the limit."""
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
    shares: float | None = None
    shares_allocated: float | None = None
    slices: tuple[Slice, ...] = ()

    @property
    def state(self) -> str:
        """What an administrator wants to know first."""
        words = ["unknown" if self.healthy is None else "healthy" if self.healthy else "unhealthy"]
        return ",".join(words + ["cordoned"] * self.cordoned)

    @property
    def name(self) -> str:
        """How people name it: node and number."""
        return f"{self.node}/{'?' if self.minor is None else self.minor}"


@dataclass(frozen=True, slots=True)
class Node:
    """One node. ``trouble`` says why nothing is known of its use; empty when its agent answered."""

    name: str
    gpus: tuple[Gpu, ...] = ()
    driver_version: str = ""
    agent_version: str = ""
    cordoned: bool = False
    trouble: str = ""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All slices of its GPUs."""
        return tuple(one for gpu in self.gpus for one in gpu.slices)

    def total(self, value: str) -> float | None:
        """Add up a figure over its GPUs; None when it is known of none."""
        known = [number for gpu in self.gpus if (number := getattr(gpu, value)) is not None]
        return sum(known) if known else None


def node_of(name: str, described: GpuNode | None, metrics: str | None, trouble: str = "") -> Node:
    """Put one node together.

    Args: described: its object. metrics: its agent's page. trouble: why there is no page.
    """
    samples = read_metrics(metrics or "", WANTED)
    gpus = {entry.device.uuid: _described(name, entry, described) for entry in described.devices} if described is not None else {}
    for sample in samples["device_info"]:
        uuid = sample.labels.get("device_uuid", "")
        gpus[uuid] = _measured(gpus.get(uuid, Gpu(name, uuid)), sample)
    values = _by_device(samples, _DEVICE_VALUES)
    healths = {sample.labels.get("device_uuid", ""): bool(sample.value) for sample in samples["device_health"]}
    slices = _slices(name, samples)
    complete = []
    for uuid, gpu in gpus.items():
        mine = tuple(one for one in slices if one.gpu_uuid == uuid)
        measured = replace(gpu, healthy=healths.get(uuid, gpu.healthy), slices=mine, **values.get(uuid, {}))
        complete.append(measured)
    build = samples["build_info"][0].labels if samples["build_info"] else {}
    return Node(
        name,
        tuple(sorted(complete, key=lambda gpu: (gpu.minor is None, gpu.minor or 0, gpu.uuid))),
        driver_version=build.get("driver_version") or (described.driver_version if described is not None else ""),
        agent_version=build.get("version") or (described.agent_version if described is not None else ""),
        cordoned=described is not None and described.cordoned,
        trouble=trouble,
    )


def since(now: Sequence[Node], before: Sequence[Node], seconds: float) -> list[Node]:
    """Return the nodes with what took place between two looks: which part of the time was used and waited, where the agent does not say."""
    earlier = {one.key: one for node in before for one in node.slices}

    def rated(one: Slice) -> Slice:
        then = earlier.get(one.key)
        if then is None or seconds <= 0:
            return one
        used = one.utilization_ratio
        if used is None and (busy := _added(one.busy_seconds, then.busy_seconds)) is not None:
            used = min(1.0, busy / seconds)
        waited = _added(one.throttled_seconds, then.throttled_seconds)
        return replace(one, utilization_ratio=used, throttled_ratio=None if waited is None else waited / seconds)

    return [replace(node, gpus=tuple(replace(gpu, slices=tuple(rated(one) for one in gpu.slices)) for gpu in node.gpus)) for node in now]


def lacks_rates(nodes: Sequence[Node]) -> bool:
    """Whether a second look would tell of a slice what one look cannot."""
    return any(one.utilization_ratio is None and one.busy_seconds for node in nodes for one in node.slices)


def _added(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else max(0.0, now - then)


def _described(node: str, entry: GpuDevice, of: GpuNode) -> Gpu:
    device = entry.device
    return Gpu(
        node,
        device.uuid,
        model=device.model,
        minor=device.minor,
        mig_enabled=device.mig_enabled,
        healthy=entry.healthy,
        trouble=entry.trouble,
        cordoned=of.is_cordoned(device.uuid),
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


def _slices(node: str, samples: Mapping[str, list[Sample]]) -> list[Slice]:
    gpu_of_instance = {
        sample.labels.get("mig_uuid", ""): sample.labels.get("device_uuid", "") for sample in samples["device_mig_instance_info"]
    }
    values: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, field in _SLICE_VALUES.items():
        for sample in samples[name]:
            values.setdefault(_slice_key(sample), {})[field] = sample.value
    found = []
    for sample in samples["container_info"]:
        namespace, pod, container, uuid = _slice_key(sample)
        gpu_uuid = gpu_of_instance.get(uuid, uuid)
        labels = sample.labels
        one = Slice(node, gpu_uuid, namespace, pod, container, uuid, uid=labels.get("uid", ""), backend=labels.get("backend", ""))
        found.append(replace(one, **values.get((namespace, pod, container, uuid), {})))
    return sorted(found, key=lambda one: (one.namespace, one.pod, one.container, one.device_uuid))


def _slice_key(sample: Sample) -> tuple[str, str, str, str]:
    labels = sample.labels
    return labels.get("namespace", ""), labels.get("pod", ""), labels.get("container", ""), labels.get("device_uuid", "")


def _by_device(samples: Mapping[str, list[Sample]], names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for name, field in names.items():
        for sample in samples[name]:
            values.setdefault(sample.labels.get("device_uuid", ""), {})[field] = sample.value
    return values
