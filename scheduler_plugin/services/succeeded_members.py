"""Has members that succeeded count for gangs that lack members: a pod made in the place of a failed one must not wait for those for ever.

The pods' watch leaves out what has ended, so the API is asked, and only where it matters: for a gang that has a pod which waits because
too few exist, and others that run or have succeeded. What it knew of other gangs, or before a restart, the scheduler need not know.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from scheduler_plugin.core.gang import Gang, gang_of_pod
from scheduler_plugin.core.gang_plan import is_placed
from scheduler_plugin.errors import KubeApiError
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.ports import PodApi

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 2.0
FIRST_PAUSE_SECONDS: Final = 5.0
LAST_PAUSE_SECONDS: Final = 300.0
"""A namespace can have thousands of pods that succeeded, and a gang can lack members for days."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float


class SucceededMembers:
    """The loop."""

    def __init__(self, desk: Desk, api: PodApi, leads: Callable[[], bool]) -> None:
        self._desk = desk
        self._api = api
        self._leads = leads
        self._pauses: dict[tuple[str, str], _Pause] = {}
        """By gang."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        lacking = self._lacking() if self._leads() else set()
        self._pauses = {key: pause for key, pause in self._pauses.items() if key in lacking}
        now = self._desk.monotonic()
        due = {key for key in lacking if key not in self._pauses or self._pauses[key].until <= now}
        for key in due:
            before = self._pauses.get(key)
            seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, LAST_PAUSE_SECONDS)
            self._pauses[key] = _Pause(now + seconds, seconds)
        for namespace in sorted({namespace for namespace, _ in due}):
            try:
                succeeded = await self._api.succeeded_pods(namespace)
            except KubeApiError as exc:
                logger.warning("members of gangs in %s that succeeded are not known: %s", namespace, exc)
                continue
            for pod in succeeded:
                if (gang := gang_of_pod(pod)) is not None and gang.key in due and not pod.deletion_requested:
                    self._desk.state.set_pod(pod)

    def _lacking(self) -> set[tuple[str, str]]:
        """Return the gangs that have begun and lack members for a pod that waits."""
        planner, seen, found = self._desk.gangs.planner, set[Gang](), set[tuple[str, str]]()
        for decision in self._desk.decisions.waiting():
            gang = gang_of_pod(decision.pod)
            if gang is None or gang in seen:
                continue
            seen.add(gang)
            members = planner.members(decision.pod, gang).values()
            if len(members) < gang.minimum and any(is_placed(self._desk.state, other) for other in members):
                found.add(gang.key)
        return found
