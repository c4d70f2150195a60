# SPDX-License-Identifier: Apache-2.0
"""MIG: profile names, their resources, and which instances of a device are free. partition.py chooses among them.

A container gets a whole instance, so only free instances matter, not amounts. If the agent of a node creates instances on demand, the
inventory lists the places for them among the device's instances. A place is free if no existing or promised instance overlaps it, and
the device has the media engines that it needs.
"""

import operator
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError, quote
from aliquot.contract.model import Device, MediaEngines, MigInstance, Preferences
from aliquot.placement import model_name
from aliquot.placement.device import DeviceState

_PROFILE: Final = re.compile(r"(?:([1-9][0-9]?)c\.)?([1-9][0-9]?)g\.([1-9][0-9]{0,3})gb(?:([+-])([a-z]+(?:\.[a-z]+)*))?", re.ASCII)
_NO_ENGINES: Final = MediaEngines()
_PROFILES_KEPT: Final = 256
"""More than all GPU models have together."""
_RESOURCE_ATTRIBUTES: Final = re.compile(r"(gb)\.([a-z])", re.ASCII)


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A parsed profile name, ``[<compute>c.]<gpu>g.<memory>gb[+attributes|-attributes]``."""

    compute_slices: int
    gpu_slices: int
    memory_gb: int
    """As in the name: the driver rounds it, so it only identifies the profile; never use it as an amount."""
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
    """Return the resource of a profile: ``1g.10gb+me`` becomes ``nvidia.com/mig-1g.10gb.me``."""
    return contract.RESOURCE_MIG_PREFIX + str(parse_profile(profile)).replace("+", ".")


def profile_of_resource(resource: str) -> str:
    """Return the profile of a resource; the inverse of resource_of_profile. Raises ContractError."""
    if not resource.startswith(contract.RESOURCE_MIG_PREFIX):
        raise ContractError(f"expected a resource such as {contract.RESOURCE_MIG_PREFIX}1g.10gb, found {quote(resource)}")
    name = _RESOURCE_ATTRIBUTES.sub(r"\1+\2", resource.removeprefix(contract.RESOURCE_MIG_PREFIX))
    return str(parse_profile(name))


def profile_sizes(devices: Iterable[Device], preferences: Preferences) -> dict[str, int]:
    """Return the profiles that a pod with these preferences can get on devices in MIG mode, with the MiB of the smallest instance."""
    sizes: dict[str, int] = {}
    for device in devices:
        if device.mig_instances and model_name.wanted(device.model, preferences.gpu_type, preferences.gpu_type_not):
            for instance in device.mig_instances:
                mib = instance.memory_bytes // units.MIB
                sizes[instance.profile] = min(mib, sizes.get(instance.profile, mib))
    return sizes


def free_instances(state: DeviceState, profile: str) -> tuple[MigInstance, ...]:
    """Return the free instances of a profile on the device, in the order of their placement.

    If the node's agent creates instances on demand, these include the places at which it can create one now.
    """
    return free_among(state.device.mig_instances, profile, state.used_instances)


def free_among(instances: Collection[MigInstance], profile: str, used_uuids: Collection[str]) -> tuple[MigInstance, ...]:
    """Return the free ones among the instances and places of one device, as ``free_instances``. Args: used_uuids: those in use."""
    made = [place for place in instances if place.on_demand and place.uuid in used_uuids]
    there = [instance for instance in instances if not instance.on_demand] + made
    alike = sum(other.profile == profile for other in there)
    asked = [instance for instance in instances if instance.profile == profile and instance.uuid not in used_uuids]
    more = _has_engines(asked, instances, there)

    def is_free(instance: MigInstance) -> bool:
        if not instance.on_demand:  # existing instances never exclude each other, even if their slices overlap
            return not any(map(instance.overlaps, made))
        return more and alike < instance.most_on_device and not any(map(instance.overlaps, there))

    return tuple(sorted(filter(is_free, asked), key=lambda instance: (instance.placement_start, instance.uuid)))


def _has_engines(asked: Iterable[MigInstance], instances: Collection[MigInstance], there: Collection[MigInstance]) -> bool:
    """Whether a device has the media engines left for one more instance of a profile.

    The device has as many engines as its largest profile takes, which is the profile of the whole device.

    Args: asked: the places of that profile.
          instances: those of the device; without known engines there is no limit.
          there: existing and promised ones. Those that begin at one slice are compute instances of one GPU instance and share its engines.
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
    """Return the profile of a compute instance's GPU instance: ``3g.40gb`` for ``1c.3g.40gb`` and for ``3g.40gb``."""
    try:
        found = parse_profile(profile)
    except ContractError:  # from a driver that is newer than this code
        return profile
    return str(replace(found, compute_slices=found.gpu_slices))


def room(state: DeviceState, profile: str) -> int:
    """Return how many more instances of one profile fit on the device, if no instance of another profile is taken in between."""
    return _room(state.device.mig_instances, profile, state.used_instances)


def rooms(instances: Collection[MigInstance], used_uuids: Collection[str]) -> Mapping[str, int]:
    """Return the room for each profile. Args: instances: all instances and places of one device. used_uuids: those in use."""
    return {profile: _room(instances, profile, used_uuids) for profile in dict.fromkeys(instance.profile for instance in instances)}


def _room(instances: Collection[MigInstance], profile: str, used_uuids: Collection[str]) -> int:
    used, count = set(used_uuids), 0
    while free := free_among(instances, profile, used):  # all of one profile have one size, so taking the first is best
        used.add(free[0].uuid)
        count += 1
    return count


class Slices(NamedTuple):
    """The memory slices of a device that instances have or can have: all of them, and the free ones."""

    total: int
    free: int


def slices(instances: Collection[MigInstance], used_uuids: Collection[str]) -> Slices:
    """Count the memory slices of a device. Args: instances: all its instances and places. used_uuids: those in use.

    Places overlap, so they count with the slices that they cover together and that no existing instance covers. Each existing instance
    counts with its own size, even if two compute instances share the slices of one GPU instance.
    """
    existing, places = [i for i in instances if not i.on_demand], [i for i in instances if i.on_demand]
    made = [place for place in places if place.uuid in used_uuids]
    taken = _covered(existing)
    total = sum(map(size_of, existing)) + len(_covered(places) - taken)
    used = sum(size_of(instance) for instance in existing if instance.uuid in used_uuids or any(map(instance.overlaps, made)))
    used += len(_covered(made) - taken)
    return Slices(total, total - used)


def sizes(instances: Collection[MigInstance]) -> Mapping[str, int]:
    """Return for each profile the memory slices of an instance; the smallest number if they differ."""
    found: dict[str, int] = {}
    for instance in instances:
        found[instance.profile] = min(found.get(instance.profile, size_of(instance)), size_of(instance))
    return found


def size_of(instance: MigInstance) -> int:
    """Return the memory slices of an instance, at least one."""
    return max(1, instance.placement_size)


def _covered(instances: Collection[MigInstance]) -> set[int]:
    return {at for instance in instances for at in range(instance.placement_start, instance.placement_start + size_of(instance))}
