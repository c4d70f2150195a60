# SPDX-License-Identifier: Apache-2.0
"""Pods, nodes and disruption budgets of the Kubernetes API, reduced to what the scheduler reads.

Decoding a pod takes 10 µs; with full models it takes 2 ms. The watch, the extender and single queries to the API server all use this
module, so they read a pod in the same way.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import ContainerSpec, Pod
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.extended import ExtendedAsk, is_extended
from scheduler_plugin.core.cluster.nodes import CORDONED, HARD_EFFECTS, NodeFacts, NodeRules, Taint, Toleration, rules_from
from scheduler_plugin.core.cluster.pods import SUCCEEDED, PodFacts, PodTerm, asks_gpu
from scheduler_plugin.core.cluster.selectors import Operator, Requirement, Selector, exactly

ENDED: Final = (SUCCEEDED, "Failed")
MOST: Final = 1 << 32
"""More CPU and RAM than any host has. Larger requests are cut to it: they fit nowhere anyway, and sums must fit into 64 bits."""
_PLAIN_RESOURCES: Final = frozenset(("cpu", "memory", *contract.RESOURCES_OF_VGPUS))
_HOST_RESOURCES: Final = frozenset(("cpu", "memory", "ephemeral-storage"))
_GPU_TAINT: Final = "nvidia.com/gpu"
_TOLERATED: Final = (_GPU_TAINT, "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""What pods tolerate without a word of their user: the webhook adds the first, and the API server the others."""
"""Clouds set it on nodes with GPUs, and GPU pods tolerate it (setting tolerateGpuTaint)."""
_CACHED_QUANTITIES: Final = 8192
_CACHED_VALUES: Final = 8192
_Value = TypeVar("_Value", bound=Hashable)


class OwnerReference(msgspec.Struct):
    """The owner of an object."""

    uid: str = ""
    kind: str = ""
    controller: bool | None = None
    """Whether this owner created and manages the object; at most one does."""


_NO_CONTROLLER: Final = OwnerReference()


class Metadata(msgspec.Struct, rename="camel"):
    """The fields of ObjectMeta that the scheduler reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    deletion_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    """When the grace period is over. Kubernetes always writes a time zone."""
    creation_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    owner_references: list[OwnerReference] | None = None


class Resources(msgspec.Struct):
    """The resources of one container, or of a pod for all its containers."""

    limits: dict[str, str | int] | None = None
    requests: dict[str, str | int] | None = None


class Being(msgspec.Struct):
    """An object that matters only by its presence."""


class Port(msgspec.Struct, rename="camel"):
    """A port of a container."""

    host_port: int = 0


class Container(msgspec.Struct, rename="camel"):
    """One container."""

    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None
    ports: list[Port] | None = None


class Expression(msgspec.Struct):
    """One requirement of a selector."""

    key: str
    operator: Operator
    values: list[str] | None = None


class LabelSelector(msgspec.Struct, rename="camel"):
    """The selector of pods by labels."""

    match_labels: dict[str, str] | None = None
    match_expressions: list[Expression] | None = None


class AffinityTerm(msgspec.Struct, rename="camel"):
    """Which pods an affinity means. The topology does not matter here."""

    label_selector: LabelSelector | None = None
    namespaces: list[str] | None = None
    namespace_selector: Being | None = None


class WeightedTerm(msgspec.Struct, rename="camel"):
    """A preferred affinity to pods. The weight does not matter here."""

    pod_affinity_term: AffinityTerm = msgspec.field(default_factory=AffinityTerm)


class PodTerms(msgspec.Struct):
    """An affinity or anti-affinity to pods."""

    required: list[AffinityTerm] | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)
    preferred: list[WeightedTerm] | None = msgspec.field(name="preferredDuringSchedulingIgnoredDuringExecution", default=None)


_NO_TERMS: Final = PodTerms()


class NodeTerms(msgspec.Struct):
    """An affinity to nodes. What it requires is for kube-scheduler's own filters: only whether it requires anything matters."""

    required: Any = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)
    preferred: list[Being] | None = msgspec.field(name="preferredDuringSchedulingIgnoredDuringExecution", default=None)


class Affinity(msgspec.Struct, rename="camel"):
    """The affinity of a pod to nodes, and its affinity and anti-affinity to other pods."""

    node_affinity: NodeTerms | None = None
    pod_affinity: PodTerms | None = None
    pod_anti_affinity: PodTerms | None = None


_NO_AFFINITY: Final = Affinity()


class Spread(msgspec.Struct, rename="camel"):
    """A topology spread."""

    when_unsatisfiable: str = ""


class ClaimReference(msgspec.Struct, rename="camel"):
    """A claim of a pod: an object by its name, or one that is made from a template."""

    name: str = ""
    resource_claim_name: str | None = None


class SchedulingGate(msgspec.Struct):
    """Kube-scheduler skips a pod until all its gates are removed."""

    name: str = ""


class SchedulingGroup(msgspec.Struct, rename="camel"):
    """Kubernetes' own group of a pod (``scheduling.k8s.io``)."""

    pod_group_name: str | None = None


class Volume(msgspec.Struct, rename="camel"):
    """A volume. The fields are the kinds that limit where the pod can run: claims, ephemeral volumes, and disks with few users at once."""

    persistent_volume_claim: Being | None = None
    ephemeral: Being | None = None
    csi: Being | None = None
    rbd: Being | None = None
    iscsi: Being | None = None
    cinder: Being | None = None
    azure_disk: Being | None = None
    gce_persistent_disk: Being | None = None
    aws_elastic_block_store: Being | None = None

    @property
    def is_counted(self) -> bool:
        """Whether kube-scheduler checks which other pods use the volume, or how many a node has."""
        return any(getattr(self, field) is not None for field in self.__struct_fields__)


class PodSpec(msgspec.Struct, rename="camel"):
    """The spec of a pod."""

    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    preemption_policy: str = ""
    overhead: dict[str, str | int] | None = None
    resources: Resources | None = None
    scheduling_gates: list[SchedulingGate] | None = None
    scheduling_group: SchedulingGroup | None = None
    volumes: list[Volume] | None = None
    resource_claims: list[ClaimReference] | None = None
    affinity: Affinity | None = None
    node_selector: dict[str, str] | None = None
    topology_spread_constraints: list[Spread] | None = None
    tolerations: list[Toleration] | None = None


class ClaimStatus(msgspec.Struct, rename="camel"):
    """The claim that was made from a template for one reference."""

    name: str = ""
    resource_claim_name: str | None = None


class ExtendedClaim(msgspec.Struct, rename="camel"):
    """The claim that kube-scheduler made for a pod's extended resources."""

    resource_claim_name: str = ""


class Condition(msgspec.Struct):
    """One condition of a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(msgspec.Struct, rename="camel"):
    """The status of a pod."""

    phase: str = ""
    nominated_node_name: str = ""
    start_time: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    conditions: list[Condition] | None = None
    resource_claim_statuses: list[ClaimStatus] | None = None
    extended_resource_claim_status: ExtendedClaim | None = None


class PodObject(msgspec.Struct):
    """A pod."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class NodeStatus(msgspec.Struct):
    """The resources of a node, including CPU, memory and the number of pods."""

    allocatable: dict[str, str | int] | None = None


class NodeMetadata(msgspec.Struct):
    """Name and labels of a node."""

    name: str = ""
    labels: dict[str, str] | None = None


class NodeSpec(msgspec.Struct):
    """The spec of a node."""

    taints: list[Taint] | None = None
    unschedulable: bool = False


class NodeObject(msgspec.Struct):
    """A node."""

    metadata: NodeMetadata = msgspec.field(default_factory=NodeMetadata)
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


class BudgetSpec(msgspec.Struct):
    """The spec of a budget."""

    selector: LabelSelector | None = None


class BudgetStatus(msgspec.Struct, rename="camel"):
    """The status of a budget, as the API server counted it."""

    disruptions_allowed: int = 0
    disrupted_pods: dict[str, str] | None = None


class BudgetObject(msgspec.Struct):
    """A PodDisruptionBudget."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: BudgetSpec = msgspec.field(default_factory=BudgetSpec)
    status: BudgetStatus = msgspec.field(default_factory=BudgetStatus)


def budget_facts(item: BudgetObject) -> Budget:
    """Reduce a PodDisruptionBudget."""
    status, selector = item.status, _selector(item.spec.selector)
    return Budget(item.metadata.namespace, item.metadata.name, selector, status.disruptions_allowed, frozenset(status.disrupted_pods or ()))


def _selector(stated: LabelSelector | None) -> Selector:
    if stated is None:
        return None
    expressions = (Requirement(one.key, one.operator, frozenset(one.values or ())) for one in stated.match_expressions or ())
    return (*exactly(stated.match_labels or {}), *expressions)


def pod_facts(item: PodObject) -> PodFacts:
    """Reduce a pod. Raises QuantityError for an invalid amount of CPU or RAM."""
    metadata, spec = item.metadata, item.spec
    gpu = _gpu_pod(item)
    more = _NO_GPU if gpu is None else _gpu_facts(item)
    return PodFacts(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        node_name=spec.node_name,
        active=item.status.phase not in ENDED,
        deletion_requested=metadata.deletion_timestamp is not None,
        priority=spec.priority or 0,
        cpu_milli=_requested(spec, "cpu", cpu_milli),
        memory_mib=_requested(spec, "memory", memory_mib),
        gpu=gpu,
        labels=_shared(tuple(sorted((metadata.labels or {}).items()))),
        preempts=spec.preemption_policy != "Never",
        nominated_node=item.status.nominated_node_name,
        ends_by=_seconds(metadata.deletion_timestamp),
        is_preempted=metadata.deletion_timestamp is not None and _is_preempted(item.status),
        gates=_gates(spec),
        scheduling_group="" if spec.scheduling_group is None else spec.scheduling_group.pod_group_name or "",
        needs_preparing=more.needs_preparing,
        failure=more.failure,
        is_picky=more.is_picky,
        repels=spec.affinity is not None and _is_required(spec.affinity.pod_anti_affinity),
        prefers=more.prefers,
        near=() if spec.affinity is None or not spec.node_name else _near(metadata.namespace, spec.affinity),
        controller_uid=more.controller.uid,
        controller_kind=more.controller.kind,
        started_at=more.started_at,
        created_at=more.created_at,
        is_confined=more.is_confined,
        nodes=more.nodes,
        tolerates=more.tolerates,
        claims=_claims(item) if spec.resource_claims or item.status.extended_resource_claim_status else (),
        extended=() if spec.node_name or gpu is not None else _extended(spec),
    )


def _extended(spec: PodSpec) -> tuple[ExtendedAsk, ...]:
    """Return what a pod that is not bound requests of extended resources. The API server copies such limits to the requests."""
    init = spec.init_containers or ()
    asks = [_asks_of(number, one, is_init=True) for number, one in enumerate(init)]
    asks += [_asks_of(number, one, is_init=False) for number, one in enumerate(spec.containers or (), len(init))]
    return tuple(chain.from_iterable(asks))


def _asks_of(number: int, container: Container, *, is_init: bool) -> tuple[ExtendedAsk, ...]:
    requests = container.resources.requests if container.resources else None
    if not requests or _HOST_RESOURCES.issuperset(requests):
        return ()
    found, is_brief = [], is_init and container.restart_policy != "Always"
    for position, name in enumerate(sorted(requests)):
        amount = int(units.parse_quantity(str(requests[name]))) if is_extended(name) else 0
        if amount:
            found.append(ExtendedAsk(number, position, name, amount, is_brief))
    asked: tuple[ExtendedAsk, ...] = _shared(tuple(found))
    return asked


def _claims(item: PodObject) -> tuple[str, ...]:
    """Return the names of a pod's claims, in the order of its references, then that for its extended resources. A reference may need no
    claim."""
    made = {one.name: one.resource_claim_name for one in item.status.resource_claim_statuses or ()}
    names = (one.resource_claim_name or made.get(one.name, "") for one in item.spec.resource_claims or ())
    extended = item.status.extended_resource_claim_status
    return (*(name for name in names if name is not None), *([extended.resource_claim_name] if extended is not None else []))


class _GpuFacts(NamedTuple):
    """The fields of PodFacts that only pods with GPUs have."""

    needs_preparing: bool = False
    failure: str = ""
    is_picky: bool = False
    prefers: bool = False
    controller: OwnerReference = _NO_CONTROLLER
    started_at: float | None = None
    created_at: float | None = None
    is_confined: bool = False
    nodes: NodeRules | None = None
    tolerates: bool = False


_NO_GPU: Final = _GpuFacts()


def _gpu_facts(item: PodObject) -> _GpuFacts:
    """Compute what only pods with GPUs have: other pods are most of a cluster, and need less."""
    metadata, spec = item.metadata, item.spec
    needs_preparing, depends_on_more = _needs_preparing(spec), _is_picky(spec)
    return _GpuFacts(
        needs_preparing,
        _failure(item.status) if needs_preparing else "",
        depends_on_more,
        not spec.node_name and _prefers(spec),
        _controller(metadata),
        _seconds(item.status.start_time),
        _seconds(metadata.creation_timestamp),
        depends_on_more or _selects_nodes(spec),
        _node_rules(spec),
        any(one.key not in _TOLERATED for one in spec.tolerations or ()),
    )


def _gpu_pod(item: PodObject) -> Pod | None:
    """Return the part of a pod that agent and placement read; None for a pod that asks for no GPU."""
    metadata, spec = item.metadata, item.spec
    init, apps = spec.init_containers or [], spec.containers or []
    limits = [_limits(container) for container in (*init, *apps)]
    if not any(map(asks_gpu, limits)):
        return None
    flags = [(True, container.restart_policy == "Always") for container in init] + [(False, False)] * len(apps)
    return Pod(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        node_name=spec.node_name,
        phase=item.status.phase,
        annotations=_ours(metadata.annotations or {}),
        containers=tuple(
            ContainerSpec(container.name, amounts, *flag) for container, amounts, flag in zip((*init, *apps), limits, flags, strict=True)
        ),
        scheduler_name=spec.scheduler_name,
        deletion_requested=metadata.deletion_timestamp is not None,
    )


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _gates(spec: PodSpec) -> tuple[str, ...]:
    return tuple(gate.name for gate in spec.scheduling_gates or ())


def _controller(metadata: Metadata) -> OwnerReference:
    return next((owner for owner in metadata.owner_references or () if owner.controller), _NO_CONTROLLER)


def _selects_nodes(spec: PodSpec) -> bool:
    """Whether a pod requires labels of its node."""
    affinity = spec.affinity or _NO_AFFINITY
    return bool(spec.node_selector) or (affinity.node_affinity is not None and affinity.node_affinity.required is not None)


def _node_rules(spec: PodSpec) -> NodeRules:
    """Raises msgspec.ValidationError."""
    affinity = (spec.affinity or _NO_AFFINITY).node_affinity
    rules: NodeRules = _shared(rules_from(spec.node_selector, None if affinity is None else affinity.required, spec.tolerations))
    return rules


def host_amounts(item: NodeObject) -> tuple[int, int, int]:
    """Return a node's allocatable CPU in thousandths of a core and RAM in MiB, both rounded down, and its number of pods."""
    allocatable = item.status.allocatable or {}
    amounts = cpu_milli(str(allocatable.get("cpu", 0))), memory_mib(str(allocatable.get("memory", 0)))
    return (*amounts, max(0, min(MOST, int(units.parse_quantity(str(allocatable.get("pods", 0)))))))


def plugin_resources(item: NodeObject) -> frozenset[str]:
    """Return the extended resources that device plugins give out on a node. Where the amount is 0, DeviceClasses may give them out."""
    allocatable = item.status.allocatable or {}
    found: frozenset[str] = _shared(frozenset(name for name, amount in allocatable.items() if is_extended(name) and str(amount) != "0"))
    return found


def has_soft_taint(item: NodeObject) -> bool:
    """Whether kube-scheduler avoids the node for pods that do not tolerate one of its taints, and does not exclude it."""
    return any(taint.effect == "PreferNoSchedule" for taint in item.spec.taints or ())


def is_closed(item: NodeObject) -> bool:
    """Whether a pod needs a toleration for the node, other than the one for GPU nodes: it is cordoned, not ready, or reserved."""
    return any(taint.effect in HARD_EFFECTS and taint.key != _GPU_TAINT for taint in _taints(item))


def node_facts(item: NodeObject) -> NodeFacts:
    """Return all labels and taints of a node."""
    return NodeFacts(item.metadata.name, item.metadata.labels or {}, _taints(item))


def _taints(item: NodeObject) -> tuple[Taint, ...]:
    """Return the taints of a node. A controller adds the one of a cordoned node some time after kube-scheduler obeys the field."""
    taints = tuple(item.spec.taints or ())
    return (*taints, CORDONED) if item.spec.unschedulable and CORDONED not in taints else taints


@lru_cache(maxsize=_CACHED_QUANTITIES)
def cpu_milli(text: str) -> int:
    """Read an amount of CPU, in thousandths of a core, from 0 to MOST."""
    return max(0, min(MOST, int(units.parse_quantity(text) * 1000)))


@lru_cache(maxsize=_CACHED_QUANTITIES)
def memory_mib(text: str) -> int:
    """Read an amount of RAM, in MiB, rounded down, from 0 to MOST."""
    return max(0, min(MOST, int(units.parse_quantity(text)) // units.MIB))


def _needs_preparing(spec: PodSpec) -> bool:
    claims = any(volume.persistent_volume_claim is not None or volume.ephemeral is not None for volume in spec.volumes or ())
    return claims or bool(spec.resource_claims)


def _is_picky(spec: PodSpec) -> bool:
    """Whether kube-scheduler checks for a pod what ``PodFacts.is_picky`` lists."""
    containers = [*(spec.init_containers or ()), *(spec.containers or ())]
    return (
        _asks_other_resources(spec, containers)
        or _has_host_ports(containers)
        or any(volume.is_counted for volume in spec.volumes or ())
        or bool(spec.resource_claims)
        or _depends_on_pods(spec)
    )


def _has_host_ports(containers: Iterable[Container]) -> bool:
    return any(port.host_port for container in containers for port in container.ports or ())


def _asks_other_resources(spec: PodSpec, containers: Iterable[Container]) -> bool:
    """Whether a pod asks for a resource besides CPU, RAM and shares of GPUs."""
    asked = (one for one in (spec.resources, *(container.resources for container in containers)) if one is not None)
    amounts = (spec.overhead, *(part for one in asked for part in (one.requests, one.limits)))
    return any(part is not None and not _PLAIN_RESOURCES.issuperset(part) for part in amounts)


def _depends_on_pods(spec: PodSpec) -> bool:
    """Whether the place of other pods decides where this one can go: required affinity, or a topology spread."""
    affinity = spec.affinity or _NO_AFFINITY
    if _is_required(affinity.pod_affinity) or _is_required(affinity.pod_anti_affinity):
        return True
    return any(spread.when_unsatisfiable != "ScheduleAnyway" for spread in spec.topology_spread_constraints or ())


def _is_required(terms: PodTerms | None) -> bool:
    return terms is not None and bool(terms.required)


def _prefers(spec: PodSpec) -> bool:
    """Compute ``PodFacts.prefers`` of a pod with GPUs that is not bound."""
    affinity = spec.affinity or _NO_AFFINITY
    stated = (affinity.node_affinity, affinity.pod_affinity, affinity.pod_anti_affinity)
    if any(terms is not None and terms.preferred for terms in stated):
        return True
    spreads = any(spread.when_unsatisfiable == "ScheduleAnyway" for spread in spec.topology_spread_constraints or ())
    return spreads or bool(spec.resource_claims)  # a claim may list alternatives, and prefers the first


def _near(namespace: str, affinity: Affinity) -> tuple[PodTerm, ...]:
    """Compute ``PodFacts.near`` of a bound pod."""
    attracts, repels = affinity.pod_affinity or _NO_TERMS, affinity.pod_anti_affinity or _NO_TERMS
    preferred = (term.pod_affinity_term for terms in (attracts, repels) for term in terms.preferred or ())
    return tuple(_pod_term(namespace, term) for term in (*(attracts.required or ()), *preferred))


def _pod_term(namespace: str, term: AffinityTerm) -> PodTerm:
    namespaces = None if term.namespace_selector is not None else frozenset(term.namespaces or (namespace,))
    return PodTerm(namespaces, _selector(term.label_selector))


def _failure(status: PodStatus) -> str:
    """Return why kube-scheduler last failed to bind a pod; empty if it did not fail."""
    failed = (one for one in status.conditions or () if one.type == "PodScheduled" and one.status == "False")
    return next((f"{one.reason}: {one.message}" for one in failed), "")


def _is_preempted(status: PodStatus) -> bool:
    """Whether kube-scheduler ends the pod for another one. It writes this condition before it deletes the pod."""
    return any(one.type == "DisruptionTarget" and one.reason == "PreemptionByScheduler" for one in status.conditions or ())


def _requested(spec: PodSpec, resource: str, read: Callable[[str], int]) -> int:
    """Add up what a pod requests as kube-scheduler does.

    That is the larger of the sum over the app containers and sidecars and the peak during any init container, or the pod's own request if
    it has one; then the overhead is added. Source: PodRequests of k8s.io/component-helpers/resource; a pod's limit counts as its request:
    defaultPodRequests of the API server.
    """
    together = _of_containers(spec, resource, read)
    if (whole := spec.resources) is not None and ((whole.requests and resource in whole.requests) or not together):
        together = _amount(whole, resource, read)
    overhead = (spec.overhead or {}).get(resource)
    return min(MOST, together + (0 if overhead is None else read(str(overhead))))


def _of_containers(spec: PodSpec, resource: str, read: Callable[[str], int]) -> int:
    """Return the most that the containers request at one time. A sidecar counts from its start on, during later init containers too."""
    running, peak = 0, 0
    for container in spec.init_containers or ():
        amount = _amount(container.resources, resource, read)
        if container.restart_policy == "Always":
            running += amount
            peak = max(peak, running)
        else:
            peak = max(peak, running + amount)
    running += sum(_amount(container.resources, resource, read) for container in spec.containers or ())
    return max(running, peak)


def _amount(resources: Resources | None, resource: str, read: Callable[[str], int]) -> int:
    if resources is None:
        return 0
    for amounts in (resources.requests, resources.limits):
        if amounts and resource in amounts:
            return read(str(amounts[resource]))
    return 0


def _limits(container: Container) -> Mapping[str, str]:
    limits = container.resources.limits if container.resources else None
    return {name: str(amount) for name, amount in limits.items()} if limits else {}


@lru_cache(maxsize=_CACHED_VALUES)
def _shared(value: _Value) -> _Value:
    """Return the first object that is equal. Replicas have equal labels and rules, and the state keeps 50,000 pods."""
    return value


def _ours(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Keep only our own annotations: others can be large, and the state keeps 50,000 pods."""
    return {name: value for name, value in annotations.items() if name.startswith(contract.ANNOTATION_PREFIX)}
