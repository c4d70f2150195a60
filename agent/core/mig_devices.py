# SPDX-License-Identifier: Apache-2.0
"""What a GPU in MIG mode offers by ResourceSlices: the instances that exist, and the places where the agent makes one for a claim.

Places overlap, so each draws on counters of its GPU: the memory slices that it covers, its compute slices and its media engines. An
instance that exists has its own slices, and no place that overlaps it is offered.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agent.core.inventory import DeviceInventory, InventoryDevice
from aliquot.contract.errors import ContractError
from aliquot.contract.model import MediaEngines, MigInstance
from aliquot.placement.mig import parse_profile

TYPE_MIG: Final = "mig"
"""The attribute ``type`` of an instance, or a place for one."""
_COMPUTE: Final = "compute-slices"
Counters = Mapping[str, int]


def mig_name(gpu: str, instance: MigInstance) -> str:
    """Return the name of an instance or a place in slices and allocations. Args: gpu: the name of its GPU."""
    profile = instance.profile.replace(".", "").replace("gb-", "gb-no-").replace("+", "-")
    place = f"{gpu}-mig-{profile}-{instance.placement_start}"
    return place if instance.on_demand else f"{place}-{instance.gpu_instance_id}-{instance.compute_instance_id}"


def find_instance(inventory: DeviceInventory, name: str) -> tuple[InventoryDevice, MigInstance] | None:
    """Return the GPU and the instance, or place, that a name in an allocation means now; None if there is no such instance."""
    for entry in inventory.devices:
        for instance in entry.device.mig_instances:
            if mig_name(f"gpu-{entry.device.minor}", instance) == name:
                return entry, instance
    return None


def offered_instances(entry: InventoryDevice) -> Sequence[MigInstance]:
    """Return the instances of a GPU, and the places that overlap none, in the order of their slices."""
    existing = _existing(entry)
    places = [one for one in entry.device.mig_instances if one.on_demand and not any(map(one.overlaps, existing))]
    return sorted([*existing, *places], key=lambda one: (one.placement_start, one.placement_size, one.profile, one.compute_instance_id))


def counters_of(entry: InventoryDevice) -> Counters:
    """Return what the places of a GPU draw on; empty without places."""
    places = [one for one in offered_instances(entry) if one.on_demand]
    if not places:
        return {}
    end = max(one.placement_start + one.placement_size for one in places)
    engines = _sum_of_engines(entry)
    compute = max(_compute_slices(one) for one in entry.device.mig_instances if one.on_demand)
    compute -= sum({one.gpu_instance_id: _compute_slices(one) for one in _existing(entry)}.values())
    return {**{_slice(number): 1 for number in range(end)}, _COMPUTE: max(0, compute), **engines}


def draws_of(instance: MigInstance, counters: Counters) -> Counters:
    """Return what a place takes of its GPU's counters."""
    slices = {_slice(instance.placement_start + number): 1 for number in range(instance.placement_size)}
    engines = _named(instance.engines) if instance.engines is not None else {}
    return {name: amount for name, amount in {**slices, _COMPUTE: _compute_slices(instance), **engines}.items() if name in counters}


def as_quantities(counters: Counters) -> Mapping[str, Any]:
    """Return counters in the API's form."""
    return {name: {"value": str(amount)} for name, amount in counters.items()}


def _existing(entry: InventoryDevice) -> Sequence[MigInstance]:
    return [one for one in entry.device.mig_instances if not one.on_demand]


def _slice(number: int) -> str:
    return f"memory-slice-{number}"


def _compute_slices(instance: MigInstance) -> int:
    try:
        return parse_profile(instance.profile).gpu_slices
    except ContractError:  # from a driver that is newer than this code: its memory slices count
        return 0


def _sum_of_engines(entry: InventoryDevice) -> Counters:
    """Return the media engines that are left for places: as many as the largest profile takes, without those of existing instances."""
    known = {one.profile: one.engines for one in entry.device.mig_instances if one.engines is not None}
    if not known:
        return {}
    whole = [max(amounts) for amounts in zip(*known.values(), strict=True)]
    held = {one.gpu_instance_id: known.get(one.profile) for one in _existing(entry)}
    left = [max(0, amount - taken) for amount, taken in zip(whole, _added(held.values()), strict=True)]
    return {name: amount for name, amount in _named(MediaEngines(*left)).items() if whole[MediaEngines._fields.index(name)]}


def _added(engines: Iterable[MediaEngines | None]) -> Sequence[int]:
    return [sum(amounts) for amounts in zip(MediaEngines(), *(one for one in engines if one is not None), strict=True)]


def _named(engines: MediaEngines) -> Counters:
    return engines._asdict()
