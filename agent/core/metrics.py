"""The metric families of one scrape, from a snapshot of the node. Names, labels and units are the contract with dashboards.

Ratios are from 0 to 1, units are base units. Series of a container exist from the moment its grant is made, and end when the container has
ended for good, or with its grant: that of a container whose pod goes on stays, and counts for its device, until kubelet gives the IDs
to another. Labels are those of kube-state-metrics where they mean the same (``node``, ``namespace``, ``pod``, ``container``, ``uid``);
``device_uuid`` is the ``UUID`` of dcgm-exporter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.health import HealthState
from agent.core.holdings import Holdings
from agent.core.inventory import BoardDevice, DeviceBoard
from agent.core.ledger import Grant
from agent.core.mig import MigRecord, gpu_of, identity_of
from agent.core.region_layout import DeviceLimit, Limits
from agent.core.usage import ContainerUsage, DeviceUsage
from proto import units
from proto.contract import METRIC_PREFIX
from proto.model import DeviceShare, Isolation

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
    """What one scrape shows. Mappings are by grant id, or by grant id and device UUID; what is not known is absent."""

    board: DeviceBoard
    grants: Sequence[Grant] = ()
    node: str = ""
    version: str = ""
    shares_per_gpu: int = 0
    usage: Mapping[str, ContainerUsage] = field(default_factory=dict)
    """Absent where there is no readable region. Of MIG instances the driver tells the use, and nothing counts refusals."""
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """As the container's shim reads them now."""
    utilization: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The share of GPU time the container used lately."""
    overhead_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    holdings: Holdings = field(default_factory=Holdings)
    """What the driver says containers use, those on MIG instances aside."""
    bypassed: Set[str] = frozenset()
    """Ids of grants that their backend does not hold, or not every process of."""
    ended: Set[str] = frozenset()
    """Grants of containers that have ended for good, while their pods go on."""
    mig_records: Mapping[str, MigRecord] = field(default_factory=dict)
    """By place, the MIG instances that were made for containers or are being made."""

    def made_for(self, grant: Grant, share: DeviceShare) -> MigRecord | None:
        """Return the record of the instance that was made for a share; None while there is none, and of shares that name none."""
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
    driver = (snapshot.version, snapshot.board.driver_version, str(snapshot.board.cuda_version))
    build_labels = ("version", "driver_version", "cuda_version")
    yield family("build_info", "Version of the agent and of the driver it uses.", build_labels, [(driver, 1.0)])
    yield family("grants", "Containers on this node that hold devices.", ("node",), [((snapshot.node,), len(snapshot.grants))])


def family(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], float]], kind: Kind = Kind.GAUGE
) -> Family:
    """Make a family of ours."""
    return Family(METRIC_PREFIX + name, kind, text, labels, tuple(samples))


# --- devices --------------------------------------------------------------------------------------------------------

_DEVICE_LABELS = ("node", "device_uuid", "model")
_DEVICE_INFO_LABELS = (*_DEVICE_LABELS, "minor", "pci_bus_id", "numa_node", "mig_enabled")
_INSTANCE_LABELS = (*_DEVICE_LABELS, "mig_uuid", "profile", "gpu_instance_id", "compute_instance_id")

_DeviceValue = Callable[[BoardDevice], float | None]

_READINGS: Sequence[tuple[str, str, _DeviceValue]] = (
    ("device_memory_total_bytes", "Device memory that containers can be promised.", lambda entry: entry.device.memory_bytes),
    ("device_memory_used_bytes", "Device memory in use, as the driver counts it.", lambda entry: entry.memory_used_bytes),
    ("device_utilization_ratio", "Share of time the device was busy lately.", lambda entry: entry.utilization_ratio),
    ("device_health", "1 while the device answers and may be given to containers, else 0.", lambda entry: float(entry.healthy)),
)
_SENSORS: Sequence[tuple[str, str, _DeviceValue]] = (
    (
        "device_memory_utilization_ratio",
        "Share of time the device's memory controller was busy lately.",
        lambda entry: entry.sensors.memory_utilization_ratio,
    ),
    ("device_temperature_celsius", "Temperature of the device.", lambda entry: entry.sensors.temperature_celsius),
    ("device_power_watts", "Power the device draws.", lambda entry: entry.sensors.power_watts),
    ("device_power_limit_watts", "Power the device is held to.", lambda entry: entry.sensors.power_limit_watts),
    ("device_sm_clock_hertz", "Clock of the device's multiprocessors.", lambda entry: entry.sensors.sm_clock_hertz),
)


def _device_families(snapshot: Snapshot) -> Iterable[Family]:
    entries = snapshot.board.devices
    answering = [entry for entry in entries if entry.answers]
    promised = {entry.device.uuid: shares_on(entry, snapshot.grants) for entry in entries}

    def named(entry: BoardDevice) -> tuple[str, str, str]:
        return snapshot.node, entry.device.uuid, entry.device.model

    def gauge(name: str, text: str, value_of: _DeviceValue, of: Sequence[BoardDevice] = entries) -> Family:
        return family(name, text, _DEVICE_LABELS, [(named(entry), value) for entry in of if (value := value_of(entry)) is not None])

    for name, text, value_of in _READINGS:
        yield gauge(name, text, value_of)
    yield gauge("device_cordoned", "1 while an administrator keeps new work off the device, else 0.", lambda entry: float(entry.cordoned))
    yield family(
        "device_health_state",
        "1 for the state the device is in, 0 for the others.",
        (*_DEVICE_LABELS, "state"),
        [((*named(entry), str(state)), float(entry.state is state)) for entry in entries for state in HealthState],
    )
    for name, text, value_of in _SENSORS:
        yield gauge(name, text, value_of, answering)
    yield family(
        "device_ecc_errors",
        "Memory errors in the life of the device, corrected and uncorrected.",
        (*_DEVICE_LABELS, "type"),
        [
            ((*named(entry), kind), count)
            for entry in answering
            for kind, count in (("corrected", entry.sensors.ecc_corrected), ("uncorrected", entry.sensors.ecc_uncorrected))
            if count is not None
        ],
        Kind.COUNTER,
    )
    yield gauge(
        "device_memory_allocated_bytes",
        "Device memory promised to containers.",
        lambda entry: sum(share.memory_bytes for share in promised[entry.device.uuid]),
    )
    yield gauge(
        "device_cores_allocated_ratio",
        "Share of compute reserved by containers.",
        lambda entry: sum(share.cores_percent or 0 for share in promised[entry.device.uuid]) / units.WHOLE_GPU_PERCENT,
    )
    yield gauge("device_shares", "Containers that can share the device.", lambda entry: _share_slots(entry, snapshot.shares_per_gpu))
    yield gauge("device_shares_allocated", "Containers that share the device.", lambda entry: len(promised[entry.device.uuid]))
    yield family(
        "device_info",
        "What the device is.",
        _DEVICE_INFO_LABELS,
        [((*named(entry), *_facts(entry)), 1.0) for entry in entries],
    )
    yield family(
        "device_mig_instance_info",
        "The device's MIG instances.",
        _INSTANCE_LABELS,
        [
            ((*named(entry), identity[0], one.profile, *identity[1:]), 1.0)
            for entry in entries
            for one in entry.device.mig_instances
            if (identity := identity_of(one, snapshot.mig_records.get(one.uuid))) is not None
        ],
    )
    yield family(
        "device_mig_instance_utilization_ratio",
        "Share of time the MIG instance was busy lately, where the GPU and its driver tell; mig_uuid as containers' device_uuid has it.",
        (*_DEVICE_LABELS, "mig_uuid"),
        [((*named(entry), uuid), ratio) for entry in answering for uuid, ratio in entry.instances_utilization.items()],
    )


def shares_on(entry: BoardDevice, grants: Sequence[Grant]) -> list[DeviceShare]:
    """Return the shares that containers hold of a GPU, its MIG instances included."""
    return [share for grant in grants for share in grant.shares if share.device_uuid in entry.grantable_uuids]


def _share_slots(entry: BoardDevice, shares_per_gpu: int) -> int:
    if not entry.device.mig_enabled:
        return shares_per_gpu
    made_on_demand = max((place.most_on_device for place in entry.device.mig_instances), default=0)
    return made_on_demand + sum(not instance.on_demand for instance in entry.device.mig_instances)


def _facts(entry: BoardDevice) -> tuple[str, str, str, str]:
    device = entry.device
    numa_node = "" if device.numa_node is None else str(device.numa_node)
    return str(device.minor), device.pci_bus_id, numa_node, str(device.mig_enabled).lower()


# --- containers -----------------------------------------------------------------------------------------------------

_CONTAINER_LABELS = ("node", "namespace", "pod", "container", "device_uuid")


@dataclass(frozen=True, slots=True)
class _Row:
    """One container on one device, with what is known of it."""

    grant: Grant
    share: DeviceShare
    labels: tuple[str, ...]
    usage: DeviceUsage | None
    limit: DeviceLimit | None
    overhead_bytes: int | None
    driver_bytes: int | None
    """What the driver says: of an instance the whole, of a GPU what it lists for the container's processes."""
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
    ("container_memory_limit_bytes", "Device memory the container was granted.", lambda row: row.share.memory_bytes),
    ("container_memory_used_bytes", "Device memory the container's processes hold.", lambda row: row.used_bytes),
    (
        "container_memory_driver_bytes",
        "Device memory of the container's processes, as the driver lists them.",
        lambda row: row.driver_bytes,
    ),
    (
        "container_memory_burst_bytes",
        "Ceiling of device memory and memory that may leave the device, where the container may have more than its limit.",
        lambda row: row.limit.burst_bytes if row.limit is not None and row.limit.burst_bytes > row.limit.memory_bytes else None,
    ),
    (
        "container_memory_virtual_bytes",
        "Memory of the container's processes that may leave the device.",
        lambda row: row.usage.virtual_bytes if row.usage is not None else None,
    ),
    (
        "container_overhead_bytes",
        "Device memory the driver uses for the container beyond what is counted; taken off its limit.",
        lambda row: row.overhead_bytes,
    ),
    (
        "container_cores_limit_ratio",
        "Share of the device's compute the container was granted; absent where it may take what is free.",
        lambda row: row.share.cores_percent / units.WHOLE_GPU_PERCENT if row.share.cores_percent else None,
    ),
    (
        "container_cores_ceiling_ratio",
        "Share of the device's compute the container is held to now, what it borrows included.",
        lambda row: row.limit.sm_percent / units.WHOLE_GPU_PERCENT if row.limit is not None and row.limit.sm_percent else None,
    ),
    (
        "container_paused",
        "1 while the container's launches wait because its pod is paused, else 0; of containers under the shim.",
        lambda row: float(row.limit.paused) if row.limit is not None else None,
    ),
    (
        "container_utilization_ratio",
        "Share of the last seconds in which the container's kernels ran: the driver's sample, else what was paid for, else absent.",
        lambda row: row.utilization,
    ),
    (
        "container_launches_waiting",
        "Launches that wait now: for compute, a turn, a higher priority, a pause to end; at least 1 for a second after one for compute.",
        lambda row: float(row.usage.waiting) if row.usage is not None else None,
    ),
)
_CONTAINER_COUNTERS: Sequence[tuple[str, str, _RowValue]] = (
    ("container_refusals", "Allocations refused because of the container's limit.", lambda row: row.count("refusals")),
    (
        "container_launches",
        "Work the container launched on the device; late by up to 1024 launches of a thread that does not wait for the device.",
        lambda row: row.count("launches"),
    ),
    (
        "container_busy_seconds",
        "Device time the container paid for, which only paced launches do: by cores, priority or memory burst.",
        lambda row: _seconds(row.count("busy_ns")),
    ),
    (
        "container_throttled_seconds",
        "Time the container's launches waited: for compute, a turn, a higher priority, a pause to end; counted when a wait is over.",
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
        "Living processes of the container that use the driver.",
        _CONTAINER_LABELS[:-1],
        [(_labels(snapshot, grant), count) for grant in snapshot.containers if (count := _processes(snapshot, grant)) is not None],
    )
    yield family(
        "container_enforcement_in_force",
        "1 while the backend that holds the container to its limit is in place and no process of it is outside, else 0.",
        (*_CONTAINER_LABELS, "backend"),
        [((*row.labels, backend_of(row.grant)), float(row.in_force)) for row in rows],
    )
    yield family(
        "container_mig_instance_info",
        "The container's MIG instance, and its GPU.",
        (*_CONTAINER_LABELS, "mig_uuid", "gpu_uuid", "gpu_instance_id"),
        [((*row.labels, *instance), 1.0) for row in rows if (instance := _instance_of(snapshot, row)) is not None],
    )
    models = models_of(snapshot.board)
    yield family(
        "container_info",
        "What the container was granted.",
        (*_CONTAINER_LABELS, "uid", "model", "backend"),
        [((*row.labels, row.grant.pod_uid, models.get(row.share.device_uuid, ""), backend_of(row.grant)), 1.0) for row in rows],
    )


def _rows(snapshot: Snapshot) -> list[_Row]:
    instances_used = {uuid: used for entry in snapshot.board.devices for uuid, used in entry.instances_used_bytes.items()}
    instances_busy = {
        uuid: ratio for entry in snapshot.board.devices if entry.answers for uuid, ratio in entry.instances_utilization.items()
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
    """Return UUID, GPU and GPU instance id of a container's MIG instance; None while there is none, the id empty where not known."""
    gpu_uuid = gpu_of(row.share, snapshot.board.parents)
    if row.grant.backend is not Isolation.MIG or gpu_uuid is None:
        return None
    if (record := snapshot.made_for(row.grant, row.share)) is not None:
        return record.uuid, gpu_uuid, "" if record.gpu_instance_id is None else str(record.gpu_instance_id)
    found = snapshot.board.mig_instance(row.share.device_uuid)
    identity = identity_of(found[1], None) if found is not None else None
    return (identity[0], gpu_uuid, identity[1]) if identity is not None else None


def _processes(snapshot: Snapshot, grant: Grant) -> int | None:
    """Return how many processes of a container use the driver: those that the shim counts, and those it does not."""
    if not grant.under_shim:
        return snapshot.holdings.processes(grant)
    used = snapshot.usage.get(grant.grant_id)
    return used.processes + snapshot.holdings.uncounted.get(grant.grant_id, 0) if used is not None else None


def _in_force(snapshot: Snapshot, grant: Grant, share: DeviceShare, limit: DeviceLimit | None) -> bool:
    """Whether the share is held: the shim needs the granted limit to read and a region to count in, MIG the instance, others the GPU."""
    if grant.grant_id in snapshot.bypassed:
        return False
    if not grant.under_shim:
        return any(share.device_uuid in entry.grantable_uuids for entry in snapshot.board.devices)
    return grant.grant_id in snapshot.usage and limit is not None and limit.memory_bytes == share.memory_bytes


def _labels(snapshot: Snapshot, grant: Grant) -> tuple[str, ...]:
    return snapshot.node, grant.namespace, grant.pod, grant.container


def backend_of(grant: Grant) -> str:
    """Name what holds the container to its share."""
    return str(grant.backend)


def models_of(board: DeviceBoard) -> Mapping[str, str]:
    """Return the model of every GPU and MIG instance by its UUID."""
    models = {entry.device.uuid: entry.device.model for entry in board.devices}
    for entry in board.devices:
        for instance in entry.device.mig_instances:
            models[instance.uuid] = f"{entry.device.model} MIG {instance.profile}"
    return models


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NANOSECONDS
