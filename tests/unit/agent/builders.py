# SPDX-License-Identifier: Apache-2.0
"""Boards, pods, grants and assignments with defaults, so that a test shows only what matters to it."""

from collections.abc import Mapping, Sequence

from agent.core.identity import HeldDevices, Holder, grant_id
from agent.core.inventory import DeviceInventory, DeviceReading, DriverReading
from agent.core.ledger import Grant
from agent.core.planning import GrantRequest
from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.model import ContainerAssignment, ContainerSpec, ContainerStatus, Device, DeviceShare, MigInstance, Pod, PodAssignment
from aliquot.contract.units import MIB
from aliquot.placement.request import request_of_container

SECRET = b"s" * 32
BOOT = "boot-1"
VGPU = contract.RESOURCE_VGPU


def gpu(
    minor: int = 0, *, mib: int = 1000, model: str = "NVIDIA H200", numa: int | None = 0, mig: Sequence[MigInstance] | None = None
) -> Device:
    return Device(
        uuid=f"GPU-{minor}",
        model=model,
        minor=minor,
        pci_bus_id=f"00000000:{minor + 1:02X}:00.0",
        memory_bytes=mib * MIB,
        numa_node=numa,
        mig_enabled=mig is not None,
        mig_instances=tuple(mig or ()),
    )


def instance(parent: int, index: int, *, profile: str = "1g.10gb", mib: int = 100) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{parent}-{index}",
        parent_uuid=f"GPU-{parent}",
        profile=profile,
        memory_bytes=mib * MIB,
        gpu_instance_id=index,
        compute_instance_id=0,
        placement_start=index,
        placement_size=1,
    )


def reading(*devices: Device, used_mib: int = 0, **extra: object) -> DriverReading:
    return DriverReading("580.159.03", 13000, tuple(DeviceReading(device, used_mib * MIB, 0.25) for device in devices), **extra)  # type: ignore[arg-type]


def inventory(*devices: Device) -> DeviceInventory:
    return DeviceInventory().after_reading(reading(*(devices or (gpu(0), gpu(1)))))


def share(device: int | str = 0, mib: int = 100, cores: int | None = None) -> DeviceShare:
    return DeviceShare(device if isinstance(device, str) else f"GPU-{device}", mib * MIB, cores)


def limits(vgpus: int = 1, mib: int | None = 100, cores: int | None = None) -> dict[str, str]:
    """Limits of one container; totals, as users write them."""
    result = {VGPU: str(vgpus)}
    if mib is not None:
        result[contract.RESOURCE_VGPU_MEMORY] = str(mib)
    if cores is not None:
        result[contract.RESOURCE_VGPU_CORES] = str(cores)
    return result


def pod(
    name: str = "train",
    *containers: ContainerSpec,
    uid: str | None = None,
    phase: str = "Pending",
    annotations: Mapping[str, str] | None = None,
    deleting: bool = False,
    statuses: Sequence[ContainerStatus] = (),
) -> Pod:
    return Pod(
        namespace="default",
        name=name,
        uid=uid or f"uid-{name}",
        node_name="node-1",
        phase=phase,
        annotations=annotations or {},
        containers=containers or (ContainerSpec("main", limits()),),
        deletion_requested=deleting,
        statuses=tuple(statuses),
    )


def assigned(uid: str, **shares: Sequence[DeviceShare]) -> dict[str, str]:
    """The annotation that gives each container its shares."""
    containers = tuple(ContainerAssignment(container, tuple(given)) for container, given in shares.items())
    return {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(PodAssignment(uid, containers))}


def ids(*replicas: str) -> frozenset[str]:
    """``ids("0:3", "1:0")`` names replica 3 of GPU-0 and replica 0 of GPU-1."""
    return frozenset(codec.encode_replica(f"GPU-{text.partition(':')[0]}", int(text.partition(":")[2])) for text in replicas)


def ask(of: Pod, device_ids: frozenset[str], *, container: str = "main", resource: str = VGPU) -> GrantRequest:
    holder = Holder(of.namespace, of.name, container)
    return GrantRequest(grant_id(SECRET, resource, device_ids), resource, device_ids, holder, of, *request_of_container(of, container))


def grant(
    device_ids: frozenset[str], *shares: DeviceShare, of: Pod | None = None, container: str = "main", resource: str = VGPU, boot: str = BOOT
) -> Grant:
    owner = of or pod()
    return Grant(
        grant_id=grant_id(SECRET, resource, device_ids),
        resource=resource,
        device_ids=tuple(sorted(device_ids)),
        namespace=owner.namespace,
        pod=owner.name,
        pod_uid=owner.uid,
        container=container,
        shares=shares or (share(),),
        boot_id=boot,
    )


def held(of: Pod, device_ids: frozenset[str], *, container: str = "main", resource: str = VGPU) -> HeldDevices:
    return HeldDevices(of.namespace, of.name, container, resource, device_ids)
