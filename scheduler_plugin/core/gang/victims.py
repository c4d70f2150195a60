# SPDX-License-Identifier: Apache-2.0
"""The gangs of possible victims: a running gang keeps its minimum of members, of each role as many as count, or ends whole.

kube-scheduler preempts pods on one node only, so there a gang with members on other nodes cannot end whole. Our own evictions can end it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.roles import by_role, counted, minima_of, role_of
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.gang.preempt import Band
from scheduler_plugin.core.gang.standing import is_placed


@dataclass(frozen=True, slots=True)
class Ending:
    """What the end of some pods means for their gangs."""

    also: frozenset[str]
    """UIDs of the pods that must end as well, because the rest of their gang does."""
    bands: tuple[Band, ...]
    """The gangs of the other pods that may be ended."""


def ending_on(
    state: ClusterState, chosen: Collection[str], evictable: Iterable[PodFacts], preemptor: PodFacts | None = None
) -> Ending | None:
    """Look at the gangs of pods on one or several nodes; None if the chosen pods cannot end without breaking one.

    Args: chosen: UIDs of the pods that end in any case. evictable: the other pods that may end, by priority.
          preemptor: the pod that needs the room; no member of its own gang ends.
    """
    also: set[str] = set()
    bands: list[Band] = []
    for members in _gangs_of(state, chosen, evictable, preemptor):
        if members.may_stay:
            bands.append(Band(members.here, max(0, members.spare), members.whole, members.roles))
        elif members.whole:
            # Too few would be left, and all of them are here: they end together with the chosen ones.
            also |= members.here
        else:
            return None
    return Ending(frozenset(also), tuple(band for band in bands if band.members))


def is_extra(state: ClusterState, pod: PodFacts) -> bool:
    """Whether a pod is in a gang that keeps its minimum without it."""
    gang = gang_of_pod(pod)
    if gang is None:
        return False
    return spare_without(running_members(state, gang.key), {pod.uid}) >= 0


def running_members(state: ClusterState, key: tuple[str, str]) -> list[PodFacts]:
    """Return the members of a gang that have a place and do not end."""
    return [pod for pod in state.gang_members(key) if is_placed(state, pod) and not pod.deletion_requested]


def spare_without(running: Sequence[PodFacts], uids: Collection[str] = ()) -> int:
    """Return how many more members than the minimum of their gang count, without those with some UIDs; negative if they are too few."""
    return counted(pod for pod in running if pod.uid not in uids) - minimum_of(running)


def roles_of(left: Sequence[PodFacts], here: frozenset[str]) -> tuple[tuple[frozenset[str], int], ...]:
    """Return for each role its members that may end, and how many of all that are left are beyond its minimum. Args: here: UIDs."""
    minima = minima_of(role for pod in left if (role := role_of(pod)) is not None)
    pods = by_role(left)
    return tuple((here & {pod.uid for pod in pods[name]}, max(0, len(pods[name]) - minima[name])) for name in sorted(pods))


def _gangs_of(
    state: ClusterState, chosen: Collection[str], evictable: Iterable[PodFacts], preemptor: PodFacts | None
) -> Iterator["_Members"]:
    """Yield the members of each gang of the chosen and the evictable pods. Args: as of ending_on."""
    may_go = {pod.uid: pod for pod in evictable if pod.uid not in chosen}
    ends = [pod for uid in chosen if (pod := state.pods.get(uid)) is not None]
    own = gang_of_pod(preemptor) if preemptor is not None else None
    for key in _keys((*ends, *may_go.values())):
        yield _Members.of(state, key, chosen, may_go, is_own=own is not None and own.key == key)


def _keys(pods: Iterable[PodFacts]) -> Iterable[tuple[str, str]]:
    """Return the gangs of pods, each once, in the order of the pods."""
    return dict.fromkeys(gang.key for pod in pods if (gang := gang_of_pod(pod)) is not None)


@dataclass(frozen=True, slots=True)
class _Members:
    """The running members of one gang, when the chosen pods end."""

    ending: int
    """How many of them are chosen."""
    left: int
    """How many of them are not chosen."""
    here: frozenset[str]
    """UIDs of those that are not chosen, but may end too."""
    whole: bool
    """Whether those are all that are left, so that the gang can end whole."""
    spare: int
    """How many more that count than the minimum are left; negative if the gang breaks."""
    roles: tuple[tuple[frozenset[str], int], ...] = ()
    """As in ``Band``."""

    @classmethod
    def of(cls, state: ClusterState, key: tuple[str, str], chosen: Collection[str], may_go: Collection[str], *, is_own: bool) -> "_Members":
        running = running_members(state, key)
        left = [pod for pod in running if pod.uid not in chosen]
        here = frozenset(pod.uid for pod in left if pod.uid in may_go)
        ending = len(running) - len(left)
        if is_own:
            # Ending a member for the sake of another gains nothing: none may end, alone or with the others.
            return cls(ending, len(left), here, whole=False, spare=-1 if ending else 0)
        spare = spare_without(running, chosen)
        return cls(ending, len(left), here, whole=len(here) == len(left), spare=spare, roles=roles_of(left, here))

    @property
    def may_stay(self) -> bool:
        """Whether the members that are left can continue, or no member is left."""
        return not self.ending or self.spare >= 0 or not self.left


def minimum_of(members: Iterable[PodFacts]) -> int:
    """Return how many members must run; if they state different minimums, the largest counts."""
    return max((gang.minimum for pod in members if (gang := gang_of_pod(pod)) is not None), default=0)
