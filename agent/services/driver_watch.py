"""Keeps the device board true: reads the driver at a steady period, through whatever states the driver goes, and judges what it finds.

A missing driver is waited for, a hung one is marked, a lost GPU is probed until it answers again; XIDs are taken every second, also while
a reading waits for a GPU that hangs, and make the next reading come at once. What all that means for a GPU is decided in ``core.health``.
Where a call about the driver as a whole does not come back, another process tries it now and then.
Each change is logged once.

Kept true: for one silent GPU, the session in which the others answer is left only for one that was seen to find them all, and more.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from agent.core.health import Answer, HealthRules, HealthTable, Silence, Transition, XidClass, classify
from agent.core.inventory import DeviceBoard, DeviceEvent, DriverReading, OverdueCall, probes_of, unnamed_instances
from agent.core.lasting import lasting
from agent.core.metrics import Family, family
from agent.errors import DriverError, DriverLeftError, DriverMissingError, DriverTimeoutError
from agent.ports import Driver
from agent.services.changes import Changes
from proto.gpunode import NO_CORDON, Cordon

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 5.0
"""A driver that is being installed is found within this time of being ready."""
FIRST_SEARCH_POLLS = 6
"""After so many reads with a GPU that does not answer, it is looked for in a new session: after a reset it is seen by such only."""
LAST_SEARCH_POLLS = 120
"""The next time it is after twice as many, up to this: ten minutes by default."""
ENTERING_SECONDS = 60.0
"""How long entering the driver anew may take before GPUs that had answered until then count as silent."""
EVENTS_SECONDS = 1.0
"""Between two looks at what the GPUs reported; bounds how long an XID goes unnoticed."""


def _ignore(_: object) -> None:
    """Hear nothing."""


class DriverWatch:
    """The board, and the loop that keeps it."""

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
        """When the driver was left to be entered anew, until it answers."""
        self._linked: frozenset[str] = frozenset()
        self._links_trouble = ""
        self._seen = DeviceBoard()
        """As the last look says, before any judgement."""
        self._health = HealthTable()
        self._cordon = NO_CORDON
        self.on_transition: Callable[[Transition], None] = _ignore
        """Told of every GPU whose state changes."""
        self.on_event: Callable[[DeviceEvent], None] = _ignore
        """Told of everything that GPUs report by themselves."""
        self.failure: DriverError | None = None
        """Why the last look brought nothing; None when it did, when nobody looks, and before the first."""
        self.locked_out = ""
        """Why GPUs that answer another process cannot be asked by this one; empty while none do, as far as was tried."""
        self.answered = False
        """Whether the driver answered at least once."""
        self.looked = False
        """Whether the driver was asked at least once, with whatever result."""
        self.board = DeviceBoard()
        self.changes = Changes()

    @property
    def trouble(self) -> str:
        """Why the driver as a whole does not work; empty while it does."""
        return self._trouble

    @property
    def lasting_trouble(self) -> str:
        """The same without the seconds a call hangs: for whoever compares it with what was said before."""
        return lasting(self._trouble)

    @property
    def cordon(self) -> Cordon:
        """What an administrator keeps new work off."""
        return self._cordon

    @property
    def health(self) -> HealthTable:
        """The health of all GPUs, as judged."""
        return self._health

    def overdue(self) -> Sequence[OverdueCall]:
        """Return the calls into the driver that have not come back in time; for any thread."""
        return self._driver.overdue()

    def families(self) -> Iterable[Family]:
        """Say how long each of these has been out, where two threads are in the same the longer; for any thread."""
        seconds: dict[tuple[str, ...], float] = {}
        for call in self.overdue():
            key = call.name, call.device_uuid or ""
            seconds[key] = max(call.seconds, seconds.get(key, 0.0))
        text = (
            "How long a call into the driver has been out that takes longer than nvmlTimeoutSeconds; without a GPU, it is about them all."
        )
        yield family("nvml_call_overdue_seconds", text, ("call", "device_uuid"), list(seconds.items()))

    def remember(self, health: HealthTable) -> None:
        """Begin with what an earlier process of this agent knew; to be called before anything is read."""
        self._health = health

    def set_cordon(self, cordon: Cordon) -> None:
        """Keep new work off what is named, and no longer off what is not."""
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
        """Read once and take in what is found."""
        try:
            reading = await self._read()
        except DriverLeftError as exc:  # nobody looks, so nothing is known anew; entering the driver after it may take long
            self.failure = None
            self._entering_since = self._monotonic()
            if not self._seen.devices:
                self._note(str(exc))
        except DriverError as exc:
            self.failure = exc
            self._take_failure(exc)
            if isinstance(exc, DriverTimeoutError):
                await self._look_anew(frozenset(), missed=True)
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
        """Read, and hear meanwhile what GPUs report: a reading may wait for one that hangs, and the others fall ill all the same."""
        reading = asyncio.ensure_future(self._driver.read())
        try:
            while not (await asyncio.wait([reading], timeout=EVENTS_SECONDS))[0]:
                try:
                    events = await self._driver.events()
                except DriverError as exc:
                    logger.debug("events while the driver is read: %s", exc)  # the reading meets the same, and says what it means
                    continue
                if events:
                    self.take_events(events)
            return reading.result()
        finally:
            reading.cancel()

    async def _listen(self, seconds: float) -> None:
        """Wait for the next poll, or until GPUs report something."""
        next_poll = self._monotonic() + seconds
        while (left := next_poll - self._monotonic()) > 0:
            await asyncio.sleep(min(EVENTS_SECONDS, left))
            try:
                events = await self._driver.events()
            except DriverError:
                if not self._trouble:  # the poll that follows meets the same trouble and says what it means for the devices
                    return
                continue
            if events:
                self.take_events(events)
                return

    def take_events(self, events: Sequence[DeviceEvent]) -> None:
        """Take in what GPUs reported by themselves."""
        for event in events:
            self.on_event(event)
        xids = [(event.device_uuid, event.xid) for event in events if event.xid is not None]
        for uuid in dict.fromkeys(uuid for uuid, _ in xids):
            numbers = sorted({xid for of, xid in xids if of == uuid})
            harmless = all(classify(xid, self._rules) is XidClass.APPLICATION for xid in numbers)
            logger.log(logging.INFO if harmless else logging.WARNING, "XIDs reported", extra={"device_uuid": uuid, "xids": numbers})
        self._take(self._seen, self._health.after_xids(xids, self._monotonic(), self._rules))

    def _take_failure(self, exc: DriverError) -> None:
        """Take in that the driver could not be read."""
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
        """Remember what is wrong with the driver as a whole."""
        before, self._trouble = self._trouble, trouble
        if lasting(trouble) != lasting(before):
            logger.log(logging.WARNING if trouble else logging.INFO, "driver: %s", trouble or "it answers")
            self.changes.notify()

    def _take_silence(self, uuids: Sequence[str], trouble: str, driver_trouble: str) -> None:
        """Take in that these GPUs did not answer."""
        self._note(driver_trouble)
        silence = Silence(lasting(trouble))
        seen = self._seen
        for uuid in uuids:
            seen = seen.after_device_trouble(uuid, silence.trouble)
        self._take(seen, self._health.after_probes(dict.fromkeys(uuids, silence), self._monotonic(), self._rules))

    def _take(self, seen: DeviceBoard, health: HealthTable) -> None:
        known = {entry.device.uuid for entry in self._seen.devices}
        for entry in seen.devices:
            if entry.device.uuid not in known:
                logger.info("device found", extra={"device_uuid": entry.device.uuid, "model": entry.device.model})
        for trouble in set(seen.unidentified) - set(self._seen.unidentified):
            logger.warning("a device cannot be used: %s", trouble)
        for instance in set(unnamed_instances(seen)) - set(unnamed_instances(self._seen)):
            logger.warning(
                "MIG instance not offered: its profile %r is not known here", instance.profile, extra={"device_uuid": instance.uuid}
            )
        transitions = self._health.transitions_to(health)
        self._show(seen, health)
        for transition in transitions:
            level = logging.WARNING if transition.before.usable and not transition.after.usable else logging.INFO
            text = f"device is {transition.after}, was {transition.before}: {transition.reason}"
            logger.log(level, text, extra={"device_uuid": transition.device_uuid})
            self.on_transition(transition)

    def _show(self, seen: DeviceBoard, health: HealthTable) -> None:
        """Put what was found on the board that all others look at."""
        self._seen, self._health = seen, health
        before, self.board = self.board, seen.judged(health, self._cordon)
        if _shown(before) != _shown(self.board):
            self.changes.notify()

    async def _look_closer(self, probes: Mapping[str, Answer | Silence]) -> None:
        """Do what a plain read does not: links when devices came or went, a new NVML session when one stays silent."""
        answering = frozenset(uuid for uuid, probe in probes.items() if isinstance(probe, Answer))
        if not answering <= self._linked:
            await self._read_links(answering)
        self.locked_out = ""
        await self._look_anew(answering, missed=len(answering) < len(probes))

    async def _look_anew(self, answering: Set[str], *, missed: bool) -> None:
        """Look now and then whether a new session would find GPUs that were missed, and change to one that does."""
        if missed:
            self._silent_polls += 1
        else:
            self._silent_polls, self._search_polls = 0, FIRST_SEARCH_POLLS
        try:
            if await self._are_found_anew(answering):
                await self._enter_anew()
        except DriverTimeoutError as exc:
            self.locked_out = lasting(str(exc))
            logger.warning("driver not entered anew, though another process finds GPUs that do not answer here: %s", exc)
        except DriverError as exc:  # as long as the session at hand works, nothing is lost
            logger.info("driver not entered anew: %s", exc)

    async def _are_found_anew(self, answering: Set[str]) -> bool:
        """Begin to look for GPUs in a new session when that is due; return whether a look found those that answer, and more."""
        if self._search is None and self._silent_polls >= self._search_polls:
            self._silent_polls, self._search_polls = 0, min(2 * self._search_polls, LAST_SEARCH_POLLS)
            self._search = asyncio.ensure_future(self._driver.found_anew())
        if self._search is None or not self._search.done():
            return False
        search, self._search = self._search, None
        self.locked_out = ""
        return search.result() > answering

    async def _read_links(self, answering: frozenset[str]) -> None:
        """Read the links between all GPUs that answer; where that fails, it is tried again after the next reading, and said once."""
        trouble = ""
        try:
            self._show(self._seen.with_links(await self._driver.links()), self._health)
            self._linked = answering
        except DriverError as exc:
            trouble = lasting(str(exc))
        if trouble and trouble != self._links_trouble:
            logger.warning("links between GPUs: %s", trouble)
        self._links_trouble = trouble

    async def _enter_anew(self) -> None:
        """Change the NVML session, and read at once: a session tells XIDs and processes of the GPUs that it has read only."""
        if events := await self._driver.events():
            self.take_events(events)
        self._entering_since = self._monotonic()
        await self._driver.restart()
        await self.poll()


def _shown(board: DeviceBoard) -> object:
    """Return what others act on; use and sensors change all the time and are looked at when somebody asks."""
    return board.driver_version, board.links, board.unidentified, [(e.device, e.state, e.trouble, e.cordoned) for e in board.devices]
