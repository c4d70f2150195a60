"""What NVML says about the health of GPUs: faults that stand, and XIDs as they are reported. Called in the NVML thread.

Events are taken from an event set without waiting for any, as often as the caller likes: the driver keeps them in the set, so that a
thread that blocks in a wait, and would have to be got out of it before NVML can be left, is not needed. The set is of one thread, which
is not the one that reads the GPUs: one whose call hangs does not keep others from being heard.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pynvml

from agent.adapters.nvml_thread import HeldCalls
from agent.core.inventory import DeviceEvent

_REMAP_PENDING = pynvml.NVML_FI_DEV_REMAPPED_PENDING
_REMAP_FAILED = pynvml.NVML_FI_DEV_REMAPPED_FAILURE
_RETIREMENT_PENDING = pynvml.NVML_FI_DEV_RETIRED_PENDING
_RECOVERY_ACTION = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_FLAGS = {
    _REMAP_PENDING: "a row remap waits for a reset of the GPU",
    _REMAP_FAILED: "a memory row could not be remapped: the GPU has to be replaced",
    _RETIREMENT_PENDING: "a page retirement waits for a reset of the GPU",
}
_RECOVERY_ACTIONS = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "the driver asks for a reset of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "the driver asks for a reboot of the node",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "the driver asks to end peer-to-peer traffic of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "the driver asks to drain the GPU and reset it",
    pynvml.NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: "the driver asks to recover the GPU's IMEX domain",
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "the driver asks for a reset of the GPU's PCIe bus",
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "the driver asks for a reboot of the system",
}
_WANTED_EVENTS = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError | pynvml.nvmlEventTypeSingleBitEccError
"""XIDs are acted on. The memory errors are counted by the readings; as events they only make the next reading come at once."""
_MOST_EVENTS = 1024
"""Taken at one time. A storm beyond that goes on at the next."""


class Call(Protocol):
    """Calls an NVML function by name; an error whose code is not ``expected`` is counted. Raises NVMLError."""

    def __call__(self, name: str, *arguments: Any, of: str | None = None, expected: tuple[int, ...] = ()) -> Any:
        """Call on behalf of the device ``of``."""
        ...


def read_faults(ask: Callable[..., Any], handle: Any, uuid: str) -> tuple[str, ...]:
    """Read the faults that stand, in words; what the GPU or its driver cannot tell is no fault. Raises NVMLError."""
    fields = ask("nvmlDeviceGetFieldValues", handle, [*_FLAGS, _RECOVERY_ACTION], of=uuid)
    values = {one.fieldId: one.value.uiVal for one in fields or () if one.nvmlReturn == pynvml.NVML_SUCCESS}
    found = [text for field, text in _FLAGS.items() if values.get(field)]
    action = values.get(_RECOVERY_ACTION, pynvml.NVML_GPU_RECOVERY_ACTION_NONE)
    if action != pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        found.append(_RECOVERY_ACTIONS.get(action, f"the driver asks for recovery action {action}"))  # newer drivers have more of them
    return tuple(found)


class NvmlEvents:
    """The event set of one NVML session, with the GPUs that were there when they were last watched."""

    def __init__(self, call: Call, held: HeldCalls) -> None:
        self._call = call
        self._held = held
        self._set: Any = None
        self._uuid_of_handle: dict[int | None, str] = {}
        self._unwatchable: set[str] = set()

    def watch(self, handles: Mapping[str, Any]) -> None:
        """Keep what these GPUs report from now on, until it is taken; those that are watched already stay so."""
        self._unwatchable &= handles.keys()  # one that went and came back is asked again
        new = handles.keys() - set(self._uuid_of_handle.values()) - self._unwatchable
        try:
            if new and self._set is None:
                self._set = self._call("nvmlEventSetCreate")
        except pynvml.NVMLError:  # counted; it is tried again with the next reading
            return
        for uuid in new:
            self._register(uuid, handles[uuid])

    def take(self) -> tuple[DeviceEvent, ...]:
        """Return what was reported since the last call, oldest first. Raises nothing: a set that fails is given up for a new one."""
        found: list[DeviceEvent] = []
        while self._uuid_of_handle and len(found) < _MOST_EVENTS:
            try:
                data = self._call("nvmlEventSetWait_v2", self._set, 0, expected=(pynvml.NVML_ERROR_TIMEOUT,))
            except pynvml.NVMLError as exc:
                if exc.value != pynvml.NVML_ERROR_TIMEOUT:  # a GPU of the set is lost, or the session is over
                    self.close()
                break
            uuid = self._uuid_of_handle.get(_address(data.device))
            if uuid is not None:
                is_xid = data.eventType == pynvml.nvmlEventTypeXidCriticalError
                found.append(DeviceEvent(uuid, int(data.eventData) if is_xid else None))
        return tuple(found)

    def close(self) -> None:
        """Give the set back; to be called before NVML is left."""
        if self._set is not None:
            event_set, self._set = self._set, None
            self._uuid_of_handle.clear()
            self._unwatchable.clear()
            if self._held.any() is not None:  # such a call may be using the set: the driver frees it when NVML is left
                return
            try:
                self._call("nvmlEventSetFree", event_set)
            except pynvml.NVMLError:  # counted; the session it belonged to is gone, and the set with it
                return

    def _register(self, uuid: str, handle: Any) -> None:
        try:
            types = self._call("nvmlDeviceGetSupportedEventTypes", handle, of=uuid) & _WANTED_EVENTS
            self._call("nvmlDeviceRegisterEvents", handle, types, self._set, of=uuid, expected=(pynvml.NVML_ERROR_NOT_SUPPORTED,))
        except pynvml.NVMLError:  # without events, the readings tell what they can
            self._unwatchable.add(uuid)
        else:
            self._uuid_of_handle[_address(handle)] = uuid


def _address(handle: Any) -> int | None:
    """Return what tells one handle from another."""
    return ctypes.cast(handle, ctypes.c_void_p).value
