# SPDX-License-Identifier: Apache-2.0
"""Allocates the claims of pods that wait for that, opens their gates, and makes room for important ones.

A round first plans all waiting pods in the order of their importance, then it writes. Planning and writing never overlap. What a round
plans counts for the rest of the round, so capacity is promised once. A write whose outcome is unknown is repeated with the same version
of the claim until the API server says whether it holds. So at the start of a round all allocations are known. Only the leader runs
rounds, after it listed claims and pods since it leads.

All that must survive a crash is in the API: a pod with allocated claims gets its gate opened, whichever process allocated them. Gates of a
gang open when enough of its members have their claims; if the others do not fit, what the gang has is taken back. Each allocation names its
pod as user, so Kubernetes frees the claim when the pod is gone. kube-scheduler frees it if the pod cannot run on the node for a reason that
is unknown here; then another node is planned.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeNotFoundError, KubeRefusedError
from aliquot.kube.requests import timestamp
from scheduler_plugin.core.claims.groups import Group, groups_of
from scheduler_plugin.core.claims.planned import FINALIZER, PlannedPod, allocation_of
from scheduler_plugin.core.claims.pools import Guess, node_of
from scheduler_plugin.core.claims.stored import StoredClaim
from scheduler_plugin.core.cluster.durations import may_preempt_from
from scheduler_plugin.core.cluster.state import Stage
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.planned import ClaimPlacer, Placement, Want, needed_first
from scheduler_plugin.extender.planned_victims import Victims
from scheduler_plugin.ports import ClaimApi, EventApi
from scheduler_plugin.services.evictions import Evictions
from scheduler_plugin.services.planned_pods import PlannedPods

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 5.0
"""A round is held at least this often: waiting pods can also fit because time passed."""
WRITERS: Final = 8
"""Groups that are written at the same time."""
EXPECTED_SECONDS: Final = 60.0
"""How long CPU and RAM of a pod are kept for it after its gate was opened."""
AVOID_SECONDS: Final = 30.0
"""How long a pod does not get a node again after kube-scheduler could not use it there."""
FIRST_PAUSE_SECONDS: Final = 0.2
LAST_PAUSE_SECONDS: Final = 30.0
EVENT_SECONDS: Final = 60.0
"""Between two events of a pod: what the nodes lack changes often."""
MOST_EVENTS: Final = 10_000
"""How many pods keep their latest event in memory."""


@dataclass(slots=True)
class _Round:
    """What a round has planned."""

    writes: list[tuple[Sequence[Placement], Sequence[PlannedPod]]] = field(default_factory=list)
    """Placements to write, and further pods with a gate to open after that."""
    frees: list[PlannedPod] = field(default_factory=list)
    """Pods from which allocations are taken back."""
    failed: set[object] = field(default_factory=set)
    """Single pods for which no room was found: others like them have none either."""


@dataclass(frozen=True, slots=True)
class Leads:
    """Whether this replica leads."""

    now: Callable[[], bool]
    """Whether it may write."""
    knows_all: Callable[[], bool]
    """Whether it also knows all claims and pods since it leads, so that it may plan."""


class ClaimPlanner:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        placer: ClaimPlacer,
        pods: PlannedPods,
        api: ClaimApi,
        events: EventApi,
        leads: Leads,
        evictions: Evictions | None = None,
    ) -> None:
        """Args: evictions: None without preemption."""
        self._context = context
        self._placer = placer
        self._pods = pods
        self._api = api
        self._events = events
        self._leads = leads
        self._evictions = evictions
        self._victims = Victims(context, placer, pods.by_uid)
        self._held: set[str] = set()
        """UIDs of pods for which room is held."""
        self._given: dict[str, str] = {}
        """By claim UID, the node on which it was allocated here."""
        self._avoided: dict[str, dict[str, float]] = {}
        """By pod UID, nodes and until when they are avoided."""
        self._pauses: dict[str, tuple[float, float]] = {}
        """By pod UID, until when no write is tried after one was refused, and for how long that is."""
        self._reported: dict[str, tuple[str, float]] = {}
        """By pod UID, the sentence of its latest event, and when it was written."""
        self._seen: object = None
        self._looked_at = -inf

    async def run(self) -> None:
        """Hold rounds until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Hold a round if something changed."""
        if not self._leads.knows_all():
            self._looked_at = -inf
            return
        now, seen = self._context.clock.monotonic(), self._stamp()
        if seen == self._seen and now - self._looked_at < LOOK_SECONDS:
            return
        self._seen, self._looked_at = seen, now
        self._forget(now)
        held = await self._planned()
        await self._carry_out(held)

    # --- what ``PlannedWhy`` asks ---

    def is_paused(self, uid: str) -> bool:
        """Whether a write for a pod was refused lately, so that the next one waits."""
        return self._pauses.get(uid, (-inf, 0.0))[0] > self._context.clock.monotonic()

    def avoided(self, uid: str) -> Collection[str]:
        """Return the nodes that a pod does not get for a while, because kube-scheduler could not use it there."""
        now = self._context.clock.monotonic()
        return [node for node, until in self._avoided.get(uid, {}).items() if until > now]

    def ending(self) -> frozenset[str]:
        """Return the UIDs of the pods that end already."""
        return self._victims.ending(self._context.clock.now())

    # --- rounds ---

    def _stamp(self) -> object:
        pools = self._context.claims.pools
        return self._pods.change_count, pools.change_count, self._context.state.freed_count, self._placer.nodes_version

    def _forget(self, now: float) -> None:
        """Drop what is held from the last round, and what is over."""
        self._release_held()
        known, claims = self._pods.by_uid, {claim.uid for claim in self._context.claims.pools.claims.values()}
        self._given = {uid: node for uid, node in self._given.items() if uid in claims}
        for nodes in self._avoided.values():
            for node in [node for node, until in nodes.items() if until <= now]:
                del nodes[node]
        for kept in (self._avoided, self._pauses, self._reported):
            for uid in kept.keys() - known.keys():
                del kept[uid]
        self._victims.expire(now)
        if self._evictions is not None:
            self._evictions.expire()

    def _release_held(self) -> None:
        """Drop what is held from the last round."""
        state = self._context.state
        freed_count = state.freed_count
        for uid in self._held:
            self._context.claims.pools.drop_guess(uid)
            if (known_at := state.reservations.get(uid)) is not None and known_at.stage is Stage.SOFT:
                state.release(uid)
        self._held.clear()
        state.freed_count = freed_count  # this is planned again at once

    # --- planning ---

    async def _planned(self) -> _Round:
        found = _Round()
        for group in groups_of(self._pods.by_uid.values()):
            if group.trouble:
                await self._report(group.waiting, group.trouble)
            else:
                await self._plan(group, found)
            await asyncio.sleep(0)
            if not self._leads.knows_all():
                return _Round()
        return found

    async def _plan(self, group: Group, found: _Round) -> None:
        """Plan one group."""
        if any(self.is_paused(pod.facts.uid) for pod in group.waiting):
            return
        wants, ready = await self._sorted(group, self._context.clock.monotonic(), found)
        lacking, (first, rest) = group.lacking(ready), needed_first(group, ready, wants)
        if lacking <= 0:
            found.writes.append(((), [pod for pod in ready if pod.is_held]))
            await self._plan_more(group, wants, len(ready), found)
        elif lacking > len(first):
            self._give_up(ready, found)
            await self._report([want.pod for want in wants], group.incomplete)
        elif group.gang is None:
            await self._plan_alone(wants[0], found)
        elif placements := self._place(first):
            found.writes.append((placements, [pod for pod in ready if pod.is_held]))
            await self._plan_more(group, rest, len(ready) + lacking, found)
        elif not self._give_up(ready, found):
            await self._make_room(first)

    async def _sorted(self, group: Group, now: float, found: _Round) -> tuple[list[Want], list[PlannedPod]]:
        """Return what the pods of a group need, and the pods that need nothing more."""
        wants: list[Want] = []
        ready: list[PlannedPod] = []
        for pod in group.waiting:
            want = self._want(pod, now)
            if isinstance(want, Want):
                wants.append(want)
            elif want is not None:
                await self._report([pod], want)
            elif self._is_misplaced(pod):
                found.frees.append(pod)
            else:
                ready.append(pod)
        return wants, ready

    async def _plan_more(self, group: Group, wants: Sequence[Want], ready: int, found: _Round) -> None:
        """Plan pods that need not wait for others, one by one."""
        for want in wants[: max(0, group.maximum - len(group.bound) - ready)]:
            await self._plan_alone(want, found)

    async def _plan_alone(self, want: Want, found: _Round) -> None:
        """Plan one pod, if no other like it had no room in this round."""
        if want.likeness in found.failed:
            await self._report([want.pod], self._placer.lacking(want))
        elif placements := self._place([want]):
            found.writes.append((placements, ()))
        elif not await self._make_room([want]):
            found.failed.add(want.likeness)

    def _want(self, pod: PlannedPod, now: float) -> Want | str | None:
        """Return what a pod needs. If kube-scheduler freed one of its claims, the node is avoided for a while."""
        uid = pod.facts.uid
        for claim in self._placer.claims_of(pod) or ():
            if claim.parts is None and (node := self._given.pop(claim.uid, "")):
                self._avoided.setdefault(uid, {})[node] = now + AVOID_SECONDS
        return self._placer.want(pod, self._avoided.get(uid, {}))

    def _is_misplaced(self, pod: PlannedPod) -> bool:
        """Whether the node of a claim is gone."""
        nodes = {node_of(part.device[:2]) for claim in self._placer.claims_of(pod) or () for part in claim.parts or ()} - {""}
        return not all(map(self._placer.is_node, nodes))

    def _give_up(self, ready: Sequence[PlannedPod], found: _Round) -> bool:
        """Take back what members of a gang have that cannot start; return whether there is such a thing."""
        held = [pod for pod in ready if pod.is_held]
        found.frees += held
        return bool(held)

    def _place(self, wants: Sequence[Want]) -> Sequence[Placement]:
        """Place pods, and count them for the rest of the round."""
        placements = self._placer.place(wants)
        self._hold(placements)
        return placements

    def _hold(self, placements: Iterable[Placement]) -> None:
        for placement in placements:
            uid = placement.pod.uid
            expires_at = self._context.clock.monotonic() + EXPECTED_SECONDS
            self._context.state.reserve(self._placer.reservation(placement, expires_at))
            self._context.claims.pools.guess(uid, Guess(placement.node, tuple(one for group in placement.taken for one in group)))
            self._held.add(uid)

    # --- preemption ---

    async def _make_room(self, wants: Sequence[Want]) -> bool:
        """Wait for the end of pods that end already, or evict less important ones; return whether room is held meanwhile."""
        now = self._context.clock.now()
        ending = self._victims.ending(now)
        if placements := self._placer.place(wants, ending):
            self._hold(placements)
            return True
        may_preempt = all(want.pod.facts.preempts and may_preempt_from(want.pod.facts) <= now for want in wants)
        evictions = self._evictions if may_preempt else None
        chosen = self._victims.choose(wants, ending, evictions.refused, now) if evictions is not None else ()
        if evictions is None or not chosen:
            await self._report([want.pod for want in wants], self._placer.lacking(wants[0]))
            return False
        if not await evictions.evict_all(list(chosen), wants[0].pod.facts):
            return False
        self._victims.note(chosen, self._context.clock.monotonic())
        self._hold(self._placer.place(wants, ending | {pod.uid for pod in chosen}))
        return True

    # --- writing ---

    async def _carry_out(self, found: _Round) -> None:
        """Write what a round has planned."""
        writers = asyncio.Semaphore(WRITERS)

        async def one(work: Awaitable[None]) -> None:
            async with writers:
                await work

        works = [self._write(*write) for write in found.writes] + [self._free(pod) for pod in found.frees]
        await asyncio.gather(*map(one, works))

    async def _write(self, placements: Sequence[Placement], also: Sequence[PlannedPod]) -> None:
        """Write the claims of some pods, then open the gates."""
        for placement in placements:
            if not await self._allocate(placement):
                self._pause(placement.pod.uid)
                return
        for pod in [*also, *(placement.want.pod for placement in placements if placement.want.pod.is_held)]:
            await self._open(pod)

    async def _allocate(self, placement: Placement) -> bool:
        """Write the claims of one pod; return whether all are allocated as planned."""
        want = placement.want
        for claim, is_ours, taken in zip(want.waiting, want.ours, placement.taken, strict=True):
            if not is_ours:
                continue
            ids = [str(uuid.uuid4()) for _ in taken]
            at = timestamp(self._context.clock.now())
            allocation = allocation_of(claim.spec, taken, self._context.claims.pools.classes, placement.node, ids, at)
            keeps = partial(self._keeps_room, placement)
            protected = claim if FINALIZER in claim.finalizers else await self._settled(claim, self._api.protect, keeps)
            if protected is None:
                return False
            write = partial(self._api.allocate, allocation=allocation, pod=want.pod.facts)
            if await self._settled(protected, write, keeps) is None:
                return False
            self._given[claim.uid] = placement.node
        self._held.discard(placement.pod.uid)
        self._pauses.pop(placement.pod.uid, None)
        about = {"pod": f"{placement.pod.namespace}/{placement.pod.name}", "pod_uid": placement.pod.uid, "node": placement.node}
        logger.info("claims allocated", extra=about)
        return True

    def _keeps_room(self, placement: Placement) -> bool:
        """Keep the room of a placement for another while; return whether it is still kept. Otherwise a pod with device IDs may have it."""
        state, uid = self._context.state, placement.pod.uid
        state.renew(uid, self._context.clock.monotonic() + EXPECTED_SECONDS)
        return uid in state.reservations and state.reservations[uid].node == placement.node

    async def _free(self, pod: PlannedPod) -> None:
        """Take back the claims that only this pod uses."""
        for claim in self._placer.claims_of(pod) or ():
            if claim.parts and set(claim.reserved_for) <= {pod.facts.uid} and node_of(claim.parts[0].device[:2]):
                self._given.pop(claim.uid, None)
                if await self._settled(claim, self._api.free) is None:
                    self._pause(pod.facts.uid)

    async def _settled(
        self, claim: StoredClaim, write: Callable[[StoredClaim], Awaitable[StoredClaim]], may_write: Callable[[], bool] = lambda: True
    ) -> StoredClaim | None:
        """Write until the outcome is known; return the claim as written, None if the API server refused, or it may not be written."""
        pause, holds = FIRST_PAUSE_SECONDS, self._context.claims.holds
        while self._leads.now() and may_write():
            try:
                found = await write(claim)
            except KubeRefusedError as exc:
                logger.info("a ResourceClaim was not written: %s", exc)
                await self._read_again(claim)
                return None
            except KubeApiError as exc:
                logger.warning("it is unknown whether a ResourceClaim was written: %s", exc)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_SECONDS)
                continue
            holds.set_claim(found)
            return found
        return None

    async def _read_again(self, claim: StoredClaim) -> None:
        """Store a claim as the API has it; the watch may show it later."""
        pause, holds = FIRST_PAUSE_SECONDS, self._context.claims.holds
        while self._leads.now():
            try:
                found = await self._api.read(claim)
            except KubeApiError as exc:
                logger.warning("a ResourceClaim cannot be read: %s", exc)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_SECONDS)
                continue
            if found is None:
                holds.drop_claim(claim)
            else:
                holds.set_claim(found)
            return

    async def _open(self, pod: PlannedPod) -> None:
        """Open the gate of a pod. After an error the next round does it."""
        facts = pod.facts
        try:
            await self._api.open_gate(facts)
        except KubeNotFoundError:
            return
        except KubeApiError as exc:
            logger.warning("a scheduling gate was not opened: %s", exc, extra={"pod": f"{facts.namespace}/{facts.name}"})
            self._pause(facts.uid)

    def _pause(self, uid: str) -> None:
        _, seconds = self._pauses.get(uid, (0.0, FIRST_PAUSE_SECONDS / 2))
        seconds = min(2 * seconds, LAST_PAUSE_SECONDS)
        self._pauses[uid] = self._context.clock.monotonic() + seconds, seconds
        self._looked_at = min(self._looked_at, self._context.clock.monotonic() + seconds - LOOK_SECONDS)

    async def _report(self, pods: Iterable[PlannedPod], sentence: str) -> None:
        """Say in an event of each pod why it waits, if that changed."""
        now = self._context.clock.monotonic()
        for pod in pods:
            facts = pod.facts
            before, at = self._reported.get(facts.uid, ("", -inf))
            if not sentence or sentence == before or now - at < EVENT_SECONDS or len(self._reported) >= MOST_EVENTS:
                continue
            self._reported[facts.uid] = sentence, now
            try:
                await self._events.post_event(facts.namespace, facts.name, facts.uid, contract.EVENT_REASON_NO_GPU_FITS, sentence)
            except KubeApiError as exc:
                logger.warning("an event cannot be written: %s", exc, extra={"pod": f"{facts.namespace}/{facts.name}"})
