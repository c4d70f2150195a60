# SPDX-License-Identifier: Apache-2.0
"""Publishes this node's ResourceSlices, and writes them again whenever they are gone.

Kubelet deletes the slices of its node when it starts, and those of a driver 30 s after the driver left. So the API is compared with what
should be there after every change that the watch reports, never with what this agent remembers to have written.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.core.inventory import DeviceInventory
from agent.core.slices import Contents, FoundSlice, Offer, Pool, SliceChanges, changes_to, contents_of
from agent.ports.dra import ResourceApi
from agent.services.changes import Changes
from agent.services.publisher import Pace
from agent.services.state import AgentState

logger = logging.getLogger(__name__)


class SliceCache:
    """Implements ``ports.SliceListener``; made on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.slices: dict[str, FoundSlice] = {}
        self.known = False
        """Whether the slices were listed at least once."""
        self.changes = Changes()

    def slices_listed(self, slices: Sequence[FoundSlice]) -> None:
        """See ``ports.SliceListener``."""
        self._hand_over({one.name: one for one in slices}, whole=True)

    def slice_changed(self, one: FoundSlice) -> None:
        """See ``ports.SliceListener``."""
        self._hand_over({one.name: one})

    def slice_deleted(self, one: FoundSlice) -> None:
        """See ``ports.SliceListener``."""
        self._hand_over({one.name: None})

    def api_trouble(self, what: str, trouble: str) -> None:
        """See ``ports.SliceListener``."""
        if trouble:
            logger.warning("watching %s: %s", what, trouble)

    def _hand_over(self, seen: Mapping[str, FoundSlice | None], *, whole: bool = False) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._take(seen, whole=whole))

    def _take(self, seen: Mapping[str, FoundSlice | None], *, whole: bool) -> None:
        merged = {**({} if whole else self.slices), **seen}
        self.slices = {name: one for name, one in merged.items() if one is not None}
        self.known = self.known or whole
        self.changes.notify()


class SliceTarget:
    """The node's slices, as a target of ``NodePublisher``."""

    name = "resource slices"

    def __init__(
        self,
        node_name: str,
        offer: Offer,
        *,
        api: ResourceApi,
        state: AgentState,
        cache: SliceCache,
        withheld: Callable[[], str],
    ) -> None:
        """Args: withheld: returns why no device may be offered now; empty when they may."""
        self._node_name = node_name
        self._offer = offer
        self._api = api
        self._watch = state.watch
        self._pods = state.pods
        self._cache = cache
        self._withheld = withheld
        self._pruned: dict[str, tuple[Any, Any]] = {}
        self._pace = Pace(cache.changes, lambda: 0.0)
        self._reported = ""
        self._made: tuple[DeviceInventory, Contents] | None = None
        """The contents for an inventory. Pods come more often than GPUs change."""

    def due_seconds(self, now: float) -> float | None:
        """See ``Target``."""
        changes = self._changes()
        if not changes:
            self._pace.settled()
            return None
        return self._pace.due_seconds(changes, now, urgent=True)

    def write(self) -> Callable[[], object]:
        """See ``Target``."""
        changes = self._changes()
        self._pace.writing(changes)
        return lambda: _write(self._api, changes)

    def written(self, outcome: Any, now: float) -> None:
        """See ``Target``."""
        self._pruned |= outcome
        self._pace.written(now)

    def _changes(self) -> SliceChanges:
        """Return what to write; nothing before the node, its GPUs and the slices in the API are known."""
        node = self._pods.node
        if node is None or not self._watch.looked or not self._cache.known:
            return SliceChanges()
        pool = Pool(self._node_name, node.uid)
        return changes_to(self._contents(), pool, self._cache.slices.values(), self._pruned)

    def _contents(self) -> Contents:
        withheld = self._withheld()
        if withheld != self._reported:
            self._reported = withheld
            logger.info("no device is offered to claims: %s" if withheld else "devices are offered to claims%s", withheld)
        inventory = self._watch.inventory
        if self._made is None or self._made[0] is not inventory:
            self._made = inventory, contents_of(inventory, self._offer)
        return Contents() if withheld else self._made[1]


def _write(api: ResourceApi, changes: SliceChanges) -> Mapping[str, tuple[Any, Any]]:
    """Send the requests; return each spec as written and as stored, by the slice's name."""
    stored = {}
    for body in changes.create:
        stored[body["metadata"]["name"]] = (body["spec"], api.create_slice(body))
    for name, version, body in changes.replace:
        stored[name] = (body["spec"], api.replace_slice(name, version, body))
    for name in changes.delete:
        api.delete_slice(name)
    return stored
