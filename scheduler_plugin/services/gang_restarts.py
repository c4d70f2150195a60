# SPDX-License-Identifier: Apache-2.0
"""Restarts gangs as a whole: if a member ends without success and too few are left, the others are evicted.

Most training programs cannot continue without one of their processes, and hold their GPUs until a timeout. A gang with
``aliquot.dev/gang-restart: whole`` says so. Its controller then creates all members again, and they start together.

A member that is gone may have succeeded; the watch does not show which. So the API is queried first. Evictions keep to disruption budgets;
a refused one is tried again. A replacement of the lost member that was bound in the meantime is not evicted. Losses while no replica leads
are not noticed.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.cluster.gang import Gang, gang_of_pod
from scheduler_plugin.core.cluster.members import Loss
from scheduler_plugin.core.cluster.pods import SUCCEEDED, PodFacts
from scheduler_plugin.core.cluster.roles import counted
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.ports import EventApi, PodApi

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 1.0
SETTLE_SECONDS: Final = 2.0
"""A controller that deletes all its pods does so within this time, and then no eviction is needed."""
REPEAT_SECONDS: Final = 10.0
"""The time until a refused eviction, or a query without a reply, is repeated."""


@dataclass(frozen=True, slots=True)
class _Restart:
    """A loss to look at."""

    loss: Loss
    due_at: float
    is_broken: bool = False
    """Whether it is known that too few members are left."""


class GangRestarts:
    """The loop."""

    def __init__(self, context: ExtenderContext, api: PodApi, events: EventApi, leads: Callable[[], bool]) -> None:
        """Args: leads: whether this replica decides."""
        self._context = context
        self._api = api
        self._events = events
        self._leads = leads
        self._restarts: list[_Restart] = []

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        now, losses = self._context.clock.monotonic(), self._context.state.take_losses()
        if not self._leads():
            self._restarts.clear()
            return
        self._restarts += [_Restart(loss, now + SETTLE_SECONDS) for loss in losses]
        due = [restart for restart in self._restarts if restart.due_at <= now]
        self._restarts = [restart for restart in self._restarts if restart.due_at > now]
        for restart in due:
            again = await self._look_at(restart)
            if again is not None:
                self._restarts.append(replace(again, due_at=now + REPEAT_SECONDS))

    async def _look_at(self, restart: _Restart) -> _Restart | None:
        """Evict the rest of a gang if it is broken. Returns: what is left to do; None if nothing is."""
        loss, gang, left = restart.loss, gang_of_pod(restart.loss.pod), self._left(restart.loss)
        if gang is None or not left:
            return None
        if not restart.is_broken:
            try:
                if not await self._is_broken(loss, gang):
                    return None
            except KubeApiError as exc:
                logger.warning("it is unknown whether gang %s/%s broke: %s", *gang.key, exc)
                return restart
        refused = [pod for pod in left if not await self._evict(pod, loss.pod, gang)]
        return replace(restart, is_broken=True) if refused else None

    def _left(self, loss: Loss) -> Collection[PodFacts]:
        """Return the members that ran when the lost one ended, and still run."""
        pods = (self._context.state.pods.get(uid) for uid in sorted(pod.uid for pod in loss.left))
        return [pod for pod in pods if pod is not None and not pod.deletion_requested]

    async def _is_broken(self, loss: Loss, gang: Gang) -> bool:
        """Whether a member ended without success, and too few were left. Raises KubeApiError."""
        found = await self._api.get_pod(loss.pod.namespace, loss.pod.name)
        if found is not None and found.uid == loss.pod.uid and found.gpu is not None and found.gpu.phase == SUCCEEDED:
            return False
        succeeded = [pod for pod in await self._api.succeeded_pods(gang.namespace) if (of := gang_of_pod(pod)) and of.key == gang.key]
        return counted([*loss.left, *succeeded]) < gang.minimum

    async def _evict(self, pod: PodFacts, lost: PodFacts, gang: Gang) -> bool:
        """Evict one member. Returns: whether it ends or is gone."""
        name = f"{pod.namespace}/{pod.name}"
        try:
            await self._api.evict(pod.namespace, pod.name, pod.uid)
        except (KubeNotFoundError, KubeConflictError):
            return True
        except KubeApiError as exc:
            logger.warning("%s cannot be evicted to restart its gang %s: %s", name, gang.name, exc)
            return False
        logger.info("evicted %s to restart its gang %s", name, gang.name)
        least = f"{gang.minimum} are left" if gang.role is None else f"{gang.minimum} that count for their roles are left"
        sentence = f"evicted to restart gang {gang.name} whole: member {lost.name} ended, and fewer than {least}"
        try:
            await self._events.post_event(pod.namespace, pod.name, pod.uid, contract.EVENT_REASON_GANG_RESTARTED, sentence)
        except KubeApiError as exc:
            logger.warning("an event cannot be written: %s", exc, extra={"pod": name})
        return True
