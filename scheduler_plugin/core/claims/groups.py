# SPDX-License-Identifier: Apache-2.0
"""Which pods with planned claims are placed together: the members of a gang, or one pod. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aliquot import contract
from aliquot.placement.request import RequestError
from scheduler_plugin.core.claims.planned import PlannedPod
from scheduler_plugin.core.cluster.gang import Gang, gang_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.roles import conflict_of, counted, extras_last, lacking_roles


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that start together."""

    waiting: tuple[PlannedPod, ...]
    """Those without a node that no other scheduling gate holds back, the most important first."""
    bound: tuple[PlannedPod, ...]
    """Those with a node."""
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
        return len(self.bound) + len(self.waiting) if of_gang is None else of_gang

    def lacking(self, ready: Iterable[PlannedPod]) -> int:
        """Return how many more must start with those that have a node, and those that are ready."""
        return self.minimum - counted(_facts([*self.bound, *ready]))

    def needed(self, ready: Sequence[PlannedPod], others: Iterable[PlannedPod]) -> Sequence[str]:
        """Return the UIDs of the other pods that count beside those, the first ones, as many as the group lacks or as there are."""
        needed, _ = extras_last(_facts([*self.bound, *ready]), _facts(others))
        return [pod.uid for pod in needed[: max(0, self.lacking(ready))]]

    @property
    def incomplete(self) -> str:
        """Say that members of the gang are missing."""
        known = _facts([*self.bound, *self.waiting])
        roles = lacking_roles(known, self.minimum - counted(known))
        return f"gang: {self.minimum} members must start together, and {roles or f'{len(known)} can be planned now'}"


def groups_of(pods: Iterable[PlannedPod]) -> Sequence[Group]:
    """Return the groups with a waiting pod, the most important first, and of these the oldest."""
    gangs: dict[tuple[str, str], list[tuple[PlannedPod, Gang]]] = {}
    found: list[Group] = []
    for pod in in_order(pods):
        facts = pod.facts
        try:
            gang = None if facts.gpu is None else gang_of(facts.namespace, facts.gpu.annotations)
        except RequestError as exc:
            found.append(Group((pod,), (), None, str(exc)))
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
    bound = tuple(pod for pod in here if pod.facts.node_name)
    conflict = "" if gang is None else conflict_of(_facts([*bound, *waiting]), gang.minimum)
    return Group(waiting, bound, gang, f"gang: {conflict}" if conflict else "")


def _facts(pods: Iterable[PlannedPod]) -> list[PodFacts]:
    return [pod.facts for pod in pods]
