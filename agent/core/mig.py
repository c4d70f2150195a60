# SPDX-License-Identifier: Apache-2.0
"""MIG on this node: the instances that the agent made, the places where it may make more, and what it offers to kubelet.

An instance made on demand is identified by its *place* (GPU, profile and first memory slice). Shares and grants name the place, because an
instance gets a new UUID each time it is made. Shares of a GPU in MIG mode name the GPU, and use one instance with all its slices together:
the first share has it made, and it goes with the last. Invariant: an instance belongs to the agent only if its record was on disk before it
was made. All other instances belong to another owner; the agent offers them unchanged and never removes them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from agent.core.backends import MigStrategy
from agent.core.inventory import AdvertisedDevice, DeviceInventory, DeviceReading, DriverReading, InventoryDevice, advertised
from agent.core.ledger import Ledger
from agent.core.rows import RowFormat
from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.codec import MigPlace
from aliquot.contract.model import Device, DeviceShare, MigInstance
from aliquot.placement import mig
from aliquot.placement.device import DeviceState

HANDS_OFF_LABEL = "nvidia.com/mig.config.state"
"""Set by NVIDIA's mig-manager while it repartitions the GPUs of a node."""
_SETTLED_STATES = ("", "success")
_RESETTING_STATES = ("pending", "rebooting")
"""Values of the label during which mig-manager may reset GPUs, or waits for a reboot that resets them."""


@dataclass(frozen=True, slots=True)
class MigRecord:
    """An instance of the agent, recorded before it is made."""

    place: str
    grant_id: str
    boot_id: str
    """An instance does not outlive a boot: an instance found at the place after a reboot is not the agent's."""
    uuid: str = ""
    """Empty while the instance is being made; no container has it yet."""
    memory_bytes: int = 0
    size: int = 0
    most_on_device: int = 0
    """What the driver reported about the place when the instance was made: its memory, its number of slices, and how many instances of its
    profile a GPU can hold. 0 in records of older agents, which did not store it."""
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    """The driver's ids on the GPU. None while the instance is being made, and in records of older agents, which did not store them."""

    def describes(self, instance: MigInstance) -> bool:
        """Whether an existing instance is the one in this record."""
        return place_of(instance) == self.place and self.uuid in ("", instance.uuid)

    def shown(self) -> MigInstance | None:
        """Return the place in the form of the inventory; None if the record lacks its size."""
        place = codec.decode_place(self.place)
        if place is None or not self.size:
            return None
        return MigInstance(
            self.place, place.device_uuid, place.profile, self.memory_bytes, 0, 0, place.start, self.size, self.most_on_device
        )


SHARED: Final = "shared"
"""In a record, instead of a grant: the instance is that of all shares of its GPU."""
RECORD_ROWS = RowFormat("MIG record", "record", MigRecord, version=1)


def place_of(instance: MigInstance) -> str:
    """Return the name of an instance's place."""
    return str(MigPlace(instance.parent_uuid, instance.profile, instance.placement_start))


def gpu_of(share: DeviceShare, parents: Mapping[str, str]) -> str | None:
    """Return the GPU of a share of a MIG instance. A place contains its GPU, even while the inventory does not show the place.

    Args: parents: the GPU of each known instance, by UUID.
    """
    place = codec.decode_place(share.device_uuid)
    return place.device_uuid if place is not None else parents.get(share.device_uuid)


def identity_of(instance: MigInstance, record: MigRecord | None) -> tuple[str, str, str] | None:
    """Return UUID, GPU instance id and compute instance id. For a place they come from its record; None if unknown."""
    if not instance.on_demand:
        return instance.uuid, str(instance.gpu_instance_id), str(instance.compute_instance_id)
    if record is None or not record.uuid or record.gpu_instance_id is None:
        return None
    return record.uuid, str(record.gpu_instance_id), str(record.compute_instance_id)


def is_promised(record: MigRecord, ledger: Ledger) -> bool:
    """Whether a grant uses the instance of a record: it names its place, or it is a share of the GPU and the instance is for shares."""
    place = codec.decode_place(record.place)
    gpu = place.device_uuid if place is not None and record.grant_id == SHARED else None
    return any(share.device_uuid in (record.place, gpu) for grant in ledger.grants.values() if grant.takes_part for share in grant.shares)


def is_unclear(record: MigRecord, ledger: Ledger) -> bool:
    """Whether a container with a damaged ledger row may use the instance of a record."""
    place = codec.decode_place(record.place)
    shared = record.grant_id == SHARED and place is not None and bool(ledger.unclear_on([place.device_uuid]))
    return record.grant_id in ledger.unclear or shared


def hands_off_reason(labels: Mapping[str, str] | None) -> str:
    """Return why the agent must not change the partitions of this node now; empty if it may.

    Args: labels: the node's labels; None while they are unknown.
    """
    if labels is None:
        return "the node's labels are not known yet, and mig-manager may be changing the partitions of its GPUs"
    state = labels.get(HANDS_OFF_LABEL, "")
    if state in _SETTLED_STATES:
        return ""
    return (
        f"the node's label {HANDS_OFF_LABEL} is {state!r}: mig-manager is changing the partitions of its GPUs, or failed. "
        "The agent retries until the label is 'success'"
    )


def keep_out_reason(labels: Mapping[str, str] | None) -> str:
    """Return why the agent must not have this node's GPUs open now; empty if it may.

    mig-manager stops the clients that it knows by its own labels, and then resets the GPUs that change their MIG mode. The reset fails
    while any other process has such a GPU open. Source: https://github.com/NVIDIA/mig-parted/issues/19

    Args: labels: the node's labels; None while they are unknown, which is no reason: most nodes have no mig-manager.
    """
    state = (labels or {}).get(HANDS_OFF_LABEL, "")
    if state not in _RESETTING_STATES:
        return ""
    return (
        f"the node's label {HANDS_OFF_LABEL} is {state!r}: mig-manager may reset its GPUs, so the agent stays out of the driver until the "
        "label changes"
    )


# --- the inventory ------------------------------------------------------------------------------------------------


def with_places(reading: DriverReading, places: Mapping[str, Collection[MigInstance]], records: Mapping[str, MigRecord]) -> DriverReading:
    """Return a reading with the agent's instances replaced by the places where it makes instances.

    Args: places: by device UUID, where the agent may make instances. A device without an entry could not be queried now; it gets only the
                  places in records.
          records: by place.
    """
    return replace(reading, devices=tuple(_with_places(entry, places.get(entry.device.uuid), records) for entry in reading.devices))


def _with_places(entry: DeviceReading, places: Collection[MigInstance] | None, records: Mapping[str, MigRecord]) -> DeviceReading:
    if not entry.device.mig_enabled:
        return entry
    own = [instance for instance in entry.device.mig_instances if _is_own(instance, records)]
    names = {instance.uuid: place_of(instance) for instance in own}
    foreign = tuple(instance for instance in entry.device.mig_instances if instance.uuid not in names)
    shown = _places_in_use(entry.device.uuid, own, records) if places is None else places
    return replace(
        entry,
        device=replace(entry.device, mig_instances=(*foreign, *shown)),
        instances_used_bytes={names.get(uuid, uuid): used for uuid, used in entry.instances_used_bytes.items()},
        instances_utilization={names.get(uuid, uuid): ratio for uuid, ratio in entry.instances_utilization.items()},
    )


def _places_in_use(device_uuid: str, own: Collection[MigInstance], records: Mapping[str, MigRecord]) -> tuple[MigInstance, ...]:
    """Return the recorded places on a GPU, with the facts from their records.

    If a record lacks the facts, they come from its instance, if that exists. The number of such instances per GPU is then that of the
    existing ones.
    """
    recorded = (record.shown() for record in records.values())
    known = {place.uuid: place for place in recorded if place is not None and place.parent_uuid == device_uuid}
    others = [instance for instance in own if place_of(instance) not in known]
    most = Counter(instance.profile for instance in own)
    return (
        *known.values(),
        *(replace(one, uuid=place_of(one), gpu_instance_id=0, compute_instance_id=0, most_on_device=most[one.profile]) for one in others),
    )


def _is_own(instance: MigInstance, records: Mapping[str, MigRecord]) -> bool:
    record = records.get(place_of(instance))
    return record is not None and record.describes(instance)


# --- what the agent offers to kubelet -----------------------------------------------------------------------------


def single_profile(inventory: DeviceInventory) -> str | None:
    """Return the only profile of all instances, if all GPUs of the node are in MIG mode; None if strategy ``single`` is impossible."""
    profiles = {instance.profile for entry in inventory.devices for instance in entry.device.mig_instances}
    uniform = all(entry.device.mig_enabled and entry.device.mig_instances for entry in inventory.devices)
    return profiles.pop() if uniform and len(profiles) == 1 else None


def strategy_trouble(inventory: DeviceInventory, strategy: MigStrategy) -> str:
    """Return why the agent cannot offer GPUs in MIG mode by the configured strategy; empty if it can."""
    if strategy is not MigStrategy.SINGLE or single_profile(inventory) or not any(entry.device.mig_enabled for entry in inventory.devices):
        return ""
    profiles = sorted({instance.profile for entry in inventory.devices for instance in entry.device.mig_instances})
    whole = sum(not entry.device.mig_enabled for entry in inventory.devices)
    return (
        "migStrategy single needs every GPU in MIG mode and all instances of one profile, but this node has "
        f"{whole} GPUs not in MIG mode and instances of {', '.join(profiles) or 'no profile'}: no instance is offered. "
        "Partition all GPUs alike, or set migStrategy: mixed"
    )


def offered_devices(
    inventory: DeviceInventory, ledger: Ledger, shares_per_gpu: int, strategy: MigStrategy
) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
    """Return the device IDs of every resource that the agent offers to kubelet."""
    match strategy:
        case MigStrategy.NONE:
            return advertised(_without_mig(inventory), shares_per_gpu)
        case MigStrategy.SINGLE:
            offered = advertised(inventory, shares_per_gpu)
            profile = single_profile(inventory)
            instances = offered.get(mig.resource_of_profile(profile), ()) if profile is not None else ()
            return {contract.RESOURCE_VGPU: instances} if instances else advertised(_without_mig(inventory), shares_per_gpu)
        case MigStrategy.MIXED | MigStrategy.DYNAMIC:
            return _with_on_demand(inventory, ledger, shares_per_gpu)


def _without_mig(inventory: DeviceInventory) -> DeviceInventory:
    return replace(inventory, devices=tuple(entry for entry in inventory.devices if not entry.device.mig_enabled))


def _with_on_demand(inventory: DeviceInventory, ledger: Ledger, shares_per_gpu: int) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
    resources = dict(advertised(inventory, shares_per_gpu))
    profiles = dict.fromkeys(place.profile for entry in inventory.devices for place in _places(entry.device))
    if not profiles:
        return resources
    states = {state.device.uuid: state for state in ledger.states(inventory, shares_per_gpu)}
    for profile in profiles:
        resource = mig.resource_of_profile(profile)
        offered = _on_demand_ids(inventory.devices, profile, states, ledger.held_ids(resource))
        resources[resource] = (*resources.get(resource, ()), *offered)
    return resources


def _places(device: Device) -> Iterable[MigInstance]:
    return (instance for instance in device.mig_instances if instance.on_demand)


def _ids_of_gpu(device: Device, profile: str) -> list[str]:
    """Return as many IDs as the GPU can have instances of the profile."""
    most = max((place.most_on_device for place in _places(device) if place.profile == profile), default=0)
    return [codec.encode_replica(device.uuid, number) for number in range(most)]


def _room_on_demand(state: DeviceState, profile: str) -> int:
    """Return how many instances of the profile the agent can still make on a GPU; free instances of the administrator do not count."""
    existing = sum(not instance.on_demand for instance in mig.free_instances(state, profile))
    return max(0, mig.room(state, profile) - existing)


def _on_demand_ids(
    entries: Iterable[InventoryDevice], profile: str, states: Mapping[str, DeviceState], held: Collection[str]
) -> tuple[AdvertisedDevice, ...]:
    """Return as many IDs as there can be instances of a profile. Healthy are the held ones, plus as many as can be made now.

    Kubelet does not know that profiles overlap. So the health of the IDs must keep it from planning an instance without room.
    """
    ids: list[tuple[InventoryDevice, str]] = []
    usable: set[str] = set()
    spare = 0
    for entry in entries:
        own = _ids_of_gpu(entry.device, profile)
        free = [device_id for device_id in own if device_id not in held]
        state = states[entry.device.uuid]
        room = _room_on_demand(state, profile) if entry.usable else 0
        usable.update(free[:room])
        spare += max(0, room - len(free))
        ids += [(entry, device_id) for device_id in own]
    # a grant on this GPU may be held by an ID that names another GPU: as many free IDs elsewhere stand for the room here
    unused = [device_id for entry, device_id in ids if entry.usable and device_id not in held and device_id not in usable]
    usable.update(unused[:spare])
    return tuple(
        AdvertisedDevice(device_id, entry.usable and (device_id in held or device_id in usable), entry.device.numa_node)
        for entry, device_id in ids
    )
