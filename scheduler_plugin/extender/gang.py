"""Gangs in filter and bind: a member gets a node only when enough members have one, and is bound only when enough are ready to be.

filter plans all members that are still needed on one picture of the cluster and expects each where it is planned, so what follows finds
the room. bind waits a moment: kube-scheduler binds pods side by side, so the members of a gang arrive within milliseconds of each other.
A member that waited in vain is tried again; that it was ready is remembered until filter finds another place for it, or none.

The gate: when enough members are ready, each one's place is looked at once more, and in the same moment all of them become firm. If one
has lost its place the gang goes on waiting. So no binding is sent before enough members hold what they need, whatever the plans were.

A gang that waits for room must not keep others waiting: to plan hundreds of members takes a second. What was planned in vain is not planned
again before something is freed, whichever member asks; and after a plan that took long the gang rests for several times as long. So it is
with the search for pods whose end would make room: kube-scheduler waits for each answer before it sees to anybody else. Where a pod was
bound since, or changed, it is looked again, because only bound pods can be ended; and everywhere once in a while, for what is not told.

What is expected for a gang lasts gang_seconds from its first plan. A gang that is not complete by then lets go of everything and makes no
new plan for as long, so that one that can never start does not keep others out for ever. A crash forgets plans, never bindings: those
that are bound count, and the rest are planned anew. The API writes one binding at a time: a member deleted in that very moment can leave
fewer than the minimum running.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

from placement.request import RequestError
from scheduler_plugin.core.gang import Gang, Standing, gang_of
from scheduler_plugin.core.gang_plan import Planner, Steps, finish, is_placed, is_ready
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.shapes import PodShape
from scheduler_plugin.core.state import ClusterState, Stage

WAIT_SECONDS: Final = 3.0
"""How long bind waits for the other members: less than bind.ANSWER_SECONDS."""
START_SECONDS: Final = 30.0
"""How long the room of a member that was ready is kept once its gang starts: kube-scheduler tries it again after 10 s at most."""
LONG_SECONDS: Final = 0.25
"""What a plan may take without a rest after it."""
REST_FACTOR: Final = 4.0
"""How many times as long as a plan took a gang rests: four fifths of the time are for others, whatever ends meanwhile."""
FORGET_SECONDS: Final = 600.0
"""So long after the latest search in vain all nodes are searched anew, though nothing was freed: it must outlast the 5 min after which
kube-scheduler tries a pod again by itself, or a gang would search the same few nodes each time."""
SETTLE_SECONDS: Final = 2.0
"""How long kube-scheduler has to end pods, and we to see it."""


@dataclass(slots=True)
class _Attempt:
    """One try to start a gang."""

    deadline: float
    moves: int = 0
    """How often ready members had to make way for another."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A plan that was made in vain."""

    freed_count: int
    """The state's, then."""
    offered: frozenset[str]
    members: Sequence[PodFacts]


class _Tried(NamedTuple):
    """A node on which nobody's end helps."""

    proposed: frozenset[str]
    """UIDs of those who were to end there already."""
    pods_changed_at: int
    """The state's for the node, then."""


@dataclass(frozen=True, slots=True)
class _Fruitless:
    """Searches for pods to end that were made in vain."""

    freed_count: int
    """The state's, then."""
    members: Sequence[PodFacts]
    tried: Mapping[str, _Tried]
    """By node."""
    until: float
    """When it is forgotten."""


_Kind = TypeVar("_Kind")
_InVain = TypeVar("_InVain", _Failure, _Fruitless)


@dataclass(slots=True)
class _Rest:
    """The time after something that took long and was in vain."""

    until: float
    asked: bool = False
    """Whether the gang would have been planned, or pods to end looked for, in it."""


class Gangs:
    """All gangs that are being started."""

    def __init__(self, planner: Planner, gang_seconds: float, monotonic: Callable[[], float]) -> None:
        self.planner = planner
        self._state = planner.state
        self._gang_seconds = gang_seconds
        self._monotonic = monotonic
        self.planning = asyncio.Lock()
        """Held while a gang is planned in steps (``ahead``)."""
        self.on_attempt: Callable[[str], None] = lambda _: None
        """Told ``planned``, and then ``completed`` or ``expired``, of each attempt."""
        self._attempts: dict[tuple[str, str], _Attempt] = {}
        self._closed_until: dict[tuple[str, str], float] = {}
        self._failures: dict[tuple[str, str], dict[PodShape | None, _Failure]] = {}
        """By the gang and the shape of the member that asked."""
        self._rests: dict[tuple[str, str], _Rest] = {}
        """From plans."""
        self._fruitless: dict[tuple[str, str], dict[tuple[PodShape | None, int], _Fruitless]] = {}
        """By the gang, and the shape and priority of the member that asked."""
        self._search_rests: dict[tuple[str, str], _Rest] = {}
        """From searches for pods to end."""
        self._helped: dict[tuple[str, str], tuple[str, float]] = {}
        """The UID of the member for which others are ended, and until when nobody else is for its gang."""

    @property
    def waiting(self) -> int:
        """How many gangs hold room and are not complete."""
        return len(self._attempts)

    def place(self, pod: PodFacts, gang: Gang, offered: frozenset[str], fitting: Collection[str], standing: Standing) -> str | None:
        """Find a node for a member among the offered ones: its name, "" for whichever fits, or None when the gang cannot start now.

        Args: fitting: those where it fits beside the places of its gang as they are. standing: what ``standing_for`` says at this moment.
        """
        return finish(self.placing(pod, gang, offered, fitting, standing))

    def placing(
        self, pod: PodFacts, gang: Gang, offered: frozenset[str], fitting: Collection[str], standing: Standing
    ) -> Steps[str | None]:
        """Do as ``place``, member by member."""
        begun, needed, freed_count = self._monotonic(), self.planner.needed(pod, gang), self._state.freed_count
        deadline = self._attempts[gang.key].deadline if standing.planned else begun + self._gang_seconds
        others = [other for other in self.planner.ready(pod, gang) if other.uid != pod.uid]
        node = yield from self.planner.placing(pod, gang, offered, fitting, standing, deadline)
        if node is None and needed and standing.makes_plans:
            self._note_failure(pod, gang, _Failure(freed_count, offered, needed), begun)
        if node:
            self._failures.pop(gang.key, None)
            self._fruitless.pop(gang.key, None)
        if node and not standing.planned:
            self._attempts[gang.key] = _Attempt(deadline)
            self._state.freed_count += 1  # members that wait are worth another try
            self.on_attempt("planned")
        if node and gang.key in self._attempts and not all(is_ready(self._state, other) for other in others):
            self._attempts[gang.key].moves += 1
        return node

    def standing(self, gang: Gang) -> Standing:
        """Return how far a gang is."""
        self.expire()
        attempt = self._attempts.get(gang.key)
        return Standing(attempt is not None, gang.key in self._closed_until, attempt is not None and attempt.moves >= gang.minimum)

    def standing_for(self, pod: PodFacts, gang: Gang, offered: frozenset[str]) -> Standing:
        """Return how far the gang of a member is that is offered these nodes."""
        standing, in_vain = self.standing(gang), self._has_failed(pod, gang, offered)
        if (rest := self._rests.get(gang.key)) is not None:
            rest.asked |= not in_vain
            in_vain = True
        return standing._replace(in_vain=in_vain)

    def _has_failed(self, pod: PodFacts, gang: Gang, offered: frozenset[str]) -> bool:
        """Whether a plan for a member that is offered these nodes would be in vain, as it was before."""
        failure = self._failures.get(gang.key, {}).get(self.planner.shape_of(pod))
        if failure is None or failure.freed_count != self._state.freed_count or not offered <= failure.offered:
            return False
        return self._are_alike(failure.members, self.planner.needed(pod, gang))

    def _are_alike(self, some: Sequence[PodFacts], others: Sequence[PodFacts]) -> bool:
        """Whether pods ask for the same, all in all; those among both are not compared."""
        uids, other_uids = {pod.uid for pod in some}, {pod.uid for pod in others}
        shapes = Counter(self.planner.shape_of(pod) for pod in some if pod.uid not in other_uids)
        return shapes == Counter(self.planner.shape_of(pod) for pod in others if pod.uid not in uids)

    def _note_failure(self, pod: PodFacts, gang: Gang, failure: _Failure, begun: float) -> None:
        self._failures.setdefault(gang.key, {})[self.planner.shape_of(pod)] = failure
        self._rest_after(begun, self._rests, gang)
        if failure.freed_count != self._state.freed_count:
            self.rest_from_planning(gang, begun)

    def rest_from_planning(self, gang: Gang, begun: float) -> None:
        """Let a gang rest that was planned in vain while others worked, and look again then: something changed in between."""
        now = self._monotonic()
        self._rests[gang.key] = _Rest(now + REST_FACTOR * (now - begun), asked=True)

    def _rest_after(self, begun: float, rests: dict[tuple[str, str], _Rest], gang: Gang, *, asked: bool = False) -> None:
        now = self._monotonic()
        if now - begun > LONG_SECONDS:
            rests[gang.key] = _Rest(now + REST_FACTOR * (now - begun), asked)

    def worth_searching(self, pod: PodFacts, gang: Gang, proposed: Mapping[str, frozenset[str]]) -> list[str]:
        """Return the nodes where it is worth looking now whose end would make room for a member and those it waits for.

        Args: proposed: by node the UIDs of those who would end there already.
        """
        self.expire()
        tried = self._tried(pod, gang, self.planner.needed(pod, gang))
        untried = [node for node, uids in proposed.items() if node not in tried or tried[node].proposed != uids]
        if untried and (rest := self._search_rests.get(gang.key)) is not None:
            rest.asked = True
            return []
        helped = self._helped.get(gang.key)
        return untried if helped is None or helped[0] == pod.uid else []

    def note_in_vain(self, pod: PodFacts, gang: Gang, members: Sequence[PodFacts], proposed: Mapping[str, frozenset[str]]) -> None:
        """Note that on these nodes nobody's end would make room for a member and those it waits for, as the state is at this moment.

        Args: members: all of them. proposed: as for ``worth_searching``.
        """
        tried = dict(self._tried(pod, gang, members))
        tried |= {node: _Tried(uids, self._state.pods_changed_at(node)) for node, uids in proposed.items()}
        fruitless = _Fruitless(self._state.freed_count, members, tried, self._monotonic() + FORGET_SECONDS)
        self._fruitless.setdefault(gang.key, {})[self.planner.shape_of(pod), pod.priority] = fruitless

    def note_search(self, pod: PodFacts, gang: Gang, begun: float, *, helps: bool, goes_on: bool) -> None:
        """Note what came of a search for a member.

        Args: begun: when it began. helps: whether others end for it. goes_on: whether nodes are left to be searched.
        """
        if helps:
            self._helped[gang.key] = (pod.uid, self._monotonic() + SETTLE_SECONDS)
        else:
            self.rest_from_searching(gang, begun, goes_on=goes_on)

    def rest_from_searching(self, gang: Gang, begun: float, *, goes_on: bool = False) -> None:
        """Let the gang rest if something that helped it to no place took long since it began."""
        self._rest_after(begun, self._search_rests, gang, asked=goes_on)

    def beyond_help(self, pod: PodFacts, gang: Gang, nodes: Collection[str]) -> frozenset[str]:
        """Return those of some nodes of which kube-scheduler need not ask whose end would make room for a member that waits for others."""
        hopeless = frozenset(nodes) - {pod.nominated_node}  # there it would take the word for a reason to end others elsewhere
        members = self.needed_with(pod, gang)
        if not members:
            return hopeless
        tried = self._tried(pod, gang, members)
        if (rest := self._search_rests.get(gang.key)) is not None:
            rest.asked |= not tried
            return hopeless
        return hopeless & tried.keys()

    def _tried(self, pod: PodFacts, gang: Gang, members: Sequence[PodFacts]) -> Mapping[str, _Tried]:
        """Return what was tried in vain for a member and those it waits for, and still is in vain."""
        known = self._fruitless.get(gang.key, {}).get((self.planner.shape_of(pod), pod.priority))
        if known is None or known.freed_count != self._state.freed_count or known.until <= self._monotonic():
            return {}
        if not self._are_alike(known.members, members):
            return {}
        return {node: tried for node, tried in known.tried.items() if tried.pods_changed_at == self._state.pods_changed_at(node)}

    def needed_with(self, pod: PodFacts, gang: Gang) -> list[PodFacts]:
        """Return who must have a place at once, the pod first: the pod alone if its gang runs, nobody if it cannot start at all now."""
        if self.planner.goes_alone(pod, gang):
            return [pod]
        return [] if self.standing(gang).pauses else self.planner.needed(pod, gang)

    def may_plan(self, gang: Gang) -> bool:
        """Whether a gang has enough members and does not pause or rest; one that rests is looked at again when it has."""
        there = sum(other.may_start for other in self._state.gang_members(gang.key))
        if there + len(self._state.succeeded_members(gang.key)) < gang.minimum or self.standing(gang).pauses:
            return False
        rest = self._rests.get(gang.key)
        if rest is not None:
            rest.asked = True
        return rest is None

    def may_search(self, gang: Gang) -> bool:
        """Whether a gang neither pauses nor rests from searches for pods to end."""
        return not self.standing(gang).pauses and gang.key not in self._search_rests

    async def admit(self, pod: PodFacts, gang: Gang, node: str) -> str:
        """Wait until enough members are ready; return why the pod must not be bound yet, or nothing."""
        self.expire()
        if self._goes_on(pod, gang):
            return ""
        attempt = self._attempts.get(gang.key)
        if attempt is None:
            return f"gang {gang.name} has no plan: it is planned when its members are filtered"
        if refusal := self.planner.expect_on(pod, node, attempt.deadline, Stage.READY):
            self.planner.step_back(pod)
            return refusal
        self._start(pod, gang)
        if self._goes_on(pod, gang):
            return ""
        with suppress(TimeoutError):
            await asyncio.wait_for(attempt.complete.wait(), WAIT_SECONDS)
        if self._goes_on(pod, gang):
            return ""
        return f"gang {gang.name} waits for {max(1, self._missing(pod, gang, is_ready))} more of its members"

    def _start(self, pod: PodFacts, gang: Gang) -> None:
        """Make the places of all ready members firm if they are enough and all of them still fit."""
        if self._missing(pod, gang, is_ready) > 0:
            return
        fitting = self.planner.check_ready(self.planner.ready(pod, gang))
        if self._missing(pod, gang, is_ready) <= 0:
            self.planner.start(fitting, self._monotonic() + START_SECONDS)

    def _goes_on(self, pod: PodFacts, gang: Gang) -> bool:
        """Whether enough members have a firm place; the attempt ends then, and those of them that still wait in bind go on."""
        if self._missing(pod, gang) > 0:
            return False
        attempt = self._attempts.pop(gang.key, None)
        if attempt is not None:
            attempt.complete.set()
            self.on_attempt("completed")
        return True

    def why(self, pod: PodFacts, gang: Gang) -> str:
        """Say why a member waits for its gang; nothing when it does not."""
        if self.planner.goes_alone(pod, gang) or pod.uid in self._state.reservations:
            return ""
        return self.sentence(pod, gang)

    def sentence(self, pod: PodFacts, gang: Gang) -> str:
        """Say why a gang cannot start."""
        return self.planner.sentence(pod, gang, self.standing(gang))

    def _missing(self, pod: PodFacts, gang: Gang, counts: Callable[[ClusterState, PodFacts], bool] = is_placed) -> int:
        """Count the members that the gang lacks beside those that are placed or otherwise count."""
        state = self._state
        there = sum(is_placed(state, other) or counts(state, other) for other in self.planner.members(pod, gang).values())
        return gang.minimum - there

    def expire(self) -> None:
        """End what has lasted its time."""
        now = self._monotonic()
        for key, attempt in list(self._attempts.items()):
            if attempt.deadline <= now:
                del self._attempts[key]
                self._closed_until[key] = attempt.deadline + self._gang_seconds
                self.on_attempt("expired")
        for key in [key for key, until in self._closed_until.items() if until <= now]:
            del self._closed_until[key]
            self._wake()
        for rests in (self._rests, self._search_rests):
            for key in [key for key, rest in rests.items() if rest.until <= now]:
                if rests.pop(key).asked:
                    self._wake()
        for key in [key for key, (_, until) in self._helped.items() if until <= now]:
            del self._helped[key]
        for kept in (self._failures, self._fruitless):
            for key in [key for key in kept if not any(True for _ in self._state.gang_members(key))]:
                del kept[key]

    def _wake(self) -> None:
        """Have those that wait looked at again though nothing was freed: what is in vain stays so."""
        before = self._state.freed_count
        self._state.freed_count = after = before + 1
        for failures in self._failures.values():
            _count_from(failures, before, after)
        for fruitless in self._fruitless.values():
            _count_from(fruitless, before, after)


def _count_from(known: dict[_Kind, _InVain], before: int, after: int) -> None:
    """Have what held at one freed_count hold at another."""
    for kind, one in list(known.items()):
        if one.freed_count == before:
            known[kind] = replace(one, freed_count=after)


def gang_asked(pod: PodFacts) -> Gang | RequestError | None:
    """Read a pod's gang: None for none, an error's sentence when it is wrong."""
    if pod.gpu is None:
        return None
    try:
        return gang_of(pod.namespace, pod.gpu.annotations)
    except RequestError as exc:
        return exc
