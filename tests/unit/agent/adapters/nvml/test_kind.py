# SPDX-License-Identifier: Apache-2.0

import pynvml
import pytest

from agent.adapters.nvml.kind import architecture_name, brand_name


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (pynvml.NVML_DEVICE_ARCH_KEPLER, "Kepler"),
        (pynvml.NVML_DEVICE_ARCH_VOLTA, "Volta"),
        (pynvml.NVML_DEVICE_ARCH_ADA, "Ada Lovelace"),
        (pynvml.NVML_DEVICE_ARCH_HOPPER, "Hopper"),
        (pynvml.NVML_DEVICE_ARCH_BLACKWELL, "Blackwell"),
        (pynvml.NVML_DEVICE_ARCH_UNKNOWN, "Unknown"),
        (1, "Unknown"),
        (None, "Unknown"),
    ],
)
def test_architecture_has_the_name_that_nvidia_gives_it(number, name):
    assert architecture_name(number) == name


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (pynvml.NVML_BRAND_UNKNOWN, "Unknown"),
        (pynvml.NVML_BRAND_TESLA, "Tesla"),
        (pynvml.NVML_BRAND_NVIDIA_CLOUD_GAMING, "NvidiaCloudGaming"),
        (pynvml.NVML_BRAND_NVIDIA_RTX, "NvidiaRTX"),
        (pynvml.NVML_BRAND_NVIDIA, "Nvidia"),
        (pynvml.NVML_BRAND_TITAN_RTX, "TitanRTX"),
        (pynvml.NVML_BRAND_COUNT, "Unknown"),
        (None, "Unknown"),
    ],
)
def test_brand_has_the_name_that_nvidia_gives_it(number, name):
    assert brand_name(number) == name
