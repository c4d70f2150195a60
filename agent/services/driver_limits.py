# SPDX-License-Identifier: Apache-2.0
"""Ensures that the driver limits the memory of containers with ``isolation: driver``, and reports when it does not.

NVIDIA's hook sets the limit before a container's first instruction. This loop checks it once the container runs, and sets it when the
runtime's configuration lacks the hook, or when the driver was reloaded and has lost its limits.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Set

from agent.core.cgroups import ContainerRef
from agent.core.ledger import Grant
from agent.core.metrics import Family, family
from agent.core.without_duration import without_duration
from agent.errors import DriverError, DriverLeftError
from agent.ports.driver import CgroupLimits, Cgroups
from agent.ports.kube import PodEvent
from agent.services.events import EventRecorder
from agent.services.grant_manager import GrantManager
from agent.services.pod_cache import PodCache
from aliquot import contract
from aliquot.contract.model import ContainerState, DeviceShare, Isolation

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two checks while containers with such limits run."""

_Labels = tuple[str, str, str, str]


class DriverLimitController:
    """One look, and the loop of looks."""

    def __init__(
        self, node_name: str, limits: CgroupLimits, cgroups: Cgroups, *, manager: GrantManager, pods: PodCache, events: EventRecorder
    ) -> None:
        self._node_name = node_name
        self._limits = limits
        self._cgroups = cgroups
        self._manager = manager
        self._pods = pods
        self._events = events
        self._directories: dict[ContainerRef, str] = {}
        self._troubles: Mapping[_Labels, str] = {}
        """Why each limit is not in force, as of the last look; empty when it is. Replaced as a whole."""
        self.unlimited: Set[str] = frozenset()
        """Ids of the grants of running containers that the driver does not limit, as of the last look; replaced as a whole."""

    def families(self) -> Iterable[Family]:
        """Return whether each limit is in force, as of the last look; for any thread."""
        labels = ("node", "namespace", "pod", "container", "device_uuid")
        text = "1 while the driver enforces the memory limit of the running container, else 0."
        samples = [((self._node_name, *key), 0.0 if trouble else 1.0) for key, trouble in self._troubles.items()]
        yield family("container_driver_limit_in_force", text, labels, samples)

    async def run(self) -> None:
        """Check until cancelled: when pods change, and every few seconds while limits exist."""
        while True:
            seen = self._pods.pod_changes.count
            some = await self.look()
            await self._pods.pod_changes.after(seen, LOOK_SECONDS if some else None)

    async def look(self) -> bool:
        """Check and correct all limits; return whether containers with limits run."""
        running = {ref: grant for grant in self._manager.ledger.grants.values() if (ref := self._running(grant)) is not None}
        self._directories = {ref: found for ref, found in self._directories.items() if ref in running}
        troubles: dict[_Labels, str] = {}
        unlimited = set()
        for ref, grant in running.items():
            directory = await self._directory(ref)
            for share in grant.shares:
                labels = (grant.namespace, grant.pod, grant.container, share.device_uuid)
                try:
                    trouble = await self._hold(grant, share, directory)
                except DriverLeftError:  # unknown while the driver is left: the last result stands
                    trouble = self._troubles.get(labels, "")
                troubles[labels] = trouble
                if trouble:
                    unlimited.add(grant.grant_id)
                    self._report(grant, share, trouble, self._troubles.get(labels))
        self._troubles, self.unlimited = troubles, frozenset(unlimited)
        return bool(running)

    def _running(self, grant: Grant) -> ContainerRef | None:
        pod = self._pods.by_uid.get(grant.pod_uid)
        if grant.backend is not Isolation.DRIVER or pod is None:
            return None
        status = next((one for one in pod.statuses if one.name == grant.container and one.state is ContainerState.RUNNING), None)
        return ContainerRef(grant.pod_uid, status.container_id) if status is not None and status.container_id else None

    async def _directory(self, ref: ContainerRef) -> str | None:
        if ref not in self._directories:
            found = await asyncio.to_thread(self._cgroups.of_container, ref)
            if found is None:
                return None
            self._directories[ref] = found
        return self._directories[ref]

    async def _hold(self, grant: Grant, share: DeviceShare, directory: str | None) -> str:
        """Set a limit unless the driver has it; return why it is not in force, empty when it is."""
        if directory is None:
            return "the container has no control group below cgroupDir: mount the node's cgroups there (component driver-limits)"
        try:
            found = await self._limits.limit_bytes(share.device_uuid, directory)
            if found != share.memory_bytes:
                await self._limits.set_limit(share.device_uuid, directory, share.memory_bytes)
                text = "driver limit: found %s, set to %d bytes"
                logger.warning(text, "none" if found is None else found, share.memory_bytes, extra=_about(grant, share))
        except DriverLeftError:
            raise
        except DriverError as exc:
            return str(exc)
        return ""

    def _report(self, grant: Grant, share: DeviceShare, trouble: str, before: str | None) -> None:
        if without_duration(trouble) == without_duration(before or ""):
            return
        logger.warning("driver limit not in force: %s", trouble, extra=_about(grant, share))
        message = f"container {grant.container}: the driver does not limit its memory on {share.device_uuid}: {trouble}"
        reason = contract.EVENT_REASON_DRIVER_LIMIT
        self._events.record(PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, reason, message, warning=True))


def _about(grant: Grant, share: DeviceShare) -> Mapping[str, str]:
    return {"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "device_uuid": share.device_uuid}
