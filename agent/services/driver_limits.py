"""Sees to it that the driver limits the memory of containers with ``isolation: driver``, and tells where it does not.

NVIDIA's hook applies the limit before a container's first instruction; what it did is looked at here once the container runs, and put
right where the hook was left out of the runtime's configuration, or the driver was loaded anew and has forgotten.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Set

from agent.core.cgroups import ContainerRef
from agent.core.lasting import lasting
from agent.core.ledger import Grant
from agent.core.metrics import Family, family
from agent.errors import DriverError, DriverLeftError
from agent.ports import CgroupLimits, Cgroups, PodEvent
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from proto import contract
from proto.model import ContainerState, DeviceShare, Isolation

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often limits are looked at while there are containers that have them."""

_Labels = tuple[str, str, str, str]


class DriverLimitKeeper:
    """One look, and the loop of looks."""

    def __init__(
        self, node_name: str, limits: CgroupLimits, cgroups: Cgroups, *, book: GrantBook, pods: PodCache, events: EventRecorder
    ) -> None:
        self._node_name = node_name
        self._limits = limits
        self._cgroups = cgroups
        self._book = book
        self._pods = pods
        self._events = events
        self._directories: dict[ContainerRef, str] = {}
        self._troubles: Mapping[_Labels, str] = {}
        """Why the driver does not hold each limit, as of the last look; empty where it does. Replaced as a whole."""
        self.unlimited: Set[str] = frozenset()
        """Ids of the grants of running containers that the driver does not limit, as of the last look; replaced as a whole."""

    def families(self) -> Iterable[Family]:
        """Return whether each limit is in force, as of the last look; for any thread."""
        labels = ("node", "namespace", "pod", "container", "device_uuid")
        text = "1 while the driver has the container's memory limit, else 0; of containers that run."
        samples = [((self._node_name, *key), 0.0 if trouble else 1.0) for key, trouble in self._troubles.items()]
        yield family("container_driver_limit_in_force", text, labels, samples)

    async def run(self) -> None:
        """Look for ever: when pods change, and every few seconds while there are limits."""
        while True:
            seen = self._pods.pod_changes.count
            some = await self.look()
            await self._pods.pod_changes.after(seen, LOOK_SECONDS if some else None)

    async def look(self) -> bool:
        """Compare and put right; return whether there are containers to look after."""
        running = {ref: grant for grant in self._book.ledger.grants.values() if (ref := self._running(grant)) is not None}
        self._directories = {ref: found for ref, found in self._directories.items() if ref in running}
        troubles: dict[_Labels, str] = {}
        unlimited = set()
        for ref, grant in running.items():
            directory = await self._directory(ref)
            for share in grant.shares:
                labels = (grant.namespace, grant.pod, grant.container, share.device_uuid)
                try:
                    trouble = await self._hold(grant, share, directory)
                except DriverLeftError:  # the driver holds what it held
                    trouble = self._troubles.get(labels, "")
                troubles[labels] = trouble
                if trouble:
                    unlimited.add(grant.grant_id)
                    self._tell(grant, share, trouble, self._troubles.get(labels))
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
        """See to it that the driver holds a limit; say why it does not, or nothing when it does."""
        if directory is None:
            return "the container has no control group below cgroupDir: mount the node's there (the component driver-limits)"
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

    def _tell(self, grant: Grant, share: DeviceShare, trouble: str, before: str | None) -> None:
        if lasting(trouble) == lasting(before or ""):
            return
        logger.warning("driver limit not in force: %s", trouble, extra=_about(grant, share))
        message = f"container {grant.container}: the driver does not limit its memory on {share.device_uuid}: {trouble}"
        reason = contract.EVENT_REASON_DRIVER_LIMIT
        self._events.record(PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, reason, message, warning=True))


def _about(grant: Grant, share: DeviceShare) -> Mapping[str, str]:
    return {"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "device_uuid": share.device_uuid}
