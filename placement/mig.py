"""MIG: profile names, the resources they are asked by, and the choice among instances that exist.

An instance is handed out whole, so its own memory and slices are the amounts; fitting is a matter of which instances are free. A
node whose agent makes instances on demand lists the places for them among a device's instances; a place is free while nothing that
exists or is promised overlaps it, or has the media engines that it takes.
"""

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from placement.device import DeviceState
from proto import contract
from proto.errors import ContractError, quote
from proto.model import Device, MediaEngines, MigInstance

_PROFILE: Final = re.compile(r"(?:([1-9][0-9]?)c\.)?([1-9][0-9]?)g\.([1-9][0-9]{0,3})gb(?:([+-])([a-z]+(?:\.[a-z]+)*))?", re.ASCII)
_NO_ENGINES: Final = MediaEngines()
_PROFILES_KEPT: Final = 256
"""More than all models of GPUs have together."""
_RESOURCE_ATTRIBUTES: Final = re.compile(r"(gb)\.([a-z])", re.ASCII)


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A parsed profile name, ``[<compute>c.]<gpu>g.<memory>gb[+attributes|-attributes]``."""

    compute_slices: int
    gpu_slices: int
    memory_gb: int
    """As in the name: rounded by the driver, for recognising and never for counting."""
    attributes: str = ""
    """With its sign, such as ``+me`` or ``-me``."""

    def __str__(self) -> str:
        compute = "" if self.compute_slices == self.gpu_slices else f"{self.compute_slices}c."
        return f"{compute}{self.gpu_slices}g.{self.memory_gb}gb{self.attributes}"


def parse_profile(text: str) -> MigProfile:
    """Read a profile as NVML names it, such as ``1g.10gb+me``. Raises ContractError for anything else."""
    match = _PROFILE.fullmatch(text)
    if match is None:
        raise ContractError(f"expected a MIG profile such as 1g.10gb or 1g.10gb+me, found {quote(text)}")
    compute, gpu, memory, sign, attributes = match.groups()
    return MigProfile(int(compute or gpu), int(gpu), int(memory), sign + attributes if sign else "")


def resource_of_profile(profile: str) -> str:
    """Name the resource that asks for a profile: ``1g.10gb+me`` becomes ``nvidia.com/mig-1g.10gb.me``."""
    return contract.RESOURCE_MIG_PREFIX + str(parse_profile(profile)).replace("+", ".")


def profile_of_resource(resource: str) -> str:
    """Name the profile that a resource asks for; the reverse of resource_of_profile. Raises ContractError."""
    if not resource.startswith(contract.RESOURCE_MIG_PREFIX):
        raise ContractError(f"expected a resource such as {contract.RESOURCE_MIG_PREFIX}1g.10gb, found {quote(resource)}")
    name = _RESOURCE_ATTRIBUTES.sub(r"\1+\2", resource.removeprefix(contract.RESOURCE_MIG_PREFIX))
    return str(parse_profile(name))


def free_instances(state: DeviceState, profile: str) -> tuple[MigInstance, ...]:
    """Return the device's instances of a profile that no share holds, in order of their place on the device.

    Where the node's agent makes instances on demand, these include the places in which one can be made now.
    """
    return _free(state.device.mig_instances, profile, state.used_instances)


def _free(instances: Collection[MigInstance], profile: str, used_uuids: Collection[str]) -> tuple[MigInstance, ...]:
    made = [place for place in instances if place.on_demand and place.uuid in used_uuids]
    there = [instance for instance in instances if not instance.on_demand] + made
    alike = sum(other.profile == profile for other in there)
    asked = [instance for instance in instances if instance.profile == profile and instance.uuid not in used_uuids]
    more = _has_engines(asked, instances, there)

    def is_free(instance: MigInstance) -> bool:
        if not instance.on_demand:  # instances that exist side by side never stand in each other's way, whatever their slices say
            return not any(map(instance.overlaps, made))
        return more and alike < instance.most_on_device and not any(map(instance.overlaps, there))

    return tuple(sorted(filter(is_free, asked), key=lambda instance: (instance.placement_start, instance.uuid)))


def _has_engines(asked: Iterable[MigInstance], instances: Collection[MigInstance], there: Collection[MigInstance]) -> bool:
    """Whether a device has the media engines left for one more instance of a profile.

    It has as many in all as the profile with the most takes, which is the one of the whole device.

    Args: asked: of that profile, which all take the same.
          instances: of the device; what they do not tell is no limit.
          there: those that exist or are promised. What begins at one slice are compute instances of one GPU instance, which has its
                 engines once.
    """
    wanted = next((place.engines for place in asked if place.engines is not None), _NO_ENGINES)
    if wanted == _NO_ENGINES:
        return True
    taken = {place.profile: place.engines for place in instances if place.engines is not None}
    held = {instance.placement_start: taken.get(_gpu_profile(instance.profile), _NO_ENGINES) for instance in there}
    sums = map(sum, zip(wanted, *held.values(), strict=True))
    return all(map(operator.le, sums, map(max, zip(*taken.values(), strict=True))))


@lru_cache(maxsize=_PROFILES_KEPT)
def _gpu_profile(profile: str) -> str:
    """Return the profile of the GPU instance in which a compute instance is: ``3g.40gb`` of ``1c.3g.40gb`` and of itself."""
    try:
        found = parse_profile(profile)
    except ContractError:  # of a driver newer than we are
        return profile
    return str(replace(found, compute_slices=found.gpu_slices))


def room(state: DeviceState, profile: str) -> int:
    """Return how many instances of one profile the device can still give out if no other profile is asked for meanwhile."""
    return _room(state.device.mig_instances, profile, state.used_instances)


def rooms(instances: Collection[MigInstance], used_uuids: Collection[str]) -> Mapping[str, int]:
    """Return the room for each profile of a device with these instances and places, of which some are used."""
    return {profile: _room(instances, profile, used_uuids) for profile in dict.fromkeys(instance.profile for instance in instances)}


def _room(instances: Collection[MigInstance], profile: str, used_uuids: Collection[str]) -> int:
    used, count = set(used_uuids), 0
    while free := _free(instances, profile, used):  # those of one profile are of one size, so that taking the first is best
        used.add(free[0].uuid)
        count += 1
    return count


class Slices(NamedTuple):
    """The memory slices of a device that instances have or can have: how many there are, and how many no share holds."""

    total: int
    free: int


def slices(instances: Collection[MigInstance], used_uuids: Collection[str]) -> Slices:
    """Count the memory slices of a device with these instances and places, of which some are used.

    Places overlap, so they count with what they cover together, beside the instances that exist; each of those counts with its own size,
    also where two compute instances share the slices of one GPU instance.
    """
    existing, places = [i for i in instances if not i.on_demand], [i for i in instances if i.on_demand]
    made = [place for place in places if place.uuid in used_uuids]
    taken = _covered(existing)
    total = sum(map(size_of, existing)) + len(_covered(places) - taken)
    used = sum(size_of(instance) for instance in existing if instance.uuid in used_uuids or any(map(instance.overlaps, made)))
    used += len(_covered(made) - taken)
    return Slices(total, total - used)


def sizes(instances: Collection[MigInstance]) -> Mapping[str, int]:
    """Return for each profile how many memory slices an instance of it takes, the least where they differ."""
    found: dict[str, int] = {}
    for instance in instances:
        found[instance.profile] = min(found.get(instance.profile, size_of(instance)), size_of(instance))
    return found


def size_of(instance: MigInstance) -> int:
    """Return the memory slices of an instance, at least one."""
    return max(1, instance.placement_size)


def _covered(instances: Collection[MigInstance]) -> set[int]:
    return {at for instance in instances for at in range(instance.placement_start, instance.placement_start + size_of(instance))}


def choose_instances(
    states: Sequence[DeviceState], profile: str, count: int, *, spread: bool, preferred_uuids: Collection[str] = ()
) -> tuple[MigInstance, ...] | None:
    """Choose free instances of one profile among devices that may be used, or None when there are too few.

    Preferred instances come first. The others are packed: first from the devices with the most instances in use, so that whole
    devices stay free for another partition; with ``spread``, from those with the fewest, one at a time. On one device an instance
    that exists comes before one that must be made, and that is made where it takes the least room from others.
    """
    chosen: list[MigInstance] = []
    used = {state.device.uuid: set(state.used_instances) for state in states}
    order = {state.device.uuid: position for position, state in enumerate(states)}
    devices = {state.device.uuid: state.device for state in states}

    def cost(instance: MigInstance) -> tuple[bool, int, int, int, int, str]:
        in_use = len(used[instance.parent_uuid])
        return (
            instance.uuid not in preferred_uuids,
            in_use if spread else -in_use,
            order[instance.parent_uuid],
            _room_lost(devices[instance.parent_uuid], instance, used[instance.parent_uuid]),
            instance.placement_start,
            instance.uuid,
        )

    for _ in range(count):
        free = [instance for uuid, device in devices.items() for instance in _free(device.mig_instances, profile, used[uuid])]
        if not free:
            return None
        instance = min(free, key=cost)
        used[instance.parent_uuid].add(instance.uuid)
        chosen.append(instance)
    return tuple(chosen)


def _room_lost(device: Device, instance: MigInstance, used_uuids: Collection[str]) -> int:
    """Add up the sizes of the places that an instance made here takes from others; 0 for one that exists."""
    if not instance.on_demand:
        return 0
    profiles = {place.profile for place in device.mig_instances if place.on_demand}
    free = (place for profile in profiles for place in _free(device.mig_instances, profile, used_uuids))
    return sum(place.placement_size for place in free if place.overlaps(instance))
