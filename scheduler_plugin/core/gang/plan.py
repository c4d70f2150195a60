# SPDX-License-Identifier: Apache-2.0
"""Plans all members of a gang at once, on one state of the cluster, so that two gangs never each hold a part of what both need.

The nodes that a member may use are known only for the pod of the call. For the other members a plan is a guess that keeps room, until
kube-scheduler chooses their nodes and they wait there, ready. A ready member stays on its node while the others are planned. It is moved
only if another member fits nowhere else; then it is not ready any longer, and waits for kube-scheduler's next call.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np

from aliquot.contract.model import Policy
from aliquot.placement.refusal import Refusal
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.gang import Gang, Standing, gang_of_pod
from scheduler_plugin.core.cluster.plan import not_offered
from scheduler_plugin.core.cluster.pods import PodFacts, footprint
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.requests import PodRequests
from scheduler_plugin.core.cluster.roles import counted, extras_last, lacking_roles
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.fit.judge import best_row
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.gang.domains import Domain, Ranks, choices, domains_for
from scheduler_plugin.core.gang.standing import (
    is_full,
    is_placed,
    is_ready,
    members_of,
    needs_one_domain,
    node_of,
    role_conflict,
    used_domains,
)
from scheduler_plugin.core.score.cost import HostDemand

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""Long work in steps of a few milliseconds; the event loop may run other work between them. It ends with a result."""


def finish(steps: Steps[_T]) -> _T:
    """Run all steps; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: _T = stop.value
            return result


@dataclass(frozen=True, slots=True)
class Planner:
    """Places members of gangs by the same verdicts as single pods."""

    state: ClusterState
    shapes: Shapes
    default_policy: Policy
    requests: PodRequests = field(default_factory=PodRequests)

    def place(
        self, pod: PodFacts, gang: Gang, offered: Collection[str], fitting: Collection[str], standing: Standing, expires_at: float
    ) -> str | None:
        """Find a node for a member among the offered ones, and reserve room for all members that the gang needs.

        Args:    fitting: the offered nodes on which it fits with the present reservations of its gang. If these move, others can fit.
        Returns: the node; "" for any fitting node, because the pod need not wait for others; None if the gang cannot start now.
        """
        return finish(self.placing(pod, gang, offered, fitting, standing, expires_at))

    def placing(
        self, pod: PodFacts, gang: Gang, offered: Collection[str], fitting: Collection[str], standing: Standing, expires_at: float
    ) -> Steps[str | None]:
        """Do the same as ``place``, member by member."""
        if self.need_not_wait(pod, gang):
            return None if is_full(self.state, pod, gang) else self._joining(pod, gang, fitting, expires_at)
        needed = self.needed(pod, gang)
        if not needed:
            return None
        if standing.planned and (node := self._planned_node(pod, needed)) in fitting:
            return node
        if standing.makes_plans and (yield from self._planning(pod, gang, needed, offered, standing, expires_at)):
            return node_of(self.state, pod)
        self.unset_ready(pod)
        return None

    def _joining(self, pod: PodFacts, gang: Gang, fitting: Collection[str], expires_at: float) -> str | None:
        """Find a node for a member of a gang that has started: in a domain of the other members, if it asks for that."""
        used = used_domains(self.state, [pod], gang)
        if gang.domain is None or not used or is_placed(self.state, pod):
            return ""
        near = [node for node in fitting if self.state.domain_of(node, gang.domain.level) in used]
        if self.expect(pod, near, expires_at):
            return node_of(self.state, pod)
        return None if needs_one_domain(gang) else ""

    def _planned_node(self, pod: PodFacts, needed: Sequence[PodFacts]) -> str:
        """Return the node of a member's reservation; empty unless all needed members have one."""
        reservations = self.state.reservations
        return reservations[pod.uid].node if all(member.uid in reservations for member in needed) else ""

    def _planning(
        self, pod: PodFacts, gang: Gang, needed: Sequence[PodFacts], offered: Collection[str], standing: Standing, expires_at: float
    ) -> Steps[bool]:
        """Plan the needed members, and if that fails the ready ones with them; return whether one of both plans works."""
        if (yield from self.expecting(needed, offered, expires_at)):
            return True
        with_ready = needed if standing.is_settled else self._lacking(pod, gang, with_ready=True)
        return len(with_ready) > len(needed) and (yield from self.expecting(with_ready, offered, expires_at))

    def sentence(self, pod: PodFacts, gang: Gang, standing: Standing) -> str:
        """Return why a gang cannot start, as a sentence."""
        if conflict := role_conflict(self.state, pod, gang):
            return f"gang: {conflict}"
        members = members_of(self.state, pod, gang).values()
        if counted(members) < gang.minimum:
            return f"gang: {gang.minimum} members must start together, and {self._why_incomplete(members, gang)}"
        if is_full(self.state, pod, gang):
            return f"gang: {gang.maximum} members run, and no more may"
        if gang.role is not None and not self.need_not_wait(pod, gang) and not self.needed(pod, gang):
            return f"gang: role {gang.role.name} has its minimum of {gang.role.minimum} without this member, which starts after the gang"
        if standing.pauses:
            return "gang: it reserved room without starting, and planning pauses for a while"
        if gang.domain is not None and needs_one_domain(gang):
            return self._domain_sentence(pod, gang, gang.domain.level)
        return "gang: no room for enough members at once"

    def _why_incomplete(self, members: Collection[PodFacts], gang: Gang) -> str:
        """Return why a gang has too few members that may start."""
        gated = [other for other in self.state.gang_members(gang.key) if other.is_gated and not other.deletion_requested]
        if counted([*members, *gated]) >= gang.minimum:
            return f"scheduling gates hold back {len(gated)}"
        return lacking_roles(members, gang.minimum - counted(members)) or "fewer with GPUs exist"

    def _domain_sentence(self, pod: PodFacts, gang: Gang, level: str) -> str:
        """Return why no domain takes all members that must be in one."""
        needed, used = self.needed(pod, gang) or [pod], used_domains(self.state, [pod], gang)
        with self.trying(needed):
            domains = self._domains(needed, gang)
        if used:
            return f"gang: no room in {level} {', '.join(sorted(used))}, where its other members are"
        lacking = f"gang: {len(needed)} members need one {level}"
        if not domains:
            return f"{lacking}, and no {level} has room for one"
        best = max(domains, key=lambda one: one.most)
        if best.most >= len(needed):
            return f"{lacking}, and no {level} has room for all of them on nodes that they may use"
        return f"{lacking}, and the one with most room, {best.name}, takes {best.most}"

    def _domains(self, members: Sequence[PodFacts], gang: Gang) -> list[Domain]:
        """Return the domains with room for one of these members at least."""
        shapes = [shape for member in members if (shape := self.shape_of(member)) is not None]
        return [] if gang.domain is None else domains_for(self.state, self.shapes, gang.domain, shapes)

    def lacks_domain(self, pod: PodFacts, gang: Gang) -> bool:
        """Whether a member needs a domain in which no node has room for it."""
        if not needs_one_domain(gang):
            return False
        used = used_domains(self.state, [pod], gang)
        return bool(used) and used.isdisjoint(one.name for one in self._domains([pod], gang))

    def rankings(self, members: Sequence[PodFacts], allowed: Collection[str]) -> Iterable[Ranks | None]:
        """Return the nodes that members may use, the best choice first; None for all nodes."""
        gang = gang_of_pod(members[0]) if members else None
        if gang is None or gang.domain is None:
            return (None,)
        with self.trying(members):
            domains = self._domains(members, gang)
        return choices(domains, gang.domain, len(members), allowed, used_domains(self.state, members, gang))

    def need_not_wait(self, pod: PodFacts, gang: Gang) -> bool:
        """Whether a member need not wait for others: enough members are placed, or it is placed itself."""
        if is_placed(self.state, pod):
            return True
        placed = [other for other in members_of(self.state, pod, gang).values() if is_placed(self.state, other)]
        return counted(placed) >= gang.minimum and not role_conflict(self.state, pod, gang)

    def needed(self, pod: PodFacts, gang: Gang) -> list[PodFacts]:
        """Return as many members without a firm or ready reservation as the gang lacks, the pod first.

        Empty if there are too few, if their roles contradict each other, and for a member that the gang does not lack: its role has enough.
        """
        return self._lacking(pod, gang, with_ready=False)

    def _lacking(self, pod: PodFacts, gang: Gang, *, with_ready: bool) -> list[PodFacts]:
        """Return the pod and as many unplaced members as the gang lacks. Ready members come first, or are left out."""
        if role_conflict(self.state, pod, gang):
            return []
        fixed: list[PodFacts] = []
        movable: list[PodFacts] = []
        for uid, other in members_of(self.state, pod, gang).items():
            if uid != pod.uid:
                has_place = is_placed(self.state, other) or (is_ready(self.state, other) and not with_ready)
                (fixed if has_place else movable).append(other)
        lacking = gang.minimum - counted(fixed)
        if lacking <= 0:
            return [pod]
        needed = extras_last(fixed, [pod, *in_order(movable, self.state)])[0][:lacking]
        return needed if len(needed) == lacking and needed[0] is pod else []

    def ready(self, pod: PodFacts, gang: Gang) -> list[PodFacts]:
        """Return the members that are ready."""
        return [other for other in members_of(self.state, pod, gang).values() if is_ready(self.state, other)]

    def reserve_all(self, members: Sequence[PodFacts], allowed: Collection[str], expires_at: float) -> bool:
        """Reserve room for all members until a moment, for the first one on an allowed node; or leave everything as it was.

        A ready member stays ready if its node still has room for it.
        Returns: whether all of them have a reservation now.
        """
        return finish(self.expecting(members, allowed, expires_at))

    def expecting(self, members: Sequence[PodFacts], allowed: Collection[str], expires_at: float) -> Steps[bool]:
        """Do the same as ``reserve_all``, member by member."""
        for ranks in self.rankings(members, allowed):
            if (yield from self._expecting(members, allowed, expires_at, ranks)):
                return True
        return False

    def _expecting(self, members: Sequence[PodFacts], allowed: Collection[str], expires_at: float, ranks: Ranks | None) -> Steps[bool]:
        """Reserve room for all members on the nodes of one choice.

        Other work may run between two steps. The members that are planned by then keep their reservations, and a member that got another
        reservation in between keeps that one. If the plan fails, or the caller stops, each member gets its earlier reservation again,
        unless that room is taken.
        """
        columns = self.state.columns
        with self._freeing_nothing():
            before = self._forget(members)
        known = self.state.pods.keys() & {pod.uid for pod in members}
        attempt = _Attempt(members, allowed, expires_at, _ready_nodes(before), ranks)
        complete, is_alone, change_count = False, True, columns.change_count
        try:
            for pod in members:
                # A change that is not ours: the earlier reservations may not fit any longer, so undoing must check them.
                is_alone &= columns.change_count == change_count
                is_gone = pod.uid in known and pod.uid not in self.state.pods
                if is_gone or not self._plan_one(pod, attempt):
                    break
                change_count = columns.change_count
                yield
            else:
                complete = all(node_of(self.state, pod) for pod in members)
        finally:
            if not complete:
                is_alone &= columns.change_count == change_count
                gone = known - self.state.pods.keys()
                with self._freeing_nothing():
                    self._undo(attempt.planned, [was for was in before if was.pod_uid not in gone], members, is_free=is_alone)
        return complete

    def _plan_one(self, pod: PodFacts, attempt: "_Attempt") -> bool:
        """Reserve room for one member, unless it has a node already; return whether it has one now."""
        if node_of(self.state, pod):
            return True
        among = attempt.allowed if pod is attempt.members[0] else None
        with self._freeing_nothing():
            if not self._expect_or_stay(pod, among, attempt):
                return False
        attempt.planned[pod.uid] = self.state.reservations[pod.uid]
        return True

    def _expect_or_stay(self, pod: PodFacts, among: Collection[str] | None, attempt: "_Attempt") -> bool:
        """Reserve room for a member: on the node where it was ready, if that is allowed and has room, or else on another allowed node."""
        ready_at, ranks, expires_at = attempt.ready_nodes.get(pod.uid), attempt.ranks, attempt.expires_at
        stays = ready_at is not None and (among is None or ready_at in among) and (ranks is None or ready_at in ranks)
        if stays and ready_at is not None and not self.reserve_on(pod, ready_at, expires_at, Stage.READY):
            return True
        return self.expect(pod, among, expires_at, ranks)

    def _undo(
        self, planned: Mapping[str, Reservation], before: Iterable[Reservation], members: Iterable[PodFacts], *, is_free: bool
    ) -> None:
        """Drop the planned reservations and restore the earlier ones, except where a member got another reservation since.

        Args: is_free: whether nothing else changed the state, so that the earlier reservations certainly fit.
        """
        reservations, pods = self.state.reservations, {pod.uid: pod for pod in members}
        for uid, reservation in planned.items():
            if reservations.get(uid) is reservation:
                self.state.release(uid)
        for was in before:
            if was.pod_uid in reservations:
                continue
            # Planning again finds room even if others took the earlier devices, but costs a search.
            if is_free:
                self.state.reserve(was)
            else:
                self.reserve_on(pods[was.pod_uid], was.node, was.expires_at, was.stage)

    @contextmanager
    def _freeing_nothing(self) -> Iterator[None]:
        """Do not count room as freed that is released inside the block."""
        freed_count = self.state.freed_count
        try:
            yield
        finally:
            self.state.freed_count = freed_count

    @contextmanager
    def trying(self, members: Sequence[PodFacts]) -> Iterator[None]:
        """Drop the members' reservations at the start of the block, and restore them at its end."""
        with self._freeing_nothing():
            before = self._forget(members)
            try:
                yield
            finally:
                self._forget(members)
                for reservation in before:
                    self.state.reserve(reservation)

    def unset_ready(self, pod: PodFacts) -> None:
        """Keep the room of a ready member, and note that it is not ready any longer."""
        if is_ready(self.state, pod):
            self.state.reserve(replace(self.state.reservations[pod.uid], stage=Stage.SOFT))

    def check_ready(self, members: Iterable[PodFacts]) -> list[PodFacts]:
        """Check that each ready member still fits on its node; return those that do, and drop the reservations of the others."""
        checked: list[PodFacts] = []
        for pod in members:
            known = self.state.reservations[pod.uid]
            if self.reserve_on(pod, known.node, known.expires_at, Stage.READY):
                self.state.release(pod.uid)
            else:
                checked.append(pod)
        return checked

    def start(self, members: Iterable[PodFacts], expires_at: float) -> None:
        """Make the reservations of ready members firm."""
        for pod in members:
            self.state.reserve(replace(self.state.reservations[pod.uid], stage=Stage.STARTING, expires_at=expires_at))

    def reserve_on(self, pod: PodFacts, node: str, expires_at: float, stage: Stage = Stage.SOFT) -> str:
        """Reserve room for one pod on a node; return why that is impossible, or an empty text."""
        request = self.requests.of(pod)
        if pod.gpu is None or request is None:
            return ""
        if isinstance(request, RequestError):
            return str(request)
        gpu = self.state.gpu_node(node)
        if gpu is not None and (lacking := not_offered(gpu, request)):
            return f"node {node} does not offer {lacking} that the pod asks for"
        plan = self.state.plan(node, request, self.default_policy, pod.uid)
        if isinstance(plan, Refusal):
            return plan.sentence
        demand, uses = HostDemand(pod.cpu_milli, pod.memory_mib), footprint(pod.gpu.containers, plan)
        self.state.reserve(Reservation(pod.uid, node, uses, demand, stage, expires_at))
        return ""

    def expect(self, pod: PodFacts, allowed: Collection[str] | None, expires_at: float, ranks: Ranks | None = None) -> bool:
        """Reserve room for one pod on the best allowed node, or on the best of all; return whether it fits on one.

        Args: ranks: only these nodes, and only the lowest rank that has room.
        """
        shape = self.shape_of(pod)
        if shape is None:
            return False
        with self.state.without(pod.uid):  # also without the held room that it may use
            verdict = self.shapes.verdict(shape)
        fitting = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
        if allowed is not None:
            fitting = fitting[[self.state.names[row] in allowed for row in fitting.tolist()]]
        if ranks is not None and len(fitting):
            numbers = np.array([ranks.get(self.state.names[row], len(ranks)) for row in fitting.tolist()])
            fitting = fitting[(numbers == numbers.min()) & (numbers < len(ranks))]
        if not len(fitting):
            return False
        node = self.state.names[best_row(self.shapes, verdict, fitting, pod.uid)]
        return not self.reserve_on(pod, node, expires_at)

    def shape_of(self, pod: PodFacts) -> PodShape | None:
        """Reduce a pod to its shape; None if it asks for no GPU or is invalid."""
        request = self.requests.of(pod)
        if request is None or isinstance(request, RequestError):
            return None
        demand, used = HostDemand(pod.cpu_milli, pod.memory_mib), self.state.utilizations.of(pod)
        return PodShape.of(request, self.default_policy, demand, used)

    def _forget(self, members: Sequence[PodFacts]) -> list[Reservation]:
        """Drop the members' reservations; return them."""
        before = [self.state.reservations[pod.uid] for pod in members if pod.uid in self.state.reservations]
        for pod in members:
            self.state.release(pod.uid)
        return before


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt to plan a gang."""

    members: Sequence[PodFacts]
    allowed: Collection[str]
    """The nodes that the first member may use."""
    expires_at: float
    ready_nodes: Mapping[str, str]
    """Where members were ready, by pod UID."""
    ranks: Ranks | None = None
    """The nodes that all members may use; None for all."""
    planned: dict[str, Reservation] = field(default_factory=dict)
    """The reservations of this attempt, by pod UID."""


def _ready_nodes(reservations: Iterable[Reservation]) -> Mapping[str, str]:
    return {reservation.pod_uid: reservation.node for reservation in reservations if reservation.stage is Stage.READY}


def in_order(members: Iterable[PodFacts], state: ClusterState) -> list[PodFacts]:
    """Sort members for planning: ready ones first, then those with a reservation, then by priority and name."""
    return sorted(members, key=lambda pod: (not is_ready(state, pod), pod.uid not in state.reservations, -pod.priority, pod.name, pod.uid))
