# SPDX-License-Identifier: Apache-2.0
"""Evicts less important pods for a pod that lacks only the right GPU. kube-scheduler's own preemption cannot see that case.

kube-scheduler adds up what a node has. If enough is free in sum but on no single GPU, it finds no victim and calls no extender (1.36 and
before). A node in a ``filter`` call has passed kube-scheduler's own filters, so the pod lacks only GPUs there. A while after all these
nodes were refused, when kube-scheduler has had time to preempt, the cheapest pods on one of them are evicted. The rules are those of
``extender.preempt``, except that no disruption budget is exceeded. The pod gets a reservation there until they are gone, so no other pod
takes what becomes free.

If kube-scheduler does preempt, it nominates a node. The pod gets a reservation there in the same way, because kube-scheduler's sums would
let a less important pod take that very GPU.

Evictions are few: one pod is served in a period, and waits longer after each attempt that does not help it. To serve a member of a gang
that does not run takes as long as to plan the whole gang, and so does to keep its place. So members are not served right after each other,
and long work is repeated only after several times as long. While nothing changes, reservations are only renewed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from aliquot.contract.gpunode import GpuNode
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.durations import may_preempt_from
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.fit.judge import curable, reasons_for
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH, in_batches, in_steps
from scheduler_plugin.extender.gang_backoff import REST_FACTOR, SETTLE_SECONDS, Key
from scheduler_plugin.extender.gang_evictions import plan_over_nodes
from scheduler_plugin.extender.preempt import (
    ENOUGH_NODES,
    ENOUGH_SECONDS,
    LAST_SECONDS,
    EvictionPlan,
    ending_already,
    eviction_plans,
    members_with,
    plan_eviction,
    renew_room,
    reserve_room,
)
from scheduler_plugin.ports import EventApi, PodApi
from scheduler_plugin.services.evictions import Evictions
from scheduler_plugin.services.telemetry import Telemetry

PERIOD_SECONDS: Final = 1.0
HOLD_SECONDS: Final = 30.0
"""How long the pod's reservation lasts; it is renewed while its victims end."""
FIRST_PAUSE_SECONDS: Final = 5.0
LAST_PAUSE_SECONDS: Final = 300.0
COUNTED_SECONDS: Final = 60.0
"""More than the watch takes to report what an eviction changed in a disruption budget."""
MAX_TRIED_NODES: Final = 1000


@dataclass(slots=True)
class _Move:
    """Pods end on a node for another pod."""

    node: str
    ended: frozenset[str]
    """UIDs of the pods that end."""
    gpu_node: GpuNode | None = None
    """The node when the reservation was last planned."""
    freed_count: int = -1
    """The state's ``freed_count`` at that time."""


@dataclass(frozen=True, slots=True)
class _Pause:
    """The time before a pod is served again."""

    until: float
    seconds: float
    pod_change_count: int
    """The state's when the pod was served."""


@dataclass(slots=True)
class _GangPauses:
    """Until when gangs rest, by gang."""

    serving: dict[Key, float] = field(default_factory=dict)
    """No other member is served before."""
    planning: dict[Key, float] = field(default_factory=dict)
    """The places of the gang are not planned again before."""

    def expire(self, now: float) -> None:
        """Drop what is over."""
        self.serving = {key: until for key, until in self.serving.items() if until > now}
        self.planning = {key: until for key, until in self.planning.items() if until > now}


class Preemptor:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        api: PodApi,
        events: EventApi,
        retry: Callable[[str], Awaitable[None]],
        leads: Callable[[], bool],
        telemetry: Telemetry,
    ) -> None:
        """Args: retry: makes kube-scheduler retry the pod of a UID. leads: whether this replica decides."""
        self._context = context
        self._evictions = Evictions(api, events, context, telemetry, self._note_granted)
        self._retry = retry
        self._leads = leads
        self._under_way: dict[str, _Move] = {}
        """By the UID of the pod for which others end."""
        self._pauses: dict[str, _Pause] = {}
        """By pod UID."""
        self._gang_pauses = _GangPauses()
        self._served_decision = False
        """Whether the last step served a decision."""

    async def run(self) -> None:
        """Preempt until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Follow the moves under way, and serve one more pod."""
        self._context.budgets.expire_counted(self._context.clock.monotonic())
        if not self._leads():
            self._under_way.clear()
            return
        for uid, move in list(self._under_way.items()):
            await self._follow(uid, move)
            await asyncio.sleep(0)
        waiting = self._context.decisions.waiting()
        await self._keep_nominations(waiting)
        begun = self._context.clock.monotonic()
        self._expire_pauses(begun)
        decision = await self._next(waiting)
        # In turns: with many waiting pods there is a decision in every step.
        is_others_turn = decision is None or self._served_decision
        if (is_others_turn and await self._serve_others(begun)) or decision is None:
            self._served_decision = False
            return
        self._served_decision = True
        before = self._pauses.get(decision.pod.uid)
        self._pause(decision.pod, before)
        await self._serve(decision, 0 if before is None else before.pod_change_count)
        self._rest_after(begun, decision.pod, self._gang_pauses.serving)

    def look_again(self, uid: str) -> None:
        """End a pod's pause, because other victims may help it now."""
        if (pause := self._pauses.get(uid)) is not None:
            self._pauses[uid] = replace(pause, until=self._context.clock.monotonic())

    # --- moves under way ---

    async def _follow(self, uid: str, move: _Move) -> None:
        """Keep a pod's reservation while its victims end, and have it retried once they are gone."""
        context = self._context
        pod, decision = context.state.pods.get(uid), context.decisions.by_uid.get(uid)
        ending = self._ending(move)
        if pod is None or pod.node_name or (decision is not None and decision.fitting):  # it is gone, bound or being bound
            del self._under_way[uid]
        elif decision is None and not ending:  # it is being retried: wait for the decision while the reservation lasts
            if uid not in context.state.reservations:
                del self._under_way[uid]
        elif not self._keep(pod, move, ending):  # the node has changed
            del self._under_way[uid]
            self._release(uid)
        elif not ending:
            del self._under_way[uid]
            await self._retry(uid)

    def _ending(self, move: _Move) -> list[str]:
        """Return the UIDs of victims that are still to end. Pods that are stuck beyond their grace period do not count."""
        state, now = self._context.state, self._context.clock.now()
        left = [pod for victim in move.ended if (pod := state.pods.get(victim)) is not None]
        return [pod.uid for pod in left if pod.is_ending(now) or not pod.deletion_requested]

    async def _keep_nominations(self, waiting: Sequence[Decision]) -> None:
        """Reserve GPUs on nominated nodes: kube-scheduler's own sums keep room on the node, but on no particular GPU."""
        state = self._context.state
        async for decision in in_batches(waiting, MAX_PER_BATCH):
            pod = state.pods.get(decision.pod.uid)
            if pod is None or not pod.nominated_node or pod.uid in state.reservations:
                continue
            move = _Move(pod.nominated_node, frozenset(ending_already(self._context, pod.nominated_node)))
            if not self._planning_pauses(pod) and self._hold(pod, move, move.ended):
                self._under_way[pod.uid] = move
            await asyncio.sleep(0)

    def _hold(self, pod: PodFacts, move: _Move, ending: Iterable[str]) -> bool:
        """Plan a pod's place and reserve it. Returns: whether there is one."""
        state, begun = self._context.state, self._context.clock.monotonic()
        move.gpu_node, move.freed_count = state.gpu_node(move.node), state.freed_count
        is_there = reserve_room(self._context, pod, move.node, ending, begun + HOLD_SECONDS)
        gang = gang_of_pod(pod)
        if gang is not None and not self._context.gangs.planner.need_not_wait(pod, gang):
            self._gang_pauses.planning[gang.key] = begun + PERIOD_SECONDS / 2  # once in a step
            self._rest_after(begun, pod, self._gang_pauses.planning)
        return is_there

    def _keep(self, pod: PodFacts, move: _Move, ending: Collection[str]) -> bool:
        """Renew a pod's reservation, or plan it again if something changed. Returns: whether there is a place."""
        state, pauses = self._context.state, self._planning_pauses(pod)
        unchanged = bool(ending) and move.gpu_node is state.gpu_node(move.node) and move.freed_count == state.freed_count
        until = self._context.clock.monotonic() + HOLD_SECONDS
        if (unchanged or pauses) and renew_room(self._context, pod, move.node, until):
            return True
        return bool(ending) if pauses else self._hold(pod, move, ending)

    def _release(self, uid: str) -> None:
        """Release a pod's reservation, unless the pod is being bound."""
        known = self._context.state.reservations.get(uid)
        if known is not None and not known.stage.is_firm:
            self._context.state.release(uid)

    # --- pauses ---

    def _expire_pauses(self, now: float) -> None:
        pods = self._context.state.pods
        self._pauses = {uid: pause for uid, pause in self._pauses.items() if (pod := pods.get(uid)) is not None and not pod.node_name}
        self._evictions.expire()
        self._gang_pauses.expire(now)

    def _pause(self, pod: PodFacts, before: _Pause | None) -> None:
        now = self._context.clock.monotonic()
        seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, LAST_PAUSE_SECONDS)
        self._pauses[pod.uid] = _Pause(now + seconds, seconds, self._context.state.pod_change_count)
        gang = gang_of_pod(pod)
        if gang is not None and not self._context.gangs.planner.need_not_wait(pod, gang):
            self._gang_pauses.serving[gang.key] = now + FIRST_PAUSE_SECONDS

    def _planning_pauses(self, pod: PodFacts) -> bool:
        """Whether a pod's gang was planned so recently that it is not planned again now."""
        gang = gang_of_pod(pod)
        return gang is not None and self._gang_pauses.planning.get(gang.key, 0.0) > self._context.clock.monotonic()

    def _rest_after(self, begun: float, pod: PodFacts, pauses: dict[Key, float]) -> None:
        """Extend the pause of a gang to REST_FACTOR times the work since ``begun``."""
        gang, now = gang_of_pod(pod), self._context.clock.monotonic()
        if gang is not None and gang.key in pauses:
            pauses[gang.key] = max(pauses[gang.key], now + REST_FACTOR * (now - begun))

    # --- the next pod ---

    async def _next(self, waiting: Sequence[Decision]) -> Decision | None:
        """Return the most important pod that is due, if a less important pod is bound somewhere."""
        async for decision in in_batches(waiting, MAX_PER_BATCH):
            if self._is_due(decision):
                is_more_important = decision.pod.priority > await self._lowest_priority()
                return decision if is_more_important and self._is_due(decision) else None
        return None

    def _is_due(self, decision: Decision) -> bool:
        """Whether a pod may be served now."""
        uid = decision.pod.uid
        pod, pause = self._context.state.pods.get(uid), self._pauses.get(uid)
        if pod is None or not self._lacks_victims(decision, pod):
            return False
        if (gang := gang_of_pod(pod)) is not None and gang.key in self._gang_pauses.serving:
            return False
        if pause is not None and pause.until > self._context.clock.monotonic():
            return False
        return self._context.clock.now() - decision.at >= SETTLE_SECONDS

    def _lacks_victims(self, decision: Decision, pod: PodFacts) -> bool:
        """Whether a pod waits, may preempt, and no pod ends for it yet."""
        uid = pod.uid
        if self._context.decisions.queue.get(uid) is not decision:  # it was retried since
            return False
        # Nodes unknown: there is no node to free.
        return self._may_be_helped(pod) and decision.asked is not None and may_preempt_from(pod) <= self._context.clock.now()

    async def _lowest_priority(self) -> float:
        """Return the lowest priority of the bound pods that may hold GPUs, by resources or by claims; infinity without one."""
        pods = in_batches(list(self._context.state.pods.values()), MAX_PER_BATCH)
        return min([self._context.cost_of(pod) async for pod in pods if (pod.gpu is not None or pod.claims) and pod.node_name], default=inf)

    async def make_room_of_idle(self, pod: PodFacts, nodes: Iterable[str]) -> bool:
        """End the cheapest idle pods on one of these nodes for a pod that needs only them to end; return whether pods end.

        For a pod that kube-scheduler's own filters refuse everywhere: it calls no filter then, so there is no decision on the pod.
        """
        best = await self._best_of(pod.uid, nodes, self._context.clock.monotonic(), among=self._context.idle)
        waiting = self._context.state.pods.get(pod.uid)
        if best is None or waiting is None or not self._may_be_helped(waiting):
            return False
        await self._carry_out(best, waiting)
        return waiting.uid in self._under_way

    # --- serving it ---

    async def _serve(self, decision: Decision, since: int) -> None:
        """Make room for a pod in the cheapest way, if there is one. Args: since: as for ``_nodes_of``."""
        best = await self._best_plan(decision, since)
        over_nodes = await self._plan_over_nodes(decision) if best is None or best.ended else None
        pod = self._still_waiting(decision.pod.uid)
        if pod is None:
            return
        # Plan one node again: the state may have changed since. A plan over several nodes is checked when the room is reserved.
        plan = None if best is None else plan_eviction(self._context, pod, best.node, self._evictions.refused)
        plan = min((one for one in (plan, over_nodes) if one is not None), key=lambda one: one.cost, default=None)
        if plan is not None:
            await self._carry_out(plan, pod)

    async def _serve_others(self, begun: float) -> bool:
        """Serve pods without a decision; return whether there were any. Then a decision may be old: others may end for its pod."""
        served = await self._serve_unhelped(begun)
        return await self._serve_put_off() or served

    async def _serve_unhelped(self, begun: float) -> bool:
        """Make room on several nodes for a member of a gang that kube-scheduler's own filters refuse everywhere, for lack of room in sum.

        kube-scheduler then calls preempt and no filter, so there is no decision on the pod. Returns: whether a member was served.
        """
        unhelped = self._context.gangs.unhelped
        for uid, nodes in list(unhelped.items()):
            pod = self._context.state.pods.get(uid)
            if pod is None or not self._may_be_helped(pod):
                del unhelped[uid]
            elif not self._rests(pod, begun):
                self._pause(pod, self._pauses.get(uid))
                plan = await in_steps(plan_over_nodes(self._context, pod, nodes, self._evictions.refused))
                if plan is not None and plan.ended and self._may_be_helped(pod):
                    await self._carry_out(plan, pod)
                self._rest_after(begun, pod, self._gang_pauses.serving)
                return True
        return False

    async def _serve_put_off(self) -> bool:
        """Make room for pods for which others may end now, but could not when kube-scheduler proposed it.

        Pods that must start together are served above. Returns: whether pods were due; those for which the time is over are tried later.
        """
        pods, begun = self._context.state.pods, self._context.clock.monotonic()
        due = self._context.put_off.take_due(self._context.clock.now())
        for uid in sorted(due.keys() & pods.keys(), key=lambda uid: -pods[uid].priority):
            if self._is_late(begun):
                self._context.put_off.at_once(uid, due[uid])
                continue
            best = await self._best_of(uid, due[uid][:MAX_TRIED_NODES], begun)
            if best is not None and (waiting := self._context.state.pods.get(uid)) is not None:
                await self._carry_out(best, waiting)
        return bool(due)

    async def _best_of(self, uid: str, nodes: Iterable[str], begun: float, among: AbstractSet[str] | None = None) -> EvictionPlan | None:
        """Return the cheapest plan for a pod that starts alone, as far as the time suffices; None if no pod may end for it.

        Args: among: UIDs of the only pods that may end; None: all that may by the rules of preemption.
        """
        best: EvictionPlan | None = None
        for node in nodes:
            await asyncio.sleep(0)
            pod = self._context.state.pods.get(uid)
            if pod is None or not self._may_be_helped(pod) or len(members_with(self._context, pod)) != 1:
                return None
            plan = self._plan_among(pod, node, among)
            if plan is not None and (best is None or plan.cost < best.cost):
                best = plan
            if self._is_late(begun, found=best is not None):
                break
        return best

    def _plan_among(self, pod: PodFacts, node: str, among: AbstractSet[str] | None) -> EvictionPlan | None:
        """Return a plan that ends pods, and only those of ``among``."""
        plan = plan_eviction(self._context, pod, node, self._evictions.refused)
        return plan if plan is not None and plan.ended and (among is None or plan.ended <= among) else None

    def _is_late(self, begun: float, *, found: bool = False) -> bool:
        """Whether a search that began then ends now: reservations of moves under way must be renewed in time.

        Args: found: whether there is a plan.
        """
        return self._context.clock.monotonic() - begun > (ENOUGH_SECONDS if found else LAST_SECONDS)

    def _may_be_helped(self, pod: PodFacts) -> bool:
        """Whether a pod waits, may preempt, and no pod ends for it yet."""
        if pod.node_name or pod.deletion_requested or not pod.preempts:
            return False
        # A nominated node: pods end for it there. A reservation: it has a place.
        return not (pod.nominated_node or pod.uid in self._context.state.reservations)

    def _rests(self, pod: PodFacts, now: float) -> bool:
        """Whether a pod or its gang was served so recently that it is not served again now, or has not waited for its delay."""
        gang, pause = gang_of_pod(pod), self._pauses.get(pod.uid)
        if (pause is not None and pause.until > now) or may_preempt_from(pod) > self._context.clock.now():
            return True
        return gang is not None and gang.key in self._gang_pauses.serving

    async def _carry_out(self, plan: EvictionPlan, pod: PodFacts) -> None:
        """Keep the room of a plan for a pod, and evict the pods that must end."""
        move = _Move(plan.node, plan.ended)
        if not self._hold(pod, move, plan.ended):
            return
        if not plan.ended:
            pods, holds = self._context.state.pods, self._context.claims.holds
            move.ended = frozenset(uid for uid in ending_already(self._context, plan.node) if holds.footprint_of(pods[uid]))
        if await self._end(plan, pod):
            self._under_way[pod.uid] = move
        else:
            self._release(pod.uid)

    async def _best_plan(self, decision: Decision, since: int) -> EvictionPlan | None:
        """Search the nodes for the cheapest plan; calls are served between two nodes."""
        best: EvictionPlan | None = None
        helpful, begun = 0, self._context.clock.monotonic()
        pod = self._context.state.pods[decision.pod.uid]
        plans = eviction_plans(self._context, pod, self._nodes_of(decision, since), self._evictions.refused)
        for tried, plan in enumerate(plans, 1):
            if plan is not None:
                helpful += 1
                best = plan if best is None or plan.cost < best.cost else best
                if not plan.ended:
                    break  # pods that are ending already make enough room, and no plan costs less
            if helpful == ENOUGH_NODES or tried == MAX_TRIED_NODES or self._is_late(begun, found=best is not None):
                break
            await asyncio.sleep(0)
        return best

    async def _plan_over_nodes(self, decision: Decision) -> EvictionPlan | None:
        """Search victims on several nodes for a gang; calls are served between two tries.

        The nodes of the filter call can be outdated: kube-scheduler calls no filter once its own filters refuse all nodes.
        """
        pod, proposed = self._still_waiting(decision.pod.uid), self._context.gangs.unhelped.get(decision.pod.uid, frozenset())
        nodes = proposed.union(self._nodes_of(decision, 0))
        if pod is None or gang_of_pod(pod) is None:
            return None
        return await in_steps(plan_over_nodes(self._context, pod, nodes, self._evictions.refused))

    def _still_waiting(self, uid: str) -> PodFacts | None:
        """Return a pod as it is now, if it still fits on no node and is not bound."""
        latest, pod = self._context.decisions.by_uid.get(uid), self._context.state.pods.get(uid)
        if latest is None or latest.fitting or pod is None or pod.node_name:
            return None
        return pod

    def _nodes_of(self, decision: Decision, since: int) -> Iterable[str]:
        """Return the nodes of the filter call where ending pods can help; no node if the pod fits on one by now.

        Nodes with pods that changed since the pod was last served come first: not all are tried, and for a gang few.

        Args: since: the state's ``pod_change_count`` at that time.
        """
        state, asked = self._context.state, decision.asked
        if asked is None:
            return ()
        rows = asked.rows()
        rows = rows[[state.named_at[row] <= asked.naming for row in rows.tolist()]]
        if gang_of_pod(decision.pod) is None:  # a member of a gang may fit by itself on each of them
            verdicts = self._context.verdicts
            verdict = verdicts.of(decision.pod, verdicts.shape_of(decision.pod, decision.request))
            if (reasons_for(verdict, rows, all_known=True) == NodeReason.FITS.value).any():
                return ()
            rows = rows[curable(verdict, rows)]
        return sorted((state.names[row] for row in rows.tolist()), key=lambda node: state.pods_changed_at(node) <= since)

    def _note_granted(self, victim: PodFacts) -> None:
        """Count a pod as ending, and in its budgets, before the watch reports it: the next plan may be made earlier."""
        self._context.budgets.count_eviction(victim, self._context.clock.monotonic() + COUNTED_SECONDS)
        pod = self._context.state.pods.get(victim.uid)
        if pod is not None and not pod.deletion_requested:
            self._context.state.set_pod(replace(pod, deletion_requested=True))

    async def _end(self, plan: EvictionPlan, pod: PodFacts) -> bool:
        victims = [victim for uid in sorted(plan.ended) if (victim := self._context.state.pods.get(uid)) is not None]
        return await self._evictions.evict_all(victims, pod)
