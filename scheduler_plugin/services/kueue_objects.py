# SPDX-License-Identifier: Apache-2.0
"""Kueue's objects as the API shows them, kept up to date by one stream for each kind."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from scheduler_plugin.core.admit.kueue import AdmissionCheck, Flavor, PriorityClass, Workload
from scheduler_plugin.core.admit.queues import ClusterQueue, LocalQueue, Queue

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_K = TypeVar("_K")


class Kept(Generic[_K, _T]):
    """The objects of one kind, by key. Implements the listener of a stream."""

    def __init__(self, key: Callable[[_T], _K], monotonic: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._key = key
        self._monotonic = monotonic
        self._on_change = on_change
        self._items: dict[_K, _T] = {}
        self._listing_since = float("-inf")
        self._trouble = ""
        self._is_missing = False
        self.listed_from = float("-inf")
        """Monotonic time at which the latest complete list began."""
        self.version = 0
        """Grows with each change."""

    @property
    def is_pending(self) -> bool:
        """Whether the first list is still to come: not where the API server has no such objects."""
        return self.listed_from == float("-inf") and not self._is_missing

    @property
    def by_key(self) -> Mapping[_K, _T]:
        """All objects."""
        return self._items

    def listing(self) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._listing_since = self._monotonic()

    def listed(self, items: list[_T]) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._items = {self._key(item): item for item in items}
        self.listed_from, self._trouble = self._listing_since, ""
        self._note()

    def opened(self) -> None:
        """See ``adapters.kube_watch.Listener``."""

    def changed(self, item: _T) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._items[self._key(item)] = item
        self._note()

    def deleted(self, item: _T) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._items.pop(self._key(item), None)
        self._note()

    def current(self, *, bookmark: bool) -> None:
        """See ``adapters.kube_watch.Listener``."""

    def trouble(self, sentence: str, *, is_missing: bool = False) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._is_missing = is_missing
        if not self._trouble:
            logger.warning("watching %s", sentence)
        self._trouble = sentence

    def _note(self) -> None:
        self.version += 1
        self._on_change()


class KueueObjects:
    """Workloads, admission checks, flavors, queues, and the classes that give priorities."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._changed = asyncio.Event()
        self.workloads: Kept[tuple[str, str], Workload] = Kept(lambda item: item.key, monotonic, self._changed.set)
        self.checks: Kept[str, AdmissionCheck] = Kept(lambda item: item.name, monotonic, self._changed.set)
        self.flavors: Kept[str, Flavor] = Kept(lambda item: item.name, monotonic, self._changed.set)
        self.classes: Mapping[str, Kept[str, PriorityClass]] = {
            kind: Kept(lambda item: item.name, monotonic, self._changed.set) for kind in ("PriorityClass", "WorkloadPriorityClass")
        }
        """By kind."""

        # A change of a queue wakes no one: templates are reviewed as the queues are at that moment.
        self.local_queues: Kept[tuple[str, str], LocalQueue] = Kept(lambda item: item.key, monotonic, _nothing)
        self.cluster_queues: Kept[str, ClusterQueue] = Kept(lambda item: item.name, monotonic, _nothing)

    def queue(self, namespace: str, name: str) -> Queue | None:
        """Return what the ClusterQueue behind a LocalQueue says about GPU memory; None if it says nothing, or one of them is missing."""
        local = self.local_queues.by_key.get((namespace, name))
        shared = self.cluster_queues.by_key.get(local.cluster_queue) if local is not None else None
        return shared.queue(self.flavors.by_key) if shared is not None else None

    @property
    def are_queues_pending(self) -> bool:
        """Whether ``queue`` would miss queues that exist, because they are being listed for the first time."""
        return any(kept.is_pending for kept in (self.flavors, self.local_queues, self.cluster_queues))

    def listed_since(self, moment: float) -> bool:
        """Whether workloads were listed as they were at a moment or later, and checks and flavors at any time."""
        others = min(self.checks.listed_from, self.flavors.listed_from)
        return self.workloads.listed_from >= moment and others > float("-inf")

    async def next_change(self, timeout_seconds: float) -> None:
        """Wait for a change of any object, or for the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):  # wait_for of Python 3.11 loses a cancellation at the same moment
                await self._changed.wait()
        self._changed.clear()


def _nothing() -> None:
    pass
