"""What the agent says of its node in the Kubernetes API, and how soon a change of it has to be there.

Kept true: in the steady state nothing is written; what scheduling rests on (which GPUs take work, and how much) is written at once;
everything else at most once a minute, at a moment drawn by chance, so that a thousand agents that learn the same at the same time do not
write at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agent.core.health import HealthState
from agent.core.inventory import BoardDevice, DeviceBoard
from proto import gpunode
from proto.gpunode import GpuDevice, GpuNode
from proto.model import Isolation

LEAST_SECONDS: Final = 0.3
"""Between two writes of one object: the least that gives our own change time to come back by the watch."""
STEADY_SECONDS: Final = 60.0
"""Between two writes that can wait."""
SPREAD_SECONDS: Final = 10.0
"""The most that a write which can wait is put off by chance."""
MAX_MESSAGE_CHARS: Final = 1024

_URGENT_OF_DEVICE: Final = ("uuid", "memoryMib", "migEnabled", "migInstances")
_URGENT: Final = ("sharesPerGpu", "isolation", "memoryOversubscription")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is said of a node beside its GPUs."""

    name: str
    agent_version: str
    shares_per_gpu: int
    memory_oversubscription: float = 1.0
    """How far above its memory a container may burst, as a ratio."""


def gpu_node(facts: NodeFacts, board: DeviceBoard, isolation: Sequence[Isolation]) -> GpuNode:
    """Describe the node. Raises ContractError when its GPUs cannot be described."""
    devices = [entry.device for entry in board.devices]
    present = {device.uuid for device in devices}
    links = [link for link in board.links if {link.a_uuid, link.b_uuid} <= present]
    return GpuNode(
        name=facts.name,
        devices=tuple(_device(entry) for entry in board.devices),
        links=gpunode.in_order(devices, links),
        shares_per_gpu=facts.shares_per_gpu,
        isolation=tuple(isolation),
        memory_oversubscription=facts.memory_oversubscription,
        driver_version=board.driver_version,
        cuda_version=board.cuda_version,
        agent_version=facts.agent_version,
    )


def _device(entry: BoardDevice) -> GpuDevice:
    trouble = entry.trouble[: gpunode.MAX_TEXT_CHARS]
    return GpuDevice(entry.device, trouble, entry.pcie_root, entry.fabric_clique, str(entry.state))


def status_of(node: GpuNode) -> Mapping[str, Any]:
    """Return the status of a node's object, as it is in JSON. Raises ContractError."""
    status: dict[str, Any] = msgspec.json.decode(gpunode.encode_gpu_node(node))["status"]
    return status


def status_without_driver(published: Mapping[str, Any], trouble: str) -> Mapping[str, Any]:
    """Return what stands there, with every GPU in trouble: an agent that was started without a driver knows of no GPU by itself."""
    marked = {"state": str(HealthState.QUARANTINED), "trouble": trouble[: gpunode.MAX_TEXT_CHARS]}
    devices = [{**device, **marked} for device in published.get("devices", ())]
    return {**published, "devices": devices} if devices else published


def is_urgent(published: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether scheduling goes wrong as long as the one status stands there instead of the other."""
    return _what_is_urgent(published) != _what_is_urgent(wanted)


def _what_is_urgent(status: Mapping[str, Any]) -> object:
    devices = [(bool(device.get("trouble")), *map(device.get, _URGENT_OF_DEVICE)) for device in status.get("devices", ())]
    return devices, [status.get(name) for name in _URGENT]


def write_after(last_write: float | None, changed_at: float, *, urgent: bool, chance: float) -> float:
    """Return the time at which a change may be written.

    Args: last_write: of this object; None before the first.
          changed_at: when the change was found.
          chance: from 0 to 1, drawn once per change.
    """
    if urgent:
        return changed_at if last_write is None else max(changed_at, last_write + LEAST_SECONDS)
    earliest = changed_at if last_write is None else max(changed_at, last_write + STEADY_SECONDS)
    return earliest + chance * SPREAD_SECONDS


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """One condition of a node: whether it holds, why in one word, and why in sentences."""

    holds: bool
    reason: str
    message: str


def gpus_healthy(board: DeviceBoard, driver_trouble: str) -> NodeCondition:
    """Say whether all GPUs take new work, as far as their state goes. A cordon is the administrator's wish and no trouble."""
    troubled = [f"{entry.device.uuid} is {entry.state}: {entry.trouble}" for entry in board.devices if not entry.healthy]
    troubled += board.unidentified
    count = len(board.devices) + len(board.unidentified)
    if not count:
        return NodeCondition(False, "NoGPU", driver_trouble[:MAX_MESSAGE_CHARS] or "the driver lists no GPU")
    if not troubled:
        return NodeCondition(True, "AllGPUsHealthy", f"all {count} GPUs take work")
    message = f"{len(troubled)} of {count} GPUs get no new work: {'; '.join(troubled)}"
    return NodeCondition(False, "GPUsUnhealthy", message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…")
