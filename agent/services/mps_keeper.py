"""Keeps an MPS control daemon alive on each GPU that has MPS clients, and ends it when the last is gone.

Daemons and clients of all GPUs of the node share one /dev/shm, by which they meet; it is emptied when the node's last client is gone.

A server that died is made anew by its daemon when the next client comes; a daemon that died is started again here, and its clients are
told by an event that their connection is lost. That is also what a restart of the agent's container comes to: the container runtime ends
the daemons with it. One that answers at the start, as an agent that runs on the host itself leaves it, is taken over.

What daemons answer may be a tenant's words, see ``adapters.mps_control``: nothing that goes wrong with one ends the loop.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agent.core.cdi import NO_EDITS, Edits
from agent.core.ledger import Grant
from agent.core.metrics import Family, Kind, family
from agent.core.mps import FAULT, client_edits
from agent.errors import MpsError, StorageError
from agent.ports import MpsControl, PodEvent
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from proto import contract
from proto.model import Isolation

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often daemons are looked at while there are any."""


class MpsKeeper:
    """The control daemons of this node."""

    def __init__(self, control: MpsControl, shared_memory: str, *, book: GrantBook, events: EventRecorder) -> None:
        """Args: shared_memory: the host directory that is /dev/shm to the daemons."""
        self._control = control
        self._shared_memory = shared_memory
        self._book = book
        self._events = events
        self._starting = asyncio.Lock()
        """Held while a daemon starts, and while the memory that daemons share is emptied."""
        self._changing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._faulty: frozenset[tuple[str, int]] = frozenset()
        self._restarts: dict[str, int] = {}

    async def ensure(self, grant: Grant) -> Edits:
        """Return what the container needs, with the daemon of its GPU running; nothing for another backend.

        Raises: MpsError, StorageError.
        """
        if grant.backend is not Isolation.MPS:
            return NO_EDITS
        (share,) = grant.shares
        async with self._changing[share.device_uuid]:
            if not await asyncio.to_thread(self._control.answers, share.device_uuid):
                await self._start(share.device_uuid)
        return client_edits(share, self._control.pipe_directory(share.device_uuid), self._shared_memory)

    def families(self) -> Iterable[Family]:
        """Return how often a daemon had died; for any thread."""
        samples = [((device_uuid,), float(count)) for device_uuid, count in tuple(self._restarts.items())]
        text = "MPS control daemons that had died, and were started again."
        yield family("mps_daemon_restarts_total", text, ("device_uuid",), samples, Kind.COUNTER)

    async def run(self) -> None:
        """Look after the daemons for ever."""
        while True:
            seen = self._book.changes.count
            some = await self.look()
            await self._book.changes.after(seen, LOOK_SECONDS if some else None)

    async def look(self) -> bool:
        """Start what should run and does not, end what has no clients any more; return whether something is left to look after."""
        wanted = self._clients()
        known, left = await self._known(), bool(wanted)
        for device_uuid in {*wanted, *(known or ())}:
            async with self._changing[device_uuid]:
                try:
                    await self._keep(device_uuid)
                except (MpsError, StorageError) as exc:
                    left = True
                    logger.warning("MPS: %s", exc, extra={"device_uuid": device_uuid})
                await self._trim_logs(device_uuid)
        if not left and known is not None:
            await self._clear_shared_memory()
        return left or known is None

    async def _clear_shared_memory(self) -> None:
        """Give back what the last client of the node left in it: whoever comes next would find it there."""
        async with self._starting:
            if self._clients():  # one has come meanwhile: it is promised before its daemon is started
                return
            try:
                await asyncio.to_thread(self._control.clear_shared_memory)
            except (MpsError, StorageError) as exc:
                logger.warning("MPS: %s", exc)

    async def _known(self) -> Sequence[str] | None:
        """Return the GPUs that have a daemon's directories; None when that cannot be told."""
        try:
            return await asyncio.to_thread(self._control.known)
        except (MpsError, StorageError) as exc:
            logger.warning("MPS daemons without clients are not looked for: %s", exc)
            return None

    def _clients(self) -> Mapping[str, list[Grant]]:
        clients: dict[str, list[Grant]] = {}
        for grant in self._book.ledger.grants.values():
            if grant.backend is Isolation.MPS:
                for share in grant.shares:
                    clients.setdefault(share.device_uuid, []).append(grant)
        return clients

    async def _keep(self, device_uuid: str) -> None:
        clients = self._clients().get(device_uuid, [])
        if not clients:
            await asyncio.to_thread(self._control.stop, device_uuid)
            logger.info("MPS daemon ended: it has no clients", extra={"device_uuid": device_uuid})
            return
        states = await asyncio.to_thread(self._control.servers, device_uuid)
        if states is not None:
            await self._end_faulty_servers(device_uuid, states)
        else:
            await asyncio.to_thread(self._control.stop, device_uuid)  # one that hangs is in the way of the next
            await self._start(device_uuid)
            self._restarts[device_uuid] = self._restarts.get(device_uuid, 0) + 1
            for grant in clients:
                self._tell(grant, device_uuid)

    async def _trim_logs(self, device_uuid: str) -> None:
        """Empty large logs: each look adds to the daemon's."""
        try:
            await asyncio.to_thread(self._control.trim_logs, device_uuid)
        except StorageError as exc:
            logger.warning("MPS: %s", exc, extra={"device_uuid": device_uuid})

    async def _start(self, device_uuid: str) -> None:
        async with self._starting:
            await asyncio.to_thread(self._control.start, device_uuid)
        logger.info("MPS daemon started", extra={"device_uuid": device_uuid})

    async def _end_faulty_servers(self, device_uuid: str, states: Mapping[int, str]) -> None:
        """End a server that is still in fault at the second look: it waits for clients that do not end, and takes no new ones."""
        faulty = frozenset((device_uuid, pid) for pid, state in states.items() if state == FAULT)
        for _, pid in faulty & self._faulty:
            logger.warning("MPS server ended: it was in fault and did not recover", extra={"device_uuid": device_uuid, "pid": pid})
            await asyncio.to_thread(self._control.shut_down_server, device_uuid, pid)
        self._faulty = faulty | frozenset(entry for entry in self._faulty if entry[0] != device_uuid)

    def _tell(self, grant: Grant, device_uuid: str) -> None:
        message = (
            f"the MPS daemon of {device_uuid} had died and was started again: container {grant.container} has lost its connection, "
            "and CUDA works again after the container restarts"
        )
        self._events.record(
            PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, contract.EVENT_REASON_MPS_RESTARTED, message, warning=True)
        )
