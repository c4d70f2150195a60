"""Keeps our calls of kubelet's PodResources apart from its allocations.

A List has kubelet forget the devices of pods that ended, and count what is allocated anew: by what it has recorded, which an allocation
under way is not yet. The next pod may then be given the same IDs, and neither of the two can start, because their IDs are all that tells
containers apart. So nothing is listed from the moment kubelet asks which IDs we prefer until it had time to record what it allocated. Other
clients of PodResources can still do it.
Source: UpdateAllocatedDevices and allocateContainerResources, k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/manager.go of 1.36.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from agent.core.identity import HeldDevices
from agent.ports import PodResources

ANNOUNCED_SECONDS: Final = 0.25
"""How long after its question about IDs kubelet may still begin to allocate."""
RECORDED_SECONDS: Final = 0.01
"""How long kubelet may need to record an allocation that we have answered."""
MOST_SECONDS: Final = 1.0
"""The longest that one of the two waits for the other."""


class Admissions:
    """PodResources, with what is known of the allocations under way."""

    def __init__(self, pod_resources: PodResources, monotonic: Callable[[], float]) -> None:
        self._pod_resources = pod_resources
        self._monotonic = monotonic
        self._allocating = 0
        self._answered = asyncio.Event()
        """Set while no allocation is under way."""
        self._answered.set()
        self._busy_until = float("-inf")
        self._listings = 0
        self._listed = asyncio.Event()
        """Set while nothing is being listed."""
        self._listed.set()

    async def held(self) -> Sequence[HeldDevices]:
        """See ``ports.PodResources``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_SECONDS):
                while self._allocating or self._busy_until > self._monotonic():
                    await self._answered.wait()
                    await asyncio.sleep(self._busy_until - self._monotonic())
        self._listings += 1
        self._listed.clear()
        try:
            return await self._pod_resources.held()
        finally:
            self._listings -= 1
            if not self._listings:
                self._listed.set()

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """See ``ports.PodResources``."""
        return await self._pod_resources.allocatable_ids(resource)

    async def announced(self) -> None:
        """Note that kubelet is about to allocate, and wait until it has answered what is being listed."""
        self._busy_until = max(self._busy_until, self._monotonic() + ANNOUNCED_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_SECONDS):
                await self._listed.wait()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Note that kubelet allocates, until this is left."""
        self._allocating += 1
        self._answered.clear()
        try:
            yield
        finally:
            self._allocating -= 1
            self._busy_until = self._monotonic() + RECORDED_SECONDS
            if not self._allocating:
                self._answered.set()
