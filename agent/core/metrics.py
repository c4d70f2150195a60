# SPDX-License-Identifier: Apache-2.0
"""Builds the metric families of one scrape from a snapshot of the node. Names, labels and units are the contract with dashboards.

Ratios are from 0 to 1, units are base units. A container's series begin with its grant. They end with the grant, or when the container has
ended permanently. After such an end the grant itself stays and counts for its device, until the pod ends or kubelet gives the IDs to
another container. Labels are those of kube-state-metrics where they mean the same (``node``, ``namespace``, ``pod``, ``container``,
``uid``); ``device_uuid`` is the ``UUID`` of dcgm-exporter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.health import HealthState
from agent.core.holdings import Holdings
from agent.core.inventory import DeviceInventory, InventoryDevice
from agent.core.ledger import Grant
from agent.core.mig import MigRecord, gpu_of, identity_of
from agent.core.region_layout import DeviceLimit, Limits
from agent.core.usage import ContainerUsage, DeviceUsage
from aliquot.contract import METRIC_PREFIX, units
from aliquot.contract.model import DeviceShare, Isolation

NANOSECONDS = 1e9


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
class Snapshot:
    """The input of one scrape. Mappings are by grant id, or by grant id and device UUID; unknown values are absent."""

    inventory: DeviceInventory
    grants: Sequence[Grant] = ()
    node: str = ""
    version: str = ""
    shares_per_gpu: int = 0
    usage: Mapping[str, ContainerUsage] = field(default_factory=dict)
    """Absent without a readable region. For MIG instances the driver reports the use; their refusals are not counted."""
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """The limits that the container's shim reads now."""
    utilization: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The recent fraction of GPU time that the container used."""
    overhead_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    holdings: Holdings = field(default_factory=Holdings)
    """What containers use according to the driver, without those on MIG instances."""
    bypassed: Set[str] = frozenset()
    """Ids of grants with at least one process outside the backend."""
    ended: Set[str] = frozenset()
    """Ids of grants of containers that have ended permanently while their pods go on."""
    mig_records: Mapping[str, MigRecord] = field(default_factory=dict)
    """By place: the MIG instances that the agent has made for containers or is making."""

    def made_for(self, grant: Grant, share: DeviceShare) -> MigRecord | None:
        """Return the record of the instance that was made for a share; None if the share has no such instance, or not yet."""
        record = self.mig_records.get(share.device_uuid)
        return record if record is not None and record.uuid and record.grant_id == grant.grant_id else None

    @property
    def containers(self) -> Sequence[Grant]:
        """Return the grants of containers that run or may start."""
        return [grant for grant in self.grants if grant.grant_id not in self.ended]


def families(snapshot: Snapshot) -> Iterable[Family]:
    """Return all families of one scrape."""
    yield from _device_families(snapshot)
    yield from _container_families(snapshot)
    driver = (snapshot.version, snapshot.inventory.driver_version, str(snapshot.inventory.cuda_version))
    build_labels = ("version", "driver_version", "cuda_version")
    yield family("build_info", "Version of the agent and of the driver it uses.", build_labels, [(driver, 1.0)])


def family(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], float]], kind: Kind = Kind.GAUGE
) -> Family:
    """Make a family under Aliquot's prefix."""
    return Family(METRIC_PREFIX + name, kind, text, labels, tuple(samples))


# --- devices --------------------------------------------------------------------------------------------------------

_DEVICE_LABELS = ("node", "device_uuid", "model")
_DEVICE_INFO_LABELS = (*_DEVICE_LABELS, "minor", "pci_bus_id", "numa_node", "mig_enabled")
_INSTANCE_LABELS = (*_DEVICE_LABELS, "mig_uuid", "profile", "gpu_instance_id", "compute_instance_id")

_DeviceValue = Callable[[InventoryDevice], float | None]
_Named = Callable[[InventoryDevice], tuple[str, str, str]]

_READINGS: Sequence[tuple[str, str, _DeviceValue]] = (
    (
        "device_memory_total_bytes",
        "Device memory available to containers: all but the driver's reserve.",
        lambda entry: entry.device.memory_bytes,
    ),
    ("device_memory_used_bytes", "Device memory in use, as the driver counts it.", lambda entry: entry.memory_used_bytes),
    ("device_utilization_ratio", "Fraction of recent time in which the device was busy.", lambda entry: entry.utilization_ratio),
    ("device_health", "1 while the device answers and its health state allows new containers, else 0.", lambda entry: float(entry.healthy)),
)
_SENSORS: Sequence[tuple[str, str, _DeviceValue]] = (
    (
        "device_memory_utilization_ratio",
        "Fraction of recent time in which the device's memory controller was busy.",
        lambda entry: entry.sensors.memory_utilization_ratio,
    ),
    ("device_temperature_celsius", "Temperature of the device.", lambda entry: entry.sensors.temperature_celsius),
    ("device_power_watts", "Power that the device draws.", lambda entry: entry.sensors.power_watts),
    ("device_power_limit_watts", "Power limit in force on the device.", lambda entry: entry.sensors.power_limit_watts),
    ("device_sm_clock_hertz", "Clock frequency of the device's multiprocessors.", lambda entry: entry.sensors.sm_clock_hertz),
)


def _device_families(snapshot: Snapshot) -> Iterable[Family]:
    entries = snapshot.inventory.devices
    answering = [entry for entry in entries if entry.answers]
    promised = {entry.device.uuid: shares_on(entry, snapshot.grants) for entry in entries}

    def named(entry: InventoryDevice) -> tuple[str, str, str]:
        return snapshot.node, entry.device.uuid, entry.device.model

    def gauge(name: str, text: str, value_of: _DeviceValue, of: Sequence[InventoryDevice] = entries) -> Family:
        return family(name, text, _DEVICE_LABELS, [(named(entry), value) for entry in of if (value := value_of(entry)) is not None])

    for name, text, value_of in _READINGS:
        yield gauge(name, text, value_of)
    yield gauge("device_cordoned", "1 while a cordon keeps new containers off the device, else 0.", lambda entry: float(entry.cordoned))
    yield _health_states(entries, named)
    for name, text, value_of in _SENSORS:
        yield gauge(name, text, value_of, answering)
    yield _ecc_errors(answering, named)
    yield gauge(
        "device_memory_allocated_bytes",
        "Device memory granted to containers.",
        lambda entry: _granted_bytes(promised[entry.device.uuid]),
    )
    yield gauge(
        "device_cores_allocated_ratio",
        "Fraction of the device's compute granted to containers.",
        lambda entry: _granted_percent(promised[entry.device.uuid]) / units.WHOLE_GPU_PERCENT,
    )
    yield gauge(
        "device_shares",
        "Maximum number of shares on the device.",
        lambda entry: _share_slots(entry, promised[entry.device.uuid], snapshot.shares_per_gpu),
    )
    yield gauge("device_shares_allocated", "Shares of the device granted to containers.", lambda entry: len(promised[entry.device.uuid]))
    yield family(
        "device_info",
        "Facts about the device in the labels; the value is 1.",
        _DEVICE_INFO_LABELS,
        [((*named(entry), *_facts(entry)), 1.0) for entry in entries],
    )
    yield _instance_info(snapshot, named)
    yield family(
        "device_mig_instance_utilization_ratio",
        "Fraction of recent time in which the MIG instance was busy, if GPU and driver report it; mig_uuid is containers' device_uuid.",
        (*_DEVICE_LABELS, "mig_uuid"),
        [((*named(entry), uuid), ratio) for entry in answering for uuid, ratio in entry.instances_utilization.items()],
    )


def _granted_bytes(shares: Iterable[DeviceShare]) -> int:
    return sum(share.memory_bytes for share in shares)


def _granted_percent(shares: Iterable[DeviceShare]) -> int:
    return sum(share.cores_percent or 0 for share in shares)


def _health_states(entries: Sequence[InventoryDevice], named: _Named) -> Family:
    """Return the health of the GPUs. Args: named: returns the labels of a GPU."""
    return family(
        "device_health_state",
        "1 for the current health state of the device, 0 for the other states.",
        (*_DEVICE_LABELS, "state"),
        [((*named(entry), str(state)), float(entry.state is state)) for entry in entries for state in HealthState],
    )


def _ecc_errors(answering: Sequence[InventoryDevice], named: _Named) -> Family:
    """Return the memory errors of the GPUs that count them. Args: named: returns the labels of a GPU."""
    return family(
        "device_ecc_errors",
        "Memory errors over the lifetime of the device, by type: corrected or uncorrected.",
        (*_DEVICE_LABELS, "type"),
        [
            ((*named(entry), kind), count)
            for entry in answering
            for kind, count in (("corrected", entry.sensors.ecc_corrected), ("uncorrected", entry.sensors.ecc_uncorrected))
            if count is not None
        ],
        Kind.COUNTER,
    )


def _instance_info(snapshot: Snapshot, named: _Named) -> Family:
    """Return the MIG instances with a known identity. Args: named: returns the labels of a GPU."""
    return family(
        "device_mig_instance_info",
        "MIG instances of the device in the labels; the value is 1.",
        _INSTANCE_LABELS,
        [
            ((*named(entry), identity[0], one.profile, *identity[1:]), 1.0)
            for entry in snapshot.inventory.devices
            for one in entry.device.mig_instances
            if (identity := identity_of(one, snapshot.mig_records.get(one.uuid))) is not None
        ],
    )


def shares_on(entry: InventoryDevice, grants: Sequence[Grant]) -> list[DeviceShare]:
    """Return the shares of a GPU that containers hold, including those of its MIG instances. Admin access holds none."""
    return [share for grant in grants if grant.takes_part for share in grant.promised if share.device_uuid in entry.grantable_uuids]


def _share_slots(entry: InventoryDevice, promised: Sequence[DeviceShare], shares_per_gpu: int) -> int:
    shared = any(share.device_uuid == entry.device.uuid for share in promised)
    if shared or not entry.device.mig_enabled:
        return shares_per_gpu
    made_on_demand = max((place.most_on_device for place in entry.device.mig_instances), default=0)
    return made_on_demand + sum(not instance.on_demand for instance in entry.device.mig_instances)


def _facts(entry: InventoryDevice) -> tuple[str, str, str, str]:
    device = entry.device
    numa_node = "" if device.numa_node is None else str(device.numa_node)
    return str(device.minor), device.pci_bus_id, numa_node, str(device.mig_enabled).lower()


# --- containers -----------------------------------------------------------------------------------------------------

_CONTAINER_LABELS = ("node", "namespace", "pod", "container", "device_uuid")


@dataclass(frozen=True, slots=True)
class _Row:
    """One container on one device."""

    grant: Grant
    share: DeviceShare
    labels: tuple[str, ...]
    usage: DeviceUsage | None
    limit: DeviceLimit | None
    overhead_bytes: int | None
    driver_bytes: int | None
    """Use according to the driver: for a MIG instance its total, for a GPU the sum over the container's listed processes."""
    utilization: float | None
    in_force: bool

    @property
    def used_bytes(self) -> int | None:
        if self.grant.under_shim:
            return self.usage.used_bytes if self.usage is not None else None
        return self.driver_bytes

    def count(self, name: str) -> int | None:
        return None if self.usage is None else getattr(self.usage.counts, name)


_RowValue = Callable[[_Row], float | None]

_CONTAINER_GAUGES: Sequence[tuple[str, str, _RowValue]] = (
    ("container_memory_limit_bytes", "Device memory granted to the container.", lambda row: row.share.memory_bytes),
    ("container_memory_used_bytes", "Device memory held by the container's processes.", lambda row: row.used_bytes),
    (
        "container_memory_driver_bytes",
        "Device memory held by the container's processes, as the driver counts it.",
        lambda row: row.driver_bytes,
    ),
    (
        "container_memory_burst_bytes",
        "Limit of device memory and managed memory together, for a container that may burst above its memory limit.",
        lambda row: row.limit.burst_bytes if row.limit is not None and row.limit.burst_bytes > row.limit.memory_bytes else None,
    ),
    (
        "container_memory_virtual_bytes",
        "Managed memory of the container's processes, which the driver may move to the host.",
        lambda row: row.usage.virtual_bytes if row.usage is not None else None,
    ),
    (
        "container_overhead_bytes",
        "Device memory that the driver uses for the container beyond what the shim counts; subtracted from its limit.",
        lambda row: row.overhead_bytes,
    ),
    (
        "container_cores_limit_ratio",
        "Fraction of the device's compute granted to the container; absent without a request for cores.",
        lambda row: row.share.cores_percent / units.WHOLE_GPU_PERCENT if row.share.cores_percent else None,
    ),
    (
        "container_cores_ceiling_ratio",
        "SM limit in force for the container, as a fraction of the device's compute, including borrowed compute.",
        lambda row: row.limit.sm_percent / units.WHOLE_GPU_PERCENT if row.limit is not None and row.limit.sm_percent else None,
    ),
    (
        "container_paused",
        "1 while the container's launches wait because its pod is paused, else 0; for containers under the shim.",
        lambda row: float(row.limit.paused) if row.limit is not None else None,
    ),
    (
        "container_utilization_ratio",
        "Fraction of recent time in which the container's kernels ran: the driver's sample, else the time the shim counted, else absent.",
        lambda row: row.utilization,
    ),
    (
        "container_launches_waiting",
        "Launches waiting for compute, a time slot, a higher priority or a pause to end; at least 1 for a second after a wait for compute.",
        lambda row: float(row.usage.waiting) if row.usage is not None else None,
    ),
)
_CONTAINER_COUNTERS: Sequence[tuple[str, str, _RowValue]] = (
    ("container_refusals", "Allocations refused because of the container's limit.", lambda row: row.count("refusals")),
    (
        "container_launches",
        "Launches of the container on the device; late by up to 1024 launches for a thread that does not wait for the device.",
        lambda row: row.count("launches"),
    ),
    (
        "container_busy_seconds",
        "Device time the shim counted for the container. It times launches only with cores, a priority or memory burst.",
        lambda row: _seconds(row.count("busy_ns")),
    ),
    (
        "container_throttled_seconds",
        "Time the container's launches waited for compute, a time slot, a higher priority or the end of a pause; counted when a wait ends.",
        lambda row: _seconds(row.count("throttled_ns")),
    ),
)


def _container_families(snapshot: Snapshot) -> Iterable[Family]:
    rows = _rows(snapshot)
    for gauges, kind in ((_CONTAINER_GAUGES, Kind.GAUGE), (_CONTAINER_COUNTERS, Kind.COUNTER)):
        for name, text, value_of in gauges:
            samples = [(row.labels, value) for row in rows if (value := value_of(row)) is not None]
            yield family(name, text, _CONTAINER_LABELS, samples, kind)
    yield family(
        "container_processes",
        "Live processes of the container that use the driver.",
        _CONTAINER_LABELS[:-1],
        [(_labels(snapshot, grant), count) for grant in snapshot.containers if (count := _processes(snapshot, grant)) is not None],
    )
    yield family(
        "container_enforcement_in_force",
        "1 while the container's backend enforces its limits on all of its processes, else 0; 0 also while the audit finds it above them.",
        (*_CONTAINER_LABELS, "backend"),
        [((*row.labels, backend_of(row.grant)), float(row.in_force)) for row in rows],
    )
    yield family(
        "container_mig_instance_info",
        "MIG instance of the container and its GPU in the labels; the value is 1.",
        (*_CONTAINER_LABELS, "mig_uuid", "gpu_uuid", "gpu_instance_id"),
        [((*row.labels, *instance), 1.0) for row in rows if (instance := _instance_of(snapshot, row)) is not None],
    )
    models = models_of(snapshot.inventory)
    yield family(
        "container_info",
        "Facts about the container's grant in the labels; the value is 1.",
        (*_CONTAINER_LABELS, "uid", "model", "backend"),
        [((*row.labels, row.grant.pod_uid, models.get(row.share.device_uuid, ""), backend_of(row.grant)), 1.0) for row in rows],
    )


def _rows(snapshot: Snapshot) -> list[_Row]:
    instances_used = {uuid: used for entry in snapshot.inventory.devices for uuid, used in entry.instances_used_bytes.items()}
    instances_busy = {
        uuid: ratio for entry in snapshot.inventory.devices if entry.answers for uuid, ratio in entry.instances_utilization.items()
    }
    rows = []
    for grant in snapshot.containers:
        used, limits = snapshot.usage.get(grant.grant_id), snapshot.limits.get(grant.grant_id)
        by_uuid = {device.uuid: device for device in limits.devices} if limits is not None else {}
        for position, share in enumerate(grant.shares):
            key = (grant.grant_id, share.device_uuid)
            limit = by_uuid.get(share.device_uuid)
            rows.append(
                _Row(
                    grant,
                    share,
                    (*_labels(snapshot, grant), share.device_uuid),
                    usage=used.devices[position] if used is not None else None,
                    limit=limit,
                    overhead_bytes=snapshot.overhead_bytes.get(key),
                    driver_bytes=instances_used.get(share.device_uuid, snapshot.holdings.used_bytes(*key)),
                    utilization=snapshot.utilization.get(key, instances_busy.get(share.device_uuid)),
                    in_force=_in_force(snapshot, grant, share, limit),
                )
            )
    return rows


def _instance_of(snapshot: Snapshot, row: _Row) -> tuple[str, str, str] | None:
    """Return UUID, GPU and GPU instance id of a container's MIG instance; None if it has no instance. An unknown id is empty."""
    gpu_uuid = gpu_of(row.share, snapshot.inventory.parents)
    if row.grant.backend is not Isolation.MIG or gpu_uuid is None:
        return None
    if (record := snapshot.made_for(row.grant, row.share)) is not None:
        return record.uuid, gpu_uuid, "" if record.gpu_instance_id is None else str(record.gpu_instance_id)
    found = snapshot.inventory.mig_instance(row.share.device_uuid)
    identity = identity_of(found[1], None) if found is not None else None
    return (identity[0], gpu_uuid, identity[1]) if identity is not None else None


def _processes(snapshot: Snapshot, grant: Grant) -> int | None:
    """Return the number of a container's processes that use the driver, whether the shim counts them or not."""
    if not grant.under_shim:
        return snapshot.holdings.processes(grant)
    used = snapshot.usage.get(grant.grant_id)
    return used.processes + snapshot.holdings.uncounted.get(grant.grant_id, 0) if used is not None else None


def _in_force(snapshot: Snapshot, grant: Grant, share: DeviceShare, limit: DeviceLimit | None) -> bool:
    """Whether the limit is enforced. The shim needs a region and a limits file with the granted limit; other backends need the device."""
    if grant.grant_id in snapshot.bypassed:
        return False
    if not grant.under_shim:
        return any(share.device_uuid in entry.grantable_uuids for entry in snapshot.inventory.devices)
    return grant.grant_id in snapshot.usage and limit is not None and limit.memory_bytes == share.memory_bytes


def _labels(snapshot: Snapshot, grant: Grant) -> tuple[str, ...]:
    return snapshot.node, grant.namespace, grant.pod, grant.container


def backend_of(grant: Grant) -> str:
    """Return the name of the backend that enforces the grant."""
    return str(grant.backend)


def models_of(inventory: DeviceInventory) -> Mapping[str, str]:
    """Return the model of every GPU and MIG instance by its UUID."""
    models = {entry.device.uuid: entry.device.model for entry in inventory.devices}
    for entry in inventory.devices:
        for instance in entry.device.mig_instances:
            models[instance.uuid] = f"{entry.device.model} MIG {instance.profile}"
    return models


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NANOSECONDS
