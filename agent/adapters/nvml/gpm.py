# SPDX-License-Identifier: Apache-2.0
"""Measures how busy MIG instances are, by GPU performance monitoring (GPM) of Hopper and later GPUs. Called in the NVML thread.

Under MIG the driver reports utilisation only through GPM, as the value between two samples of a GPU instance. Each reading of the GPUs
takes one sample. GPM cannot distinguish several compute instances in one GPU instance, so they have no value.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pynvml

from agent.adapters.nvml.health import Call
from agent.adapters.nvml.thread import HeldCalls

LEAST_SECONDS = 0.1
"""GPM gives no valid result for samples closer to each other; the previous value is kept."""
_METRIC = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
"""The fraction of time in which any work ran, like ``device_utilization_ratio`` for a whole GPU."""
_NOT_AVAILABLE = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND,
)
"""This GPU or driver has no GPM, the agent may not use it, or the instance no longer exists."""


@dataclass(slots=True)
class _Watched:
    """One GPU instance: its last sample, a buffer for the next one, and the value between the last two."""

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
        """Return how busy an instance was since the last call; None at the first call, and if GPM does not report it."""
        try:
            if not self._is_supported(handle, device_uuid):
                return None
            return self._sampled(handle, device_uuid, gpu_instance_id, instance_uuid)
        except pynvml.NVMLError:  # counted unless expected; other calls show whether the GPU as a whole works
            self._drop(instance_uuid)
            return None

    def forget_all_but(self, instance_uuids: Collection[str]) -> None:
        """Free the samples of instances that no longer exist. Not on a GPU with a hanging call, which may still write to a sample."""
        for uuid in self._watched.keys() - set(instance_uuids):
            if self._held.on(self._watched[uuid].device_uuid) is None:
                self._drop(uuid)

    def close(self) -> None:
        """Free all samples. Call it before NVML is shut down."""
        self.forget_all_but(())
        self._supported.clear()

    def _is_supported(self, handle: Any, device_uuid: str) -> bool:
        if device_uuid not in self._supported:
            try:
                support = self._call("nvmlGpmQueryDeviceSupport", handle, of=device_uuid, expected=_NOT_AVAILABLE)
            except pynvml.NVMLError as exc:
                if exc.value not in _NOT_AVAILABLE:
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
            self._call("nvmlGpmMigSampleGet", handle, gpu_instance_id, first, of=device_uuid, expected=_NOT_AVAILABLE)
            return None
        if now - watched.taken_at >= LEAST_SECONDS:
            self._call("nvmlGpmMigSampleGet", handle, gpu_instance_id, watched.later, of=device_uuid, expected=_NOT_AVAILABLE)
            watched.ratio = self._between(watched.earlier, watched.later, device_uuid)
            watched.earlier, watched.later, watched.taken_at = watched.later, watched.earlier, now
        return watched.ratio

    def _between(self, earlier: Any, later: Any, device_uuid: str) -> float | None:
        question = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, 1, earlier, later)
        metric = question.metrics[0]
        metric.metricId = _METRIC
        self._call("nvmlGpmMetricsGet", question, of=device_uuid, expected=_NOT_AVAILABLE)
        valid = metric.nvmlReturn == pynvml.NVML_SUCCESS and 0 <= metric.value <= 100  # GPM returns NaN without a count
        return metric.value / 100 if valid else None

    def _drop(self, instance_uuid: str) -> None:
        watched = self._watched.pop(instance_uuid, None)
        for sample in (watched.earlier, watched.later) if watched is not None else ():
            try:
                self._call("nvmlGpmSampleFree", sample)
            except pynvml.NVMLError:  # counted; the session it belonged to is gone
                return
