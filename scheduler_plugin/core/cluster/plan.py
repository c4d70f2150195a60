# SPDX-License-Identifier: Apache-2.0
"""The devices that a pod gets on one given node, by placement's own search, and whether the node offers the rest. bind commits to this."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import ContainerRequest, Link, PodAssignment, PodRequest, Policy, Preferences
from aliquot.placement.choose import choose_pod
from aliquot.placement.demand import GENERIC, Demand
from aliquot.placement.device import DeviceState
from aliquot.placement.refusal import Refusal

FILTER_SEED = ""
"""filter judges a shape of pods, not a single pod, so it breaks ties in the same way for all."""
_PLANS_KEPT: Final = 64
"""More than the pods that are between prioritize and bind at one time."""


def plan_on_node(
    states: Sequence[DeviceState],
    request: PodRequest,
    policy: Policy,
    links: Sequence[Link],
    pod_uid: str,
    demand: Demand = GENERIC,
) -> PodAssignment | Refusal:
    """Choose devices for a pod on a node, or say why there are not enough.

    With several containers or several MIG profiles, the search places one after the other. How it breaks ties then decides what is left for
    the later ones, so it breaks them as filter did.
    """
    seed = FILTER_SEED if len(request.containers) > 1 or takes_several_profiles(request) else pod_uid
    choice = choose_pod(states, request, policy, links=links, seed=seed, demand=demand)
    if isinstance(choice, Refusal):
        return choice
    return PodAssignment(pod_uid, tuple(container.assignment() for container in choice.containers))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan for a pod on a node."""

    row_changed: int
    """The number of the last change of the node's row. No other row has it, and each change of the node gives another."""
    request: PodRequest
    policy: Policy
    outcome: PodAssignment | Refusal


class PlanCache:
    """The latest plan of each pod, valid while its node does not change."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, _Plan] = OrderedDict()

    def get(self, pod_uid: str, row_changed: int, request: PodRequest, policy: Policy) -> PodAssignment | Refusal | None:
        """Return the plan that was made with equal inputs; None without one."""
        plan = self._plans.get(pod_uid)
        if plan is None or plan.row_changed != row_changed or plan.policy is not policy or plan.request != request:
            return None
        return plan.outcome

    def put(self, pod_uid: str, row_changed: int, request: PodRequest, policy: Policy, outcome: PodAssignment | Refusal) -> None:
        """Keep a plan, in place of the pod's earlier one."""
        self._plans[pod_uid] = _Plan(row_changed, request, policy, outcome)
        if len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)

    def clear(self) -> None:
        """Drop all plans."""
        self._plans.clear()

    def forget(self, pod_uid: str) -> None:
        """Drop the plan of a pod."""
        self._plans.pop(pod_uid, None)


def takes_several_profiles(request: PodRequest) -> bool:
    """Whether a container asks for MIG instances of more than one profile."""
    return any(len(container.mig) > 1 for container in request.containers)


def shape_of(request: PodRequest) -> PodRequest:
    """Return the request without what does not matter for where it fits, so that equal pods share one evaluation."""
    containers = tuple(replace(container, container=f"c{position}") for position, container in enumerate(request.containers))
    preferences, burst = request.preferences, burst_of(request.containers, request.preferences)
    counted = None if burst == 1 else burst
    if (preferences.priority, preferences.paused, preferences.memory_burst) != (
        None,
        False,
        counted,
    ):  # rare: the copy is the most expensive step
        preferences = replace(preferences, priority=None, paused=False, memory_burst=counted)
    return PodRequest(containers, preferences)


def burst_of(containers: Sequence[ContainerRequest], preferences: Preferences) -> float:
    """Return a pod's memory burst, as a ratio; 1 for a pod with MIG instances only, which cannot burst."""
    return 1.0 if all(container.mig for container in containers) else preferences.memory_burst or 1.0


def not_offered(gpu: GpuNode, request: PodRequest) -> str:
    """Name the isolation or memory burst that the pod asks for and the node's agent does not offer; empty if it offers both."""
    isolation, burst = request.preferences.isolation, burst_of(request.containers, request.preferences)
    if isolation is not None and isolation not in gpu.isolation:
        return f"the isolation {isolation}"
    return "" if burst <= gpu.memory_oversubscription else f"the memory burst of {burst:g} (at most {gpu.memory_oversubscription:g})"
