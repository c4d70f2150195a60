# SPDX-License-Identifier: Apache-2.0
"""Decides which backends can enforce shares on this node, and says why each other backend cannot.

A pod selects the backend by the annotation ``aliquot.dev/isolation``. Without it, the shim enforces vGPUs and the hardware enforces MIG
instances. What a node lacks is found by checking the host (``Abilities``) or follows from the current state of its GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from agent.core.driver_limits import NVML_CALLS
from agent.core.inventory import DeviceInventory
from aliquot import contract
from aliquot.contract.features import ALL_OPEN, FeatureGates, Gate
from aliquot.contract.model import ContainerRequest, Isolation, Preferences

FIRST_DRIVER_WITH_LIMITS = 615


class MigStrategy(StrEnum):
    """How the agent offers GPUs in MIG mode."""

    NONE = "none"
    """Not at all."""
    SINGLE = "single"
    """All GPUs have instances of one profile, and each instance is a vGPU."""
    MIXED = "mixed"
    """Each profile is a resource of its own."""
    DYNAMIC = "dynamic"
    """As ``mixed``, and instances are created when containers start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What the node supports. Each ``without_`` text says what is missing; it is empty if the backend is available."""

    gates: FeatureGates = ALL_OPEN
    mig_strategy: MigStrategy = MigStrategy.MIXED
    without_mps: str = "the agent has not checked this"
    without_driver_limits: str = "the agent has not checked this"
    most_memory_burst: float = 1.0
    """The highest memory burst, as a ratio of a container's granted memory; 1 = no burst."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The backends that a node offers now."""

    lacking: Mapping[Isolation, str]
    """The reason for each backend that is not offered."""
    gates: FeatureGates = ALL_OPEN

    @property
    def backends(self) -> tuple[Isolation, ...]:
        """The backends that pods may request."""
        return tuple(backend for backend in Isolation if backend not in self.lacking)


def offer_of(inventory: DeviceInventory, abilities: Abilities) -> Offer:
    """Return what the node offers with these GPUs."""
    shared = any(not entry.device.mig_enabled for entry in inventory.devices)
    partitioned = any(entry.device.mig_enabled for entry in inventory.devices)
    lacking: dict[Isolation, str] = {}
    if not shared:
        for backend in (Isolation.SHIM, Isolation.EXCLUSIVE, Isolation.MPS, Isolation.DRIVER):
            lacking[backend] = "every GPU of this node is in MIG mode" if partitioned else "this node has no GPU yet"
    if not partitioned:
        lacking[Isolation.MIG] = "no GPU of this node is in MIG mode"
    elif abilities.mig_strategy is MigStrategy.NONE:
        lacking[Isolation.MIG] = "this node has migStrategy: none"
    if abilities.without_mps:
        lacking.setdefault(Isolation.MPS, abilities.without_mps)
    if abilities.without_driver_limits:
        lacking.setdefault(Isolation.DRIVER, abilities.without_driver_limits)
    elif trouble := cgroup_limits_trouble(inventory.driver_version, has_calls=inventory.has_cgroup_limits):
        lacking.setdefault(Isolation.DRIVER, trouble)
    return Offer(lacking, abilities.gates)


def cgroup_limits_trouble(driver_version: str, *, has_calls: bool) -> str:
    """Return why a driver cannot limit cgroups; empty if it can. Args: has_calls: whether its NVML has the calls for it."""
    major = _driver_major(driver_version)
    if major < FIRST_DRIVER_WITH_LIMITS:
        return f"driver {major} has no memory limits of its own, only drivers from {FIRST_DRIVER_WITH_LIMITS} on have them"
    return "" if has_calls else f"NVML of driver {driver_version} has no calls for cgroup limits ({NVML_CALLS[0]})"


def _driver_major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else 0


def backend_of(request: ContainerRequest, preferences: Preferences) -> Isolation:
    """Return the backend that enforces a container's request."""
    return Isolation.MIG if request.mig else preferences.isolation or Isolation.SHIM


def backend_trouble(request: ContainerRequest, preferences: Preferences, offer: Offer, most_memory_burst: float) -> str:
    """Return why the node cannot enforce the container's request, with what to write instead; empty if it can."""
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
            f"{annotation} allows one GPU per container, because each GPU has its own server and a process can use only one of them; "
            f"container {request.container} requests {request.vgpus}. Request one vGPU, or use isolation: shim"
        )
    if backend is Isolation.DRIVER and request.cores_percent is not None:
        return (
            f"{annotation} limits memory but not compute, and container {request.container} requests cores. "
            f"Remove {contract.RESOURCE_VGPU_CORES}, or use isolation: shim"
        )
    trouble = pause_trouble(request.container, backend, offer.gates) if preferences.paused else ""
    return trouble or _burst_trouble(request, preferences, backend, most_memory_burst, offer.gates)


def pause_trouble(container: str, backend: Isolation, gates: FeatureGates) -> str:
    """Return why a container's launches cannot be paused; empty if they can."""
    if closed := gates.closed(Gate.PAUSING):
        return f'annotation {contract.ANNOTATION_PAUSED}: "true" is not available on this node: {closed}. Remove it, or use another node'
    if backend is Isolation.SHIM:
        return ""
    return f'annotation {contract.ANNOTATION_PAUSED}: "true" needs isolation: shim, but container {container} has {backend}. Remove it'


def _burst_trouble(
    request: ContainerRequest, preferences: Preferences, backend: Isolation, most_memory_burst: float, gates: FeatureGates
) -> str:
    burst = preferences.memory_burst
    if burst is None or burst <= 1.0 or request.mig:
        return ""
    annotation = f'annotation {contract.ANNOTATION_MEMORY_BURST}: "{burst:g}"'
    if backend is not Isolation.SHIM:
        return f"{annotation} needs isolation: shim, but container {request.container} has {backend}. Remove one of the two"
    if closed := gates.closed(Gate.MEMORY_BURST):
        return f"{annotation} is not available on this node: {closed}. Remove the annotation, or use another node"
    if burst > most_memory_burst:
        allowed = f"at most {most_memory_burst:g}" if most_memory_burst > 1.0 else "no burst"
        return (
            f"{annotation} is too high: this node allows {allowed} (memoryOversubscription of its agent). "
            "Lower or remove the annotation, or use another node"
        )
    return ""


def within_burst(preferences: Preferences, most_memory_burst: float) -> Preferences:
    """Return a granted container's preferences with its burst lowered to what the node allows. Either may change after admission."""
    if (preferences.memory_burst or 1.0) <= most_memory_burst:
        return preferences
    return replace(preferences, memory_burst=most_memory_burst)
