# SPDX-License-Identifier: Apache-2.0
"""The seats of workloads that Kueue admits, until their pods come. filter sends each pod to its seat.

A pod names its workload and pod set in an annotation that Kueue copies from the answer of the admission check. It takes a seat of that pod
set as soon as it is known, if the seat has room for it. Then the seat's reservation becomes its own. A pod that is deleted before its
binding gives the seat back.
"""

from dataclasses import dataclass, field, replace
from math import inf

from aliquot import contract
from scheduler_plugin.core.admit.seating import Seat
from scheduler_plugin.core.cluster.columns import Rows
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.shapes import PodShape
from scheduler_plugin.core.gang.plan import Planner

WorkloadKey = tuple[str, str]
"""Namespace and name."""


def hold_text(workload_name: str, pod_set: str) -> str:
    """Return the value of the annotation on the pods of a pod set."""
    return f"{workload_name}/{pod_set}"


@dataclass(slots=True)
class Hold:
    """The seats of one workload that are not used yet."""

    workload_uid: str
    seats: list[Seat]
    deadline: float
    """Monotonic time at which the seats without a pod end, once the answer is Ready."""
    came: int = 0
    """How many pods had taken a seat when the deadline was last set."""
    is_rebuilt: bool = False
    """Whether an earlier leader made it: then pods may have come and gone unseen."""
    pods: set[str] = field(default_factory=set)
    """UIDs of the pods that took a seat."""


class WorkloadSeats:
    """All holds, by workload."""

    def __init__(self, state: ClusterState, planner: Planner) -> None:
        self._state = state
        self._planner = planner
        self._holds: dict[WorkloadKey, Hold] = {}
        self._seat_of: dict[str, tuple[Hold, Seat]] = {}
        """By the UID of the pod that took it."""

    def __contains__(self, key: WorkloadKey) -> bool:
        return key in self._holds

    @property
    def seats(self) -> int:
        """How many seats wait for a pod or its binding."""
        return sum(len(hold.seats) for hold in self._holds.values())

    def get(self, key: WorkloadKey) -> Hold | None:
        """Return the hold of a workload."""
        return self._holds.get(key)

    def all(self) -> list[tuple[WorkloadKey, Hold]]:
        """Return all holds."""
        return list(self._holds.items())

    def put(self, key: WorkloadKey, hold: Hold) -> None:
        """Keep a hold, after its seats were reserved."""
        self.drop(key)
        self._holds[key] = hold

    def drop(self, key: WorkloadKey) -> None:
        """Release all seats of a workload, except those of pods that are being bound."""
        hold = self._holds.pop(key, None)
        if hold is None:
            return
        for seat in hold.seats:
            self._seat_of.pop(seat.taken_by, None)
            self._release(seat.holder)

    def end(self, key: WorkloadKey, expires_at: float) -> None:
        """Release the seats that no pod has taken. The others stay with their pods until a moment, so that these can still be bound."""
        hold = self._holds.pop(key, None)
        for seat in () if hold is None else hold.seats:
            if self._seat_of.pop(seat.taken_by, None) is None:
                self._release(seat.uid)
            elif not self._is_firm(seat.taken_by) and (known := self._state.reservations.get(seat.taken_by)) is not None:
                self._state.reserve(replace(known, expires_at=min(known.expires_at, expires_at)))

    def clear(self) -> None:
        """Release everything: another replica leads."""
        for key in list(self._holds):
            self.drop(key)

    def mend(self, hold: Hold) -> bool:
        """Reserve again the seats that lost their room, such as by a binding that the API refused; return whether all have room.

        A seat without room is dropped.
        """
        before = len(hold.seats)
        for seat in [seat for seat in hold.seats if seat.holder not in self._state.reservations]:
            self._vacate(hold, seat)
        return len(hold.seats) == before

    # --- pods ---

    def has_seat(self, pod_uid: str) -> bool:
        """Whether a pod has taken a seat and is not known to be bound yet."""
        return pod_uid in self._seat_of

    def take(self, pod: PodFacts) -> Seat | None:
        """Give a pod a seat of its workload, if one is left; return it."""
        if not self._holds:
            return None
        if (known := self._seat_of.get(pod.uid)) is not None:
            if pod.uid in self._state.reservations:
                return known[1]
            self._vacate(*known)
        hold, pod_set = self._hold_for(pod)
        if hold is None or pod.node_name or pod.deletion_requested or self._is_firm(pod.uid):
            return None
        shape = self._planner.shape_of(pod)
        seat = self._free_seat(hold, pod_set, shape)
        if seat is None or not self._hand_over(seat, pod, is_alike=seat.shape == shape):
            return None
        seat.taken_by = pod.uid
        self._seat_of[pod.uid] = hold, seat
        hold.pods.add(pod.uid)
        return seat

    def row_for(self, pod: PodFacts, offered: Rows) -> int | None:
        """Return the row of the node where a pod has a seat. Args: offered: the rows that kube-scheduler offers for the pod."""
        seat = self.take(pod)
        if seat is None:
            return None
        rows = set(offered.tolist())
        if self._state.rows_by_name[seat.node] not in rows and not self._is_firm(pod.uid):
            seat = self._exchanged(pod, seat, rows)
        known = self._state.reservations.get(pod.uid)
        return self._state.row_of(seat.node) if known is not None and known.node == seat.node else None

    def on_gone(self, pod_uid: str) -> None:
        """Note that the watch shows a pod as bound or gone: its seat is used, or waits for another pod."""
        known = self._seat_of.pop(pod_uid, None)
        if known is None:
            return
        hold, seat = known
        pod = self._state.pods.get(pod_uid)
        if pod is not None and pod.node_name:
            hold.seats.remove(seat)
        else:
            self._vacate(hold, seat)

    def _vacate(self, hold: Hold, seat: Seat) -> None:
        """Have a seat wait for another pod, if its node has room; otherwise drop it.

        If its pod was just deleted there is room: no other code ran since the state forgot the pod.
        """
        self._seat_of.pop(seat.taken_by, None)
        self._release(seat.holder)
        seat.taken_by = ""
        if self._planner.reserve_on(seat.pod, seat.node, inf):
            hold.seats.remove(seat)

    def _exchanged(self, pod: PodFacts, mine: Seat, rows: set[int]) -> Seat:
        """Exchange a pod's seat for one on a node that it may use, if its workload has one; return its seat."""
        hold, _ = self._seat_of[pod.uid]
        other = self._exchangeable(hold, mine, rows)
        own_held = self._state.reservations.get(mine.holder)
        other_held = None if other is None else self._state.reservations.get(other.holder)
        if other is None or own_held is None or other_held is None:
            return mine
        loser = other.taken_by
        self._state.release(own_held.pod_uid)
        self._state.release(other_held.pod_uid)
        mine.taken_by, other.taken_by = loser, pod.uid
        self._state.reserve(replace(own_held, pod_uid=mine.holder))
        self._state.reserve(replace(other_held, pod_uid=pod.uid))
        self._seat_of[pod.uid] = hold, other
        if loser:
            self._seat_of[loser] = hold, mine
        return other

    def _exchangeable(self, hold: Hold, mine: Seat, rows: set[int]) -> Seat | None:
        """Return a seat like this one on one of the nodes, if possible one that no pod has taken."""
        alike = (seat for seat in hold.seats if (seat.pod_set, seat.shape) == (mine.pod_set, mine.shape))
        others = [seat for seat in alike if self._state.rows_by_name[seat.node] in rows and not self._is_firm(seat.holder)]
        return min(others, key=lambda seat: bool(seat.taken_by), default=None)

    def _hold_for(self, pod: PodFacts) -> tuple[Hold | None, str]:
        """Return the hold and the pod set that a pod names."""
        text = "" if pod.gpu is None else pod.gpu.annotations.get(contract.ANNOTATION_HOLD, "")
        name, _, pod_set = text.rpartition("/")
        return self._holds.get((pod.namespace, name)), pod_set

    @staticmethod
    def _free_seat(hold: Hold, pod_set: str, shape: PodShape | None) -> Seat | None:
        """Return a seat that no pod has taken, if possible one that was planned for this shape."""
        free = [seat for seat in hold.seats if not seat.taken_by and seat.pod_set == pod_set]
        return min(free, key=lambda seat: seat.shape != shape, default=None)

    def _hand_over(self, seat: Seat, pod: PodFacts, *, is_alike: bool) -> bool:
        """Make a seat's reservation the pod's own, in place of any that it has; return whether the node has room for the pod.

        Args: is_alike: whether the seat was planned for just such a pod. Another webhook may have added a container to it.
        """
        held = self._state.reservations.get(seat.uid)
        if held is None:
            return False
        freed_count = self._state.freed_count
        self._state.release(held.pod_uid)
        if is_alike:
            self._state.reserve(replace(held, pod_uid=pod.uid))
            self._state.freed_count = freed_count  # the room is taken as before
        elif self._planner.reserve_on(pod, held.node, inf):
            self._state.reserve(held)
            self._state.freed_count = freed_count
            return False
        return True

    def _is_firm(self, uid: str) -> bool:
        known = self._state.reservations.get(uid)
        return known is not None and known.stage.is_firm

    def _release(self, uid: str) -> None:
        if not self._is_firm(uid):
            self._state.release(uid)
