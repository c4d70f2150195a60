"""The metric families of one scrape, from a snapshot of the node. Names, labels and units are the contract with dashboards.

Ratios are from 0 to 1. Series of a container exist while its grant does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.inventory import BoardDevice, DeviceBoard
from agent.core.ledger import Grant
from agent.core.region_layout import RegionSnapshot
from proto import units
from proto.contract import METRIC_PREFIX
from proto.model import DeviceShare


class Kind(StrEnum):
    """Prometheus metric types we use here."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family; each sample is its label values, in the order of ``labels``, and a number."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: tuple[tuple[tuple[str, ...], float], ...]


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """What a container's processes use, from its usage region. Sums over living processes, in the order of its shares."""

    used_bytes: tuple[int, ...]
    refusals: tuple[int, ...]
    busy_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape shows."""

    board: DeviceBoard
    grants: Sequence[Grant]
    usage: Mapping[str, ContainerUsage]
    """By grant id; absent where there is no readable region. Of MIG instances the driver tells the use, and nothing counts refusals."""
    utilization: Mapping[tuple[str, str], float]
    """By grant id and device UUID: the share of GPU time the container used lately."""
    version: str
    overhead_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By grant id and device UUID, where it was measured."""


def usage_of(snapshot: RegionSnapshot, dead: Sequence[int], device_count: int) -> ContainerUsage:
    """Add up a region over its living slots. The content is the container's own word, bounds-checked by the decoder."""
    living = [slot for slot in snapshot.slots if slot.index not in dead]
    devices = range(device_count)
    return ContainerUsage(
        used_bytes=tuple(sum(slot.devices[index].used_bytes for slot in living) for index in devices),
        refusals=tuple(sum(slot.devices[index].refusals for slot in living) for index in devices),
        busy_ns=tuple(sum(slot.devices[index].busy_ns for slot in living) for index in devices),
    )


def families(snapshot: Snapshot) -> Iterable[Family]:
    """Return all families of one scrape."""
    yield from _device_families(snapshot)
    yield from _container_families(snapshot)
    driver = (snapshot.version, snapshot.board.driver_version, str(snapshot.board.cuda_version))
    yield _family(
        "build_info", "Version of the agent and of the driver it uses.", ("version", "driver_version", "cuda_version"), [(driver, 1.0)]
    )


_DEVICE_LABELS = ("device_uuid", "model")


def _device_families(snapshot: Snapshot) -> Iterable[Family]:
    entries = snapshot.board.devices
    promised = {entry.device.uuid: _shares_on(entry, snapshot.grants) for entry in entries}

    def gauge(name: str, text: str, value_of: Mapping[str, float | None]) -> Family:
        samples = [
            ((entry.device.uuid, entry.device.model), value) for entry in entries if (value := value_of[entry.device.uuid]) is not None
        ]
        return _family(name, text, _DEVICE_LABELS, samples)

    yield gauge(
        "device_memory_total_bytes",
        "Device memory that containers can be promised.",
        {e.device.uuid: e.device.memory_bytes for e in entries},
    )
    yield gauge(
        "device_memory_used_bytes", "Device memory in use, as the driver counts it.", {e.device.uuid: e.memory_used_bytes for e in entries}
    )
    yield gauge(
        "device_memory_allocated_bytes",
        "Device memory promised to containers.",
        {uuid: sum(share.memory_bytes for share in shares) for uuid, shares in promised.items()},
    )
    yield gauge(
        "device_cores_allocated_ratio",
        "Share of compute reserved by containers.",
        {uuid: sum(share.cores_percent or 0 for share in shares) / units.WHOLE_GPU_PERCENT for uuid, shares in promised.items()},
    )
    yield gauge(
        "device_utilization_ratio", "Share of time the device was busy lately.", {e.device.uuid: e.utilization_ratio for e in entries}
    )
    yield gauge(
        "device_health",
        "1 while the device answers and may be given to containers, else 0.",
        {e.device.uuid: float(e.healthy) for e in entries},
    )


def _shares_on(entry: BoardDevice, grants: Sequence[Grant]) -> list[DeviceShare]:
    return [share for grant in grants for share in grant.shares if share.device_uuid in entry.grantable_uuids]


_CONTAINER_LABELS = ("namespace", "pod", "container", "device_uuid")


def _container_families(snapshot: Snapshot) -> Iterable[Family]:
    limits, used, overhead, refusals, utilization, info = [], [], [], [], [], []
    models = _models(snapshot.board)
    instances_used = {uuid: used for entry in snapshot.board.devices for uuid, used in entry.instances_used_bytes.items()}
    for grant in snapshot.grants:
        usage = snapshot.usage.get(grant.grant_id)
        for index, share in enumerate(grant.shares):
            labels = (grant.namespace, grant.pod, grant.container, share.device_uuid)
            limits.append((labels, share.memory_bytes))
            backend = "shim" if grant.under_shim else "mig"
            info.append(((*labels, grant.pod_uid, models.get(share.device_uuid, ""), backend), 1.0))
            if usage is not None:
                used.append((labels, usage.used_bytes[index]))
                refusals.append((labels, usage.refusals[index]))
            elif share.device_uuid in instances_used:
                used.append((labels, instances_used[share.device_uuid]))
            if (extra := snapshot.overhead_bytes.get((grant.grant_id, share.device_uuid))) is not None:
                overhead.append((labels, extra))
            if (ratio := snapshot.utilization.get((grant.grant_id, share.device_uuid))) is not None:
                utilization.append((labels, ratio))
    yield _family("container_memory_limit_bytes", "Device memory the container was granted.", _CONTAINER_LABELS, limits)
    yield _family("container_memory_used_bytes", "Device memory the container's processes hold.", _CONTAINER_LABELS, used)
    yield _family(
        "container_overhead_bytes",
        "Device memory the driver uses for the container beyond what is counted; taken off its limit.",
        _CONTAINER_LABELS,
        overhead,
    )
    yield _family("container_refusals", "Allocations refused because of the container's limit.", _CONTAINER_LABELS, refusals, Kind.COUNTER)
    yield _family("container_utilization_ratio", "Share of the device's time the container used lately.", _CONTAINER_LABELS, utilization)
    yield _family("container_info", "What the container was granted.", (*_CONTAINER_LABELS, "pod_uid", "model", "backend"), info)


def _models(board: DeviceBoard) -> Mapping[str, str]:
    models = {entry.device.uuid: entry.device.model for entry in board.devices}
    for entry in board.devices:
        for instance in entry.device.mig_instances:
            models[instance.uuid] = f"{entry.device.model} MIG {instance.profile}"
    return models


def _family(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], float]], kind: Kind = Kind.GAUGE
) -> Family:
    return Family(METRIC_PREFIX + name, kind, text, labels, tuple(samples))


@dataclass(frozen=True, slots=True)
class BusySample:
    """A container's paid GPU time at a moment, per device."""

    at: float
    busy_ns: tuple[int, ...]


def utilization_between(earlier: BusySample, later: BusySample) -> tuple[float, ...]:
    """Return each device's share of time used between two samples. A process that ended takes its time along: then the least known is 0."""
    elapsed_ns = (later.at - earlier.at) * 1e9
    return tuple(min(1.0, max(0.0, (after - before) / elapsed_ns)) for before, after in zip(earlier.busy_ns, later.busy_ns, strict=True))
