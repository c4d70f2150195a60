# SPDX-License-Identifier: Apache-2.0
"""PodGroups of other systems: a pod names one, and the PodGroup has the minimum size. By one table; pure, as ``owner_groups``.

A PodGroup that cannot be honoured is refused: a gang here has one minimum, and no sub-groups. Other fields, such as the queue, have no
effect; their names are part of what is read, so that the pod gets a warning.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.domains import DomainMode
from scheduler_plugin.webhook.owner_groups import Json, Reference


@dataclass(frozen=True, slots=True)
class PodGroup:
    """What a PodGroup says."""

    name: str
    minimum: int
    domain: tuple[DomainMode, str] | None = None
    """The node label by which its members must, or should, be in one domain."""
    idle: tuple[str, ...] = ()
    """Fields of its spec without effect."""


Reading: TypeAlias = Generator[Reference, Json | None, PodGroup]


@dataclass(frozen=True, slots=True)
class PodGroupApi:
    """One row: a system with PodGroups."""

    system: str
    word: str
    """The annotation or label on a pod that names the group; for Kubernetes a field of the spec."""
    api_versions: tuple[str, ...]
    """The newest first. A cluster serves some of them, or none."""
    read: Callable[[str, Json], PodGroup]
    known: tuple[str, ...] = ("minMember",)
    """Fields of the spec that have their effect, or ask for nothing."""


def find_pod_group(api: PodGroupApi, name: str) -> Reading:
    """Read the PodGroup of this name. Raises RequestError: it does not exist, or cannot be honoured."""
    for version in api.api_versions:
        found = yield Reference(version, "podgroups", "PodGroup", name)
        if found is not None:
            spec = _mapping(found.get("spec"))
            group = api.read(name, spec)
            return replace(group, idle=(*group.idle, *sorted(field for field, value in spec.items() if value and field not in api.known)))
    raise RequestError(
        f"{api.word} names PodGroup {quote(name)}, but its namespace has none of {' or '.join(api.api_versions)}: create it before the pod"
    )


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _least(spec: Json, field: str = "minMember") -> int:
    value = spec.get(field)
    return max(1, value) if isinstance(value, int) and not isinstance(value, bool) else 1


def _of_coscheduling(name: str, spec: Json) -> PodGroup:
    return PodGroup(name, _least(spec))


def _of_kai(name: str, spec: Json) -> PodGroup:
    if spec.get("subGroups"):
        raise RequestError(f"PodGroup {quote(name)} has subGroups, which are not supported: give each of them a PodGroup of its own")
    topology = _mapping(spec.get("topologyConstraint"))
    modes = {"requiredTopologyLevel": DomainMode.REQUIRED, "preferredTopologyLevel": DomainMode.PREFERRED}
    levels = [(field, mode, str(topology[field])) for field, mode in modes.items() if topology.get(field)]
    domain = levels[0][1:] if levels else None
    return PodGroup(name, _least(spec), domain, tuple(f"topologyConstraint.{field}" for field, _, _ in levels[1:]))


def _of_volcano(name: str, spec: Json) -> PodGroup:
    if str(_mapping(spec.get("networkTopology")).get("mode") or "soft") == "hard":
        raise RequestError(
            f"PodGroup {quote(name)} has networkTopology.mode: hard, which is not supported: set aliquot.dev/domain: required"
        )
    return PodGroup(name, _least(spec))


def _of_kubernetes(name: str, spec: Json) -> PodGroup:
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
POD_GROUPS: Final = (
    PodGroupApi("KAI", "pod-group-name", ("scheduling.run.ai/v2alpha2",), _of_kai, ("minMember", "topologyConstraint")),
    PodGroupApi("Volcano", "scheduling.volcano.sh/group-name", ("scheduling.volcano.sh/v1beta1",), _of_volcano),
    PodGroupApi("Volcano", "scheduling.k8s.io/group-name", ("scheduling.volcano.sh/v1beta1",), _of_volcano),
    PodGroupApi("coscheduling", "scheduling.x-k8s.io/pod-group", ("scheduling.x-k8s.io/v1alpha1",), _of_coscheduling),
    KUBERNETES_GROUP,
)
"""The table."""
