# SPDX-License-Identifier: Apache-2.0
"""The longest wait of a priority class in Kueue: a workload that waited that long goes before all others of its queue.

Kueue orders a queue by priority, so a steady stream of more important work keeps the rest out. A class with ``aliquot.dev/max-wait`` bounds
that. After this time its workload gets the annotation ``kueue.x-k8s.io/priority-boost``. So it is the next one, and Kueue preempts for it
what the queue lets a higher priority preempt. It keeps the boost while it runs, or the same stream would end it at once. Workloads with a
boost are ordered by their own priorities.
"""

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Final

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.admit.kueue import Workload
from scheduler_plugin.core.cluster.durations import parse_duration
from scheduler_plugin.ports import BoostApi, Clock
from scheduler_plugin.services.kueue_objects import KueueObjects

logger = logging.getLogger(__name__)

BOOST: Final = 2_000_000_000
"""Lifts the lowest usual priority above 1,000,000,000, the highest that users may have. Kueue reads 32 bits with a sign."""
PERIOD_SECONDS: Final = 1.0
REPEAT_SECONDS: Final = 10.0
"""Until the next try after the API server refused a boost."""


class MaxWaits:
    """The loop."""

    def __init__(self, objects: KueueObjects, api: BoostApi, clock: Clock, leads: Callable[[], bool]) -> None:
        """Args: leads: whether this replica decides."""
        self._objects = objects
        self._api = api
        self._clock = clock
        self._leads = leads
        self._unreadable = set[tuple[str, str]]()
        """Names and texts of classes that were reported."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            is_accepted = await self.step()
            await asyncio.sleep(PERIOD_SECONDS if is_accepted else REPEAT_SECONDS)

    async def step(self) -> bool:
        """Boost the workloads that waited too long. Returns: whether the API server took all boosts."""
        if not self._leads():
            return True
        now = self._clock.now()
        waiting = [one for one in self._objects.workloads.by_key.values() if one.waits_for_quota and not one.is_boosted]
        late = [one for one in waiting if now - one.waits_since >= self._max_wait_seconds(one)]
        return all([await self._boost(one) for one in late])

    def _max_wait_seconds(self, workload: Workload) -> float:
        """Return the longest wait that its class states; infinite without one."""
        kind, name = workload.priority_class
        kept = self._objects.classes.get(kind)
        stated = kept.by_key.get(name) if kept is not None else None
        if stated is None or not stated.max_wait:
            return inf
        seconds = parse_duration(stated.max_wait)
        if seconds is None and (name, stated.max_wait) not in self._unreadable:
            self._unreadable.add((name, stated.max_wait))
            logger.warning(
                "%s %s: %s: expected a duration such as 90s, 30m, 12h or 2d, found %r: it counts as none",
                *(kind, name, contract.ANNOTATION_MAX_WAIT, stated.max_wait),
            )
        return inf if seconds is None else seconds

    async def _boost(self, workload: Workload) -> bool:
        """Boost one workload. Returns: False if the API server refused it."""
        name = f"{workload.namespace}/{workload.name}"
        try:
            await self._api.boost(workload.namespace, workload.name, workload.version, BOOST)
        except (KubeConflictError, KubeNotFoundError):
            return True  # it changed: the watch shows the new state
        except KubeApiError as exc:
            logger.warning("workload %s waited longer than its class allows, and its priority cannot be raised: %s", name, exc)
            return False
        logger.info("workload %s goes first: it waited as long as its class %s allows", name, workload.priority_class[1])
        return True
