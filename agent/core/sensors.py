"""What a GPU's own sensors and counters say, beside what placement needs: shown as metrics, decided upon nowhere here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSensors:
    """One look at a GPU. ``None`` where the GPU or its driver does not have the sensor."""

    memory_utilization_ratio: float | None = None
    """Share of time the memory controller was busy lately."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_hertz: float | None = None
    ecc_corrected: int | None = None
    """Memory errors corrected in the life of the board, which makes it a counter over reboots too."""
    ecc_uncorrected: int | None = None


NO_SENSORS = DeviceSensors()
