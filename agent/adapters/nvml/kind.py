# SPDX-License-Identifier: Apache-2.0
"""Names a GPU's architecture and brand as NVIDIA's DRA driver does. Source: github.com/NVIDIA/go-nvlib, pkg/nvlib/device."""

from collections.abc import Sequence
from typing import Final

UNKNOWN: Final = "Unknown"
"""Also the name of what NVML does not report: a selector of an attribute that a GPU lacks fails for the whole node."""
_ARCHITECTURES: Final = (
    *(UNKNOWN, UNKNOWN, "Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere"),
    *("Ada Lovelace", "Hopper", "Blackwell"),
)
"""By ``nvmlDeviceArchitecture_t``."""
_BRANDS: Final = (
    *(UNKNOWN, "Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan", "NvidiaVApps", "NvidiaVPC", "NvidiaVCS", "NvidiaVWS"),
    *("NvidiaCloudGaming", "QuadroRTX", "NvidiaRTX", "Nvidia", "GeForceRTX", "TitanRTX"),
)
"""By ``nvmlBrandType_t``."""


def architecture_name(number: int | None) -> str:
    """Return the name of an architecture. Args: number: in NVML; None if it is not reported."""
    return _name(_ARCHITECTURES, number)


def brand_name(number: int | None) -> str:
    """Return the name of a brand. Args: number: as for the architecture."""
    return _name(_BRANDS, number)


def _name(names: Sequence[str], number: int | None) -> str:
    return UNKNOWN if number is None or number >= len(names) else names[number]
