"""Whose a process is: from its control group to the container as Kubernetes knows it, and to what that was granted."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from agent.core.cgroups import ContainerRef
from agent.core.ledger import Grant
from proto.model import Pod


@dataclass(frozen=True, slots=True)
class Owner:
    """The container of a process as Kubernetes knows it, and what it was granted."""

    pod: Pod | None
    container: str
    """Empty when the pod's status does not name the container's id yet."""
    grants: tuple[Grant, ...]


def owner_of(
    ref: ContainerRef, pid: int, *, pods_by_uid: Mapping[str, Pod], grants: Iterable[Grant], counted_pids: Mapping[str, Set[int]]
) -> Owner:
    """Say whose a process is. Until the status names its container, its grants are those that count it, else all of its pod's.

    Args: ref: its container as the runtime knows it. counted_pids: by grant id, host pids of the processes that the shim counts.
    """
    of_pod = tuple(grant for grant in grants if grant.pod_uid == ref.pod_uid)
    pod = pods_by_uid.get(ref.pod_uid)
    name = next((status.name for status in pod.statuses if status.container_id == ref.container_id), "") if pod is not None else ""
    if name:
        return Owner(pod, name, tuple(grant for grant in of_pod if grant.container == name))
    counted = tuple(grant for grant in of_pod if pid in counted_pids.get(grant.grant_id, ()))
    return Owner(pod, "", counted or of_pod)
