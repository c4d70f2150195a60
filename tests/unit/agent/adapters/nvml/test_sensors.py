# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pynvml

from agent.adapters.nvml.sensors import read_sensors
from agent.core.sensors import DeviceSensors

ANSWERS = {
    ("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU): 41,
    ("nvmlDeviceGetPowerUsage",): 312_500,
    ("nvmlDeviceGetEnforcedPowerLimit",): 700_000,
    ("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM): 1980,
    ("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_AGGREGATE_ECC): 7,
    ("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC): 0,
}


def test_readings_are_in_base_units():
    def ask(name: str, *arguments: Any, of: str | None) -> Any:
        assert of == "GPU-0"
        return ANSWERS[(name, *arguments[1:])]

    assert read_sensors(ask, object(), "GPU-0", 0.5) == DeviceSensors(0.5, 41.0, 312.5, 700.0, 1_980_000_000.0, 7, 0)


def test_missing_sensor_is_none():
    assert read_sensors(lambda *_arguments, of=None: None, object(), "GPU-0", None) == DeviceSensors()


def test_failing_sensor_affects_no_other():
    def ask(name: str, *arguments: Any, of: str | None) -> Any:
        if name == "nvmlDeviceGetPowerUsage":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return ANSWERS[(name, *arguments[1:])]

    sensors = read_sensors(ask, object(), "GPU-0", 0.5)
    assert sensors.power_watts is None
    assert sensors.temperature_celsius == 41.0
