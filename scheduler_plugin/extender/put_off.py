# SPDX-License-Identifier: Apache-2.0
"""Waiting pods for which other pods may end, but not yet, or not by kube-scheduler.

A victim must run for its minimum, or the pod must wait for its delay. kube-scheduler proposes victims in one attempt, and tries again only
after a change that it can see, or after minutes. So the preemptor ends the pods when their time has come. A gang with members on several
nodes ends only by our own evictions, so the preemptor looks at it at once.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from scheduler_plugin.core.cluster.durations import may_end_from
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.cache import MAX_PODS, keep


@dataclass(frozen=True, slots=True)
class _Later:
    moment: float
    """In seconds since 1970."""
    nodes: tuple[str, ...]


class PutOff:
    """These pods, with the nodes that kube-scheduler proposed."""

    def __init__(self) -> None:
        self._later: OrderedDict[str, _Later] = OrderedDict()
        """By UID."""
        self._at_once: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        """Nodes by UID."""

    def until(self, uid: str, moment: float, nodes: Iterable[str]) -> None:
        """Note when pods may end for a pod. Args: moment: in seconds since 1970."""
        keep(self._later, uid, _Later(moment, tuple(nodes)), MAX_PODS)

    def at_once(self, uid: str, nodes: Collection[str]) -> None:
        """Note nodes on which pods may end for a pod now, by our own evictions only."""
        if nodes:
            keep(self._at_once, uid, tuple(nodes), MAX_PODS)

    def until_victims_may_end(self, uid: str, proposed: Mapping[str, Iterable[PodFacts]], now: float) -> None:
        """Note when the first of several nodes may be freed, if that is not now. Args: proposed: by node, the pods to end."""
        moments = [max(map(may_end_from, victims), default=-inf) for victims in proposed.values()]
        if later := [moment for moment in moments if now < moment < inf]:
            self.until(uid, min(later), proposed)

    def take_due(self, now: float) -> dict[str, tuple[str, ...]]:
        """Take out the pods whose time has come; return the nodes by UID."""
        due = {uid: later.nodes for uid, later in self._later.items() if later.moment <= now}
        for uid in due:
            del self._later[uid]
        at_once, self._at_once = self._at_once, OrderedDict()
        return {**at_once, **due}
