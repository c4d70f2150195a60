# SPDX-License-Identifier: Apache-2.0
"""Reports changes of GPU health as events, saves the health, and applies cordons.

Other readers of a GPU's state take it from ``DriverWatch``: ListAndWatch, placement and PreStart, the node's capacity and condition, the
gpunodes object.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from agent.core.health import GpuHealth, Transition
from agent.core.health_record import lasting_part
from agent.core.inventory import DeviceEvent, DeviceInventory
from agent.core.ledger import Ledger
from agent.core.metrics import models_of
from agent.errors import StorageError
from agent.ports.kube import NodeEvent, PodEvent
from agent.ports.node_files import HealthStore, Store
from agent.services.driver_watch import DriverWatch
from agent.services.pod_cache import PodCache
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from aliquot import contract
from aliquot.contract.gpunode import NO_CORDON, Cordon

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HealthReporter:
    """Reports every change of a GPU's state, and its XIDs."""

    def __init__(self, node_name: str, *, state: AgentState, reporting: Reporting) -> None:
        self._node_name = node_name
        self._watch = state.watch
        self._manager = state.manager
        self._pods = state.pods
        self._events = reporting.events
        self._telemetry = reporting.telemetry
        state.watch.on_transition = self.transition
        state.watch.on_event = self.reported

    def reported(self, event: DeviceEvent) -> None:
        """Count an XID."""
        if event.xid is not None:
            self._telemetry.xid(event.device_uuid, self._model(event.device_uuid), event.xid)

    def transition(self, transition: Transition) -> None:
        """Count a change of state. Record events when it decides whether the GPU gets new containers."""
        self._telemetry.health_transition(transition.device_uuid, self._model(transition.device_uuid), transition.after)
        if transition.before.usable == transition.after.usable:
            return
        uuid, back = transition.device_uuid, transition.after.usable
        if back:
            reason, what, cure = contract.EVENT_REASON_GPU_HEALTHY, f"is healthy again after: {transition.reason}", ""
        else:
            reason, what = contract.EVENT_REASON_GPU_UNHEALTHY, f"is {transition.after} and gets no new containers: {transition.reason}"
            cure = ". The container keeps running as long as the GPU works; delete the pod to get another GPU"
        node_uid = self._pods.node.uid if self._pods.node is not None else self._node_name
        self._events.record(NodeEvent(self._node_name, node_uid, reason, f"GPU {uuid} {what}", warning=not back))
        for namespace, pod, pod_uid, container in _holders(uuid, self._watch.inventory, self._manager.ledger):
            message = f"GPU {uuid}, which container {container} uses, {what}{cure}"
            self._events.record(PodEvent(namespace, pod, pod_uid, container, reason, message, warning=not back))

    def _model(self, device_uuid: str) -> str:
        return models_of(self._watch.inventory).get(device_uuid, "")


def _holders(device_uuid: str, inventory: DeviceInventory, ledger: Ledger) -> list[tuple[str, str, str, str]]:
    """Return the containers with a share of the GPU, or of an instance on it: namespace, pod, pod UID, container."""
    entry = next((entry for entry in inventory.devices if entry.device.uuid == device_uuid), None)
    on_it = set(entry.grantable_uuids) if entry is not None else {device_uuid}
    return [
        (grant.namespace, grant.pod, grant.pod_uid, grant.container)
        for grant in ledger.grants.values()
        if any(share.device_uuid in on_it for share in grant.shares)
    ]


SAVE_AGAIN_SECONDS = 10.0
"""Seconds until a failed save is retried."""


async def _is_saved(save: Callable[[T], None], value: T, what: str) -> bool:
    """Save a value; log a failure. Return whether it was saved."""
    try:
        await asyncio.to_thread(save, value)
    except StorageError as exc:
        logger.error("%s not saved: %s", what, exc)  # noqa: TRY400 - the sentence says it all
        return False
    return True


class HealthRecorder:
    """Saves the GPUs' health after each change, and restores it at the start."""

    def __init__(self, watch: DriverWatch, store: HealthStore) -> None:
        self._watch = watch
        self._store = store
        self._saved: Mapping[str, GpuHealth] = {}

    def load(self) -> None:
        """Restore the saved health. If it cannot be read, start without it: present faults are seen again at once."""
        try:
            table = self._store.load()
        except StorageError as exc:
            logger.warning("GPU health of the previous run is not known: %s", exc)
            return
        self._watch.remember(table)
        self._saved = lasting_part(table)

    async def run(self) -> None:
        """Save after each change, until cancelled."""
        seen = self._watch.changes.count
        while True:
            now = lasting_part(self._watch.health)
            if now != self._saved and await _is_saved(self._store.save, now, "GPU health"):
                self._saved = now
            seen = await self._watch.changes.after(seen, None if self._saved == now else SAVE_AGAIN_SECONDS)


class CordonController:
    """Applies the cordons that administrators write into the gpunodes object, and keeps them over a restart."""

    def __init__(self, watch: DriverWatch, pods: PodCache, store: Store[Cordon], *, watched: bool = True) -> None:
        """Args: watched: whether the gpunodes object is watched; without it, no GPU is cordoned."""
        self._watch = watch
        self._pods = pods
        self._store = store
        self._watched = watched
        self._saved = NO_CORDON
        self._followed = pods.gpu_node_changes.count

    def load(self) -> None:
        """Restore the cordon that an earlier process saved. If it cannot be read, wait for the API."""
        if not self._watched:
            return
        try:
            self._saved = self._store.load()
        except StorageError as exc:
            logger.warning("cordons are unknown until the API reports them: %s", exc)
        self._watch.set_cordon(self._saved)

    def is_known(self) -> bool:
        """Whether the cordon is known: from the API, or, while the API fails, from the last run."""
        self.follow()
        return not self._watched or self._pods.gpu_node_known or bool(self._pods.gpu_node_trouble)

    async def run(self) -> None:
        """Apply each change, until cancelled. An invalid cordon is logged and the previous one stays in force."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._save())
            while True:
                seen = self._pods.gpu_node_changes.count
                self.follow()
                await self._pods.gpu_node_changes.after(seen)

    async def _save(self) -> None:
        """Save after each change, until cancelled. Applying a cordon does not wait for this."""
        while True:
            seen = self._pods.gpu_node_changes.count
            self.follow()
            cordon = self._watch.cordon
            if cordon != self._saved and await _is_saved(self._store.save, cordon, "cordon"):
                self._saved = cordon
            await self._pods.gpu_node_changes.after(seen, None if cordon == self._saved else SAVE_AGAIN_SECONDS)

    def follow(self) -> None:
        """Apply the cordon that the API has now."""
        if self._pods.gpu_node_changes.count == self._followed:
            return
        self._followed = self._pods.gpu_node_changes.count
        gpu_node = self._pods.gpu_node
        if gpu_node is None:
            self._watch.set_cordon(NO_CORDON)
        elif gpu_node.cordon is not None:
            self._watch.set_cordon(gpu_node.cordon)
        else:
            logger.error("invalid cordon in the gpunodes object ignored, the previous one stays in force: %s", gpu_node.trouble)
