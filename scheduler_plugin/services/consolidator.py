# SPDX-License-Identifier: Apache-2.0
"""Moves running pods, one after the other, for a pod that waits and fits nowhere.

Order of every run: reserve the waiting pod's place and a seat for each pod that moves; check by dry run that each may be evicted; write the
run into an annotation of the waiting pod; then evict one pod, wait until its replacement is bound, and go on with the next. At the end the
waiting pod is retried. Only one run is under way at a time.

Reservations are in memory and expire, so a process that is killed leaks none. The next one reads the annotation, reserves everything again
in the present state, and goes on, or gives up and clears the annotation. A run is also given up if an eviction stays refused, a
replacement does not start, or the waiting pod gets another place. What was moved stays where it is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from aliquot import contract
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.journal import Snapshot
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.consolidate.plan import Goal, Plan, Trial, find_plan, replacement_of
from scheduler_plugin.core.consolidate.reach import unknown_because
from scheduler_plugin.core.consolidate.record import RecordError, RunRecord, decode_run, encode_run
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH, in_batches
from scheduler_plugin.extender.gang_backoff import REST_FACTOR
from scheduler_plugin.extender.seats import Seat
from scheduler_plugin.services.move_api import MoveApi, Written
from scheduler_plugin.services.telemetry import Telemetry

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 1.0
HOLD_SECONDS: Final = 30.0
"""How long reservations last; they are renewed in every period."""
WAIT_SECONDS: Final = 15.0
"""How long a pod waits before moves are planned for it: kube-scheduler and preemption come first, and other pods may end."""
SCAN_SECONDS: Final = 5.0
"""How often waiting pods are looked for: there may be 50,000 pods."""
FIRST_PAUSE_SECONDS: Final = 60.0
LAST_PAUSE_SECONDS: Final = 3600.0
MOVE_SECONDS: Final = 300.0
"""How long one move may take: an eviction that is refused is repeated, and a replacement may be slow to come."""
REPLACE_SECONDS: Final = 60.0
"""How long a controller may take to replace a pod that is gone: a Deployment replaces it at once, a StatefulSet when it is gone."""
START_SECONDS: Final = 120.0
"""How long the waiting pod's place is kept after the last move."""


@dataclass(slots=True)
class _Run:
    """The moves under way for one waiting pod."""

    pod: PodFacts
    node: str
    seats: list[Seat]
    """Of the moves that are not made yet, in order."""
    deadline: float
    """Until when the present move, or the start of the waiting pod, must be done."""
    evicted: set[str] = field(default_factory=set)
    """UIDs of pods that were evicted."""
    leaving: set[str] = field(default_factory=set)
    """UIDs of all pods that move; those that still end hold a part of the waiting pod's place."""
    missed_since: float | None = None
    """Since when the pod of the present move is gone without a replacement."""
    retried: bool = False


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Scope:
    """What the consolidator does, and for which pods."""

    acts: bool
    """Whether pods move, or plans are only reported."""
    scheduler_name: str = contract.SCHEDULER_NAME
    """The scheduler of the pods to serve."""


class Consolidator:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        api: MoveApi,
        snapshot: Callable[[], Snapshot],
        retry: Callable[[str], Awaitable[None]],
        leads: Callable[[], bool],
        telemetry: Telemetry,
        scope: Scope,
    ) -> None:
        """Args: retry: makes kube-scheduler retry the pod of a UID. leads: whether this replica decides."""
        self._context = context
        self._api = api
        self._snapshot = snapshot
        self._retry = retry
        self._leads = leads
        self._telemetry = telemetry
        self._scope = scope
        self._rests_until = 0.0
        self._run: _Run | None = None
        self._waiting_since: dict[str, float] = {}
        """By pod UID."""
        self._pauses: dict[str, _Pause] = {}
        """By UID of the pod for which a plan was searched."""
        self._written: set[str] = set()
        """UIDs of pods with an annotation that this process wrote: what the watch shows may be older."""
        self._unclear: set[str] = set()
        """UIDs of pods for which the outcome of writing the annotation is open. It may be there all the same, so it is cleared later."""

    async def run(self) -> None:
        """Consolidate until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Do the next step of the run under way, or begin one."""
        if not self._leads():
            self._let_go()
            self._written.clear()
            self._unclear.clear()
            self._rests_until = 0.0
            return
        if self._run is not None:
            await self._follow(self._run)
            return
        if (now := self._context.clock.monotonic()) < self._rests_until:
            return
        self._rests_until = now + SCAN_SECONDS
        await self._clear()
        if self._scope.acts and (left := self._left_over()) is not None:
            await self._resume(left)
        elif (pod := await self._next()) is not None:
            await self._serve(pod)

    # --- the next pod ---

    async def _next(self) -> PodFacts | None:
        """Return the most important pod that waited long enough, of those the one that waits longest.

        Not the decisions of filter say who waits: kube-scheduler calls it only if a node has enough in sum.
        """
        now, pods = self._context.clock.monotonic(), self._context.state.pods
        waiting = [pod async for pod in in_batches(list(pods.values()), MAX_PER_BATCH) if self._waits(pod)]
        self._waiting_since = {pod.uid: self._waiting_since.get(pod.uid, now) for pod in waiting}
        self._pauses = {uid: pause for uid, pause in self._pauses.items() if uid in self._waiting_since}
        self._written &= pods.keys()
        due = (pod for pod in waiting if self._is_due(pod, now))
        return min(due, key=lambda pod: (-pod.priority, self._waiting_since[pod.uid]), default=None)

    def _waits(self, pod: PodFacts) -> bool:
        """Whether a pod waits for a GPU, alone, and moves may help it."""
        if pod.gpu is None or pod.node_name or pod.gpu.scheduler_name != self._scope.scheduler_name:
            return False
        return pod.may_start and gang_of_pod(pod) is None and not unknown_because(pod, self._context.directory)

    def _is_due(self, pod: PodFacts, now: float) -> bool:
        """Whether a plan may be searched for a waiting pod now."""
        if pod.nominated_node or pod.uid in self._context.state.reservations:
            return False  # others end for it, or it has a place
        pause = self._pauses.get(pod.uid)
        return now - self._waiting_since[pod.uid] >= WAIT_SECONDS and (pause is None or now >= pause.until)

    def _pause(self, uid: str) -> None:
        before = self._pauses.get(uid)
        seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, LAST_PAUSE_SECONDS)
        self._pauses[uid] = _Pause(self._context.clock.monotonic() + seconds, seconds)

    async def _serve(self, pod: PodFacts) -> None:
        """Search a plan for a pod, and begin it or report it."""
        self._pause(pod.uid)
        plan = await self._search(pod.uid)
        if plan is None:
            return
        node, text = plan.nodes[0], _moves_text(plan)
        if not self._scope.acts:
            await self._api.report(pod, f"{text} would free its place on node {node}: aliquot defrag plan shows them")
            return
        # The cluster may have changed during the search.
        waiting, moves = self._still_waiting(pod.uid), self._still_there(plan)
        if waiting is not None and len(moves) == len(plan.moves) and self._leads():
            await self._begin(waiting, node, moves, text)

    async def _search(self, uid: str) -> Plan | None:
        """Search a plan for a pod, in a thread, and rest after it in proportion."""
        begun = self._context.clock.monotonic()
        plan = await asyncio.to_thread(find_plan, self._snapshot(), Goal(uid))
        now = self._context.clock.monotonic()
        self._rests_until = max(self._rests_until, now + REST_FACTOR * (now - begun))
        found = plan if isinstance(plan, Plan) else None
        self._telemetry.consolidations.labels("none" if found is None else "found").inc()
        return found

    def _still_waiting(self, uid: str) -> PodFacts | None:
        """Return a pod as it is now; None if it is gone or has a place."""
        pod = self._context.state.pods.get(uid)
        return None if pod is None or pod.node_name or uid in self._context.state.reservations else pod

    def _still_there(self, plan: Plan) -> list[tuple[PodFacts, str]]:
        """Return the pods of a plan that are not gone, as they are now, each with the node to which it moves."""
        pods = self._context.state.pods
        return [(old, move.to_node) for move in plan.moves if (old := pods.get(move.pod_uid)) is not None]

    async def _begin(self, pod: PodFacts, node: str, moves: Sequence[tuple[PodFacts, str]], text: str) -> None:
        """Reserve everything, check all evictions, write the run down. If one of these fails, nothing stays."""
        if any(self._trial().staying_because(old, pod.priority) for old, _ in moves):
            return
        run = self._reserved(pod, node, [Seat(old, to_node) for old, to_node in moves])
        if run is None:
            return
        self._run = run
        for old, _ in moves:
            if not self._renew(run) or not await self._api.evict(old, dry_run=True):
                self._let_go()
                return
        if not await self._write_down(pod, encode_run(node, list(moves))):
            self._let_go()
            return
        await self._api.report(pod, f"{text} free its place on node {node}, one after the other")

    # --- reservations ---

    def _trial(self) -> Trial:
        context = self._context
        return Trial(context.state, context.gangs.planner, context.budgets, context.clock.now(), context.directory)

    def _reserved(self, pod: PodFacts, node: str, seats: list[Seat]) -> _Run | None:
        """Reserve the waiting pod's place and all seats in the present state; None, and nothing stays, if one is lacking."""
        trial, until = self._trial(), self._context.clock.monotonic() + HOLD_SECONDS
        ending = {seat.leaving for seat in seats} & self._context.state.pods.keys()
        run = _Run(pod, node, seats, self._context.clock.monotonic() + MOVE_SECONDS, leaving=ending)
        if not trial.reserve_place(pod, node, ending, until):
            return None
        for seat in seats:
            wanted = self._context.state.pods[seat.taken_by] if seat.taken_by else replacement_of(seat.pod)
            if not trial.reserve_seat(wanted, seat.node, until):
                self._release(run)
                return None
            self._context.seats.put(seat)
        return run

    def _renew(self, run: _Run) -> bool:
        """Keep all reservations of a run; return whether none was lost, such as by a call to the API that took too long."""
        state, until = self._context.state, self._context.clock.monotonic() + HOLD_SECONDS
        for uid in (run.pod.uid, *(seat.holder for seat in run.seats)):
            state.renew(uid, until)
        place = state.reservations.get(run.pod.uid)
        has_seats = all(seat.taken_by or seat.holder in state.reservations for seat in run.seats)
        return place is not None and place.node == run.node and has_seats

    def _release(self, run: _Run) -> None:
        for seat in run.seats:
            self._context.seats.drop(seat)
        place = self._context.state.reservations.get(run.pod.uid)
        if place is not None and place.node == run.node and not place.stage.is_firm:
            self._context.state.release(run.pod.uid)

    def _let_go(self) -> None:
        """Drop the run under way and its reservations, without a call to the API: nothing was moved yet, or another replica leads."""
        if self._run is not None:
            self._release(self._run)
            self._run = None

    # --- the run under way ---

    async def _follow(self, run: _Run) -> None:
        state, now = self._context.state, self._context.clock.monotonic()
        pod = state.pods.get(run.pod.uid)
        if pod is None or pod.deletion_requested:
            await self._end(run, "the waiting pod is gone")
        elif pod.node_name or self._is_firm(pod.uid):
            await self._end(run, "")
        elif not self._renew(run):
            await self._end(run, "the waiting pod got another place, or a reservation was lost")
        elif run.seats:
            await self._move(run, run.seats[0], now)
        else:
            await self._start(run, now)

    def _is_firm(self, uid: str) -> bool:
        known = self._context.state.reservations.get(uid)
        return known is not None and known.stage.is_firm

    async def _move(self, run: _Run, seat: Seat, now: float) -> None:
        """Do the next step of one move."""
        old, replacement = self._context.state.pods.get(seat.leaving), self._context.state.pods.get(seat.taken_by)
        if old is not None and not old.deletion_requested and old.uid not in run.evicted:
            await self._evict_for(run, seat, old, now)
        elif replacement is not None and replacement.node_name:
            self._done(run, seat, now)
            if replacement.node_name != seat.node:
                logger.warning("a replacement runs on node %s, not on its seat on node %s", replacement.node_name, seat.node)
        elif old is None and replacement is None and self._is_missed(run, now):
            self._done(run, seat, now)  # its controller does not replace it; its room is free all the same
        else:
            await self._end_late(run, now, f"the replacement of {_name(seat.pod)} does not start")

    async def _evict_for(self, run: _Run, seat: Seat, old: PodFacts, now: float) -> None:
        """Evict a pod that moves, if it still may; try again in the next period otherwise."""
        if why := self._not_yet(run, seat, old):
            await self._end_late(run, now, why)
        elif await self._api.evict(old, dry_run=True) and await self._api.evict(old):
            run.evicted.add(old.uid)
            self._telemetry.consolidation_moves.inc()
            await self._api.report_move(seat, run.pod, run.node)
        else:
            await self._end_late(run, now, f"the API server refuses to evict {_name(old)}")

    def _not_yet(self, run: _Run, seat: Seat, old: PodFacts) -> str:
        """Say why a pod must not be evicted now; empty if it may be. Labels and taints change while moves are under way."""
        trial = self._trial()
        if why := trial.staying_because(old, run.pod.priority):
            return f"{_name(old)} must not move: {why}"
        places = (old, seat.node), (run.pod, run.node)
        return next((f"{_name(pod)} may not use node {node} now" for pod, node in places if not trial.may_use(pod, node)), "")

    def _is_missed(self, run: _Run, now: float) -> bool:
        """Whether a pod is gone for REPLACE_SECONDS, and no replacement came."""
        if run.missed_since is None:
            run.missed_since = now
        return now - run.missed_since >= REPLACE_SECONDS

    def _done(self, run: _Run, seat: Seat, now: float) -> None:
        self._context.seats.drop(seat)
        run.seats.remove(seat)
        run.missed_since = None
        run.deadline = now + (MOVE_SECONDS if run.seats else START_SECONDS)

    async def _start(self, run: _Run, now: float) -> None:
        """Have the waiting pod retried once all pods that moved have ended."""
        state, left = self._context.state, run.leaving & self._context.state.pods.keys()
        if any(state.pods[uid].is_ending(self._context.clock.now()) for uid in left):
            run.deadline = now + START_SECONDS  # a grace period may be long
        elif left or run.retried:
            await self._end_late(run, now, "the waiting pod does not start")
        else:
            run.retried, run.deadline = True, now + START_SECONDS
            await self._retry(run.pod.uid)

    async def _end_late(self, run: _Run, now: float, why: str) -> None:
        """Give a run up once its deadline is over."""
        if now >= run.deadline:
            await self._end(run, why)

    async def _write_down(self, pod: PodFacts, text: str) -> bool:
        """Write the annotation of a waiting pod; return whether the API took it."""
        self._written.add(pod.uid)
        self._unclear.discard(pod.uid)
        written = await self._api.write_down(pod, text)
        if written is Written.OPEN:
            self._unclear.add(pod.uid)
        return written is Written.TAKEN

    async def _clear(self) -> None:
        """Clear the annotations of earlier runs for which the answer to a request was lost."""
        self._unclear &= self._context.state.pods.keys()
        for uid in list(self._unclear):
            if (pod := self._context.state.pods.get(uid)) is not None:
                await self._write_down(pod, "")

    async def _end(self, run: _Run, why: str) -> None:
        """End a run: it is complete if there is no reason why it ends."""
        self._release(run)
        self._run = None
        self._telemetry.consolidations.labels("given_up" if why else "completed").inc()
        name = _name(run.pod)
        logger.info("consolidation ends: %s", why or "the waiting pod starts", extra={"pod": name, "node": run.node})
        if run.pod.uid in self._context.state.pods:
            await self._write_down(run.pod, "")
            if why:
                await self._api.report(run.pod, f"the moves that were to free its place on node {run.node} ended: {why}")

    # --- after a restart ---

    def _left_over(self) -> PodFacts | None:
        """Return a pod that waits without a place, with a run that an earlier process began."""
        done = self._written | self._context.state.reservations.keys()
        pods = self._context.state.pods.values()
        return next((pod for pod in pods if not pod.node_name and _annotation(pod) and pod.uid not in done), None)

    async def _resume(self, pod: PodFacts) -> None:
        """Go on with a run, if all its reservations can be made again; otherwise clear its annotation."""
        run: _Run | None = None
        try:
            record = decode_run(_annotation(pod))
            run = self._reserved(pod, record.node, list(self._seats_of(record)))
        except RecordError as exc:
            logger.warning("moves cannot be resumed: %s", exc, extra={"pod": _name(pod)})
        self._telemetry.consolidations.labels("given_up" if run is None else "resumed").inc()
        if run is None:
            self._pause(pod.uid)
            await self._write_down(pod, "")
        self._run = run
        self._written.add(pod.uid)

    def _seats_of(self, record: RunRecord) -> Iterator[Seat]:
        """Yield a seat for each pod of a run that still runs, and for each replacement that waits."""
        pods = self._context.state.pods
        taken = set(self._context.state.reservations)
        for move in record.moves:
            if (old := pods.get(move.uid)) is not None:
                yield Seat(old, move.to_node)
                continue
            for pod in pods.values():
                owner = (pod.namespace, pod.controller_uid)
                if owner == (move.namespace, move.controller_uid) and not pod.node_name and pod.uid not in taken:
                    taken.add(pod.uid)
                    yield Seat(pod, move.to_node, taken_by=pod.uid)
                    break


def _name(pod: PodFacts) -> str:
    return f"{pod.namespace}/{pod.name}"


def _annotation(pod: PodFacts) -> str:
    return "" if pod.gpu is None else pod.gpu.annotations.get(contract.ANNOTATION_CONSOLIDATION, "")


def _moves_text(plan: Plan) -> str:
    count = len(plan.moves)
    return f"{count} move{'s' * (count != 1)}, which lose{'s' * (count == 1)} {plan.lost_gpu_seconds / 3600:.1f} GPU-hours,"
