# SPDX-License-Identifier: Apache-2.0
"""Finds where a GPU is attached: its PCIe root complex, from sysfs, and its clique in a multi-node NVLink fabric, from NVML."""

import ctypes
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

SYSFS_PCI = Path("/sys/bus/pci/devices")


def pcie_root(pci_bus_id: str, devices: Path = SYSFS_PCI) -> str:
    """Return the root complex above a device, such as ``pci0000:17``; empty if sysfs does not show the device.

    NVML writes domains with eight digits and in upper case, sysfs with four and in lower case.
    """
    domain, _, rest = pci_bus_id.lower().partition(":")
    path = devices / f"{domain[-4:]}:{rest}"
    if not path.exists():
        return ""
    return next((part for part in path.resolve().parts if part.startswith("pci")), "")


def fabric_clique(query: Callable[..., Any], handle: Any, device_uuid: str) -> str:
    """Return ``<cluster UUID>.<clique id>``, in the spelling of GPU feature discovery; empty for a GPU without a fabric."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    if query("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info), of=device_uuid) is None:
        return ""
    if info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != pynvml.NVML_SUCCESS:
        return ""
    cluster = uuid.UUID(bytes=bytes(info.clusterUuid))
    return "" if cluster.int == 0 else f"{cluster}.{info.cliqueId}"
