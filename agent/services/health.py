"""Tells people and pods what becomes of a GPU, remembers it, and brings the board what administrators ask.

What else follows a GPU's state looks at the board: ListAndWatch, placement and PreStart, the node's capacity and condition, the gpunodes
object.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from agent.core.health import GpuHealth, Transition
from agent.core.health_record import lasting_part
from agent.core.inventory import DeviceBoard, DeviceEvent
from agent.core.ledger import Ledger
from agent.core.metrics import models_of
from agent.errors import StorageError
from agent.ports import HealthStore, NodeEvent, PodEvent, Store
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from agent.services.telemetry import Telemetry
from proto import contract
from proto.gpunode import NO_CORDON, Cordon

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HealthReporter:
    """Hears of every change of state and of everything that GPUs report."""

    def __init__(
        self, node_name: str, *, watch: DriverWatch, book: GrantBook, pods: PodCache, events: EventRecorder, telemetry: Telemetry
    ) -> None:
        self._node_name = node_name
        self._watch = watch
        self._book = book
        self._pods = pods
        self._events = events
        self._telemetry = telemetry
        watch.on_transition = self.transition
        watch.on_event = self.reported

    def reported(self, event: DeviceEvent) -> None:
        """Count an XID."""
        if event.xid is not None:
            self._telemetry.xid(event.device_uuid, self._model(event.device_uuid), event.xid)

    def transition(self, transition: Transition) -> None:
        """Count a change of state, and tell of it where it decides whether new work goes to the GPU."""
        self._telemetry.health_transition(transition.device_uuid, self._model(transition.device_uuid), transition.after)
        if transition.before.usable == transition.after.usable:
            return
        uuid, back = transition.device_uuid, transition.after.usable
        if back:
            reason, what, cure = contract.EVENT_REASON_GPU_HEALTHY, f"is healthy again after: {transition.reason}", ""
        else:
            reason, what = contract.EVENT_REASON_GPU_UNHEALTHY, f"is {transition.after} and gets no new work: {transition.reason}"
            cure = ". The container goes on as far as the GPU lets it; delete the pod to have it placed on another GPU"
        node_uid = self._pods.node.uid if self._pods.node is not None else self._node_name
        self._events.record(NodeEvent(self._node_name, node_uid, reason, f"GPU {uuid} {what}", warning=not back))
        for namespace, pod, pod_uid, container in _holders(uuid, self._watch.board, self._book.ledger):
            message = f"GPU {uuid}, which container {container} uses, {what}{cure}"
            self._events.record(PodEvent(namespace, pod, pod_uid, container, reason, message, warning=not back))

    def _model(self, device_uuid: str) -> str:
        return models_of(self._watch.board).get(device_uuid, "")


def _holders(device_uuid: str, board: DeviceBoard, ledger: Ledger) -> list[tuple[str, str, str, str]]:
    """Return who was granted a share of the GPU, or an instance on it: namespace, pod, its UID, container."""
    entry = next((entry for entry in board.devices if entry.device.uuid == device_uuid), None)
    on_it = set(entry.grantable_uuids) if entry is not None else {device_uuid}
    return [
        (grant.namespace, grant.pod, grant.pod_uid, grant.container)
        for grant in ledger.grants.values()
        if any(share.device_uuid in on_it for share in grant.shares)
    ]


SAVE_AGAIN_SECONDS = 10.0
"""Until what could not be saved is saved once more."""


async def _is_saved(save: Callable[[T], None], value: T, what: str) -> bool:
    """Save a value; where that fails, say so."""
    try:
        await asyncio.to_thread(save, value)
    except StorageError as exc:
        logger.error("%s not saved: %s", what, exc)  # noqa: TRY400 - the sentence says it all
        return False
    return True


class HealthMemory:
    """Saves the GPUs' health when something happens to them, and brings it back at the start."""

    def __init__(self, watch: DriverWatch, store: HealthStore) -> None:
        self._watch = watch
        self._store = store
        self._saved: Mapping[str, GpuHealth] = {}

    def load(self) -> None:
        """Give the watch what was saved. What cannot be read is begun anew: the faults that stand are seen again at once."""
        try:
            table = self._store.load()
        except StorageError as exc:
            logger.warning("GPU health begins anew: %s", exc)
            return
        self._watch.remember(table)
        self._saved = lasting_part(table)

    async def run(self) -> None:
        """Save for ever."""
        seen = self._watch.changes.count
        while True:
            now = lasting_part(self._watch.health)
            if now != self._saved and await _is_saved(self._store.save, now, "GPU health"):
                self._saved = now
            seen = await self._watch.changes.after(seen, None if self._saved == now else SAVE_AGAIN_SECONDS)


class CordonKeeper:
    """Brings the cordons that administrators write into the gpunodes object to the board, and back after a restart."""

    def __init__(self, watch: DriverWatch, pods: PodCache, store: Store[Cordon], *, watched: bool = True) -> None:
        """Args: watched: whether the gpunodes object is; else nothing is cordoned."""
        self._watch = watch
        self._pods = pods
        self._store = store
        self._watched = watched
        self._saved = NO_CORDON
        self._followed = pods.gpu_node_changes.count

    def load(self) -> None:
        """Begin with what an earlier process of this agent knew. What cannot be read is known once the API tells it."""
        if not self._watched:
            return
        try:
            self._saved = self._store.load()
        except StorageError as exc:
            logger.warning("what was cordoned is not known until the API tells: %s", exc)
        self._watch.set_cordon(self._saved)

    def is_told(self) -> bool:
        """Whether new work may be judged by the cordon: the API told it, or fails to, and then the last known holds."""
        self.follow()
        return not self._watched or self._pods.gpu_node_known or bool(self._pods.gpu_node_trouble)

    async def run(self) -> None:
        """Follow for ever. A cordon that cannot be understood leaves the one before in force, and is reported."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._save())
            while True:
                seen = self._pods.gpu_node_changes.count
                self.follow()
                await self._pods.gpu_node_changes.after(seen)

    async def _save(self) -> None:
        """Save for ever, however long that takes: no cordon waits for it."""
        while True:
            seen = self._pods.gpu_node_changes.count
            self.follow()
            cordon = self._watch.cordon
            if cordon != self._saved and await _is_saved(self._store.save, cordon, "cordon"):
                self._saved = cordon
            await self._pods.gpu_node_changes.after(seen, None if cordon == self._saved else SAVE_AGAIN_SECONDS)

    def follow(self) -> None:
        """Take over what stands in the API now."""
        if self._pods.gpu_node_changes.count == self._followed:
            return
        self._followed = self._pods.gpu_node_changes.count
        gpu_node = self._pods.gpu_node
        if gpu_node is None:
            self._watch.set_cordon(NO_CORDON)
        elif gpu_node.cordon is not None:
            self._watch.set_cordon(gpu_node.cordon)
        else:
            logger.error("cordon of the gpunodes object ignored, the one before stays in force: %s", gpu_node.trouble)
