# SPDX-License-Identifier: Apache-2.0
"""A change that would make a pod fit that fits nowhere."""

from dataclasses import dataclass
from enum import StrEnum

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest
from scheduler_plugin.core.score.cost import HostDemand


class Kind(StrEnum):
    """The kind of a change."""

    ASK_LESS_MEMORY = "ask-less-memory"
    ASK_LESS_CORES = "ask-less-cores"
    ASK_FEWER_GPUS = "ask-fewer-gpus"
    ASK_LESS_HOST = "ask-less-host"
    FREE_ROOM = "free-room"
    FREE_HOST = "free-host"
    LIFT_CORDON = "lift-cordon"
    DROP_PREFERENCE = "drop-preference"
    END_PODS = "end-pods"


@dataclass(frozen=True, slots=True)
class Room:
    """What must become free on one device, in addition to what is free."""

    device_uuid: str
    memory_mib: int = 0
    cores_percent: int = 0
    shares: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One change that would make the pod fit."""

    kind: Kind
    sentence: str
    node: str = ""
    """A node on which it would fit then; one of several if the change is not tied to a node."""
    amount: int = 0
    """The largest request that would fit, per vGPU: MiB, percent, or the number of vGPUs or MIG instances."""
    rooms: tuple[Room, ...] = ()
    devices: tuple[str, ...] = ()
    preference: str = ""
    pods: tuple[str, ...] = ()
    """UIDs."""
    container: str = ""
    """The container that would ask for less, if the pod has several."""
    profile: str = ""
    """The MIG profile, if the pod would ask for fewer instances of it."""
    host: HostDemand | None = None
    """The largest request of CPU and RAM that would fit, or what must become free; 0 for a resource that does not matter."""


def host_text(amounts: HostDemand) -> str:
    """Describe amounts of CPU and RAM in words."""
    cpu, ram = amounts.cpu_milli / 1000, amounts.ram_mib
    parts = [f"{cpu:g} CPU{'s' * (cpu != 1)}"] * (cpu > 0) + [f"{ram} MiB of RAM"] * (ram > 0)
    return " and ".join(parts)


def room_text(room: Room) -> str:
    """Describe a room in words."""
    parts = [f"{room.memory_mib} MiB"] * (room.memory_mib > 0) + [f"{room.cores_percent} % of the cores"] * (room.cores_percent > 0)
    parts += [f"{room.shares} share{'s' * (room.shares > 1)}"] * (room.shares > 0)
    return f"{' and '.join(parts)} on {room.device_uuid}"


def memory_text(request: ContainerRequest) -> str:
    """Say how much memory one vGPU of a request asks for."""
    if request.memory_percent_per_vgpu is not None:
        return f"{request.memory_percent_per_vgpu} % of a GPU's"
    asked = request.memory_bytes_per_vgpu
    return "whole GPUs" if asked is None else f"{asked // units.MIB} MiB"
