# SPDX-License-Identifier: Apache-2.0
"""Explains what a pod with planned claims waits for, and what to do. kube-scheduler skips it until its gate opens.

The steps are those of ``services.claim_planner``. What only the replica that plans can know is an argument.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

from aliquot import contract
from aliquot.contract.features import Gate
from scheduler_plugin.core.claims.groups import Group, groups_of
from scheduler_plugin.core.claims.planned import PlannedPod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.planned import ClaimPlacer, Want, needed_first

_NO_NODE: Final = (
    "no node offers GPUs for planned claims: set the agents' allocation to planned (component dra-planned) or both (dra-both), or recreate "
    f"the pod with the label {contract.LABEL_ALLOCATION}: dra"
)
_NO_LABEL: Final = f"it lacks the label {contract.LABEL_ALLOCATION}: planned, by which the scheduler finds it: add the label"
_PAUSED: Final = "a write of its claims or its gate was refused, and is tried again: the log of the scheduler's leader says why"


def why_without_planner(pod: PodFacts) -> str:
    """Explain a pod where ResourceClaims are not read; empty if it has not our gate."""
    if contract.PLANNED not in pod.gates:
        return ""
    return f"{_held_by_gate(pod)}, and this scheduler allocates no claims: open its feature gate {Gate.DYNAMIC_RESOURCE_ALLOCATION}"


def _held_by_gate(pod: PodFacts) -> str:
    if contract.PLANNED not in pod.gates:
        return "Aliquot's scheduler allocates its ResourceClaims"
    return f"scheduling gate {contract.PLANNED} holds it back until its ResourceClaims are allocated"


class Progress(Protocol):
    """What the planner did so far. On a replica that does not lead it did nothing."""

    def is_paused(self, uid: str) -> bool:
        """Whether a write for a pod was refused lately, so that the next one waits."""
        ...

    def avoided(self, uid: str) -> Collection[str]:
        """Return the nodes that a pod does not get for a while, because kube-scheduler could not use it there."""
        ...

    def ending(self) -> frozenset[str]:
        """Return the UIDs of the pods that end already."""
        ...


class PlannedWhy:
    """Explains from the state as it is; nothing stays reserved."""

    def __init__(self, context: ExtenderContext, placer: ClaimPlacer, pods: Mapping[str, PlannedPod], progress: Progress) -> None:
        """Args: pods: by UID."""
        self._context = context
        self._placer = placer
        self._pods = pods
        self._progress = progress

    def sentence(self, pod: PodFacts) -> str:
        """Explain a pod; empty if it waits for nothing here."""
        planned = self._pods.get(pod.uid)
        facts = pod if planned is None else planned.facts  # of the same stream as the planner's
        if facts.node_name or (planned is None and contract.PLANNED not in facts.gates):
            return ""
        waits_for = _NO_LABEL if planned is None else self._waits_for(planned)
        return f"{_held_by_gate(facts)}: {waits_for}" if waits_for else ""

    def _waits_for(self, pod: PlannedPod) -> str:
        if not self._context.claims.is_current:
            return "the scheduler has not listed claims, slices and classes yet: try again in a minute"
        if pod.facts.deletion_requested:
            return "its deletion was requested, so it is not planned"
        if others := sorted({*pod.facts.gates} - {contract.PLANNED}):
            return f"it is planned when its other scheduling gates are removed ({', '.join(others)})"
        group = next((group for group in groups_of(self._pods.values()) if pod in group.waiting), None)
        return "" if group is None else group.trouble or self._lacking_claims(pod) or self._of_group(pod, group)

    def _lacking_claims(self, pod: PlannedPod) -> str:
        """Return which claims of a pod are not there."""
        if self._placer.claims_of(pod) is not None:
            return ""
        known, namespace = self._context.claims.pools.claims, pod.facts.namespace
        if not all(pod.facts.claims):
            return "kube-controller-manager has not made all of its claims: check that their ResourceClaimTemplates exist"
        if missing := [name for name in pod.facts.claims if (namespace, name) not in known]:
            return f"ResourceClaim {', '.join(missing)} does not exist: create it"
        return "one of its ResourceClaims is being deleted: recreate the pod"

    def _of_group(self, pod: PlannedPod, group: Group) -> str:
        found = {one.facts.uid: self._placer.want(one, self._progress.avoided(one.facts.uid)) for one in group.waiting}
        own, (lacking, needed) = found[pod.facts.uid], _needed(group, found)
        if isinstance(own, str):
            return f"{own}; change it and recreate the pod"
        if lacking > len(needed):
            return f"{group.incomplete}: create the others, or lower {contract.ANNOTATION_GANG_MIN}"
        if any(map(self._progress.is_paused, found)):
            return _PAUSED
        if lacking > 0:
            return self._of_room(needed)
        if own is not None:
            return self._of_room([own])
        return "they are, and the gate opens in a moment" if pod.is_held else ""

    def _of_room(self, wants: Sequence[Want]) -> str:
        """Return why pods that start together have no room now."""
        if not self._context.claims.pools.planned_nodes:
            return _NO_NODE
        if nodes := self._nodes_for(wants):
            return f"there is room on node {nodes}, and it is allocated in a moment; if not, the log of the scheduler's leader says why"
        if nodes := self._nodes_for(wants, self._progress.ending()):
            return f"room on node {nodes} is free when the pods have ended that end there already"
        together = f"no room for {len(wants)} members at once; " if len(wants) > 1 else ""
        avoided = ", ".join(sorted({node for want in wants for node in self._progress.avoided(want.pod.facts.uid)}))
        refused = f"kube-scheduler could not use node {avoided}, which is avoided for a while; " if avoided else ""
        cure = "Free room there, claim less, or give it a higher priority than that of pods that may end"
        return f"{together}{refused}{self._placer.lacking(wants[0])}. {cure}"

    def _nodes_for(self, wants: Sequence[Want], ended: frozenset[str] | None = None) -> str:
        """Return the nodes on which pods fit together; empty if they do not. Args: ended: UIDs of pods that do not count."""
        return ", ".join(sorted({placement.node for placement in self._placer.place(wants, ended)}))


def _needed(group: Group, found: Mapping[str, Want | str | None]) -> tuple[int, Sequence[Want]]:
    """Return how many pods a group lacks, and what these need. Args: found: what each waiting pod needs, by UID; None for nothing."""
    ready = [one for one in group.waiting if found[one.facts.uid] is None]
    return group.lacking(ready), needed_first(group, ready, [want for want in found.values() if isinstance(want, Want)])[0]
