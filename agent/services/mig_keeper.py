"""Makes MIG instances for containers that start, and removes them when their grants are over.

Kept true: a record is on disk before its instance is made, and goes after the instance is gone; so whatever a crash leaves has a record.
An instance whose place no grant holds is removed, whether it was released a moment ago or left by an agent that was killed: there is one
way for both. Deciding which instances are ours is in ``core.mig``.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from agent.core.inventory import DeviceEvent, DriverReading, OverdueCall
from agent.core.lasting import lasting
from agent.core.ledger import Grant
from agent.core.mig import MigRecord, hands_off_reason, keep_out_reason, promised_places, with_places
from agent.core.overhead import ProcessList
from agent.errors import DriverError, DriverLeftError, DriverMissingError, DriverTimeoutError, PartitionError, StorageError
from agent.ports import Driver, MigPartitions, MigRecords
from agent.services.grant_book import GrantBook
from proto import codec
from proto.codec import MigPlace
from proto.model import Link, MigInstance

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Between two tries to remove what processes still used, or what mig-manager had its hands on."""


class MigKeeper:
    """The instances that the agent made."""

    def __init__(
        self,
        partitions: MigPartitions,
        store: MigRecords,
        *,
        book: GrantBook,
        labels: Callable[[], Mapping[str, str] | None],
        boot_id: str,
        offering: bool,
    ) -> None:
        """Make the keeper.

        Args: labels: the node's; None while they are not known.
              offering: whether new instances may be made; those that are there are kept and removed in any case.
        """
        self._partitions = partitions
        self._store = store
        self._book = book
        self._labels = labels
        self._boot_id = boot_id
        self._offering = offering
        self._records: Mapping[str, MigRecord] = {}
        """Replaced and never changed, because scrapes read it in threads of their own."""
        self._places: dict[str, Sequence[MigInstance]] = {}
        self._changing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._complaints: dict[str, str] = {}
        """What was last said of a place whose instance cannot be removed; it is said once."""

    def load(self) -> None:
        """Read the records at the start, and drop those of earlier boots. Raises StorageError where they cannot be read."""
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
        """The instances that were made or are being made, by place; for any thread."""
        return self._records

    def keep_out_reason(self) -> str:
        """Say why nobody may have this node's GPUs open now; empty when they may be looked at."""
        return keep_out_reason(self._labels())

    async def places_on(self, device_uuid: str) -> Sequence[MigInstance]:
        """Return where instances may be made on a GPU: everywhere, or where they still are when no new ones are offered."""
        if device_uuid not in self._places:
            self._places[device_uuid] = await self._partitions.places(device_uuid)
        return [place for place in self._places[device_uuid] if self._offering or place.uuid in self._records]

    async def ensure(self, grant: Grant) -> Mapping[str, MigInstance]:
        """Return the instances at the places of a grant, by place, made unless they are there; other shares name instances by themselves.

        Raises: PartitionError with what stands in the way, DriverError, StorageError.
        """
        places = [place for share in grant.shares if (place := codec.decode_place(share.device_uuid)) is not None]
        return {str(place): await self._ensure_at(place, grant.grant_id) for place in places}

    async def run(self) -> None:
        """Remove for ever what no grant holds any more: at the start, whenever a grant changes, and again while something is left."""
        while True:
            seen = self._book.changes.count
            left = await self.clean()
            await self._book.changes.after(seen, RETRY_SECONDS if left else None)

    async def clean(self) -> bool:
        """Remove the instances whose places no grant holds; return whether some are left for later."""
        left = False
        for place in map(codec.decode_place, tuple(self._records)):
            if place is None or str(place) in promised_places(self._book.ledger):
                continue
            async with self._changing[place.device_uuid]:
                left |= not await self._try_remove(place)
        return left

    async def _try_remove(self, place: MigPlace) -> bool:
        if str(place) in promised_places(self._book.ledger) or str(place) not in self._records:
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
        if self._complaints.get(str(place)) != lasting(trouble):
            self._complaints[str(place)] = lasting(trouble)
            logger.warning("MIG instance not removed yet: %s", trouble, extra={"place": str(place)})

    async def _ensure_at(self, place: MigPlace, grant_id: str) -> MigInstance:
        async with self._changing[place.device_uuid]:
            record, found = self._records.get(str(place)), await self._partitions.instance_at(place)
            if found is not None and found.uuid and record is not None and (record.grant_id, record.uuid) == (grant_id, found.uuid):
                return found
            if trouble := hands_off_reason(self._labels()):
                raise PartitionError(f"no MIG instance can be made at {place}: {trouble}")
            if found is not None and (record is None or not _may_be_ours(record, found)):
                other = found.uuid or f"GPU instance {found.gpu_instance_id}"
                raise PartitionError(
                    f"no MIG instance can be made at {place}: {other} is there, and this agent did not make it. "
                    "Remove it, or delete the pod so that it is placed anew"
                )
            await self._make_room(place)
            return await self._make(place, grant_id)

    async def _make_room(self, place: MigPlace) -> None:
        """Remove what is at the place, and instances of ours in its way that no grant holds and that were not removed yet."""
        promised = promised_places(self._book.ledger)
        known = {one.uuid: one for one in await self.places_on(place.device_uuid)}
        wanted = known.get(str(place))
        for name in tuple(self._records):
            over = name not in promised and name in known and wanted is not None and known[name].overlaps(wanted)
            if (other := codec.decode_place(name)) is not None and (other == place or over):
                await self._remove(other)

    async def _make(self, place: MigPlace, grant_id: str) -> MigInstance:
        known = next((known for known in await self.places_on(place.device_uuid) if known.uuid == str(place)), None)
        if known is None:
            raise PartitionError(f"no MIG instance can be made at {place}: the GPU has no such place, or migDynamic is off on this node")
        geometry = (known.memory_bytes, known.placement_size, known.most_on_device)
        record = MigRecord(str(place), grant_id, self._boot_id, "", *geometry)
        await self._write(record)
        made = await self._partitions.create(place, known.placement_size)
        await self._write(
            replace(record, uuid=made.uuid, gpu_instance_id=made.gpu_instance_id, compute_instance_id=made.compute_instance_id)
        )
        logger.info("MIG instance made", extra={"place": str(place), "device_uuid": made.uuid, "grant": grant_id})
        return made

    async def _remove(self, place: MigPlace) -> None:
        """Remove an instance and its record; one that is not ours any more loses the record only."""
        record, found = self._records[str(place)], await self._partitions.instance_at(place)
        if found is not None and _may_be_ours(record, found):
            await self._partitions.destroy(place)
        await self._book.on_disk(partial(self._store.remove, record.place))
        self._records = {place: kept for place, kept in self._records.items() if place != record.place}

    async def _write(self, record: MigRecord) -> None:
        await self._book.on_disk(partial(self._store.write, record))
        self._records = {**self._records, record.place: record}


def _may_be_ours(record: MigRecord, found: MigInstance) -> bool:
    """Whether what stands at a record's place is what the agent made there.

    A record without a UUID is of an agent that was killed while it made the instance; a GPU instance without one has lost its compute
    instance, as a removal leaves it that came half way.
    """
    return not found.uuid or record.uuid in ("", found.uuid)


class MigAwareDriver:
    """The driver, with instances of ours shown as the places they lie at, beside all other places for one. Implements ``ports.Driver``.

    While mig-manager may reset GPUs it is left, and a look raises DriverLeftError: the GPUs are not lost, and what is promised of them
    stays promised.
    """

    def __init__(self, driver: Driver, keeper: MigKeeper) -> None:
        self._driver = driver
        self._keeper = keeper
        self._left = ""
        """Why the driver was left; empty while it is used."""

    async def _make_way(self) -> None:
        """Leave the driver while mig-manager needs its GPUs to itself, and come back after. Raises DriverLeftError meanwhile."""
        reason, before = self._keeper.keep_out_reason(), self._left
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
        before = self._keeper.records
        reading = await self._driver.read()
        partitioned = [entry.device.uuid for entry in reading.devices if entry.device.mig_enabled]
        places = {uuid: found for uuid in partitioned if (found := await self._places_on(uuid)) is not None}
        # one that was removed since the look, or was made since, is ours as well
        return with_places(reading, places, {**before, **self._keeper.records})

    async def _places_on(self, device_uuid: str) -> Sequence[MigInstance] | None:
        """Return the places on a GPU; None when they cannot be told, and the instances that are there can be used all the same."""
        try:
            return await self._keeper.places_on(device_uuid)
        except (DriverTimeoutError, DriverMissingError):
            raise
        except DriverError as exc:
            logger.warning("no MIG instances can be made: %s", exc, extra={"device_uuid": device_uuid})
            return None

    async def events(self) -> Sequence[DeviceEvent]:
        """See ``ports.Driver``."""
        found = await self._driver.events()  # first: they are those of the session that may be left now
        try:
            await self._make_way()
        except DriverLeftError:  # the next look says it
            if not found:
                raise
        return found

    async def links(self) -> Sequence[Link]:
        """See ``ports.Driver``."""
        return await self._driver.links()

    async def processes(self) -> ProcessList:
        """See ``ports.Driver``."""
        return await self._driver.processes()

    async def restart(self) -> None:
        """See ``ports.Driver``."""
        await self._driver.restart()

    async def keep_out(self, reason: str) -> None:
        """See ``ports.Driver``."""
        await self._driver.keep_out(reason)

    async def found_anew(self) -> Set[str]:
        """See ``ports.Driver``."""
        return await self._driver.found_anew()

    def overdue(self) -> Sequence[OverdueCall]:
        """See ``ports.Driver``."""
        return self._driver.overdue()
