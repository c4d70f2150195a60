"""Which container holds which device IDs, and the names derived from IDs.

Kubelet's Allocate and PreStartContainer name device IDs, never a pod. While a container lives it holds its IDs alone, so the IDs
are its identity on this node: the grant id is a keyed hash of them, and PodResources says whose they are.
PodResources leaves ordinary init containers out (kubelet ``apis/podresources/server_v1.go``); their IDs are lent from the same
pod's app containers, which is how they are recognised here.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agent.core.refusal import Reason, Refusal
from proto import contract
from proto.model import ContainerSpec, Pod

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


PodLookup = Callable[[str, str], Pod | None]
"""The active pod of a namespace and name, as far as the API has told us."""


def grant_id(secret: bytes, resource: str, device_ids: Iterable[str]) -> str:
    """Return the name under which a container with these IDs is granted devices: its ledger row, directory and CDI device.

    Keyed with the node's secret, so that a tenant cannot name another container's CDI device.
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


def find_holder(listing: Sequence[HeldDevices], resource: str, device_ids: frozenset[str], active_pod: PodLookup) -> Holder | Refusal:
    """Say which container is about to start with exactly these IDs.

    A container that PodResources lists with exactly the IDs is the holder. When there is none, the IDs may belong to an ordinary init
    container, which PodResources omits: then the pod whose listed IDs contain them, or are contained in them, and whose spec has such an
    init container.
    """
    of_resource = [held for held in listing if held.resource == resource]
    exact = [Holder(held.namespace, held.pod, held.container) for held in of_resource if held.device_ids == device_ids]
    if len(exact) > 1:  # kubelets up to 1.33 list dead pods until their IDs are handed out again
        exact = [holder for holder in exact if active_pod(holder.namespace, holder.pod) is not None] or exact
    if len(exact) == 1:
        return exact[0]
    if exact:
        return Refusal(
            Reason.AMBIGUOUS_HOLDER,
            f"the kubelet lists the same {len(device_ids)} {resource} for {_names(exact)}; want one container. It is asked "
            "again at the next retry",
        )
    return _init_holder(of_resource, resource, device_ids, active_pod)


def _init_holder(of_resource: Sequence[HeldDevices], resource: str, device_ids: frozenset[str], active_pod: PodLookup) -> Holder | Refusal:
    held_by_pod: dict[tuple[str, str], frozenset[str]] = {}
    for held in of_resource:
        key = (held.namespace, held.pod)
        held_by_pod[key] = held_by_pod.get(key, frozenset()) | held.device_ids
    candidates = []
    for (namespace, name), pod_ids in held_by_pod.items():
        if not (device_ids <= pod_ids or pod_ids <= device_ids):
            continue
        pod = active_pod(namespace, name)
        candidates += [Holder(namespace, name, container.name) for container in _init_containers(pod, resource, len(device_ids))]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        return Refusal(
            Reason.AMBIGUOUS_HOLDER,
            f"{len(device_ids)} {resource} may belong to any of the init containers {_names(candidates)}; let one init "
            f"container ask for {resource}",
        )
    return Refusal(
        Reason.UNKNOWN_HOLDER,
        f"the kubelet's PodResources lists no container that holds exactly the {len(device_ids)} {resource} it is starting; it "
        "is asked again at the next retry",
    )


def _init_containers(pod: Pod | None, resource: str, count: int) -> list[ContainerSpec]:
    if pod is None:
        return []
    return [spec for spec in pod.containers if spec.init and not spec.restartable and spec.limits.get(resource) == str(count)]


def _names(holders: Sequence[Holder]) -> str:
    return ", ".join(str(holder) for holder in holders)
