"""The driver through NVML (nvidia-ml-py): its types become ours, its errors ours, and every call is announced to the watchdog.

A question a GPU does not support is answered with None; a GPU that does not answer at all becomes a ``FailedDevice``; only a driver
that does not work as a whole raises.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml

from agent.adapters.nvml_thread import NvmlThread
from agent.core.inventory import DeviceReading, DriverReading, FailedDevice, promisable_bytes
from agent.core.overhead import ProcessMemory
from agent.errors import DriverError, DriverMissingError
from proto.model import Device, Link, LinkKind, MigInstance

_NOT_OFFERED = (
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
"""This GPU or driver does not have the feature; not a sign of trouble."""
_NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: install the driver, or mount the host's driver files",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and loaded kernel module have different versions: reload the module or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to use the NVIDIA driver: give this process access to /dev/nvidiactl",
}
_LINK_OF_LEVEL = {
    pynvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PCIE_SWITCH,
    pynvml.NVML_TOPOLOGY_SINGLE: LinkKind.PCIE_SWITCH,
    pynvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PCIE_SWITCH,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.HOST_BRIDGE,
    pynvml.NVML_TOPOLOGY_NODE: LinkKind.NUMA_NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYSTEM,
}
_NVLINK_TO_GPU = 0
_NVLINK_TO_SWITCH = 2
_NUMA_WORDS = 16
"""64-bit words of the NUMA node mask: 1024 nodes, the kernel's limit."""

ErrorCounter = Callable[[str, int], None]
"""Told the name of a failed NVML call and its code."""


class NvmlDriver:
    """Implements ``ports.Driver``."""

    def __init__(self, library: str, timeout_seconds: float, count_error: ErrorCounter) -> None:
        self._library = library
        self._count_error = count_error
        self._thread = NvmlThread(timeout_seconds)
        self._initialized = False
        self._known: dict[str, Device] = {}
        self._uuid_at_index: dict[int, str] = {}

    async def read(self) -> DriverReading:
        """See ``ports.Driver``."""
        return await self._thread.run(self._read)

    async def links(self) -> Sequence[Link]:
        """See ``ports.Driver``."""
        return await self._thread.run(self._links)

    async def processes(self) -> Sequence[ProcessMemory]:
        """See ``ports.Driver``."""
        return await self._thread.run(self._processes)

    async def restart(self) -> None:
        """See ``ports.Driver``."""
        await self._thread.run(self._shut_down)

    def hung_device(self) -> str | None:
        """See ``ports.Driver``."""
        hung = self._thread.hung_call()
        return hung.device_uuid if hung is not None else None

    # --- below: in the NVML thread only ---

    def _call(self, name: str, *arguments: Any, of: str | None = None, expected: tuple[int, ...] = ()) -> Any:
        """Call NVML; an error whose code is not ``expected`` is counted. Raises NVMLError."""
        self._thread.entering(name, of)
        try:
            return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError as exc:
            if exc.value not in expected:
                self._count_error(name, exc.value)
            raise

    def _ask(self, name: str, *arguments: Any, of: str | None = None, expected: tuple[int, ...] = _NOT_OFFERED) -> Any:
        """Call NVML, with None for what this GPU does not have."""
        try:
            return self._call(name, *arguments, of=of, expected=expected)
        except pynvml.NVMLError as exc:
            if exc.value in expected:
                return None
            raise

    def _start(self) -> None:
        if self._initialized:
            return
        try:
            if self._library and pynvml.nvmlLib is None:
                self._thread.entering("dlopen", None)
                pynvml.nvmlLib = ctypes.CDLL(self._library)
            self._call("nvmlInitWithFlags", 0)
        except OSError as exc:
            raise DriverMissingError(f"the NVML library {self._library} cannot be loaded: {exc}") from exc
        except pynvml.NVMLError as exc:
            raise _driver_error("nvmlInitWithFlags", exc) from exc
        self._initialized = True

    def _shut_down(self) -> None:
        if self._initialized:
            self._initialized = False
            try:
                self._call("nvmlShutdown")
            except pynvml.NVMLError as exc:
                raise _driver_error("nvmlShutdown", exc) from exc

    def _read(self) -> DriverReading:
        self._start()
        try:
            version = self._call("nvmlSystemGetDriverVersion")
            cuda_version = self._call("nvmlSystemGetCudaDriverVersion_v2")
            count = self._call("nvmlDeviceGetCount")
        except pynvml.NVMLError as exc:
            self._initialized = False  # the next read enters the driver anew: it may have been reloaded under us
            raise _driver_error("reading the driver", exc) from exc
        devices, failed = [], []
        for index in range(count):
            try:
                devices.append(self._read_device(index))
            except pynvml.NVMLError as exc:
                failed.append(FailedDevice(index, self._uuid_at_index.get(index), f"the driver answers: {exc}"))
        return DriverReading(version, cuda_version, tuple(devices), tuple(failed))

    def _read_device(self, index: int) -> DeviceReading:
        expected = self._uuid_at_index.get(index)
        handle = self._call("nvmlDeviceGetHandleByIndex", index, of=expected)
        uuid = self._call("nvmlDeviceGetUUID", handle, of=expected)
        self._uuid_at_index[index] = uuid
        total, reserved, used = self._memory(handle, uuid)
        if uuid not in self._known:
            self._known[uuid] = self._facts(handle, uuid, promisable_bytes(total, reserved))
        utilization = self._ask("nvmlDeviceGetUtilizationRates", handle, of=uuid)
        device, instances_used_bytes = self._with_mig(handle, self._known[uuid])
        return DeviceReading(
            device,
            memory_used_bytes=used,
            utilization_ratio=utilization.gpu / 100 if utilization is not None else None,
            instances_used_bytes=instances_used_bytes,
        )

    def _memory(self, handle: Any, uuid: str) -> tuple[int, int, int]:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2, of=uuid)
        if memory is not None:
            return memory.total, memory.reserved, memory.used
        memory = self._call("nvmlDeviceGetMemoryInfo", handle, of=uuid)  # drivers before R510 have no split of the reserve
        return memory.total, 0, memory.used

    def _facts(self, handle: Any, uuid: str, memory_bytes: int) -> Device:
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle, of=uuid)
        return Device(
            uuid=uuid,
            model=self._call("nvmlDeviceGetName", handle, of=uuid),
            minor=self._call("nvmlDeviceGetMinorNumber", handle, of=uuid),
            pci_bus_id=_text(self._call("nvmlDeviceGetPciInfo", handle, of=uuid).busId),
            memory_bytes=memory_bytes,
            numa_node=self._numa_node(handle, uuid),
            compute_capability=tuple(capability) if capability is not None else None,
        )

    def _numa_node(self, handle: Any, uuid: str) -> int | None:
        mask = self._ask("nvmlDeviceGetMemoryAffinity", handle, _NUMA_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE, of=uuid)
        if mask is None:
            return None
        nodes = [64 * word + bit for word in range(_NUMA_WORDS) for bit in range(64) if mask[word] >> bit & 1]
        return nodes[0] if len(nodes) == 1 else None  # near to several is near to none in particular

    def _with_mig(self, handle: Any, device: Device) -> tuple[Device, Mapping[str, int]]:
        """Return the device with its MIG instances, and what of each instance's memory is in use."""
        mode = self._ask("nvmlDeviceGetMigMode", handle, of=device.uuid)
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return device, {}
        instances, used_bytes = [], {}
        for slot in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle, of=device.uuid)):
            instance_handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot, of=device.uuid)
            if instance_handle is not None:
                instance, used = self._mig_instance(handle, instance_handle, device.uuid)
                instances.append(instance)
                used_bytes[instance.uuid] = used
        with_mig = Device(
            uuid=device.uuid,
            model=device.model,
            minor=device.minor,
            pci_bus_id=device.pci_bus_id,
            memory_bytes=device.memory_bytes,
            numa_node=device.numa_node,
            compute_capability=device.compute_capability,
            mig_enabled=True,
            mig_instances=tuple(instances),
        )
        return with_mig, used_bytes

    def _mig_instance(self, parent: Any, handle: Any, parent_uuid: str) -> tuple[MigInstance, int]:
        gpu_instance_id = self._call("nvmlDeviceGetGpuInstanceId", handle, of=parent_uuid)
        gpu_instance = self._call("nvmlDeviceGetGpuInstanceById", parent, gpu_instance_id, of=parent_uuid)
        placement = self._call("nvmlGpuInstanceGetInfo", gpu_instance, of=parent_uuid).placement
        total, reserved, used = self._memory(handle, parent_uuid)
        name = self._call("nvmlDeviceGetName", handle, of=parent_uuid)
        instance = MigInstance(
            uuid=self._call("nvmlDeviceGetUUID", handle, of=parent_uuid),
            parent_uuid=parent_uuid,
            profile=name.rpartition("MIG ")[2],
            memory_bytes=promisable_bytes(total, reserved),
            gpu_instance_id=gpu_instance_id,
            compute_instance_id=self._call("nvmlDeviceGetComputeInstanceId", handle, of=parent_uuid),
            placement_start=placement.start,
            placement_size=placement.size,
        )
        return instance, used

    def _processes(self) -> tuple[ProcessMemory, ...]:
        self._start()
        found = []
        for uuid, handle in self._handles().items():
            try:
                processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle, of=uuid) or ()
            except pynvml.NVMLError as exc:
                raise _driver_error(f"reading the processes on {uuid}", exc) from exc
            found += [ProcessMemory(uuid, one.pid, one.usedGpuMemory) for one in processes if one.usedGpuMemory is not None]
        return tuple(found)

    def _handles(self) -> dict[str, Any]:
        """Return the handles of the GPUs that answer."""
        handles = {}
        for uuid in self._known:
            try:
                handles[uuid] = self._call("nvmlDeviceGetHandleByUUID", uuid, of=uuid)
            except pynvml.NVMLError:  # counted; the reading of all GPUs tells what it means for this one
                continue
        return handles

    def _links(self) -> tuple[Link, ...]:
        self._start()
        handles = self._handles()
        try:
            return self._links_between(handles)
        except pynvml.NVMLError as exc:
            raise _driver_error("reading the links between GPUs", exc) from exc

    def _links_between(self, handles: dict[str, Any]) -> tuple[Link, ...]:
        to_switch, to_peer = {}, {}
        for uuid, handle in handles.items():
            to_switch[uuid], to_peer[uuid] = self._nvlinks(handle, uuid)
        links = []
        uuids = list(handles)
        for position, a in enumerate(uuids):
            for b in uuids[position + 1 :]:
                lanes = to_peer[a].get(self._known[b].pci_bus_id, 0) or min(to_switch[a], to_switch[b])
                if lanes:
                    links.append(Link(a, b, LinkKind.NVLINK, lanes))
                    continue
                level = self._ask("nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b], of=a)
                links.append(Link(a, b, _LINK_OF_LEVEL.get(level, LinkKind.SYSTEM)))
        return tuple(links)

    def _nvlinks(self, handle: Any, uuid: str) -> tuple[int, dict[str, int]]:
        """Count active NVLinks that end in a switch, and those that end in each GPU by its PCI bus id."""
        to_switch, to_peer = 0, dict[str, int]()
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask_link("nvmlDeviceGetNvLinkState", handle, link, uuid)
            if state is None:
                break
            if state != pynvml.NVML_FEATURE_ENABLED:
                continue
            kind = self._ask_link("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, uuid)
            if kind == _NVLINK_TO_SWITCH:
                to_switch += 1
            elif kind == _NVLINK_TO_GPU:
                remote = self._ask_link("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, uuid)
                if remote is not None:
                    bus_id = _text(remote.busId)
                    to_peer[bus_id] = to_peer.get(bus_id, 0) + 1
        return to_switch, to_peer

    def _ask_link(self, name: str, handle: Any, link: int, uuid: str) -> Any:
        """Ask about one NVLink, with None beyond the last that this GPU has."""
        return self._ask(name, handle, link, of=uuid, expected=(*_NOT_OFFERED, pynvml.NVML_ERROR_INVALID_ARGUMENT))


def _driver_error(what: str, exc: pynvml.NVMLError) -> DriverError:
    if exc.value in _NO_DRIVER:
        return DriverMissingError(_NO_DRIVER[exc.value])
    return DriverError(f"{what}: {exc}")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
