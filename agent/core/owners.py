# SPDX-License-Identifier: Apache-2.0
"""Finds the owner of a process: from its cgroup to the container in Kubernetes, and to that container's grants."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from agent.core.cgroups import ContainerRef
from agent.core.ledger import Grant
from aliquot.contract.model import Pod


@dataclass(frozen=True, slots=True)
class Owner:
    """The container of a process in Kubernetes, with its grants."""

    pod: Pod | None
    container: str
    """Empty if the pod's status does not have the container's id yet."""
    grants: tuple[Grant, ...]


def owner_of(
    ref: ContainerRef, pid: int, *, pods_by_uid: Mapping[str, Pod], grants: Iterable[Grant], counted_pids: Mapping[str, Set[int]]
) -> Owner:
    """Return the owner of a process.

    Until the pod's status has the container's id, its grants are those with a shim that counts the process, or else all grants of the pod.

    Args: ref: its container in the runtime. counted_pids: by grant id, host pids of the processes that the shim counts.
    """
    pod = pods_by_uid.get(ref.pod_uid)
    of_pod = _grants_of(ref.pod_uid, pod, grants)
    name = _container_name(ref, pod)
    if pod is not None and name:
        return Owner(pod, name, tuple(grant for grant in of_pod if name in users_in(grant, pod)))
    counted = tuple(grant for grant in of_pod if pid in counted_pids.get(grant.grant_id, ()))
    return Owner(pod, "", counted or of_pod)


def _grants_of(pod_uid: str, pod: Pod | None, grants: Iterable[Grant]) -> tuple[Grant, ...]:
    """Return the grants that were made to a pod or that it uses. Args: pod: None if it is unknown."""
    return tuple(grant for grant in grants if grant.pod_uid == pod_uid or (pod is not None and is_user(grant, pod)))


def _container_name(ref: ContainerRef, pod: Pod | None) -> str:
    """Return the name that the pod's status has for a container's id; empty if it has none yet."""
    if pod is None:
        return ""
    return next((status.name for status in pod.statuses if status.container_id == ref.container_id), "")


def users_in(grant: Grant, pod: Pod) -> tuple[str, ...]:
    """Return the containers of a pod that use a grant."""
    claim = grant.claim
    if claim is None:
        return (grant.container,) if grant.pod_uid == pod.uid else ()
    if pod.namespace != grant.namespace:
        return ()
    return tuple(
        spec.name for spec in pod.containers if any(use.claim == claim.name and use.request in ("", *claim.names) for use in spec.claims)
    )


def uses_unknown_claim(pods: Iterable[Pod], grants: Iterable[Grant]) -> bool:
    """Whether a pod that has not ended uses a claim without a known grant: it may be the one of a damaged ledger row.

    A claim of another driver has none either. Then the answer is the cautious one.
    """
    known: dict[tuple[str, str], set[str]] = {}
    for grant in grants:
        if grant.claim is not None:
            known.setdefault((grant.namespace, grant.claim.name), set()).update(grant.claim.names)
    uses = ((pod.namespace, use) for pod in pods if pod.active for spec in pod.containers for use in spec.claims)
    return any(
        (namespace, use.claim) not in known or (use.request and use.request not in known[namespace, use.claim]) for namespace, use in uses
    )


def is_user(grant: Grant, pod: Pod) -> bool:
    """Whether a container of the pod uses the grant."""
    return bool(users_in(grant, pod))


def used_by(pod: Pod, grants: Iterable[Grant]) -> tuple[Grant, ...]:
    """Return the grants that containers of the pod use."""
    names = {use.claim for spec in pod.containers for use in spec.claims}
    # most grants are of other pods, which a look at one field shows
    possible = [grant for grant in grants if (grant.claim.name in names if grant.claim is not None else grant.pod_uid == pod.uid)]
    return tuple(grant for grant in possible if is_user(grant, pod))


def pod_uids_of(grant: Grant, pods: Iterable[Pod]) -> frozenset[str]:
    """Return the UIDs of the pods that may use a grant: of a claim, all pods that refer to it."""
    if grant.claim is None:
        return frozenset((grant.pod_uid,))
    return frozenset((grant.pod_uid, *(pod.uid for pod in pods if is_user(grant, pod))))
