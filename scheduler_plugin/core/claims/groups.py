# SPDX-License-Identifier: Apache-2.0
"""Which pods with planned claims are placed together: the members of a gang, or one pod. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aliquot import contract
from aliquot.placement.request import RequestError
from scheduler_plugin.core.claims.planned import PlannedPod
from scheduler_plugin.core.cluster.gang import Gang, gang_of


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that start together."""

    waiting: tuple[PlannedPod, ...]
    """Those without a node that no other scheduling gate holds back, the most important first."""
    bound: int
    """How many have a node."""
    gang: Gang | None = None
    trouble: str = ""
    """Why the group cannot be read."""

    @property
    def minimum(self) -> int:
        """How many must start together."""
        return 1 if self.gang is None else self.gang.minimum

    @property
    def maximum(self) -> int:
        """How many may run at the same time."""
        of_gang = None if self.gang is None else self.gang.maximum
        return self.bound + len(self.waiting) if of_gang is None else of_gang

    @property
    def incomplete(self) -> str:
        """Say that members of the gang are missing."""
        return f"gang: {self.minimum} members must start together, and {self.bound + len(self.waiting)} can be planned now"


def groups_of(pods: Iterable[PlannedPod]) -> Sequence[Group]:
    """Return the groups with a waiting pod, the most important first, and of these the oldest."""
    gangs: dict[tuple[str, str], list[tuple[PlannedPod, Gang]]] = {}
    found: list[Group] = []
    for pod in in_order(pods):
        facts = pod.facts
        try:
            gang = None if facts.gpu is None else gang_of(facts.namespace, facts.gpu.annotations)
        except RequestError as exc:
            found.append(Group((pod,), 0, None, str(exc)))
            continue
        if gang is None:
            found.append(_group([pod], None))
        else:
            gangs.setdefault(gang.key, []).append((pod, gang))
    for members in gangs.values():
        largest = max((gang for _, gang in members), key=lambda gang: gang.minimum)  # members that differ: the largest minimum counts
        found.append(_group([pod for pod, _ in members], largest))
    return sorted((group for group in found if group.waiting), key=lambda group: _rank(group.waiting[0]))


def in_order(pods: Iterable[PlannedPod]) -> Sequence[PlannedPod]:
    """Sort pods as they are served."""
    return sorted(pods, key=_rank)


def _rank(pod: PlannedPod) -> tuple[object, ...]:
    facts = pod.facts
    return -facts.priority, facts.created_at or 0.0, facts.namespace, facts.name


def _group(members: Sequence[PlannedPod], gang: Gang | None) -> Group:
    here = [pod for pod in members if not pod.facts.deletion_requested]
    waiting = tuple(pod for pod in here if pod.waits and not set(pod.facts.gates) - {contract.PLANNED})
    return Group(waiting, sum(bool(pod.facts.node_name) for pod in here), gang)
