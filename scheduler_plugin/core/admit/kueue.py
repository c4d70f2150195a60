# SPDX-License-Identifier: Apache-2.0
"""Kueue's objects, reduced to what we read: workloads, admission checks, flavors and priority classes (kueue.x-k8s.io/v1beta2).

Source: apis/kueue/v1beta2 of Kueue 0.19.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from aliquot import contract
from scheduler_plugin.core.cluster.nodes import Taint, Toleration
from scheduler_plugin.core.cluster.objects import Metadata

API: Final = "apis/kueue.x-k8s.io/v1beta2"
API_VERSION: Final = "kueue.x-k8s.io/v1beta2"
CONTROLLER_NAME: Final = "aliquot.dev/fits"
PRIORITY_BOOST: Final = "kueue.x-k8s.io/priority-boost"
"""On a workload: what Kueue adds to its priority, with Kueue's feature gate PriorityBoost."""


class State(StrEnum):
    """The state of one admission check of one workload."""

    PENDING = "Pending"
    READY = "Ready"
    RETRY = "Retry"
    """Kueue evicts the workload, gives its quota back, and sets the check to Pending."""
    REJECTED = "Rejected"
    """Kueue deactivates the workload; only a person activates it again."""


@dataclass(frozen=True, slots=True)
class CheckEntry:
    """One admission check of a workload."""

    state: State
    message: str


@dataclass(frozen=True, slots=True)
class Domain:
    """Where Kueue's topology-aware scheduling wants some pods of a pod set."""

    labels: Mapping[str, str]
    """Of the nodes."""
    count: int


@dataclass(frozen=True, slots=True)
class PodSet:
    """Equal pods of a workload, as far as quota is reserved for them."""

    name: str
    count: int
    """Pods that still run or come: those assigned, less those that will not run again."""
    template: msgspec.Raw
    flavors: frozenset[str] = frozenset()
    domains: tuple[Domain, ...] | None = None
    """None without topology-aware scheduling."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload."""

    namespace: str
    name: str
    uid: str
    version: str
    """Sent with each answer: the API server refuses an answer to an older workload."""
    priority: int
    is_active: bool
    is_reserved: bool
    """Whether it has quota."""
    is_evicted: bool
    is_admitted: bool
    is_finished: bool
    checks: Mapping[str, CheckEntry]
    pod_sets: tuple[PodSet, ...]
    owner_uids: frozenset[str] = frozenset()
    created_at: float = 0.0
    """In seconds since 1970."""
    reserved_at: float = 0.0
    """When it got its quota, in whole seconds since 1970: pods of an earlier reservation are older."""
    first_slice: str = ""
    """Of an elastic job: the name of its first workload. Its pods carry that one's annotations, also after it has grown."""
    replaces: str = ""
    """Of an elastic job that grows: the name of the workload for its old size."""
    was_evicted: bool = False
    """Whether it lost its quota once."""
    priority_class: tuple[str, str] = ("", "")
    """Kind and name of the class that gives its priority."""
    is_boosted: bool = False
    """Whether it has a boost of its priority, ours or another's."""
    stopped_at: float = 0.0
    """When it was last stopped, in whole seconds since 1970; 0 if it was not."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def hold_name(self) -> str:
        """The name by which its pods find their seats."""
        return self.first_slice or self.name

    @property
    def hold_key(self) -> tuple[str, str]:
        """Namespace and that name."""
        return self.namespace, self.hold_name

    @property
    def replaced_key(self) -> tuple[str, str]:
        """Namespace and name of the workload that it replaces."""
        return self.namespace, self.replaces

    @property
    def is_growing(self) -> bool:
        """Whether its elastic job runs in its old size until this workload is admitted."""
        return bool(self.replaces) and self.is_reserved and not (self.is_admitted or self.is_evicted or self.is_finished)

    @property
    def own_pods_since(self) -> float:
        """The time from which pods are those of its reservation, in seconds since 1970.

        Of a workload that is not admitted, a pod from the same second is not counted: it may be older. All pods of an elastic job that
        grows are its own.
        """
        if self.replaces and not self.was_evicted:
            return 0.0
        return self.reserved_at if self.is_admitted else self.reserved_at + 1

    @property
    def waits_for_quota(self) -> bool:
        """Whether it would take quota that another workload gives back."""
        return self.is_active and not self.is_reserved and not self.is_finished

    @property
    def waits_since(self) -> float:
        """The time since which it has not run, in seconds since 1970. An eviction before it was admitted does not begin a new wait."""
        return max(self.created_at, self.stopped_at)


class AdmissionCheck(msgspec.Struct, frozen=True):
    """An admission check."""

    name: str
    controller_name: str
    generation: int
    active_generation: int
    """The generation for which it is Active; -1 if it is not."""


class PriorityClass(msgspec.Struct, frozen=True):
    """A PriorityClass or WorkloadPriorityClass."""

    name: str
    max_wait: str
    """The duration as it stands there; empty if it states none."""


class Flavor(msgspec.Struct, frozen=True):
    """A ResourceFlavor: Kueue adds its labels and tolerations to the pods."""

    name: str
    labels: Mapping[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    taints: tuple[Taint, ...] = ()
    """Kueue gives it only to pods that tolerate them, or if the flavor's own tolerations do."""


# --- topology-aware scheduling ---


class _Individual(msgspec.Struct):
    prefix: str = ""
    suffix: str = ""
    roots: list[str] = []


class _Values(msgspec.Struct):
    universal: str | None = None
    individual: _Individual | None = None

    def at(self, position: int) -> str:
        if self.individual is None:
            return self.universal or ""
        return f"{self.individual.prefix}{self.individual.roots[position]}{self.individual.suffix}"


class _Counts(msgspec.Struct):
    universal: int | None = None
    individual: list[int] | None = None

    def at(self, position: int) -> int:
        return self.individual[position] if self.individual is not None else self.universal or 0


class _Slice(msgspec.Struct, rename="camel"):
    domain_count: int = 0
    pod_counts: _Counts = msgspec.field(default_factory=_Counts)
    values_per_level: list[_Values] = []


class TopologyAssignment(msgspec.Struct):
    """The compressed form of Kueue: slices of domains, with what all domains of a slice have in common written once."""

    levels: list[str] = []
    slices: list[_Slice] = []

    def domains(self) -> Iterator[Domain]:
        """Yield each domain. Raises IndexError if the lists do not agree."""
        for part in self.slices:
            for position in range(part.domain_count):
                values = (one.at(position) for one in part.values_per_level)
                yield Domain(dict(zip(self.levels, values, strict=False)), part.pod_counts.at(position))


# --- decoding ---


class _PodSet(msgspec.Struct):
    name: str = "main"
    count: int = 1
    template: msgspec.Raw = msgspec.Raw(b"{}")


class _Assigned(msgspec.Struct, rename="camel"):
    name: str = "main"
    count: int | None = None
    flavors: dict[str, str] = {}
    topology_assignment: TopologyAssignment | None = None


class _Admission(msgspec.Struct, rename="camel"):
    pod_set_assignments: list[_Assigned] = []


class _Check(msgspec.Struct):
    name: str
    state: State
    message: str = ""


class _Reclaimable(msgspec.Struct):
    name: str
    count: int = 0


class _Condition(msgspec.Struct, rename="camel"):
    type: str = ""
    status: str = ""
    last_transition_time: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _Status(msgspec.Struct, rename="camel"):
    conditions: list[_Condition] | None = None
    admission: _Admission | None = None
    admission_checks: list[_Check] | None = None
    reclaimable_pods: list[_Reclaimable] | None = None


class _ClassRef(msgspec.Struct):
    kind: str = ""
    name: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    pod_sets: list[_PodSet] = []
    priority: int | None = None
    priority_class_ref: _ClassRef = msgspec.field(default_factory=_ClassRef)
    active: bool | None = None


class _WorkloadObject(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


def decode_workload(raw: bytes | msgspec.Raw) -> Workload:
    """Read a workload. Raises msgspec.DecodeError."""
    item = msgspec.json.decode(raw, type=_WorkloadObject)
    metadata, status = item.metadata, item.status
    conditions = status.conditions or ()
    true = {one.type: one.last_transition_time for one in conditions if one.status == "True"}
    annotations, of_class = metadata.annotations or {}, item.spec.priority_class_ref
    was_evicted = any(one.type == "Evicted" for one in conditions)
    return Workload(
        metadata.namespace,
        metadata.name,
        metadata.uid,
        metadata.resource_version,
        item.spec.priority or 0,
        item.spec.active is not False and metadata.deletion_timestamp is None,
        "QuotaReserved" in true and status.admission is not None,
        "Evicted" in true,
        "Admitted" in true,
        "Finished" in true,
        {one.name: CheckEntry(one.state, one.message) for one in status.admission_checks or ()},
        tuple(_pod_sets(item)),
        frozenset(owner.uid for owner in metadata.owner_references or ()),
        _seconds(metadata.creation_timestamp),
        _seconds(true.get("QuotaReserved")),
        *_slices(annotations),
        was_evicted,
        (of_class.kind, of_class.name),
        PRIORITY_BOOST in annotations,
        _stopped_at(conditions) if was_evicted else 0.0,
    )


def _seconds(moment: datetime | None) -> float:
    """Return a time in seconds since 1970; 0 if it is not stated."""
    return 0.0 if moment is None else moment.timestamp()


def _stopped_at(conditions: Iterable[_Condition]) -> float:
    """Return when Kueue took back the admission of a workload that was evicted; 0 if it was not admitted before."""
    stopped = [one.last_transition_time for one in conditions if (one.type, one.status) == ("Admitted", "False")]
    return _seconds(stopped[0]) if stopped else 0.0


def _slices(annotations: Mapping[str, str]) -> tuple[str, str]:
    """Return the first workload of an elastic job, and the workload that this one replaces."""
    replaced = annotations.get("kueue.x-k8s.io/workload-slice-replacement-for", "")
    return annotations.get("kueue.x-k8s.io/workload-slice-name", ""), replaced.rpartition("/")[2]


def _pod_sets(item: _WorkloadObject) -> Iterator[PodSet]:
    """Yield the pod sets with their assigned counts. A partly admitted workload gets fewer pods than its spec says."""
    admission = item.status.admission or _Admission()
    assigned = {one.name: one for one in admission.pod_set_assignments}
    reclaimed = {one.name: one.count for one in item.status.reclaimable_pods or ()}
    for stated in item.spec.pod_sets:
        given = assigned.get(stated.name, _Assigned())
        count = stated.count if given.count is None else given.count
        topology = given.topology_assignment
        try:
            domains = None if topology is None else tuple(topology.domains())
        except IndexError as exc:
            raise msgspec.ValidationError(f"the topology assignment of pod set {stated.name} has lists of different lengths") from exc
        left, template = max(0, count - reclaimed.get(stated.name, 0)), stated.template.copy()
        yield PodSet(stated.name, left, template, frozenset(given.flavors.values()), domains)


class _WithMetadata(msgspec.Struct):
    metadata: Metadata


class _CheckMetadata(msgspec.Struct):
    name: str = ""
    generation: int = 0


class _CheckSpec(msgspec.Struct, rename="camel"):
    controller_name: str = ""


class _CheckCondition(msgspec.Struct, rename="camel"):
    type: str = ""
    status: str = ""
    observed_generation: int = 0


class _CheckStatus(msgspec.Struct):
    conditions: list[_CheckCondition] | None = None


class _CheckObject(msgspec.Struct):
    metadata: _CheckMetadata
    spec: _CheckSpec = msgspec.field(default_factory=_CheckSpec)
    status: _CheckStatus = msgspec.field(default_factory=_CheckStatus)


def decode_check(raw: bytes | msgspec.Raw) -> AdmissionCheck:
    """Read an admission check. Raises msgspec.DecodeError."""
    item = msgspec.json.decode(raw, type=_CheckObject)
    conditions = item.status.conditions or ()
    active = next((one.observed_generation for one in conditions if (one.type, one.status) == ("Active", "True")), -1)
    return AdmissionCheck(item.metadata.name, item.spec.controller_name, item.metadata.generation, active)


def decode_priority_class(raw: bytes | msgspec.Raw) -> PriorityClass:
    """Read a PriorityClass or WorkloadPriorityClass. Raises msgspec.DecodeError."""
    metadata = msgspec.json.decode(raw, type=_WithMetadata).metadata
    return PriorityClass(metadata.name, (metadata.annotations or {}).get(contract.ANNOTATION_MAX_WAIT, ""))


class _FlavorSpec(msgspec.Struct, rename="camel"):
    node_labels: dict[str, str] | None = None
    node_taints: tuple[Taint, ...] | None = None
    tolerations: tuple[Toleration, ...] | None = None


class _FlavorObject(msgspec.Struct):
    metadata: Metadata
    spec: _FlavorSpec = msgspec.field(default_factory=_FlavorSpec)


def decode_flavor(raw: bytes | msgspec.Raw) -> Flavor:
    """Read a ResourceFlavor. Raises msgspec.DecodeError."""
    item = msgspec.json.decode(raw, type=_FlavorObject)
    return Flavor(item.metadata.name, item.spec.node_labels or {}, item.spec.tolerations or (), item.spec.node_taints or ())
