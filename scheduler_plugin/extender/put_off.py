# SPDX-License-Identifier: Apache-2.0
"""Waiting pods for which other pods may end, but not yet: a victim must run for its minimum, or the pod must wait for its delay.

kube-scheduler proposes victims once and then lets the pod wait. If it refused the node by its own sums, it never called filter, so no
decision tells that the pod waits.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from scheduler_plugin.core.cluster.durations import may_end_from
from scheduler_plugin.core.cluster.pods import PodFacts

NOT_STARTED_SECONDS: Final = 10.0
"""When to look again at a victim that has not started, so that the end of its minimum is unknown."""


class PutOff:
    """From when on each of them may be helped, in seconds since 1970."""

    def __init__(self) -> None:
        self._from: dict[str, float] = {}
        """By UID."""

    def until(self, uid: str, moment: float) -> None:
        """Note when a pod may be helped."""
        self._from[uid] = moment

    def until_one_may_end(self, uid: str, proposals: Iterable[Iterable[PodFacts]], now: float) -> None:
        """Note when the first of several nodes may be freed, if that is not now. Args: proposals: for each node, the pods to end."""
        moments = [max(map(may_end_from, victims), default=-inf) for victims in proposals]
        later = [now + NOT_STARTED_SECONDS if moment == inf else moment for moment in moments if moment > now]
        if later:
            self._from[uid] = min(later)

    def due(self, now: float, waits: Callable[[str], bool]) -> list[str]:
        """Take out the pods whose time has come, and forget those that wait no longer; return the UIDs of the former."""
        self._from = {uid: moment for uid, moment in self._from.items() if waits(uid)}
        found = [uid for uid, moment in self._from.items() if moment <= now]
        for uid in found:
            del self._from[uid]
        return found
