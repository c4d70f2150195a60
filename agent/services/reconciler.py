"""Compares ledger, pods and files, and heals what differs: releases grants that are over, sweeps files that belong to none.

Runs every period and soon after a pod went, so that a dead pod's share is free within a period (I3). Deciding is in
``core.reconciliation``.
"""

import asyncio
import logging

from agent.core.ledger import Grant
from agent.core.reconciliation import NodeView, plan_releases
from agent.errors import KubeletError, StorageError
from agent.ports import Clock, ContainerFiles, PodResources
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""Pods go in bursts; one pass serves the burst."""


class Reconciler:
    """One pass, and the loop of passes."""

    def __init__(
        self, period_seconds: float, *, book: GrantBook, pods: PodCache, pod_resources: PodResources, files: ContainerFiles, clock: Clock
    ) -> None:
        self._period_seconds = period_seconds
        self._book = book
        self._pods = pods
        self._pod_resources = pod_resources
        self._files = files
        self._clock = clock
        self._absent_since: dict[str, float] = {}

    async def run(self) -> None:
        """Reconcile for ever: every period, and when a grant's pod ended."""
        while True:
            try:
                await self.reconcile()
            except StorageError as exc:
                logger.error("reconciling: %s", exc)  # noqa: TRY400 - the sentence says it all
            await self._until_due()

    async def reconcile(self) -> None:
        """Do one pass. Raises StorageError."""
        if self._pods.synced:
            await self._release_ended()
        swept = await self._book.sweep()
        if swept:
            logger.info("swept files of no grant", extra={"grants": list(swept)})

    async def _release_ended(self) -> None:
        suspects = self._suspects()
        if not suspects:
            self._absent_since.clear()
            return
        try:
            held = await self._pod_resources.held()
        except KubeletError as exc:
            logger.warning("reconciling without PodResources: %s", exc)
            held = None
        live = await self._book.on_disk(lambda: frozenset(grant.grant_id for grant in suspects if self._has_live_process(grant)))
        now = self._clock.monotonic()
        self._absent_since = {grant.grant_id: self._absent_since.get(grant.grant_id, now) for grant in suspects}
        absent_seconds = {identifier: now - since for identifier, since in self._absent_since.items()}
        plan = plan_releases(self._book.ledger.grants.values(), NodeView(self._pods.by_uid, held, live), absent_seconds)
        for grant in plan.release:
            logger.info(
                "grant released: its pod is gone",
                extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id},
            )
        await self._book.release(plan.release)

    def _suspects(self) -> list[Grant]:
        """Return grants whose pod the API does not know as running."""
        return [grant for grant in self._book.ledger.grants.values() if not self._pods.is_active(grant.pod_uid)]

    def _has_live_process(self, grant: Grant) -> bool:
        view = self._files.region(grant.grant_id)
        return view is not None and view.live

    async def _until_due(self) -> None:
        known = {grant.grant_id for grant in self._suspects()}
        deadline = self._clock.monotonic() + self._period_seconds
        while (left := deadline - self._clock.monotonic()) > 0:
            await self._pods.pod_changes.after(self._pods.pod_changes.count, left)
            if self._pods.synced and any(grant.grant_id not in known for grant in self._suspects()):
                await asyncio.sleep(min(SETTLE_SECONDS, self._period_seconds))
                return
