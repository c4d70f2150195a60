# SPDX-License-Identifier: Apache-2.0
"""Gives a pod, or a pod template, what its class stands for (``core/classes.py``). What the pod itself says wins.

Kueue orders workloads by the PriorityClass of their pod templates, unless the object names a class of Kueue's own. So a class sets both:
``templates.py`` writes the PriorityClass into the template, before Kueue reads it.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.admit.queues import QUEUE_LABEL
from scheduler_plugin.core.classes import Profile
from scheduler_plugin.webhook.amounts import Options, part_of_memory
from scheduler_plugin.webhook.draft import Draft, DraftContainer

QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
_AMOUNTS: Final = (contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_MEMORY_PERCENT, contract.RESOURCE_VGPU_CORES)


def apply_class(draft: Draft, options: Options, *, may_share: bool) -> None:
    """Set the defaults of the pod's class.

    Args: may_share: whether the class may make whole GPUs shares; not where the pod asks for them in another system's words.
    Raises: RequestError: there is no such class.
    """
    profile = profile_of(draft.labels, options.classes)
    if profile is None:
        return
    draft.priority_class = draft.priority_class or profile.priority_class
    draft.labels.update(queue_priority(draft.labels, profile))
    if may_share:
        for container in draft.containers:
            _set_share(draft, container, profile, options)
    for name, value in profile.annotations.items():
        if name not in draft.annotations and not (name == contract.ANNOTATION_CORES_MODE and _lacks_cores(draft)):
            draft.annotations[name] = value


def profile_of(labels: Mapping[str, str], classes: Mapping[str, Profile]) -> Profile | None:
    """Return the profile of the class that labels name; None without one. Raises RequestError for an unknown class."""
    name = labels.get(contract.LABEL_CLASS)
    if name is not None and name not in classes:
        raise RequestError(
            f"label {contract.LABEL_CLASS}: expected one of {', '.join(sorted(classes))}, found {quote(name)}: correct it, or remove it"
        )
    return None if name is None else classes[name]


def queue_priority(labels: Mapping[str, str], profile: Profile) -> dict[str, str]:
    """Return the label that gives an object in a queue Kueue's priority; empty if it has one, or the profile names none."""
    wanted = bool(profile.kueue_priority_class) and QUEUE_LABEL in labels and QUEUE_PRIORITY not in labels
    return {QUEUE_PRIORITY: profile.kueue_priority_class} if wanted else {}


def _set_share(draft: Draft, container: DraftContainer, profile: Profile, options: Options) -> None:
    if not container.wants(contract.RESOURCE_VGPU) or any(map(container.has, _AMOUNTS)):
        return
    if contract.ANNOTATION_ISOLATION in draft.annotations:
        return  # exclusive asks for whole GPUs, and the others say how a stated share is held
    vgpus = units.parse_count(container.limits.get(contract.RESOURCE_VGPU, container.requests.get(contract.RESOURCE_VGPU, "")))
    if profile.memory_percent:
        part = Fraction(profile.memory_percent, units.WHOLE_GPU_PERCENT)
        memory = part_of_memory(draft, part, f"class {draft.labels[contract.LABEL_CLASS]}", options)
        container.ask(memory.resource, vgpus * memory.amount)
    if profile.cores:
        container.ask(contract.RESOURCE_VGPU_CORES, vgpus * profile.cores)


def _lacks_cores(draft: Draft) -> bool:
    """Whether a container asks for GPUs without cores, which are the weight of cores-mode."""
    asking = [one for one in draft.containers if any(map(one.wants, contract.RESOURCES_OF_VGPUS))]
    return not asking or any(not one.wants(contract.RESOURCE_VGPU_CORES) for one in asking)
