# SPDX-License-Identifier: Apache-2.0
"""Reads the health of GPUs from NVML: persistent faults, and XIDs as they are reported. Called in the NVML threads.

The agent polls an event set without waiting. The driver stores events in the set, so no thread has to block in a wait, which it would have
to leave before NVML can be shut down. Only one thread uses the set, and not the one that reads the GPUs: a GPU with a hanging call does not
delay the events of others.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pynvml

from agent.adapters.nvml.thread import HeldCalls
from agent.core.inventory import DeviceEvent

_REMAP_PENDING = pynvml.NVML_FI_DEV_REMAPPED_PENDING
_REMAP_FAILED = pynvml.NVML_FI_DEV_REMAPPED_FAILURE
_RETIREMENT_PENDING = pynvml.NVML_FI_DEV_RETIRED_PENDING
_RECOVERY_ACTION = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_FLAGS = {
    _REMAP_PENDING: "a row remap waits for a reset of the GPU",
    _REMAP_FAILED: "a memory row could not be remapped: the GPU must be replaced",
    _RETIREMENT_PENDING: "a page retirement waits for a reset of the GPU",
}
_RECOVERY_ACTIONS = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "the driver requests a reset of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "the driver requests a reboot of the node",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "the driver requests an end of the GPU's peer-to-peer traffic",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "the driver requests to drain the GPU and reset it",
    pynvml.NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: "the driver requests a recovery of the GPU's IMEX domain",
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "the driver requests a reset of the GPU's PCIe bus",
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "the driver requests a reboot of the system",
}
_WANTED_EVENTS = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError | pynvml.nvmlEventTypeSingleBitEccError
"""The agent acts on XIDs. The readings count memory errors; such an event only triggers the next reading at once."""
_MOST_EVENTS = 1024
"""Limit for one poll. The next poll continues with the rest."""


class Call(Protocol):
    """Calls an NVML function by name, and counts an error if its code is not in ``expected``. Raises NVMLError."""

    def __call__(self, name: str, *arguments: Any, of: str | None = None, expected: tuple[int, ...] = ()) -> Any:
        """Call on behalf of the device ``of``."""
        ...


def read_faults(query: Callable[..., Any], handle: Any, uuid: str) -> tuple[str, ...]:
    """Return the persistent faults as text. What the GPU or its driver does not report is no fault. Raises NVMLError."""
    fields = query("nvmlDeviceGetFieldValues", handle, [*_FLAGS, _RECOVERY_ACTION], of=uuid)
    values = {one.fieldId: one.value.uiVal for one in fields or () if one.nvmlReturn == pynvml.NVML_SUCCESS}
    found = [text for field, text in _FLAGS.items() if values.get(field)]
    action = values.get(_RECOVERY_ACTION, pynvml.NVML_GPU_RECOVERY_ACTION_NONE)
    if action != pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        found.append(_RECOVERY_ACTIONS.get(action, f"the driver requests recovery action {action}"))  # newer drivers have more actions
    return tuple(found)


class NvmlEvents:
    """The event set of one NVML session, with the GPUs from the last call of ``watch``."""

    def __init__(self, call: Call, held: HeldCalls) -> None:
        self._call = call
        self._held = held
        self._set: Any = None
        self._uuid_of_handle: dict[int | None, str] = {}
        self._unwatchable: set[str] = set()

    def watch(self, handles: Mapping[str, Any]) -> None:
        """Collect the events of these GPUs from now on, until ``take``. GPUs that are already watched stay watched."""
        self._unwatchable &= handles.keys()  # try a GPU again that was away
        new = handles.keys() - set(self._uuid_of_handle.values()) - self._unwatchable
        try:
            if new and self._set is None:
                self._set = self._call("nvmlEventSetCreate")
        except pynvml.NVMLError:  # counted; the next reading tries again
            return
        for uuid in new:
            self._register(uuid, handles[uuid])

    def take(self) -> tuple[DeviceEvent, ...]:
        """Return the events since the last call, oldest first. Raises no error: a set that fails is replaced by a new one."""
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
        """Free the set. Call it before NVML is shut down."""
        if self._set is not None:
            event_set, self._set = self._set, None
            self._uuid_of_handle.clear()
            self._unwatchable.clear()
            if self._held.any() is not None:  # a hanging call may use the set; the driver frees it when NVML is shut down
                return
            try:
                self._call("nvmlEventSetFree", event_set)
            except pynvml.NVMLError:  # counted; the set's session no longer exists, and the set ended with it
                return

    def _register(self, uuid: str, handle: Any) -> None:
        try:
            types = self._call("nvmlDeviceGetSupportedEventTypes", handle, of=uuid) & _WANTED_EVENTS
            self._call("nvmlDeviceRegisterEvents", handle, types, self._set, of=uuid, expected=(pynvml.NVML_ERROR_NOT_SUPPORTED,))
        except pynvml.NVMLError:  # without events, the agent depends on the readings
            self._unwatchable.add(uuid)
        else:
            self._uuid_of_handle[_address(handle)] = uuid


def _address(handle: Any) -> int | None:
    """Return the address of a handle, which identifies it."""
    return ctypes.cast(handle, ctypes.c_void_p).value
