"""What the scheduler keeps of a pod, and what a pod takes of its devices.

An ordinary init container ends before the app containers start and the kubelet hands its devices on, so a pod takes of a device the
most that any of its phases takes, not the sum of all its containers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from proto import contract, units
from proto.model import ContainerSpec, DeviceShare, Pod, PodAssignment

SUCCEEDED: Final = "Succeeded"
"""The phase of a pod all of whose containers ended well."""
STUCK_SECONDS: Final = 60.0
"""So long after its grace period a pod that is to end is taken for one that does not: its node may be lost, or its process hang."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod. ``gpu`` is there only when a container asks for a GPU: most pods of a cluster do not, and 50,000 are kept."""

    uid: str
    namespace: str
    name: str
    node_name: str
    active: bool
    """False once every container has ended for good."""
    deletion_requested: bool
    priority: int
    cpu_milli: int
    memory_mib: int
    gpu: Pod | None = None
    labels: tuple[tuple[str, str], ...] = ()
    """Sorted by name."""
    preempts: bool = True
    """Whether others may end for it."""
    nominated_node: str = ""
    """Where kube-scheduler had others end for it."""
    ends_by: float | None = None
    """When its grace period is over, in seconds since 1970, if its deletion was requested."""
    gates: tuple[str, ...] = ()
    """The scheduling gates with which others hold it back from kube-scheduler. They are taken away, and never added."""
    needs_preparing: bool = False
    """Whether it asks for GPUs, and for volumes or claims that kube-scheduler may have to have made before it asks for the binding."""
    failure: str = ""
    """Why kube-scheduler's latest attempt on such a pod failed, in its own words."""
    is_picky: bool = False
    """Whether it asks for GPUs and is not bound yet, and kube-scheduler looks at more for it than CPU, RAM, the number of pods and shares
    of GPUs: host ports, volumes, claims, other resources, required affinity to pods or against them, or a topology spread that it insists
    on."""
    repels: bool = False
    """Whether it has a required anti-affinity, which keeps others off its node while it is there."""
    controller_uid: str = ""
    """Of the Job or whatever else made the pod, if it asks for GPUs: what is started again as a whole has another one."""

    @property
    def is_gated(self) -> bool:
        """Whether kube-scheduler leaves it alone."""
        return bool(self.gates)

    @property
    def may_start(self) -> bool:
        """Whether it counts as a member of its gang: kube-scheduler places no gated one, and one that is ending is not there for long."""
        return not (self.is_gated or self.deletion_requested)

    @property
    def holds(self) -> bool:
        """Whether the pod takes something of a node."""
        return self.active and bool(self.node_name)

    def is_ending(self, now: float) -> bool:
        """Whether what the pod holds will be free soon: its deletion was requested, and it is not stuck. Args: now: seconds since 1970."""
        return self.deletion_requested and (self.ends_by is None or now < self.ends_by + STUCK_SECONDS)


class Use(NamedTuple):
    """What a pod takes of one device. For a MIG instance only its presence counts."""

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

    def at_least(self, other: "Use") -> "Use":
        """Return the larger of both in every dimension."""
        return Use(*map(max, self, other))


Footprint: TypeAlias = Mapping[str, Use]
"""By the UUID of a device or MIG instance."""


_REPLICA_SUFFIX: Final = ".shared"
"""What NVIDIA's device plugin ends the names of time-sliced resources with: nobody else offers those."""


def asks_gpu(limits: Iterable[str]) -> bool:
    """Whether limits with these names concern us."""
    return any(
        name in (contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES)
        or (name.startswith(contract.RESOURCE_MIG_PREFIX) and not name.endswith(_REPLICA_SUFFIX))
        for name in limits
    )


def footprint(containers: Iterable[ContainerSpec], assignment: PodAssignment) -> Footprint:
    """Say what an assignment takes of each device over the life of a pod with these containers.

    Args: containers: in the kubelet's order, init containers first. One that the assignment names and the pod lacks counts as an app's.
    """
    shares_of = {assigned.container: assigned.shares for assigned in assignment.containers}
    most: dict[str, Use] = {}
    lasting: dict[str, Use] = {}
    for spec in containers:
        shares = shares_of.pop(spec.name, ())
        if spec.init and not spec.restartable:
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
