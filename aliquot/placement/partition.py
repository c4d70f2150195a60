# SPDX-License-Identifier: Apache-2.0
"""The partition of a device in MIG mode: what is left for each profile, what of it is useless, and the choice among its instances.

Devices of one model with equal instances in use have equal results, so these are computed once for all of them: instances have numbers
here instead of names.

The fragmentation of a device is the part of its free memory slices that is useless to a pod that asks for one of its profiles, each profile
equally likely. So a choice that costs the fewest fragments keeps room for large profiles, and for as many pods as possible.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from aliquot.contract.model import Device, MigInstance, Policy
from aliquot.placement import mig
from aliquot.placement.demand import PPM
from aliquot.placement.device import DeviceState

_KEPT: Final = 4096
"""Partitions with cached results, a few KiB each: an A100 has 723, and more where profiles with media engines are in use."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The instances of a device, and the places for them, named by their numbers. Equal ones are one object, so that it is a fast key."""

    instances: tuple[MigInstance, ...]
    profiles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """A layout with the instances that are in use."""

    layout: Layout
    numbers: Mapping[str, str] = field(compare=False)
    """By the UUID of an instance or the name of a place."""
    used: frozenset[str] = frozenset()

    @classmethod
    def of(cls, device: Device, used_uuids: Collection[str] = ()) -> "Partition":
        """Return the partition of a device. Args: used_uuids: of instances in use; others are skipped."""
        numbers = {instance.uuid: str(number) for number, instance in enumerate(device.mig_instances)}
        return cls(_layout(tuple(_numbered(*item) for item in enumerate(device.mig_instances))), numbers).using(used_uuids)

    def using(self, uuids: Collection[str]) -> "Partition":
        """Return the partition with more instances in use."""
        return Partition(self.layout, self.numbers, self.used.union(self.numbers[uuid] for uuid in uuids if uuid in self.numbers))

    def releasing(self, uuid: str) -> "Partition":
        """Return the partition with one instance less in use."""
        return Partition(self.layout, self.numbers, self.used - {self.numbers[uuid]})

    @property
    def rooms(self) -> Mapping[str, int]:
        """The room for each profile, as ``mig.rooms`` counts it."""
        return _rooms(self.layout, self.used)

    @property
    def slices(self) -> mig.Slices:
        """The memory slices, as ``mig.slices`` counts them."""
        return _slices(self.layout, self.used)

    @property
    def fragmentation(self) -> int:
        """The useless part of the free memory slices, in parts per million of the device."""
        return _fragmentation(self.layout, self.used)

    def growth(self, position: int) -> int:
        """Return by how much the fragmentation grows when an instance is taken; negative when it shrinks."""
        return _fragmentation(self.layout, self.used | {str(position)}) - self.fragmentation

    def free(self, profile: str) -> Sequence[int]:
        """Return the positions of the free instances of a profile, as ``mig.free_among`` finds them."""
        return _free(self.layout, self.used, profile)

    def room_lost(self, position: int) -> int:
        """Add up the sizes of the other places that a new instance at a place would block; 0 for an existing instance."""
        return _room_lost(self.layout, self.used, position)

    @property
    def growths(self) -> Mapping[str, int]:
        """For each profile with room the growth by its best instance."""
        return _growths(self.layout, self.used)


def _numbered(number: int, instance: MigInstance) -> MigInstance:
    start, size, most, engines = instance.placement_start, instance.placement_size, instance.most_on_device, instance.engines
    return MigInstance(str(number), "", instance.profile, 0, 0, 0, start, size, most, engines)


@lru_cache(maxsize=_KEPT)
def _layout(instances: tuple[MigInstance, ...]) -> Layout:
    return Layout(instances, tuple(dict.fromkeys(instance.profile for instance in instances)))


@lru_cache(maxsize=_KEPT)
def _rooms(layout: Layout, used: frozenset[str]) -> Mapping[str, int]:
    return mig.rooms(layout.instances, used)


@lru_cache(maxsize=_KEPT)
def _slices(layout: Layout, used: frozenset[str]) -> mig.Slices:
    return mig.slices(layout.instances, used)


@lru_cache(maxsize=_KEPT)
def _fragmentation(layout: Layout, used: frozenset[str]) -> int:
    size, (total, free) = mig.sizes(layout.instances), _slices(layout, used)
    useless = sum(max(0, free - room * size[profile]) for profile, room in _rooms(layout, used).items())
    return useless * PPM // max(1, total * len(layout.profiles))


@lru_cache(maxsize=_KEPT)
def _free(layout: Layout, used: frozenset[str], profile: str) -> tuple[int, ...]:
    return tuple(int(instance.uuid) for instance in mig.free_among(layout.instances, profile, used))


@lru_cache(maxsize=_KEPT)
def _room_lost(layout: Layout, used: frozenset[str], position: int) -> int:
    instance = layout.instances[position]
    if not instance.on_demand:
        return 0
    free = (layout.instances[number] for profile in layout.profiles for number in _free(layout, used, profile))
    return sum(place.placement_size for place in free if place.on_demand and place.overlaps(instance))


@lru_cache(maxsize=_KEPT)
def _growths(layout: Layout, used: frozenset[str]) -> Mapping[str, int]:
    before = _fragmentation(layout, used)
    after = {profile: [_fragmentation(layout, used | {str(at)}) for at in _free(layout, used, profile)] for profile in layout.profiles}
    return {profile: min(found) - before for profile, found in after.items() if found}


def choose_instances(
    states: Sequence[DeviceState], profile: str, count: int, policy: Policy, *, preferred_uuids: Collection[str] = ()
) -> tuple[MigInstance, ...] | None:
    """Choose free instances of one profile on usable devices; None if there are too few.

    Preferred instances come first. With ``frag``, those come next that cost the fewest fragments. Then they are packed: first from the
    devices with the most instances in use, so that whole devices stay free for another partition. With ``spread`` they come from the
    devices with the fewest, one at a time. On one device, an existing instance comes before a place, and among places the one that takes
    the least room from others comes first.
    """
    chosen: list[MigInstance] = []
    partitions = [Partition.of(state.device, state.used_instances) for state in states]

    def cost(at: tuple[int, int]) -> tuple[bool, int, int, int, int, int, str]:
        order, position = at
        partition, instance = partitions[order], states[order].device.mig_instances[position]
        in_use = len(partition.used)
        return (
            instance.uuid not in preferred_uuids,
            partition.growth(position) if policy is Policy.FRAG else 0,
            in_use if policy is Policy.SPREAD else -in_use,
            order,
            partition.room_lost(position),
            instance.placement_start,
            instance.uuid,
        )

    for _ in range(count):
        free = [(order, position) for order, partition in enumerate(partitions) for position in partition.free(profile)]
        if not free:
            return None
        order, position = min(free, key=cost)
        instance = states[order].device.mig_instances[position]
        partitions[order] = partitions[order].using([instance.uuid])
        chosen.append(instance)
    return tuple(chosen)
