# SPDX-License-Identifier: Apache-2.0
"""Plans seats for all pods of a workload, with the same verdicts and the same search as filter and bind.

A seat is a reservation under a UID of its own, because its pod does not exist yet. It does not expire by itself. All seats are found on one
state, or none is kept. The largest pods come first. A pod that does not fit is explained while the seats found so far still count.

The seats of a workload are written into its answer. After a restart they are reserved again on the same nodes and GPUs, so that a different
order of planning cannot make them fail.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

import numpy as np

from aliquot.placement.refusal import Refusal
from aliquot.placement.request import RequestError
from scheduler_plugin.core.admit.kueue import Domain
from scheduler_plugin.core.cluster.columns import Bools
from scheduler_plugin.core.cluster.decisions import QueriedNodes
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeRules
from scheduler_plugin.core.cluster.plan import not_offered, plan_on_node
from scheduler_plugin.core.cluster.pods import PodFacts, footprint
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState, Reservation
from scheduler_plugin.core.explain.why import explain_pod
from scheduler_plugin.core.fit.judge import best_row
from scheduler_plugin.core.fit.kube_filters import host_has_room
from scheduler_plugin.core.fit.shapes import PodShape
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.score.cost import HostDemand

SEAT_PREFIX: Final = "hold/"
"""Before the UID of a workload: the beginning of the UIDs of its seats."""
NODES_TRIED: Final = 8
"""Nodes on which the columns see room and placement's search finds none."""
MAX_RECORD_CHARS: Final = 30_000
"""Of the seats in an answer: the API server takes 32,768. Seats that are left out are planned freely after a restart."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The pods of one pod set that need seats."""

    pod_set: str
    pod: PodFacts
    """Such a pod, without a UID."""
    count: int
    rules: NodeRules
    domains: tuple[Domain, ...] | None = None
    """Where topology-aware scheduling wants them; None for any node that the rules allow."""

    def parts(self) -> Iterator[tuple[int, NodeRules]]:
        """Yield numbers of pods, and the rules for their nodes."""
        if self.domains is None:
            yield self.count, self.rules
            return
        left = self.count
        for domain in self.domains:
            yield min(left, domain.count), self.rules.narrowed(domain.labels)
            left -= min(left, domain.count)
        if left:
            yield left, self.rules


@dataclass(slots=True, eq=False)
class Seat:
    """Room for one pod of a pod set. It is reserved under ``uid``, and under the pod's UID once a pod has taken it."""

    pod_set: str
    shape: PodShape
    node: str
    pod: PodFacts
    """The pod for which it was planned, with the UID of the seat."""
    taken_by: str = ""

    @property
    def uid(self) -> str:
        """The UID of the reservation before a pod takes it."""
        return self.pod.uid

    @property
    def holder(self) -> str:
        """The UID of the reservation."""
        return self.taken_by or self.uid


@dataclass(frozen=True, slots=True)
class Lacking:
    """Why a workload gets no seats; empty if the caller did not ask for the reason."""

    sentence: str = ""


@dataclass(frozen=True, slots=True)
class SeatRecord:
    """Where a seat was: the node and the minor numbers of its GPUs."""

    pod_set: str
    node: str
    minors: tuple[int, ...]


def seat_uid(workload_uid: str, pod_set: str, number: int) -> str:
    """Return the UID under which a seat is reserved."""
    return f"{SEAT_PREFIX}{workload_uid}/{pod_set}/{number}"


class Seating:
    """Plans seats on the present state. Not thread-safe: each call leaves the state with all seats of a workload, or with none."""

    def __init__(self, planner: Planner, nodes: NodeDirectory) -> None:
        self._planner = planner
        self._nodes = nodes

    @property
    def _state(self) -> ClusterState:
        return self._planner.state

    def seat(self, workload_uid: str, demands: Sequence[Demand], *, explain: bool = True) -> list[Seat] | Lacking:
        """Reserve a seat for each pod. Args: explain: whether to say why the first pod without a seat finds none: that takes longer."""
        return self._all_or_none(_Attempt(workload_uid, explain), demands)

    def seat_again(self, workload_uid: str, demands: Sequence[Demand], records: Sequence[SeatRecord]) -> list[Seat] | Lacking:
        """Reserve the seats of an answer again: each on its node and GPUs if these have room, otherwise anywhere."""
        return self._all_or_none(_Attempt(workload_uid, explains=True, records=list(records)), demands)

    def _all_or_none(self, attempt: "_Attempt", demands: Sequence[Demand]) -> list[Seat] | Lacking:
        freed_count = self._state.freed_count
        attempt.pods.update(reservation.node for reservation in self._state.reservations.values())
        for demand in sorted(demands, key=self._size, reverse=True):
            lacking = self._seat_pod_set(attempt, demand)
            if lacking is not None:
                for seat in attempt.seats:
                    self._state.release(seat.uid)
                self._state.freed_count = freed_count  # a plan that failed frees nothing
                return lacking
        return attempt.seats

    def _size(self, demand: Demand) -> tuple[int, int]:
        """Return what one pod needs, to plan the largest first: vGPUs, then memory."""
        shape = self._planner.shape_of(demand.pod)
        containers = () if shape is None else shape.request.containers
        vgpus = sum(one.vgpus + sum(count for _, count in one.mig) for one in containers)
        return vgpus, sum(one.memory_bytes or 0 for one in containers)

    def _seat_pod_set(self, attempt: "_Attempt", demand: Demand) -> Lacking | None:
        """Reserve the seats of one pod set; say what is lacking if there are not enough."""
        number = 0
        for count, rules in demand.parts():
            allowed = self._mask(rules)
            for _ in range(count):
                pod = _with_uid(demand.pod, seat_uid(attempt.workload_uid, demand.pod_set, number))
                shape = self._planner.shape_of(pod)
                node = "" if shape is None else self._reserve(attempt, demand, pod, shape, allowed)
                if shape is None or not node:
                    return self._lacking(pod, demand, number, allowed) if attempt.explains else Lacking()
                attempt.seats.append(Seat(demand.pod_set, shape, node, pod))
                attempt.pods[node] += 1
                number += 1
        return None

    def _mask(self, rules: NodeRules) -> Bools:
        """Return which rows a pod with these rules may use."""
        names = self._nodes.allowed(rules)
        return np.array([name in names for name in self._state.names], dtype=np.bool_)

    def _reserve(self, attempt: "_Attempt", demand: Demand, pod: PodFacts, shape: PodShape, allowed: Bools) -> str:
        """Reserve one seat; return its node, or an empty text."""
        for record in [record for record in attempt.records if record.pod_set == demand.pod_set]:
            attempt.records.remove(record)
            if self._reserve_as_before(pod, record, allowed):
                return record.node
        verdict, columns = self._planner.shapes.verdict(shape), self._state.columns
        columns.derive()
        rows = np.flatnonzero(verdict.reason[: len(allowed)] == NodeReason.FITS.value)
        rows = rows[allowed[rows] & host_has_room(columns, rows, shape.demand)] if len(rows) else rows
        rows = rows[[self._takes_another_pod(attempt, self._state.names[row]) for row in rows.tolist()]] if len(rows) else rows
        for _ in range(NODES_TRIED):
            if not len(rows):
                break
            row = best_row(self._planner.shapes, verdict, rows, pod.uid)
            node = self._state.names[row]
            if not self._planner.reserve_on(pod, node, inf):
                return node
            rows = rows[rows != row]
        return ""

    def _reserve_as_before(self, pod: PodFacts, record: SeatRecord, allowed: Bools) -> bool:
        """Reserve a seat on the node and the GPUs of a record; return whether they have room."""
        row, gpu, request = self._state.row_of(record.node), self._state.gpu_node(record.node), self._planner.requests.of(pod)
        if row is None or gpu is None or not allowed[row] or pod.gpu is None or request is None or isinstance(request, RequestError):
            return False
        if not_offered(gpu, request):
            return False
        states = [one for one in self._state.device_states(record.node) if one.device.minor in record.minors]
        plan = plan_on_node(states, request, request.preferences.policy or self._planner.default_policy, gpu.links, pod.uid)
        if isinstance(plan, Refusal):
            return False
        demand, uses = HostDemand(pod.cpu_milli, pod.memory_mib), footprint(pod.gpu.containers, plan)
        self._state.reserve(Reservation(pod.uid, record.node, uses, demand))
        return True

    def _takes_another_pod(self, attempt: "_Attempt", node: str) -> bool:
        most = self._state.pod_capacity_of(node)
        return not most or sum(1 for _ in self._state.pods_on(node)) + attempt.pods[node] < most

    def _lacking(self, pod: PodFacts, demand: Demand, seated: int, allowed: Bools) -> Lacking:
        """Explain the first pod without a seat."""
        rows = np.flatnonzero(allowed).astype(np.int32)
        before = f"{seated} of {demand.count} pods of pod set {demand.pod_set} fit now; for the next one "
        asked = QueriedNodes.of(rows, self._state.naming_count)
        if asked is None:
            known = self._state.node_count
            text = f"none of the {known} nodes with GPUs has the labels and taints that its flavor, topology or pods require"
            return Lacking(before + text + ".")
        why, _ = explain_pod(self._state, self._planner.shapes, self._planner.default_policy, pod, asked)
        return Lacking(before + why.sentence)


@dataclass(slots=True)
class _Attempt:
    """One attempt to seat a workload."""

    workload_uid: str
    explains: bool
    records: list[SeatRecord] = field(default_factory=list)
    pods: Counter[str] = field(default_factory=Counter)
    """Expected pods by node."""
    seats: list[Seat] = field(default_factory=list)


def _with_uid(pod: PodFacts, uid: str) -> PodFacts:
    return replace(pod, uid=uid, gpu=None if pod.gpu is None else replace(pod.gpu, uid=uid))


# --- the text form ---

_HELD: Final = "Seats are held: "


def encode_seats(state: ClusterState, seats: Sequence[Seat]) -> str:
    """Write seats as the message of an answer: ``POD-SET NODE/MINOR,MINOR NODE/MINOR; POD-SET ...``."""
    if not seats:
        return "no pod of the workload asks for a GPU of Aliquot"
    parts: dict[str, list[str]] = {}
    for seat in seats:
        minors = sorted(_minors(state, seat))
        parts.setdefault(seat.pod_set, []).append(f"{seat.node}/{','.join(map(str, minors))}")
    text = _HELD + "; ".join(" ".join((pod_set, *places)) for pod_set, places in parts.items())
    return text if len(text) <= MAX_RECORD_CHARS else text[:MAX_RECORD_CHARS].rpartition(" ")[0]


def _minors(state: ClusterState, seat: Seat) -> set[int]:
    gpu = state.gpu_node(seat.node)
    entries = () if gpu is None else gpu.devices
    minor_of = {entry.device.uuid: entry.device.minor for entry in entries}
    minor_of |= {one.uuid: entry.device.minor for entry in entries for one in entry.device.mig_instances}
    return {minor_of[uuid] for uuid in state.footprint_of(seat.holder) if uuid in minor_of}


def decode_seats(message: str) -> list[SeatRecord]:
    """Read the seats of an answer. What cannot be read is left out: such a seat is planned freely."""
    if not message.startswith(_HELD):
        return []
    return [record for part in message.removeprefix(_HELD).split("; ") for record in _decode_part(part.split(" "))]


def _decode_part(words: Sequence[str]) -> Iterable[SeatRecord]:
    for place in words[1:]:
        node, _, minors = place.rpartition("/")
        numbers = minors.split(",")
        if node and all(number.isascii() and number.isdigit() and len(number) <= 4 for number in numbers):
            yield SeatRecord(words[0], node, tuple(map(int, numbers)))
