# SPDX-License-Identifier: Apache-2.0
"""Chooses the demo's pods for a node: their sizes, and a replacement for a pod that the node cannot run. Values in, values out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from aliquot import contract
from aliquot.contract.units import GIB, MIB, bytes_to_mib
from aliquot_lab.standin.inventory import Inventory

UNIT_LIMIT_BYTES = 2 * GIB
"""Largest unit of size. With it, the pods of the shared GPU request 50 GiB together, which leaves room on an 80 GB GPU."""
REAL_UNIT_LIMIT_BYTES = 512 * MIB
"""Largest unit on real hardware, which other programs may use too. It is not smaller because a real context takes half a GiB."""
UNIT_GRAIN_BYTES = 256 * MIB
SHARED_GPU_UNITS = 29
"""Units that the pods on one GPU request together, at most: train 10, infer 4, pair or third 6, fourth 4, greedy 5."""
SHARED_GPU_PORTION = 0.75
HELD_PORTION = 0.5
"""Part of its limit that a steady pod allocates, without contexts."""
KERNEL_MICROSECONDS = 2000
FOREVER_SECONDS = 10**9


class Role(Enum):
    """The role of a pod in the demo."""

    STEADY = "steady"
    """Works all the time. The other pods must not affect it."""
    GREEDY = "greedy"
    """Allocates until it is refused."""
    HARDWARE = "hardware"
    """Uses a MIG instance."""


@dataclass(frozen=True, slots=True)
class PlannedPod:
    """One pod of the demo."""

    name: str
    role: Role
    limits: Mapping[str, int]
    devices: int
    memory_bytes_per_device: int
    command: str
    """Shell command in the container; ``$CLIENT`` is the CUDA program."""
    annotations: Mapping[str, str] = field(default_factory=dict)

    def manifest(self, client: str) -> dict[str, Any]:
        """Return the manifest. Apart from the command it is what a user writes."""
        container = {
            "name": "cuda",
            "image": "aliquot-cuda-client",
            "command": ["/bin/sh", "-c", self.command],
            "env": [{"name": "CLIENT", "value": client}],
            "resources": {"limits": {name: str(amount) for name, amount in self.limits.items()}},
        }
        metadata = {"name": self.name, "annotations": dict(self.annotations)}
        spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@dataclass(frozen=True, slots=True)
class Plan:
    """The pods that run from the start, the greedy pod, and notes about replaced pods."""

    steady: tuple[PlannedPod, ...]
    greedy: PlannedPod
    notes: tuple[str, ...]


class PlanError(Exception):
    """The node has no GPU that containers can share."""


def make_plan(inventory: Inventory, mig_resources: Mapping[str, int], *, unit_limit_bytes: int = UNIT_LIMIT_BYTES) -> Plan:
    """Choose the pods for a node.

    Args:   mig_resources: number of instances by MIG resource that the node offers.
    Raises: PlanError: every GPU is in MIG mode.
    """
    shared = [gpu for gpu in inventory.gpus if not gpu.mig_enabled]
    if not shared:
        raise PlanError("every GPU of this node is in MIG mode; the demo needs at least one GPU without MIG")
    unit_bytes = size_unit(min(gpu.memory_bytes for gpu in shared), unit_limit_bytes)
    notes: list[str] = []
    first = shared[0].uuid
    steady = [_steady("train", 10 * unit_bytes, [first]), _steady("infer", 4 * unit_bytes, [first])]
    if len(shared) > 1:
        steady.append(_steady("pair", 6 * unit_bytes, [first, shared[1].uuid]))
    else:
        steady.append(_steady("third", 6 * unit_bytes, [first]))
        notes.append("one GPU only: pod third with one vGPU replaces pod pair with two")
    offered = {name: count for name, count in mig_resources.items() if count > 0}
    if offered:
        steady.append(_partitioned(_smallest(offered), inventory))
    else:
        steady.append(_steady("fourth", 4 * unit_bytes, [shared[-1].uuid]))
        notes.append("no MIG instance is used here: pod fourth with a share of a GPU replaces pod mig")
    return Plan(tuple(steady), _greedy(5 * unit_bytes, first), tuple(notes))


def with_torch(plan: Plan, program: str) -> Plan:
    """Return the plan with PyTorch in two pods: train trains a transformer, and greedy fills its share.

    Args: program: shell command of ``torch_program``, without its arguments.
    """
    steady = tuple(replace(pod, command=f"$CLIENT info && {program} train") if pod.name == "train" else pod for pod in plan.steady)
    return replace(plan, steady=steady, greedy=replace(plan.greedy, command=f"$CLIENT info && {program} fill"))


def size_unit(smallest_gpu_bytes: int, limit_bytes: int = UNIT_LIMIT_BYTES) -> int:
    """Return the unit of all sizes in bytes. The pods of one GPU leave a part of it free."""
    fitting = int(smallest_gpu_bytes * SHARED_GPU_PORTION) // SHARED_GPU_UNITS // UNIT_GRAIN_BYTES * UNIT_GRAIN_BYTES
    return max(UNIT_GRAIN_BYTES, min(limit_bytes, fitting))


def oversized(device_uuid: str, free_bytes: int) -> PlannedPod:
    """Return a pod that accepts one device only, and requests one MiB more than it has free."""
    memory_bytes = free_bytes // MIB * MIB + MIB
    return PlannedPod(
        name="too-big",
        role=Role.STEADY,
        limits={contract.RESOURCE_VGPU: 1, contract.RESOURCE_VGPU_MEMORY: bytes_to_mib(memory_bytes)},
        devices=1,
        memory_bytes_per_device=memory_bytes,
        command="$CLIENT info && exec $CLIENT hold --mib 1",
        annotations={contract.ANNOTATION_GPU_UUID: device_uuid},
    )


def _steady(name: str, memory_bytes: int, gpu_uuids: Sequence[str]) -> PlannedPod:
    """Return a pod with one vGPU on each of the given GPUs, which its annotation names so that the pods share them."""
    devices = len(gpu_uuids)
    held_mib = bytes_to_mib(int(memory_bytes * HELD_PORTION) // MIB * MIB)
    return PlannedPod(
        name=name,
        role=Role.STEADY,
        limits={contract.RESOURCE_VGPU: devices, contract.RESOURCE_VGPU_MEMORY: bytes_to_mib(devices * memory_bytes)},
        devices=devices,
        memory_bytes_per_device=memory_bytes,
        command=_work(held_mib, devices),
        annotations={contract.ANNOTATION_GPU_UUID: ",".join(gpu_uuids)},
    )


def _partitioned(resource: str, inventory: Inventory) -> PlannedPod:
    profile = resource.removeprefix(contract.RESOURCE_MIG_PREFIX)
    instances = [mig for gpu in inventory.gpus for mig in gpu.mig_devices if mig.name.endswith(f" {profile}")]
    memory_bytes = min(mig.memory_bytes for mig in instances)
    held_mib = bytes_to_mib(int(memory_bytes * HELD_PORTION) // MIB * MIB)
    return PlannedPod("mig", Role.HARDWARE, {resource: 1}, 1, memory_bytes, _work(held_mib, 1))


def _greedy(memory_bytes: int, gpu_uuid: str) -> PlannedPod:
    limits = {contract.RESOURCE_VGPU: 1, contract.RESOURCE_VGPU_MEMORY: bytes_to_mib(memory_bytes)}
    command = "$CLIENT info && exec $CLIENT fill --step 512 --hold"
    return PlannedPod("greedy", Role.GREEDY, limits, 1, memory_bytes, command, {contract.ANNOTATION_GPU_UUID: gpu_uuid})


def _work(held_mib: int, devices: int) -> str:
    """Return the command that starts one process for each device; with several devices, its reports name the device."""
    work = f"$CLIENT work --mib {held_mib} --kernel-us {KERNEL_MICROSECONDS} --seconds {FOREVER_SECONDS}"
    if devices == 1:
        return f"$CLIENT info && exec {work}"
    tagged = (f"{work} --device {ordinal} | sed -u 's/^{{/{{\"device\":{ordinal},/'" for ordinal in range(devices))
    return f"$CLIENT info && {{ {' & '.join(tagged)} & wait; }}"


def _smallest(offered: Mapping[str, int]) -> str:
    """Return the profile with the fewest slices and the least memory: ``1g.10gb`` before ``2g.20gb``."""

    def size(resource: str) -> tuple[int, ...]:
        numbers = "".join(char if char.isdigit() else " " for char in resource.removeprefix(contract.RESOURCE_MIG_PREFIX))
        return tuple(int(number) for number in numbers.split())

    return min(offered, key=lambda resource: (size(resource), resource))
