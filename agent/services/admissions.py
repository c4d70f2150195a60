# SPDX-License-Identifier: Apache-2.0
"""Keeps the agent's calls to kubelet's PodResources apart from kubelet's allocations.

On a List, kubelet drops the devices of ended pods and recounts the allocated devices from its records. An allocation in progress is not
recorded yet, so the next pod may get the same IDs. Then neither pod can start, because only the IDs tell containers apart. So the agent
lists nothing from the moment kubelet asks for preferred IDs until it has written its checkpoint. That follows the record, and on a busy
node may come long after our reply. A burst of pods needs both without a pause: half a second of allocations, then one list for all waiting
calls, and so on. Other clients of PodResources can still cause the conflict.
Source: UpdateAllocatedDevices and allocateContainerResources, k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/manager.go of 1.36.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from agent.core.identity import HeldDevices
from agent.ports.kubelet import KubeletCheckpoint, PodResources
from agent.services.shared_call import SharedCall

ANNOUNCED_SECONDS: Final = 1.0
"""Seconds after its call for preferred IDs within which kubelet may begin to allocate."""
RECORDED_SECONDS: Final = 0.1
"""Seconds that kubelet may need to record an allocation after our reply, where its checkpoint cannot be read."""
GIVEN_UP_SECONDS: Final = 2.0
"""Seconds after our reply when a missing checkpoint write is given up: the pod has ended, or kubelet."""
LOOK_SECONDS: Final = 0.02
"""Between two checks whether kubelet has finished."""
BURST_SECONDS: Final = 0.5
"""Seconds after a list in which allocations go first. Then the next list runs: a waiting list delays the start of a container."""
LISTING_SPACING_SECONDS: Final = 0.02
"""Between two lists without allocations: half of the 100 calls a second that kubelet allows to all its clients together."""
MOST_SECONDS: Final = 3.0
"""The longest that a list waits for allocations."""


class Admissions:
    """PodResources, with the allocations in progress taken into account."""

    def __init__(self, pod_resources: PodResources, checkpoint: KubeletCheckpoint, monotonic: Callable[[], float]) -> None:
        self._pod_resources = pod_resources
        self._checkpoint = checkpoint
        self._monotonic = monotonic
        self._allocating = 0
        self._answered = asyncio.Event()
        """Set while no allocation is in progress."""
        self._answered.set()
        self._announced_until = float("-inf")
        self._answered_at = float("-inf")
        self._version_then: object = None
        """Version of the checkpoint when an allocation was last answered."""
        self._lists = SharedCall(pod_resources.held, LISTING_SPACING_SECONDS, self._turn)
        self._listing = asyncio.Lock()
        """Held during a list, and before one that is about to begin."""
        self._listed_at = float("-inf")

    async def held(self) -> Sequence[HeldDevices]:
        """See ``ports.PodResources``. All callers before the start of a list share it."""
        return await self._lists.answer()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        await self._pause(self._listed_at + BURST_SECONDS - self._monotonic())
        async with self._listing:
            await self._pause(MOST_SECONDS)
            try:
                yield
            finally:
                self._listed_at = self._monotonic()

    async def _pause(self, most_seconds: float) -> None:
        """Wait until kubelet allocates nothing, or the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, most_seconds)):
                while self._allocating or self._announced_until > self._monotonic() or self._may_be_unrecorded():
                    await self._answered.wait()
                    await asyncio.sleep(LOOK_SECONDS)

    def _may_be_unrecorded(self) -> bool:
        """Whether kubelet may not have recorded the last answered allocation yet. It allocates one after the other."""
        since = self._monotonic() - self._answered_at
        version = self._checkpoint.version()
        if version is None:
            return since < RECORDED_SECONDS
        return version == self._version_then and since < GIVEN_UP_SECONDS

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """See ``ports.PodResources``."""
        return await self._pod_resources.allocatable_ids(resource)

    async def announced(self) -> None:
        """Wait for a list in progress, and note that kubelet is about to allocate."""
        async with self._listing:
            self._announced_until = self._monotonic() + ANNOUNCED_SECONDS

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Note that kubelet allocates inside this block, and has to record the allocation afterwards."""
        self._allocating += 1
        self._answered.clear()
        try:
            yield
        finally:
            self._allocating -= 1
            self._announced_until = float("-inf")
            self._answered_at, self._version_then = self._monotonic(), self._checkpoint.version()
            if not self._allocating:
                self._answered.set()
