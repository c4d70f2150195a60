"""Has members that succeeded count for gangs that lack members: a pod made in the place of a failed one must not wait for those for ever.

The pods' watch leaves out what has ended, so the API is asked, and only where it matters: for a gang that has a pod which waits because
too few exist. What it knew of other gangs, or before a restart, the scheduler need not know. Where no member runs, the gang may have been
started again as a whole: those count then that the controller of a pod made which waits now.
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


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A gang that lacks members."""

    runs: bool
    """Whether others run or have succeeded."""
    controllers: frozenset[str]
    """UIDs of those that made its members."""


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
        lacking = self._lacking() if self._leads() else {}
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
                gang = gang_of_pod(pod)
                if gang is None or gang.key not in due or pod.deletion_requested:
                    continue
                if lacking[gang.key].runs or pod.controller_uid in lacking[gang.key].controllers:
                    self._desk.state.set_pod(pod)

    def _lacking(self) -> dict[tuple[str, str], _Lacking]:
        """Return the gangs that lack members for a pod that waits, and may have begun."""
        planner, seen, found = self._desk.gangs.planner, set[Gang](), dict[tuple[str, str], _Lacking]()
        for decision in self._desk.decisions.waiting():
            gang = gang_of_pod(decision.pod)
            if gang is None or gang in seen:
                continue
            seen.add(gang)
            members = planner.members(decision.pod, gang).values()
            runs = any(is_placed(self._desk.state, other) for other in members)
            controllers = frozenset(other.controller_uid for other in members) - {""}
            if len(members) < gang.minimum and (runs or controllers):
                found[gang.key] = _Lacking(runs, controllers)
        return found
