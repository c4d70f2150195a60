# SPDX-License-Identifier: Apache-2.0
"""What the state says of a gang: its members, which of them have a place, and in which domains."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from scheduler_plugin.core.cluster.domains import DomainMode
from scheduler_plugin.core.cluster.gang import Gang, gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.roles import conflict_of
from scheduler_plugin.core.cluster.state import ClusterState, Stage


def is_placed(state: ClusterState, pod: PodFacts) -> bool:
    """Whether a pod is or was bound, or its reservation is firm: its gang starts, or its binding was sent."""
    reservation = state.reservations.get(pod.uid)
    return bool(pod.node_name) or (reservation is not None and reservation.stage.is_firm)


def is_ready(state: ClusterState, pod: PodFacts) -> bool:
    """Whether a pod waits for its gang on a node that kube-scheduler chose."""
    reservation = state.reservations.get(pod.uid)
    return reservation is not None and reservation.stage is Stage.READY


def node_of(state: ClusterState, pod: PodFacts) -> str:
    """Return the node on which a pod is bound or expected; empty without one."""
    reservation = state.reservations.get(pod.uid)
    return state.pods.get(pod.uid, pod).node_name if reservation is None else reservation.node


def members_of(state: ClusterState, pod: PodFacts, gang: Gang) -> dict[str, PodFacts]:
    """Return by UID this pod, the known members that may start or have started, and those that succeeded.

    Terminating members do not count: a restarted gang must start as a whole again.
    """
    others = {other.uid: other for other in state.gang_members(gang.key) if other.may_start}
    return {pod.uid: pod} | others | dict(state.succeeded_members(gang.key))


def may_still_start(state: ClusterState, gang: Gang, but: str = "") -> int | None:
    """Return how many more members may run at the same time; None for any number. Members that succeeded do not count.

    Args: but: the UID of a member that does not count either.
    """
    if gang.maximum is None:
        return None
    others = (other for other in state.gang_members(gang.key) if other.uid != but and other.may_start)
    return max(0, gang.maximum - sum(is_placed(state, other) for other in others))


def is_full(state: ClusterState, pod: PodFacts, gang: Gang) -> bool:
    """Whether as many other members run as may at the same time."""
    return may_still_start(state, gang, but=pod.uid) == 0


def role_conflict(state: ClusterState, pod: PodFacts, gang: Gang) -> str:
    """Return why the roles of a gang contradict each other; empty if they do not."""
    return conflict_of(members_of(state, pod, gang).values(), gang.minimum)


# --- domains ----------------------------------------------------------------------------------------------------------


def needs_one_domain(gang: Gang | None) -> bool:
    """Whether all members must be in one domain."""
    return gang is not None and gang.domain is not None and gang.domain.mode is DomainMode.REQUIRED


def used_domains(state: ClusterState, members: Sequence[PodFacts], gang: Gang) -> frozenset[str]:
    """Return the domains of the members that have a place or are ready, except for those of these members."""
    if gang.domain is None:
        return frozenset()
    own = {pod.uid for pod in members}
    others = [other for uid, other in members_of(state, members[0], gang).items() if uid not in own]
    placed = [other for other in others if is_placed(state, other) or is_ready(state, other)]
    return frozenset(state.domain_of(node, gang.domain.level) for other in placed if (node := node_of(state, other)))


def outside(state: ClusterState, pod: PodFacts, gang: Gang, nodes: Iterable[str]) -> frozenset[str]:
    """Return the nodes that are not in the domain that a member needs; no node while any domain will do."""
    if gang.domain is None or not needs_one_domain(gang) or not (used := used_domains(state, [pod], gang)):
        return frozenset()
    return frozenset(node for node in nodes if state.domain_of(node, gang.domain.level) not in used)


def nodes_near(state: ClusterState, pod: PodFacts, node: str) -> Collection[str] | None:
    """Return the nodes that the other members may use once one is on a node; None for all."""
    gang = gang_of_pod(pod)
    if gang is None or gang.domain is None or not needs_one_domain(gang):
        return None
    level, here = gang.domain.level, state.domain_of(node, gang.domain.level)
    return frozenset(name for name in state.names if name and state.domain_of(name, level) == here)


def spread(state: ClusterState, pod: PodFacts, gang: Gang) -> str:
    """Say in which domains the members that have a place are, as a sentence; empty without a request for domains."""
    if gang.domain is None:
        return ""
    placed = [other for other in members_of(state, pod, gang).values() if is_placed(state, other)]
    counts = Counter(state.domain_of(node, gang.domain.level) for other in placed if (node := node_of(state, other)))
    names = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
    return f"members by {gang.domain.level}: {names}" if counts else ""
