# SPDX-License-Identifier: Apache-2.0
"""Held room, and the rule that says who may use it until its owner starts.

Invariant: no pod waits for ever behind pods that came later. Four rules together keep that:

- The room stays at the same devices until its owner starts or another owner comes before it.
- A pod may use it only if it is expected to end before the room is free, and it is not known when a pod without an estimate ends.
- While a pod runs there for longer than expected, no further pod may use it. So wrong estimates delay the owner only once.
- Once the owner waits for PATIENCE_SECONDS, no further pod may use it.

More important pods pass: they come first in any case.
"""

from dataclasses import dataclass
from typing import Final

from scheduler_plugin.core.cluster.hold_uids import hold_uid
from scheduler_plugin.core.cluster.pods import Footprint, PodFacts
from scheduler_plugin.core.score.cost import HostDemand

PATIENCE_SECONDS: Final = 86_400.0
"""How long the owner of a hold waits at most before no pod may use its room: it bounds what wrong estimates can cost."""
SENTENCE: Final = "GPUs held for a pod that waits longer"
"""Why a node does not take a pod, in kube-scheduler's event."""


@dataclass(frozen=True, slots=True)
class Place:
    """The room for one pod."""

    pod_uid: str
    node: str
    footprint: Footprint
    demand: HostDemand


@dataclass(frozen=True, slots=True)
class Hold:
    """The room of one waiting pod, or of all members that a gang lacks."""

    pod: str
    """``namespace/name`` of the owner; of a gang, of one of its members."""
    priority: int
    waits_since: float
    """In seconds since 1970."""
    places: tuple[Place, ...]

    @property
    def owners(self) -> frozenset[str]:
        """The UIDs of the pods that it is for."""
        return frozenset(place.pod_uid for place in self.places)

    @property
    def uids(self) -> frozenset[str]:
        """The UIDs of its reservations."""
        return frozenset(hold_uid(place.pod_uid) for place in self.places)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes with its room."""
        return frozenset(place.node for place in self.places)


@dataclass(frozen=True, slots=True)
class Outlook:
    """When the room of a hold will be free, in seconds since 1970; None where that is unknown."""

    until: float | None = None
    """The time before which other pods that use it must end. On the early side."""
    low: float | None = None
    """It is free earlier in about one case of ten."""
    middle: float | None = None
    high: float | None = None
    """It is free later in about one case of ten."""
    overdue: tuple[str, ...] = ()
    """UIDs of pods that use it for longer than expected."""
    unknown: int = 0
    """How many pods in it have no expected end."""


def may_use(hold: Hold, outlook: Outlook, pod: PodFacts, most_seconds: float | None, now: float) -> bool:
    """Whether a pod may use held room.

    Args: most_seconds: how long the pod runs at most, as expected; None if unknown. now: seconds since 1970.
    """
    if pod.uid in hold.owners or pod.priority > hold.priority:
        return True
    if outlook.until is None or most_seconds is None or outlook.overdue:
        return False
    return now - hold.waits_since < PATIENCE_SECONDS and now + most_seconds <= outlook.until
