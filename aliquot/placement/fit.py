# SPDX-License-Identifier: Apache-2.0
"""Whether a device can take one share of a request, and if not, why. The sentences for users are in refusal.py.

A request without memory asks for all memory of a device, so no other container may have memory there. A percentage is one of the device's
memory. Cores ``None`` reserves no cores and uses what is free, so some must be unreserved. Isolation ``exclusive`` is the whole device for
one container; an amount of memory is then what quotas count, so a device with more memory does not fit.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import Final

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, Device, DeviceShare, Isolation, Preferences
from aliquot.placement import mig, model_name
from aliquot.placement.device import DeviceState


class Reject(StrEnum):
    """Why a device, or a set of them, cannot take a request. The values are metric labels."""

    UNHEALTHY = "unhealthy"
    """The device is out of service."""
    CORDONED = "cordoned"
    """An administrator keeps new work off the device."""
    MIG_MODE = "mig-mode"
    """The device is in MIG mode: containers get its instances only."""
    TYPE = "type"
    """The pod's gpu-type or gpu-type-not excludes the device."""
    UUID = "uuid"
    """The pod's gpu-uuid or gpu-uuid-not excludes the device."""
    SHARES = "shares"
    """The device has no free share: as many containers use it as the agent allows."""
    EXCLUSIVE = "exclusive"
    """The pod wants the device for itself, and other containers use it."""
    MEMORY = "memory"
    """Not enough free memory on the device; or the pod wants the whole device, but states less memory than it has."""
    CORES = "cores"
    """Not enough free cores on the device."""
    MIG_PROFILE = "mig-profile"
    """No free MIG instance of the profile."""
    NUMA = "numa"
    """Enough devices, but not on one NUMA node."""
    COUNT = "count"
    """Fewer devices than vGPUs asked for."""


RULED_OUT: Final = (Reject.TYPE, Reject.UUID)
"""Reasons that the pod itself states. They come before the reasons that hold for every pod."""


def share_on(device: Device, request: ContainerRequest, preferences: Preferences) -> DeviceShare:
    """Return the share that one vGPU of the request takes of this device; only all its memory, or a part of it, depends on the device."""
    capacity_bytes = units.floor_to_mib(device.memory_bytes)
    if preferences.isolation is Isolation.EXCLUSIVE:
        return DeviceShare(device.uuid, capacity_bytes, units.WHOLE_GPU_PERCENT)
    memory_bytes = units.mib_to_bytes(request.memory_mib_on(capacity_bytes // units.MIB))
    return DeviceShare(device.uuid, memory_bytes, request.cores_percent_per_vgpu)


def understates(device: Device, request: ContainerRequest, preferences: Preferences) -> bool:
    """Whether the request asks for the whole device by ``exclusive``, but states less memory than the device has.

    Quotas counted the stated amount. Annotations can change later, so this is checked wherever a device is chosen or granted.
    """
    if preferences.isolation is not Isolation.EXCLUSIVE or request.memory_bytes_per_vgpu is None:
        return False
    return request.memory_bytes_per_vgpu < units.floor_to_mib(device.memory_bytes)


def reject_reason(state: DeviceState, request: ContainerRequest, preferences: Preferences) -> Reject | None:
    """Return why the device cannot take one vGPU, or one MIG instance, of the request; None if it can."""
    unusable = _unusable(state, preferences)
    if unusable is not None:
        return unusable
    if request.mig:
        return None if any(mig.free_instances(state, profile) for profile, _ in request.mig) else Reject.MIG_PROFILE
    if state.device.mig_enabled:
        return Reject.MIG_MODE
    return _short_of(state, request, preferences)


def _unusable(state: DeviceState, preferences: Preferences) -> Reject | None:
    if not model_name.wanted(state.device.model, preferences.gpu_type, preferences.gpu_type_not):
        return Reject.TYPE
    if not _uuid_wanted(state.device.uuid.lower(), preferences.gpu_uuid, preferences.gpu_uuid_not):
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


def _uuid_wanted(uuid: str, names: Collection[str], names_not: Collection[str]) -> bool:
    return (not names or uuid in (name.lower() for name in names)) and uuid not in (name.lower() for name in names_not)
