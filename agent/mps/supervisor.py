# SPDX-License-Identifier: Apache-2.0
"""Runs the MPS control daemons of a node, in a process of its own, so that a restart of the agent ends no daemon.

The agent writes which daemons it wants (``ports.mps.MpsRequests``). A daemon that dies is restarted, after a wait that grows while it keeps
dying. A daemon without a request is ended. The supervisor adopts no daemon of an earlier supervisor: it ends them first, since their state
is unknown. In a pod, the end of the earlier container has ended them already.

Daemons and clients of all GPUs of the node share one /dev/shm. It is emptied when no daemon is wanted.

A tenant can influence what a daemon replies (see ``agent.mps.control``). An error with one daemon ends no other daemon, nor the loop.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.core.mps import FAULT
from agent.core.mps_records import DaemonState, SupervisorState
from agent.errors import MpsError, ProcessError, StorageError
from agent.ports.clock import Clock
from agent.ports.mps import MpsControl, MpsRequests, WantedDaemons
from agent.ports.processes import ProcessEnds
from agent.services.changes import Changes
from aliquot.kube.backoff import Backoff

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two checks of running daemons: a daemon that hangs does not end, and a server in fault does not either."""
FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS = 0.5, 60.0
TAKE_SECONDS = 1.0
"""Seconds between two attempts of a second supervisor to take over."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class _Daemon:
    """One GPU with a requested daemon, or with one that is about to be ended."""

    state: DaemonState
    reported: DaemonState | None = None
    """The state that was last reported to the agent."""
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS))
    not_before: float = 0.0
    """Earliest time of the next start; monotonic."""
    unwatch: Callable[[], None] = _nothing
    faulty: frozenset[int] = frozenset()

    @property
    def runs(self) -> bool:
        return bool(self.state.generation)


class MpsSupervisor:
    """The daemons of this node."""

    def __init__(self, about: SupervisorState, *, control: MpsControl, requests: MpsRequests, ends: ProcessEnds, clock: Clock) -> None:
        self._about = about
        self._control = control
        self._requests = requests
        self._ends = ends
        self._clock = clock
        self._daemons: dict[str, _Daemon] = {}
        self._shared_memory_is_clear = False
        self.changes = Changes()
        """Counts reasons to look: changed requests, daemons that ended."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run the daemons until ``stop`` is set, then end them. Notify ``changes`` when you set ``stop``.

        Raises: StorageError, MpsError: a daemon of an earlier supervisor cannot be ended.
        """
        if not await self._take(stop):
            return
        for device_uuid in await asyncio.to_thread(self._control.known):
            logger.warning("MPS daemon of an earlier aliquot-mps ended", extra={"device_uuid": device_uuid})
            await asyncio.to_thread(self._control.stop, device_uuid)
        await asyncio.to_thread(self._requests.open, self._about)
        logger.info("ready for requests", extra={"trouble": self._about.trouble or None})
        while not stop.is_set():
            seen = self.changes.count
            await self.changes.after(seen, await self.look())
        await asyncio.gather(*(self._keep(device_uuid, WantedDaemons()) for device_uuid in tuple(self._daemons)))
        self._requests.close()
        logger.info("stopping on a signal")

    async def _take(self, stop: asyncio.Event) -> bool:
        logged = False
        while not stop.is_set():
            seen = self.changes.count
            if await asyncio.to_thread(self._requests.take):
                return True
            if not logged:
                logger.warning("another aliquot-mps runs on this node: waiting for its end")
                logged = True
            await self.changes.after(seen, TAKE_SECONDS)
        return False

    async def look(self) -> float | None:
        """Start requested daemons, end the others; return the seconds until the next look, None without a need for one."""
        begun = self._clock.monotonic()
        try:
            wanted = await asyncio.to_thread(self._requests.wanted)
        except StorageError as exc:
            logger.warning("MPS: requests cannot be read, running daemons stay: %s", exc)
            wanted = WantedDaemons(unclear=dict.fromkeys(self._daemons, str(exc)))
        await asyncio.gather(*(self._keep(device_uuid, wanted) for device_uuid in {*wanted.devices, *wanted.unclear, *self._daemons}))
        if self._daemons:
            self._shared_memory_is_clear = False
            now = self._clock.monotonic()
            waits = [daemon.not_before - now for daemon in self._daemons.values() if daemon.not_before > begun and not daemon.runs]
            return max(0.0, min([LOOK_SECONDS, *waits]))
        if not self._shared_memory_is_clear:
            await self._clear_shared_memory()
        return None if self._shared_memory_is_clear else LOOK_SECONDS

    async def _keep(self, device_uuid: str, wanted: WantedDaemons) -> None:
        """Bring one GPU to the requested state; the next look retries what fails."""
        daemon = self._daemons.setdefault(device_uuid, _Daemon(DaemonState(device_uuid)))
        try:
            if device_uuid in wanted.devices or (device_uuid in wanted.unclear and daemon.runs):
                await self._look_after(daemon)
            elif device_uuid in wanted.unclear:
                self._note_trouble(daemon, wanted.unclear[device_uuid])
            else:
                await self._drop(daemon)
                return
            await self._report(daemon)
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
            await self._clean_up(daemon)
        if not self._about.trouble and self._clock.monotonic() >= daemon.not_before:
            await self._start(daemon)

    async def _clean_up(self, daemon: _Daemon) -> None:
        """End what is left of a daemon that died or hangs, and set when the next may start."""
        device_uuid, now = daemon.state.device_uuid, self._clock.monotonic()
        wait_seconds = daemon.backoff.ended(now)
        daemon.unwatch()
        daemon.not_before = now + wait_seconds
        daemon.state = DaemonState(device_uuid, since=self._clock.now())
        logger.warning("MPS daemon died; restart in %g s", wait_seconds, extra={"device_uuid": device_uuid})
        await self._report(daemon)
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
            logger.warning("MPS: the end of the daemon will be noticed only at the next look: %s", exc, extra={"device_uuid": device_uuid})

    async def _drop(self, daemon: _Daemon) -> None:
        """End a daemon without a request."""
        device_uuid = daemon.state.device_uuid
        daemon.reported = None
        await asyncio.to_thread(self._requests.forget, device_uuid)
        await asyncio.to_thread(self._control.stop, device_uuid)
        daemon.unwatch()
        del self._daemons[device_uuid]
        logger.info("MPS daemon ended: it has no clients", extra={"device_uuid": device_uuid})

    def _note_trouble(self, daemon: _Daemon, trouble: str) -> None:
        if daemon.state.trouble != trouble:
            daemon.state = DaemonState(daemon.state.device_uuid, since=self._clock.now(), trouble=trouble)

    async def _report(self, daemon: _Daemon) -> None:
        if daemon.reported != daemon.state:
            await asyncio.to_thread(self._requests.report, daemon.state)
            daemon.reported = daemon.state

    async def _end_faulty_servers(self, daemon: _Daemon, states: Mapping[int, str]) -> None:
        """End a server that is in fault at two looks in a row: it waits for clients that do not end, and accepts no new ones."""
        device_uuid = daemon.state.device_uuid
        faulty = frozenset(pid for pid, state in states.items() if state == FAULT)
        for pid in faulty & daemon.faulty:
            logger.warning("MPS server ended: it was in fault and did not recover", extra={"device_uuid": device_uuid, "pid": pid})
            await asyncio.to_thread(self._control.shut_down_server, device_uuid, pid)
        daemon.faulty = faulty

    async def _clear_shared_memory(self) -> None:
        """Empty the shared memory after the last client, so that the next client cannot read what was left in it."""
        try:
            await asyncio.to_thread(self._control.clear_shared_memory)
        except (MpsError, StorageError) as exc:
            logger.warning("MPS: %s", exc)
        else:
            self._shared_memory_is_clear = True
