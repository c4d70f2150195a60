# SPDX-License-Identifier: Apache-2.0
"""Gangs in filter and bind. A member gets a node only when enough members have one, and is bound only when enough members are ready.

Filter plans all members that are still needed on one picture of the cluster and reserves a place for each, so later calls find the room.
Bind waits a moment: kube-scheduler binds pods side by side, so the members of a gang arrive within milliseconds of each other. If
that wait fails, kube-scheduler retries the member. It stays ready until filter finds another place for it, or no place.

The gate: when enough members are ready, each place is checked again, and in the same moment all of them become firm. If a member has lost
its place, the gang goes on waiting.
Invariant: no binding is sent before enough members hold what they need.

Reservations of a gang last gang_seconds from its first plan. A gang that is incomplete after that releases all of them and makes no new
plan for as long, so a gang that can never start does not block others. ``gang_backoff`` keeps a gang that waits from blocking them too.

A crash loses plans, never bindings: bound members count, and the others are planned again. The API writes one binding at a time: if a
member is deleted in that moment, fewer than the minimum can run.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.gang import Gang, Standing, gang_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.roles import counted, extras_last
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.core.gang.plan import Planner, Steps, finish
from scheduler_plugin.core.gang.standing import is_full, is_placed, is_ready, may_still_start, members_of, outside, role_conflict, spread
from scheduler_plugin.extender.cache import MAX_PODS, keep
from scheduler_plugin.extender.gang_backoff import FailedPlan, FailedPlans, FailedSearches, Key

WAIT_SECONDS: Final = 3.0
"""How long bind waits for the other members: less than bind.REPLY_SECONDS."""
START_SECONDS: Final = 30.0
"""How long the room of a ready member is kept once its gang starts: kube-scheduler retries it after at most 10 s."""


@dataclass(slots=True)
class _Attempt:
    """One try to start a gang."""

    deadline: float
    moves: int = 0
    """How often ready members had to move for another member."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Attempts:
    """The gangs that hold room and are incomplete, and those that pause after an attempt that expired."""

    def __init__(self, gang_seconds: float) -> None:
        """Args: gang_seconds: how long an attempt lasts, and the pause after it."""
        self.gang_seconds = gang_seconds
        self.on_attempt: Callable[[str], None] = lambda _: None
        """Called with ``planned``, and later ``completed`` or ``expired``, for each attempt."""
        self.running: dict[Key, _Attempt] = {}
        self._paused_until: dict[Key, float] = {}

    def begin(self, gang: Gang, deadline: float) -> None:
        """Start an attempt."""
        self.running[gang.key] = _Attempt(deadline)
        self.on_attempt("planned")

    def complete(self, gang: Gang) -> None:
        """End an attempt, if there is one: the members that wait in bind go on."""
        attempt = self.running.pop(gang.key, None)
        if attempt is not None:
            attempt.complete.set()
            self.on_attempt("completed")

    def pauses(self, gang: Gang) -> bool:
        """Whether a gang pauses."""
        return gang.key in self._paused_until

    def expire(self, now: float) -> bool:
        """End attempts and pauses that are over. Returns: whether a pause ended."""
        for key, attempt in list(self.running.items()):
            if attempt.deadline <= now:
                del self.running[key]
                self._paused_until[key] = attempt.deadline + self.gang_seconds
                self.on_attempt("expired")
        over = [key for key, until in self._paused_until.items() if until <= now]
        for key in over:
            del self._paused_until[key]
        return bool(over)


class Gangs:
    """All gangs that are being started."""

    def __init__(self, planner: Planner, gang_seconds: float, monotonic: Callable[[], float]) -> None:
        """Args: gang_seconds: how long a gang may hold room before it must have started."""
        self.planner = planner
        self.attempts = Attempts(gang_seconds)
        self.planning = asyncio.Lock()
        """Held while a gang is planned in steps (``cooperative``)."""
        self._state = planner.state
        self._monotonic = monotonic
        self._plans = FailedPlans(planner)
        self._searches = FailedSearches(planner)
        self.has_seat: Callable[[str], bool] = lambda _: False
        """Whether the pod of a UID has taken a seat of its workload (``workload_seats``)."""
        self.unhelped: OrderedDict[str, frozenset[str]] = OrderedDict()
        """By the UID of a member for which the pods of one node are not enough, the nodes that kube-scheduler proposed to free."""

    @property
    def waiting(self) -> int:
        """How many gangs hold room and are not complete."""
        return len(self.attempts.running)

    def note_unhelped(self, uid: str, nodes: frozenset[str]) -> None:
        """Note the nodes that kube-scheduler proposed to free for a member."""
        keep(self.unhelped, uid, nodes, MAX_PODS)

    # --- filter: a place for each member ---

    def place(self, pod: PodFacts, gang: Gang, offered: frozenset[str], fitting: Collection[str], standing: Standing) -> str | None:
        """Find a node for a member among the offered ones: its name, "" if each fitting node is allowed, None if no plan is possible.

        Args: fitting: the nodes where it fits in addition to the current places of its gang. standing: the result of ``standing_for`` now.
        """
        return finish(self.placing(pod, gang, offered, fitting, standing))

    def placing(
        self, pod: PodFacts, gang: Gang, offered: frozenset[str], fitting: Collection[str], standing: Standing
    ) -> Steps[str | None]:
        """Do the same as ``place``, with a step after each member."""
        begun, needed, freed_count = self._monotonic(), self.planner.needed(pod, gang), self._state.freed_count
        running, needs_others = self.attempts.running, not self.planner.need_not_wait(pod, gang)
        deadline = running[gang.key].deadline if standing.planned else begun + self.attempts.gang_seconds
        others = [other for other in self.planner.ready(pod, gang) if other.uid != pod.uid]
        node = None if standing.pauses or gang.domain is not None else self._on_seats(pod, needed, fitting, deadline)
        if node is None:
            node = yield from self.planner.placing(pod, gang, offered, fitting, standing, deadline)
        if node is None and needed and standing.makes_plans:
            self._plans.note(pod, gang, FailedPlan(freed_count, offered, needed), begun, self._monotonic())
        if node and needs_others:
            self._note_place(gang, others, deadline, is_new=not standing.planned)
        return node

    def _on_seats(self, pod: PodFacts, needed: Sequence[PodFacts], fitting: Collection[str], deadline: float) -> str | None:
        """Return the node of a member's seat, if all members that it needs have seats: then no plan can be better."""
        reservations = self._state.reservations
        if not needed or not all(self.has_seat(member.uid) and member.uid in reservations for member in needed):
            return None
        for member in needed:
            self._state.renew(member.uid, deadline)
        node = reservations[pod.uid].node
        return node if node in fitting else None

    def _note_place(self, gang: Gang, others: Sequence[PodFacts], deadline: float, *, is_new: bool) -> None:
        """Note that a member has a place. Args: others: the other members that were ready before."""
        self._plans.forget(gang)
        self._searches.forget(gang)
        if is_new:
            self.attempts.begin(gang, deadline)
            self._state.freed_count += 1  # members that wait can be retried now
        attempt = self.attempts.running.get(gang.key)
        if attempt is not None and not all(is_ready(self._state, other) for other in others):
            attempt.moves += 1

    def standing(self, gang: Gang) -> Standing:
        """Return how far a gang is."""
        self.expire()
        attempt = self.attempts.running.get(gang.key)
        return Standing(attempt is not None, self.attempts.pauses(gang), attempt is not None and attempt.moves >= gang.minimum)

    def standing_for(self, pod: PodFacts, gang: Gang, offered: frozenset[str]) -> Standing:
        """Return how far the gang of a member is, when the member is offered these nodes."""
        standing, has_failed = self.standing(gang), self._plans.has_failed(pod, gang, offered)
        backs_off = self._plans.backoffs.holds(gang, wanted=not has_failed)
        return standing._replace(planning_failed=has_failed or backs_off)

    def back_off_planning(self, gang: Gang, begun: float) -> None:
        """Let a gang back off after a failed plan with changes in between, and check it again afterwards."""
        self._plans.backoffs.begin(gang, begun, self._monotonic(), wanted=True)

    def may_plan(self, gang: Gang) -> bool:
        """Whether a gang has enough members and neither pauses nor backs off. One that backs off is checked again afterwards."""
        there = [other for other in self._state.gang_members(gang.key) if other.may_start]
        if counted([*there, *self._state.succeeded_members(gang.key).values()]) < gang.minimum or self.standing(gang).pauses:
            return False
        return not self._plans.backoffs.holds(gang)

    # --- preempt: pods that end for a member ---

    def nodes_to_search(self, pod: PodFacts, gang: Gang, proposed: Mapping[str, frozenset[str]]) -> list[str]:
        """Return the nodes where ending pods may make room for a member and those it waits for.

        Args: proposed: by node, UIDs of the pods that kube-scheduler would end there.
        """
        self.expire()
        failed = self._searches.failed_nodes(pod, gang, self.planner.needed(pod, gang), self._monotonic())
        untried = [node for node, uids in proposed.items() if node not in failed or failed[node].proposed != uids]
        if untried and self._searches.backoffs.holds(gang):
            return []
        return [] if self._searches.helps_another(pod, gang) else untried

    def note_failed_nodes(self, pod: PodFacts, gang: Gang, members: Sequence[PodFacts], proposed: Mapping[str, frozenset[str]]) -> None:
        """Note that ending pods on these nodes makes no room for a member and those it waits for, in the current state.

        Args: members: all of them. proposed: as for ``nodes_to_search``.
        """
        self._searches.note(pod, gang, members, proposed, self._monotonic())

    def note_search(self, pod: PodFacts, gang: Gang, begun: float, *, helps: bool, goes_on: bool) -> None:
        """Note the result of a search for a member.

        Args: begun: when it began. helps: whether pods end for the member. goes_on: whether nodes are left to search.
        """
        if helps:
            self._searches.note_help(pod, gang, self._monotonic())
        else:
            self.back_off_searching(gang, begun, goes_on=goes_on)

    def back_off_searching(self, gang: Gang, begun: float, *, goes_on: bool = False) -> None:
        """Let a gang back off if the search that began then took long and found nothing."""
        self._searches.backoffs.begin_if_long(gang, begun, self._monotonic(), wanted=goes_on)

    def unresolvable_nodes(self, pod: PodFacts, gang: Gang, nodes: Collection[str]) -> frozenset[str]:
        """Return the nodes that kube-scheduler need not propose for preemption for a member that waits for others."""
        # On the nominated node kube-scheduler would take "unresolvable" as a reason to end pods elsewhere.
        unresolvable = frozenset(nodes) - {pod.nominated_node}
        members = self.needed_with(pod, gang)
        if not members:
            return unresolvable
        elsewhere = outside(self._state, pod, gang, unresolvable)
        failed = self._searches.failed_nodes(pod, gang, members, self._monotonic())
        if self._searches.backoffs.holds(gang, wanted=not failed):
            return unresolvable
        return elsewhere | (unresolvable & failed.keys())

    def may_search(self, gang: Gang) -> bool:
        """Whether a gang neither pauses nor backs off from searches for pods to end."""
        return not self.standing(gang).pauses and not self._searches.backoffs.holds(gang, wanted=False)

    def needed_with(self, pod: PodFacts, gang: Gang) -> list[PodFacts]:
        """Return the pods that need a place at the same time, this pod first: only this pod if its gang runs, no pod if it cannot start."""
        if self.planner.need_not_wait(pod, gang):
            return [] if is_full(self._state, pod, gang) else [pod]
        return [] if self.standing(gang).pauses else self.planner.needed(pod, gang)

    # --- bind: enough members at once ---

    async def admit(self, pod: PodFacts, gang: Gang, node: str) -> str:
        """Wait until enough members are ready. Returns: why the pod must not be bound yet; empty if it may be bound."""
        self.expire()
        if refusal := self._excluded(pod, gang, node):
            return refusal
        if self._is_complete(pod, gang):
            return ""
        attempt = self.attempts.running.get(gang.key)
        if attempt is None:
            return f"gang {gang.name} has no plan: filter plans it when kube-scheduler retries its members"
        if refusal := self.planner.reserve_on(pod, node, attempt.deadline, Stage.READY):
            self.planner.unset_ready(pod)
            return refusal
        self._start(pod, gang)
        if self._is_complete(pod, gang):
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                await attempt.complete.wait()
        if is_full(self._state, pod, gang):
            return self.sentence(pod, gang)
        if self._is_complete(pod, gang):
            return ""
        return f"gang {gang.name} waits for {max(1, self._missing(pod, gang, is_ready))} more of its members"

    def _excluded(self, pod: PodFacts, gang: Gang, node: str) -> str:
        """Return why a member must not be bound to a node at all; empty if it may be, alone or with others."""
        if is_placed(self._state, pod):
            return ""
        if is_full(self._state, pod, gang):
            return self.sentence(pod, gang)
        if role_conflict(self._state, pod, gang):
            self._state.release(pod.uid)  # so that filter says why
            return self.sentence(pod, gang)
        if outside(self._state, pod, gang, (node,)):
            self._state.release(pod.uid)  # so that filter plans it again
            return f"node {node} is not in the domain in which gang {gang.name} waits or runs, since it was planned again"
        return ""

    def _start(self, pod: PodFacts, gang: Gang) -> None:
        """Make the places of all ready members firm if they are enough and all of them still fit."""
        if self._missing(pod, gang, is_ready) > 0:
            return
        fitting = self.planner.check_ready(self.planner.ready(pod, gang))
        if self._missing(pod, gang, is_ready) > 0:
            return
        placed = [other for other in members_of(self._state, pod, gang).values() if is_placed(self._state, other)]
        needed, extras = extras_last(placed, fitting)
        self.planner.start([*needed, *extras][: may_still_start(self._state, gang)], self._monotonic() + START_SECONDS)
        if gang.role is not None:
            self._state.freed_count += 1  # members beyond the minimum of their role can be retried now

    def _is_complete(self, pod: PodFacts, gang: Gang) -> bool:
        """Whether enough members have a firm place. The attempt ends then, and the members that wait in bind go on."""
        if self._missing(pod, gang) > 0:
            return False
        self.attempts.complete(gang)
        return True

    def _missing(self, pod: PodFacts, gang: Gang, counts: Callable[[ClusterState, PodFacts], bool] = is_placed) -> int:
        """Return how many members the gang lacks. Members that are placed count, and those for which ``counts`` is true."""
        state = self._state
        members = members_of(self._state, pod, gang).values()
        return gang.minimum - counted(other for other in members if is_placed(state, other) or counts(state, other))

    # --- for all of them ---

    def why(self, pod: PodFacts, gang: Gang) -> str:
        """Return why a member waits for its gang; empty if it does not wait."""
        if pod.node_name or pod.uid in self._state.reservations:
            return ""
        if self.planner.need_not_wait(pod, gang) and not (is_full(self._state, pod, gang) or self.planner.lacks_domain(pod, gang)):
            return ""
        return self.sentence(pod, gang)

    def explain(self, pod: PodFacts, gang: Gang) -> tuple[str, str]:
        """Return why a member waits for its gang, and in which domains the gang is; empty texts if there is nothing to say."""
        return self.why(pod, gang), spread(self._state, pod, gang)

    def sentence(self, pod: PodFacts, gang: Gang) -> str:
        """Return why a gang cannot start."""
        return self.planner.sentence(pod, gang, self.standing(gang))

    def expire(self) -> None:
        """End attempts, pauses and backoffs that are over, and have the waiting pods checked again then."""
        now = self._monotonic()
        if any([self.attempts.expire(now), self._plans.backoffs.expire(now), self._searches.backoffs.expire(now)]):
            self._wake()
        self._searches.expire(now)
        self._plans.forget_gone()
        self._searches.forget_gone()

    def _wake(self) -> None:
        """Have waiting pods checked again without freed capacity: failed plans and searches stay valid."""
        before = self._state.freed_count
        self._state.freed_count = after = before + 1
        self._plans.keep_valid(before, after)
        self._searches.keep_valid(before, after)


def gang_or_error(pod: PodFacts) -> Gang | RequestError | None:
    """Read a pod's gang: None without one, the error of an invalid annotation."""
    if pod.gpu is None:
        return None
    try:
        return gang_of(pod.namespace, pod.gpu.annotations)
    except RequestError as exc:
        return exc
