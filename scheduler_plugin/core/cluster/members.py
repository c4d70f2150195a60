# SPDX-License-Identifier: Apache-2.0
"""The known pods of each gang, including those that succeeded: a gang counts a member that ended well as one that runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from scheduler_plugin.core.cluster.gang import Gang, gang_of_pod
from scheduler_plugin.core.cluster.pods import SUCCEEDED, PodFacts
from scheduler_plugin.core.cluster.roles import counted

GangKey: TypeAlias = tuple[str, str]
"""Namespace and name."""
MAX_LOSSES: Final = 10_000
"""Losses that are kept; a replica that does not lead takes them too."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A bound member of a gang that restarts whole is gone, or ends."""

    pod: PodFacts
    left: tuple[PodFacts, ...]
    """The other bound members at that moment."""


_NO_PODS: Final[Mapping[str, PodFacts]] = {}


class GangMembers:
    """The members by gang and pod UID. The owner reports each change of a pod with the pod as it was before."""

    def __init__(self) -> None:
        self._members: dict[GangKey, dict[str, PodFacts]] = {}
        self._succeeded: dict[GangKey, dict[str, PodFacts]] = {}
        self._losses: list[Loss] = []

    def __bool__(self) -> bool:
        return bool(self._members)

    def of(self, key: GangKey) -> Iterable[PodFacts]:
        """Return the known pods of a gang that have not ended."""
        return self._members.get(key, _NO_PODS).values()

    def succeeded(self, key: GangKey) -> Mapping[str, PodFacts]:
        """Return the pods of a gang that succeeded, by UID."""
        return self._succeeded.get(key, _NO_PODS)

    def all_succeeded(self) -> Iterable[Mapping[str, PodFacts]]:
        """Return the pods that succeeded, gang by gang."""
        return self._succeeded.values()

    def set(self, before: PodFacts | None, pod: PodFacts) -> bool:
        """Note that a pod came or changed; return whether its gang has enough members now because of that."""
        gang, gang_before = gang_of_pod(pod), None if before is None else gang_of_pod(before)
        if before is not None and gang_before != gang:
            self.leave(before)  # annotations can change while a pod lives
        if gang is None:
            return False
        self._members.setdefault(gang.key, {})[pod.uid] = pod
        if pod.deletion_requested and (before is None or not before.deletion_requested):
            # The gang may be restarted. Then it must start with all members, so those that succeeded no longer count.
            self._succeeded.pop(gang.key, None)
            self._note_loss(gang, pod)
        return self._completes(gang, gang_before if before is not None and before.may_start else None, pod)

    def leave(self, pod: PodFacts) -> None:
        """Remove a pod. A gang without other pods is forgotten, with its members that succeeded."""
        gang = gang_of_pod(pod)
        if gang is None:
            return
        self._members[gang.key].pop(pod.uid, None)
        if not pod.deletion_requested:  # otherwise it was noted then
            self._note_loss(gang, pod)
        if not self._members[gang.key]:
            del self._members[gang.key]
            self._succeeded.pop(gang.key, None)

    def take_losses(self) -> list[Loss]:
        """Return the losses since the previous call."""
        losses, self._losses = self._losses, []
        return losses

    def _note_loss(self, gang: Gang, pod: PodFacts) -> None:
        if not gang.restarts_whole or not pod.node_name:
            return
        others = (other for other in self.of(gang.key) if other.uid != pod.uid)
        left = tuple(other for other in others if other.node_name and not other.deletion_requested)
        if left:
            self._losses.append(Loss(pod, left))
            del self._losses[:-MAX_LOSSES]

    def is_new_success(self, pod: PodFacts) -> bool:
        """Whether an ended pod succeeded in a gang that still has other pods, and does not count yet."""
        gang = gang_of_pod(pod)
        if gang is None or pod.gpu is None or pod.gpu.phase != SUCCEEDED or gang.key not in self._members:
            return False
        return pod.uid not in self.succeeded(gang.key)

    def add_success(self, pod: PodFacts) -> None:
        """Count a pod that succeeded for its gang."""
        if (gang := gang_of_pod(pod)) is not None:
            self._succeeded.setdefault(gang.key, {})[pod.uid] = pod

    def _completes(self, gang: Gang, counted_for: Gang | None, pod: PodFacts) -> bool:
        """Whether a pod is the reason why its gang has enough members that may start. Args: counted_for: as the pod was before."""
        if pod.node_name or not pod.may_start or counted_for == gang:
            return False
        others = [other for other in self.of(gang.key) if other.may_start and other.uid != pod.uid]
        others += self.succeeded(gang.key).values()
        if counted([*others, pod]) < gang.minimum:
            return False
        # A pod that counted for another gang, or with another minimum, can complete this one by its minimum alone.
        return counted_for is not None or counted(others) < gang.minimum
