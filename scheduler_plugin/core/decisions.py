"""What was decided lately and why: the record behind explanations and the retry of pods that wait.

Kept by pod UID, the newest last, and bounded; a pod's later decision replaces the earlier.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from proto.model import PodRequest
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.reasons import NodeReason

MAX_KEPT: Final = 20_000


@dataclass(frozen=True, slots=True)
class Decision:
    """One filter call: how many nodes fitted, and how many failed for what."""

    pod: PodFacts
    request: PodRequest
    at: float
    """Seconds since 1970."""
    generation: int
    """The state's change counter: with the pod, the recorded inputs of the decision."""
    fitting: int
    failed: Mapping[NodeReason, int]


@dataclass(slots=True)
class Decisions:
    """The latest decision on each pod."""

    by_uid: OrderedDict[str, Decision] = field(default_factory=OrderedDict)

    def record(self, decision: Decision) -> None:
        """Keep a decision in place of the pod's earlier one."""
        self.by_uid[decision.pod.uid] = decision
        self.by_uid.move_to_end(decision.pod.uid)
        if len(self.by_uid) > MAX_KEPT:
            self.by_uid.popitem(last=False)

    def forget(self, pod_uid: str) -> None:
        """Drop what was decided on a pod that is bound or gone."""
        self.by_uid.pop(pod_uid, None)

    def waiting(self) -> list[Decision]:
        """Return the pods that fitted nowhere when last asked, by priority, then the longest waiting first."""
        waiting = [decision for decision in self.by_uid.values() if not decision.fitting]
        return sorted(waiting, key=lambda decision: (-decision.pod.priority, decision.at))
