"""Has pods that wait tried again when others came or changed whose end would make room for them.

A binding frees nothing, so whoever looks for room does not look again, and kube-scheduler retries nobody for it either: a pod that others
could end for from now on would wait until that tries everybody anew, minutes later. So it is when a GPU can be used again on a node that
stays full, and when a disruption budget lets more pods go. Those that wait are gone through, the most important first, and for whom a node
that changed since would be freed, that one is tried again: kube-scheduler then preempts, or ``preemptor`` does where that cannot.

The cost is bounded, not that of a thousand pods for each binding. In a period few nodes are looked at and few pods are tried; of pods that
are alike one at a time, and one for each node. Who was tried in vain pauses longer and longer. What is left over comes next time.

After a restart or a takeover it is not known who was refused. Of those that wait without a decision each is tried once that is more
important than somebody who runs.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

from proto.model import PodRequest
from scheduler_plugin.core.decisions import Decision, Queue
from scheduler_plugin.core.gang import gang_of_pod
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.preempt import would_help
from scheduler_plugin.services.turns import MAX_PASSED, in_turns

PERIOD_SECONDS: Final = 1.0
MAX_TRIED: Final = 4
"""Pods tried again in a period: each costs a patch and a scheduling attempt, and as a rule somebody's end."""
MAX_LOOKED: Final = 100
"""Nodes looked at in a period, once for each kind of pods: a tenth of a second."""
FIRST_PAUSE_SECONDS: Final = 5.0
LAST_PAUSE_SECONDS: Final = 60.0
"""Between two tries of pods that are alike; after twice as long without one they begin anew."""

_Kind: TypeAlias = tuple[object, int, PodRequest]
"""Whose pods are alike, their gang's, their controller's, or one pod's by itself; their priority, and what they ask for."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float


@dataclass(slots=True)
class _Look:
    """What one period does."""

    count: int
    """The state's ``pod_change_count`` when it began."""
    nodes: list[str]
    """Those that changed, the latest last."""
    changed_at: list[int]
    """When each did."""
    looks_left: int = MAX_LOOKED
    tries_left: int = MAX_TRIED
    kinds: set[_Kind] = field(default_factory=set)
    """Of the pods gone through."""
    taken: set[str] = field(default_factory=set)
    """Nodes for which a pod is tried."""
    is_complete: bool = True
    """Whether nothing is left for the next one."""


class NewVictims:
    """The loop."""

    def __init__(
        self,
        desk: Desk,
        retry: Callable[[str], Awaitable[None]],
        undecided: Callable[[], Queue],
        look_again: Callable[[str], None],
        leads: Callable[[], bool],
    ) -> None:
        """Take whom to ask.

        Args: retry: has kube-scheduler try the pod of a UID. undecided: those without a decision. look_again: ends ``preemptor``'s pause.
        """
        self._desk = desk
        self._retry = retry
        self._undecided = undecided
        self._look_again = look_again
        self._leads = leads
        self._done = 0
        """The ``pod_change_count`` up to which nothing is left to be looked at, for whichever pod."""
        self._looked: dict[_Kind, int] = {}
        """The same for one kind, where that is further."""
        self._pauses: dict[_Kind, _Pause] = {}
        self._least: dict[str, tuple[int, float]] = {}
        """When a node's pods changed, and the priority of the least important one that can be ended there then."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        state, now = self._desk.state, self._desk.monotonic()
        if not self._leads():
            self._done = state.pod_change_count
            self._looked.clear()
            return
        self._pauses = {kind: pause for kind, pause in self._pauses.items() if pause.until + pause.seconds > now}
        await self._note_loosened_budgets()
        look, waiting = _Look(state.pod_change_count, [], []), self._desk.decisions.waiting()
        await self._try_undecided(look)
        if waiting and look.count != self._done:
            look.nodes = state.pods_changed_since(self._done)
            look.changed_at = [state.pods_changed_at(node) for node in look.nodes]
            await self._try_helped(waiting, look)
            self._looked = {kind: at for kind, at in self._looked.items() if kind in look.kinds or kind in self._pauses}
        if look.is_complete:
            self._done = look.count
            self._looked.clear()

    async def _note_loosened_budgets(self) -> None:
        """Count a node as changed where a budget that covers a pod lets more go than before."""
        loosened, state = self._desk.budgets.take_loosened(), self._desk.state
        if not loosened or not len(self._desk.decisions.queue):
            return
        async for pod in in_turns(list(state.pods.values()), MAX_PASSED):
            if pod.gpu is not None and pod.node_name and any(budget.counts(pod) for budget in loosened):
                state.note_pods_changed(pod.node_name)

    async def _try_undecided(self, look: _Look) -> None:
        """Try pods without a decision; what comes of it is seen as of all others."""
        undecided, gangs = self._undecided(), set[tuple[str, str]]()
        if not len(undecided):
            return
        pods, decided = self._desk.state.pods, self._desk.decisions.by_uid
        least = min([await self._least_on(gpu.name) for gpu in list(self._desk.state.gpu_nodes())], default=inf)
        for decision in undecided.and_then(Queue()):
            pod = pods.get(decision.pod.uid)
            if decision.pod.priority <= least or not look.tries_left:
                return
            if pod is None or not _may_preempt(pod):
                continue
            if (gang := gang_of_pod(pod)) is not None:
                if gang.key in gangs or any(other.uid in decided for other in self._desk.state.gang_members(gang.key)):
                    continue  # one of its members is enough
                gangs.add(gang.key)
            look.tries_left -= 1
            await self._retry(pod.uid)

    async def _try_helped(self, waiting: list[Decision], look: _Look) -> None:
        """Try those that wait and that a changed node would be freed for."""
        least = min([await self._least_on(node) for node in look.nodes], default=inf)
        async for decision in in_turns(waiting, MAX_PASSED):
            pod = self._desk.state.pods.get(decision.pod.uid)
            if decision.pod.priority <= least:
                return
            if pod is None or self._desk.decisions.queue.get(pod.uid) is not decision or not self._is_alone(pod):
                continue
            gang = gang_of_pod(pod)
            kind = (gang.key if gang is not None else pod.controller_uid or pod.uid, pod.priority, decision.request)
            if kind in look.kinds:
                continue
            look.kinds.add(kind)
            if not look.tries_left or not look.looks_left:
                look.is_complete = False
                return
            pause = self._pauses.get(kind)
            if (pause is not None and pause.until > self._desk.monotonic()) or (gang is not None and not self._desk.gangs.may_search(gang)):
                look.is_complete = False
            elif await self._is_helped(pod, kind, look):
                self._pause(kind, pause)
                self._looked[kind] = look.count
                look.tries_left -= 1
                self._look_again(pod.uid)
                await self._retry(pod.uid)

    def _is_alone(self, pod: PodFacts) -> bool:
        """Whether others may end for a pod, and none do yet."""
        return _may_preempt(pod) and not pod.nominated_node and pod.uid not in self._desk.state.reservations

    async def _is_helped(self, pod: PodFacts, kind: _Kind, look: _Look) -> bool:
        """Whether others' end on a node that changed would make room for a pod; the node is taken for it then."""
        goes_on = True
        for position in range(bisect_right(look.changed_at, self._looked.get(kind, self._done)), len(look.nodes)):
            node = look.nodes[position]
            if node in look.taken:
                look.is_complete = goes_on = False  # it may be for this one next time
                continue
            if await self._least_on(node) < pod.priority:
                if not look.looks_left:
                    look.is_complete = False
                    return False
                look.looks_left -= 1
                await asyncio.sleep(0)
                if would_help(self._desk, pod, node):
                    look.taken.add(node)
                    return True
            if goes_on:
                self._looked[kind] = look.changed_at[position]
        return False

    async def _least_on(self, node: str) -> float:
        """Return the priority of the least important pod that can be ended on a node."""
        state = self._desk.state
        changed_at = state.pods_changed_at(node)
        known = self._least.get(node)
        if known is None or known[0] != changed_at:
            await asyncio.sleep(0)
            bound = (pod.priority for pod in state.pods_on(node) if pod.gpu is not None and not pod.deletion_requested)
            known = self._least[node] = changed_at, min(bound, default=inf)
        return known[1]

    def _pause(self, kind: _Kind, before: _Pause | None) -> None:
        seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, LAST_PAUSE_SECONDS)
        self._pauses[kind] = _Pause(self._desk.monotonic() + seconds, seconds)


def _may_preempt(pod: PodFacts) -> bool:
    return pod.preempts and not pod.node_name and not pod.deletion_requested
