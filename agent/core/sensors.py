# SPDX-License-Identifier: Apache-2.0
"""The values of a GPU's sensors and counters that placement does not need. They are only exported as metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSensors:
    """One reading of a GPU. ``None`` if the GPU or its driver does not have the sensor."""

    memory_utilization_ratio: float | None = None
    """Fraction of recent time in which the memory controller was busy."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_hertz: float | None = None
    ecc_corrected: int | None = None
    """Corrected memory errors over the lifetime of the hardware, so the counter survives reboots."""
    ecc_uncorrected: int | None = None


NO_SENSORS = DeviceSensors()
