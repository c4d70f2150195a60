# SPDX-License-Identifier: Apache-2.0
"""Reads the driver at a fixed period and keeps the agent's view of the GPUs current.

The loop waits for a missing driver, marks GPUs with a hung call, and probes a lost GPU until it answers again. It takes XIDs every second,
also while a read waits for a GPU that hangs; an XID starts the next read at once. ``core.health`` decides what all this means for a GPU.
When a call that concerns the whole driver hangs, another process tries it from time to time. Each change is logged once.

Invariant: one silent GPU does not end a session in which others answer, unless a new session was seen to find these and more.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from agent.core.health import Answer, HealthRules, HealthTable, Silence, Transition, XidClass, classify
from agent.core.health_record import lasting_part
from agent.core.inventory import DeviceEvent, DeviceInventory, DriverReading, OverdueCall, probes_of, unnamed_instances
from agent.core.metrics import Family, family
from agent.core.without_duration import without_duration
from agent.errors import DriverError, DriverLeftError, DriverMissingError, DriverTimeoutError
from agent.ports.driver import Driver
from agent.services.changes import Changes
from aliquot.contract.gpunode import NO_CORDON, Cordon

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 5.0
"""Bounds how long a driver that has just been installed goes unnoticed."""
FIRST_SEARCH_POLLS = 6
"""Reads with a silent GPU before the first search in a new session. After a reset, only a new session sees the GPU."""
LAST_SEARCH_POLLS = 120
"""Each further search comes after twice as many reads, up to this: ten minutes by default."""
ENTERING_SECONDS = 60.0
"""How long entering the driver again may take before GPUs that answered until then count as silent."""
EVENTS_SECONDS = 1.0
"""Between two reads of GPU events; bounds how long an XID goes unnoticed."""


def _ignore(_: object) -> None:
    """Do nothing."""


class DriverWatch:
    """The GPUs as last read, and the loop that reads them."""

    def __init__(
        self, driver: Driver, poll_seconds: float, rules: HealthRules | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._driver = driver
        self._poll_seconds = poll_seconds
        self._rules = rules or HealthRules()
        self._monotonic = monotonic
        self._trouble = "the driver has not been read yet"
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._silent_polls = 0
        self._search_polls = FIRST_SEARCH_POLLS
        self._search: asyncio.Future[Set[str]] | None = None
        self._entering_since: float | None = None
        """When the driver was left to enter it again; None once it answers."""
        self._linked: frozenset[str] = frozenset()
        self._links_trouble = ""
        self._seen = DeviceInventory()
        """As last read, without health and cordons."""
        self._health = HealthTable()
        self._cordon = NO_CORDON
        self.on_transition: Callable[[Transition], None] = _ignore
        """Called for every change of a GPU's state."""
        self.on_event: Callable[[DeviceEvent], None] = _ignore
        """Called for every event that a GPU reports."""
        self.failure: DriverError | None = None
        """Why the last read failed; None when it succeeded, while the driver is left, and before the first read."""
        self.locked_out = ""
        """Why this process cannot reach GPUs that answer another process; empty when no such GPU is known."""
        self.answered = False
        """Whether the driver answered at least once."""
        self.looked = False
        """Whether the driver was read at least once, with or without success."""
        self.inventory = DeviceInventory()
        self.changes = Changes()

    @property
    def trouble(self) -> str:
        """Why the driver as a whole does not work; empty while it does."""
        return self._trouble

    @property
    def trouble_without_duration(self) -> str:
        """The same without the duration of a hung call, for comparison with earlier messages."""
        return without_duration(self._trouble)

    @property
    def cordon(self) -> Cordon:
        """What an administrator has closed to new containers."""
        return self._cordon

    @property
    def health(self) -> HealthTable:
        """The health of all GPUs."""
        return self._health

    def overdue(self) -> Sequence[OverdueCall]:
        """Return the calls into the driver that have not returned in time; for any thread."""
        return self._driver.overdue()

    def families(self) -> Iterable[Family]:
        """Return the age of each of these calls, the longest where two threads wait in the same call; for any thread."""
        seconds: dict[tuple[str, ...], float] = {}
        for call in self.overdue():
            key = call.name, call.device_uuid or ""
            seconds[key] = max(call.seconds, seconds.get(key, 0.0))
        text = "Age of the driver call that has exceeded nvmlTimeoutSeconds; an empty device_uuid means a call not tied to one GPU."
        yield family("nvml_call_overdue_seconds", text, ("call", "device_uuid"), list(seconds.items()))

    def remember(self, health: HealthTable) -> None:
        """Start with the health that an earlier process of this agent saved. Call it before the first read."""
        self._health = health

    def set_cordon(self, cordon: Cordon) -> None:
        """Close exactly these GPUs, or the node, to new containers."""
        if cordon != self._cordon:
            logger.info("cordon changed", extra={"whole_node": cordon.node, "device_uuids": list(cordon.devices)})
            self._cordon = cordon
            self._show(self._seen, self._health)

    async def run(self) -> None:
        """Read for ever."""
        while True:
            await self.poll()
            if self._trouble:
                await self._listen(min(self._retry_seconds, self._poll_seconds))
                self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            else:
                self._retry_seconds = FIRST_RETRY_SECONDS
                await self._listen(self._poll_seconds)

    async def poll(self) -> None:
        """Read once and apply the result."""
        try:
            reading = await self._read()
        except DriverLeftError as exc:  # the driver is left on purpose: no new facts; entering it again may take long
            self.failure = None
            self._entering_since = self._monotonic()
            if not self._seen.devices:
                self._note(str(exc))
        except DriverError as exc:
            self.failure = exc
            self._take_failure(exc)
            if isinstance(exc, DriverTimeoutError):
                await self._search_if_due(frozenset(), missed=True)
        else:
            self.failure, self.answered = None, True
            self._entering_since = None
            self._note("")
            probes = probes_of(self._seen, reading)
            self._take(self._seen.after_reading(reading), self._health.after_probes(probes, self._monotonic(), self._rules))
            await self._look_closer(probes)
        if not self.looked:
            self.looked = True
            self.changes.notify()

    async def _read(self) -> DriverReading:
        """Read the GPUs, and take their events meanwhile: the read may wait for a hung GPU while others report errors."""
        reading = asyncio.ensure_future(self._driver.read())
        try:
            while not (await asyncio.wait([reading], timeout=EVENTS_SECONDS))[0]:
                try:
                    events = await self._driver.events()
                except DriverError as exc:
                    logger.debug("events while the driver is read: %s", exc)  # the read fails with the same error and handles it
                    continue
                if events:
                    self.take_events(events)
            return reading.result()
        finally:
            reading.cancel()

    async def _listen(self, seconds: float) -> None:
        """Wait for the next poll, or until a GPU reports an event."""
        next_poll = self._monotonic() + seconds
        while (left := next_poll - self._monotonic()) > 0:
            await asyncio.sleep(min(EVENTS_SECONDS, left))
            try:
                events = await self._driver.events()
            except DriverError:
                if not self._trouble:  # the next poll fails with the same error and handles it
                    return
                continue
            if events:
                self.take_events(events)
                return

    def take_events(self, events: Sequence[DeviceEvent]) -> None:
        """Apply events that GPUs reported."""
        for event in events:
            self.on_event(event)
        xids = [(event.device_uuid, event.xid) for event in events if event.xid is not None]
        for uuid in dict.fromkeys(uuid for uuid, _ in xids):
            numbers = sorted({xid for of, xid in xids if of == uuid})
            harmless = all(classify(xid, self._rules) is XidClass.APPLICATION for xid in numbers)
            logger.log(logging.INFO if harmless else logging.WARNING, "XIDs reported", extra={"device_uuid": uuid, "xids": numbers})
        self._take(self._seen, self._health.after_xids(xids, self._monotonic(), self._rules))

    def _take_failure(self, exc: DriverError) -> None:
        """Apply a failed read of the driver."""
        hung = exc.device_uuid if isinstance(exc, DriverTimeoutError) else None
        if isinstance(exc, DriverMissingError):
            self._take_silence(self._known(), str(exc), f"no usable NVIDIA driver: {exc}")
        elif hung is not None:
            self._take_silence([hung], str(exc), str(exc))
        elif self._entering_since is None or self._monotonic() - self._entering_since > ENTERING_SECONDS:
            self._take_silence(self._known(), str(exc), str(exc))

    def _known(self) -> list[str]:
        return [entry.device.uuid for entry in self._seen.devices]

    def _note(self, trouble: str) -> None:
        """Remember the error of the driver as a whole, and log a change."""
        before, self._trouble = self._trouble, trouble
        if without_duration(trouble) != without_duration(before):
            logger.log(logging.WARNING if trouble else logging.INFO, "driver: %s", trouble or "it works")
            self.changes.notify()

    def _take_silence(self, uuids: Sequence[str], trouble: str, driver_trouble: str) -> None:
        """Apply that these GPUs did not answer."""
        self._note(driver_trouble)
        silence = Silence(without_duration(trouble))
        seen = self._seen
        for uuid in uuids:
            seen = seen.after_device_trouble(uuid, silence.trouble)
        self._take(seen, self._health.after_probes(dict.fromkeys(uuids, silence), self._monotonic(), self._rules))

    def _take(self, seen: DeviceInventory, health: HealthTable) -> None:
        known = {entry.device.uuid for entry in self._seen.devices}
        for entry in seen.devices:
            if entry.device.uuid not in known:
                logger.info("device found", extra={"device_uuid": entry.device.uuid, "model": entry.device.model})
        for trouble in set(seen.unidentified) - set(self._seen.unidentified):
            logger.warning("a device cannot be used: %s", trouble)
        for instance in set(unnamed_instances(seen)) - set(unnamed_instances(self._seen)):
            logger.warning("MIG instance not offered: unknown profile %r", instance.profile, extra={"device_uuid": instance.uuid})
        transitions = self._health.transitions_to(health)
        self._show(seen, health)
        for transition in transitions:
            level = logging.WARNING if transition.before.usable and not transition.after.usable else logging.INFO
            text = f"device is {transition.after}, was {transition.before}: {transition.reason}"
            logger.log(level, text, extra={"device_uuid": transition.device_uuid})
            self.on_transition(transition)

    def _show(self, seen: DeviceInventory, health: HealthTable) -> None:
        """Publish the new view to all readers."""
        was, before = self._health, self.inventory
        self._seen, self._health, self.inventory = seen, health, seen.judged(health, self._cordon)
        if _shown(before) != _shown(self.inventory) or lasting_part(was) != lasting_part(health):
            self.changes.notify()

    async def _look_closer(self, probes: Mapping[str, Answer | Silence]) -> None:
        """Read the links after GPUs appeared or disappeared, and search for silent GPUs in a new NVML session."""
        answering = frozenset(uuid for uuid, probe in probes.items() if isinstance(probe, Answer))
        if not answering <= self._linked:
            await self._read_links(answering)
        self.locked_out = ""
        await self._search_if_due(answering, missed=len(answering) < len(probes))

    async def _search_if_due(self, answering: Set[str], *, missed: bool) -> None:
        """From time to time, check whether a new session finds the missing GPUs, and switch to it if so."""
        if missed:
            self._silent_polls += 1
        else:
            self._silent_polls, self._search_polls = 0, FIRST_SEARCH_POLLS
        try:
            if await self._search_found_more(answering):
                await self._reenter()
        except DriverTimeoutError as exc:
            self.locked_out = without_duration(str(exc))
            logger.warning("cannot enter the driver again, although another process finds GPUs that do not answer here: %s", exc)
        except DriverError as exc:  # the current session still works
            logger.info("cannot enter the driver again: %s", exc)

    async def _search_found_more(self, answering: Set[str]) -> bool:
        """Start a search in a new session when it is due; return whether a search found the answering GPUs and more."""
        if self._search is None and self._silent_polls >= self._search_polls:
            self._silent_polls, self._search_polls = 0, min(2 * self._search_polls, LAST_SEARCH_POLLS)
            self._search = asyncio.ensure_future(self._driver.found_in_new_session())
        if self._search is None or not self._search.done():
            return False
        search, self._search = self._search, None
        self.locked_out = ""
        return search.result() > answering

    async def _read_links(self, answering: frozenset[str]) -> None:
        """Read the links between all GPUs that answer. A failure is logged once and retried after the next read."""
        trouble = ""
        try:
            self._show(self._seen.with_links(await self._driver.links()), self._health)
            self._linked = answering
        except DriverError as exc:
            trouble = without_duration(str(exc))
        if trouble and trouble != self._links_trouble:
            logger.warning("links between GPUs: %s", trouble)
        self._links_trouble = trouble

    async def _reenter(self) -> None:
        """Change the NVML session and read at once: a session reports XIDs and processes only of GPUs that it has read."""
        if events := await self._driver.events():
            self.take_events(events)
        self._entering_since = self._monotonic()
        await self._driver.restart()
        await self.poll()


def _shown(inventory: DeviceInventory) -> object:
    """Return the part that others act on. Usage and sensors change all the time and are read at each scrape."""
    return (
        inventory.driver_version,
        inventory.links,
        inventory.unidentified,
        [(e.device, e.state, e.trouble, e.cordoned) for e in inventory.devices],
    )
