# SPDX-License-Identifier: Apache-2.0
"""What failed for a gang that waits, so that it is not tried again while nothing changed, and does not keep other pods waiting.

To plan hundreds of members takes a second, and so does the search for pods that could end for them, while kube-scheduler waits for the
reply before it looks at any other pod. Therefore:

- A failed plan is not repeated before something is freed, for any member with the same needs.
- A failed search is not repeated on a node before the node's pods change: only bound pods can be ended. After FORGET_SECONDS all nodes are
  searched again, for changes that the scheduler does not see.
- After a plan or search that took longer than LONG_SECONDS, the gang backs off for REST_FACTOR times as long.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias, TypeVar

from scheduler_plugin.core.cluster.gang import Gang
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.fit.shapes import PodShape
from scheduler_plugin.core.gang.plan import Planner

LONG_SECONDS: Final = 0.25
"""A plan or search up to this long needs no backoff."""
REST_FACTOR: Final = 4.0
"""A backoff lasts this many times as long as the work before it: four fifths of the time are left for other pods."""
FORGET_SECONDS: Final = 600.0
"""After this time all nodes are searched again, even without freed capacity. kube-scheduler retries a pod by itself after 5 min: with less
than that a gang would search the same few nodes each time."""
SETTLE_SECONDS: Final = 2.0
"""How long kube-scheduler needs to end pods, and the watch to report it."""

Key: TypeAlias = tuple[str, str]
"""Namespace and name of a gang."""


@dataclass(frozen=True, slots=True)
class FailedPlan:
    """A plan that found no place for all members."""

    freed_count: int
    """The state's ``freed_count`` at the time."""
    offered: frozenset[str]
    members: Sequence[PodFacts]


class FailedNode(NamedTuple):
    """A node on which ending pods does not help."""

    proposed: frozenset[str]
    """UIDs of the pods that kube-scheduler would have ended there."""
    pods_changed_at: int
    """The state's value for the node at the time."""


@dataclass(frozen=True, slots=True)
class FailedSearch:
    """Searches for pods to end that found no help."""

    freed_count: int
    """The state's ``freed_count`` at the time."""
    members: Sequence[PodFacts]
    nodes: Mapping[str, FailedNode]
    """By node."""
    until: float
    """When it is forgotten."""


_Kind = TypeVar("_Kind")
_Failure = TypeVar("_Failure", FailedPlan, FailedSearch)


@dataclass(slots=True)
class _Backoff:
    until: float
    wanted: bool = False
    """Whether the gang would have been planned, or pods to end searched, during the backoff."""


@dataclass(frozen=True, slots=True)
class Backoffs:
    """One pause for each gang."""

    _by_gang: dict[Key, _Backoff] = field(default_factory=dict)

    def holds(self, gang: Gang, *, wanted: bool = True) -> bool:
        """Whether a gang backs off now. Args: wanted: whether it would work otherwise; then it is checked again after the backoff."""
        backoff = self._by_gang.get(gang.key)
        if backoff is not None:
            backoff.wanted |= wanted
        return backoff is not None

    def begin(self, gang: Gang, begun: float, now: float, *, wanted: bool) -> None:
        """Back off from work that lasted from ``begun`` to ``now``."""
        self._by_gang[gang.key] = _Backoff(now + REST_FACTOR * (now - begun), wanted)

    def begin_if_long(self, gang: Gang, begun: float, now: float, *, wanted: bool = False) -> None:
        """Back off if the work took longer than LONG_SECONDS."""
        if now - begun > LONG_SECONDS:
            self.begin(gang, begun, now, wanted=wanted)

    def expire(self, now: float) -> bool:
        """End the backoffs that are over. Returns: whether one of these gangs wanted to work."""
        over = [key for key, backoff in self._by_gang.items() if backoff.until <= now]
        wanted = [self._by_gang.pop(key).wanted for key in over]
        return any(wanted)


class FailedPlans:
    """The failed plans of all gangs, by the shape of the member that kube-scheduler sent."""

    def __init__(self, planner: Planner) -> None:
        self.backoffs = Backoffs()
        self._planner = planner
        self._by_gang: dict[Key, dict[PodShape | None, FailedPlan]] = {}

    def has_failed(self, pod: PodFacts, gang: Gang, offered: frozenset[str]) -> bool:
        """Whether a plan for this member on these nodes would fail as it did before."""
        failure = self._by_gang.get(gang.key, {}).get(self._planner.shape_of(pod))
        if failure is None or failure.freed_count != self._planner.state.freed_count or not offered <= failure.offered:
            return False
        return are_alike(self._planner, failure.members, self._planner.needed(pod, gang))

    def note(self, pod: PodFacts, gang: Gang, failure: FailedPlan, begun: float, now: float) -> None:
        """Remember a failed plan that lasted from ``begun`` to ``now``."""
        self._by_gang.setdefault(gang.key, {})[self._planner.shape_of(pod)] = failure
        self.backoffs.begin_if_long(gang, begun, now)
        if failure.freed_count != self._planner.state.freed_count:  # something was freed meanwhile: plan again after the backoff
            self.backoffs.begin(gang, begun, now, wanted=True)

    def forget(self, gang: Gang) -> None:
        """Drop what failed for a gang."""
        self._by_gang.pop(gang.key, None)

    def forget_gone(self) -> None:
        """Drop gangs without members."""
        _drop_empty(self._by_gang, self._planner)

    def keep_valid(self, before: int, after: int) -> None:
        """Move what is valid at one ``freed_count`` to another."""
        for failures in self._by_gang.values():
            _move(failures, before, after)


class FailedSearches:
    """The failed searches of all gangs, by shape and priority of the member that kube-scheduler sent."""

    def __init__(self, planner: Planner) -> None:
        self.backoffs = Backoffs()
        self._planner = planner
        self._by_gang: dict[Key, dict[tuple[PodShape | None, int], FailedSearch]] = {}
        self._helped: dict[Key, tuple[str, float]] = {}
        """UID of the member for which pods end, and until when no other member of the gang gets help."""

    def failed_nodes(self, pod: PodFacts, gang: Gang, members: Sequence[PodFacts], now: float) -> Mapping[str, FailedNode]:
        """Return the nodes where a search for this member and those it waits for has failed, and would fail again."""
        known = self._by_gang.get(gang.key, {}).get((self._planner.shape_of(pod), pod.priority))
        state = self._planner.state
        if known is None or known.freed_count != state.freed_count or known.until <= now:
            return {}
        if not are_alike(self._planner, known.members, members):
            return {}
        return {node: failed for node, failed in known.nodes.items() if failed.pods_changed_at == state.pods_changed_at(node)}

    def note(self, pod: PodFacts, gang: Gang, members: Sequence[PodFacts], proposed: Mapping[str, frozenset[str]], now: float) -> None:
        """Remember that the search failed on these nodes. Args: members: all. proposed: by node, UIDs of the pods proposed to end."""
        state, failed = self._planner.state, dict(self.failed_nodes(pod, gang, members, now))
        failed |= {node: FailedNode(uids, state.pods_changed_at(node)) for node, uids in proposed.items()}
        search = FailedSearch(state.freed_count, members, failed, now + FORGET_SECONDS)
        self._by_gang.setdefault(gang.key, {})[self._planner.shape_of(pod), pod.priority] = search

    def note_help(self, pod: PodFacts, gang: Gang, now: float) -> None:
        """Remember that pods end for a member."""
        self._helped[gang.key] = (pod.uid, now + SETTLE_SECONDS)

    def helps_another(self, pod: PodFacts, gang: Gang) -> bool:
        """Whether pods end for another member of the gang now."""
        helped = self._helped.get(gang.key)
        return helped is not None and helped[0] != pod.uid

    def expire(self, now: float) -> None:
        """End what has lasted its time, except for the backoffs."""
        for key in [key for key, (_, until) in self._helped.items() if until <= now]:
            del self._helped[key]

    def forget(self, gang: Gang) -> None:
        """Drop what failed for a gang."""
        self._by_gang.pop(gang.key, None)

    def forget_gone(self) -> None:
        """Drop gangs without members."""
        _drop_empty(self._by_gang, self._planner)

    def keep_valid(self, before: int, after: int) -> None:
        """Move what is valid at one ``freed_count`` to another."""
        for searches in self._by_gang.values():
            _move(searches, before, after)


def are_alike(planner: Planner, some: Iterable[PodFacts], others: Iterable[PodFacts]) -> bool:
    """Whether two groups of pods request the same in total. Pods in both groups are not compared."""
    by_uid, others_by_uid = {pod.uid: pod for pod in some}, {pod.uid: pod for pod in others}
    shapes = Counter(planner.shape_of(pod) for uid, pod in by_uid.items() if uid not in others_by_uid)
    return shapes == Counter(planner.shape_of(pod) for uid, pod in others_by_uid.items() if uid not in by_uid)


def _drop_empty(by_gang: dict[Key, dict[_Kind, _Failure]], planner: Planner) -> None:
    for key in [key for key in by_gang if not any(True for _ in planner.state.gang_members(key))]:
        del by_gang[key]


def _move(failures: dict[_Kind, _Failure], before: int, after: int) -> None:
    for kind, failure in list(failures.items()):
        if failure.freed_count == before:
            failures[kind] = replace(failure, freed_count=after)
