# SPDX-License-Identifier: Apache-2.0
"""Partitions GPUs in MIG mode through NVML: lists the possible places, makes instances and removes them.

Profile ids, names, sizes and placements come from the driver, for each GPU. An instance here is a GPU instance with one compute instance
that covers all of it. A GPU instance without a compute instance is a leftover of a crash; it is found and removed as well.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import pynvml

from agent.adapters.nvml.driver import NvmlDriver
from agent.adapters.nvml.mig_rights import mig_rights
from agent.errors import DriverError, DriverMissingError, PartitionError, PartitionInUseError
from aliquot.contract.codec import MigPlace
from aliquot.contract.errors import ContractError
from aliquot.contract.model import MediaEngines, MigInstance
from aliquot.contract.units import MIB
from aliquot.placement import mig

_NO_SUCH_PROFILE = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
_GONE = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_BUSY = (pynvml.NVML_ERROR_IN_USE,)
_MOST_INSTANCES = 16
"""More than any GPU can hold; NVML has no query for the number before the list."""
_IN_THE_WAY = "another instance, perhaps one without a compute instance, is in the way or uses the media engines"


class NvmlMig:
    """Implements ``ports.MigPartitions`` in the session and thread of ``NvmlDriver``."""

    def __init__(self, driver: NvmlDriver) -> None:
        self._driver = driver
        self._profile_ids: dict[str, dict[str, int]] = {}
        """By device UUID and profile name."""

    async def places(self, device_uuid: str) -> Sequence[MigInstance]:
        """See ``ports.MigPartitions``."""
        return await self._driver.run(lambda: self._places(device_uuid))

    async def instance_at(self, place: MigPlace) -> MigInstance | None:
        """See ``ports.MigPartitions``."""
        return await self._driver.run(lambda: self._instance_at(place))

    async def create(self, place: MigPlace, size: int) -> MigInstance:
        """See ``ports.MigPartitions``."""
        return await self._driver.run(lambda: self._create(place, size))

    async def destroy(self, place: MigPlace) -> None:
        """See ``ports.MigPartitions``."""
        await self._driver.run(lambda: self._destroy(place))

    # --- below: in the NVML thread only ---

    def _places(self, uuid: str) -> tuple[MigInstance, ...]:
        handle = self._driver.handle_of(uuid)
        found: list[MigInstance] = []
        profile_ids: dict[str, int] = {}
        try:
            for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
                info = self._query("nvmlDeviceGetGpuInstanceProfileInfo", handle, index, 2, of=uuid, expected=_NO_SUCH_PROFILE)
                if info is None:
                    continue
                name = _profile_name(info)
                if name is None or name in profile_ids:
                    continue
                profile_ids[name] = info.id
                found += [_place(uuid, name, info, placement.start, placement.size) for placement in self._placements(handle, uuid, info)]
        except pynvml.NVMLError as exc:
            raise DriverError(f"reading the MIG profiles of {uuid}: {_cure(exc)}") from exc
        self._profile_ids[uuid] = profile_ids
        return tuple(found)

    def _query(self, name: str, *arguments: Any, of: str, expected: tuple[int, ...]) -> Any:
        """Call NVML; return None for an expected error."""
        try:
            return self._driver.call(name, *arguments, of=of, expected=expected)
        except pynvml.NVMLError as exc:
            if exc.value in expected:
                return None
            raise

    def _placements(self, handle: Any, uuid: str, info: Any) -> Sequence[Any]:
        count = ctypes.c_uint(0)
        call = "nvmlDeviceGetGpuInstancePossiblePlacements"
        self._driver.call(call, handle, info.id, None, ctypes.byref(count), of=uuid)
        placements = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
        self._driver.call(call, handle, info.id, placements, ctypes.byref(count), of=uuid)
        return list(placements)[: count.value]

    def _profile_id(self, place: MigPlace) -> int:
        if place.device_uuid not in self._profile_ids:
            self._places(place.device_uuid)
        known = self._profile_ids[place.device_uuid]
        if place.profile not in known:
            offered = ", ".join(known) or "none"
            raise PartitionError(f"{place.device_uuid} has no MIG profile {place.profile}, only {offered}")
        return known[place.profile]

    def _instance_at(self, place: MigPlace) -> MigInstance | None:
        try:
            handle = self._driver.handle_of(place.device_uuid)
            gpu_instance = self._gpu_instance(handle, place)
            return None if gpu_instance is None else self._described(handle, gpu_instance, place)
        except pynvml.NVMLError as exc:
            raise DriverError(f"looking for the MIG instance at {place}: {_cure(exc)}") from exc

    def _gpu_instance(self, handle: Any, place: MigPlace) -> Any:
        """Return the GPU instance of the place's profile that begins there, or None."""
        found = (pynvml.c_nvmlGpuInstance_t * _MOST_INSTANCES)()
        count = ctypes.c_uint(_MOST_INSTANCES)
        call = "nvmlDeviceGetGpuInstances"
        self._driver.call(call, handle, self._profile_id(place), found, ctypes.byref(count), of=place.device_uuid)
        for candidate in list(found)[: count.value]:
            info = self._driver.call("nvmlGpuInstanceGetInfo", candidate, of=place.device_uuid)
            if info.placement.start == place.start:
                return candidate
        return None

    def _described(self, handle: Any, gpu_instance: Any, place: MigPlace) -> MigInstance:
        """Return the instance at a place. Its UUID is empty if there is no MIG device, because the compute instance is missing."""
        info = self._driver.call("nvmlGpuInstanceGetInfo", gpu_instance, of=place.device_uuid)
        uuid, compute_instance_id = self._mig_device(handle, info.id, place.device_uuid)
        return MigInstance(
            uuid, place.device_uuid, place.profile, 0, info.id, compute_instance_id, info.placement.start, info.placement.size
        )

    def _mig_device(self, handle: Any, gpu_instance_id: int, of: str) -> tuple[str, int]:
        for slot in range(self._driver.call("nvmlDeviceGetMaxMigDeviceCount", handle, of=of)):
            device = self._query("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot, of=of, expected=_GONE)
            if device is not None and self._driver.call("nvmlDeviceGetGpuInstanceId", device, of=of) == gpu_instance_id:
                uuid = self._driver.call("nvmlDeviceGetUUID", device, of=of)
                return uuid, self._driver.call("nvmlDeviceGetComputeInstanceId", device, of=of)
        return "", 0

    def _create(self, place: MigPlace, size: int) -> MigInstance:
        handle = self._driver.handle_of(place.device_uuid)
        where = pynvml.c_nvmlGpuInstancePlacement_t(place.start, size)
        try:
            gpu_instance = self._driver.call(
                "nvmlDeviceCreateGpuInstanceWithPlacement", handle, self._profile_id(place), ctypes.byref(where), of=place.device_uuid
            )
            try:
                whole = max(self._compute_profiles(gpu_instance, place.device_uuid), key=lambda info: info.sliceCount)
                self._driver.call("nvmlGpuInstanceCreateComputeInstance", gpu_instance, whole.id, of=place.device_uuid)
            except pynvml.NVMLError:
                self._driver.call("nvmlGpuInstanceDestroy", gpu_instance, of=place.device_uuid)
                raise
            made = self._described(handle, gpu_instance, place)
        except pynvml.NVMLError as exc:
            raise _partition_error(f"making a MIG instance at {place}", exc) from exc
        if not made.uuid:
            raise PartitionError(f"the driver made a MIG instance at {place} but does not list it")
        return made

    def _compute_profiles(self, gpu_instance: Any, of: str) -> Sequence[Any]:
        """Return the driver's description of each kind of compute instance that this GPU instance can have."""
        call, shared = "nvmlGpuInstanceGetComputeInstanceProfileInfo", pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        infos = (
            self._query(call, gpu_instance, index, shared, of=of, expected=_NO_SUCH_PROFILE)
            for index in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
        )
        return [info for info in infos if info is not None]

    def _destroy(self, place: MigPlace) -> None:
        try:
            handle = self._driver.handle_of(place.device_uuid)
            gpu_instance = self._gpu_instance(handle, place)
            if gpu_instance is None:
                return
            for compute_instance in self._compute_instances(gpu_instance, place.device_uuid):
                self._driver.call("nvmlComputeInstanceDestroy", compute_instance, of=place.device_uuid, expected=_BUSY)
            self._driver.call("nvmlGpuInstanceDestroy", gpu_instance, of=place.device_uuid, expected=_BUSY)
        except pynvml.NVMLError as exc:
            raise _partition_error(f"removing the MIG instance at {place}", exc) from exc

    def _compute_instances(self, gpu_instance: Any, of: str) -> Sequence[Any]:
        instances: list[Any] = []
        for info in self._compute_profiles(gpu_instance, of):
            found = (pynvml.c_nvmlComputeInstance_t * _MOST_INSTANCES)()
            count = ctypes.c_uint(_MOST_INSTANCES)
            self._driver.call("nvmlGpuInstanceGetComputeInstances", gpu_instance, info.id, found, ctypes.byref(count), of=of)
            instances += list(found)[: count.value]
        return instances


def _profile_name(info: Any) -> str | None:
    """Return the profile in the spelling of resources; None if it gives no resource name, such as some models' graphics profiles."""
    text = info.name.decode() if isinstance(info.name, bytes) else str(info.name)
    name = text.rpartition("MIG ")[2]
    try:
        mig.resource_of_profile(name)
    except ContractError:
        return None
    return name


def _place(device_uuid: str, profile: str, info: Any, start: int, size: int) -> MigInstance:
    return MigInstance(
        uuid=str(MigPlace(device_uuid, profile, start)),
        parent_uuid=device_uuid,
        profile=profile,
        memory_bytes=info.memorySizeMB * MIB,
        gpu_instance_id=0,
        compute_instance_id=0,
        placement_start=start,
        placement_size=size,
        most_on_device=info.instanceCount,
        engines=MediaEngines(info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount),
    )


def _partition_error(what: str, exc: pynvml.NVMLError) -> DriverError:
    if exc.value == pynvml.NVML_ERROR_IN_USE:
        return PartitionInUseError(f"{what}: processes still use it")
    if exc.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return DriverMissingError(f"{what}: {exc}")
    return PartitionError(f"{what}: {_cure(exc)}")


def _cure(exc: pynvml.NVMLError) -> str:
    """Return what to do about an error, or the error's text."""
    if exc.value == pynvml.NVML_ERROR_NO_PERMISSION:
        return mig_rights()
    return _IN_THE_WAY if exc.value == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES else str(exc)
