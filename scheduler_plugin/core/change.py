"""What would make a pod fit that fits nowhere: one change, of one kind."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler_plugin.core.score import HostDemand


class Kind(StrEnum):
    """What is changed."""

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
    """What must become free on one device, beyond what is."""

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
    """Where it would fit then; one of several when the change is not about a node."""
    amount: int = 0
    """What may still be asked for, per vGPU: MiB, percent, or the number of vGPUs or MIG instances."""
    rooms: tuple[Room, ...] = ()
    devices: tuple[str, ...] = ()
    preference: str = ""
    pods: tuple[str, ...] = ()
    """UIDs."""
    container: str = ""
    """Which of several containers would ask for less."""
    profile: str = ""
    """Of which MIG profile fewer instances would be asked for."""
    host: HostDemand | None = None
    """What may still be asked for of a host's CPU and RAM, or must become free; 0 of what is not the matter."""


def host_text(amounts: HostDemand) -> str:
    """Say amounts of CPU and RAM in words."""
    cpu, ram = amounts.cpu_milli / 1000, amounts.ram_mib
    parts = [f"{cpu:g} CPU{'s' * (cpu != 1)}"] * (cpu > 0) + [f"{ram} MiB of RAM"] * (ram > 0)
    return " and ".join(parts)


def room_text(room: Room) -> str:
    """Say a room in words."""
    parts = [f"{room.memory_mib} MiB"] * (room.memory_mib > 0) + [f"{room.cores_percent} % of the cores"] * (room.cores_percent > 0)
    parts += [f"{room.shares} share{'s' * (room.shares > 1)}"] * (room.shares > 0)
    return f"{' and '.join(parts)} on {room.device_uuid}"
