"""Ends less important pods for one that lacks nothing but the right GPU, which kube-scheduler's own preemption cannot see.

kube-scheduler adds up what a node has: where enough is free in sum and on no single GPU, it finds nobody to end, and asks no extender
(1.36 and before). A node that it asks ``filter`` about passed its own filters, so nothing but GPUs is missing there. A while after a pod
was refused on all of those, when kube-scheduler has had its turn, the cheapest pods on one of them are evicted by the rules of
``extender.preempt``, with one difference: no disruption budget is exceeded. The pod is expected there until they are gone, so that nobody
takes what becomes free.

Where kube-scheduler does preempt, it nominates the node: the pod is expected there in the same way, because kube-scheduler's sums would
let a less important pod take the very GPU.

Evictions are few: one pod is served in a period, and looks again later and later while nobody's end helps it. To serve a member of a gang
that does not run takes as long as to plan the whole gang, and so does keeping its place: members do not follow one another at once, and
what took long is done again only after several times as long. While nothing changes, a place is only kept for longer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf
from typing import Final

from proto import contract
from proto.gpunode import GpuNode
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.gang import gang_of_pod
from scheduler_plugin.core.judge import curable, reasons_for
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.gang import REST_FACTOR, SETTLE_SECONDS
from scheduler_plugin.extender.preempt import ENOUGH_NODES, ENOUGH_SECONDS, LAST_SECONDS, Way, ending_already, hold, renew, way_on, ways
from scheduler_plugin.ports import EventApi, PodApi
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.services.turns import MAX_PASSED, in_turns

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 1.0
HOLD_SECONDS: Final = 30.0
"""How long the pod is expected where others end for it; longer while they end."""
FIRST_PAUSE_SECONDS: Final = 5.0
LAST_PAUSE_SECONDS: Final = 300.0
REFUSED_SECONDS: Final = 60.0
"""How long a pod that the API server did not let end is left alone, so that others are tried in its place."""
MAX_TRIED_NODES: Final = 1000


@dataclass(slots=True)
class _Move:
    """Others end on a node for a pod."""

    node: str
    ended: frozenset[str]
    gpu_node: GpuNode | None = None
    """The node when the place was last found to be there."""
    freed_count: int = -1
    """The state's, then."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float
    pod_change_count: int
    """The state's when the pod was served."""


class _Outcome(Enum):
    """What became of an eviction."""

    ENDS = auto()
    GONE = auto()
    """It ended by itself."""
    REFUSED = auto()
    """Its budget or somebody else refused, or the outcome is open."""


class Preemptor:
    """The loop."""

    def __init__(
        self,
        desk: Desk,
        api: PodApi,
        events: EventApi,
        retry: Callable[[str], Awaitable[None]],
        leads: Callable[[], bool],
        now: Callable[[], float],
        telemetry: Telemetry,
    ) -> None:
        """Args: retry: has kube-scheduler try the pod of a UID again. now: seconds since 1970, as decisions have them."""
        self._desk = desk
        self._api = api
        self._events = events
        self._retry = retry
        self._leads = leads
        self._now = now
        self._telemetry = telemetry
        self._under_way: dict[str, _Move] = {}
        """By the UID of the pod for which others end."""
        self._pauses: dict[str, _Pause] = {}
        self._gang_pauses: dict[tuple[str, str], float] = {}
        """Until when no other member of a gang is served."""
        self._hold_pauses: dict[tuple[str, str], float] = {}
        """Until when the places of a gang are not planned again."""
        self._refused: dict[str, float] = {}
        """Until when the API server is not asked again to end a pod."""

    async def run(self) -> None:
        """Preempt until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """See to the pods that others end for, and serve one more."""
        if not self._leads():
            self._under_way.clear()
            return
        for uid, move in list(self._under_way.items()):
            await self._follow(uid, move)
            await asyncio.sleep(0)
        waiting = self._desk.decisions.waiting()
        await self._keep_nominations(waiting)
        pods = self._desk.state.pods
        self._pauses = {uid: pause for uid, pause in self._pauses.items() if (pod := pods.get(uid)) is not None and not pod.node_name}
        now = self._desk.monotonic()
        self._refused = {uid: until for uid, until in self._refused.items() if until > now}
        self._gang_pauses = {key: until for key, until in self._gang_pauses.items() if until > now}
        self._hold_pauses = {key: until for key, until in self._hold_pauses.items() if until > now}
        decision = await self._next(waiting)
        if decision is not None:
            before = self._pauses.get(decision.pod.uid)
            self._pause(decision.pod, before)
            await self._serve(decision, 0 if before is None else before.pod_change_count)
            self._rest_after(now, decision.pod, self._gang_pauses)

    def look_again(self, uid: str) -> None:
        """End a pod's pause: the end of others may help it where it did not."""
        if (pause := self._pauses.get(uid)) is not None:
            self._pauses[uid] = replace(pause, until=self._desk.monotonic())

    async def _keep_nominations(self, waiting: Sequence[Decision]) -> None:
        """Expect pods where kube-scheduler has others end for them: its own sums keep room on a node for them, and on no GPU."""
        state = self._desk.state
        async for decision in in_turns(waiting, MAX_PASSED):
            pod = state.pods.get(decision.pod.uid)
            if pod is None or not pod.nominated_node or pod.uid in state.reservations:
                continue
            move = _Move(pod.nominated_node, frozenset(ending_already(self._desk, pod.nominated_node)))
            if not self._plans_pause(pod) and self._hold(pod, move, move.ended):
                self._under_way[pod.uid] = move
            await asyncio.sleep(0)

    def _hold(self, pod: PodFacts, move: _Move, ending: Iterable[str]) -> bool:
        """Find a pod's place, and keep it; return whether it is there."""
        state, begun = self._desk.state, self._desk.monotonic()
        move.gpu_node, move.freed_count = state.gpu_node(move.node), state.freed_count
        is_there = hold(self._desk, pod, move.node, ending, begun + HOLD_SECONDS)
        gang = gang_of_pod(pod)
        if gang is not None and not self._desk.gangs.planner.goes_alone(pod, gang):
            self._hold_pauses[gang.key] = begun + PERIOD_SECONDS / 2  # once in a step
            self._rest_after(begun, pod, self._hold_pauses)
        return is_there

    def _keep(self, pod: PodFacts, move: _Move, ending: Collection[str]) -> bool:
        """Keep a pod's place for longer; it is found anew if something changed since. Returns: whether it is there."""
        state, pauses = self._desk.state, self._plans_pause(pod)
        unchanged = bool(ending) and move.gpu_node is state.gpu_node(move.node) and move.freed_count == state.freed_count
        if (unchanged or pauses) and renew(self._desk, pod, move.node, self._desk.monotonic() + HOLD_SECONDS):
            return True
        return bool(ending) if pauses else self._hold(pod, move, ending)

    def _plans_pause(self, pod: PodFacts) -> bool:
        """Whether a pod's gang was planned so recently that its places are not planned again now."""
        gang = gang_of_pod(pod)
        return gang is not None and self._hold_pauses.get(gang.key, 0.0) > self._desk.monotonic()

    def _rest_after(self, begun: float, pod: PodFacts, pauses: dict[tuple[str, str], float]) -> None:
        """Make the pause of a gang as long as what it was planned for since then demands."""
        gang, now = gang_of_pod(pod), self._desk.monotonic()
        if gang is not None and gang.key in pauses:
            pauses[gang.key] = max(pauses[gang.key], now + REST_FACTOR * (now - begun))

    async def _next(self, waiting: Sequence[Decision]) -> Decision | None:
        """Return the most important pod whose turn it is, if there is anybody less important than it."""
        async for decision in in_turns(waiting, MAX_PASSED):
            if self._is_due(decision):
                is_more_important = decision.pod.priority > await self._lowest_priority()
                return decision if is_more_important and self._is_due(decision) else None
        return None

    def _is_due(self, decision: Decision) -> bool:
        uid = decision.pod.uid
        pod, pause = self._desk.state.pods.get(uid), self._pauses.get(uid)
        if self._desk.decisions.queue.get(uid) is not decision:  # it was tried again since
            return False
        if pod is None or pod.node_name or pod.deletion_requested or not pod.preempts:
            return False
        if pod.nominated_node:  # others end for it there
            return False
        if uid in self._desk.state.reservations or decision.asked is None:  # it has a place, or no node can be helped
            return False
        if (gang := gang_of_pod(pod)) is not None and gang.key in self._gang_pauses:
            return False
        return self._now() - decision.at >= SETTLE_SECONDS and (pause is None or pause.until <= self._desk.monotonic())

    async def _lowest_priority(self) -> float:
        pods = in_turns(list(self._desk.state.pods.values()), MAX_PASSED)
        return min([pod.priority async for pod in pods if pod.gpu is not None and pod.node_name], default=inf)

    def _pause(self, pod: PodFacts, before: _Pause | None) -> None:
        now = self._desk.monotonic()
        seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, LAST_PAUSE_SECONDS)
        self._pauses[pod.uid] = _Pause(now + seconds, seconds, self._desk.state.pod_change_count)
        gang = gang_of_pod(pod)
        if gang is not None and not self._desk.gangs.planner.goes_alone(pod, gang):
            self._gang_pauses[gang.key] = now + FIRST_PAUSE_SECONDS

    async def _serve(self, decision: Decision, since: int) -> None:
        """Find the cheapest way to make room for a pod, and go it. Args: since: as for ``_nodes_of``."""
        uid, best, helpful, begun = decision.pod.uid, None, 0, self._desk.monotonic()
        pod = self._desk.state.pods[uid]
        for tried, way in enumerate(ways(self._desk, pod, self._nodes_of(decision, since), self._refused), 1):
            if way is not None:
                helpful += 1
                best = way if best is None or way.cost < best.cost else best
                if not way.ended:
                    break  # those suffice that are ending there already, and nothing costs less
            if helpful == ENOUGH_NODES or tried == MAX_TRIED_NODES:
                break
            if self._desk.monotonic() - begun > (LAST_SECONDS if best is None else ENOUGH_SECONDS):
                break  # the places of those that others end for must be renewed in time
            await asyncio.sleep(0)
        latest, found = self._desk.decisions.by_uid.get(uid), self._desk.state.pods.get(uid)
        if best is None or latest is None or latest.fitting or found is None or found.node_name:
            return
        pod = found
        best = way_on(self._desk, pod, best.node, self._refused)
        if best is None or not self._hold(pod, move := _Move(best.node, best.ended), best.ended):
            return
        move.ended = best.ended or frozenset(uid for uid in ending_already(self._desk, best.node) if self._desk.state.footprint_of(uid))
        if await self._end(best, pod):
            self._under_way[pod.uid] = move
        else:
            self._let_go(pod.uid)

    def _let_go(self, uid: str) -> None:
        """Expect a pod nowhere, unless it is being bound by now."""
        known = self._desk.state.reservations.get(uid)
        if known is not None and not known.stage.is_firm:
            self._desk.state.release(uid)

    def _nodes_of(self, decision: Decision, since: int) -> Iterable[str]:
        """Return the nodes that kube-scheduler asked about and where others' end can help; none when the pod fits on one by now.

        Those come first where pods changed since the pod was last served: not all are tried, and for a gang few.

        Args: since: the state's ``pod_change_count`` then.
        """
        state, asked = self._desk.state, decision.asked
        if asked is None:
            return ()
        rows = asked.rows()
        rows = rows[[state.named_at[row] <= asked.naming for row in rows.tolist()]]
        if gang_of_pod(decision.pod) is None:  # a member may fit by itself on each of them
            verdict = self._desk.verdict_for(decision.pod, self._desk.shape_of(decision.pod, decision.request))
            if (reasons_for(verdict, rows, all_known=True) == NodeReason.FITS.value).any():
                return ()
            rows = rows[curable(verdict, rows)]
        return sorted((state.names[row] for row in rows.tolist()), key=lambda node: state.pods_changed_at(node) <= since)

    async def _end(self, way: Way, pod: PodFacts) -> bool:
        """Evict, one after the other, once it is known that all can be; return whether all will end."""
        state = self._desk.state
        victims = [other for uid in sorted(way.ended) if (other := state.pods.get(uid)) is not None]
        if len(victims) > 1:  # the end of some helps nobody
            for victim in victims:
                if await self._evict(victim, pod, dry_run=True) is _Outcome.REFUSED:
                    return False
        for victim in victims:
            outcome = await self._evict(victim, pod)
            if outcome is _Outcome.REFUSED:
                return False
            if outcome is _Outcome.GONE:
                continue
            name = f"{victim.namespace}/{victim.name}"
            self._telemetry.preempted.inc()
            logger.info("%s ends for a more important pod on %s", name, way.node, extra={"pod": f"{pod.namespace}/{pod.name}"})
            sentence = f"ended on node {way.node} for {pod.namespace}/{pod.name}, which is more important and needs its GPU"
            try:
                await self._events.post_event(victim.namespace, victim.name, victim.uid, contract.EVENT_REASON_PREEMPTED, sentence)
            except KubeApiError as exc:
                logger.warning("an event cannot be written: %s", exc, extra={"pod": name})
        return True

    async def _evict(self, victim: PodFacts, pod: PodFacts, *, dry_run: bool = False) -> _Outcome:
        """Evict one pod, or ask whether it could be; one that cannot is left alone for a while."""
        try:
            await self._api.evict(victim.namespace, victim.name, victim.uid, dry_run=dry_run)
        except (KubeNotFoundError, KubeConflictError):
            return _Outcome.GONE
        except KubeApiError as exc:
            about = {"pod": f"{pod.namespace}/{pod.name}"}
            logger.warning("%s/%s cannot be ended for a more important pod: %s", victim.namespace, victim.name, exc, extra=about)
            self._refused[victim.uid] = self._desk.monotonic() + REFUSED_SECONDS
            return _Outcome.REFUSED
        return _Outcome.ENDS

    async def _follow(self, uid: str, move: _Move) -> None:
        """Keep a pod's place while others end for it, and have it tried again once they are gone."""
        desk, state = self._desk, self._desk.state
        pod, decision = state.pods.get(uid), desk.decisions.by_uid.get(uid)
        left = [other for victim in move.ended if (other := state.pods.get(victim)) is not None]
        ending = [other.uid for other in left if other.is_ending(desk.now()) or not other.deletion_requested]  # the others are stuck
        if pod is None or pod.node_name or (decision is not None and decision.fitting):  # it is gone or bound, or on its way
            del self._under_way[uid]
        elif decision is None and not ending:  # it is being tried already: what is decided then is waited for, as long as its place is kept
            if uid not in state.reservations:
                del self._under_way[uid]
        elif not self._keep(pod, move, ending):  # the node is not what it was
            del self._under_way[uid]
            self._let_go(uid)
        elif not ending:
            del self._under_way[uid]
            await self._retry(uid)
