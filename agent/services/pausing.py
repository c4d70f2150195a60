# SPDX-License-Identifier: Apache-2.0
"""Pauses and resumes the launches of running containers, as the annotation of their pod says.

A starting container gets the pause with its first limits (``core.limits``); this loop changes the limits of running containers. Limits of
an unknown pod stay as they are, so the last known state holds while the API is down, also over a restart of the agent.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agent.core.backends import pause_trouble
from agent.core.ledger import Grant
from agent.errors import StorageError
from agent.ports.grants import ContainerFiles
from agent.ports.kube import PodEvent
from agent.services.changes import Changes
from agent.services.events import EventRecorder
from agent.services.grant_manager import GrantManager
from agent.services.pod_cache import PodCache
from aliquot import contract
from aliquot.contract.features import ALL_OPEN, FeatureGates
from aliquot.placement.request import RequestError, is_paused

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds until a failed write of limits is retried."""


@dataclass(frozen=True, slots=True)
class _Requests:
    """What the annotations request."""

    paused: Sequence[tuple[Grant, bool]]
    """For each container under the shim, whether to pause it."""
    ignored: Mapping[str, str]
    """By grant id, why the annotation of its pod has no effect."""


class Pauser:
    """One look at the annotations, and the loop of looks."""

    def __init__(
        self, *, manager: GrantManager, pods: PodCache, files: ContainerFiles, events: EventRecorder, gates: FeatureGates = ALL_OPEN
    ) -> None:
        self._manager = manager
        self._pods = pods
        self._files = files
        self._events = events
        self._gates = gates
        self._wake = Changes()
        self._followed: tuple[int, _Requests] | None = None
        """The last applied state: the count of file changes, and the requests."""
        self._ignored: Mapping[str, str] = {}

    async def run(self) -> None:
        """Apply the annotations whenever they or the files of grants change, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in (self._pods.pod_changes, self._manager.changes):
                group.create_task(self._wake.follow(source))
            group.create_task(self._follow_for_ever())

    async def follow(self) -> bool:
        """Bring the limits in line with the annotations; return whether that succeeded."""
        now = (self._manager.changes.count, self._requests())
        if now == self._followed:
            return True
        _, requests = now
        self._report_ignored(requests.ignored)
        done = [
            await self._pause(grant, paused=paused) for grant, paused in await self._manager.on_disk(partial(self._differing, requests))
        ]
        self._followed = now if all(done) else None
        return all(done)

    async def _follow_for_ever(self) -> None:
        while True:
            seen = self._wake.count
            done = await self.follow()
            await self._wake.after(seen, None if done else RETRY_SECONDS)

    def _requests(self) -> _Requests:
        paused, ignored = [], {}
        for grant in self._manager.ledger.grants.values():
            pod = self._pods.by_uid.get(grant.pod_uid)
            if pod is None or grant.claim is not None:  # several pods may use a claim, so no pod's annotation decides
                continue
            try:
                pause = is_paused(pod.annotations)
            except RequestError as exc:
                ignored[grant.grant_id] = f"container {grant.container} stays as it is: {exc}"
                continue
            trouble = pause_trouble(grant.container, grant.backend, self._gates) if pause else ""
            if trouble:
                ignored[grant.grant_id] = trouble
            if grant.under_shim:
                paused.append((grant, pause and not trouble))
        return _Requests(paused, ignored)

    def _differing(self, requests: _Requests) -> Sequence[tuple[Grant, bool]]:
        """Return the requests that differ from the limits; in the thread for files. The reconciler restores missing limits."""
        found = ((grant, paused, self._files.limits(grant.grant_id)) for grant, paused in requests.paused)
        return [
            (grant, paused)
            for grant, paused, limits in found
            if limits is not None and any(device.paused != paused for device in limits.devices)
        ]

    async def _pause(self, grant: Grant, *, paused: bool) -> bool:
        try:
            if await self._manager.pause(grant, paused=paused):
                self._report_paused(grant, paused=paused)
        except StorageError as exc:
            logger.warning("a container is not %s yet: %s", "paused" if paused else "resumed", exc, extra=_about(grant))
            return False
        return True

    def _report_paused(self, grant: Grant, *, paused: bool) -> None:
        reason, what = contract.EVENT_REASON_RESUMED, "launches again"
        if paused:
            until = f"until annotation {contract.ANNOTATION_PAUSED} is false or removed"
            reason, what = contract.EVENT_REASON_PAUSED, f"is paused: it launches nothing {until}, and keeps its memory"
        message = f"container {grant.container} {what}"
        logger.info("%s", message, extra=_about(grant))
        event = PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, reason, message, warning=False)
        self._events.record(event, happened=True)

    def _report_ignored(self, ignored: Mapping[str, str]) -> None:
        before, self._ignored = self._ignored, ignored
        for grant_id, message in ignored.items():
            if message != before.get(grant_id):
                grant = self._manager.ledger.grants[grant_id]
                logger.warning("%s", message, extra=_about(grant))
                reason = contract.EVENT_REASON_PAUSE_IGNORED
                self._events.record(PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, reason, message, warning=True))


def _about(grant: Grant) -> Mapping[str, str]:
    return {"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id}
