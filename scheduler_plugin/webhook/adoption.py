# SPDX-License-Identifier: Apache-2.0
"""Which pods are Aliquot's to serve. An installation beside another system changes none of that system's pods by itself.

A pod in our own resources is always served. A pod in another system's words is served if its namespace is adopted, or if the pod itself
says something to Aliquot: our schedulerName, or any label or annotation of ours. The label ``aliquot.dev/adopt: "false"`` on a pod keeps it
with the other system.

The webhook does not know the labels of namespaces. The API server does, so each rule has a path of its own (``review.py``), and the
selectors in deploy/daemonset/scheduler/webhook.yaml choose it. The conditions there state the same rule as ``in_our_words`` and
``speaks_to_us``; tests/unit/deploy/test_adoption.py compares them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from aliquot import contract
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.draft import Draft
from scheduler_plugin.webhook.per_gpu import systems
from scheduler_plugin.webhook.vocabularies import asked_system, is_foreign_annotation, opted_out

NVIDIA: Final = "NVIDIA"
RUN_AI: Final = ("runai-scheduler", "Run:ai")
_NOT_ADOPTED: Final = "false"


def stays_with_its_owner(draft: Draft) -> bool:
    """Whether the pod itself says that Aliquot does not adopt it."""
    return draft.labels.get(contract.LABEL_ADOPT) == _NOT_ADOPTED


def in_our_words(draft: Draft, options: Options) -> bool:
    """Whether a container names one of our resources. Two of them are vgpu-manager's beside its own, and HAMi's names are settings."""
    for container in draft.containers:
        theirs = {name for system in systems(options) if any(map(container.wants, system.marks)) for name in system.names}
        names = {*container.limits, *container.requests} - theirs
        if any(name.startswith(contract.RESOURCE_VGPU) for name in names):
            return True
    return False


def speaks_to_us(draft: Draft, scheduler_name: str) -> bool:
    """Whether the pod names our scheduler, or has a label or an annotation of ours."""
    names = (*draft.labels, *draft.annotations)
    return draft.scheduler_name == scheduler_name or any(name.startswith(contract.ANNOTATION_PREFIX) for name in names)


def system_of(draft: Draft, options: Options) -> str:
    """Return the system in whose words the pod asks for GPUs; empty for our own words, and for a pod that asks for none."""
    if in_our_words(draft, options):
        return ""
    for container in draft.containers:
        if (system := asked_system(draft, container, options)) is not None:
            return system.system if any(map(container.wants, system.marks)) else NVIDIA
    if any(name.startswith(contract.RESOURCE_MIG_PREFIX) for container in draft.containers for name in container.limits):
        return NVIDIA
    return _annotating_system(draft)


def _annotating_system(draft: Draft) -> str:
    names = [name for name in draft.annotations if is_foreign_annotation(name)]
    if not names or opted_out(draft):
        return ""
    if all(name.startswith("nvidia.com/") for name in names):
        return NVIDIA
    return RUN_AI[1] if draft.scheduler_name == RUN_AI[0] else "KAI"


def becomes(patch: Sequence[Mapping[str, Any]], pod: Mapping[str, Any]) -> str:
    """Say what a patch makes of a pod: the GPU resources of each container, our annotations, and the scheduler."""
    order = ("containers", "initContainers", "annotations", "schedulerName")
    sorted_patch = sorted(patch, key=lambda operation: next((at for at, part in enumerate(order) if f"/{part}" in operation["path"]), 9))
    found = [text for operation in sorted_patch for text in _change(str(operation["path"]), operation["value"], pod)]
    return "; ".join(found) or "the same"


def _change(path: str, value: Any, pod: Mapping[str, Any]) -> Iterator[str]:
    _, part, *rest = path.split("/")
    if part == "metadata" and rest == ["annotations"]:
        yield from _changed_annotations((pod.get("metadata") or {}).get("annotations") or {}, value)
    elif part == "spec" and rest[-1] == "resources":
        container = pod["spec"][rest[0]][int(rest[1])].get("name", "")
        yield f"{container}: {_gpu_limits(value)}"
    elif part == "spec" and rest == ["schedulerName"]:
        yield f"schedulerName: {value}"


def _changed_annotations(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name, text in sorted(after.items()):
        if name.startswith(contract.ANNOTATION_PREFIX) and before.get(name) != text:
            yield f"{name}: {json.dumps(text)}"


def _gpu_limits(resources: Mapping[str, Any]) -> str:
    limits = sorted((resources.get("limits") or {}).items())
    return ", ".join(f"{name}: {amount}" for name, amount in limits if name.startswith(f"{contract.RESOURCE_DOMAIN}/")) or "no GPU"
