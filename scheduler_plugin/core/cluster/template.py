# SPDX-License-Identifier: Apache-2.0
"""The inventory of a node that does not exist yet, from its template: a cluster autoscaler asks whether a new node of a group would help.

Labels are those of NVIDIA's feature discovery; amounts are the resources that our agent publishes. A template has no UUIDs, so the devices
get invented ones, which no pod can ask for.
"""

from aliquot import contract
from aliquot.contract import gpunode, units
from aliquot.contract.errors import QuantityError
from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot.contract.model import Device, Isolation
from aliquot.placement.device import DEFAULT_MAX_SHARES
from scheduler_plugin.core.cluster.objects import MOST, NodeObject, host_amounts

LABEL_COUNT = "nvidia.com/gpu.count"
LABEL_PRODUCT = "nvidia.com/gpu.product"
LABEL_MEMORY = "nvidia.com/gpu.memory"
"""MiB of one GPU."""


def template_node(item: NodeObject) -> GpuNode | None:
    """Return the inventory of a template node; None if the template has no GPUs of Aliquot."""
    labels, allocatable = item.metadata.labels or {}, item.status.allocatable or {}
    shares = _amount(allocatable.get(contract.RESOURCE_VGPU))
    # Labels first: the resources count the memory and cores that are allocatable on all GPUs together.
    count = _amount(labels.get(LABEL_COUNT)) or _amount(allocatable.get(contract.RESOURCE_VGPU_CORES)) // units.WHOLE_GPU_PERCENT
    memory_mib = _amount(labels.get(LABEL_MEMORY)) or _amount(allocatable.get(contract.RESOURCE_VGPU_MEMORY)) // max(1, count)
    if not 1 <= count <= gpunode.MAX_DEVICES or memory_mib < 1 or (contract.RESOURCE_VGPU in allocatable and shares < count):
        return None
    devices = tuple(
        GpuDevice(
            Device(f"GPU-template-{minor}", labels.get(LABEL_PRODUCT, "").replace("-", " "), minor, "", units.mib_to_bytes(memory_mib))
        )
        for minor in range(count)
    )
    per_gpu = min(shares // count, gpunode.MAX_SHARES_PER_GPU) if shares else DEFAULT_MAX_SHARES
    return GpuNode(item.metadata.name, devices, shares_per_gpu=per_gpu, isolation=(Isolation.SHIM, Isolation.EXCLUSIVE))


def template_host(item: NodeObject) -> tuple[int, int, int]:
    """Return the amounts of a template, as ``host_amounts`` does; 0, which means unknown, for invalid ones."""
    try:
        return host_amounts(item)
    except QuantityError:
        return 0, 0, 0


def _amount(text: str | int | None) -> int:
    """Parse a whole amount, from 0 to MOST; 0 for a missing or invalid one."""
    if text is None:
        return 0
    try:
        return max(0, min(MOST, int(units.parse_quantity(str(text)))))
    except QuantityError:
        return 0
