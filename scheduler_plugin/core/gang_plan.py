"""Where all members of a gang could go at once: placed on one picture of the cluster, so that two gangs never each hold a part of what both
need.

Which nodes a member may use is known of the one that is asked about. For the others a plan is a guess that keeps room, until kube-scheduler
chooses their nodes and they wait there, ready. A ready member stays where it is while the others are planned, and makes way only where one
of them fits nowhere else: it is not ready then, and must be asked about again.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from placement.refusal import Refusal
from placement.request import RequestError, pod_request
from proto.model import Policy
from scheduler_plugin.core.gang import Gang, Standing
from scheduler_plugin.core.judge import best_row
from scheduler_plugin.core.plan import not_offered
from scheduler_plugin.core.pods import PodFacts, footprint
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.shapes import PodShape, Shapes
from scheduler_plugin.core.state import ClusterState, Reservation, Stage

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""Work that takes long, in steps of a few milliseconds, between which others may work; and what comes of it."""


def finish(steps: Steps[_T]) -> _T:
    """Do all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: _T = stop.value
            return result


def is_placed(state: ClusterState, pod: PodFacts) -> bool:
    """Whether a pod is or was bound, or its gang starts with it, or its binding is under way or taken by the API."""
    reservation = state.reservations.get(pod.uid)
    return bool(pod.node_name) or (reservation is not None and reservation.stage.is_firm)


def is_ready(state: ClusterState, pod: PodFacts) -> bool:
    """Whether a pod waits for its gang at a node that kube-scheduler chose."""
    reservation = state.reservations.get(pod.uid)
    return reservation is not None and reservation.stage is Stage.READY


@dataclass(frozen=True, slots=True)
class Planner:
    """Places members of gangs by what decides on single pods too."""

    state: ClusterState
    shapes: Shapes
    default_policy: Policy

    def place(
        self, pod: PodFacts, gang: Gang, offered: Collection[str], fitting: Collection[str], standing: Standing, expires_at: float
    ) -> str | None:
        """Find a node for a member among the offered ones, and expect all that are needed where they are planned.

        Args:    fitting: the offered nodes where it fits beside the places of its gang as they are; where those move it can fit on others.
        Returns: the node; "" for whichever fits, because the pod need not wait for others; None when the gang cannot start now.
        """
        return finish(self.placing(pod, gang, offered, fitting, standing, expires_at))

    def placing(
        self, pod: PodFacts, gang: Gang, offered: Collection[str], fitting: Collection[str], standing: Standing, expires_at: float
    ) -> Steps[str | None]:
        """Do as ``place``, member by member."""
        if self.goes_alone(pod, gang):
            return ""
        needed = self.needed(pod, gang)
        if not needed:
            return None
        reservations = self.state.reservations
        if standing.planned and all(member.uid in reservations for member in needed) and reservations[pod.uid].node in fitting:
            return reservations[pod.uid].node
        if standing.makes_plans:
            if (yield from self.expecting(needed, offered, expires_at)):
                return self._node_of(pod)
            with_ready = needed if standing.is_settled else self._lacking(pod, gang, with_ready=True)
            if len(with_ready) > len(needed) and (yield from self.expecting(with_ready, offered, expires_at)):
                return self._node_of(pod)
        self.step_back(pod)
        return None

    def sentence(self, pod: PodFacts, gang: Gang, standing: Standing) -> str:
        """Say why a gang cannot start."""
        lacking = gang.minimum - len(self.members(pod, gang))
        if lacking > 0:
            gated = sum(other.is_gated and not other.deletion_requested for other in self.state.gang_members(gang.key))
            why = f"scheduling gates hold back {gated}" if gated >= lacking else "fewer with GPUs exist"
            return f"gang: {gang.minimum} members must start together, {why}"
        if standing.pauses:
            return "gang: it held room without starting and pauses"
        return "gang: no room for enough members at once"

    def goes_alone(self, pod: PodFacts, gang: Gang) -> bool:
        """Whether a member need not wait for others: enough are placed, or it is itself."""
        placed = [uid for uid, other in self.members(pod, gang).items() if is_placed(self.state, other)]
        return len(placed) >= gang.minimum or pod.uid in placed

    def needed(self, pod: PodFacts, gang: Gang) -> list[PodFacts]:
        """Return as many members without a firm or ready place as the gang lacks, the pod first; nobody when there are too few."""
        return self._lacking(pod, gang, with_ready=False)

    def _lacking(self, pod: PodFacts, gang: Gang, *, with_ready: bool) -> list[PodFacts]:
        """Return the pod and as many unplaced members as the gang lacks; ready ones first, or not at all."""
        others = [other for uid, other in self.members(pod, gang).items() if uid != pod.uid]
        movable = [other for other in others if not (is_placed(self.state, other) or (is_ready(self.state, other) and not with_ready))]
        lacking = max(1, gang.minimum - (len(others) - len(movable)))
        lacking_members = [pod, *in_order(movable, self.state)[: lacking - 1]]
        return lacking_members if len(lacking_members) == lacking else []

    def ready(self, pod: PodFacts, gang: Gang) -> list[PodFacts]:
        """Return the members that are ready."""
        return [other for other in self.members(pod, gang).values() if is_ready(self.state, other)]

    def members(self, pod: PodFacts, gang: Gang) -> dict[str, PodFacts]:
        """Return the known members that may start or have, by UID, this pod among them, and those that succeeded.

        Those that are ending count no more: a gang restarts as it started.
        """
        others = {other.uid: other for other in self.state.gang_members(gang.key) if other.may_start}
        return {pod.uid: pod} | others | dict(self.state.succeeded_members(gang.key))

    def expect_all(self, members: Sequence[PodFacts], allowed: Collection[str], expires_at: float) -> bool:
        """Expect all members somewhere until a moment, the first of them on one of the allowed nodes; or leave everything as it was.

        A member that is ready stays so if its node has room for it then.
        Returns: whether all of them have a place now.
        """
        return finish(self.expecting(members, allowed, expires_at))

    def expecting(self, members: Sequence[PodFacts], allowed: Collection[str], expires_at: float) -> Steps[bool]:
        """Do as ``expect_all``, member by member.

        What happens between two steps counts. Those planned so far hold their places then, and whoever got another place meanwhile keeps
        that. If it is all in vain, or not gone on with, a member is expected where it was before unless somebody took that.
        """
        columns, reservations = self.state.columns, self.state.reservations
        with self._freeing_nothing():
            before = self._forget(members)
        ready_at = {reservation.pod_uid: reservation.node for reservation in before if reservation.stage is Stage.READY}
        known = self.state.pods.keys() & {pod.uid for pod in members}
        planned: dict[str, Reservation] = {}
        complete, is_alone, change_count = False, True, columns.change_count
        try:
            for pod in members:
                is_alone &= columns.change_count == change_count
                if pod.uid in known and pod.uid not in self.state.pods:
                    break
                if not self._node_of(pod):
                    among = allowed if pod is members[0] else None
                    with self._freeing_nothing():
                        if not self._expect_or_stay(pod, among, expires_at, ready_at.get(pod.uid)):
                            break
                    planned[pod.uid] = reservations[pod.uid]
                change_count = columns.change_count
                yield
            else:
                complete = all(self._node_of(pod) for pod in members)
        finally:
            if not complete:
                is_alone &= columns.change_count == change_count
                gone = known - self.state.pods.keys()
                with self._freeing_nothing():
                    self._undo(planned, [was for was in before if was.pod_uid not in gone], members, is_free=is_alone)
        return complete

    def _node_of(self, pod: PodFacts) -> str:
        """Return where a pod is bound or expected; nothing when it is nowhere."""
        reservation = self.state.reservations.get(pod.uid)
        return self.state.pods.get(pod.uid, pod).node_name if reservation is None else reservation.node

    def _expect_or_stay(self, pod: PodFacts, among: Collection[str] | None, expires_at: float, ready_at: str | None) -> bool:
        """Expect a member on one of some nodes, or where it was ready, if that is among them."""
        stays = ready_at is not None and (among is None or ready_at in among)
        if stays and ready_at is not None and not self.expect_on(pod, ready_at, expires_at, Stage.READY):
            return True
        return self.expect(pod, among, expires_at)

    def _undo(
        self, planned: Mapping[str, Reservation], before: Iterable[Reservation], members: Iterable[PodFacts], *, is_free: bool
    ) -> None:
        """Expect nobody where it was planned, and everybody where it was before, unless something else was decided since.

        Args: is_free: whether nobody else changed anything, so that where they were there is room.
        """
        reservations, pods = self.state.reservations, {pod.uid: pod for pod in members}
        for uid, reservation in planned.items():
            if reservations.get(uid) is reservation:
                self.state.release(uid)
        for was in before:
            if was.pod_uid in reservations:
                continue
            if is_free:
                self.state.reserve(was)
            else:
                self.expect_on(pods[was.pod_uid], was.node, was.expires_at, was.stage)

    @contextmanager
    def _freeing_nothing(self) -> Iterator[None]:
        """Have what is tried inside the block not count as freed."""
        freed_count = self.state.freed_count
        try:
            yield
        finally:
            self.state.freed_count = freed_count

    @contextmanager
    def trying(self, members: Sequence[PodFacts]) -> Iterator[None]:
        """Expect the members nowhere at the beginning of the block, and where they were before at its end."""
        with self._freeing_nothing():
            before = self._forget(members)
            try:
                yield
            finally:
                self._forget(members)
                for reservation in before:
                    self.state.reserve(reservation)

    def step_back(self, pod: PodFacts) -> None:
        """Keep the room of a member that was ready, and note that it is not."""
        if is_ready(self.state, pod):
            self.state.reserve(replace(self.state.reservations[pod.uid], stage=Stage.SOFT))

    def check_ready(self, members: Iterable[PodFacts]) -> list[PodFacts]:
        """Find each ready member's place once more; return those that have one, and expect the others nowhere."""
        checked: list[PodFacts] = []
        for pod in members:
            known = self.state.reservations[pod.uid]
            if self.expect_on(pod, known.node, known.expires_at, Stage.READY):
                self.state.release(pod.uid)
            else:
                checked.append(pod)
        return checked

    def start(self, members: Iterable[PodFacts], expires_at: float) -> None:
        """Make the places of ready members firm."""
        for pod in members:
            self.state.reserve(replace(self.state.reservations[pod.uid], stage=Stage.STARTING, expires_at=expires_at))

    def expect_on(self, pod: PodFacts, node: str, expires_at: float, stage: Stage = Stage.SOFT) -> str:
        """Expect one pod on a node; return why that is impossible, or nothing."""
        if pod.gpu is None:
            return ""
        try:
            request = pod_request(pod.gpu)
        except RequestError as exc:
            return str(exc)
        gpu = self.state.gpu_node(node)
        if gpu is not None and (lacking := not_offered(gpu, request)):
            return f"node {node} does not offer {lacking} that the pod asks for"
        plan = self.state.plan(node, request, self.default_policy, pod.uid)
        if isinstance(plan, Refusal):
            return plan.sentence
        demand, uses = HostDemand(pod.cpu_milli, pod.memory_mib), footprint(pod.gpu.containers, plan)
        self.state.reserve(Reservation(pod.uid, node, uses, demand, stage, expires_at))
        return ""

    def expect(self, pod: PodFacts, allowed: Collection[str] | None, expires_at: float) -> bool:
        """Expect one pod on the best of the allowed nodes, or of all; return whether it fits on one."""
        shape = self.shape_of(pod)
        if shape is None:
            return False
        verdict = self.shapes.verdict(shape)
        fitting = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
        if allowed is not None:
            fitting = fitting[[self.state.names[row] in allowed for row in fitting.tolist()]]
        if not len(fitting):
            return False
        node = self.state.names[best_row(self.shapes, verdict, fitting, pod.uid)]
        return not self.expect_on(pod, node, expires_at)

    def shape_of(self, pod: PodFacts) -> PodShape | None:
        """Reduce a pod to what verdicts depend on; None when it asks for nothing, or for what nobody could give."""
        if pod.gpu is None:
            return None
        try:
            return PodShape.of(pod_request(pod.gpu), self.default_policy, HostDemand(pod.cpu_milli, pod.memory_mib))
        except RequestError:
            return None

    def _forget(self, members: Sequence[PodFacts]) -> list[Reservation]:
        """Expect the members nowhere; return where they were expected."""
        before = [self.state.reservations[pod.uid] for pod in members if pod.uid in self.state.reservations]
        for pod in members:
            self.state.release(pod.uid)
        return before


def in_order(members: Iterable[PodFacts], state: ClusterState) -> list[PodFacts]:
    """Order members for planning: those that are ready, then those expected somewhere, then the important ones, then by name."""
    return sorted(members, key=lambda pod: (not is_ready(state, pod), pod.uid not in state.reservations, -pod.priority, pod.name, pod.uid))
