"""Publishes the node's GPU memory and cores as extended resources, and publishes them again when something else overwrites them.

Kubelet counts device IDs only; MiB and percent are the node's status, which the scheduler and quotas count with. A kubelet that lost
its checkpoint sets extended resources it does not know to zero; the watch on the node shows it, and it is put right within a second.
"""

import asyncio
import logging
from collections.abc import Mapping

from agent.core.inventory import DeviceBoard, node_capacity
from agent.errors import KubeApiError
from agent.ports import KubeApi
from agent.services.changes import Changes
from agent.services.driver_watch import DriverWatch
from agent.services.pod_cache import PodCache

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.3
"""Between two patches: the least that gives our own change time to come back by the watch."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 30.0


class CapacityPublisher:
    """Keeps the node's capacity equal to the board."""

    def __init__(self, node_name: str, api: KubeApi, watch: DriverWatch, pods: PodCache) -> None:
        self._node_name = node_name
        self._api = api
        self._watch = watch
        self._pods = pods
        self._wake = Changes()

    async def run(self) -> None:
        """Publish for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forward(self._watch.changes))
            group.create_task(self._forward(self._pods.node_changes))
            group.create_task(self._publish())

    async def _forward(self, changes: Changes) -> None:
        seen = changes.count
        while True:
            seen = await changes.after(seen)
            self._wake.notify()

    async def _publish(self) -> None:
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            seen = self._wake.count
            missing = self._missing(self._watch.board)
            if not missing:
                await self._wake.after(seen)
                continue
            try:
                await asyncio.to_thread(self._api.publish_capacity, self._node_name, missing)
            except KubeApiError as exc:
                logger.warning("node capacity not published: %s", exc, extra={"node": self._node_name})
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, LAST_RETRY_SECONDS)
            else:
                logger.info("node capacity published", extra={"node": self._node_name, "capacity": dict(missing)})
                retry_seconds = FIRST_RETRY_SECONDS
                await self._wake.after(seen, PAUSE_SECONDS)
                await asyncio.sleep(PAUSE_SECONDS)

    def _missing(self, board: DeviceBoard) -> Mapping[str, int]:
        """Return what the node's status must be changed to; nothing before both the node and its GPUs are known."""
        if self._pods.node is None or not board.devices:
            return {}
        capacity = self._pods.node.capacity
        return {name: value for name, value in node_capacity(board).items() if capacity.get(name) not in _spellings(value)}


def _spellings(value: int) -> tuple[str, ...]:
    """Return the forms in which the API may give a number back: it shortens thousands (``16000`` becomes ``16k``)."""
    forms = [str(value)]
    for exponent, suffix in ((3, "k"), (6, "M"), (9, "G")):
        if value and value % 10**exponent == 0:
            forms.append(f"{value // 10**exponent}{suffix}")
    return tuple(forms)
