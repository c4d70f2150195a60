"""Which container holds which device IDs, and the names derived from IDs.

Kubelet's Allocate and PreStartContainer name device IDs, never a pod. While a container lives it holds its IDs alone, so the IDs
are its identity on this node: the grant id is a keyed hash of them, and PodResources says whose they are.
PodResources leaves ordinary init containers out (kubelet ``apis/podresources/server_v1.go``) and names pods without their UID. Kubelet's
checkpoint has both, and is asked where it can be read; without it, an init container is recognised by the IDs it lends to the
containers after it, or by its pod's spec.
"""

import base64
import hashlib
import hmac
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from agent.core.refusal import Reason, Refusal
from proto import contract
from proto.model import ContainerSpec, ContainerState, Pod

GRANT_ID_LENGTH = 24
"""Base32 characters kept: 120 bits, unguessable and short enough for a CDI device name."""


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """The IDs of one resource that PodResources lists for one container."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Holder:
    """The container that a set of device IDs belongs to."""

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True)
class RememberedDevices:
    """The IDs of one resource that kubelet's checkpoint has for one container, ordinary init containers included."""

    pod_uid: str
    container: str
    resource: str
    device_ids: frozenset[str]
    answer: bytes = b""
    """What Allocate answered, in kubelet's encoding; empty when that is not known. Kubelet repeats it whenever the container starts."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The pod whose container starts. ``listed`` None: PodResources lists none of its containers with the IDs."""

    namespace: str
    pod: str
    listed: str | None
    uids: frozenset[str]
    """The pod's UID is one of these, as kubelet knows it; empty when that is not known. A namesake that follows has another."""


class Pods(Protocol):
    """The pods of this node, as far as the API has told us."""

    def startable(self, namespace: str, name: str) -> Pod | None:
        """Return the pod of this name whose containers may start."""
        ...

    def all_startable(self) -> Iterable[Pod]:
        """Return all pods whose containers may start."""
        ...


def grant_id(secret: bytes, resource: str, device_ids: Iterable[str]) -> str:
    """Return the name under which a container with these IDs is granted devices: its ledger row, directory and CDI device.

    Keyed with the node's secret, so that no tenant can make up the name of another container's CDI device. Who had the same IDs before
    may have kept the name: kubelet is told it in Allocate, where nothing is known of the pod.
    """
    message = "\0".join((resource, *sorted(device_ids))).encode()
    digest = hmac.new(secret, message, hashlib.sha256).digest()
    return base64.b32encode(digest).decode().lower()[:GRANT_ID_LENGTH]


def cdi_name(identifier: str) -> str:
    """Return the fully qualified CDI name of a grant."""
    return f"{contract.CDI_KIND}={identifier}"


def device_uuid_of(device_id: str) -> str:
    """Return the UUID an advertised ID names: a GPU's for replicas, a MIG instance's otherwise."""
    return device_id.partition(contract.REPLICA_SEPARATOR)[0]


def answer_kept(remembered: Iterable[RememberedDevices], resource: str, device_ids: Set[str], pod_uid: str, container: str) -> bytes:
    """Return what Allocate answered for a container with exactly these IDs, in kubelet's encoding; empty when that is not known."""
    asked = (resource, device_ids, pod_uid, container)
    return next((one.answer for one in remembered if (one.resource, one.device_ids, one.pod_uid, one.container) == asked), b"")


def find_claim(
    listing: Sequence[HeldDevices],
    remembered: Sequence[RememberedDevices],
    resource: str,
    device_ids: frozenset[str],
    pods: Pods,
    *,
    last_look: bool = False,
) -> Claim | Refusal:
    """Say which pod the container that is about to start with exactly these IDs belongs to.

    A container that PodResources lists with exactly the IDs claims them for its pod. When there is none, the IDs belong to an ordinary init
    container, which PodResources omits: then kubelet's checkpoint says whose, or the pod whose listed IDs contain them or are contained in
    them, or, at the last look, the only pod whose own spec has such an init container.

    Args: last_look: nobody will look again, so that the absence of a sign counts.
    """
    of_resource = [held for held in listing if held.resource == resource]
    claimants = [one for one in remembered if (one.resource, one.device_ids) == (resource, device_ids)]
    exact = [Holder(held.namespace, held.pod, held.container) for held in of_resource if held.device_ids == device_ids]
    if len(exact) > 1:  # kubelets up to 1.33 list dead pods until their IDs are handed out again
        exact = [holder for holder in exact if pods.startable(holder.namespace, holder.pod) is not None] or exact
    if len(exact) == 1:
        (holder,) = exact
        uids = frozenset(one.pod_uid for one in claimants if one.container == holder.container)
        return Claim(holder.namespace, holder.pod, holder.container, uids)
    if exact:
        return Refusal(
            Reason.AMBIGUOUS_HOLDER,
            f"the kubelet lists the same {len(device_ids)} {resource} for {_names(exact)}; want one container. It is asked "
            "again at the next retry",
        )
    return _init_claim(of_resource, claimants, resource, device_ids, pods, last_look=last_look)


def _init_claim(
    of_resource: Sequence[HeldDevices],
    claimants: Sequence[RememberedDevices],
    resource: str,
    device_ids: frozenset[str],
    pods: Pods,
    *,
    last_look: bool,
) -> Claim | Refusal:
    initialising = [pod for pod in pods.all_startable() if _asking(pod, resource, len(device_ids))]
    uids = {one.pod_uid for one in claimants}
    candidates = [pod for pod in initialising if pod.uid in uids]
    if not candidates:
        listed = _ids_by_pod(of_resource)
        lent = [pod for pod in initialising if _contain(listed.get((pod.namespace, pod.name), frozenset()), device_ids)]
        unlisted = [pod for pod in initialising if (pod.namespace, pod.name) not in listed and pod.phase == "Pending"]
        candidates = lent or (unlisted if last_look and not claimants else [])
    if len(candidates) == 1:
        (pod,) = candidates
        return Claim(pod.namespace, pod.name, None, frozenset({pod.uid}))
    if candidates:
        holders = [Holder(pod.namespace, pod.name, spec.name) for pod in candidates for spec in _asking(pod, resource, len(device_ids))]
        return Refusal(
            Reason.AMBIGUOUS_HOLDER,
            f"{len(device_ids)} {resource} may belong to any of the init containers {_names(holders)}. It is asked again at the next retry",
        )
    return Refusal(
        Reason.UNKNOWN_HOLDER,
        f"the kubelet's PodResources lists no container that holds exactly the {len(device_ids)} {resource} it is starting; it "
        "is asked again at the next retry",
    )


def starting_container(
    pod: Pod, listed: str | None, resource: str, count: int, granted: Container[str], *, last_look: bool = False
) -> str | Refusal:
    """Say which container of the pod starts with IDs that several of its containers may hold one after another.

    Kubelet lends the IDs of ordinary init containers on to the containers after them, and runs init containers one by one, so the pod's
    status tells who is next. It comes a moment late: what has begun by it cannot be what begins now.

    Args:
        listed: the container that PodResources lists with the IDs; None when there is none.
        granted: the names of the pod's containers that were granted exactly these IDs before.
        last_look: nobody will look again: a container that was granted the IDs and has not begun since is started once more.
    """
    before = _ordinary_inits(pod, listed)
    asking = [spec.name for spec in before if spec.limits.get(resource) == str(count)]
    left = [name for name in asking if pod.state_of(name) is not ContainerState.COMPLETED] if pod.phase != "Running" else []
    possible = left if listed is None else [*left, listed]
    if len(possible) == 1:
        return possible[0]
    following = next((spec.name for spec in before if pod.state_of(spec.name) is not ContainerState.COMPLETED), listed)
    begun = following is None or pod.state_of(following) is ContainerState.RUNNING
    if following in possible and not begun and (following not in granted or last_look):
        return str(following)
    return Refusal(
        Reason.AMBIGUOUS_HOLDER,
        f"pod {pod.namespace}/{pod.name} starts one of its containers {', '.join(possible) or 'that have ended'} with {count} {resource}, "
        "and its status does not say yet which one. It is asked again at the next retry",
    )


def _ordinary_inits(pod: Pod, until: str | None) -> list[ContainerSpec]:
    """Return the ordinary init containers that end before another container starts, all of them for None."""
    inits = []
    for spec in pod.containers:
        if spec.name == until:
            break
        if spec.init and not spec.restartable:
            inits.append(spec)
    return inits


def _asking(pod: Pod, resource: str, count: int) -> list[ContainerSpec]:
    """Return the ordinary init containers with that request that may still start."""
    return [
        spec
        for spec in _ordinary_inits(pod, None)
        if spec.limits.get(resource) == str(count) and pod.state_of(spec.name) is not ContainerState.COMPLETED
    ]


def _ids_by_pod(of_resource: Sequence[HeldDevices]) -> Mapping[tuple[str, str], frozenset[str]]:
    listed: dict[tuple[str, str], frozenset[str]] = {}
    for held in of_resource:
        key = (held.namespace, held.pod)
        listed[key] = listed.get(key, frozenset()) | held.device_ids
    return listed


def _contain(listed: frozenset[str], device_ids: frozenset[str]) -> bool:
    return bool(listed) and (device_ids <= listed or listed <= device_ids)


def _names(holders: Sequence[Holder]) -> str:
    return ", ".join(str(holder) for holder in holders)
