# SPDX-License-Identifier: Apache-2.0
"""Seats: room kept for the replacements of pods that consolidation moves. filter sends a replacement to its seat.

A replacement has a new UID. It is recognised by its controller and by what it requests: then the seat's reservation becomes its own. If
kube-scheduler's own filters exclude the node, the pod is scheduled like any other.
"""

from dataclasses import dataclass, replace

from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.core.consolidate.plan import seat_uid
from scheduler_plugin.core.gang.plan import Planner


@dataclass(slots=True)
class Seat:
    """The seat for one replacement. Its room is a reservation: under ``seat_uid`` of the pod, later under the replacement's UID."""

    pod: PodFacts
    """The pod that moves; after a restart the replacement itself, if that pod is gone already."""
    node: str
    taken_by: str = ""
    """UID of the replacement; empty before it comes."""

    @property
    def leaving(self) -> str:
        """UID of the pod that moves; empty if it is gone already."""
        return "" if self.taken_by == self.pod.uid else self.pod.uid

    @property
    def holder(self) -> str:
        """The UID of the reservation."""
        return self.taken_by or seat_uid(self.pod.uid)


class Seats:
    """All seats of the moves under way: few, and none most of the time."""

    def __init__(self, state: ClusterState, planner: Planner) -> None:
        self._state = state
        self._planner = planner
        self._seats: list[Seat] = []

    def put(self, seat: Seat) -> None:
        """Keep a seat, after its room was reserved."""
        self._seats.append(seat)

    def drop(self, seat: Seat) -> None:
        """Release a seat, unless its replacement is being bound."""
        self._seats = [other for other in self._seats if other is not seat]
        known = self._state.reservations.get(seat.holder)
        if known is not None and not known.stage.is_firm:
            self._state.release(seat.holder)

    def row_for(self, pod: PodFacts) -> int | None:
        """Return the row of the node where a pod has a seat; a seat that waits for such a pod becomes its own."""
        if not self._seats or not pod.controller_uid:
            return None
        seat = next((seat for seat in self._seats if seat.taken_by == pod.uid), None) or self._take(pod)
        return None if seat is None else self._state.row_of(seat.node)

    def wait_for(self, pod: PodFacts) -> bool:
        """Whether a seat may be meant for a pod: one of its controller's pods moves."""
        controllers = {(seat.pod.namespace, seat.pod.controller_uid) for seat in self._seats}
        return bool(pod.controller_uid) and (pod.namespace, pod.controller_uid) in controllers

    def _take(self, pod: PodFacts) -> Seat | None:
        """Give a pod the first seat that waits for one like it, unless the pod is being bound."""
        known = self._state.reservations.get(pod.uid)
        if known is not None and known.stage.is_firm:
            return None
        seat = next((seat for seat in self._seats if self._waits_for(seat, pod)), None)
        held = None if seat is None else self._state.reservations.get(seat.holder)
        if seat is None or held is None or held.stage is not Stage.SOFT:
            return None
        self._state.release(seat.holder)
        self._state.reserve(replace(held, pod_uid=pod.uid))
        seat.taken_by = pod.uid
        return seat

    def _waits_for(self, seat: Seat, pod: PodFacts) -> bool:
        old = seat.pod
        if seat.taken_by or (pod.namespace, pod.controller_uid) != (old.namespace, old.controller_uid) or pod.uid == old.uid:
            return False
        return self._planner.shape_of(pod) == self._planner.shape_of(old)
