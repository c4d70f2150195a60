"""MIG: profile names, the resources they are asked by, and the choice among instances that exist.

An instance is handed out whole, so its own memory and slices are the amounts; fitting is a matter of which instances are free.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from placement.device import DeviceState
from proto import contract
from proto.errors import ContractError, quote
from proto.model import MigInstance

_PROFILE: Final = re.compile(r"(?:([1-9][0-9]?)c\.)?([1-9][0-9]?)g\.([1-9][0-9]{0,3})gb(?:([+-])([a-z]+(?:\.[a-z]+)*))?", re.ASCII)
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
    """Return the device's instances of a profile that no share holds, in order of their place on the device."""
    free = [i for i in state.device.mig_instances if i.profile == profile and i.uuid not in state.used_instances]
    return tuple(sorted(free, key=lambda instance: (instance.placement_start, instance.uuid)))


def choose_instances(
    states: Sequence[DeviceState], profile: str, count: int, *, spread: bool, preferred_uuids: Collection[str] = ()
) -> tuple[MigInstance, ...] | None:
    """Choose free instances of one profile among devices that may be used, or None when there are too few.

    Preferred instances come first. The others are packed: first from the devices with the most instances in use, so that whole
    devices stay free for another partition; with ``spread``, from those with the fewest, one at a time.
    """
    chosen: list[MigInstance] = []
    used = {state.device.uuid: len(state.used_instances) for state in states}
    left = {instance.uuid: instance for state in states for instance in free_instances(state, profile)}
    order = {state.device.uuid: position for position, state in enumerate(states)}

    def cost(instance: MigInstance) -> tuple[bool, int, int, int, str]:
        in_use = used[instance.parent_uuid]
        return (
            instance.uuid not in preferred_uuids,
            in_use if spread else -in_use,
            order[instance.parent_uuid],
            instance.placement_start,
            instance.uuid,
        )

    for _ in range(count):
        if not left:
            return None
        instance = left.pop(min(left.values(), key=cost).uuid)
        used[instance.parent_uuid] += 1
        chosen.append(instance)
    return tuple(chosen)
