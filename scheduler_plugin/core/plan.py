"""The devices a pod gets on one given node, by placement's own search, and whether the node offers the rest: what bind commits to."""

from collections.abc import Sequence
from dataclasses import replace

from placement.choose import choose_pod
from placement.demand import GENERIC, Demand
from placement.device import DeviceState
from placement.refusal import Refusal
from proto.gpunode import GpuNode
from proto.model import ContainerRequest, Link, PodAssignment, PodRequest, Policy, Preferences

FILTER_SEED = ""
"""Filter judges a shape of pod, not a pod, so it breaks ties the same way for all."""


def plan_on_node(
    states: Sequence[DeviceState],
    request: PodRequest,
    policy: Policy,
    links: Sequence[Link],
    pod_uid: str,
    demand: Demand = GENERIC,
) -> PodAssignment | Refusal:
    """Choose devices for a pod on a node, or say why there are none.

    Where the search takes one thing after another, several containers or several MIG profiles, what is left for the later ones depends on
    how ties break, so they break as they did for filter.
    """
    seed = FILTER_SEED if len(request.containers) > 1 or takes_several_profiles(request) else pod_uid
    choice = choose_pod(states, request, policy, links=links, seed=seed, demand=demand)
    if isinstance(choice, Refusal):
        return choice
    return PodAssignment(pod_uid, tuple(container.assignment() for container in choice.containers))


def takes_several_profiles(request: PodRequest) -> bool:
    """Whether a container asks for MIG instances of more than one profile."""
    return any(len(container.mig) > 1 for container in request.containers)


def shape_of(request: PodRequest) -> PodRequest:
    """Return the request without what does not change where it fits, so that equal pods share one evaluation."""
    containers = tuple(replace(container, container=f"c{position}") for position, container in enumerate(request.containers))
    preferences, burst = request.preferences, burst_of(request.containers, request.preferences)
    counted = None if burst == 1 else burst
    if (preferences.priority, preferences.paused, preferences.memory_burst) != (None, False, counted):  # rarely: a copy costs most
        preferences = replace(preferences, priority=None, paused=False, memory_burst=counted)
    return PodRequest(containers, preferences)


def burst_of(containers: Sequence[ContainerRequest], preferences: Preferences) -> float:
    """Return how far above its memory a pod wants to burst, as a ratio; 1 for one with MIG instances alone, which never do."""
    return 1.0 if all(container.mig for container in containers) else preferences.memory_burst or 1.0


def not_offered(gpu: GpuNode, request: PodRequest) -> str:
    """Name what the pod asks for beside its amounts and the node's agent refuses; empty when there is nothing."""
    isolation, burst = request.preferences.isolation, burst_of(request.containers, request.preferences)
    if isolation is not None and isolation not in gpu.isolation:
        return f"the isolation {isolation}"
    return "" if burst <= gpu.memory_oversubscription else f"the memory burst of {burst:g} (at most {gpu.memory_oversubscription:g})"
