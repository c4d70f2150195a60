"""What the node has: the GPUs as last read, their health, and what is advertised of them.

A ``DriverReading`` is one look at the driver; a ``DeviceBoard`` is what we make of all looks so far. A GPU that stops answering stays
on the board as unhealthy, because kubelet must see its IDs as Unhealthy and not vanish, and returns by itself when it answers again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from placement import mig
from proto import codec, contract, units
from proto.errors import ContractError
from proto.model import Device, Link, MigInstance, NodeInventory


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One GPU that answered. ``None`` where the driver does not support the question."""

    device: Device
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    instances_used_bytes: Mapping[str, int] = field(default_factory=dict)
    """By the UUID of each MIG instance."""


@dataclass(frozen=True, slots=True)
class FailedDevice:
    """One GPU that the driver counts but that did not answer; the UUID when we knew it from before."""

    nvml_index: int
    uuid: str | None
    trouble: str


@dataclass(frozen=True, slots=True)
class DriverReading:
    """One look at the driver."""

    driver_version: str
    cuda_version: int
    devices: tuple[DeviceReading, ...]
    failed: tuple[FailedDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class BoardDevice:
    """A GPU we have seen, with how it is now. ``trouble`` is empty while it is healthy."""

    device: Device
    trouble: str = ""
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    instances_used_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether new work may be placed on it."""
        return not self.trouble

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

    def after_reading(self, reading: DriverReading) -> "DeviceBoard":
        """Take in one look: those that answered are healthy, those known from before that did not are in trouble."""
        trouble_by_uuid = {failed.uuid: failed.trouble for failed in reading.failed if failed.uuid is not None}
        seen = {
            entry.device.uuid: BoardDevice(entry.device, "", entry.memory_used_bytes, entry.utilization_ratio, entry.instances_used_bytes)
            for entry in reading.devices
        }
        for known in self.devices:
            uuid = known.device.uuid
            if uuid not in seen:
                seen[uuid] = replace(known, trouble=trouble_by_uuid.get(uuid, "the driver no longer lists it"), utilization_ratio=None)
        devices = tuple(sorted(seen.values(), key=lambda entry: (entry.device.minor, entry.device.uuid)))
        return replace(self, driver_version=reading.driver_version, cuda_version=reading.cuda_version, devices=devices)

    def after_driver_trouble(self, trouble: str) -> "DeviceBoard":
        """Mark every GPU: the driver as a whole does not work."""
        return replace(self, devices=tuple(replace(entry, trouble=trouble, utilization_ratio=None) for entry in self.devices))

    def after_device_trouble(self, uuid: str, trouble: str) -> "DeviceBoard":
        """Mark one GPU, such as the one whose call hangs; the others keep the state they were last seen in."""
        return replace(
            self,
            devices=tuple(
                replace(entry, trouble=trouble, utilization_ratio=None) if entry.device.uuid == uuid else entry for entry in self.devices
            ),
        )

    def with_links(self, links: Sequence[Link]) -> "DeviceBoard":
        """Return the board with how its GPUs are connected."""
        return replace(self, links=tuple(links))

    def inventory(self) -> NodeInventory:
        """Return the static facts of all GPUs on the board."""
        return NodeInventory(self.driver_version, self.cuda_version, tuple(entry.device for entry in self.devices), self.links)

    def mig_instance(self, uuid: str) -> tuple[BoardDevice, MigInstance] | None:
        """Return the MIG instance with this UUID and its GPU, or None."""
        for entry in self.devices:
            for instance in entry.device.mig_instances:
                if instance.uuid == uuid:
                    return entry, instance
        return None


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
    """Return the device IDs of every resource. A GPU in MIG mode offers its instances, any other its replicas."""
    resources: dict[str, list[AdvertisedDevice]] = {}
    for entry in board.devices:
        device = entry.device
        if device.mig_enabled:
            for instance in device.mig_instances:
                if (resource := _mig_resource(instance)) is not None:
                    offered = AdvertisedDevice(instance.uuid, entry.healthy, device.numa_node)
                    resources.setdefault(resource, []).append(offered)
        else:
            replicas = resources.setdefault(contract.RESOURCE_VGPU, [])
            replicas += [
                AdvertisedDevice(codec.encode_replica(device.uuid, replica), entry.healthy, device.numa_node)
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


def node_capacity(board: DeviceBoard) -> Mapping[str, int]:
    """Return the node's extended resources: memory in MiB and cores in percent over the healthy GPUs that are shared."""
    shared = [entry.device for entry in board.devices if entry.healthy and not entry.device.mig_enabled]
    return {
        contract.RESOURCE_VGPU_MEMORY: sum(device.memory_bytes // units.MIB for device in shared),
        contract.RESOURCE_VGPU_CORES: units.WHOLE_GPU_PERCENT * len(shared),
    }
