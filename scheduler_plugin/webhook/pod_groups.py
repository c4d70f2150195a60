# SPDX-License-Identifier: Apache-2.0
"""PodGroups of other systems: a pod names one, and the PodGroup has the minimum size. By one table; pure, as ``owner_groups``.

KAI's sub-groups and Volcano's tasks are roles of the gang. A PodGroup that cannot be honoured, such as one with nested sub-groups, is
refused. Other fields, such as the queue, have no effect; their names are part of what is read, so that the pod gets a warning.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.domains import DomainMode
from scheduler_plugin.core.cluster.roles import Role
from scheduler_plugin.webhook.owner_groups import Json, Reference

KAI_SUB_GROUP: Final = "kai.scheduler/subgroup-name"
VOLCANO_TASK: Final = "volcano.sh/task-spec"


@dataclass(frozen=True, slots=True)
class PodGroup:
    """What a PodGroup says."""

    name: str
    minimum: int
    domain: tuple[DomainMode, str] | None = None
    """The node label by which its members must, or should, be in one domain."""
    idle: tuple[str, ...] = ()
    """Fields of its spec without effect."""
    role: Role | None = None
    """The pod's role, if the group has minima for several parts."""


Reading: TypeAlias = Generator[Reference, Json | None, PodGroup]


@dataclass(frozen=True, slots=True)
class PodGroupApi:
    """One row: a system with PodGroups."""

    system: str
    word: str
    """The annotation or label on a pod that names the group; for Kubernetes a field of the spec."""
    api_versions: tuple[str, ...]
    """The newest first. A cluster serves some of them, or none."""
    read: Callable[[str, Json, str], PodGroup]
    """Args: its name, its spec, and the part of the group that the pod names; empty without one."""
    known: tuple[str, ...] = ("minMember",)
    """Fields of the spec that have their effect, or ask for nothing."""
    part: str = ""
    """The label or annotation on a pod that names its part of the group; empty for a system without parts."""


def find_pod_group(api: PodGroupApi, name: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Reading:
    """Read the PodGroup of this name.

    Args: labels, annotations: of the pod.
    Raises: RequestError: it does not exist, or cannot be honoured.
    """
    for version in api.api_versions:
        found = yield Reference(version, "podgroups", "PodGroup", name)
        if found is not None:
            spec = _mapping(found.get("spec"))
            group = api.read(name, spec, labels.get(api.part) or annotations.get(api.part) or "")
            return replace(group, idle=(*group.idle, *sorted(field for field, value in spec.items() if value and field not in api.known)))
    raise RequestError(
        f"{api.word} names PodGroup {quote(name)}, but its namespace has none of {' or '.join(api.api_versions)}: create it before the pod"
    )


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _least(spec: Json, field: str = "minMember") -> int:
    value = spec.get(field)
    return max(1, value) if isinstance(value, int) and not isinstance(value, bool) else 1


def _of_coscheduling(name: str, spec: Json, part: str) -> PodGroup:
    del part
    return PodGroup(name, _least(spec))


def _of_kai(name: str, spec: Json, part: str) -> PodGroup:
    topology = _mapping(spec.get("topologyConstraint"))
    modes = {"requiredTopologyLevel": DomainMode.REQUIRED, "preferredTopologyLevel": DomainMode.PREFERRED}
    levels = [(field, mode, str(topology[field])) for field, mode in modes.items() if topology.get(field)]
    domain = levels[0][1:] if levels else None
    group = PodGroup(name, _least(spec), domain, tuple(f"topologyConstraint.{field}" for field, _, _ in levels[1:]))
    return _with_sub_groups(group, spec["subGroups"], part) if spec.get("subGroups") else group


def _with_sub_groups(group: PodGroup, content: Any, part: str) -> PodGroup:
    """Add the role of a pod in a group with sub-groups. Each sub-group has its own minimum.

    Raises: RequestError: a sub-group states what a role cannot have, or the pod is in no sub-group.
    """
    sub_groups = [_mapping(one) for one in (content if isinstance(content, list) else ())]
    has_topology = _check_sub_groups(group, sub_groups)
    minima = {str(one.get("name") or ""): _least(one) for one in sub_groups}
    if part not in minima:
        names = " or ".join(sorted(minima))
        raise RequestError(f"PodGroup {quote(group.name)} has subGroups: expected label {KAI_SUB_GROUP} to be {names}, found {quote(part)}")
    idle = ("subGroups.topologyConstraint",) if has_topology else ()
    return _with_roles(replace(group, idle=(*group.idle, *idle)), minima, part, "subGroups")


def _check_sub_groups(group: PodGroup, sub_groups: Sequence[Json]) -> bool:
    """Refuse sub-groups that are no roles; return whether one has a topology, which has no effect. Raises RequestError."""
    if any(one.get("parent") or one.get("minSubGroup") for one in sub_groups):
        raise RequestError(f"PodGroup {quote(group.name)} has nested subGroups, which are not supported: list its leaves, without a parent")
    topologies = [_mapping(one.get("topologyConstraint")) for one in sub_groups]
    if any(one.get("requiredTopologyLevel") for one in topologies):
        raise RequestError(
            f"PodGroup {quote(group.name)} has a subGroup with requiredTopologyLevel, which is not supported: set it for the whole group, "
            "or give the subGroup a PodGroup of its own"
        )
    return any(topologies)


def _with_roles(group: PodGroup, minima: Mapping[str, int], part: str, field: str) -> PodGroup:
    """Add the role of a pod to a group. Args: part: the role. field: where the minima stand. Raises RequestError."""
    total = sum(minima.values())
    if group.minimum > total:
        raise RequestError(
            f"PodGroup {quote(group.name)} has minMember {group.minimum}, more than the {total} of its {field}: set it to their sum"
        )
    return replace(group, minimum=total, role=Role(part, minima.get(part, 0)))


def _of_volcano(name: str, spec: Json, part: str) -> PodGroup:
    if str(_mapping(spec.get("networkTopology")).get("mode") or "soft") == "hard":
        raise RequestError(
            f"PodGroup {quote(name)} has networkTopology.mode: hard, which is not supported: set aliquot.dev/domain: required"
        )
    group, tasks = PodGroup(name, _least(spec)), _mapping(spec.get("minTaskMember"))
    minima = {task: _least(tasks, task) for task, least in tasks.items() if least}
    if not minima:
        return group
    if group.minimum < sum(minima.values()):
        return replace(group, idle=("minTaskMember",))  # Volcano itself counts no tasks then
    if not part:
        raise RequestError(f"PodGroup {quote(name)} has minTaskMember, and the pod names no task: set annotation {VOLCANO_TASK}")
    return _with_roles(group, minima, part, "minTaskMember")


def _of_kubernetes(name: str, spec: Json, part: str) -> PodGroup:
    del part
    gang = _mapping(_mapping(spec.get("schedulingPolicy")).get("gang"))
    levels = _mapping(spec.get("schedulingConstraints")).get("topology")
    keys = [str(_mapping(level).get("key") or "") for level in (levels if isinstance(levels, list) else ())]
    domain = (DomainMode.REQUIRED, keys[0]) if gang and keys and keys[0] else None
    return PodGroup(name, _least(gang, "minCount"), domain)  # a basic group has no minimum


KUBERNETES_GROUP: Final = PodGroupApi(
    "Kubernetes",
    "spec.schedulingGroup",
    ("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha2"),
    _of_kubernetes,
    ("schedulingPolicy", "schedulingConstraints", "podGroupTemplateRef", "workloadRef"),
)
_OF_KAI: Final = ("minMember", "topologyConstraint", "subGroups")
_OF_VOLCANO: Final = ("minMember", "minTaskMember")
_VOLCANO_VERSIONS: Final = ("scheduling.volcano.sh/v1beta1",)
POD_GROUPS: Final = (
    PodGroupApi("KAI", "pod-group-name", ("scheduling.run.ai/v2alpha2",), _of_kai, _OF_KAI, KAI_SUB_GROUP),
    PodGroupApi("Volcano", "scheduling.volcano.sh/group-name", _VOLCANO_VERSIONS, _of_volcano, _OF_VOLCANO, VOLCANO_TASK),
    PodGroupApi("Volcano", "scheduling.k8s.io/group-name", _VOLCANO_VERSIONS, _of_volcano, _OF_VOLCANO, VOLCANO_TASK),
    PodGroupApi("coscheduling", "scheduling.x-k8s.io/pod-group", ("scheduling.x-k8s.io/v1alpha1",), _of_coscheduling),
    KUBERNETES_GROUP,
)
"""The table."""
