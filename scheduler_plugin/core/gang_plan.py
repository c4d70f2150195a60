"""Where all members of a gang could go at once: placed on one picture of the cluster, so that two gangs never each hold a part of what both
need."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from placement.refusal import Refusal
from placement.request import RequestError, pod_request
from proto.model import Policy
from scheduler_plugin.core.gang import Gang, Standing
from scheduler_plugin.core.judge import best_row
from scheduler_plugin.core.pods import PodFacts, footprint
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.shapes import PodShape, Shapes
from scheduler_plugin.core.state import ClusterState, Reservation, Stage


def is_placed(state: ClusterState, pod: PodFacts) -> bool:
    """Whether a pod is bound, or its binding is under way or taken by the API."""
    reservation = state.reservations.get(pod.uid)
    return bool(pod.node_name) or (reservation is not None and reservation.stage is not Stage.SOFT)


@dataclass(frozen=True, slots=True)
class Planner:
    """Places members of gangs by what decides on single pods too."""

    state: ClusterState
    shapes: Shapes
    default_policy: Policy

    def place(self, pod: PodFacts, gang: Gang, allowed: Collection[str], standing: Standing, expires_at: float) -> str | None:
        """Find a node for a member among the allowed ones, and expect all that are needed where they are planned.

        Returns: the node; "" for whichever fits, because the pod need not wait for others; None when the gang cannot start now.
        """
        if self.goes_alone(pod, gang):
            return ""
        needed = self.needed(pod, gang)
        if not needed:
            return None
        reservations = self.state.reservations
        if standing.planned and all(member.uid in reservations for member in needed) and reservations[pod.uid].node in allowed:
            return reservations[pod.uid].node
        if standing.pauses or not self.expect_all(needed, allowed, expires_at):
            return None
        return reservations[pod.uid].node

    def sentence(self, pod: PodFacts, gang: Gang, standing: Standing) -> str:
        """Say why a gang cannot start."""
        if len(self.members(pod, gang)) < gang.minimum:
            return f"gang: {gang.minimum} members must start together, fewer exist"
        if standing.pauses:
            return "gang: it held room without starting and pauses"
        return "gang: no room for enough members at once"

    def goes_alone(self, pod: PodFacts, gang: Gang) -> bool:
        """Whether a member need not wait for others: enough are placed, or it is itself."""
        placed = [uid for uid, other in self.members(pod, gang).items() if is_placed(self.state, other)]
        return len(placed) >= gang.minimum or pod.uid in placed

    def needed(self, pod: PodFacts, gang: Gang) -> list[PodFacts]:
        """Return as many unplaced members as the gang lacks, the pod first; nobody when there are too few."""
        members = self.members(pod, gang).values()
        lacking = gang.minimum - sum(is_placed(self.state, other) for other in members)
        others = [other for other in in_order(members, self.state) if not is_placed(self.state, other) and other.uid != pod.uid]
        needed = [pod, *others[: lacking - 1]]
        return needed if len(needed) == lacking else []

    def members(self, pod: PodFacts, gang: Gang) -> dict[str, PodFacts]:
        """Return the known members by UID, this pod among them."""
        members = {other.uid: other for other in self.state.gang_members(gang.key)}
        return {pod.uid: pod} | members

    def expect_all(self, members: Sequence[PodFacts], allowed: Collection[str], expires_at: float) -> bool:
        """Expect all members somewhere until a moment, the first of them on one of the allowed nodes; or leave everything as it was.

        Returns: whether all of them have a place now.
        """
        freed_count = self.state.freed_count
        before = self._forget(members)
        complete = all(self.expect(pod, allowed if pod is members[0] else None, expires_at) for pod in members)
        if not complete:
            self._forget(members)
            self._expect_again(before)
        self.state.freed_count = freed_count  # what was tried freed nothing
        return complete

    @contextmanager
    def trying(self, members: Sequence[PodFacts]) -> Iterator[None]:
        """Expect the members nowhere at the beginning of the block, and where they were before at its end."""
        freed_count = self.state.freed_count
        before = self._forget(members)
        try:
            yield
        finally:
            self._forget(members)
            self._expect_again(before)
            self.state.freed_count = freed_count

    def expect_on(self, pod: PodFacts, node: str, expires_at: float) -> str:
        """Expect one pod on a node; return why that is impossible, or nothing."""
        if pod.gpu is None:
            return ""
        try:
            request = pod_request(pod.gpu)
        except RequestError as exc:
            return str(exc)
        plan = self.state.plan(node, request, self.default_policy, pod.uid)
        if isinstance(plan, Refusal):
            return plan.sentence
        demand, uses = HostDemand(pod.cpu_milli, pod.memory_mib), footprint(pod.gpu.containers, plan)
        self.state.reserve(Reservation(pod.uid, node, uses, demand, Stage.SOFT, expires_at))
        return ""

    def expect(self, pod: PodFacts, allowed: Collection[str] | None, expires_at: float) -> bool:
        """Expect one pod on the best of the allowed nodes, or of all; return whether it fits on one."""
        if pod.gpu is None:
            return False
        try:
            shape = PodShape.of(pod_request(pod.gpu), self.default_policy, HostDemand(pod.cpu_milli, pod.memory_mib))
        except RequestError:
            return False
        verdict = self.shapes.verdict(shape)
        fitting = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
        if allowed is not None:
            fitting = fitting[[self.state.names[row] in allowed for row in fitting.tolist()]]
        if not len(fitting):
            return False
        node = self.state.names[best_row(self.shapes, verdict, fitting, pod.uid)]
        return not self.expect_on(pod, node, expires_at)

    def _forget(self, members: Sequence[PodFacts]) -> list[Reservation]:
        """Expect the members nowhere; return where they were expected."""
        before = [self.state.reservations[pod.uid] for pod in members if pod.uid in self.state.reservations]
        for pod in members:
            self.state.release(pod.uid)
        return before

    def _expect_again(self, before: Sequence[Reservation]) -> None:
        for reservation in before:
            self.state.reserve(reservation)


def in_order(members: Iterable[PodFacts], state: ClusterState) -> list[PodFacts]:
    """Order members for planning: those already expected somewhere, then the important ones, then by name."""
    return sorted(members, key=lambda pod: (pod.uid not in state.reservations, -pod.priority, pod.name, pod.uid))
