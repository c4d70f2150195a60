# SPDX-License-Identifier: Apache-2.0
"""Soft reservations: room kept for a pod from its rating until its binding, so that the next pod does not count on the same devices."""

from collections import deque
from dataclasses import replace
from typing import Final

from aliquot.contract.model import PodRequest
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.pods import Footprint, PodFacts, footprint
from scheduler_plugin.core.cluster.state import Reservation, Stage
from scheduler_plugin.core.fit.shapes import Verdict
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.cache import CALLS_KEPT
from scheduler_plugin.ports import Clock

PREPARE_SECONDS: Final = 600.0
"""How long kube-scheduler waits by default for a pod's volumes and claims before it calls bind (VolumeBinding's bindTimeoutSeconds)."""


class Reservations:
    """Makes and moves soft reservations in the state."""

    def __init__(self, planner: Planner, clock: Clock, soft_seconds: float) -> None:
        """Args: soft_seconds: how long a reservation lasts; PREPARE_SECONDS more for a pod in preparation, while its attempt lasts."""
        self._state = planner.state
        self._planner = planner
        self._clock = clock
        self._soft_seconds = soft_seconds
        self._unplanned: deque[tuple[str, PodRequest]] = deque(maxlen=CALLS_KEPT)
        """UIDs and requests of pods with a reservation, and without a plan of their devices yet."""

    def make(self, pod: PodFacts, request: PodRequest, verdict: Verdict, row: int, *, is_bound_next: bool = True) -> None:
        """Reserve what the pod probably gets on a node where it fits, unless its binding is under way.

        Args: is_bound_next: whether to plan its devices as soon as there is time. A plan made too early is out of date when it is needed.

        For one container these are the devices by which the node was rated. bind runs placement's own search, which may prefer other
        devices at the same cost, and moves the reservation then. A pod without GPUs reserves its CPU and RAM.
        """
        node = self._state.names[row]
        known, expires_early_at = self._state.reservations.get(pod.uid), self._clock.monotonic() + self._soft_seconds
        is_there = pod.uid in self._state.pods  # the watch may have reported the end of a pod that is not
        expires_at = expires_early_at + (PREPARE_SECONDS if pod.needs_preparing and is_there else 0.0)
        if known is not None and known.stage.is_firm:
            return
        if known is not None and known.node == node and known.expires_at > expires_at:
            return  # planned with its gang, for longer
        uses = self._likely_uses(pod, request, verdict, row)
        if uses is not None:
            demand = HostDemand(pod.cpu_milli, pod.memory_mib)
            self._state.reserve(Reservation(pod.uid, node, uses, demand, Stage.SOFT, expires_at, expires_early_at))
            if pod.gpu is not None and is_bound_next:
                self._unplanned.append((pod.uid, request))

    def keep(self, pod: PodFacts, node: str) -> bool:
        """Keep the pod's room on a node, if it has some and gets devices there; return whether it does.

        This needs one plan, which the binding needs too, and no verdict on the nodes.
        """
        known = self._state.reservations.get(pod.uid)
        if known is None or known.node != node or known.stage is not Stage.SOFT or pod.needs_preparing:
            return False
        return not self._planner.reserve_on(pod, node, max(known.expires_at, self._clock.monotonic() + self._soft_seconds))

    def prepare(self) -> bool:
        """Plan the devices that binding one of the latest pods needs. The state keeps the plan. Returns: whether there was work."""
        while self._unplanned:
            uid, request = self._unplanned.popleft()
            reservation = self._state.reservations.get(uid)
            if reservation is not None:
                self._state.plan(reservation.node, request, self._planner.default_policy, uid)
                return True
        return False

    def follow_nomination(self, pod: PodFacts) -> None:
        """Move the reservation of a pod in preparation to the node that kube-scheduler chose, if it differs from our best node.

        kube-scheduler 1.35 and later write that node when they begin to prepare a pod. With earlier versions only bind moves the
        reservation.
        """
        known, node = self._state.reservations.get(pod.uid), pod.nominated_node
        if known is None or known.node == node or known.expires_at <= known.expires_early_at:
            return
        if self._planner.reserve_on(pod, node, known.expires_at):
            self._state.end_attempt(pod.uid)
        else:
            self._state.reserve(replace(self._state.reservations[pod.uid], expires_early_at=known.expires_early_at))

    def binding_row(self, pod: PodFacts) -> int | None:
        """Return the row of the node to which a binding of the pod is under way."""
        known = self._state.reservations.get(pod.uid)
        return self._state.row_of(known.node) if known is not None and known.stage is Stage.BINDING else None

    def _likely_uses(self, pod: PodFacts, request: PodRequest, verdict: Verdict, row: int) -> Footprint | None:
        node = self._state.names[row]
        if pod.gpu is None:
            return {}
        if verdict.chosen is not None and len(request.containers) == 1:
            return self._state.nominal_footprint(node, request, verdict.chosen[row].tolist())
        assignment = self._state.plan(node, request, self._planner.default_policy, pod.uid)
        return None if isinstance(assignment, Refusal) else footprint(pod.gpu.containers, assignment)
