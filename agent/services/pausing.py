"""Lets the launches of running containers wait while the annotation of their pod says so, and go on when it does no more.

A container starts with limits that say it already (``core.limits``); here the limits follow the annotation of a pod that runs. Those of a
pod that is not known stay as they are: what was known last holds while the API is away, over a restart of the agent too.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agent.core.backends import pause_trouble
from agent.core.ledger import Grant
from agent.errors import StorageError
from agent.ports import ContainerFiles, PodEvent
from agent.services.changes import Changes
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from placement.request import RequestError, is_paused
from proto import contract

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Until limits that could not be written are tried again."""


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What the annotations say."""

    paused: Sequence[tuple[Grant, bool]]
    """Of each container under the shim."""
    ignored: Mapping[str, str]
    """By grant id, why the annotation of its pod does nothing."""


class Pauser:
    """One look at the annotations, and the loop of looks."""

    def __init__(self, *, book: GrantBook, pods: PodCache, files: ContainerFiles, events: EventRecorder) -> None:
        self._book = book
        self._pods = pods
        self._files = files
        self._events = events
        self._wake = Changes()
        self._followed: tuple[int, _Wishes] | None = None
        """Which writing of files, and which wishes, were looked at last."""
        self._ignored: Mapping[str, str] = {}

    async def run(self) -> None:
        """Follow the annotations for ever, whenever they or the files of grants change."""
        async with asyncio.TaskGroup() as group:
            for source in (self._pods.pod_changes, self._book.changes):
                group.create_task(self._forward(source))
            group.create_task(self._follow_for_ever())

    async def follow(self) -> bool:
        """Bring the limits in line with the annotations; return whether they are."""
        now = (self._book.changes.count, self._wishes())
        if now == self._followed:
            return True
        _, wishes = now
        self._tell_ignored(wishes.ignored)
        done = [await self._pause(grant, paused=paused) for grant, paused in await self._book.on_disk(partial(self._differing, wishes))]
        self._followed = now if all(done) else None
        return all(done)

    async def _forward(self, source: Changes) -> None:
        seen = source.count
        while True:
            seen = await source.after(seen)
            self._wake.notify()

    async def _follow_for_ever(self) -> None:
        while True:
            seen = self._wake.count
            done = await self.follow()
            await self._wake.after(seen, None if done else RETRY_SECONDS)

    def _wishes(self) -> _Wishes:
        paused, ignored = [], {}
        for grant in self._book.ledger.grants.values():
            pod = self._pods.by_uid.get(grant.pod_uid)
            if pod is None:
                continue
            try:
                wish = is_paused(pod.annotations)
            except RequestError as exc:
                ignored[grant.grant_id] = f"container {grant.container} stays as it is: {exc}"
                continue
            if grant.under_shim:
                paused.append((grant, wish))
            elif wish:
                ignored[grant.grant_id] = pause_trouble(grant.container, grant.backend)
        return _Wishes(paused, ignored)

    def _differing(self, wishes: _Wishes) -> Sequence[tuple[Grant, bool]]:
        """Return the wishes that the limits do not fulfil; in the thread for files. Limits that are lost are written anew by others."""
        found = ((grant, paused, self._files.limits(grant.grant_id)) for grant, paused in wishes.paused)
        return [
            (grant, paused)
            for grant, paused, limits in found
            if limits is not None and any(device.paused != paused for device in limits.devices)
        ]

    async def _pause(self, grant: Grant, *, paused: bool) -> bool:
        try:
            if await self._book.pause(grant, paused=paused):
                self._tell_paused(grant, paused=paused)
        except StorageError as exc:
            logger.warning("a container is not %s yet: %s", "paused" if paused else "resumed", exc, extra=_about(grant))
            return False
        return True

    def _tell_paused(self, grant: Grant, *, paused: bool) -> None:
        reason, what = contract.EVENT_REASON_RESUMED, "launches again"
        if paused:
            until = f"until annotation {contract.ANNOTATION_PAUSED} is false or removed"
            reason, what = contract.EVENT_REASON_PAUSED, f"is paused: it launches nothing {until}, and keeps its memory"
        message = f"container {grant.container} {what}"
        logger.info("%s", message, extra=_about(grant))
        event = PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, reason, message, warning=False)
        self._events.record(event, happened=True)

    def _tell_ignored(self, ignored: Mapping[str, str]) -> None:
        before, self._ignored = self._ignored, ignored
        for grant_id, message in ignored.items():
            if message != before.get(grant_id):
                grant = self._book.ledger.grants[grant_id]
                logger.warning("%s", message, extra=_about(grant))
                reason = contract.EVENT_REASON_PAUSE_IGNORED
                self._events.record(PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, reason, message, warning=True))


def _about(grant: Grant) -> Mapping[str, str]:
    return {"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id}
