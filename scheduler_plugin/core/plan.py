"""The devices a pod gets on one given node, by placement's own search: what bind commits to."""

from collections.abc import Sequence
from dataclasses import replace

from placement.choose import choose_pod
from placement.device import DeviceState
from placement.refusal import Refusal
from proto.model import Link, PodAssignment, PodRequest, Policy

FILTER_SEED = ""
"""Filter judges a shape of pod, not a pod, so it breaks ties the same way for all."""


def plan_on_node(
    states: Sequence[DeviceState], request: PodRequest, policy: Policy, links: Sequence[Link], pod_uid: str
) -> PodAssignment | Refusal:
    """Choose devices for a pod on a node, or say why there are none.

    For a pod of several containers placement's search depends on how ties break, so a refusal under the pod's own seed is checked
    under the one that filter used.
    """
    choice = choose_pod(states, request, policy, links=links, seed=pod_uid)
    if isinstance(choice, Refusal) and len(request.containers) > 1:
        choice = choose_pod(states, request, policy, links=links, seed=FILTER_SEED)
    if isinstance(choice, Refusal):
        return choice
    return PodAssignment(pod_uid, tuple(container.assignment() for container in choice.containers))


def shape_of(request: PodRequest) -> PodRequest:
    """Return the request without what does not change where it fits, so that equal pods share one evaluation."""
    containers = tuple(replace(container, container=f"c{position}") for position, container in enumerate(request.containers))
    return PodRequest(containers, replace(request.preferences, priority=None, memory_burst=None))
