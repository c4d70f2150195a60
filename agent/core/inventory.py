"""What the node has: the GPUs as last read, their health, and what is advertised of them.

A ``DriverReading`` is one look at the driver; a ``DeviceBoard`` is what we make of all looks so far. A GPU that stops answering stays
on the board as unhealthy, because kubelet must see its IDs as Unhealthy and not vanish, and returns by itself when it answers again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.core.health import Answer, HealthState, HealthTable, Silence
from agent.core.sensors import NO_SENSORS, DeviceSensors
from placement import mig
from proto import codec, contract, units
from proto.errors import ContractError
from proto.gpunode import Cordon
from proto.model import Device, DeviceShare, Link, MigInstance, NodeInventory

NOT_LISTED = "the driver no longer lists it"


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One GPU that answered. ``None`` where the driver does not support the question."""

    device: Device
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    instances_used_bytes: Mapping[str, int] = field(default_factory=dict)
    """By the UUID of each MIG instance."""
    instances_utilization: Mapping[str, float] = field(default_factory=dict)
    """Likewise, of those of which it is told: the share of time in which it was busy lately."""
    sensors: DeviceSensors = NO_SENSORS
    faults: tuple[str, ...] = ()
    """Why new work must not go there although it answers, such as a reset that it waits for."""
    pcie_root: str = ""
    fabric_clique: str = ""
    """Both as in ``proto.gpunode.GpuDevice``."""


@dataclass(frozen=True, slots=True)
class FailedDevice:
    """One GPU that the driver counts but that did not answer; the UUID when we knew it from before."""

    nvml_index: int
    uuid: str | None
    trouble: str
    lost: bool = False
    """Whether it is gone from the bus."""


@dataclass(frozen=True, slots=True)
class DriverReading:
    """One look at the driver."""

    driver_version: str
    cuda_version: int
    devices: tuple[DeviceReading, ...]
    failed: tuple[FailedDevice, ...] = ()
    has_cgroup_limits: bool = False
    """Whether the loaded NVML has the calls for memory limits of control groups."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something a GPU reported by itself. ``xid`` None is a memory error, which the next reading counts."""

    device_uuid: str
    xid: int | None


@dataclass(frozen=True, slots=True)
class OverdueCall:
    """A call into the driver that has taken longer than any may, and has not come back."""

    name: str
    device_uuid: str | None
    """The GPU it is about; None where it is about the driver as a whole."""
    seconds: float
    """Since it began."""
    uninterruptible: bool = False
    """Whether it sleeps in the kernel where no signal reaches it: the process could not end, and no other take its place."""


@dataclass(frozen=True, slots=True)
class BoardDevice:
    """A GPU we have seen, with how it is now. ``trouble`` is empty while it is healthy."""

    device: Device
    trouble: str = ""
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    instances_used_bytes: Mapping[str, int] = field(default_factory=dict)
    instances_utilization: Mapping[str, float] = field(default_factory=dict)
    sensors: DeviceSensors = NO_SENSORS
    """As of the last reading that succeeded."""
    state: HealthState = HealthState.HEALTHY
    cordoned: bool = False
    """Whether an administrator keeps new work off it."""
    pcie_root: str = ""
    fabric_clique: str = ""
    answers: bool = True
    """Whether it answered when last asked, faulty or not."""

    @property
    def healthy(self) -> bool:
        """Whether its own state lets new work be placed on it."""
        return not self.trouble

    @property
    def usable(self) -> bool:
        """Whether new work may be placed on it."""
        return self.healthy and not self.cordoned

    @property
    def grantable_uuids(self) -> tuple[str, ...]:
        """What shares on it may name: the GPU itself, or an instance on it."""
        return (self.device.uuid, *(instance.uuid for instance in self.device.mig_instances))


@dataclass(frozen=True, slots=True)
class DeviceBoard:
    """All GPUs seen since the agent started, in the order of their minor numbers."""

    driver_version: str = ""
    cuda_version: int = 0
    devices: tuple[BoardDevice, ...] = ()
    links: tuple[Link, ...] = ()
    unidentified: tuple[str, ...] = ()
    """What is wrong with each GPU that the driver counts and that has not answered since the agent started: it cannot be named."""
    has_cgroup_limits: bool = False
    """As in ``DriverReading``."""

    def after_reading(self, reading: DriverReading) -> "DeviceBoard":
        """Take in one look: those that answered without a fault are healthy, those known from before that did not answer are in trouble."""
        trouble_by_uuid = {failed.uuid: failed.trouble for failed in reading.failed if failed.uuid is not None}
        seen = {
            entry.device.uuid: BoardDevice(
                entry.device,
                "; ".join(entry.faults),
                entry.memory_used_bytes,
                entry.utilization_ratio,
                entry.instances_used_bytes,
                entry.instances_utilization,
                entry.sensors,
                pcie_root=entry.pcie_root,
                fabric_clique=entry.fabric_clique,
            )
            for entry in reading.devices
        }
        for known in self.devices:
            uuid = known.device.uuid
            if uuid not in seen:
                seen[uuid] = replace(known, trouble=trouble_by_uuid.get(uuid, NOT_LISTED), utilization_ratio=None, answers=False)
        devices = tuple(sorted(seen.values(), key=lambda entry: (entry.device.minor, entry.device.uuid)))
        unidentified = tuple(
            f"GPU with NVML index {failed.nvml_index}: {failed.trouble}" for failed in reading.failed if failed.uuid not in seen
        )
        return replace(
            self,
            driver_version=reading.driver_version,
            cuda_version=reading.cuda_version,
            devices=devices,
            unidentified=unidentified,
            has_cgroup_limits=reading.has_cgroup_limits,
        )

    def after_driver_trouble(self, trouble: str) -> "DeviceBoard":
        """Mark every GPU: the driver as a whole does not work."""
        return replace(
            self, devices=tuple(replace(entry, trouble=trouble, utilization_ratio=None, answers=False) for entry in self.devices)
        )

    def after_device_trouble(self, uuid: str, trouble: str) -> "DeviceBoard":
        """Mark one GPU, such as the one whose call hangs; the others keep the state they were last seen in."""
        return replace(
            self,
            devices=tuple(
                replace(entry, trouble=trouble, utilization_ratio=None, answers=False) if entry.device.uuid == uuid else entry
                for entry in self.devices
            ),
        )

    def judged(self, health: HealthTable, cordon: Cordon) -> "DeviceBoard":
        """Return the board with the state that all looks so far have led to, in place of what the last one says."""
        return replace(self, devices=tuple(_judged(entry, health, cordon) for entry in self.devices))

    def without_cordon(self, device_uuids: Iterable[str]) -> "DeviceBoard":
        """Return the board as it is for work that is already on these GPUs, or instances on them."""
        named = frozenset(device_uuids)
        return replace(
            self,
            devices=tuple(entry if named.isdisjoint(entry.grantable_uuids) else replace(entry, cordoned=False) for entry in self.devices),
        )

    def with_links(self, links: Sequence[Link]) -> "DeviceBoard":
        """Return the board with how its GPUs are connected."""
        return replace(self, links=tuple(links))

    def inventory(self) -> NodeInventory:
        """Return the static facts of all GPUs on the board."""
        return NodeInventory(self.driver_version, self.cuda_version, tuple(entry.device for entry in self.devices), self.links)

    @property
    def parents(self) -> Mapping[str, str]:
        """The GPU of each MIG instance, by UUID."""
        return {instance.uuid: entry.device.uuid for entry in self.devices for instance in entry.device.mig_instances}

    def mig_instance(self, uuid: str) -> tuple[BoardDevice, MigInstance] | None:
        """Return the MIG instance with this UUID and its GPU, or None."""
        for entry in self.devices:
            for instance in entry.device.mig_instances:
                if instance.uuid == uuid:
                    return entry, instance
        return None


def _judged(entry: BoardDevice, health: HealthTable, cordon: Cordon) -> BoardDevice:
    gpu = health.of(entry.device.uuid)
    if gpu.state.usable:
        trouble = ""
    elif gpu.state is HealthState.RECOVERING:
        trouble = f"recovering from: {gpu.reason}"
    else:
        trouble = gpu.reason
    return replace(entry, trouble=trouble, state=gpu.state, cordoned=cordon.covers(entry.device.uuid))


def probes_of(board: DeviceBoard, reading: DriverReading) -> Mapping[str, Answer | Silence]:
    """Say what one look means for the health of every GPU: of those on the board, and of those it shows for the first time."""
    probes: dict[str, Answer | Silence] = {entry.device.uuid: Silence(NOT_LISTED, lost=True) for entry in board.devices}
    probes |= {failed.uuid: Silence(failed.trouble, failed.lost) for failed in reading.failed if failed.uuid is not None}
    return probes | {entry.device.uuid: Answer(entry.faults, entry.sensors.ecc_uncorrected) for entry in reading.devices}


@dataclass(frozen=True, slots=True)
class AdvertisedDevice:
    """One device ID as kubelet sees it."""

    device_id: str
    healthy: bool
    numa_node: int | None


def promisable_bytes(total_bytes: int, reserved_bytes: int) -> int:
    """Return how much of a device's memory containers can be promised: all but the driver's reserve, in whole MiB as resources count it."""
    return units.floor_to_mib(total_bytes - reserved_bytes)


def advertised(board: DeviceBoard, shares_per_gpu: int) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
    """Return the device IDs of every resource. A GPU in MIG mode offers the instances it has, any other its replicas."""
    resources: dict[str, list[AdvertisedDevice]] = {}
    for entry in board.devices:
        device = entry.device
        if device.mig_enabled:
            for instance in device.mig_instances:
                if not instance.on_demand and (resource := _mig_resource(instance)) is not None:
                    offered = AdvertisedDevice(instance.uuid, entry.usable, device.numa_node)
                    resources.setdefault(resource, []).append(offered)
        else:
            replicas = resources.setdefault(contract.RESOURCE_VGPU, [])
            replicas += [
                AdvertisedDevice(codec.encode_replica(device.uuid, replica), entry.usable, device.numa_node)
                for replica in range(shares_per_gpu)
            ]
    return {resource: tuple(devices) for resource, devices in resources.items()}


def unnamed_instances(board: DeviceBoard) -> tuple[MigInstance, ...]:
    """Return the MIG instances that cannot be offered, because no resource name follows from their profile."""
    return tuple(instance for entry in board.devices for instance in entry.device.mig_instances if _mig_resource(instance) is None)


def _mig_resource(instance: MigInstance) -> str | None:
    try:
        return mig.resource_of_profile(instance.profile)
    except ContractError:
        return None


def node_capacity(board: DeviceBoard, promised: Iterable[DeviceShare]) -> Mapping[str, int]:
    """Return the node's extended resources: memory in MiB, and cores in percent.

    A shared GPU that takes new work counts as a whole, any other with what containers hold of it: a kubelet that restarts admits its
    pods anew, and ends those for which the node offers too little, however long their containers have run (I5). What is free is the
    same either way, since the pods' requests are taken off again.

    Args: promised: every share that a container was granted.
    """
    usable = {entry.device.uuid: entry.device for entry in board.devices if entry.usable and not entry.device.mig_enabled}
    held = [share for share in promised if share.device_uuid not in usable and _is_whole_gpu(share.device_uuid)]
    memory_bytes = [*(device.memory_bytes for device in usable.values()), *(share.memory_bytes for share in held)]
    cores = [*(units.WHOLE_GPU_PERCENT for _ in usable), *(share.cores_percent or 0 for share in held)]
    return {
        contract.RESOURCE_VGPU_MEMORY: sum(amount // units.MIB for amount in memory_bytes),
        contract.RESOURCE_VGPU_CORES: sum(cores),
    }


def _is_whole_gpu(device_uuid: str) -> bool:
    """Whether a share names a GPU, and neither a MIG instance nor a place for one: those are counted by kubelet alone."""
    return not device_uuid.startswith("MIG-") and codec.decode_place(device_uuid) is None
