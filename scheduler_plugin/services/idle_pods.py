# SPDX-License-Identifier: Apache-2.0
"""Applies the idle policy of classes: pods that do not use their GPUs give way to pods that wait, and end where the class says so.

The agents measure use, and report idle pods in the inventory of their node. A report that was not renewed in time counts as no report.
A pod that gives way is a victim like a less important one, and ends first (``ExtenderContext.idle``). kube-scheduler does not know that. If
its own filters refuse a pod everywhere, for lack of room in sum, it looks for victims by priority alone. So this loop serves such pods.

Spared are pods that have not run for their minimum (``aliquot.dev/min-runtime``), and a gang unless all its members are idle. Evictions
keep to disruption budgets.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.classes import Profile
from scheduler_plugin.core.cluster.durations import may_end_from, parse_duration
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH, in_batches
from scheduler_plugin.ports import EventApi, PodApi

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 2.0
WAIT_SECONDS: Final = 5.0
"""How long a pod waits before an idle one ends for it: there may be room."""
PAUSE_SECONDS: Final = 30.0
"""Between two tries for one waiting pod."""
REPEAT_SECONDS: Final = 60.0
"""The time until a refused eviction is repeated."""
_KEEP: Final = f"To keep it, use the GPU, or set {contract.ANNOTATION_MIN_RUNTIME}"


@dataclass(frozen=True, slots=True)
class _Idle:
    """A bound pod that an agent reports, with a class."""

    pod: PodFacts
    class_name: str
    since: int
    """Seconds since 1970."""


class IdlePods:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        classes: Mapping[str, Profile],
        api: PodApi,
        events: EventApi,
        make_room: Callable[[PodFacts, Sequence[str]], Awaitable[bool]] | None,
        leads: Callable[[], bool],
        scheduler_name: str = contract.SCHEDULER_NAME,
    ) -> None:
        """Args: make_room: ends idle pods on one of these nodes for a pod; None: no pod ends for others. scheduler_name: of the pods."""
        self._context = context
        self._yield_after = {name: parse_duration(profile.idle_yield_after) for name, profile in classes.items()}
        self._end_after = {name: parse_duration(profile.idle_end_after) for name, profile in classes.items()}
        self._api = api
        self._events = events
        self._make_room = make_room
        self._leads = leads
        self._scheduler_name = scheduler_name
        self._reported: dict[str, int] = {}
        """By UID of a pod with an event, since when it was idle then."""
        self._refused: dict[str, float] = {}
        """By UID, until when an eviction is not repeated."""
        self._paused: dict[str, float] = {}
        """By UID of a waiting pod, until when no room is made for it."""

    async def run(self) -> None:
        """Apply the policy until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        if not self._leads():
            self._set_idle({})
            return
        now = self._context.clock.now()
        found = [idle for idle in self._found(now) if may_end_from(idle.pod) <= now]
        yielding = {idle.pod.uid: idle for idle in self._over(found, self._yield_after, now)}
        self._set_idle({uid: idle.pod for uid, idle in yielding.items()})
        await self._report(yielding)
        for idle in self._over(found, self._end_after, now):
            await self._end(idle)
        if self._make_room is not None and self._context.idle:
            await self._serve(self._make_room)

    def _found(self, now: float) -> Iterator[_Idle]:
        """Yield the idle pods of classes, as their own nodes report them now."""
        for node in list(self._context.state.gpu_nodes()):
            for report in node.idle:
                pod = self._context.state.pods.get(report.pod_uid)
                if report.until <= now or pod is None or pod.node_name != node.name or pod.deletion_requested or not pod.active:
                    continue
                if (name := dict(pod.labels).get(contract.LABEL_CLASS, "")) in self._yield_after:
                    yield _Idle(pod, name, report.since)

    def _over(self, found: Sequence[_Idle], after: Mapping[str, float | None], now: float) -> list[_Idle]:
        """Return the pods for which a time of their class is over. A member of a gang only if it is for all members that run."""
        over = [idle for idle in found if (seconds := after[idle.class_name]) is not None and now - idle.since >= seconds]
        uids = {idle.pod.uid for idle in over}
        return [idle for idle in over if self._mates(idle.pod) <= uids]

    def _mates(self, pod: PodFacts) -> set[str]:
        gang = gang_of_pod(pod)
        return set() if gang is None else {other.uid for other in self._context.state.gang_members(gang.key) if other.node_name}

    def _set_idle(self, pods: Mapping[str, PodFacts]) -> None:
        """Note which pods give way. Pods that wait are looked at again if that changed: see ``NewVictims``."""
        known = self._context.idle
        nodes = {pods[uid].node_name for uid in pods.keys() - known}
        nodes |= {pod.node_name for uid in known - pods.keys() if (pod := self._context.state.pods.get(uid)) is not None}
        known.clear()
        known.update(pods)
        for node in sorted(nodes - {""}):
            self._context.state.note_pods_changed(node)

    async def _report(self, yielding: Mapping[str, _Idle]) -> None:
        """Write an event of each pod that gives way from now on."""
        self._reported = {uid: since for uid, since in self._reported.items() if uid in yielding}
        for uid, idle in yielding.items():
            if self._reported.get(uid) != idle.since:
                self._reported[uid] = idle.since
                way = f"idle pods of class {idle.class_name} give way to pods that wait"
                await self._post(idle.pod, f"it has not used its GPU since {_moment(idle.since)}: {way}. {_KEEP}")

    async def _end(self, idle: _Idle) -> None:
        """Evict a pod for which the class says so."""
        pod, now = idle.pod, self._context.clock.monotonic()
        self._refused = {uid: until for uid, until in self._refused.items() if until > now}
        if pod.uid in self._refused:
            return
        self._refused[pod.uid] = now + REPEAT_SECONDS
        name = f"{pod.namespace}/{pod.name}"
        try:
            await self._api.evict(pod.namespace, pod.name, pod.uid)
        except (KubeNotFoundError, KubeConflictError):
            return
        except KubeApiError as exc:
            logger.warning("%s is idle, and cannot be evicted: %s", name, exc)
            return
        logger.info("evicted %s: idle since %s", name, _moment(idle.since), extra={"node": pod.node_name})
        await self._post(pod, f"evicted: it has not used its GPU since {_moment(idle.since)}, and class {idle.class_name} ends idle pods")

    async def _post(self, pod: PodFacts, sentence: str) -> None:
        try:
            await self._events.post_event(pod.namespace, pod.name, pod.uid, contract.EVENT_REASON_IDLE, sentence)
        except KubeApiError as exc:
            logger.warning("an event cannot be written: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}"})

    # --- pods that kube-scheduler's own filters refuse everywhere ---

    async def _serve(self, make_room: Callable[[PodFacts, Sequence[str]], Awaitable[bool]]) -> None:
        """Make room for the most important pod that waits; of equally important ones, for the one that waits longest."""
        state, now = self._context.state, self._context.clock.now()
        self._paused = {uid: until for uid, until in self._paused.items() if until > now and uid in state.pods}
        waiting = [pod async for pod in in_batches(list(state.pods.values()), MAX_PER_BATCH) if self._waits(pod, now)]
        pod = min(waiting, key=lambda pod: (-pod.priority, pod.created_at or 0.0, pod.uid), default=None)
        if pod is not None:
            self._paused[pod.uid] = now + PAUSE_SECONDS
            await make_room(pod, self._nodes())

    def _nodes(self) -> list[str]:
        """Return the nodes of idle pods that take pods without special tolerations."""
        pods = (self._context.state.pods.get(uid) for uid in self._context.idle)
        return sorted({pod.node_name for pod in pods if pod is not None} - set(self._context.state.closed_nodes))

    def _waits(self, pod: PodFacts, now: float) -> bool:
        """Whether a pod waits for a GPU, alone, and may use any node as far as it is known here."""
        if pod.gpu is None or pod.node_name or pod.gpu.scheduler_name != self._scheduler_name or pod.uid in self._paused:
            return False
        if not pod.may_start or pod.is_confined or gang_of_pod(pod) is not None or pod.created_at is None:
            return False
        return now - pod.created_at >= WAIT_SECONDS and not self._has_place(pod, self._context.state.reservations)

    def _has_place(self, pod: PodFacts, reservations: Collection[str]) -> bool:
        return bool(pod.nominated_node) or pod.uid in reservations


def _moment(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
