# SPDX-License-Identifier: Apache-2.0
"""Finds the container that holds a set of device IDs, and derives names from IDs.

Kubelet's Allocate and PreStartContainer name device IDs, never a pod. A live container shares its IDs with no other, so the IDs identify it
on this node: the grant id is a keyed hash of them, and PodResources lists the container that holds them.
PodResources omits ordinary init containers (kubelet ``apis/podresources/server_v1.go``) and names pods without their UID. Kubelet's
checkpoint has both, and is used if it can be read. Without it, the agent recognises an init container by the IDs that kubelet passes on to
the later containers, or by its pod's spec.
"""

import base64
import hashlib
import hmac
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from agent.core.refusal import Reason, Refusal
from aliquot import contract
from aliquot.contract.model import ContainerSpec, ContainerState, Pod

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
    """The IDs of one resource that kubelet's checkpoint has for one container, including ordinary init containers."""

    pod_uid: str
    container: str
    resource: str
    device_ids: frozenset[str]
    answer: bytes = b""
    """The response of Allocate, in kubelet's encoding; empty if unknown. Kubelet repeats it at each start of the container."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The pod of a container that starts. ``listed`` None: PodResources lists no container of the pod with the IDs."""

    namespace: str
    pod: str
    listed: str | None
    uids: frozenset[str]
    """The pod's possible UIDs according to kubelet; empty if unknown. A later pod with the same name has another UID."""


class Pods(Protocol):
    """The pods of this node that are known from the API."""

    def startable(self, namespace: str, name: str) -> Pod | None:
        """Return the pod with this name if its containers may start."""
        ...

    def all_startable(self) -> Iterable[Pod]:
        """Return all pods with containers that may start."""
        ...


def grant_id(secret: bytes, resource: str, device_ids: Iterable[str]) -> str:
    """Return the id of a grant for these IDs. It names the grant's ledger row, directory and CDI device.

    The hash is keyed with the node's secret, so that no tenant can compute the name of another container's CDI device. An earlier container
    with the same IDs may know the name: Allocate already returns it, before the pod is known.
    """
    return _keyed_hash(secret, resource, *sorted(device_ids))


def claim_grant_id(secret: bytes, claim_uid: str, request: str) -> str:
    """Return the id of a grant for a ResourceClaim. Args: request: the first that it is for."""
    return _keyed_hash(secret, "resourceclaim", claim_uid, request)


def _keyed_hash(secret: bytes, *parts: str) -> str:
    digest = hmac.new(secret, "\0".join(parts).encode(), hashlib.sha256).digest()
    return base64.b32encode(digest).decode().lower()[:GRANT_ID_LENGTH]


def cdi_name(identifier: str) -> str:
    """Return the fully qualified CDI name of a device in a grant's spec."""
    return f"{contract.CDI_KIND}={identifier}"


def cdi_devices(grant_id: str, number: int) -> tuple[str, ...]:
    """Return the names of the devices in a grant's spec: one for each of its requests, and each gives a container the whole grant."""
    return (grant_id, *(f"{grant_id}.{position}" for position in range(1, number)))


def device_uuid_of(device_id: str) -> str:
    """Return the UUID in an advertised ID: a GPU's for replicas, a MIG instance's otherwise."""
    return device_id.partition(contract.REPLICA_SEPARATOR)[0]


def answer_kept(remembered: Iterable[RememberedDevices], resource: str, device_ids: Set[str], pod_uid: str, container: str) -> bytes:
    """Return the response of Allocate for a container with exactly these IDs, in kubelet's encoding; empty if unknown."""
    wanted = (resource, device_ids, pod_uid, container)
    return next((one.answer for one in remembered if (one.resource, one.device_ids, one.pod_uid, one.container) == wanted), b"")


def find_claim(
    listing: Sequence[HeldDevices],
    remembered: Sequence[RememberedDevices],
    resource: str,
    device_ids: frozenset[str],
    pods: Pods,
    *,
    last_look: bool = False,
) -> Claim | Refusal:
    """Find the pod of the container that is about to start with exactly these IDs.

    A container that PodResources lists with exactly the IDs claims them for its pod. Without one, the IDs belong to an ordinary init
    container, which PodResources omits. Then the pod comes from kubelet's checkpoint, or is the one with listed IDs that contain them or
    are contained in them, or, at the last look, the only pod with such an init container in its spec.

    Args: last_look: the agent will not look again, so that the absence of a sign counts.
    """
    of_resource = [held for held in listing if held.resource == resource]
    claimants = [one for one in remembered if (one.resource, one.device_ids) == (resource, device_ids)]
    exact = _listed_holders(of_resource, device_ids, pods)
    if not exact:
        return _init_claim(of_resource, claimants, resource, device_ids, pods, last_look=last_look)
    if len(exact) > 1:
        return Refusal(
            Reason.AMBIGUOUS_HOLDER,
            f"kubelet lists the same {len(device_ids)} {resource} for {_names(exact)}; expected one container. The agent checks again when "
            "kubelet retries",
        )
    (holder,) = exact
    uids = frozenset(one.pod_uid for one in claimants if one.container == holder.container)
    return Claim(holder.namespace, holder.pod, holder.container, uids)


def _listed_holders(of_resource: Sequence[HeldDevices], device_ids: frozenset[str], pods: Pods) -> list[Holder]:
    """Return the containers that PodResources lists with exactly these IDs; only those of startable pods if there are several."""
    exact = [Holder(held.namespace, held.pod, held.container) for held in of_resource if held.device_ids == device_ids]
    if len(exact) > 1:  # kubelets up to 1.33 list dead pods until their IDs are handed out again
        exact = [holder for holder in exact if pods.startable(holder.namespace, holder.pod) is not None] or exact
    return exact


def _init_claim(
    of_resource: Sequence[HeldDevices],
    claimants: Sequence[RememberedDevices],
    resource: str,
    device_ids: frozenset[str],
    pods: Pods,
    *,
    last_look: bool,
) -> Claim | Refusal:
    """Find the pod of an ordinary init container, which PodResources omits."""
    initialising = [pod for pod in pods.all_startable() if _requesting(pod, resource, len(device_ids))]
    candidates = _remembered_candidates(claimants, initialising) or _unclaimed_candidates(
        of_resource, initialising, device_ids, may_be_unlisted=last_look and not claimants
    )
    if len(candidates) == 1:
        (pod,) = candidates
        return Claim(pod.namespace, pod.name, None, frozenset({pod.uid}))
    if candidates:
        holders = [Holder(pod.namespace, pod.name, spec.name) for pod in candidates for spec in _requesting(pod, resource, len(device_ids))]
        return Refusal(
            Reason.AMBIGUOUS_HOLDER,
            f"{len(device_ids)} {resource} may belong to any of the init containers {_names(holders)}. The agent checks again when kubelet "
            "retries",
        )
    return Refusal(
        Reason.UNKNOWN_HOLDER,
        f"kubelet starts a container with {len(device_ids)} {resource}, but its PodResources lists no container with exactly these IDs. "
        "The agent checks again when kubelet retries",
    )


def _remembered_candidates(claimants: Sequence[RememberedDevices], initialising: Sequence[Pod]) -> list[Pod]:
    """Return the initialising pods that kubelet's checkpoint has with the IDs."""
    uids = {one.pod_uid for one in claimants}
    return [pod for pod in initialising if pod.uid in uids]


def _unclaimed_candidates(
    of_resource: Sequence[HeldDevices], initialising: Sequence[Pod], device_ids: frozenset[str], *, may_be_unlisted: bool
) -> list[Pod]:
    """Return the initialising pods that may hold the IDs, by what PodResources lists.

    Args: may_be_unlisted: with no other candidate, take the pending pods that PodResources does not list yet.
    """
    listed = _ids_by_pod(of_resource)
    # kubelet passes the IDs of init containers on to later containers of the pod, which PodResources lists
    passed_on = [pod for pod in initialising if _contain(listed.get((pod.namespace, pod.name), frozenset()), device_ids)]
    if passed_on or not may_be_unlisted:
        return passed_on
    return [pod for pod in initialising if (pod.namespace, pod.name) not in listed and pod.phase == "Pending"]


def starting_container(
    pod: Pod, listed: str | None, resource: str, count: int, granted: Container[str], *, last_look: bool = False
) -> str | Refusal:
    """Find the container of the pod that starts with IDs that several of its containers may hold one after another.

    Kubelet passes the IDs of ordinary init containers on to the containers after them, and runs init containers one by one, so the pod's
    status shows the next one. The status comes a moment late: a container that runs according to it is not the one that starts now.

    Args:
        listed: the container that PodResources lists with the IDs, if any.
        granted: the names of the pod's containers that were granted exactly these IDs before.
        last_look: the agent will not look again. A container that was granted the IDs and does not run yet then counts as restarted.
    """
    incomplete = [spec for spec in _ordinary_inits(pod, listed) if pod.state_of(spec.name) is not ContainerState.COMPLETED]
    left = _left(pod, incomplete, resource, count)
    possible = left if listed is None else [*left, listed]
    if len(possible) == 1:
        return possible[0]
    # several are possible: the first that has not completed comes next, unless it already runs
    following = incomplete[0].name if incomplete else listed
    if following in possible and _may_start(pod, following, granted, last_look=last_look):
        return following
    return Refusal(
        Reason.AMBIGUOUS_HOLDER,
        f"pod {pod.namespace}/{pod.name} starts one of its containers {', '.join(possible) or 'that have ended'} with {count} {resource}, "
        "and its status does not show yet which one. The agent checks again when kubelet retries",
    )


def _left(pod: Pod, incomplete: Sequence[ContainerSpec], resource: str, count: int) -> list[str]:
    """Return the names of the incomplete init containers that request as many IDs; empty once the pod is past them."""
    if pod.phase == "Running":
        return []
    return [spec.name for spec in incomplete if spec.limits.get(resource) == str(count)]


def _may_start(pod: Pod, container: str, granted: Container[str], *, last_look: bool) -> bool:
    """Whether a container does not run yet, and either was not granted the IDs before or counts as restarted."""
    return pod.state_of(container) is not ContainerState.RUNNING and (container not in granted or last_look)


def _ordinary_inits(pod: Pod, until: str | None) -> list[ContainerSpec]:
    """Return the ordinary init containers that end before the given container starts; all of them for None."""
    inits = []
    for spec in pod.containers:
        if spec.name == until:
            break
        if spec.init and not spec.restartable:
            inits.append(spec)
    return inits


def _requesting(pod: Pod, resource: str, count: int) -> list[ContainerSpec]:
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
