"""What was decided lately and why: the record behind explanations, replay, and the retry of pods that wait.

Kept by pod UID, the newest last, and bounded; a pod's later decision replaces the earlier. Of a pod that waits the nodes are kept that were
asked about. Of the last few, also those on pods that are bound by now, everything is kept that is needed to decide again.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from proto.model import PodRequest
from scheduler_plugin.core.columns import Bools, Ints, Rows
from scheduler_plugin.core.gang import Standing
from scheduler_plugin.core.journal import Moment
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason

MAX_KEPT: Final = 20_000
MAX_RECORDED: Final = 256


@dataclass(frozen=True, slots=True)
class AskedNodes:
    """The nodes with an inventory that were asked about, one bit for each row: thousands of pods can wait for thousands of nodes."""

    bits: bytes
    first: int
    """The row that was named first: kube-scheduler begins with another node each time."""
    naming: int
    """The state's naming counter: a row that got its name later is another node."""

    @classmethod
    def of(cls, rows: npt.NDArray[np.int32], naming: int) -> "AskedNodes | None":
        """Keep rows; None for none."""
        if not len(rows):
            return None
        asked = np.zeros(int(rows.max()) + 1, dtype=np.bool_)
        asked[rows] = True
        return cls(np.packbits(asked).tobytes(), int(rows[0]), naming)

    def rows(self) -> Rows:
        """Return the rows in order, beginning with the first."""
        rows = np.flatnonzero(np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8)))
        return np.roll(rows, -int(np.searchsorted(rows, self.first)))

    def among(self, rows: Rows, named_at: Ints) -> Bools:
        """Say which rows may be for the pod: those that were asked about, and those that are other nodes by now.

        Args: named_at: the state's naming counter when each of these rows got its name.
        """
        asked = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8)).astype(np.bool_)
        return (named_at > self.naming) | ((rows < len(asked)) & asked[np.minimum(rows, len(asked) - 1)])


@dataclass(frozen=True, slots=True)
class Decision:
    """One filter call: how many nodes fitted, and how many failed for what."""

    pod: PodFacts
    request: PodRequest
    at: float
    """Seconds since 1970."""
    generation: int
    """The state's change counter."""
    fitting: int
    failed: Mapping[NodeReason, int]
    asked: AskedNodes | None = None
    """Of a pod that fits nowhere."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What prioritize said afterwards."""

    node: str
    score: int
    moment: Moment
    names: tuple[str, ...]
    """Of all nodes then, by row."""
    rows: npt.NDArray[np.int32]
    """The nodes that it was asked about, fewer than filter where kube-scheduler rated some only; those without an inventory left out."""

    @property
    def asked(self) -> list[str]:
        """The nodes with an inventory that it was asked about."""
        return [self.names[row] for row in self.rows.tolist()]


@dataclass(frozen=True, slots=True)
class GangTurn:
    """A decision on a member of a gang: it depends on where the others can go."""

    standing: Standing
    moment: Moment
    """Before anything was planned."""
    node: str = ""
    """Where the pod was planned with the others."""
    refusal: str = ""
    """Why the gang cannot start."""


@dataclass(slots=True)
class Record:
    """A decision with its inputs."""

    decision: Decision
    moment: Moment
    names: tuple[str, ...]
    """Of all nodes then, by row."""
    rows: npt.NDArray[np.int32]
    """The nodes that were asked about; those without an inventory left out."""
    choice: Choice | None = None
    gang: GangTurn | None = None

    @property
    def asked(self) -> list[str]:
        """The nodes with an inventory that were asked about."""
        return [self.names[row] for row in self.rows.tolist()]


class Queue:
    """Decisions on pods that wait, by UID, kept in order: by priority, then as they came. Nothing is sorted when somebody asks."""

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
        """Take a pod out; return what was decided on it."""
        priority = self._priority_of.pop(pod_uid, None)
        if priority is None:
            return None
        decisions = self._by_priority[priority]
        decision = decisions.pop(pod_uid)
        if not decisions:
            del self._by_priority[priority]
        return decision

    def and_then(self, other: "Queue") -> list[Decision]:
        """Return the decisions of both; among pods of one priority those of this queue come first."""
        both = (self._by_priority, other._by_priority)
        priorities = sorted({priority for queue in both for priority in queue}, reverse=True)
        return [decision for priority in priorities for queue in both for decision in queue.get(priority, _NOBODY).values()]


_NOBODY: Final[Mapping[str, Decision]] = {}


@dataclass(slots=True)
class Decisions:
    """The latest decision on each pod, and the latest of all with their inputs."""

    by_uid: OrderedDict[str, Decision] = field(default_factory=OrderedDict)
    recorded: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    """By pod UID."""
    latest_at: float = -math.inf
    """When the latest was made, in seconds since 1970."""
    queue: Queue = field(default_factory=Queue)
    """Those on pods that fitted nowhere when last asked."""

    @property
    def latest(self) -> Decision | None:
        """The one made last of those that are kept."""
        return next(reversed(self.by_uid.values()), None)

    def record(self, decision: Decision, inputs: Record | None = None) -> None:
        """Keep a decision in place of the pod's earlier one."""
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
        """Add prioritize's answer to the record of a pod's decision."""
        record = self.recorded.get(pod_uid)
        if record is not None and not (record.gang and record.gang.node):
            if choice.rows is not record.rows and choice.names is record.names and np.array_equal(choice.rows, record.rows):
                choice = replace(choice, rows=record.rows)
            record.choice = choice

    def forget(self, pod_uid: str) -> None:
        """Drop what was decided on a pod that is bound or gone; the record stays."""
        self.by_uid.pop(pod_uid, None)
        self.queue.pop(pod_uid)

    def forget_gone(self, decision: Decision, pods: Mapping[str, PodFacts], before: float) -> None:
        """Drop a decision if its pod is bound or gone.

        An attempt that is under way while the watch tells a pod's end is recorded after it, and nothing more is told of that pod.

        Args: pods: all that are known, by UID. before: only what was decided earlier, in seconds since 1970; the pods are known as later.
        """
        uid = decision.pod.uid
        if decision.at < before and (uid not in pods or pods[uid].node_name) and self.by_uid.get(uid) is decision:
            self.forget(uid)

    def waiting(self) -> list[Decision]:
        """Return the pods that fitted nowhere when last asked, by priority, then the longest waiting first."""
        return self.queue.and_then(Queue())

    def _keep(self, record: Record) -> None:
        """Keep a record. Those of two pictures of the state at most, because each holds on to a whole one."""
        newest = next(reversed(self.recorded.values()), record)
        if newest.moment.part is not record.moment.part:
            parts = (newest.moment.part, record.moment.part)
            for uid in [uid for uid, old in self.recorded.items() if not any(old.moment.part is part for part in parts)]:
                del self.recorded[uid]
        self.recorded[record.decision.pod.uid] = record
        self.recorded.move_to_end(record.decision.pod.uid)
        if len(self.recorded) > MAX_RECORDED:
            self.recorded.popitem(last=False)
