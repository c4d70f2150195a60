# SPDX-License-Identifier: Apache-2.0
"""What the scheduler stores of a pod, and what a pod takes of its devices.

An ordinary init container ends before the app containers start, and kubelet passes its devices on. So a pod takes of a device the maximum
over its phases, not the sum of all its containers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import ContainerSpec, DeviceShare, Pod, PodAssignment
from scheduler_plugin.core.cluster.extended import ExtendedAsk
from scheduler_plugin.core.cluster.nodes import NodeRules
from scheduler_plugin.core.cluster.selectors import Selector

SUCCEEDED: Final = "Succeeded"
"""The phase of a pod after all its containers ended with exit code 0."""
STUCK_SECONDS: Final = 60.0
"""Seconds after its grace period at which a terminating pod counts as stuck: its node may be lost, or its process may hang."""


@dataclass(frozen=True, slots=True)
class PodTerm:
    """Which pods a bound pod has a preference for, or against."""

    namespaces: frozenset[str] | None
    """None: perhaps any, because the term selects namespaces by their labels."""
    selector: Selector


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod. Only pods that ask for a GPU have ``gpu``: most pods of a cluster do not, and the state keeps 50,000."""

    uid: str
    namespace: str
    name: str
    node_name: str
    active: bool
    """False once all containers have ended and will not restart."""
    deletion_requested: bool
    priority: int
    cpu_milli: int
    memory_mib: int
    gpu: Pod | None = None
    labels: tuple[tuple[str, str], ...] = ()
    """Sorted by name."""
    preempts: bool = True
    """Whether the pod may preempt others."""
    nominated_node: str = ""
    """The node on which kube-scheduler preempted others for it."""
    ends_by: float | None = None
    """When its grace period is over, in seconds since 1970; None unless its deletion was requested."""
    gates: tuple[str, ...] = ()
    """Scheduling gates: kube-scheduler skips the pod until all are removed. They cannot be added later."""
    needs_preparing: bool = False
    """Whether it asks for GPUs, and for volumes or claims that kube-scheduler may have to provision before the binding."""
    failure: str = ""
    """kube-scheduler's message on the latest failed attempt, for a pod that needs preparing."""
    is_picky: bool = False
    """Whether it asks for GPUs, and kube-scheduler checks more for it than ``nodes``, CPU, RAM, the number of pods and GPU shares: host
    ports, volumes, claims, other resources, required pod affinity or anti-affinity, or a required topology spread."""
    repels: bool = False
    """Whether it has a required anti-affinity, which keeps other pods off its node."""
    prefers: bool = False
    """Whether it asks for GPUs, is not bound yet, and states a preference that kube-scheduler weighs: a preferred affinity to nodes or
    pods, a spread that is not required, or a claim."""
    near: tuple[PodTerm, ...] = ()
    """If it is bound: the pods for or against which it has a preference near itself, and those that it requires near itself, which
    kube-scheduler also weighs for later pods."""
    controller_uid: str = ""
    """UID of the Job or other controller of a pod with GPUs. A controller that was recreated has another UID."""
    controller_kind: str = ""
    """Kind of that controller."""
    scheduling_group: str = ""
    """Name of the pod's own Kubernetes PodGroup, which kube-scheduler schedules in one cycle if its gates are open."""
    started_at: float | None = None
    """When kubelet started a pod with GPUs, in seconds since 1970; None before that."""
    created_at: float | None = None
    """When a pod with GPUs was created, in seconds since 1970; None if unknown."""
    is_confined: bool = False
    """Whether it asks for GPUs, and kube-scheduler checks for it what is not known without the labels of nodes: a node selector, a required
    affinity to nodes, or what ``is_picky`` lists."""
    nodes: NodeRules | None = None
    """Which nodes it may use, if it asks for GPUs; None if that was not recorded."""
    tolerates: bool = False
    """Whether it asks for GPUs, and may run on nodes with taints other than the one for GPU nodes."""
    is_preempted: bool = False
    """Whether kube-scheduler ends it for another pod, to which its room belongs."""
    claims: tuple[str, ...] = ()
    """Names of its ResourceClaims; empty texts for those that are not made yet. The last one may be what kube-scheduler made for
    ``extended``."""
    extended: tuple[ExtendedAsk, ...] = ()
    """What its containers request of extended resources, if it is not bound yet and asks for no GPU by device IDs."""

    @property
    def is_gated(self) -> bool:
        """Whether kube-scheduler skips the pod."""
        return bool(self.gates)

    @property
    def may_start(self) -> bool:
        """Whether it counts as a member of its gang: kube-scheduler skips gated pods, and a terminating pod is gone soon."""
        return not (self.is_gated or self.deletion_requested)

    @property
    def holds(self) -> bool:
        """Whether the pod takes something of a node."""
        return self.active and bool(self.node_name)

    def is_ending(self, now: float) -> bool:
        """Whether the pod's room will be free soon: its deletion was requested, and it is not stuck. Args: now: seconds since 1970."""
        return self.deletion_requested and (self.ends_by is None or now < self.ends_by + STUCK_SECONDS)


class Use(NamedTuple):
    """What a pod takes of one device. For a MIG instance only the presence of an entry matters."""

    memory_mib: int = 0
    cores_percent: int = 0
    shares: int = 0
    unreserved: int = 0

    def plus(self, share: DeviceShare) -> "Use":
        """Add one share."""
        return Use(
            self.memory_mib + share.memory_bytes // units.MIB,
            self.cores_percent + (share.cores_percent or 0),
            self.shares + 1,
            self.unreserved + (share.cores_percent is None),
        )

    def and_also(self, other: "Use") -> "Use":
        """Return the sum of both."""
        return Use(*(one + also for one, also in zip(self, other, strict=True)))

    def at_least(self, other: "Use") -> "Use":
        """Return the maximum of both in each dimension."""
        return Use(*map(max, self, other))


Footprint: TypeAlias = Mapping[str, Use]
"""By the UUID of a device or MIG instance."""


_REPLICA_SUFFIX: Final = ".shared"
"""The suffix of NVIDIA's device plugin for time-sliced resources; only that plugin offers them."""


def asks_gpu(limits: Iterable[str]) -> bool:
    """Whether limits with these names ask for a GPU of Aliquot."""
    return any(
        name in contract.RESOURCES_OF_VGPUS or (name.startswith(contract.RESOURCE_MIG_PREFIX) and not name.endswith(_REPLICA_SUFFIX))
        for name in limits
    )


def footprint(containers: Iterable[ContainerSpec], assignment: PodAssignment) -> Footprint:
    """Return the maximum that an assignment takes of each device over the life of a pod with these containers.

    Args: containers: in kubelet's order, init containers first. Other containers of the assignment count as app containers.
    """
    shares_of = {assigned.container: assigned.shares for assigned in assignment.containers}
    most: dict[str, Use] = {}
    lasting: dict[str, Use] = {}
    for spec in containers:
        shares = shares_of.pop(spec.name, ())
        if spec.init and not spec.restartable:
            # An ordinary init container runs together with the sidecars that started before it, and with no other container.
            _raise_to(most, _with(lasting, shares))
        else:
            lasting = _with(lasting, shares)
    for shares in shares_of.values():
        lasting = _with(lasting, shares)
    _raise_to(most, lasting)
    return most


def _with(uses: Mapping[str, Use], shares: Iterable[DeviceShare]) -> dict[str, Use]:
    after = dict(uses)
    for share in shares:
        after[share.device_uuid] = after.get(share.device_uuid, Use()).plus(share)
    return after


def _raise_to(most: dict[str, Use], uses: Mapping[str, Use]) -> None:
    for uuid, use in uses.items():
        most[uuid] = most.get(uuid, Use()).at_least(use)
