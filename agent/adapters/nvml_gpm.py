"""How busy MIG instances are, by GPU performance monitoring (GPM), which Hopper GPUs and later have. Called in the NVML thread.

Under MIG the driver tells no utilisation otherwise. GPM gives that between two samples of a GPU instance; each reading of the GPUs takes
one. Compute instances that divide a GPU instance cannot be told apart so, and have no figure.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pynvml

from agent.adapters.nvml_health import Call
from agent.adapters.nvml_thread import HeldCalls

LEAST_SECONDS = 0.1
"""Samples nearer to each other mean nothing to GPM; the figure before stands."""
_METRIC = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
"""The share of time in which any work ran, as ``device_utilization_ratio`` is for a whole GPU."""
_NOT_TOLD = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND,
)
"""This GPU or driver has no GPM, the agent may not use it, or the instance is gone."""


@dataclass(slots=True)
class _Watched:
    """One GPU instance: its last sample, one to take the next into, and what was found between the last two."""

    device_uuid: str
    earlier: Any
    later: Any
    taken_at: float
    ratio: float | None = None


class NvmlGpm:
    """The samples of one NVML session."""

    def __init__(self, call: Call, held: HeldCalls) -> None:
        self._call = call
        self._held = held
        self._watched: dict[str, _Watched] = {}
        self._supported: dict[str, bool] = {}

    def utilization(self, handle: Any, device_uuid: str, gpu_instance_id: int, instance_uuid: str) -> float | None:
        """Return how busy an instance was since the last call; None at the first, and where that is not told."""
        try:
            if not self._is_supported(handle, device_uuid):
                return None
            return self._sampled(handle, device_uuid, gpu_instance_id, instance_uuid)
        except pynvml.NVMLError:  # counted unless expected; whether the GPU as a whole works, other calls tell
            self._drop(instance_uuid)
            return None

    def forget_all_but(self, instance_uuids: Collection[str]) -> None:
        """Give back the samples of instances that are gone; on a GPU that is held, a call that hangs may be writing to one."""
        for uuid in self._watched.keys() - set(instance_uuids):
            if self._held.on(self._watched[uuid].device_uuid) is None:
                self._drop(uuid)

    def close(self) -> None:
        """Give back everything; to be called before NVML is left."""
        self.forget_all_but(())
        self._supported.clear()

    def _is_supported(self, handle: Any, device_uuid: str) -> bool:
        if device_uuid not in self._supported:
            try:
                support = self._call("nvmlGpmQueryDeviceSupport", handle, of=device_uuid, expected=_NOT_TOLD)
            except pynvml.NVMLError as exc:
                if exc.value not in _NOT_TOLD:
                    raise
                self._supported[device_uuid] = False
            else:
                self._supported[device_uuid] = bool(support.isSupportedDevice)
        return self._supported[device_uuid]

    def _sampled(self, handle: Any, device_uuid: str, gpu_instance_id: int, instance_uuid: str) -> float | None:
        watched, now = self._watched.get(instance_uuid), time.monotonic()
        if watched is None:
            first, second = (self._call("nvmlGpmSampleAlloc") for _ in range(2))
            self._watched[instance_uuid] = _Watched(device_uuid, first, second, now)
            self._call("nvmlGpmMigSampleGet", handle, gpu_instance_id, first, of=device_uuid, expected=_NOT_TOLD)
            return None
        if now - watched.taken_at >= LEAST_SECONDS:
            self._call("nvmlGpmMigSampleGet", handle, gpu_instance_id, watched.later, of=device_uuid, expected=_NOT_TOLD)
            watched.ratio = self._between(watched.earlier, watched.later, device_uuid)
            watched.earlier, watched.later, watched.taken_at = watched.later, watched.earlier, now
        return watched.ratio

    def _between(self, earlier: Any, later: Any, device_uuid: str) -> float | None:
        question = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, 1, earlier, later)
        metric = question.metrics[0]
        metric.metricId = _METRIC
        self._call("nvmlGpmMetricsGet", question, of=device_uuid, expected=_NOT_TOLD)
        told = metric.nvmlReturn == pynvml.NVML_SUCCESS and 0 <= metric.value <= 100  # GPM answers NaN where it counted nothing
        return metric.value / 100 if told else None

    def _drop(self, instance_uuid: str) -> None:
        watched = self._watched.pop(instance_uuid, None)
        for sample in (watched.earlier, watched.later) if watched is not None else ():
            try:
                self._call("nvmlGpmSampleFree", sample)
            except pynvml.NVMLError:  # counted; the session it belonged to is gone
                return
