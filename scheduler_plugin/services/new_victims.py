# SPDX-License-Identifier: Apache-2.0
"""Has waiting pods retried when other pods came or changed that could end for them.

A binding frees nothing, so no other part looks for room then, and kube-scheduler retries no pod for it either. Without this loop a pod that
others could end for from now on would wait until kube-scheduler retries all pods, minutes later. The same holds when a GPU becomes usable
again on a node that stays full, and when a disruption budget allows more evictions. Waiting pods are checked, the most important first. If
freeing a node that changed since would help a pod, the pod is retried: kube-scheduler then preempts, or ``preemptor`` does if
kube-scheduler cannot.

The cost is bounded: it is not that of a thousand pods for each binding. In a period few nodes are checked and few pods are retried; of
equal pods one at a time, and one for each node. After each retry without effect the pause gets longer. The rest comes in the next period.

After a restart or a takeover it is unknown which pods were refused. Each pod that waits without a decision is retried once if it is more
important than a running pod.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

from aliquot.contract.model import PodRequest
from scheduler_plugin.core.cluster.decisions import Decision, Queue
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH, in_batches
from scheduler_plugin.extender.gang_backoff import Key
from scheduler_plugin.extender.preempt import would_help

PERIOD_SECONDS: Final = 1.0
MAX_TRIED: Final = 4
"""Pods retried in a period: each costs a patch and a scheduling attempt, and usually ends a pod."""
MAX_LOOKED: Final = 100
"""Nodes checked in a period, once for each kind of pods: a tenth of a second."""
FIRST_PAUSE_SECONDS: Final = 5.0
LAST_PAUSE_SECONDS: Final = 60.0
"""Between two retries of equal pods; after twice as long without a retry the pause starts short again."""

_Kind: TypeAlias = tuple[object, int, PodRequest]
"""Equal pods: their gang, their controller, or the pod itself; their priority, and their request."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float


@dataclass(slots=True)
class _Look:
    """The work of one period."""

    count: int
    """The state's ``pod_change_count`` at its beginning."""
    nodes: list[str]
    """Nodes that changed, the latest last."""
    changed_at: list[int]
    """When each of them changed."""
    looks_left: int = MAX_LOOKED
    tries_left: int = MAX_TRIED
    kinds: set[_Kind] = field(default_factory=set)
    """The kinds of the pods checked so far."""
    taken: set[str] = field(default_factory=set)
    """Nodes for which a pod is retried."""
    is_complete: bool = True
    """Whether no work is left for the next period."""


class NewVictims:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        retry: Callable[[str], Awaitable[None]],
        undecided: Callable[[], Queue],
        look_again: Callable[[str], None],
        leads: Callable[[], bool],
    ) -> None:
        """Args: retry: makes kube-scheduler retry a pod. undecided: pods without a decision. look_again: ends a pause of ``preemptor``."""
        self._context = context
        self._retry = retry
        self._undecided = undecided
        self._look_again = look_again
        self._leads = leads
        self._done = 0
        """The ``pod_change_count`` up to which all nodes were checked for all pods."""
        self._looked: dict[_Kind, int] = {}
        """The same for one kind, if it is further."""
        self._pauses: dict[_Kind, _Pause] = {}
        self._least: dict[str, tuple[int, float]] = {}
        """By node, when its pods changed, and the lowest priority of the pods that can end there."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        state, now = self._context.state, self._context.clock.monotonic()
        if not self._leads():
            self._done = state.pod_change_count
            self._looked.clear()
            return
        self._pauses = {kind: pause for kind, pause in self._pauses.items() if pause.until + pause.seconds > now}
        await self._note_loosened_budgets()
        look, waiting = _Look(state.pod_change_count, [], []), self._context.decisions.waiting()
        await self._try_undecided(look)
        if waiting and look.count != self._done:
            await self._check_changed_nodes(waiting, look)
        if look.is_complete:
            self._done = look.count
            self._looked.clear()

    async def _check_changed_nodes(self, waiting: list[Decision], look: _Look) -> None:
        state = self._context.state
        look.nodes = state.pods_changed_since(self._done)
        look.changed_at = [state.pods_changed_at(node) for node in look.nodes]
        await self._try_helped(waiting, look)
        self._looked = {kind: at for kind, at in self._looked.items() if kind in look.kinds or kind in self._pauses}

    async def _note_loosened_budgets(self) -> None:
        """Count a node as changed if a budget of one of its pods allows more evictions than before."""
        loosened, state = self._context.budgets.take_loosened(), self._context.state
        if not loosened or not len(self._context.decisions.queue):
            return
        async for pod in in_batches(list(state.pods.values()), MAX_PER_BATCH):
            if pod.gpu is not None and pod.node_name and any(budget.counts(pod) for budget in loosened):
                state.note_pods_changed(pod.node_name)

    async def _try_undecided(self, look: _Look) -> None:
        """Retry pods without a decision. The result is seen like that of all other pods."""
        undecided, gangs = self._undecided(), set[Key]()
        if not len(undecided):
            return
        least = min([await self._least_on(gpu.name) for gpu in list(self._context.state.gpu_nodes())], default=inf)
        for decision in undecided.and_then(Queue()):
            if decision.pod.priority <= least or not look.tries_left:
                return
            pod = self._context.state.pods.get(decision.pod.uid)
            if pod is None or not _may_preempt(pod) or not self._is_first_of_gang(pod, gangs):
                continue
            look.tries_left -= 1
            await self._retry(pod.uid)

    def _is_first_of_gang(self, pod: PodFacts, gangs: set[Key]) -> bool:
        """Whether no member of a pod's gang has a decision or was retried yet: one of them is enough. Args: gangs: added to."""
        gang = gang_of_pod(pod)
        if gang is None:
            return True
        decided = self._context.decisions.by_uid
        if gang.key in gangs or any(other.uid in decided for other in self._context.state.gang_members(gang.key)):
            return False
        gangs.add(gang.key)
        return True

    async def _try_helped(self, waiting: list[Decision], look: _Look) -> None:
        """Retry waiting pods that a changed node could be freed for."""
        least = min([await self._least_on(node) for node in look.nodes], default=inf)
        async for decision in in_batches(waiting, MAX_PER_BATCH):
            if decision.pod.priority <= least:
                return
            pod = self._context.state.pods.get(decision.pod.uid)
            if pod is None or not self._lacks_victims(decision, pod):
                continue
            kind = _kind_of(pod, decision.request)
            if kind in look.kinds:
                continue
            look.kinds.add(kind)
            if not look.tries_left or not look.looks_left:
                look.is_complete = False
                return
            await self._try_kind(pod, kind, look)

    async def _try_kind(self, pod: PodFacts, kind: _Kind, look: _Look) -> None:
        """Retry a pod if ending pods on a changed node would help it, unless its kind pauses."""
        pause, gang = self._pauses.get(kind), gang_of_pod(pod)
        pauses = pause is not None and pause.until > self._context.clock.monotonic()
        if pauses or (gang is not None and not self._context.gangs.may_search(gang)):
            look.is_complete = False
        elif await self._is_helped(pod, kind, look):
            self._pause(kind, pause)
            self._looked[kind] = look.count
            look.tries_left -= 1
            self._look_again(pod.uid)
            await self._retry(pod.uid)

    def _lacks_victims(self, decision: Decision, pod: PodFacts) -> bool:
        """Whether a decision is current, and pods may end for its pod but do not yet."""
        if self._context.decisions.queue.get(pod.uid) is not decision:
            return False
        return _may_preempt(pod) and not pod.nominated_node and pod.uid not in self._context.state.reservations

    async def _is_helped(self, pod: PodFacts, kind: _Kind, look: _Look) -> bool:
        """Whether ending pods on a changed node would make room for a pod; that node then counts as used in this period."""
        goes_on = True
        for position in range(bisect_right(look.changed_at, self._looked.get(kind, self._done)), len(look.nodes)):
            node = look.nodes[position]
            if node in look.taken:
                look.is_complete = goes_on = False  # the node may help this pod in the next period
                continue
            if await self._least_on(node) < pod.priority:
                if not look.looks_left:
                    look.is_complete = False
                    return False
                look.looks_left -= 1
                await asyncio.sleep(0)
                if would_help(self._context, pod, node):
                    look.taken.add(node)
                    return True
            if goes_on:
                self._looked[kind] = look.changed_at[position]
        return False

    async def _least_on(self, node: str) -> float:
        """Return the lowest priority of the pods that can end on a node."""
        state = self._context.state
        changed_at = state.pods_changed_at(node)
        known = self._least.get(node)
        if known is None or known[0] != changed_at:
            await asyncio.sleep(0)
            bound = (self._context.cost_of(pod) for pod in state.pods_on(node) if pod.gpu is not None and not pod.deletion_requested)
            known = self._least[node] = changed_at, min(bound, default=inf)
        return known[1]

    def _pause(self, kind: _Kind, before: _Pause | None) -> None:
        seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, LAST_PAUSE_SECONDS)
        self._pauses[kind] = _Pause(self._context.clock.monotonic() + seconds, seconds)


def _may_preempt(pod: PodFacts) -> bool:
    return pod.preempts and not pod.node_name and not pod.deletion_requested


def _kind_of(pod: PodFacts, request: PodRequest) -> _Kind:
    gang = gang_of_pod(pod)
    return gang.key if gang is not None else pod.controller_uid or pod.uid, pod.priority, request
