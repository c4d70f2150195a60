# SPDX-License-Identifier: Apache-2.0
"""Has waiting pods retried when time alone makes preemption possible: a victim ran for its minimum, or a pod has waited for its delay.

Neither is a change that another part would see. kube-scheduler would retry the pod minutes later.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from scheduler_plugin.core.cluster.durations import may_end_from, may_preempt_from
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH, in_batches

PERIOD_SECONDS: Final = 2.0


class PreemptionTimes:
    """The loop."""

    def __init__(self, context: ExtenderContext, retry: Callable[[str], Awaitable[None]], leads: Callable[[], bool]) -> None:
        """Args: retry: makes kube-scheduler retry a pod. leads: whether this replica decides."""
        self._context = context
        self._retry = retry
        self._leads = leads
        self._looked_at = context.clock.now()
        """Seconds since 1970."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        since, now = self._looked_at, self._context.clock.now()
        self._looked_at = now
        if not self._leads():
            return
        state = self._context.state
        async for pod in in_batches(list(state.pods.values()), MAX_PER_BATCH):
            if pod.node_name and since < may_end_from(pod) <= now:
                state.note_pods_changed(pod.node_name)
        async for decision in in_batches(self._context.decisions.waiting(), MAX_PER_BATCH):
            if since < may_preempt_from(decision.pod) <= now:
                await self._retry(decision.pod.uid)
