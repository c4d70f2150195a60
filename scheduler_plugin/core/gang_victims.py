"""Gangs among those who may be ended: a gang that runs keeps its minimum, or ends whole.

kube-scheduler ends pods of one node only, so a gang with members elsewhere cannot end whole for a pod that is preempted for there.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler_plugin.core.gang import gang_of_pod
from scheduler_plugin.core.gang_plan import is_placed
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.preempt import Band
from scheduler_plugin.core.state import ClusterState


@dataclass(frozen=True, slots=True)
class Ending:
    """What the end of some pods means for the gangs on their node."""

    also: frozenset[str]
    """Who has to end as well, because the others of the gang do."""
    bands: tuple[Band, ...]
    """The gangs of those who still may be ended."""


def ending_on(
    state: ClusterState, chosen: Collection[str], evictable: Iterable[PodFacts], preemptor: PodFacts | None = None
) -> Ending | None:
    """Look at the gangs on a node; None when the chosen pods cannot end there without breaking one.

    Args: chosen: who ends already. evictable: who else of the node may, by priority. preemptor: for whom; his own gang is left alone.
    """
    may_go = {pod.uid: pod for pod in evictable if pod.uid not in chosen}
    ends = [pod for uid in chosen if (pod := state.pods.get(uid)) is not None]
    keys = dict.fromkeys(gang.key for pod in (*ends, *may_go.values()) if (gang := gang_of_pod(pod)) is not None)
    own = gang_of_pod(preemptor) if preemptor is not None else None
    also: set[str] = set()
    bands: list[Band] = []
    for key in keys:
        running = [pod for pod in state.gang_members(key) if is_placed(state, pod) and not pod.deletion_requested]
        left = [pod for pod in running if pod.uid not in chosen]
        here = frozenset(pod.uid for pod in left if pod.uid in may_go)
        whole, spare = len(here) == len(left), len(left) - _minimum(running)
        if own is not None and own.key == key:
            whole, spare = False, 0 if len(left) == len(running) else -1
        if len(left) == len(running) or spare >= 0 or not left:
            bands.append(Band(here, max(0, spare), whole))
        elif whole:
            also |= here
        else:
            return None
    return Ending(frozenset(also), tuple(band for band in bands if band.members))


def _minimum(members: Iterable[PodFacts]) -> int:
    """Return how many must run; members that disagree are all served by the largest number."""
    return max((gang.minimum for pod in members if (gang := gang_of_pod(pod)) is not None), default=0)
