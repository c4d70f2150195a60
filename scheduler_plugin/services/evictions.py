# SPDX-License-Identifier: Apache-2.0
"""Evicts the victims of a preemption. If a dry run shows that one of them cannot be evicted, no victim is."""

import logging
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Final

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.ports import EventApi, EvictionApi
from scheduler_plugin.services.telemetry import Telemetry

logger = logging.getLogger(__name__)

REFUSED_SECONDS: Final = 60.0
"""How long a pod is spared after the API server refused its eviction, so that other pods are tried instead."""


class _Outcome(Enum):
    """The result of an eviction."""

    ENDS = auto()
    GONE = auto()
    """The pod ended by itself."""
    REFUSED = auto()
    """A disruption budget or another rule refused, or the outcome is open."""


class Evictions:
    """Evicts pods, and remembers which ones the API server refused to evict."""

    def __init__(
        self, api: EvictionApi, events: EventApi, context: ExtenderContext, telemetry: Telemetry, on_granted: Callable[[PodFacts], None]
    ) -> None:
        """Args: on_granted: called with each pod that ends from now on."""
        self._on_granted = on_granted
        self._api = api
        self._events = events
        self._clock = context.clock
        self._idle = context.idle
        self._telemetry = telemetry
        self._refused: dict[str, float] = {}
        """By UID, until when the pod is spared."""

    @property
    def refused(self) -> Collection[str]:
        """UIDs of pods to spare for now."""
        return self._refused

    def expire(self) -> None:
        """Forget refusals that are older than REFUSED_SECONDS."""
        now = self._clock.monotonic()
        self._refused = {uid: until for uid, until in self._refused.items() if until > now}

    async def evict_all(self, victims: list[PodFacts], pod: PodFacts) -> bool:
        """Evict pods, one after the other, once dry runs of all succeeded. Returns: whether all of them end."""
        if len(victims) > 1:  # to end only some of them does not help
            for victim in victims:
                if await self._evict(victim, pod, dry_run=True) is _Outcome.REFUSED:
                    return False
        for victim in victims:
            outcome = await self._evict(victim, pod)
            if outcome is _Outcome.REFUSED:
                return False
            if outcome is _Outcome.ENDS:
                self._on_granted(victim)
                await self._report(victim, pod)
        return True

    async def _evict(self, victim: PodFacts, pod: PodFacts, *, dry_run: bool = False) -> _Outcome:
        try:
            await self._api.evict(victim.namespace, victim.name, victim.uid, dry_run=dry_run)
        except (KubeNotFoundError, KubeConflictError):
            return _Outcome.GONE
        except KubeApiError as exc:
            about = {"pod": f"{pod.namespace}/{pod.name}"}
            logger.warning("%s/%s cannot be evicted for a more important pod: %s", victim.namespace, victim.name, exc, extra=about)
            self._refused[victim.uid] = self._clock.monotonic() + REFUSED_SECONDS
            return _Outcome.REFUSED
        return _Outcome.ENDS

    async def _report(self, victim: PodFacts, pod: PodFacts) -> None:
        """Count an eviction, log it, and write an event of the victim."""
        node = victim.node_name
        name, important = f"{victim.namespace}/{victim.name}", f"{pod.namespace}/{pod.name}"
        self._telemetry.preempted.inc()
        logger.info("evicted %s on node %s for a more important pod", name, node, extra={"pod": important})
        why = f"it did not use its GPU, and pod {important} needs it" if victim.uid in self._idle else ""
        sentence = f"evicted on node {node}: {why or f'pod {important} has a higher priority and needs its GPU'}"
        try:
            await self._events.post_event(victim.namespace, victim.name, victim.uid, contract.EVENT_REASON_PREEMPTED, sentence)
        except KubeApiError as exc:
            logger.warning("an event cannot be written: %s", exc, extra={"pod": name})
