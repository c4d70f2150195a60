"""Pods, nodes and disruption budgets as the Kubernetes API writes them, reduced to what the scheduler reads.

A pod takes 10 µs, where full models take 2 ms. Used on the watch, on extender requests and on pods the API is asked for, so that all
three mean the same by a pod.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from proto import contract, units
from proto.model import ContainerSpec, Pod
from scheduler_plugin.core.budgets import Budget, Operator, Requirement
from scheduler_plugin.core.pods import SUCCEEDED, PodFacts, asks_gpu

ENDED: Final = (SUCCEEDED, "Failed")
MOST: Final = 1 << 32
"""More CPU and RAM than any host has: whoever asks for more asks for what no node can give, and sums of it still fit into 64 bits."""
_PLAIN_RESOURCES: Final = frozenset(("cpu", "memory", contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES))
_CACHED_QUANTITIES: Final = 8192
_CACHED_LABELS: Final = 8192


class OwnerReference(msgspec.Struct):
    """Whom an object belongs to."""

    uid: str = ""
    controller: bool | None = None
    """Whether that is who made it and manages it: one at most is."""


class Metadata(msgspec.Struct, rename="camel"):
    """The part of ObjectMeta that matters."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    deletion_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    """When the grace period is over. A time without a zone is none that Kubernetes writes."""
    owner_references: list[OwnerReference] | None = None


class Resources(msgspec.Struct):
    """What a container asks for, or a pod for all of its containers."""

    limits: dict[str, str | int] | None = None
    requests: dict[str, str | int] | None = None


class Being(msgspec.Struct):
    """An object of which matters only that it is there."""


class Port(msgspec.Struct, rename="camel"):
    """A port of a container."""

    host_port: int = 0


class Container(msgspec.Struct, rename="camel"):
    """One container."""

    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None
    ports: list[Port] | None = None


class PodTerms(msgspec.Struct):
    """An affinity to pods, or against them; preferences are left out."""

    required: list[Being] | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class Affinity(msgspec.Struct, rename="camel"):
    """What a pod wants of the pods beside it."""

    pod_affinity: PodTerms | None = None
    pod_anti_affinity: PodTerms | None = None


class Spread(msgspec.Struct, rename="camel"):
    """A topology spread."""

    when_unsatisfiable: str = ""


class SchedulingGate(msgspec.Struct):
    """What keeps kube-scheduler from a pod until it is taken away."""

    name: str = ""


class Volume(msgspec.Struct, rename="camel"):
    """A volume: a claim's, one made for the pod alone, a disk that few may have at once, or none of these."""

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
        """Whether kube-scheduler looks at who else has it, or how many a node has."""
        return any(getattr(self, field) is not None for field in self.__struct_fields__)


class PodSpec(msgspec.Struct, rename="camel"):
    """What a pod wants."""

    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    preemption_policy: str = ""
    overhead: dict[str, str | int] | None = None
    resources: Resources | None = None
    scheduling_gates: list[SchedulingGate] | None = None
    volumes: list[Volume] | None = None
    resource_claims: list[Being] | None = None
    affinity: Affinity | None = None
    topology_spread_constraints: list[Spread] | None = None


class Condition(msgspec.Struct):
    """What is said of one side of a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(msgspec.Struct, rename="camel"):
    """How a pod is."""

    phase: str = ""
    nominated_node_name: str = ""
    conditions: list[Condition] | None = None


class PodObject(msgspec.Struct):
    """A pod."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class NodeStatus(msgspec.Struct):
    """What a node offers: CPU, memory and a number of pods among others."""

    allocatable: dict[str, str | int] | None = None


class NodeMetadata(msgspec.Struct):
    """Name and labels of a node."""

    name: str = ""
    labels: dict[str, str] | None = None


class NodeObject(msgspec.Struct):
    """A node."""

    metadata: NodeMetadata = msgspec.field(default_factory=NodeMetadata)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


class Expression(msgspec.Struct):
    """One requirement of a selector."""

    key: str
    operator: Operator
    values: list[str] | None = None


class LabelSelector(msgspec.Struct, rename="camel"):
    """Which pods are meant."""

    match_labels: dict[str, str] | None = None
    match_expressions: list[Expression] | None = None


class BudgetSpec(msgspec.Struct):
    """Whom a budget is for."""

    selector: LabelSelector | None = None


class BudgetStatus(msgspec.Struct, rename="camel"):
    """What the API server counted."""

    disruptions_allowed: int = 0
    disrupted_pods: dict[str, str] | None = None


class BudgetObject(msgspec.Struct):
    """A PodDisruptionBudget."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: BudgetSpec = msgspec.field(default_factory=BudgetSpec)
    status: BudgetStatus = msgspec.field(default_factory=BudgetStatus)


def budget_facts(item: BudgetObject) -> Budget:
    """Reduce a PodDisruptionBudget."""
    selector, requirements = item.spec.selector, None
    if selector is not None:
        exact = [Requirement(label, Operator.IN, frozenset((value,))) for label, value in (selector.match_labels or {}).items()]
        stated = [Requirement(one.key, one.operator, frozenset(one.values or ())) for one in selector.match_expressions or ()]
        requirements = (*exact, *stated)
    status = item.status
    return Budget(
        item.metadata.namespace, item.metadata.name, requirements, status.disruptions_allowed, frozenset(status.disrupted_pods or ())
    )


def pod_facts(item: PodObject) -> PodFacts:
    """Reduce a pod. Raises QuantityError for an amount of CPU or RAM that is none."""
    metadata, spec = item.metadata, item.spec
    init, apps = spec.init_containers or [], spec.containers or []
    limits = [_limits(container) for container in (*init, *apps)]
    gpu = None
    if any(map(asks_gpu, limits)):
        flags = [(True, container.restart_policy == "Always") for container in init] + [(False, False)] * len(apps)
        gpu = Pod(
            namespace=metadata.namespace,
            name=metadata.name,
            uid=metadata.uid,
            node_name=spec.node_name,
            phase=item.status.phase,
            annotations=_ours(metadata.annotations or {}),
            containers=tuple(
                ContainerSpec(container.name, amounts, *flag)
                for container, amounts, flag in zip((*init, *apps), limits, flags, strict=True)
            ),
            scheduler_name=spec.scheduler_name,
            deletion_requested=metadata.deletion_timestamp is not None,
        )
    needs_preparing = gpu is not None and _needs_preparing(spec)
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
        ends_by=None if metadata.deletion_timestamp is None else metadata.deletion_timestamp.timestamp(),
        gates=tuple(gate.name for gate in spec.scheduling_gates or ()),
        needs_preparing=needs_preparing,
        failure=_failure(item.status) if needs_preparing else "",
        is_picky=gpu is not None and not spec.node_name and _is_picky(spec),
        repels=spec.affinity is not None and _is_required(spec.affinity.pod_anti_affinity),
        controller_uid=next((owner.uid for owner in metadata.owner_references or () if owner.controller), "") if gpu is not None else "",
    )


def host_amounts(item: NodeObject) -> tuple[int, int, int]:
    """Return a node's allocatable CPU in thousandths of a core, its RAM in MiB, both rounded down, and how many pods it takes."""
    allocatable = item.status.allocatable or {}
    amounts = cpu_milli(str(allocatable.get("cpu", 0))), memory_mib(str(allocatable.get("memory", 0)))
    return (*amounts, max(0, min(MOST, int(units.parse_quantity(str(allocatable.get("pods", 0)))))))


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
    """Say of a pod with GPUs what ``PodFacts.is_picky`` means."""
    containers = [*(spec.init_containers or ()), *(spec.containers or ())]
    asked = [container.resources for container in containers] + [spec.resources]
    amounts = [spec.overhead, *(part for one in asked if one is not None for part in (one.requests, one.limits))]
    affinity = spec.affinity or Affinity()
    return (
        any(name not in _PLAIN_RESOURCES for part in amounts if part for name in part)
        or any(port.host_port for container in containers for port in container.ports or ())
        or any(volume.is_counted for volume in spec.volumes or ())
        or bool(spec.resource_claims)
        or _is_required(affinity.pod_affinity)
        or _is_required(affinity.pod_anti_affinity)
        or any(spread.when_unsatisfiable != "ScheduleAnyway" for spread in spec.topology_spread_constraints or ())
    )


def _is_required(terms: PodTerms | None) -> bool:
    return terms is not None and bool(terms.required)


def _failure(status: PodStatus) -> str:
    """Return why kube-scheduler last failed to bind a pod, nothing where it did not."""
    failed = (one for one in status.conditions or () if one.type == "PodScheduled" and one.status == "False")
    return next((f"{one.reason}: {one.message}" for one in failed), "")


def _requested(spec: PodSpec, resource: str, read: Callable[[str], int]) -> int:
    """Add up what a pod requests as kube-scheduler does.

    That is the larger of its running containers and any init container's moment, or what the pod requests for all of them, and then its
    overhead. Source: PodRequests of k8s.io/component-helpers/resource; a pod's limit as its request: defaultPodRequests of the API server.
    """
    running, peak = 0, 0
    for container in spec.init_containers or ():
        amount = _amount(container.resources, resource, read)
        if container.restart_policy == "Always":
            running += amount
            peak = max(peak, running)
        else:
            peak = max(peak, running + amount)
    running += sum(_amount(container.resources, resource, read) for container in spec.containers or ())
    together = max(running, peak)
    if (whole := spec.resources) is not None and ((whole.requests and resource in whole.requests) or not together):
        together = _amount(whole, resource, read)
    overhead = (spec.overhead or {}).get(resource)
    return min(MOST, together + (0 if overhead is None else read(str(overhead))))


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


@lru_cache(maxsize=_CACHED_LABELS)
def _shared(labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the labels that were seen first of these: replicas have the same ones, and 50,000 pods are kept."""
    return labels


def _ours(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Keep the annotations we read: others can be large, and 50,000 pods are kept."""
    return {name: value for name, value in annotations.items() if name.startswith(contract.ANNOTATION_PREFIX)}
