"""Keeps the MPS control daemons of a node alive, in a process of their own, so that the agent may come and go without them.

The agent says which are wanted (``ports.MpsDesk``). A daemon that dies is started again, after a wait that grows while it dies soon; one
that nobody wants any more is ended. Nothing is taken over: what an earlier supervisor left is ended first, since nobody can tell
in which state it is, and in a pod its container's end has ended it already.

Daemons and clients of all GPUs of the node share one /dev/shm, by which they meet; it is emptied when no daemon is wanted any more.

What daemons answer may be a tenant's words, see ``adapters.mps_control``: nothing that goes wrong with one ends the loop, or another's.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.core.mps import FAULT
from agent.core.mps_records import DaemonState, SupervisorState
from agent.errors import MpsError, ProcessError, StorageError
from agent.ports import Clock, MpsControl, MpsDesk, ProcessEnds, Wanted
from agent.services.changes import Changes
from program.backoff import Backoff

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often daemons are looked at while there are any: one that hangs does not end, and a server in fault neither."""
FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS = 0.5, 60.0
TAKE_SECONDS = 1.0
"""How often a second supervisor looks whether the first has ended."""


def _nothing() -> None:
    """Stop nothing."""


@dataclass(slots=True)
class _Daemon:
    """One GPU of which a daemon is wanted, or was when it was started."""

    state: DaemonState
    told: DaemonState | None = None
    """What the agent may read."""
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS))
    not_before: float = 0.0
    """On the monotonic clock, when it may be started."""
    unwatch: Callable[[], None] = _nothing
    faulty: frozenset[int] = frozenset()

    @property
    def runs(self) -> bool:
        return bool(self.state.generation)


class MpsSupervisor:
    """The daemons of this node."""

    def __init__(self, about: SupervisorState, *, control: MpsControl, desk: MpsDesk, ends: ProcessEnds, clock: Clock) -> None:
        self._about = about
        self._control = control
        self._desk = desk
        self._ends = ends
        self._clock = clock
        self._daemons: dict[str, _Daemon] = {}
        self._shared_memory_is_clear = False
        self.changes = Changes()
        """Counts what there is to look at: wishes that came or went, daemons that ended."""

    async def run(self, stop: asyncio.Event) -> None:
        """Look after the daemons until told to stop, and end them; whoever sets ``stop`` notifies ``changes`` as well.

        Raises: StorageError, MpsError: what an earlier supervisor left cannot be ended.
        """
        if not await self._take(stop):
            return
        for device_uuid in await asyncio.to_thread(self._control.known):
            logger.warning("MPS daemon ended: an earlier aliquot-mps has left it", extra={"device_uuid": device_uuid})
            await asyncio.to_thread(self._control.stop, device_uuid)
        await asyncio.to_thread(self._desk.open, self._about)
        logger.info("ready for wishes", extra={"trouble": self._about.trouble or None})
        while not stop.is_set():
            seen = self.changes.count
            await self.changes.after(seen, await self.look())
        await asyncio.gather(*(self._keep(device_uuid, Wanted()) for device_uuid in tuple(self._daemons)))
        self._desk.close()
        logger.info("stopping: told to")

    async def _take(self, stop: asyncio.Event) -> bool:
        said = False
        while not stop.is_set():
            seen = self.changes.count
            if await asyncio.to_thread(self._desk.take):
                return True
            if not said:
                logger.warning("another aliquot-mps lives on this node: waiting for its end")
                said = True
            await self.changes.after(seen, TAKE_SECONDS)
        return False

    async def look(self) -> float | None:
        """Start what is wanted, end what is not; return after how many seconds to look again, None when there is no need."""
        begun = self._clock.monotonic()
        try:
            wanted = await asyncio.to_thread(self._desk.wanted)
        except StorageError as exc:
            logger.warning("MPS: daemons go on as they are: %s", exc)
            wanted = Wanted(unclear=dict.fromkeys(self._daemons, str(exc)))
        await asyncio.gather(*(self._keep(device_uuid, wanted) for device_uuid in {*wanted.devices, *wanted.unclear, *self._daemons}))
        if self._daemons:
            self._shared_memory_is_clear = False
            now = self._clock.monotonic()
            waits = [daemon.not_before - now for daemon in self._daemons.values() if daemon.not_before > begun and not daemon.runs]
            return max(0.0, min([LOOK_SECONDS, *waits]))
        if not self._shared_memory_is_clear:
            await self._clear_shared_memory()
        return None if self._shared_memory_is_clear else LOOK_SECONDS

    async def _keep(self, device_uuid: str, wanted: Wanted) -> None:
        """Make of one GPU what is wanted; what fails is tried again at the next look."""
        daemon = self._daemons.setdefault(device_uuid, _Daemon(DaemonState(device_uuid)))
        try:
            if device_uuid in wanted.devices or (device_uuid in wanted.unclear and daemon.runs):
                await self._look_after(daemon)
            elif device_uuid in wanted.unclear:
                self._note_trouble(daemon, wanted.unclear[device_uuid])
            else:
                await self._drop(daemon)
                return
            await self._tell(daemon)
        except (MpsError, StorageError) as exc:
            logger.warning("MPS: %s", exc, extra={"device_uuid": device_uuid})

    async def _look_after(self, daemon: _Daemon) -> None:
        device_uuid = daemon.state.device_uuid
        if daemon.runs:
            states = await asyncio.to_thread(self._control.servers, device_uuid)
            if states is not None:
                await self._end_faulty_servers(daemon, states)
                await asyncio.to_thread(self._control.trim_logs, device_uuid)
                return
            await self._bury(daemon)
        if not self._about.trouble and self._clock.monotonic() >= daemon.not_before:
            await self._start(daemon)

    async def _bury(self, daemon: _Daemon) -> None:
        """Take note of a daemon that died, or that hangs and is in the way of the next."""
        device_uuid, now = daemon.state.device_uuid, self._clock.monotonic()
        wait_seconds = daemon.backoff.ended(now)
        daemon.unwatch()
        daemon.not_before = now + wait_seconds
        daemon.state = DaemonState(device_uuid, since=self._clock.now())
        logger.warning("MPS daemon has died: it is started again in %g s", wait_seconds, extra={"device_uuid": device_uuid})
        await self._tell(daemon)
        await asyncio.to_thread(self._control.stop, device_uuid)

    async def _start(self, daemon: _Daemon) -> None:
        device_uuid = daemon.state.device_uuid
        daemon.backoff.begin()
        try:
            pid = await asyncio.to_thread(self._control.start, device_uuid)
        except (MpsError, StorageError) as exc:
            now = self._clock.monotonic()
            daemon.not_before = now + daemon.backoff.ended(now)
            self._note_trouble(daemon, str(exc))
            logger.warning("MPS: %s", exc, extra={"device_uuid": device_uuid})
            return
        daemon.backoff.opened(self._clock.monotonic())
        daemon.state = DaemonState(device_uuid, secrets.token_hex(8), pid, self._clock.now())
        daemon.faulty = frozenset()
        daemon.unwatch = _nothing
        logger.info("MPS daemon started", extra={"device_uuid": device_uuid, "pid": pid})
        try:
            if pid is not None:
                daemon.unwatch = self._ends.watch(pid, self.changes.notify)
        except ProcessError as exc:
            logger.warning("MPS: the daemon's end is noticed at the next look only: %s", exc, extra={"device_uuid": device_uuid})

    async def _drop(self, daemon: _Daemon) -> None:
        """End a daemon that nobody wants."""
        device_uuid = daemon.state.device_uuid
        daemon.told = None
        await asyncio.to_thread(self._desk.forget, device_uuid)
        await asyncio.to_thread(self._control.stop, device_uuid)
        daemon.unwatch()
        del self._daemons[device_uuid]
        logger.info("MPS daemon ended: it has no clients", extra={"device_uuid": device_uuid})

    def _note_trouble(self, daemon: _Daemon, trouble: str) -> None:
        if daemon.state.trouble != trouble:
            daemon.state = DaemonState(daemon.state.device_uuid, since=self._clock.now(), trouble=trouble)

    async def _tell(self, daemon: _Daemon) -> None:
        if daemon.told != daemon.state:
            await asyncio.to_thread(self._desk.tell, daemon.state)
            daemon.told = daemon.state

    async def _end_faulty_servers(self, daemon: _Daemon, states: Mapping[int, str]) -> None:
        """End a server that is still in fault at the second look: it waits for clients that do not end, and takes no new ones."""
        device_uuid = daemon.state.device_uuid
        faulty = frozenset(pid for pid, state in states.items() if state == FAULT)
        for pid in faulty & daemon.faulty:
            logger.warning("MPS server ended: it was in fault and did not recover", extra={"device_uuid": device_uuid, "pid": pid})
            await asyncio.to_thread(self._control.shut_down_server, device_uuid, pid)
        daemon.faulty = faulty

    async def _clear_shared_memory(self) -> None:
        """Give back what the last client of the node left in it: whoever comes next would find it there."""
        try:
            await asyncio.to_thread(self._control.clear_shared_memory)
        except (MpsError, StorageError) as exc:
            logger.warning("MPS: %s", exc)
        else:
            self._shared_memory_is_clear = True
