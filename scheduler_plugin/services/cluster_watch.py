"""Keeps the state equal to what the API tells about inventories, nodes, pods and disruption budgets, and says how old the picture is.

An object that cannot be read any more keeps its last readable form; the stream logs it. During an outage the picture stays as it was.

How old the picture is has two answers. A stream is current while the API answers. What it has told is less: a watch that is opened again,
or was silent for long, first has to catch up, and whoever concludes from a pod's absence must wait for that (``told_at``).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from proto.gpunode import GpuNode
from scheduler_plugin.core.budgets import Budget, Budgets
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.extender.bind import CONFIRM_SECONDS
from scheduler_plugin.ports import Clock

logger = logging.getLogger(__name__)

_Taker = TypeVar("_Taker")


class Source(StrEnum):
    """One stream."""

    INVENTORIES = "gpunodes"
    NODES = "nodes"
    PODS = "pods"
    BUDGETS = "poddisruptionbudgets"


class NamedHost:
    """A node's name with its allocatable CPU and RAM, and how many pods it takes."""

    __slots__ = ("amounts", "name")

    def __init__(self, name: str, amounts: tuple[int, int, int]) -> None:
        self.name = name
        self.amounts = amounts


class ClusterWatch:
    """Takes what all streams tell."""

    def __init__(self, state: ClusterState, budgets: Budgets, clock: Clock) -> None:
        self._state = state
        self._budgets = budgets
        self._clock = clock
        self._current_at: dict[Source, float] = {}
        self._told_at: dict[Source, float] = {}
        self._listing_since: dict[Source, float] = {}
        self._catching_up_since: dict[Source, float] = {}
        self._trouble: dict[Source, str] = {}
        self._answered = asyncio.Event()
        """Set when a stream tells something next, and then another one."""
        self.on_pod_gone: Callable[[str], None] = lambda _: None
        """Told the UID of every pod that ended or is bound."""
        self.on_nominated: Callable[[PodFacts], None] = lambda _: None
        """Told every pod of which kube-scheduler just said where it is to go."""
        self.on_synced: Callable[[], None] = lambda: None
        """Told once, when everything is known for the first time."""

    @property
    def synced(self) -> bool:
        """Whether every stream has told everything at least once."""
        return len(self._current_at) == len(Source)

    @property
    def trouble(self) -> str:
        """Why the picture is not current; empty while it is."""
        missing = [str(source) for source in Source if source not in self._current_at]
        return "; ".join([*self._trouble.values(), *([f"not listed yet: {', '.join(missing)}"] if missing else [])])

    def current_at(self, source: Source) -> float:
        """Return the monotonic time at which a stream last was current."""
        return self._current_at.get(source, float("-inf"))

    def told_at(self, source: Source) -> float:
        """Return the monotonic time up to which a stream has told everything, but for the moment that an event takes to come."""
        return self._told_at.get(source, float("-inf"))

    async def next_answer(self) -> None:
        """Wait until a stream tells something."""
        await self._answered.wait()

    def age_seconds(self) -> float:
        """Return how long ago the oldest stream was current; infinite before all were."""
        return self._clock.monotonic() - min(map(self.current_at, Source))

    def lag_seconds(self) -> Mapping[str, float]:
        """Return how long ago each stream was current; infinite before it was."""
        return {str(source): self._clock.monotonic() - self.current_at(source) for source in Source}

    @property
    def inventories(self) -> "_Inventories":
        """Who takes the stream of inventories."""
        return _Inventories(self, Source.INVENTORIES, self._state)

    @property
    def budgets(self) -> "_Budgets":
        """Who takes the stream of PodDisruptionBudgets."""
        return _Budgets(self, Source.BUDGETS, self._budgets)

    @property
    def hosts(self) -> "_Hosts":
        """Who takes the stream of nodes."""
        return _Hosts(self, Source.NODES, self._state)

    @property
    def pods(self) -> "_Pods":
        """Who takes the stream of pods."""
        return _Pods(self, Source.PODS, self._state)

    def note_listing(self, source: Source) -> None:
        """Note that a stream begins to tell everything at once, as it is now."""
        self._listing_since[source] = self._clock.monotonic()

    def note_listed(self, source: Source) -> None:
        """Note that a stream told everything at once."""
        self._told_at[source] = self._listing_since[source]
        self.note_opened(source)

    def note_opened(self, source: Source) -> None:
        """Note that the API answers, and that what changed in the meantime is yet to be told."""
        self._catching_up_since[source] = self._clock.monotonic()
        self._note_answer(source)

    def note_current(self, source: Source, *, bookmark: bool) -> None:
        """Note that all that a stream brought is told.

        It has caught up with a bookmark, which comes after what happened before the watch, or once it has brought something again and again
        for CONFIRM_SECONDS. A longer silence can be that of a connection which was dead, with all that happened since on its way.
        """
        now = self._clock.monotonic()
        if bookmark:
            self._catching_up_since.pop(source, None)
        elif now - self.current_at(source) > CONFIRM_SECONDS:
            self._catching_up_since[source] = now
        elif now - self._catching_up_since.get(source, now) >= CONFIRM_SECONDS:
            del self._catching_up_since[source]
        if source not in self._catching_up_since:
            self._told_at[source] = now
        self._note_answer(source)

    def _note_answer(self, source: Source) -> None:
        before = self.synced
        self._current_at[source] = self._clock.monotonic()
        if self.synced and not before:
            self.on_synced()
        if self._trouble.pop(source, ""):
            logger.info("watching %s: the API answers", source)
        self._answered.set()
        self._answered = asyncio.Event()

    def note_trouble(self, source: Source, sentence: str) -> None:
        """Note why a stream is not."""
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

    def trouble(self, sentence: str) -> None:
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
        self._watch.note_listed(self._source)

    def changed(self, item: NamedHost) -> None:
        self._taker.set_host(item.name, *item.amounts)

    def deleted(self, item: NamedHost) -> None:
        self._taker.drop_host(item.name)


class _Pods(_Base[ClusterState]):
    def listed(self, items: list[PodFacts]) -> None:
        before = set(self._taker.pods)
        self._taker.replace_pods(items)
        for uid in before - set(self._taker.pods):
            self._watch.on_pod_gone(uid)
        for item in items:
            self._note_if_settled(item)
        self._watch.note_listed(self._source)

    def changed(self, item: PodFacts) -> None:
        before = self._taker.pods.get(item.uid)
        self._taker.set_pod(item)
        if item.nominated_node and (before is None or before.nominated_node != item.nominated_node):
            self._watch.on_nominated(item)
        self._note_if_settled(item)

    def _note_if_settled(self, item: PodFacts) -> None:
        if item.holds or not item.active:
            self._watch.on_pod_gone(item.uid)

    def deleted(self, item: PodFacts) -> None:
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
