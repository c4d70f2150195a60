# SPDX-License-Identifier: Apache-2.0
"""Translates the words with which other systems say that pods start together into our gang, or refuses them.

A gang needs a name and a size. Most systems keep the size in an object of their own, which a pod only names. ``grouper`` reads it if that
is switched on. Otherwise such a pod is refused with what to write, because members that start one by one can wait for each other for ever.
A pod with our own annotations is complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.contract.features import Gate
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.domains import DomainMode
from scheduler_plugin.core.cluster.roles import Role
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.draft import Draft
from scheduler_plugin.webhook.pod_groups import KAI_SUB_GROUP, KUBERNETES_GROUP, POD_GROUPS, PodGroupApi
from scheduler_plugin.webhook.topology_words import set_domain

GROUPING_SCHEDULERS: Final = ("kai-scheduler", "runai-scheduler", "volcano")
"""Schedulers that also form groups by the controller of a pod, which the pod itself does not say."""
_SINGLE_PODS: Final = ("", "ReplicaSet", "StatefulSet", "DaemonSet", "Node")
"""Controllers without a group in those schedulers; empty for a pod without one."""
_GROUP_FIELDS: Final = ("schedulingGroup", "workloadRef")


@dataclass(frozen=True, slots=True)
class _GroupWord:
    """The annotation or label that names a group, and the one with its size, if the system has one on pods."""

    name: str
    size: str = ""
    is_label: bool = False


_GROUP_WORDS: Final = (
    _GroupWord("pod-group-name", "kai.scheduler/batch-min-member"),
    _GroupWord("scheduling.volcano.sh/group-name", "scheduling.volcano.sh/group-min-member"),
    _GroupWord("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-min-member"),
    _GroupWord("gang.scheduling.koordinator.sh/name", "gang.scheduling.koordinator.sh/min-available"),
    _GroupWord("scheduling.x-k8s.io/pod-group", is_label=True),
    _GroupWord("pod-group.scheduling.sigs.k8s.io/name", "pod-group.scheduling.sigs.k8s.io/min-available", is_label=True),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What other objects say of a pod's gang: a refusal, a gang, or only a warning."""

    name: str = ""
    """Empty: the pod is in no gang."""
    minimum: int = 0
    role: Role | None = None
    source: str = ""
    domain: tuple[DomainMode, str] | None = None
    refusal: str = ""
    warning: str = ""


def named_pod_group(draft: Draft, *, scheduling_groups: bool) -> tuple[PodGroupApi, str] | None:
    """Return the PodGroup that a pod names without its size; None without one.

    Args: scheduling_groups: whether kube-scheduler itself serves ``spec.schedulingGroup``.
    """
    found = list(_groups(draft))
    if any(size for _, _, size in found):
        return None
    for api in POD_GROUPS:
        if api is KUBERNETES_GROUP:
            name = "" if scheduling_groups else _group_of_field(draft, _GROUP_FIELDS[0])
        else:
            name = next((name for source, name, _ in found if source.endswith(f" {api.word}")), "")
        if name:
            return api, name
    return None


def translate_groups(draft: Draft, options: Options, found: Finding | None = None) -> None:
    """Set our gang from the words of other systems, or from other objects.

    Args: found: what other objects say.
    Raises: RequestError: a group without a size, two groups that differ, or what the finding refuses.
    """
    _set_gang(draft, options, found)
    _check_sub_group(draft)


def _set_gang(draft: Draft, options: Options, found: Finding | None) -> None:
    if contract.ANNOTATION_GANG in draft.annotations and contract.ANNOTATION_GANG_MIN in draft.annotations:
        _check_same_group(draft)
        return
    if found is not None and _use(found, draft):
        return
    if not options.gangs_from_owners and draft.labels.get(contract.LABEL_GANG_FROM_OWNER) == "true":
        raise RequestError(
            f"label {contract.LABEL_GANG_FROM_OWNER} needs the scheduler's feature gate {Gate.GANGS_FROM_OWNERS}: set "
            f"{contract.ANNOTATION_GANG} and {contract.ANNOTATION_GANG_MIN} instead, or remove it"
        )
    for source, name, size in _groups(draft):
        if not name or not size:
            missing = "size" if name else "name"
            raise RequestError(
                f"{source} makes the pod a member of a group, but the pod does not state the group's {missing}: set "
                f"{contract.ANNOTATION_GANG} and {contract.ANNOTATION_GANG_MIN}, or remove it"
            )
        draft.set_annotation(contract.ANNOTATION_GANG, name, source)
        draft.set_annotation(contract.ANNOTATION_GANG_MIN, size, source)
    if not options.scheduling_groups:
        _check_no_field(draft)


def _use(found: Finding, draft: Draft) -> bool:
    """Apply a finding; return whether the pod is in the gang that it names. Raises RequestError."""
    if found.refusal:
        raise RequestError(found.refusal)
    if found.warning:
        draft.warnings.append(found.warning)
    if not found.name:
        return False
    draft.set_annotation(contract.ANNOTATION_GANG, found.name, found.source)
    draft.set_annotation(contract.ANNOTATION_GANG_MIN, str(found.minimum), found.source)
    if found.role is not None:
        draft.set_annotation(contract.ANNOTATION_GANG_ROLE, found.role.name, found.source)
        draft.set_annotation(contract.ANNOTATION_GANG_ROLE_MIN, str(found.role.minimum), found.source)
    if found.domain is not None:
        set_domain(draft, found.source, *found.domain)
    return True


def _check_sub_group(draft: Draft) -> None:
    """Refuse a pod in a sub-group of KAI if its PodGroup was not read. Raises RequestError."""
    name = draft.labels.get(KAI_SUB_GROUP, "")
    if not name or contract.ANNOTATION_GANG_ROLE in draft.annotations:
        return
    cure = f"set {contract.ANNOTATION_GANG_ROLE} and {contract.ANNOTATION_GANG_ROLE_MIN} if each sub-group has its own minimum"
    if contract.ANNOTATION_GANG not in draft.annotations:
        raise RequestError(f"label {KAI_SUB_GROUP}: {quote(name)} is a part of a PodGroup that is not read: state the gang, and {cure}")
    draft.warnings.append(f"label {KAI_SUB_GROUP} has no effect: the pod's gang has one minimum: {cure}")


def _check_no_field(draft: Draft) -> None:
    """Refuse a group in a field of the spec. Raises RequestError."""
    name = next(filter(draft.spec.get, _GROUP_FIELDS), None)
    if name is not None:
        raise RequestError(
            f"spec.{name} {quote(_group_of_field(draft, name))} is not served by Aliquot's kube-scheduler, so the members would "
            f"start one by one: set {contract.ANNOTATION_GANG} and {contract.ANNOTATION_GANG_MIN} in the pod's template, or open its gate "
            "GangScheduling and set schedulingGroups"
        )


def warn_of_lost_groups(draft: Draft, replaced: str) -> None:
    """Warn if the replaced scheduler would have formed a group by the pod's controller, and the pod states no gang."""
    if replaced in GROUPING_SCHEDULERS and draft.controller_kind not in _SINGLE_PODS and contract.ANNOTATION_GANG not in draft.annotations:
        draft.warnings.append(
            f"{replaced} may start the pods of a {draft.controller_kind} together; here each starts by itself: set "
            f"{contract.ANNOTATION_GANG} and {contract.ANNOTATION_GANG_MIN} if they need each other"
        )


def _groups(draft: Draft) -> Iterator[tuple[str, str, str]]:
    """Yield each group that the pod is in: the word that says so, the name and the size, either may be empty."""
    for word in _GROUP_WORDS:
        values = draft.labels if word.is_label else draft.annotations
        name, size = values.get(word.name, ""), values.get(word.size, "")
        kind = "label" if word.is_label else "annotation"
        if name:
            yield f"{kind} {word.name}", name, size
        elif size and not _named_elsewhere(draft, word):
            # KAI groups a Job's pods by their controller if only the size is set.
            yield f"{kind} {word.size}", draft.controller_name, size


def _named_elsewhere(draft: Draft, word: _GroupWord) -> bool:
    """Whether another word with the same size names the group."""
    return any(other.size == word.size and other.name in draft.annotations for other in _GROUP_WORDS if other is not word)


def _check_same_group(draft: Draft) -> None:
    """Refuse a size of another system that differs from that of our gang. Names may differ. Raises RequestError."""
    for source, _, size in _groups(draft):
        if size and size != draft.annotations[contract.ANNOTATION_GANG_MIN]:
            raise RequestError(
                f"{source} means {contract.ANNOTATION_GANG_MIN}: {quote(size)}, but the pod has {contract.ANNOTATION_GANG_MIN}: "
                f"{quote(draft.annotations[contract.ANNOTATION_GANG_MIN])}: keep one of the two"
            )


def _group_of_field(draft: Draft, field: str) -> str:
    value = draft.spec.get(field)
    return str(value.get("podGroupName") or value.get("name") or "") if isinstance(value, dict) else ""
