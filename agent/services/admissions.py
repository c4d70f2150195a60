"""Keeps our calls of kubelet's PodResources apart from its allocations.

A List has kubelet forget the devices of pods that ended, and count what is allocated anew: by what it has recorded, which an allocation
under way is not yet. The next pod may then be given the same IDs, and neither of the two can start, because their IDs are all that tells
containers apart. So nothing is listed from the moment kubelet asks which IDs we prefer until it has written its checkpoint, which follows
the record and on a busy node may be long after our answer. In a burst of pods both want to go on without a pause: the allocations of half
a second, then one list for all who wait for one, and so on. Other clients of PodResources can still do it.
Source: UpdateAllocatedDevices and allocateContainerResources, k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/manager.go of 1.36.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from agent.core.identity import HeldDevices
from agent.ports import KubeletMemory, PodResources
from agent.services.shared_call import SharedCall

ANNOUNCED_SECONDS: Final = 1.0
"""How long after its question about IDs kubelet may still begin to allocate."""
RECORDED_SECONDS: Final = 0.1
"""How long kubelet may need to record an allocation that we have answered, where its checkpoint cannot be read."""
GIVEN_UP_SECONDS: Final = 2.0
"""When so long after our answer nothing was written, nothing will be: the pod ended meanwhile, or kubelet."""
LOOK_SECONDS: Final = 0.02
"""Between two looks at whether kubelet is done."""
BURST_SECONDS: Final = 0.5
"""How long after a list allocations without a pause go before the next one: what keeps a list waiting keeps a container from its start."""
LISTING_SPACING_SECONDS: Final = 0.02
"""Between two lists when nothing is allocated: half of the 100 calls a second that kubelet answers, to all its clients together."""
MOST_SECONDS: Final = 3.0
"""The longest that a list waits for allocations."""


class Admissions:
    """PodResources, with what is known of the allocations under way."""

    def __init__(self, pod_resources: PodResources, kubelet_memory: KubeletMemory, monotonic: Callable[[], float]) -> None:
        self._pod_resources = pod_resources
        self._kubelet_memory = kubelet_memory
        self._monotonic = monotonic
        self._allocating = 0
        self._answered = asyncio.Event()
        """Set while no allocation is under way."""
        self._answered.set()
        self._announced_until = float("-inf")
        self._answered_at = float("-inf")
        self._version_then: object = None
        """The checkpoint's, when an allocation was last answered."""
        self._lists = SharedCall(pod_resources.held, LISTING_SPACING_SECONDS, self._turn)
        self._listing = asyncio.Lock()
        """Held while something is listed, or about to be."""
        self._listed_at = float("-inf")

    async def held(self) -> Sequence[HeldDevices]:
        """See ``ports.PodResources``. All who ask before a list has begun share it."""
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
        """Return when kubelet allocates nothing, or when the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, most_seconds)):
                while self._allocating or self._announced_until > self._monotonic() or self._may_be_unrecorded():
                    await self._answered.wait()
                    await asyncio.sleep(LOOK_SECONDS)

    def _may_be_unrecorded(self) -> bool:
        """Whether kubelet may still have to record what was answered last; it allocates one after the other."""
        since = self._monotonic() - self._answered_at
        version = self._kubelet_memory.version()
        if version is None:
            return since < RECORDED_SECONDS
        return version == self._version_then and since < GIVEN_UP_SECONDS

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """See ``ports.PodResources``."""
        return await self._pod_resources.allocatable_ids(resource)

    async def announced(self) -> None:
        """Wait until kubelet has answered what was to be listed before, and note that it is about to allocate."""
        async with self._listing:
            self._announced_until = self._monotonic() + ANNOUNCED_SECONDS

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Note that kubelet allocates, until this is left, and that it has to record it then."""
        self._allocating += 1
        self._answered.clear()
        try:
            yield
        finally:
            self._allocating -= 1
            self._announced_until = float("-inf")
            self._answered_at, self._version_then = self._monotonic(), self._kubelet_memory.version()
            if not self._allocating:
                self._answered.set()
