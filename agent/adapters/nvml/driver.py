# SPDX-License-Identifier: Apache-2.0
"""The driver through NVML (nvidia-ml-py): converts its types and errors to the agent's, and reports every call to the watchdog.

A query that a GPU does not support returns None, as does an optional query that fails. A GPU that fails a query that placement needs
becomes a ``FailedDevice``. Only a driver that does not work as a whole raises.

Invariant: a GPU with slow calls (dead firmware makes each call take most of a minute) delays the others for at most the time limit of one
call, and less and less often. The reading of such a GPU stops at the first slow call. Then the GPU rests until that call returns and for a
growing time after, and is read last. NVML is not shut down while such a call is running, because it may still use NVML's memory.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import pynvml

from agent.adapters.nvml.gpm import NvmlGpm
from agent.adapters.nvml.health import NvmlEvents, read_faults
from agent.adapters.nvml.kind import architecture_name, brand_name
from agent.adapters.nvml.library import NvmlLibrary
from agent.adapters.nvml.location import fabric_clique, pcie_root
from agent.adapters.nvml.mig_rights import mig_rights
from agent.adapters.nvml.probe import NvmlProbe
from agent.adapters.nvml.sensors import read_sensors
from agent.adapters.nvml.thread import HeldCalls, NvmlThread, entering, left
from agent.core import driver_limits
from agent.core.inventory import DeviceEvent, DeviceReading, DriverReading, FailedDevice, OverdueCall, promisable_bytes
from agent.core.overhead import GpuProcess, ProcessList
from agent.errors import DriverError, DriverLeftError, DriverMismatchError, DriverMissingError, DriverTimeoutError
from aliquot.contract.model import Device, Link, LinkKind, MigInstance

T = TypeVar("T")

_NOT_OFFERED = (
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
"""This GPU or driver does not have the feature; this is no fault."""
_NOTHING_THERE = (*_NOT_OFFERED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
"""No MIG instance in this slot, or no NVLink of this number."""
_NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: install the driver, or mount the host's driver files",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "library and loaded kernel module have different versions: reload the module or reboot. Containers keep the library that the node "
        "had at their start: if the mismatch lasts, the agent exits, and the next one has the node's current library"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to use the NVIDIA driver: give this process access to /dev/nvidiactl",
}
_DRIVER_GONE = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)
"""Errors of the driver as a whole, not of one GPU."""
_GPU_GONE = (*_DRIVER_GONE, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
"""Errors of the GPU as a whole. All other errors, even unknown ones, concern only the query: the queries that placement needs show whether
the GPU works."""
_INSTANCE_GONE = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
"""A MIG instance was removed while it was read."""
_NO_MEMORY_OF_ITS_OWN = (
    "it has no memory of its own and uses the host's: such GPUs are not supported, because there is no device memory to share. "
    "Use another device plugin for it"
)
_PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
"""A process may be in several lists, each with the same figure: its total use."""
_LINK_OF_LEVEL = {
    pynvml.NVML_TOPOLOGY_INTERNAL: LinkKind.SAME_BOARD,
    pynvml.NVML_TOPOLOGY_SINGLE: LinkKind.PCIE_SWITCH,
    pynvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PCIE_SWITCHES,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.HOST_BRIDGE,
    pynvml.NVML_TOPOLOGY_NODE: LinkKind.NUMA_NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYSTEM,
}
_NVLINK_TO_GPU = 0
_NVLINK_TO_SWITCH = 2
_UTILIZATION_WINDOW_SECONDS = 5.0
"""Window of the driver's samples over which a process's utilisation is averaged; longer than the sampling period of up to a second."""
_NO_SAMPLES = (*_NOT_OFFERED, pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
_GROWING_TRIES = 3
"""The number of samples is queried first, and a process that starts after that adds more than fit."""
_NUMA_WORDS = 16
"""64-bit words of the NUMA node mask: 1024 nodes, the kernel's limit."""

_REST_FACTOR = 2
"""A GPU rests for this multiple of its slow call's duration; after another slow call, for this multiple of the previous rest."""
_LONGEST_REST_SECONDS = 600.0

ErrorCounter = Callable[[str, int], None]
"""Called with the name of a failed NVML call and its error code."""


class _Ratios(NamedTuple):
    """How busy a process kept a GPU, as fractions of the time."""

    sm: float
    memory: float


_IDLE: Final = _Ratios(0.0, 0.0)


class _UnsupportedGpuError(Exception):
    """A GPU works, but cannot be shared by Aliquot."""


class _SessionOverError(Exception):
    """The session no longer works and must be ended. ``args[0]`` is the DriverError."""


class _SlowGpuError(Exception):
    """A call about a GPU exceeded the time limit, whether it succeeded or failed."""

    def __init__(self, trouble: str, seconds: float) -> None:
        super().__init__(trouble)
        self.seconds = seconds
        """Duration of the call."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """A period in which the agent makes no calls about a slow GPU."""

    trouble: str
    seconds: float
    until: float
    """By the monotonic clock."""


class NvmlDriver:
    """Implements ``ports.Driver``."""

    def __init__(
        self, library: str, timeout_seconds: float, count_error: ErrorCounter, observe_read: Callable[[float], None] = lambda _: None
    ) -> None:
        """Args: observe_read: called with the duration in seconds of each reading of all GPUs."""
        self._library = NvmlLibrary(library)
        self._probe = NvmlProbe(library)
        self._count_error = count_error
        self._observe_read = observe_read
        self._timeout_seconds = timeout_seconds
        self._held = HeldCalls()
        self._thread = NvmlThread(timeout_seconds, self._held)
        self._events_thread = NvmlThread(timeout_seconds, self._held, "nvml-events")
        self._session = asyncio.Lock()
        """Held while GPUs are read or the session is ended: events of an ended session must not be watched."""
        self._reading: asyncio.Future[DriverReading] | None = None
        """A running reading of all GPUs."""
        self._initialized = False
        self._kept_out = ""
        """Why NVML must not be initialised; empty if it may be."""
        self._has_read = False
        """Whether the GPUs were read in this session; until then ``_known`` is incomplete."""
        self._known: dict[str, Device] = {}
        self._uuid_at_index: dict[int, str] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._kinds: dict[str, tuple[str, str]] = {}
        self._answering: dict[str, Any] = {}
        """Handles of the GPUs that answered at the last reading."""
        self._silent: frozenset[str] = frozenset()
        """UUIDs of known GPUs that did not answer at the last reading."""
        self._resting: dict[int, _Rest] = {}
        """By NVML index: GPUs that had a slow call when they were last read."""
        self._events = NvmlEvents(self.call, self._held)
        """Used by the events thread only; the other thread uses everything else."""
        self._gpm = NvmlGpm(self.call, self._held)

    async def read(self) -> DriverReading:
        """See ``ports.Driver``."""
        begun = time.perf_counter()
        async with self._session:
            if self._reading is None:
                self._reading = self._thread.submit(self._read)
            reading = self._reading
            try:
                found = await self._thread.result(reading)
            except _SessionOverError as exc:
                await self._abandon()  # the next read starts a new session: the driver may have been reloaded
                raise exc.args[0] from exc
            finally:
                if reading.done():
                    self._reading = None
                self._observe_read(time.perf_counter() - begun)
            handles = dict(self._answering)
            await self._events_thread.run(lambda: self._events.watch(handles))
            return found

    async def events(self) -> Sequence[DeviceEvent]:
        """See ``ports.Driver``."""
        return await self._events_thread.run(self._events.take)

    async def links(self) -> Sequence[Link]:
        """See ``ports.Driver``."""
        return await self._thread.run(self._links)

    async def processes(self) -> ProcessList:
        """See ``ports.Driver``."""
        return await self._thread.run(self._processes)

    async def busy(self, device_uuids: Set[str], lookback_seconds: float) -> Mapping[str, Mapping[int, float]]:
        """See ``ports.Driver``."""
        return await self._thread.run(lambda: self._busy(device_uuids, lookback_seconds))

    async def restart(self) -> None:
        """See ``ports.Driver``."""
        async with self._session:
            await self._leave()

    async def keep_out(self, reason: str) -> None:
        """See ``ports.Driver``."""
        self._kept_out = reason
        if reason:
            await self._probe.stop()
            async with self._session:
                await self._leave()

    async def found_in_new_session(self) -> Set[str]:
        """See ``ports.Driver``."""
        return frozenset() if self._kept_out else await self._probe.answering()

    def overdue(self) -> Sequence[OverdueCall]:
        """See ``ports.Driver``."""
        running = [call for thread in (self._thread, self._events_thread) if (call := thread.overdue()) is not None]
        return [*self._held.overdue(), *running]

    async def run(self, work: Callable[[], T]) -> T:
        """Run work in the NVML thread with NVML initialised. For adapters that share this session and use ``call``.

        The work runs to its end even if a call takes too long and other work uses the session at the same time.
        """

        def entered() -> T:
            self._start()
            return work()

        return await self._thread.run(entered, finish=True)

    async def _leave(self) -> None:
        """Shut down NVML. Raises DriverError."""
        await self._events_thread.run(self._close_events)
        await self._thread.run(self._shut_down)

    async def _abandon(self) -> None:
        """Shut down a session that no longer works, and ignore further errors of it."""
        try:
            await self._leave()
        except DriverError:  # already counted, or a hanging call that was reported by its caller
            return

    # --- below: in the NVML threads only ---

    def call(self, name: str, *arguments: Any, of: str | None = None, expected: tuple[int, ...] = ()) -> Any:
        """Call NVML. An error with a code that is not in ``expected`` is counted.

        Raises: NVMLError; DriverTimeoutError if an earlier call about the GPU has not returned.
        """
        entering(name, of)
        try:
            return _checked_text(getattr(pynvml, name), arguments)
        except pynvml.NVMLError as exc:
            if exc.value not in expected:
                self._count_error(name, exc.value)
            raise
        finally:
            left()

    def handle_of(self, uuid: str) -> Any:
        """Return the handle of a GPU that answered the last reading. Raises DriverError.

        The handle comes from the reading, not from a query by UUID: such a query may access all GPUs, and fails if any of them is lost.
        """
        if uuid not in self._answering:
            raise DriverError(f"{uuid} did not answer when the GPUs were last read")
        return self._answering[uuid]

    def _timed_call(self, name: str, *arguments: Any, of: str | None, expected: tuple[int, ...] = ()) -> Any:
        """Call NVML in the reading of one GPU. A call that takes too long ends the reading. Raises NVMLError, _SlowGpuError."""
        begun = time.monotonic()
        try:
            answer = self.call(name, *arguments, of=of, expected=expected)
        except pynvml.NVMLError as exc:
            if (took := time.monotonic() - begun) > self._timeout_seconds:
                raise self._slow(name, took) from exc
            raise
        if (took := time.monotonic() - begun) > self._timeout_seconds:
            raise self._slow(name, took)
        return answer

    def _slow(self, name: str, seconds: float) -> _SlowGpuError:
        return _SlowGpuError(f"the driver does not answer in time: {name} takes longer than {self._timeout_seconds:g} s", seconds)

    def _query(self, name: str, *arguments: Any, of: str | None, expected: tuple[int, ...] = _NOT_OFFERED) -> Any:
        """Query one GPU; return None for what it does not have. Raises NVMLError, _SlowGpuError."""
        try:
            return self._timed_call(name, *arguments, of=of, expected=expected)
        except pynvml.NVMLError as exc:
            if exc.value in expected:
                return None
            raise

    def _query_optional(self, name: str, *arguments: Any, of: str | None, expected: tuple[int, ...] = _NOT_OFFERED) -> Any:
        """Query an optional value: return None also if the query fails, unless the error concerns the GPU as a whole."""
        try:
            return self._query(name, *arguments, of=of, expected=expected)
        except pynvml.NVMLError as exc:  # counted
            if exc.value in _GPU_GONE:
                raise
            return None

    def _start(self) -> None:
        if self._initialized:
            return
        if self._kept_out:
            raise DriverLeftError(self._kept_out)
        try:
            self._load()
            self.call("nvmlInitWithFlags", 0)
        except OSError as exc:
            raise DriverMissingError(f"the NVML library cannot be loaded: {exc}") from exc
        except pynvml.NVMLError as exc:
            raise _driver_error("nvmlInitWithFlags", exc) from exc
        self._initialized = True
        self._has_read = False
        self._resting.clear()
        self._held.forget_late()
        self._known.clear()  # another driver version may reserve a different amount of memory
        self._places.clear()
        self._kinds.clear()

    def _load(self) -> None:
        entering("dlopen", None)
        try:
            self._library.load()
        finally:
            left()

    def _close_events(self) -> None:
        self._check_nothing_is_out()
        self._events.close()

    def _shut_down(self) -> None:
        """Shut down NVML. It counts its users: a session without a shutdown would live on under the next one."""
        self._check_nothing_is_out()
        if self._initialized:
            self._answering.clear()
            self._gpm.close()
            self._initialized = False
            try:
                self.call("nvmlShutdown")
            except pynvml.NVMLError as exc:
                raise _driver_error("nvmlShutdown", exc) from exc

    def _check_nothing_is_out(self) -> None:
        """Raise DriverTimeoutError while a call is running: a shutdown would free the memory that it uses."""
        if (call := self._held.any()) is not None:
            raise DriverTimeoutError(
                f"the NVIDIA driver cannot be left: {call.name} on {call.device_uuid} has not returned", call.device_uuid
            )

    def _read(self) -> DriverReading:
        self._start()
        try:
            version = self.call("nvmlSystemGetDriverVersion")
            cuda_version = self.call("nvmlSystemGetCudaDriverVersion_v2")
            count = self.call("nvmlDeviceGetCount")
        except pynvml.NVMLError as exc:
            raise _SessionOverError(_driver_error("reading the driver", exc)) from exc
        devices, failed = [], []
        self._answering.clear()
        for index in sorted(range(count), key=lambda index: index in self._resting):
            try:
                devices.append(self._read_device_with_rests(index))
            except pynvml.NVMLError as exc:
                lost = exc.value == pynvml.NVML_ERROR_GPU_IS_LOST
                failed.append(FailedDevice(index, self._uuid_at_index.get(index), _trouble(exc), lost))
            except _SlowGpuError as exc:
                failed.append(FailedDevice(index, self._uuid_at_index.get(index), str(exc)))
            except _UnsupportedGpuError as exc:  # without its UUID, so that it does not count as a supported GPU with a fault
                failed.append(FailedDevice(index, None, str(exc)))
        self._has_read = True
        self._silent = frozenset(entry.uuid for entry in failed if entry.uuid is not None)
        self._gpm.forget_all_but({instance.uuid for entry in devices for instance in entry.device.mig_instances})
        has_limits = all(hasattr(pynvml.nvmlLib, name) for name in driver_limits.NVML_CALLS)
        return DriverReading(version, cuda_version, tuple(devices), tuple(failed), has_limits)

    def _read_device_with_rests(self, index: int) -> DeviceReading:
        """Read a GPU unless it is held or rests. Raises as ``_read_device``; for a resting GPU the error that caused the rest."""
        uuid = self._uuid_at_index.get(index, "")
        if (call := self._held.on(uuid)) is not None:
            raise self._slow(call.name, 0.0)
        if (late := self._held.take_late(uuid)) is not None:
            self._rest(index, self._slow(late.name, late.seconds))
        rest = self._resting.get(index)
        if rest is not None and time.monotonic() < rest.until:
            raise _SlowGpuError(rest.trouble, 0.0)
        try:
            reading = self._read_device(index)
        except _SlowGpuError as exc:
            self._rest(index, exc)
            raise
        self._resting.pop(index, None)
        return reading

    def _rest(self, index: int, slow: _SlowGpuError) -> None:
        """Let a GPU rest for longer than its last call took, and for longer than its previous rest."""
        before = self._resting.get(index)
        seconds = min(_REST_FACTOR * max(slow.seconds, before.seconds if before is not None else 0.0), _LONGEST_REST_SECONDS)
        self._resting[index] = _Rest(str(slow), seconds, time.monotonic() + seconds)

    def _read_device(self, index: int) -> DeviceReading:
        expected = self._uuid_at_index.get(index)
        handle = self._timed_call("nvmlDeviceGetHandleByIndex", index, of=expected)
        uuid = self._timed_call("nvmlDeviceGetUUID", handle, of=expected)
        self._uuid_at_index[index] = uuid
        memory = self._memory(handle, uuid)
        if memory is None:
            raise _UnsupportedGpuError(f"{uuid}: {_NO_MEMORY_OF_ITS_OWN}")
        total, reserved, used = memory
        if uuid not in self._known:
            self._known[uuid] = self._facts(handle, uuid, promisable_bytes(total, reserved))
        utilization = self._query_optional("nvmlDeviceGetUtilizationRates", handle, of=uuid)
        device, instances_used_bytes = self._with_mig(handle, self._known[uuid])
        faults = read_faults(self._query_optional, handle, uuid)
        root, clique = self._place(handle, device)
        architecture, brand = self._kind(handle, uuid)
        reading = DeviceReading(
            device,
            memory_used_bytes=used,
            utilization_ratio=utilization.gpu / 100 if utilization is not None else None,
            instances_used_bytes=instances_used_bytes,
            instances_utilization=self._instances_utilization(handle, device),
            sensors=read_sensors(self._query, handle, uuid, utilization.memory / 100 if utilization is not None else None),
            faults=faults,
            pcie_root=root,
            fabric_clique=clique,
            architecture=architecture,
            brand=brand,
        )
        self._answering[uuid] = handle
        return reading

    def _instances_utilization(self, handle: Any, device: Device) -> Mapping[str, float]:
        sharing = Counter(instance.gpu_instance_id for instance in device.mig_instances)
        found = {
            instance.uuid: self._gpm.utilization(handle, device.uuid, instance.gpu_instance_id, instance.uuid)
            for instance in device.mig_instances
            if sharing[instance.gpu_instance_id] == 1
        }
        return {uuid: ratio for uuid, ratio in found.items() if ratio is not None}

    def _place(self, handle: Any, device: Device) -> tuple[str, str]:
        """Return PCIe root and fabric clique. They are cached once the driver has reported them."""
        if device.uuid not in self._places:
            root = pcie_root(device.pci_bus_id)
            try:
                self._places[device.uuid] = root, fabric_clique(self._query, handle, device.uuid)
            except pynvml.NVMLError as exc:  # counted
                if exc.value in _GPU_GONE:
                    raise
                return root, ""
        return self._places[device.uuid]

    def _kind(self, handle: Any, uuid: str) -> tuple[str, str]:
        """Return architecture and brand. They are cached once the driver has reported both."""
        if uuid in self._kinds:
            return self._kinds[uuid]
        architecture = self._query_optional("nvmlDeviceGetArchitecture", handle, of=uuid)
        brand = self._query_optional("nvmlDeviceGetBrand", handle, of=uuid)
        found = architecture_name(architecture), brand_name(brand)
        if architecture is not None and brand is not None:
            self._kinds[uuid] = found
        return found

    def _memory(self, handle: Any, uuid: str) -> tuple[int, int, int] | None:
        """Return total memory, the driver's reserve, and used memory, in bytes; None for a GPU without its own memory."""
        memory = self._query("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2, of=uuid)
        if memory is not None:
            return memory.total, memory.reserved, memory.used
        not_offered = (pynvml.NVML_ERROR_NOT_SUPPORTED,)
        memory = self._query("nvmlDeviceGetMemoryInfo", handle, of=uuid, expected=not_offered)  # before R510: no split of the reserve
        return (memory.total, 0, memory.used) if memory is not None else None

    def _facts(self, handle: Any, uuid: str, memory_bytes: int) -> Device:
        capability = self._query_optional("nvmlDeviceGetCudaComputeCapability", handle, of=uuid)
        return Device(
            uuid=uuid,
            model=self._timed_call("nvmlDeviceGetName", handle, of=uuid),
            minor=self._timed_call("nvmlDeviceGetMinorNumber", handle, of=uuid),
            pci_bus_id=_text(self._timed_call("nvmlDeviceGetPciInfo", handle, of=uuid).busId),
            memory_bytes=memory_bytes,
            numa_node=self._numa_node(handle, uuid),
            compute_capability=tuple(capability) if capability is not None else None,
        )

    def _numa_node(self, handle: Any, uuid: str) -> int | None:
        mask = self._query_optional("nvmlDeviceGetMemoryAffinity", handle, _NUMA_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE, of=uuid)
        if mask is None:
            return None
        nodes = [64 * word + bit for word in range(_NUMA_WORDS) for bit in range(64) if mask[word] >> bit & 1]
        return nodes[0] if len(nodes) == 1 else None  # several equally near nodes give no preference

    def _with_mig(self, handle: Any, device: Device) -> tuple[Device, Mapping[str, int]]:
        """Return the device with its MIG instances, and the used memory of each instance by UUID."""
        mode = self._query("nvmlDeviceGetMigMode", handle, of=device.uuid)
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return device, {}
        instances, used_bytes = [], {}
        for slot in range(self._timed_call("nvmlDeviceGetMaxMigDeviceCount", handle, of=device.uuid)):
            instance_handle = self._query("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot, of=device.uuid, expected=_NOTHING_THERE)
            found = self._mig_instance(handle, instance_handle, device.uuid) if instance_handle is not None else None
            if found is not None:
                instance, used_bytes[found[0].uuid] = found
                instances.append(instance)
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

    def _mig_instance(self, parent: Any, handle: Any, parent_uuid: str) -> tuple[MigInstance, int] | None:
        """Return an instance and its used memory; None if it was removed in the meantime."""
        try:
            return self._read_mig_instance(parent, handle, parent_uuid)
        except pynvml.NVMLError as exc:
            if exc.value in _INSTANCE_GONE:
                return None
            raise

    def _read_mig_instance(self, parent: Any, handle: Any, parent_uuid: str) -> tuple[MigInstance, int] | None:
        def query(name: str, *arguments: Any) -> Any:
            return self._timed_call(name, *arguments, of=parent_uuid, expected=_INSTANCE_GONE)

        gpu_instance_id = query("nvmlDeviceGetGpuInstanceId", handle)
        placement = query("nvmlGpuInstanceGetInfo", query("nvmlDeviceGetGpuInstanceById", parent, gpu_instance_id)).placement
        memory = self._memory(handle, parent_uuid)
        if memory is None:
            return None
        total, reserved, used = memory
        instance = MigInstance(
            uuid=query("nvmlDeviceGetUUID", handle),
            parent_uuid=parent_uuid,
            profile=query("nvmlDeviceGetName", handle).rpartition("MIG ")[2],
            memory_bytes=promisable_bytes(total, reserved),
            gpu_instance_id=gpu_instance_id,
            compute_instance_id=query("nvmlDeviceGetComputeInstanceId", handle),
            placement_start=placement.start,
            placement_size=placement.size,
        )
        return instance, used

    def _start_known(self) -> None:
        """Initialise NVML for work on known GPUs. Raises DriverError if the GPUs were not read yet in this session."""
        self._start()
        if not self._has_read:
            raise DriverError("the GPUs are not known yet: no reading since the driver was initialised")

    def _processes(self) -> ProcessList:
        self._start_known()
        found: list[GpuProcess] = []
        unknown = set(self._silent)
        for uuid, handle in self._answering.items():
            if self._held.on(uuid) is not None:
                unknown.add(uuid)
                continue
            try:
                most = self._used_bytes_by_pid(handle, uuid)
                busy = self._process_utilization(handle, uuid) if most else None
            except _SlowGpuError:  # the next reading will see this too, and let the GPU rest
                most = None
            if most is None:
                unknown.add(uuid)
            else:
                found += (GpuProcess(uuid, pid, used, *(busy.get(pid, _IDLE) if busy is not None else ())) for pid, used in most.items())
        return ProcessList(tuple(found), frozenset(unknown))

    def _busy(self, device_uuids: Set[str], lookback_seconds: float) -> Mapping[str, Mapping[int, float]]:
        self._start_known()
        found = {}
        for uuid in device_uuids & self._answering.keys():
            try:
                ratios = self._process_utilization(self._answering[uuid], uuid, lookback_seconds) if self._held.on(uuid) is None else None
            except _SlowGpuError:  # the next reading will see this too, and let the GPU rest
                ratios = None
            if ratios is not None:
                found[uuid] = {pid: ratio.sm for pid, ratio in ratios.items()}
        return found

    def _used_bytes_by_pid(self, handle: Any, uuid: str) -> Mapping[int, int] | None:
        """Return the used memory of each process on a GPU; None if the query fails, so that the other GPUs are still queried."""
        most: dict[int, int] = {}
        try:
            for name in _PROCESS_LISTS:
                for one in self._query(name, handle, of=uuid) or ():
                    if one.usedGpuMemory is not None:
                        most[one.pid] = max(most.get(one.pid, 0), one.usedGpuMemory)
        except pynvml.NVMLError as exc:  # counted
            if exc.value in _DRIVER_GONE:
                raise _driver_error(f"reading the processes on {uuid}", exc) from exc
            return None
        return most

    def _process_utilization(
        self, handle: Any, uuid: str, window_seconds: float = _UTILIZATION_WINDOW_SECONDS
    ) -> Mapping[int, _Ratios] | None:
        """Return how busy each process was over the last seconds, by pid. Idle ones are missing; None if unsupported."""
        since_us = time.time_ns() // 1000 - int(window_seconds * 1e6)
        for _ in range(_GROWING_TRIES):
            try:
                samples = self._timed_call("nvmlDeviceGetProcessUtilization", handle, since_us, of=uuid, expected=_NO_SAMPLES)
                break
            except pynvml.NVMLError as exc:
                if exc.value in _DRIVER_GONE:
                    raise _driver_error(f"reading how busy the processes on {uuid} are", exc) from exc
                if exc.value == pynvml.NVML_ERROR_NOT_FOUND:
                    return {}
                if exc.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                    return None
        else:
            return None
        shares: dict[int, list[tuple[int, int]]] = {}
        for sample in samples:
            if sample.timeStamp >= since_us and sample.smUtil <= 100:  # otherwise an unused entry of the buffer
                shares.setdefault(sample.pid, []).append((sample.smUtil, min(100, sample.memUtil)))
        return {pid: _Ratios(*(sum(own) / len(own) / 100 for own in zip(*percents, strict=True))) for pid, percents in shares.items()}

    def _links(self) -> tuple[Link, ...]:
        self._start_known()
        try:
            return self._links_between(self._answering)
        except pynvml.NVMLError as exc:
            raise _driver_error("reading the links between GPUs", exc) from exc
        except _SlowGpuError as exc:
            raise DriverError(f"reading the links between GPUs: {exc}") from exc

    def _links_between(self, handles: Mapping[str, Any]) -> tuple[Link, ...]:
        """Read all links. An NVLink without information does not count; a pair of GPUs with an unknown path has the longest one."""
        to_switch, to_peer = {}, {}
        for uuid, handle in handles.items():
            to_switch[uuid], to_peer[uuid] = self._nvlinks(handle, uuid)
        links = []
        uuids = list(handles)
        for position, a in enumerate(uuids):
            for b in uuids[position + 1 :]:
                lanes = to_peer[a].get(self._known[b].pci_bus_id, 0) or min(to_switch[a], to_switch[b])
                level = self._query_optional("nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b], of=a)
                pcie = _LINK_OF_LEVEL.get(level)
                links.append(Link(a, b, LinkKind.NVLINK, lanes, pcie) if lanes else Link(a, b, pcie or LinkKind.SYSTEM))
        return tuple(links)

    def _nvlinks(self, handle: Any, uuid: str) -> tuple[int, dict[str, int]]:
        """Count active NVLinks that end in a switch, and those that end in each GPU by its PCI bus id."""
        to_switch, to_peer = 0, dict[str, int]()
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            if self._query_link("nvmlDeviceGetNvLinkState", handle, link, uuid) != pynvml.NVML_FEATURE_ENABLED:
                continue
            kind = self._query_link("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, uuid)
            if kind == _NVLINK_TO_SWITCH:
                to_switch += 1
            elif kind == _NVLINK_TO_GPU:
                remote = self._query_link("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, uuid)
                if remote is not None:
                    bus_id = _text(remote.busId)
                    to_peer[bus_id] = to_peer.get(bus_id, 0) + 1
        return to_switch, to_peer

    def _query_link(self, name: str, handle: Any, link: int, uuid: str) -> Any:
        """Query one NVLink; return None beyond the GPU's last link, and if the query fails."""
        return self._query_optional(name, handle, link, of=uuid, expected=_NOTHING_THERE)


def _checked_text(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call NVML. An undecodable text, such as a name in damaged GPU memory, is an error of that GPU. Raises NVMLError."""
    try:
        return function(*arguments)
    except UnicodeDecodeError as exc:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_CORRUPTED_INFOROM) from exc


def _trouble(exc: pynvml.NVMLError) -> str:
    if exc.value == pynvml.NVML_ERROR_NO_PERMISSION:
        return f"it cannot be read: {mig_rights()}"
    return f"the driver returns: {exc}"


def _driver_error(what: str, exc: pynvml.NVMLError) -> DriverError:
    if exc.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return DriverMismatchError(_NO_DRIVER[exc.value])
    if exc.value in _NO_DRIVER:
        return DriverMissingError(_NO_DRIVER[exc.value])
    return DriverError(f"{what}: {exc}")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
