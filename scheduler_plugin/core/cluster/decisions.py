# SPDX-License-Identifier: Apache-2.0
"""The latest decisions and their reasons: the record behind explanations, replay, and the retry of waiting pods.

Decisions are kept by pod UID, the newest last, and their number is limited; a pod's new decision replaces the old one. For a waiting pod
the nodes of the call are kept. For the last few decisions, including those on pods that are bound by now, all inputs are kept, to replay
them.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from aliquot.contract.model import PodRequest
from scheduler_plugin.core.cluster.columns import Bools, Ints, Rows
from scheduler_plugin.core.cluster.gang import Standing
from scheduler_plugin.core.cluster.journal import Moment
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason

MAX_KEPT: Final = 20_000
MAX_RECORDED: Final = 256


@dataclass(frozen=True, slots=True)
class QueriedNodes:
    """The nodes of a call that have an inventory, one bit for each row: thousands of pods can wait for thousands of nodes."""

    bits: bytes
    first: int
    """The row of the first node in the call: kube-scheduler starts with another node each time."""
    naming: int
    """The state's ``naming_count``: a row that got its name later is another node."""

    @classmethod
    def of(cls, rows: npt.NDArray[np.int32], naming: int) -> "QueriedNodes | None":
        """Keep rows; None without rows."""
        if not len(rows):
            return None
        asked = np.zeros(int(rows.max()) + 1, dtype=np.bool_)
        asked[rows] = True
        return cls(np.packbits(asked).tobytes(), int(rows[0]), naming)

    def rows(self) -> Rows:
        """Return the rows in order, starting with the first of the call."""
        rows = np.flatnonzero(np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8)))
        return np.roll(rows, -int(np.searchsorted(rows, self.first)))

    def among(self, rows: Rows, named_at: Ints) -> Bools:
        """Return which rows the pod may use: those of the call, and those that belong to other nodes by now.

        Args: named_at: the state's ``naming_count`` when each of these rows got its name.
        """
        asked = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8)).astype(np.bool_)
        return (named_at > self.naming) | ((rows < len(asked)) & asked[np.minimum(rows, len(asked) - 1)])


@dataclass(frozen=True, slots=True)
class Decision:
    """One filter call: how many nodes fit, and how many failed for which reason."""

    pod: PodFacts
    request: PodRequest
    at: float
    """Seconds since 1970."""
    generation: int
    """The state's change counter."""
    fitting: int
    failed: Mapping[NodeReason, int]
    asked: QueriedNodes | None = None
    """For a pod that fits nowhere."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of prioritize after a filter call."""

    node: str
    score: int
    moment: Moment
    names: tuple[str, ...]
    """Of all nodes at that time, by row."""
    rows: npt.NDArray[np.int32]
    """The nodes of the call that have an inventory; fewer than in filter if kube-scheduler rates only some."""

    @property
    def asked(self) -> list[str]:
        """The names of these nodes."""
        return [self.names[row] for row in self.rows.tolist()]


@dataclass(frozen=True, slots=True)
class GangDecision:
    """A decision on a member of a gang: it depends on where the other members can go."""

    standing: Standing
    moment: Moment
    """Before the gang was planned."""
    node: str = ""
    """The node that the plan of the gang has for the pod."""
    refusal: str = ""
    """Why the gang cannot start."""


@dataclass(slots=True)
class Record:
    """A decision with its inputs."""

    decision: Decision
    moment: Moment
    names: tuple[str, ...]
    """Of all nodes at that time, by row."""
    rows: npt.NDArray[np.int32]
    """The nodes of the call that have an inventory."""
    choice: Choice | None = None
    gang: GangDecision | None = None

    @property
    def asked(self) -> list[str]:
        """The names of these nodes."""
        return [self.names[row] for row in self.rows.tolist()]


class Queue:
    """Decisions on waiting pods, by UID, in order of priority, then of their time. They are kept sorted, so that reading them is cheap."""

    def __init__(self) -> None:
        self._by_priority: dict[int, dict[str, Decision]] = {}
        self._priority_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._priority_of)

    def get(self, pod_uid: str) -> Decision | None:
        """Return the decision on a pod."""
        priority = self._priority_of.get(pod_uid)
        return None if priority is None else self._by_priority[priority][pod_uid]

    def put(self, decision: Decision) -> None:
        """Add a decision as the latest, in place of the pod's earlier one."""
        uid, priority = decision.pod.uid, decision.pod.priority
        self.pop(uid)
        self._by_priority.setdefault(priority, {})[uid] = decision
        self._priority_of[uid] = priority

    def pop(self, pod_uid: str) -> Decision | None:
        """Remove a pod; return the decision on it."""
        priority = self._priority_of.pop(pod_uid, None)
        if priority is None:
            return None
        decisions = self._by_priority[priority]
        decision = decisions.pop(pod_uid)
        if not decisions:
            del self._by_priority[priority]
        return decision

    def and_then(self, other: "Queue") -> list[Decision]:
        """Return the decisions of both queues by priority; with equal priority, those of this queue come first."""
        both = (self._by_priority, other._by_priority)
        priorities = sorted({priority for queue in both for priority in queue}, reverse=True)
        return [decision for priority in priorities for queue in both for decision in queue.get(priority, _NO_DECISIONS).values()]


_NO_DECISIONS: Final[Mapping[str, Decision]] = {}


@dataclass(slots=True)
class Decisions:
    """The latest decision on each pod, and the latest few with their inputs."""

    by_uid: OrderedDict[str, Decision] = field(default_factory=OrderedDict)
    recorded: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    """By pod UID."""
    latest_at: float = -math.inf
    """Time of the latest decision, in seconds since 1970."""
    queue: Queue = field(default_factory=Queue)
    """Decisions on pods that fitted nowhere at the last call."""

    @property
    def latest(self) -> Decision | None:
        """The latest decision that is kept."""
        return next(reversed(self.by_uid.values()), None)

    def record(self, decision: Decision, inputs: Record | None = None) -> None:
        """Keep a decision, in place of the pod's earlier one."""
        self.latest_at = max(self.latest_at, decision.at)
        self.by_uid[decision.pod.uid] = decision
        self.by_uid.move_to_end(decision.pod.uid)
        if decision.fitting:
            self.queue.pop(decision.pod.uid)
        else:
            self.queue.put(decision)
        if len(self.by_uid) > MAX_KEPT:
            self.forget(next(iter(self.by_uid)))
        if inputs is not None:
            self._keep(inputs)

    def chose(self, pod_uid: str, choice: Choice) -> None:
        """Add the result of prioritize to the record of a pod's decision."""
        record = self.recorded.get(pod_uid)
        if record is not None and not (record.gang and record.gang.node):
            if choice.rows is not record.rows and choice.names is record.names and np.array_equal(choice.rows, record.rows):
                choice = replace(choice, rows=record.rows)
            record.choice = choice

    def forget(self, pod_uid: str) -> None:
        """Drop the decision on a pod that is bound or gone; its record stays."""
        self.by_uid.pop(pod_uid, None)
        self.queue.pop(pod_uid)

    def forget_gone(self, decision: Decision, pods: Mapping[str, PodFacts], before: float) -> None:
        """Drop a decision if its pod is bound or gone.

        If the watch shows a pod's end during an attempt, the decision is recorded after that, and no further event would drop it.

        Args: pods: all known pods, by UID. before: only older decisions are dropped, in seconds since 1970. ``pods`` must be newer.
        """
        uid = decision.pod.uid
        if decision.at < before and (uid not in pods or pods[uid].node_name) and self.by_uid.get(uid) is decision:
            self.forget(uid)

    def waiting(self) -> list[Decision]:
        """Return the decisions on waiting pods by priority; with equal priority, the longest waiting first."""
        return self.queue.and_then(Queue())

    def _keep(self, record: Record) -> None:
        """Keep a record. Records of at most two pictures of the state are kept, because each record keeps its whole picture in memory."""
        newest = next(reversed(self.recorded.values()), record)
        if newest.moment.part is not record.moment.part:
            parts = (newest.moment.part, record.moment.part)
            for uid in [uid for uid, old in self.recorded.items() if not any(old.moment.part is part for part in parts)]:
                del self.recorded[uid]
        self.recorded[record.decision.pod.uid] = record
        self.recorded.move_to_end(record.decision.pod.uid)
        if len(self.recorded) > MAX_RECORDED:
            self.recorded.popitem(last=False)
