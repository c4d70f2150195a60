# SPDX-License-Identifier: Apache-2.0
"""Counts succeeded members for gangs that lack members, so that the replacement of a failed pod does not wait for them without end.

The pods' watch leaves out pods that have ended. So the API is queried, but only for a gang with a pod that waits because too few members
exist. Succeeded members of other gangs, and those from before a restart, are not needed. If no member runs, the gang may have been
restarted as a whole: then only those members count that come from the controller of a pod that waits now.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.cluster.gang import Gang, gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.roles import counted
from scheduler_plugin.core.gang.standing import is_placed, members_of
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.gang_backoff import Key
from scheduler_plugin.ports import PodApi

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 2.0
FIRST_PAUSE_SECONDS: Final = 5.0
LAST_PAUSE_SECONDS: Final = 300.0
"""A namespace can have thousands of succeeded pods, and a gang can lack members for days."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _IncompleteGang:
    """A gang that lacks members."""

    runs: bool
    """Whether a member runs or has succeeded."""
    controllers: frozenset[str]
    """UIDs of the controllers that made its members."""

    def counts(self, pod: PodFacts) -> bool:
        """Whether a succeeded pod counts as a member."""
        return not pod.deletion_requested and (self.runs or pod.controller_uid in self.controllers)


class SucceededMembers:
    """The loop."""

    def __init__(self, context: ExtenderContext, api: PodApi, leads: Callable[[], bool]) -> None:
        """Args: leads: whether this replica decides."""
        self._context = context
        self._api = api
        self._leads = leads
        self._pauses: dict[Key, _Pause] = {}
        """By gang."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        incomplete = self._incomplete_gangs() if self._leads() else {}
        due = self._due(incomplete)
        for namespace in sorted({namespace for namespace, _ in due}):
            await self._count_succeeded(namespace, {key: incomplete[key] for key in due})

    def _due(self, incomplete: dict[Key, _IncompleteGang]) -> set[Key]:
        """Return the gangs without a running pause, and begin the next, longer pause of each."""
        self._pauses = {key: pause for key, pause in self._pauses.items() if key in incomplete}
        now = self._context.clock.monotonic()
        due = {key for key in incomplete if key not in self._pauses or self._pauses[key].until <= now}
        for key in due:
            before = self._pauses.get(key)
            seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, LAST_PAUSE_SECONDS)
            self._pauses[key] = _Pause(now + seconds, seconds)
        return due

    async def _count_succeeded(self, namespace: str, gangs: dict[Key, _IncompleteGang]) -> None:
        """Add the succeeded members of these gangs in a namespace to the state."""
        try:
            succeeded = await self._api.succeeded_pods(namespace)
        except KubeApiError as exc:
            logger.warning("the succeeded members of gangs in namespace %s are unknown: %s", namespace, exc)
            return
        for pod in succeeded:
            gang = gang_of_pod(pod)
            if gang is not None and gang.key in gangs and gangs[gang.key].counts(pod):
                self._context.state.set_pod(pod)

    def _incomplete_gangs(self) -> dict[Key, _IncompleteGang]:
        """Return the gangs of waiting pods that lack members and may have run before."""
        seen, found = set[Gang](), dict[Key, _IncompleteGang]()
        for decision in self._context.decisions.waiting():
            gang = gang_of_pod(decision.pod)
            if gang is None or gang in seen:
                continue
            seen.add(gang)
            members = members_of(self._context.state, decision.pod, gang).values()
            runs = any(is_placed(self._context.state, other) for other in members)
            controllers = frozenset(other.controller_uid for other in members) - {""}
            if counted(members) < gang.minimum and (runs or controllers):
                found[gang.key] = _IncompleteGang(runs, controllers)
        return found
