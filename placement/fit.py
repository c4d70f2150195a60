"""Whether a device can take one share of a request, and if not, why. The sentences for people are in refusal.py.

What is asked, in short: memory None is all of a device's memory, so nobody else's may be on it; cores None reserves nothing
and uses what is free, so not all of it may be reserved; isolation ``exclusive`` is the whole device, alone, and an amount of memory beside
it is what quotas count: no device with more is given for it.
"""

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Final

from placement import mig
from placement.device import DeviceState
from proto import units
from proto.model import ContainerRequest, Device, DeviceShare, Isolation, Preferences


class Reject(StrEnum):
    """Why a device, or a set of them, cannot take a request. The values are metric labels."""

    UNHEALTHY = "unhealthy"
    """The device is out of service."""
    CORDONED = "cordoned"
    """An administrator keeps new work off the device."""
    MIG_MODE = "mig-mode"
    """The device is in MIG mode: it is given out as instances."""
    TYPE = "type"
    """Not a model that the pod wants."""
    UUID = "uuid"
    """Not a UUID that the pod wants."""
    SHARES = "shares"
    """As many containers share the device as may."""
    EXCLUSIVE = "exclusive"
    """The pod wants the device for itself, and others use it."""
    MEMORY = "memory"
    """Not enough free memory on the device; or it is asked for whole, with an amount that is less than it has."""
    CORES = "cores"
    """Not enough free cores on the device."""
    MIG_PROFILE = "mig-profile"
    """No free MIG instance of the profile."""
    NUMA = "numa"
    """Enough devices, but not on one NUMA node."""
    COUNT = "count"
    """Fewer devices than vGPUs asked for."""


RULED_OUT: Final = (Reject.TYPE, Reject.UUID)
"""What a pod says of devices itself: it comes before all that holds for every pod."""


def share_on(device: Device, request: ContainerRequest, preferences: Preferences) -> DeviceShare:
    """Say what one vGPU of the request is on this device: amounts come from the request alone."""
    capacity_bytes = units.floor_to_mib(device.memory_bytes)
    if preferences.isolation is Isolation.EXCLUSIVE:
        return DeviceShare(device.uuid, capacity_bytes, units.WHOLE_GPU_PERCENT)
    memory_bytes = request.memory_bytes_per_vgpu
    return DeviceShare(device.uuid, capacity_bytes if memory_bytes is None else memory_bytes, request.cores_percent_per_vgpu)


def understates(device: Device, request: ContainerRequest, preferences: Preferences) -> bool:
    """Whether the request names less memory than the device has, and asks for all of it by ``exclusive``.

    Quotas have counted what it names. Annotations can change after that, so this is asked wherever a device is chosen or granted.
    """
    if preferences.isolation is not Isolation.EXCLUSIVE or request.memory_bytes_per_vgpu is None:
        return False
    return request.memory_bytes_per_vgpu < units.floor_to_mib(device.memory_bytes)


def reject_reason(state: DeviceState, request: ContainerRequest, preferences: Preferences) -> Reject | None:
    """Say why the device cannot take one vGPU, or one MIG instance, of the request; None when it can."""
    unusable = _unusable(state, preferences)
    if unusable is not None:
        return unusable
    if request.mig:
        return None if any(mig.free_instances(state, profile) for profile, _ in request.mig) else Reject.MIG_PROFILE
    if state.device.mig_enabled:
        return Reject.MIG_MODE
    return _short_of(state, request, preferences)


def _unusable(state: DeviceState, preferences: Preferences) -> Reject | None:
    model, uuid = state.device.model.lower(), state.device.uuid.lower()
    if not _wanted(preferences.gpu_type, preferences.gpu_type_not, lambda name: name.lower() in model):
        return Reject.TYPE
    if not _wanted(preferences.gpu_uuid, preferences.gpu_uuid_not, lambda name: name.lower() == uuid):
        return Reject.UUID
    if not state.healthy:
        return Reject.UNHEALTHY
    return Reject.CORDONED if state.cordoned else None


def _short_of(state: DeviceState, request: ContainerRequest, preferences: Preferences) -> Reject | None:
    share = share_on(state.device, request, preferences)
    if understates(state.device, request, preferences):
        return Reject.MEMORY
    if preferences.isolation is Isolation.EXCLUSIVE and not state.empty:
        return Reject.EXCLUSIVE
    if state.free_shares < 1:
        return Reject.SHARES
    if not 0 < share.memory_bytes <= state.free_memory_bytes:
        return Reject.MEMORY
    if share.cores_percent is None:
        return None if state.unreserved_fits else Reject.CORES
    return Reject.CORES if share.cores_percent > state.free_cores_percent else None


def _wanted(names: Collection[str], names_not: Collection[str], matches: Callable[[str], bool]) -> bool:
    return (not names or any(map(matches, names))) and not any(map(matches, names_not))
