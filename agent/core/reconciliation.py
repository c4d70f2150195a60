"""Which grants are over and which files belong to none: the plan of one reconcile pass.

A grant ends when its pod is gone, and no earlier: releasing too soon would promise memory that a process still holds. Three witnesses
are heard. The API (by informer) knows the pod's UID and phase; kubelet's PodResources knows whether the container still
holds its IDs; the usage region's locks and the driver's list of processes know whether a process of it lives. Kubelets up to 1.33 list
dead pods until their IDs are wanted, so a listing alone delays a release by a bounded time only.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.identity import HeldDevices
from agent.core.ledger import Grant
from proto.model import Pod

LISTED_GRACE_SECONDS = 60.0
"""How long PodResources may go on listing a pod that the API has deleted, before the listing is taken for stale."""
CLAIMED_GRACE_SECONDS = 60.0
"""How long a lock alone keeps the grant of a pod that the API has deleted: whoever was handed the open file could hold it for ever."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """The witnesses, as of one pass."""

    pods_by_uid: Mapping[str, Pod]
    held: Sequence[HeldDevices] | None
    """None when PodResources did not answer: then only what the API says for certain is acted on."""
    live_grants: Set[str]
    """Grants of which a process lives, by its usage region or by the driver's list."""
    claimed_grants: Set[str] = frozenset()
    """Grants of which a process lives by a lock in the usage region alone, where nobody can see whose lock it is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. ``waiting`` are grants whose pod the API no longer knows, but which another witness keeps."""

    release: tuple[Grant, ...]
    waiting: tuple[Grant, ...]


def plan_releases(grants: Iterable[Grant], view: NodeView, absent_seconds: Mapping[str, float]) -> Plan:
    """Decide which grants are over.

    Args: absent_seconds: for how long the API has not known the pod of a grant; absent from the mapping means since now.
    """
    release, waiting = [], []
    for grant in grants:
        pod = view.pods_by_uid.get(grant.pod_uid)
        if pod is not None:
            if not pod.active:
                release.append(grant)
        elif _kept(grant, view, absent_seconds.get(grant.grant_id, 0.0)):
            waiting.append(grant)
        else:
            release.append(grant)
    return Plan(tuple(release), tuple(waiting))


def _kept(grant: Grant, view: NodeView, absent_for_seconds: float) -> bool:
    if view.held is None or grant.grant_id in view.live_grants:
        return True
    if grant.grant_id in view.claimed_grants and absent_for_seconds < CLAIMED_GRACE_SECONDS:
        return True
    ids = frozenset(grant.device_ids)
    listed = any(
        (held.namespace, held.pod, held.resource) == (grant.namespace, grant.pod, grant.resource) and held.device_ids >= ids
        for held in view.held
    )
    return listed and absent_for_seconds < LISTED_GRACE_SECONDS


def orphans(on_disk: Iterable[str], grants: Mapping[str, Grant]) -> tuple[str, ...]:
    """Return the grant ids of files that no grant stands for: a crash left them between two steps of a release."""
    return tuple(identifier for identifier in on_disk if identifier not in grants)
