"""Which backends can enforce shares on this node, and of each other one the reason why it cannot.

A pod chooses by the annotation ``aliquot.dev/isolation``; without one, vGPUs are the shim's and MIG instances are kept apart by the
hardware. What a node lacks is found out by looking at it (``Abilities``) or follows from its GPUs as they are now.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from agent.core.driver_limits import NVML_CALLS
from agent.core.inventory import DeviceBoard
from proto import contract
from proto.model import ContainerRequest, Isolation, Preferences

FIRST_DRIVER_WITH_LIMITS = 615


class MigStrategy(StrEnum):
    """What GPUs in MIG mode are offered as."""

    NONE = "none"
    """Nothing."""
    SINGLE = "single"
    """All GPUs have instances of one profile, and each instance is a vGPU."""
    MIXED = "mixed"
    """Each profile is a resource of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What was found on the node. The texts say what is missing, and are empty where nothing is."""

    mig_strategy: MigStrategy = MigStrategy.MIXED
    without_mps: str = "this was not looked for"
    without_driver_limits: str = "this was not looked for"
    most_memory_burst: float = 1.0
    """How far above its promised memory a container may go, as a ratio; 1 = not at all."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The backends of a node as it is now."""

    lacking: Mapping[Isolation, str]
    """Of each backend that is not offered, why."""

    @property
    def backends(self) -> tuple[Isolation, ...]:
        """What pods may ask for."""
        return tuple(backend for backend in Isolation if backend not in self.lacking)


def offer_of(board: DeviceBoard, abilities: Abilities) -> Offer:
    """Return what the node offers with these GPUs."""
    shared = any(not entry.device.mig_enabled for entry in board.devices)
    partitioned = any(entry.device.mig_enabled for entry in board.devices)
    lacking: dict[Isolation, str] = {}
    if not shared:
        for backend in (Isolation.SHIM, Isolation.EXCLUSIVE, Isolation.MPS, Isolation.DRIVER):
            lacking[backend] = "every GPU of this node is in MIG mode" if partitioned else "this node has no GPU yet"
    if not partitioned:
        lacking[Isolation.MIG] = "no GPU of this node is in MIG mode"
    elif abilities.mig_strategy is MigStrategy.NONE:
        lacking[Isolation.MIG] = "migStrategy is none on this node"
    if abilities.without_mps:
        lacking.setdefault(Isolation.MPS, abilities.without_mps)
    if abilities.without_driver_limits:
        lacking.setdefault(Isolation.DRIVER, abilities.without_driver_limits)
    elif trouble := cgroup_limits_trouble(board.driver_version, has_calls=board.has_cgroup_limits):
        lacking.setdefault(Isolation.DRIVER, trouble)
    return Offer(lacking)


def cgroup_limits_trouble(driver_version: str, *, has_calls: bool) -> str:
    """Say why a driver cannot limit control groups; empty when it can. Args: has_calls: whether its NVML has the calls for it."""
    major = _driver_major(driver_version)
    if major < FIRST_DRIVER_WITH_LIMITS:
        return f"driver {major} has no limits of its own, {FIRST_DRIVER_WITH_LIMITS} is the first that has"
    return "" if has_calls else f"NVML of driver {driver_version} has no calls for limits of control groups ({NVML_CALLS[0]})"


def _driver_major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else 0


def backend_of(request: ContainerRequest, preferences: Preferences) -> Isolation:
    """Return the backend that enforces what a container asks."""
    return Isolation.MIG if request.mig else preferences.isolation or Isolation.SHIM


def backend_trouble(request: ContainerRequest, preferences: Preferences, offer: Offer, most_memory_burst: float) -> str:
    """Say why the node cannot enforce the container's share as asked, and what to write instead; empty when it can."""
    backend = backend_of(request, preferences)
    annotation = f"annotation {contract.ANNOTATION_ISOLATION}: {backend}"
    if backend in offer.lacking:
        offered = ", ".join(offer.backends) or "nothing"
        return (
            f"{annotation} is not available on this node: {offer.lacking[backend]}. It offers {offered}. "
            "Change or remove the annotation, or use another node"
        )
    if backend is Isolation.MPS and request.vgpus > 1:
        return (
            f"{annotation} gives one GPU per container, because each GPU has a server of its own and a process reaches one of them, and "
            f"container {request.container} asks for {request.vgpus}. Ask for one vGPU, or for isolation: shim"
        )
    if backend is Isolation.DRIVER and request.cores_percent is not None:
        return (
            f"{annotation} limits memory and not compute, and container {request.container} asks for cores. "
            f"Remove {contract.RESOURCE_VGPU_CORES}, or ask for isolation: shim"
        )
    trouble = pause_trouble(request.container, backend) if preferences.paused else ""
    return trouble or _burst_trouble(request, preferences, backend, most_memory_burst)


def pause_trouble(container: str, backend: Isolation) -> str:
    """Say why the launches of a container cannot be made to wait; empty when they can."""
    if backend is Isolation.SHIM:
        return ""
    return f'annotation {contract.ANNOTATION_PAUSED}: "true" is for isolation: shim, and container {container} has {backend}. Remove it'


def _burst_trouble(request: ContainerRequest, preferences: Preferences, backend: Isolation, most_memory_burst: float) -> str:
    burst = preferences.memory_burst
    if burst is None or burst <= 1.0 or request.mig:
        return ""
    annotation = f'annotation {contract.ANNOTATION_MEMORY_BURST}: "{burst:g}"'
    if backend is not Isolation.SHIM:
        return f"{annotation} is for isolation: shim, and container {request.container} has {backend}. Remove one of the two"
    if burst > most_memory_burst:
        allowed = f"at most {most_memory_burst:g}" if most_memory_burst > 1.0 else "none"
        return (
            f"{annotation} is more than this node allows, which is {allowed} (memoryOversubscription of its agent). "
            "Lower or remove the annotation, or use another node"
        )
    return ""


def within_burst(preferences: Preferences, most_memory_burst: float) -> Preferences:
    """Return a granted container's preferences without burst above what the node allows: either may change after admission."""
    if (preferences.memory_burst or 1.0) <= most_memory_burst:
        return preferences
    return replace(preferences, memory_burst=most_memory_burst)
