# SPDX-License-Identifier: Apache-2.0
"""What the moves of pods change through the API server: evictions, the annotation of the pod that waits, and events.

An error of the API is logged here; the result says whether a change was made.
"""

import logging
from enum import Enum, auto

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError, KubeRefusedError
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.seats import Seat
from scheduler_plugin.ports import EventApi, PodApi

logger = logging.getLogger(__name__)


class Written(Enum):
    """The result of a write."""

    TAKEN = auto()
    REFUSED = auto()
    """Nothing changed, and the same write would be refused again."""
    OPEN = auto()


class MoveApi:
    """The API server, as moves need it."""

    def __init__(self, pods: PodApi, events: EventApi) -> None:
        self._pods = pods
        self._events = events

    async def evict(self, pod: PodFacts, *, dry_run: bool = False) -> bool:
        """Evict a pod; return whether it ends, or is gone already."""
        try:
            await self._pods.evict(pod.namespace, pod.name, pod.uid, dry_run=dry_run)
        except (KubeNotFoundError, KubeConflictError):
            return True
        except KubeApiError as exc:
            logger.info("%s/%s cannot be evicted now: %s", pod.namespace, pod.name, exc)
            return False
        return True

    async def write_down(self, pod: PodFacts, text: str) -> Written:
        """Write the annotation of a waiting pod."""
        try:
            await self._pods.annotate(pod.namespace, pod.name, pod.uid, {contract.ANNOTATION_CONSOLIDATION: text})
        except KubeApiError as exc:
            logger.warning("the moves for a pod cannot be written down: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}"})
            return Written.REFUSED if isinstance(exc, KubeRefusedError) else Written.OPEN
        return Written.TAKEN

    async def report_move(self, seat: Seat, waiting: PodFacts, node: str) -> None:
        """Log that a pod was evicted, and write an event of it. Args: waiting, node: the pod that needs the room, and where."""
        name = f"{waiting.namespace}/{waiting.name}"
        logger.info("evicted %s/%s on node %s", seat.pod.namespace, seat.pod.name, seat.pod.node_name, extra={"pod": name})
        sentence = f"evicted for pod {name}, which needs room on node {node}: a replacement has a seat on node {seat.node}"
        await self._post(seat.pod, contract.EVENT_REASON_MOVED, sentence)

    async def report(self, pod: PodFacts, sentence: str) -> None:
        """Write an event of the waiting pod."""
        await self._post(pod, contract.EVENT_REASON_CONSOLIDATION, sentence)

    async def _post(self, pod: PodFacts, reason: str, sentence: str) -> None:
        try:
            await self._events.post_event(pod.namespace, pod.name, pod.uid, reason, sentence)
        except KubeApiError as exc:
            logger.warning("an event cannot be written: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}"})
