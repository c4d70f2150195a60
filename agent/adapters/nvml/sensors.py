# SPDX-License-Identifier: Apache-2.0
"""Reads a GPU's sensors through NVML. ``NvmlDriver`` calls it in its thread with its own query function, which counts failures.

A sensor that fails is only absent. The calls that placement needs show whether the GPU as a whole works.
"""

from typing import Any, Protocol

import pynvml

from agent.core.sensors import DeviceSensors

_MHZ = 1_000_000
_MILLIWATTS = 1000


class Query(Protocol):
    """Calls an NVML function by name; returns None for what this GPU does not have. Raises NVMLError."""

    def __call__(self, name: str, *arguments: Any, of: str | None) -> Any:
        """Query the device ``of``."""
        ...


def read_sensors(query: Query, handle: Any, uuid: str, memory_utilization_ratio: float | None) -> DeviceSensors:
    """Read all sensors of one GPU."""

    def value_of(name: str, *arguments: Any) -> Any:
        try:
            return query(name, handle, *arguments, of=uuid)
        except pynvml.NVMLError:
            return None

    def scaled(name: str, *arguments: Any, factor: float = 1) -> float | None:
        value = value_of(name, *arguments)
        return None if value is None else value * factor

    def ecc_errors(kind: int) -> int | None:
        count = value_of("nvmlDeviceGetTotalEccErrors", kind, pynvml.NVML_AGGREGATE_ECC)
        return None if count is None else int(count)

    return DeviceSensors(
        memory_utilization_ratio=memory_utilization_ratio,
        temperature_celsius=scaled("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        power_watts=scaled("nvmlDeviceGetPowerUsage", factor=1 / _MILLIWATTS),
        power_limit_watts=scaled("nvmlDeviceGetEnforcedPowerLimit", factor=1 / _MILLIWATTS),
        sm_clock_hertz=scaled("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM, factor=_MHZ),
        ecc_corrected=ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ecc_uncorrected=ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    )
