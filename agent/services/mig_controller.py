# SPDX-License-Identifier: Apache-2.0
"""Creates MIG instances for containers that start, and removes them when their grants end.

Invariant: a record is on disk before its instance is created, and is removed after the instance. So every instance that a crash leaves has
a record. An instance at a place without a grant is removed, whether its grant was just released or an agent was killed: one code path
for both. ``core.mig`` decides which instances belong to the agent.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from agent.core.inventory import DeviceEvent, DriverReading, OverdueCall
from agent.core.ledger import Grant
from agent.core.mig import SHARED, MigRecord, hands_off_reason, is_promised, is_unclear, keep_out_reason, with_places
from agent.core.overhead import ProcessList
from agent.core.without_duration import without_duration
from agent.errors import DriverError, DriverLeftError, DriverMissingError, DriverTimeoutError, PartitionError, StorageError
from agent.ports.driver import Driver
from agent.ports.mig import MigPartitions, MigRecords
from agent.services.grant_manager import GrantManager
from aliquot.contract import codec
from aliquot.contract.codec import MigPlace
from aliquot.contract.model import Device, Link, MigInstance
from aliquot.placement.device import whole_instance

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Between two attempts to remove an instance that processes still use, or that mig-manager is working on."""


class MigController:
    """The instances that the agent created."""

    def __init__(
        self,
        partitions: MigPartitions,
        store: MigRecords,
        *,
        manager: GrantManager,
        labels: Callable[[], Mapping[str, str] | None],
        boot_id: str,
        offering: bool,
    ) -> None:
        """Make the controller.

        Args: labels: of the node; None while they are unknown.
              offering: whether new instances may be created. Existing ones are kept and removed in any case.
        """
        self._partitions = partitions
        self._store = store
        self._manager = manager
        self._labels = labels
        self._boot_id = boot_id
        self._offering = offering
        self._records: Mapping[str, MigRecord] = {}
        """Replaced as a whole, never changed: scrapes read it in other threads."""
        self._places: dict[str, Sequence[MigInstance]] = {}
        self._wholes: Mapping[str, MigPlace] = {}
        """Of each GPU in MIG mode, by its UUID: where the instance of its shares is made."""
        self._changing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._complaints: dict[str, str] = {}
        """By place, the last logged reason why its instance cannot be removed; each reason is logged once."""

    def load(self) -> None:
        """Read the records at the start, and drop those of earlier boots. Raises StorageError when they cannot be read."""
        found = self._store.load()
        self._records = {record.place: record for record in found if record.boot_id == self._boot_id}
        for record in found:
            if record.boot_id != self._boot_id:
                try:
                    self._store.remove(record.place)
                except StorageError as exc:  # the next start drops it
                    logger.warning("the record of an instance of an earlier boot stays: %s", exc, extra={"place": record.place})

    @property
    def records(self) -> Mapping[str, MigRecord]:
        """The instances that exist or are being created, by place; for any thread."""
        return self._records

    def keep_out_reason(self) -> str:
        """Return why no process may have this node's GPUs open now; empty when the agent may read them."""
        return keep_out_reason(self._labels())

    async def places_on(self, device_uuid: str) -> Sequence[MigInstance]:
        """Return the places for instances on a GPU: all, or only those with an instance when no new ones are offered."""
        if device_uuid not in self._places:
            self._places[device_uuid] = await self._partitions.places(device_uuid)
        return [place for place in self._places[device_uuid] if self._offering or place.uuid in self._records]

    def knows_wholes(self, devices: Iterable[Device]) -> None:
        """Take over which of the GPUs that answer are in MIG mode now. The others keep what they had: grants on them stay as well."""
        wholes = dict(self._wholes)
        for device in devices:
            wholes.pop(device.uuid, None)
            if (whole := whole_instance(device)) is not None:
                wholes[device.uuid] = MigPlace(device.uuid, whole.profile, whole.placement_start)
        self._wholes = wholes

    async def ensure(self, grant: Grant) -> Mapping[str, MigInstance]:
        """Return the instances of a grant by the names in its shares; create missing ones. Shares without one are not in the result.

        Raises: PartitionError with the obstacle, DriverError, StorageError.
        """
        made = {}
        for name in grant.device_names:
            if (place := codec.decode_place(name)) is not None:
                made[name] = await self._ensure_at(place, grant.grant_id)
            elif (whole := self._wholes.get(name)) is not None and grant.takes_part:
                made[name] = await self._ensure_at(whole, SHARED)
        return made

    async def run(self) -> None:
        """Remove instances without a grant, until cancelled: at the start, after each change of a grant, and as a retry."""
        while True:
            seen = self._manager.changes.count
            left = await self.clean()
            await self._manager.changes.paced_after(seen, RETRY_SECONDS if left else None)

    async def clean(self) -> bool:
        """Remove the instances at places without a grant; return whether some are left for later."""
        left = False
        for name, record in tuple(self._records.items()):  # another record may go while one instance is removed
            place = codec.decode_place(name)
            if place is None or is_promised(record, self._manager.ledger):
                continue
            if is_unclear(record, self._manager.ledger):  # its container may run
                left = True
                continue
            async with self._changing[place.device_uuid]:
                left |= not await self._try_remove(place)
        return left

    async def _try_remove(self, place: MigPlace) -> bool:
        record = self._records.get(str(place))
        if record is None or is_promised(record, self._manager.ledger):
            return True
        if trouble := hands_off_reason(self._labels()):
            self._complain(place, trouble)
            return False
        try:
            await self._remove(place)
        except (DriverError, StorageError) as exc:
            self._complain(place, str(exc))
            return False
        self._complaints.pop(str(place), None)
        logger.info("MIG instance removed", extra={"place": str(place)})
        return True

    def _complain(self, place: MigPlace, trouble: str) -> None:
        if self._complaints.get(str(place)) != without_duration(trouble):
            self._complaints[str(place)] = without_duration(trouble)
            logger.warning("MIG instance not removed yet: %s", trouble, extra={"place": str(place)})

    async def _ensure_at(self, place: MigPlace, grant_id: str) -> MigInstance:
        async with self._changing[place.device_uuid]:
            record, found = self._records.get(str(place)), await self._partitions.instance_at(place)
            if found is not None and found.uuid and record is not None and (record.grant_id, record.uuid) == (grant_id, found.uuid):
                return found
            if trouble := hands_off_reason(self._labels()):
                raise PartitionError(f"no MIG instance can be created at {place}: {trouble}")
            if found is not None and (record is None or not _may_be_ours(record, found)):
                other = found.uuid or f"GPU instance {found.gpu_instance_id}"
                raise PartitionError(
                    f"no MIG instance can be created at {place}: {other} is there, and this agent did not create it. "
                    "Remove it, or delete the pod so that it gets another place"
                )
            await self._make_room(place)
            return await self._make(place, grant_id)

    async def _make_room(self, place: MigPlace) -> None:
        """Remove the instance at the place, and overlapping instances of the agent that have no grant."""
        known = {one.uuid: one for one in await self.places_on(place.device_uuid)}
        wanted = known.get(str(place))
        for name, record in tuple(self._records.items()):
            unused = not is_promised(record, self._manager.ledger)
            over = unused and name in known and wanted is not None and known[name].overlaps(wanted)
            if (other := codec.decode_place(name)) is not None and (other == place or over):
                await self._remove(other)

    async def _make(self, place: MigPlace, grant_id: str) -> MigInstance:
        known = next((known for known in await self.places_on(place.device_uuid) if known.uuid == str(place)), None)
        if known is None:
            raise PartitionError(
                f"no MIG instance can be created at {place}: the GPU has no such place, or this node is not at migStrategy: dynamic"
            )
        geometry = (known.memory_bytes, known.placement_size, known.most_on_device)
        record = MigRecord(str(place), grant_id, self._boot_id, "", *geometry)
        await self._write(record)
        made = await self._partitions.create(place, known.placement_size)
        await self._write(
            replace(record, uuid=made.uuid, gpu_instance_id=made.gpu_instance_id, compute_instance_id=made.compute_instance_id)
        )
        logger.info("MIG instance created", extra={"place": str(place), "device_uuid": made.uuid, "grant": grant_id})
        return made

    async def _remove(self, place: MigPlace) -> None:
        """Remove an instance and its record. If another program created the instance, remove only the record."""
        record, found = self._records[str(place)], await self._partitions.instance_at(place)
        if found is not None and _may_be_ours(record, found):
            await self._partitions.destroy(place)
        await self._manager.on_disk(partial(self._store.remove, record.place))
        self._records = {place: kept for place, kept in self._records.items() if place != record.place}

    async def _write(self, record: MigRecord) -> None:
        await self._manager.on_disk(partial(self._store.write, record))
        self._records = {**self._records, record.place: record}


def _may_be_ours(record: MigRecord, found: MigInstance) -> bool:
    """Whether the instance at a record's place may be the one that the agent created.

    A record without a UUID: the agent was killed while it created the instance. A GPU instance without a UUID: its compute instance is
    gone, because a removal was interrupted.
    """
    return not found.uuid or record.uuid in ("", found.uuid)


class MigAwareDriver:
    """The driver, with all places for MIG instances; the agent's own instances appear as their places. Implements ``ports.Driver``.

    While mig-manager may reset GPUs, the driver is left and a read raises DriverLeftError: the GPUs are not lost, and their grants stay.
    """

    def __init__(self, driver: Driver, controller: MigController) -> None:
        self._driver = driver
        self._controller = controller
        self._left = ""
        """Why the driver was left; empty while it is in use."""

    async def _make_way(self) -> None:
        """Leave the driver while mig-manager needs exclusive access, and enter it afterwards. Raises DriverLeftError meanwhile."""
        reason, before = self._controller.keep_out_reason(), self._left
        self._left = reason
        if bool(reason) != bool(before):
            logger.info("driver %s", f"left: {reason}" if reason else "entered again: mig-manager is done")
        try:
            await self._driver.keep_out(reason)
        except DriverError as exc:
            raise DriverLeftError(f"{reason}; leaving the driver: {exc}") from exc
        if reason:
            raise DriverLeftError(reason)

    async def read(self) -> DriverReading:
        """See ``ports.Driver``."""
        await self._make_way()
        before = self._controller.records
        reading = await self._driver.read()
        partitioned = [entry.device.uuid for entry in reading.devices if entry.device.mig_enabled]
        places = {uuid: found for uuid in partitioned if (found := await self._places_on(uuid)) is not None}
        # an instance that was removed or created since the read is the agent's as well
        shown = with_places(reading, places, {**before, **self._controller.records})
        self._controller.knows_wholes(entry.device for entry in shown.devices)
        return shown

    async def _places_on(self, device_uuid: str) -> Sequence[MigInstance] | None:
        """Return the places on a GPU; None when they cannot be read. Existing instances can be used in any case."""
        try:
            return await self._controller.places_on(device_uuid)
        except (DriverTimeoutError, DriverMissingError):
            raise
        except DriverError as exc:
            logger.warning("no MIG instances can be created: %s", exc, extra={"device_uuid": device_uuid})
            return None

    async def events(self) -> Sequence[DeviceEvent]:
        """See ``ports.Driver``."""
        found = await self._driver.events()  # first, because they belong to the session that may be left now
        try:
            await self._make_way()
        except DriverLeftError:  # the next read reports it
            if not found:
                raise
        return found

    async def links(self) -> Sequence[Link]:
        """See ``ports.Driver``."""
        return await self._driver.links()

    async def processes(self) -> ProcessList:
        """See ``ports.Driver``."""
        return await self._driver.processes()

    async def busy(self, device_uuids: Set[str], lookback_seconds: float) -> Mapping[str, Mapping[int, float]]:
        """See ``ports.Driver``."""
        return await self._driver.busy(device_uuids, lookback_seconds)

    async def restart(self) -> None:
        """See ``ports.Driver``."""
        await self._driver.restart()

    async def keep_out(self, reason: str) -> None:
        """See ``ports.Driver``."""
        await self._driver.keep_out(reason)

    async def found_in_new_session(self) -> Set[str]:
        """See ``ports.Driver``."""
        return await self._driver.found_in_new_session()

    def overdue(self) -> Sequence[OverdueCall]:
        """See ``ports.Driver``."""
        return self._driver.overdue()
