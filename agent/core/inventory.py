# SPDX-License-Identifier: Apache-2.0
"""The node's inventory: the GPUs as last read, their health, and the device IDs that the agent advertises.

A ``DriverReading`` is one reading of the driver; a ``DeviceInventory`` is the result of all readings so far. A GPU that stops answering
stays in the inventory as unhealthy: kubelet must see its IDs as Unhealthy, they must not vanish. It becomes healthy by itself when it
answers again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.core.health import Answer, HealthState, HealthTable, Silence
from agent.core.sensors import NO_SENSORS, DeviceSensors
from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.errors import ContractError
from aliquot.contract.gpunode import Cordon
from aliquot.contract.model import Device, DeviceShare, Link, MigInstance
from aliquot.placement import mig

NOT_LISTED = "the driver no longer lists it"


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One GPU that answered. ``None`` for what the driver does not support."""

    device: Device
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    instances_used_bytes: Mapping[str, int] = field(default_factory=dict)
    """By the UUID of each MIG instance."""
    instances_utilization: Mapping[str, float] = field(default_factory=dict)
    """By the UUID of each MIG instance, if the driver reports it: the fraction of recent time in which the instance was busy."""
    sensors: DeviceSensors = NO_SENSORS
    faults: tuple[str, ...] = ()
    """Why new work must not be placed on the GPU although it answers, such as a pending reset."""
    pcie_root: str = ""
    fabric_clique: str = ""
    """Both as in ``aliquot.contract.gpunode.GpuDevice``."""
    architecture: str = ""
    brand: str = ""
    """Both in the words of NVIDIA's DRA driver."""


@dataclass(frozen=True, slots=True)
class FailedDevice:
    """One GPU that the driver counts but that did not answer, with its UUID if that is known from earlier readings."""

    nvml_index: int
    uuid: str | None
    trouble: str
    lost: bool = False
    """Whether the GPU is off the bus."""


@dataclass(frozen=True, slots=True)
class DriverReading:
    """One reading of the driver."""

    driver_version: str
    cuda_version: int
    devices: tuple[DeviceReading, ...]
    failed: tuple[FailedDevice, ...] = ()
    has_cgroup_limits: bool = False
    """Whether the loaded NVML has the calls for memory limits of cgroups."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An event that a GPU reported. For a memory error ``xid`` is None; the next reading has the new count."""

    device_uuid: str
    xid: int | None


@dataclass(frozen=True, slots=True)
class OverdueCall:
    """A driver call that has exceeded its time limit and has not returned."""

    name: str
    device_uuid: str | None
    """The GPU of the call; None for a call about the driver as a whole."""
    seconds: float
    """Time since the start of the call."""
    uninterruptible: bool = False
    """Whether the thread sleeps uninterruptibly in the kernel: signals do not reach it, so the process cannot end and be replaced."""


@dataclass(frozen=True, slots=True)
class InventoryDevice:
    """A known GPU with its current state. ``trouble`` is empty while it is healthy."""

    device: Device
    trouble: str = ""
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    instances_used_bytes: Mapping[str, int] = field(default_factory=dict)
    instances_utilization: Mapping[str, float] = field(default_factory=dict)
    sensors: DeviceSensors = NO_SENSORS
    """From the last successful reading."""
    state: HealthState = HealthState.HEALTHY
    cordoned: bool = False
    """Whether an administrator keeps new work off the GPU."""
    pcie_root: str = ""
    fabric_clique: str = ""
    architecture: str = ""
    brand: str = ""
    answers: bool = True
    """Whether the GPU answered the last query, faulty or not."""
    silent: bool = False
    """As in ``GpuHealth``."""

    @property
    def healthy(self) -> bool:
        """Whether the GPU's health allows new work on it."""
        return not self.trouble

    @property
    def usable(self) -> bool:
        """Whether new work may be placed on it: healthy and not cordoned."""
        return self.healthy and not self.cordoned

    @property
    def grantable_uuids(self) -> tuple[str, ...]:
        """The names that shares on it may use: the GPU itself, or an instance on it."""
        return (self.device.uuid, *(instance.uuid for instance in self.device.mig_instances))


@dataclass(frozen=True, slots=True)
class DeviceInventory:
    """All GPUs seen since the agent started, in the order of their minor numbers."""

    driver_version: str = ""
    cuda_version: int = 0
    devices: tuple[InventoryDevice, ...] = ()
    links: tuple[Link, ...] = ()
    unidentified: tuple[str, ...] = ()
    """The fault of each GPU that the driver counts but that has not answered since the agent started. Their UUIDs are unknown."""
    has_cgroup_limits: bool = False
    """As in ``DriverReading``."""

    def after_reading(self, reading: DriverReading) -> "DeviceInventory":
        """Apply a reading: GPUs that answered without a fault are healthy, known GPUs that did not answer are in trouble."""
        trouble_by_uuid = {failed.uuid: failed.trouble for failed in reading.failed if failed.uuid is not None}
        seen = {
            entry.device.uuid: InventoryDevice(
                entry.device,
                "; ".join(entry.faults),
                entry.memory_used_bytes,
                entry.utilization_ratio,
                entry.instances_used_bytes,
                entry.instances_utilization,
                entry.sensors,
                pcie_root=entry.pcie_root,
                fabric_clique=entry.fabric_clique,
                architecture=entry.architecture,
                brand=entry.brand,
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

    def after_driver_trouble(self, trouble: str) -> "DeviceInventory":
        """Mark every GPU: the driver as a whole does not work."""
        return replace(
            self, devices=tuple(replace(entry, trouble=trouble, utilization_ratio=None, answers=False) for entry in self.devices)
        )

    def after_device_trouble(self, uuid: str, trouble: str) -> "DeviceInventory":
        """Mark one GPU, such as one with a hanging call; the others keep their last state."""
        return replace(
            self,
            devices=tuple(
                replace(entry, trouble=trouble, utilization_ratio=None, answers=False) if entry.device.uuid == uuid else entry
                for entry in self.devices
            ),
        )

    def judged(self, health: HealthTable, cordon: Cordon) -> "DeviceInventory":
        """Return the inventory with the health state from all readings so far, instead of the last reading alone."""
        return replace(self, devices=tuple(_judged(entry, health, cordon) for entry in self.devices))

    def without_cordon(self, device_uuids: Iterable[str]) -> "DeviceInventory":
        """Return the inventory without the cordon of these GPUs or instances. For work that is already there."""
        named = frozenset(device_uuids)
        return replace(
            self,
            devices=tuple(entry if named.isdisjoint(entry.grantable_uuids) else replace(entry, cordoned=False) for entry in self.devices),
        )

    def with_links(self, links: Sequence[Link]) -> "DeviceInventory":
        """Return the inventory with these links between its GPUs."""
        return replace(self, links=tuple(links))

    @property
    def parents(self) -> Mapping[str, str]:
        """The GPU of each MIG instance, by UUID."""
        return {instance.uuid: entry.device.uuid for entry in self.devices for instance in entry.device.mig_instances}

    def mig_instance(self, uuid: str) -> tuple[InventoryDevice, MigInstance] | None:
        """Return the MIG instance with this UUID and its GPU, or None."""
        for entry in self.devices:
            for instance in entry.device.mig_instances:
                if instance.uuid == uuid:
                    return entry, instance
        return None


def _judged(entry: InventoryDevice, health: HealthTable, cordon: Cordon) -> InventoryDevice:
    gpu = health.of(entry.device.uuid)
    if gpu.state.usable:
        trouble = ""
    elif gpu.state is HealthState.RECOVERING:
        trouble = f"recovering from: {gpu.reason}"
    else:
        trouble = gpu.reason
    return replace(entry, trouble=trouble, state=gpu.state, silent=gpu.silent, cordoned=cordon.covers(entry.device.uuid))


def probes_of(inventory: DeviceInventory, reading: DriverReading) -> Mapping[str, Answer | Silence]:
    """Return what a reading means for the health of each GPU: of the known ones, and of those that it shows for the first time."""
    probes: dict[str, Answer | Silence] = {entry.device.uuid: Silence(NOT_LISTED, lost=True) for entry in inventory.devices}
    probes |= {failed.uuid: Silence(failed.trouble, failed.lost) for failed in reading.failed if failed.uuid is not None}
    return probes | {entry.device.uuid: Answer(entry.faults, entry.sensors.ecc_uncorrected) for entry in reading.devices}


@dataclass(frozen=True, slots=True)
class AdvertisedDevice:
    """One device ID, as advertised to kubelet."""

    device_id: str
    healthy: bool
    numa_node: int | None


def promisable_bytes(total_bytes: int, reserved_bytes: int) -> int:
    """Return the part of a device's memory that containers can get: all but the driver's reserve, in whole MiB as resources count it."""
    return units.floor_to_mib(total_bytes - reserved_bytes)


def advertised(inventory: DeviceInventory, shares_per_gpu: int) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
    """Return the device IDs of every resource. A GPU in MIG mode offers its existing instances, any other its replicas."""
    resources: dict[str, list[AdvertisedDevice]] = {}
    for entry in inventory.devices:
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


def unnamed_instances(inventory: DeviceInventory) -> tuple[MigInstance, ...]:
    """Return the MIG instances that cannot be offered, because their profile gives no valid resource name."""
    return tuple(instance for entry in inventory.devices for instance in entry.device.mig_instances if _mig_resource(instance) is None)


def _mig_resource(instance: MigInstance) -> str | None:
    try:
        return mig.resource_of_profile(instance.profile)
    except ContractError:
        return None


def node_capacity(inventory: DeviceInventory, promised: Iterable[DeviceShare], *, offered: bool = True) -> Mapping[str, int]:
    """Return the node's extended resources: memory in MiB, and cores in percent.

    A shared GPU that takes new work counts fully. Any other GPU counts with what containers hold of it: a restarted kubelet admits its pods
    again and ends those that exceed the node's capacity, even running ones (I5). The free amount is the same either way, because the
    pods' requests are subtracted from it.

    Args: promised: the shares of all containers with device IDs.
          offered: whether new containers may get device IDs. Where only claims give out GPUs, none takes new work by these resources:
            a pod that kubelet admits by capacity alone would run without a GPU.
    """
    usable = _shared_gpus(inventory) if offered else {}
    held = _shares_beside(usable, promised)
    memory_bytes = [*(device.memory_bytes for device in usable.values()), *(share.memory_bytes for share in held)]
    return {
        contract.RESOURCE_VGPU_MEMORY: sum(amount // units.MIB for amount in memory_bytes),
        # Containers hold at most all of a device, so this bounds their percentages as well.
        contract.RESOURCE_VGPU_MEMORY_PERCENT: units.WHOLE_GPU_PERCENT * (len(usable) + len({share.device_uuid for share in held})),
        contract.RESOURCE_VGPU_CORES: units.WHOLE_GPU_PERCENT * len(usable) + sum(share.cores_percent or 0 for share in held),
    }


def _shared_gpus(inventory: DeviceInventory) -> Mapping[str, Device]:
    """Return the GPUs that take new work as a whole, by UUID."""
    return {entry.device.uuid: entry.device for entry in inventory.devices if entry.usable and not entry.device.mig_enabled}


def _shares_beside(usable: Mapping[str, Device], promised: Iterable[DeviceShare]) -> Sequence[DeviceShare]:
    """Return the shares of GPUs other than the usable ones."""
    return [share for share in promised if share.device_uuid not in usable and _is_whole_gpu(share.device_uuid)]


def _is_whole_gpu(device_uuid: str) -> bool:
    """Whether a share names a GPU, not a MIG instance or a place for one. Kubelet alone counts those."""
    return not device_uuid.startswith("MIG-") and codec.decode_place(device_uuid) is None
