"""MIG on this node: which instances the agent made itself, where it may make more, and what of both kubelet is offered.

An instance made on demand is known by its *place* (GPU, profile and first memory slice): the place is what a share names and the ledger
promises, while the instance's UUID is new whenever it is made again. Kept true: of the instances on a GPU only those are ours of which a
record was on disk before they were made; all others are somebody's layout, and are offered as they are and never touched.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from agent.core.backends import MigStrategy
from agent.core.inventory import AdvertisedDevice, BoardDevice, DeviceBoard, DeviceReading, DriverReading, advertised
from agent.core.ledger import Ledger
from agent.core.rows import RowFormat
from placement import mig
from placement.device import DeviceState
from proto import codec, contract
from proto.codec import MigPlace
from proto.model import Device, DeviceShare, MigInstance

HANDS_OFF_LABEL = "nvidia.com/mig.config.state"
"""Set by NVIDIA's mig-manager while it repartitions the GPUs of a node."""
_SETTLED_STATES = ("", "success")
_RESETTING_STATES = ("pending", "rebooting")
"""In which mig-manager may reset GPUs, or waits for a reboot that does."""


@dataclass(frozen=True, slots=True)
class MigRecord:
    """An instance of ours, written down before it is made."""

    place: str
    grant_id: str
    boot_id: str
    """An instance does not outlive a boot: whatever is at the place after one is not ours."""
    uuid: str = ""
    """Empty while the instance is being made: until then no container was given it."""
    memory_bytes: int = 0
    size: int = 0
    most_on_device: int = 0
    """What the driver said of the place when the instance was made: its memory, how many slices it takes, and how many of its profile
    a GPU can hold. 0 in records of agents that did not write it down."""
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    """As the driver numbers them on the GPU. None while the instance is being made, and in records of agents that did not write it down."""

    def describes(self, instance: MigInstance) -> bool:
        """Whether an instance that exists is the one of this record."""
        return place_of(instance) == self.place and self.uuid in ("", instance.uuid)

    def shown(self) -> MigInstance | None:
        """Return the place as the board has it; None when the record does not say what it is like."""
        place = codec.decode_place(self.place)
        if place is None or not self.size:
            return None
        return MigInstance(
            self.place, place.device_uuid, place.profile, self.memory_bytes, 0, 0, place.start, self.size, self.most_on_device
        )


RECORD_ROWS = RowFormat("MIG record", "record", MigRecord, version=1)


def place_of(instance: MigInstance) -> str:
    """Return the name of the place that an instance lies at."""
    return str(MigPlace(instance.parent_uuid, instance.profile, instance.placement_start))


def gpu_of(share: DeviceShare, parents: Mapping[str, str]) -> str | None:
    """Return the GPU of a share of a MIG instance: a place names it, also while the board does not show the place.

    Args: parents: the GPU of each instance on the board, by UUID.
    """
    place = codec.decode_place(share.device_uuid)
    return place.device_uuid if place is not None else parents.get(share.device_uuid)


def identity_of(instance: MigInstance, record: MigRecord | None) -> tuple[str, str, str] | None:
    """Return UUID, GPU instance id and compute instance id; of a place, those that its record has, and None where they are not known."""
    if not instance.on_demand:
        return instance.uuid, str(instance.gpu_instance_id), str(instance.compute_instance_id)
    if record is None or not record.uuid or record.gpu_instance_id is None:
        return None
    return record.uuid, str(record.gpu_instance_id), str(record.compute_instance_id)


def promised_places(ledger: Ledger) -> Mapping[str, str]:
    """Return the places that grants hold, with the grant's id."""
    return {
        share.device_uuid: grant.grant_id
        for grant in ledger.grants.values()
        for share in grant.shares
        if codec.decode_place(share.device_uuid) is not None
    }


def hands_off_reason(labels: Mapping[str, str] | None) -> str:
    """Say why the partitions of this node must not be changed now; empty when they may be.

    Args: labels: the node's; None while they are not known.
    """
    if labels is None:
        return "the node's labels are not known yet, and mig-manager may be changing the partitions of its GPUs"
    state = labels.get(HANDS_OFF_LABEL, "")
    if state in _SETTLED_STATES:
        return ""
    return (
        f"the node's label {HANDS_OFF_LABEL} is {state!r}: mig-manager is changing the partitions of its GPUs, or failed to. "
        "It is tried again until the label says success"
    )


def keep_out_reason(labels: Mapping[str, str] | None) -> str:
    """Say why nobody may have this node's GPUs open now; empty when they may be looked at.

    mig-manager sends those clients away that it knows by labels of its own, and then resets the GPUs whose MIG mode it changes; a reset
    fails while anybody else has one open. Source: https://github.com/NVIDIA/mig-parted/issues/19

    Args: labels: the node's; None while they are not known, which is no reason: most nodes have no mig-manager.
    """
    state = (labels or {}).get(HANDS_OFF_LABEL, "")
    if state not in _RESETTING_STATES:
        return ""
    return (
        f"the node's label {HANDS_OFF_LABEL} is {state!r}: mig-manager may reset its GPUs, so the agent keeps out of the driver until the "
        "label says something else"
    )


# --- the board ----------------------------------------------------------------------------------------------------


def with_places(reading: DriverReading, places: Mapping[str, Collection[MigInstance]], records: Mapping[str, MigRecord]) -> DriverReading:
    """Return a look at the driver in which instances of ours are replaced by the places where we make them.

    Args: places: by device UUID, where instances may be made; of a device that is left out, that cannot be known now, and it has the
                  places alone at which instances of ours exist, or are to be again.
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
    """Return the recorded places on a GPU, as their records tell them.

    Where a record does not say, its instance does, if it is there: no more of its profile can be counted on than there are.
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


# --- what kubelet is offered --------------------------------------------------------------------------------------


def single_profile(board: DeviceBoard) -> str | None:
    """Return the one profile of all instances, on a node whose GPUs are all in MIG mode; None where strategy ``single`` cannot be."""
    profiles = {instance.profile for entry in board.devices for instance in entry.device.mig_instances}
    uniform = all(entry.device.mig_enabled and entry.device.mig_instances for entry in board.devices)
    return profiles.pop() if uniform and len(profiles) == 1 else None


def strategy_trouble(board: DeviceBoard, strategy: MigStrategy) -> str:
    """Say why GPUs in MIG mode are not offered as the strategy wants; empty when they are."""
    if strategy is not MigStrategy.SINGLE or single_profile(board) or not any(entry.device.mig_enabled for entry in board.devices):
        return ""
    profiles = sorted({instance.profile for entry in board.devices for instance in entry.device.mig_instances})
    whole = sum(not entry.device.mig_enabled for entry in board.devices)
    return (
        "migStrategy single wants every GPU in MIG mode and all instances of one profile, and this node has "
        f"{whole} GPUs not in MIG mode and instances of {', '.join(profiles) or 'no profile'}: no instance is offered. "
        "Partition all GPUs alike, or set migStrategy: mixed"
    )


def offered_devices(
    board: DeviceBoard, ledger: Ledger, shares_per_gpu: int, strategy: MigStrategy
) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
    """Return the device IDs of every resource kubelet is offered."""
    match strategy:
        case MigStrategy.NONE:
            return advertised(_without_mig(board), shares_per_gpu)
        case MigStrategy.SINGLE:
            offered = advertised(board, shares_per_gpu)
            profile = single_profile(board)
            instances = offered.get(mig.resource_of_profile(profile), ()) if profile is not None else ()
            return {contract.RESOURCE_VGPU: instances} if instances else advertised(_without_mig(board), shares_per_gpu)
        case MigStrategy.MIXED:
            return _with_on_demand(board, ledger, shares_per_gpu)


def _without_mig(board: DeviceBoard) -> DeviceBoard:
    return replace(board, devices=tuple(entry for entry in board.devices if not entry.device.mig_enabled))


def _with_on_demand(board: DeviceBoard, ledger: Ledger, shares_per_gpu: int) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
    resources = dict(advertised(board, shares_per_gpu))
    profiles = dict.fromkeys(place.profile for entry in board.devices for place in _places(entry.device))
    if not profiles:
        return resources
    states = {state.device.uuid: state for state in ledger.states(board, shares_per_gpu)}
    for profile in profiles:
        resource = mig.resource_of_profile(profile)
        offered = _on_demand_ids(board.devices, profile, states, ledger.held_ids(resource))
        resources[resource] = (*resources.get(resource, ()), *offered)
    return resources


def _places(device: Device) -> Iterable[MigInstance]:
    return (instance for instance in device.mig_instances if instance.on_demand)


def _on_demand_ids(
    entries: Iterable[BoardDevice], profile: str, states: Mapping[str, DeviceState], held: Collection[str]
) -> tuple[AdvertisedDevice, ...]:
    """Return an ID for each instance of a profile that can be there at most; healthy are those held, and as many as can be made now.

    So that kubelet, which knows no overlap between profiles, never counts on an instance for which there is no room.
    """
    ids: list[tuple[BoardDevice, str]] = []
    usable: set[str] = set()
    spare = 0
    for entry in entries:
        most = max((place.most_on_device for place in _places(entry.device) if place.profile == profile), default=0)
        own = [codec.encode_replica(entry.device.uuid, number) for number in range(most)]
        free = [device_id for device_id in own if device_id not in held]
        state = states[entry.device.uuid]
        existing = sum(not instance.on_demand for instance in mig.free_instances(state, profile))
        room = max(0, mig.room(state, profile) - existing) if entry.usable else 0
        usable.update(free[:room])
        spare += max(0, room - len(free))
        ids += [(entry, device_id) for device_id in own]
    for entry, device_id in ids:  # what was promised here may be held by an ID that names another GPU
        if spare and entry.usable and device_id not in held and device_id not in usable:
            usable.add(device_id)
            spare -= 1
    return tuple(
        AdvertisedDevice(device_id, entry.usable and (device_id in held or device_id in usable), entry.device.numa_node)
        for entry, device_id in ids
    )
