# SPDX-License-Identifier: Apache-2.0
"""Keeps the state equal to the API's inventories, nodes, pods and disruption budgets, and knows how old it is.

An object that cannot be decoded keeps its last valid form; the stream logs the error. During an outage the state stays as it was.

There are two ages. A stream is current while the API answers. ``caught_up_at`` is earlier: a watch that was opened again, or was silent for
long, first has to catch up. Code that concludes something from a pod's absence must wait for that.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, Generic, TypeVar

from aliquot.contract.gpunode import GpuNode
from scheduler_plugin.core.cluster.budgets import Budget, Budgets
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.bind import CONFIRM_SECONDS
from scheduler_plugin.ports import Clock

logger = logging.getLogger(__name__)

_Taker = TypeVar("_Taker")
_NOWHERE: Final[Mapping[str, str]] = {}


class Source(StrEnum):
    """One stream."""

    INVENTORIES = "gpunodes"
    NODES = "nodes"
    PODS = "pods"
    BUDGETS = "poddisruptionbudgets"


class NamedHost:
    """A node's name, its allocatable CPU (millicores), RAM (MiB) and number of pods, its taints, and the labels that say where it is.

    ``tainted``: it has a ``PreferNoSchedule`` taint. ``closed``: other taints close it to pods that do not tolerate them. ``resources``:
    the extended resources that its device plugins give out.
    """

    __slots__ = ("amounts", "closed", "facts", "name", "place", "resources", "tainted")

    def __init__(
        self,
        name: str,
        amounts: tuple[int, int, int],
        *,
        tainted: bool = False,
        closed: bool = False,
        place: Mapping[str, str] = _NOWHERE,
        resources: frozenset[str] = frozenset(),
        facts: NodeFacts | None = None,
    ) -> None:
        """Make it. Args: facts: all labels and taints, where they are needed."""
        self.name = name
        self.amounts = amounts
        self.tainted = tainted
        self.closed = closed
        self.place = place
        self.resources = resources
        self.facts = facts


class ClusterWatch:
    """Receives the events of all streams."""

    def __init__(self, state: ClusterState, budgets: Budgets, clock: Clock) -> None:
        self._state = state
        self._budgets = budgets
        self._clock = clock
        self._current_at: dict[Source, float] = {}
        self._caught_up_at: dict[Source, float] = {}
        self._listing_since: dict[Source, float] = {}
        self._catching_up_since: dict[Source, float] = {}
        self._trouble: dict[Source, str] = {}
        self._event = asyncio.Event()
        """Set at the next event of a stream, and replaced then."""
        self.on_pod_gone: Callable[[str], None] = lambda _: None
        """Called with the UID of each pod that ended or is bound."""
        self.on_ended: Callable[[PodFacts], None] = lambda _: None
        """Called with each running pod that ended by itself, as it was before. Ends during an outage are not reported."""
        self.on_nominated: Callable[[PodFacts], None] = lambda _: None
        """Called with each pod that kube-scheduler has just nominated to a node."""
        self.on_waiting: Callable[[PodFacts], None] = lambda _: None
        """Called with each pod that waits for a node, once it has no scheduling gate. After a list, called with all of them again."""
        self.directory = NodeDirectory()
        """The nodes that came with ``facts``."""
        self.on_synced: Callable[[], None] = lambda: None
        """Called once, when all streams have listed their objects."""

    @property
    def synced(self) -> bool:
        """Whether each stream has listed its objects at least once."""
        return len(self._current_at) == len(Source)

    @property
    def trouble(self) -> str:
        """Why the state is not current; empty while it is."""
        missing = [str(source) for source in Source if source not in self._current_at]
        return "; ".join([*self._trouble.values(), *([f"not listed yet: {', '.join(missing)}"] if missing else [])])

    def current_at(self, source: Source) -> float:
        """Return the monotonic time at which a stream last was current."""
        return self._current_at.get(source, float("-inf"))

    def caught_up_at(self, source: Source) -> float:
        """Return the monotonic time up to which a stream has delivered all events, except for those on their way."""
        return self._caught_up_at.get(source, float("-inf"))

    async def next_event(self) -> None:
        """Wait for the next event of a stream."""
        await self._event.wait()

    def age_seconds(self) -> float:
        """Return how long ago the oldest stream was current; infinite before all were."""
        return self._clock.monotonic() - min(map(self.current_at, Source))

    def lag_seconds(self) -> Mapping[str, float]:
        """Return how long ago each stream was current; infinite before it was."""
        return {str(source): self._clock.monotonic() - self.current_at(source) for source in Source}

    @property
    def inventories(self) -> "_Inventories":
        """The receiver of the inventories' stream."""
        return _Inventories(self, Source.INVENTORIES, self._state)

    @property
    def budgets(self) -> "_Budgets":
        """The receiver of the PodDisruptionBudgets' stream."""
        return _Budgets(self, Source.BUDGETS, self._budgets)

    @property
    def hosts(self) -> "_Hosts":
        """The receiver of the nodes' stream."""
        return _Hosts(self, Source.NODES, self._state)

    @property
    def pods(self) -> "_Pods":
        """The receiver of the pods' stream."""
        return _Pods(self, Source.PODS, self._state)

    def note_listing(self, source: Source) -> None:
        """Note that a stream begins to list all objects."""
        self._listing_since[source] = self._clock.monotonic()

    def note_listed(self, source: Source) -> None:
        """Note that a stream has listed all objects."""
        self._caught_up_at[source] = self._listing_since[source]
        self.note_opened(source)

    def note_opened(self, source: Source) -> None:
        """Note that the API answers, and that earlier changes may still be on their way."""
        self._catching_up_since[source] = self._clock.monotonic()
        self._note_event(source)

    def note_current(self, source: Source, *, bookmark: bool) -> None:
        """Note that all events received so far are applied.

        The stream has caught up at a bookmark, which comes after all events before the watch, or once it has delivered events for
        CONFIRM_SECONDS. After a longer silence it has to catch up again: the connection may have been dead.
        """
        now = self._clock.monotonic()
        if bookmark:
            self._catching_up_since.pop(source, None)
        elif now - self.current_at(source) > CONFIRM_SECONDS:
            self._catching_up_since[source] = now
        elif now - self._catching_up_since.get(source, now) >= CONFIRM_SECONDS:
            del self._catching_up_since[source]
        if source not in self._catching_up_since:
            self._caught_up_at[source] = now
        self._note_event(source)

    def _note_event(self, source: Source) -> None:
        before = self.synced
        self._current_at[source] = self._clock.monotonic()
        if self.synced and not before:
            self.on_synced()
        if self._trouble.pop(source, ""):
            logger.info("watching %s: the API server answers again", source)
        self._event.set()
        self._event = asyncio.Event()

    def note_trouble(self, source: Source, sentence: str) -> None:
        """Note why a stream is not current."""
        if source not in self._trouble:
            logger.warning("watching %s", sentence)
        self._trouble[source] = sentence


class _Base(Generic[_Taker]):
    def __init__(self, watch: ClusterWatch, source: Source, taker: _Taker) -> None:
        self._watch = watch
        self._source = source
        self._taker = taker

    def listing(self) -> None:
        self._watch.note_listing(self._source)

    def opened(self) -> None:
        self._watch.note_opened(self._source)

    def current(self, *, bookmark: bool) -> None:
        self._watch.note_current(self._source, bookmark=bookmark)

    def trouble(self, sentence: str, *, is_missing: bool = False) -> None:
        del is_missing
        self._watch.note_trouble(self._source, sentence)


class _Inventories(_Base[ClusterState]):
    def listed(self, items: list[GpuNode]) -> None:
        self._taker.replace_gpu_nodes(items)
        self._watch.note_listed(self._source)

    def changed(self, item: GpuNode) -> None:
        self._taker.set_gpu_node(item)

    def deleted(self, item: GpuNode) -> None:
        self._taker.drop_gpu_node(item.name)


class _Hosts(_Base[ClusterState]):
    def listed(self, items: list[NamedHost]) -> None:
        self._taker.replace_hosts({item.name: item.amounts for item in items})
        self._watch.directory.keep({item.name for item in items})
        for item in items:
            self._note_more(item)
        self._watch.note_listed(self._source)

    def changed(self, item: NamedHost) -> None:
        self._taker.set_host(item.name, *item.amounts)
        self._note_more(item)

    def _note_more(self, item: NamedHost) -> None:
        self._taker.soft.set_tainted(item.name, tainted=item.tainted)
        self._taker.set_closed(item.name, closed=item.closed)
        self._taker.set_place(item.name, item.place)
        self._taker.set_plugin_resources(item.name, item.resources)
        if item.facts is not None:
            self._watch.directory.put(item.facts)

    def deleted(self, item: NamedHost) -> None:
        self._taker.drop_host(item.name)
        self._watch.directory.drop(item.name)


class _Pods(_Base[ClusterState]):
    def listed(self, items: list[PodFacts]) -> None:
        before = set(self._taker.pods)
        self._taker.replace_pods(items)
        for uid in before - set(self._taker.pods):
            self._watch.on_pod_gone(uid)
        for item in items:
            self._note_if_settled(item)
            self._note_if_waiting(item)
        self._watch.note_listed(self._source)

    def changed(self, item: PodFacts) -> None:
        before = self._taker.pods.get(item.uid)
        if not item.active:
            self._note_end(before, item)
        self._taker.set_pod(item)
        if before is None or before.gates:
            self._note_if_waiting(item)
        if item.nominated_node and (before is None or before.nominated_node != item.nominated_node):
            self._watch.on_nominated(item)
        self._note_if_settled(item)

    def _note_if_waiting(self, item: PodFacts) -> None:
        if item.active and not item.node_name and not item.gates:
            self._watch.on_waiting(item)

    def _note_if_settled(self, item: PodFacts) -> None:
        if item.holds or not item.active:
            self._watch.on_pod_gone(item.uid)

    def _note_end(self, before: PodFacts | None, item: PodFacts) -> None:
        """Report an end, unless the pod was deleted while it ran."""
        if before is not None and before.node_name and not (before.deletion_requested or (item.active and item.deletion_requested)):
            self._watch.on_ended(before)

    def deleted(self, item: PodFacts) -> None:
        self._note_end(self._taker.pods.get(item.uid), item)
        self._taker.drop_pod(item.uid)
        self._watch.on_pod_gone(item.uid)


class _Budgets(_Base[Budgets]):
    def listed(self, items: list[Budget]) -> None:
        self._taker.replace(items)
        self._watch.note_listed(self._source)

    def changed(self, item: Budget) -> None:
        self._taker.put(item)

    def deleted(self, item: Budget) -> None:
        self._taker.drop(item)
