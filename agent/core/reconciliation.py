# SPDX-License-Identifier: Apache-2.0
"""Plans one reconcile pass: which grants have ended, and which files belong to no grant.

A grant ends when its pod is gone, and not earlier: an early release would give away memory that a process still holds. Three sources
decide. The API (by informer) has the pod's UID and phase. Kubelet's PodResources shows whether the container still holds its IDs. The usage
region's locks and the driver's process list show whether a process of it lives. Kubelets up to 1.33 list dead pods until another pod needs
their IDs, so a listing alone delays a release only for a limited time.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.identity import HeldDevices
from agent.core.ledger import Grant
from aliquot.contract.model import Pod

LISTED_GRACE_SECONDS = 60.0
"""How long PodResources may list a pod that is deleted from the API, before the agent treats the listing as stale."""
CLAIMED_GRACE_SECONDS = 60.0
"""How long a lock alone keeps the grant of a deleted pod. A process that received the open file could hold the lock for ever."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """The sources, as read in one pass."""

    pods_by_uid: Mapping[str, Pod]
    held: Sequence[HeldDevices] | None
    """None if PodResources did not answer; then the plan releases only grants of pods that have ended according to the API."""
    live_grants: Set[str]
    """Ids of grants with a live process, according to the usage region or the driver's list."""
    claimed_grants: Set[str] = frozenset()
    """Ids of grants with only a held lock in the usage region, if the lock's owner cannot be determined."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. ``waiting``: grants of pods that are deleted from the API, but that another source still holds."""

    release: tuple[Grant, ...]
    waiting: tuple[Grant, ...]


def plan_releases(grants: Iterable[Grant], view: NodeView, absent_seconds: Mapping[str, float]) -> Plan:
    """Decide which grants have ended.

    Args: absent_seconds: by grant id, how long the pod has been missing from the API; without an entry, it has just gone missing.
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
    """Return the ids of files without a grant: leftovers of a crash between two steps of a release."""
    return tuple(identifier for identifier in on_disk if identifier not in grants)
