# SPDX-License-Identifier: Apache-2.0
"""Turns a GPU pod's amounts into ResourceClaims, where the settings say that GPUs are given out by dynamic resource allocation.

It is the last step of admission: amounts, preferences and scheduler are settled already, in the words of any vocabulary. Each container
gets a claim of its own, made from a template that all containers of its shape share.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aliquot import contract
from aliquot.contract.model import Allocation, NumaMode, PodRequest
from aliquot.placement.request import RequestError
from scheduler_plugin.core.claims.templates import REQUEST, ClaimTemplate, is_ours, template_of
from scheduler_plugin.core.cluster.gang import gang_of
from scheduler_plugin.core.cluster.pods import asks_gpu
from scheduler_plugin.webhook.draft import Draft, DraftContainer, Json

CLAIM_PREFIX: Final = "aliquot-vgpu-"
"""Of the names by which a pod's containers use its claims."""


def is_translated(draft: Draft) -> bool:
    """Whether a pod's amounts were turned into claims already: the API server may call the webhook again."""
    return any(is_ours(str(claim.get("resourceClaimTemplateName") or "")) for claim in draft.resource_claims)


def translate_to_claims(draft: Draft, request: PodRequest, *, planned: bool = False) -> tuple[ClaimTemplate, ...]:
    """Replace the amounts by claims; return the templates that must exist. Raises RequestError with what claims cannot state.

    Args: planned: whether our scheduler allocates them, so that gangs and preferences have their effect.
    """
    if not planned and gang_of("", draft.annotations) is not None:
        raise RequestError(f"annotation {contract.ANNOTATION_GANG}: gangs are not available where GPUs are claimed: remove the annotation")
    containers = {container.name: container for container in draft.containers}
    taken = {str(claim.get("name") or "") for claim in draft.resource_claims}
    templates: dict[str, ClaimTemplate] = {}
    for asked in request.containers:
        template = template_of(asked, request.preferences)
        templates[template.name] = template
        name = _free_name(taken)
        taken.add(name)
        draft.resource_claims.append({"name": name, "resourceClaimTemplateName": template.name})
        _claim(containers[asked.container], name)
    if not planned:
        _warn_of_what_is_lost(draft, request)
    return tuple(templates.values())


def hold_for_planning(pod: Mapping[str, Any]) -> Sequence[Json]:
    """Return the patch that has a pod with claims wait for our scheduler: a scheduling gate, and the label by which that finds the pod.

    Raises: RequestError: this is no pod.
    """
    draft = Draft(pod)
    if draft.node_name:
        return ()
    draft.labels[contract.LABEL_ALLOCATION] = Allocation.PLANNED
    if all(gate.get("name") != contract.PLANNED for gate in draft.scheduling_gates):
        draft.scheduling_gates.append({"name": contract.PLANNED})
    return draft.patch()


def _free_name(taken: set[str]) -> str:
    return next(name for number in range(len(taken) + 1) if (name := f"{CLAIM_PREFIX}{number}") not in taken)


def _claim(container: DraftContainer, name: str) -> None:
    for resource in [*container.limits, *container.requests]:
        if asks_gpu((resource,)):
            container.take(resource)
    container.claims.append({"name": name, "request": REQUEST})


def _warn_of_what_is_lost(draft: Draft, request: PodRequest) -> None:
    """Say which preferences have no effect: kube-scheduler takes the first GPU that fits."""
    lost = [contract.ANNOTATION_PLACEMENT] if request.preferences.policy is not None else []
    lost += [contract.ANNOTATION_NUMA] if request.preferences.numa is NumaMode.PREFER else []
    if lost:
        draft.warnings.append(f"annotation {' and '.join(lost)} has no effect where GPUs are claimed: the first GPU that fits is taken")
