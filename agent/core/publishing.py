# SPDX-License-Identifier: Apache-2.0
"""Builds the node's object in the Kubernetes API, and decides when to write a change of it.

Invariants: in the steady state the agent writes nothing. It writes at once what scheduling depends on (which GPUs take work, and how much).
It writes everything else at most once a minute, at a random moment, so that a thousand agents with the same news do not write at the same
time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agent.core.health import HealthState
from agent.core.inventory import DeviceInventory, InventoryDevice
from aliquot.contract import gpunode
from aliquot.contract.gpunode import GpuDevice, GpuNode, IdlePod, PodUtilization
from aliquot.contract.model import Allocation, Isolation

LEAST_SECONDS: Final = 0.3
"""Minimum between two writes of one object: long enough for the agent's own change to come back by the watch."""
STEADY_SECONDS: Final = 60.0
"""Minimum between two writes that can wait."""
SPREAD_SECONDS: Final = 10.0
"""Maximum random delay of a write that can wait."""
MAX_MESSAGE_CHARS: Final = 1024

_URGENT_OF_DEVICE: Final = ("uuid", "memoryMib", "migEnabled", "migInstances")
_URGENT: Final = ("sharesPerGpu", "isolation", "memoryOversubscription", "allocation")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The published facts about a node, without its GPUs."""

    name: str
    agent_version: str
    shares_per_gpu: int
    memory_oversubscription: float = 1.0
    """The highest memory burst of a container, as a ratio of its memory."""
    allocation: Allocation = Allocation.PLUGIN


def gpu_node(
    facts: NodeFacts,
    inventory: DeviceInventory,
    isolation: Sequence[Isolation],
    utilization: Sequence[PodUtilization] = (),
    idle: Sequence[IdlePod] = (),
) -> GpuNode:
    """Return the node's object. Raises ContractError if its GPUs cannot be described."""
    devices = [entry.device for entry in inventory.devices]
    present = {device.uuid for device in devices}
    links = [link for link in inventory.links if {link.a_uuid, link.b_uuid} <= present]
    return GpuNode(
        name=facts.name,
        devices=tuple(_device(entry) for entry in inventory.devices),
        links=gpunode.in_order(devices, links),
        shares_per_gpu=facts.shares_per_gpu,
        isolation=tuple(isolation),
        memory_oversubscription=facts.memory_oversubscription,
        driver_version=inventory.driver_version,
        cuda_version=inventory.cuda_version,
        agent_version=facts.agent_version,
        allocation=facts.allocation,
        utilization=tuple(utilization),
        idle=tuple(idle[: gpunode.MAX_IDLE_PODS]),
    )


def _device(entry: InventoryDevice) -> GpuDevice:
    trouble = entry.trouble[: gpunode.MAX_TEXT_CHARS]
    return GpuDevice(entry.device, trouble, entry.pcie_root, entry.fabric_clique, str(entry.state))


def status_of(node: GpuNode) -> Mapping[str, Any]:
    """Return the status of a node's object in its JSON form. Raises ContractError."""
    status: dict[str, Any] = msgspec.json.decode(gpunode.encode_gpu_node(node))["status"]
    return status


def status_without_driver(published: Mapping[str, Any], trouble: str) -> Mapping[str, Any]:
    """Return the published status with a fault on every GPU, and no idle pod: this agent has no driver, and knows neither by itself."""
    published = {name: value for name, value in published.items() if name != "idle"}
    marked = {"state": str(HealthState.QUARANTINED), "trouble": trouble[: gpunode.MAX_TEXT_CHARS]}
    devices = [{**device, **marked} for device in published.get("devices", ())]
    return {**published, "devices": devices} if devices else published


def is_urgent(published: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the published status, compared with the wanted one, would lead to wrong scheduling."""
    return _what_is_urgent(published) != _what_is_urgent(wanted) or bool(_idle(published) - _idle(wanted))


def _idle(status: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Return the pods that are reported to be idle. One that works again must not end for others."""
    return {(pod["podUid"], pod["since"]) for pod in status.get("idle", ())}


def _what_is_urgent(status: Mapping[str, Any]) -> object:
    devices = [(bool(device.get("trouble")), *map(device.get, _URGENT_OF_DEVICE)) for device in status.get("devices", ())]
    return devices, [status.get(name) for name in _URGENT]


def write_after(last_write: float | None, changed_at: float, *, urgent: bool, chance: float) -> float:
    """Return the time at which a change may be written.

    Args: last_write: time of the last write of this object; None before the first.
          changed_at: when the change was found.
          chance: a random number from 0 to 1, drawn once per change.
    """
    if urgent:
        return changed_at if last_write is None else max(changed_at, last_write + LEAST_SECONDS)
    earliest = changed_at if last_write is None else max(changed_at, last_write + STEADY_SECONDS)
    return earliest + chance * SPREAD_SECONDS


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """One condition of a node: its status, the reason in one word, and a message."""

    holds: bool
    reason: str
    message: str


def gpus_healthy(inventory: DeviceInventory, driver_trouble: str) -> NodeCondition:
    """Return whether all GPUs take new work according to their health. A cordon is an administrator's decision and no fault."""
    troubled = [f"{entry.device.uuid} is {entry.state}: {entry.trouble}" for entry in inventory.devices if not entry.healthy]
    troubled += inventory.unidentified
    count = len(inventory.devices) + len(inventory.unidentified)
    if not count:
        return NodeCondition(False, "NoGPU", driver_trouble[:MAX_MESSAGE_CHARS] or "the driver lists no GPU")
    if not troubled:
        return NodeCondition(True, "AllGPUsHealthy", f"all {count} GPUs take work")
    message = f"{len(troubled)} of {count} GPUs get no new work: {'; '.join(troubled)}"
    return NodeCondition(False, "GPUsUnhealthy", message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…")
