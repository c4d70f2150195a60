# SPDX-License-Identifier: Apache-2.0
"""Requests an MPS control daemon for each GPU with MPS clients from ``aliquot-mps``, which keeps running when the agent restarts.

A daemon replaces a server that died when the next client connects. The supervisor restarts a daemon that died, as a new generation, and an
event tells the pods of its clients that their connection is lost. The same holds after a restart of the supervisor. The request files
name the generation that each client started with, so a restarted agent knows it.

Invariant: a container counts as served only while the daemon that it started with runs. A process that starts in the container later finds
no daemon at the expected place, and can use the whole GPU.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set

from agent.core.cdi import NO_EDITS, Edits
from agent.core.ledger import Grant
from agent.core.metrics import Family, Kind, family
from agent.core.mps import client_edits, pipe_directory
from agent.core.mps_records import DaemonRequest, DaemonState, SupervisorState
from agent.errors import MpsError, StorageError
from agent.ports.kube import PodEvent
from agent.ports.mps import MpsDaemons
from agent.services.changes import Changes
from agent.services.events import EventRecorder
from agent.services.grant_manager import GrantManager
from aliquot import contract
from aliquot.contract.model import Isolation

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two reads of the supervisor's reports."""
START_SECONDS = 15.0
"""How long a container waits for the daemon of its GPU. A hung daemon of another GPU keeps the supervisor busy for ten seconds."""
POLL_SECONDS = 0.05
Models = Callable[[], Mapping[str, str]]
ABSENT = "no aliquot-mps runs on this node; the component mps adds it"


class MpsController:
    """The MPS daemons that this node's containers need."""

    def __init__(
        self, node_name: str, daemons: MpsDaemons, directory: str, *, manager: GrantManager, models: Models, events: EventRecorder
    ) -> None:
        """Args: directory: host directory with one subdirectory per daemon. models: of the GPUs, by UUID."""
        self._node_name = node_name
        self._models = models
        self._daemons = daemons
        self._directory = directory
        self._manager = manager
        self._events = events
        self._changing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._clients: dict[str, dict[str, str]] = {}
        """By GPU and grant id, the generation that a container started with, or that an event named."""
        self._lost: dict[str, set[str]] = {}
        """By GPU, ids of the grants with a container that started with an earlier daemon."""
        self._generations: dict[str, str] = {}
        """By GPU, the generation of the running daemon, as of the last look."""
        self.unserved: Set[str] = frozenset()
        """Ids of the grants of clients without a running daemon, as of the last look; replaced as a whole."""
        self._requested: set[str] = set()
        """The GPUs with a request that this agent has written or read."""
        self._restarts: dict[str, int] = {}
        self.supervisor_pid: int | None = None
        """The host pid of the supervisor; its servers use the GPUs. None while no supervisor runs."""
        self.trouble = ABSENT
        """Why no container can become a client now; empty while MPS is available."""
        self.changes = Changes()
        """Counts the changes of ``trouble``."""

    async def load(self) -> None:
        """Read the requests of an earlier agent, and check whether a supervisor runs. Raises StorageError."""
        wishes = await asyncio.to_thread(self._daemons.load)
        self._clients = {device_uuid: dict(wish.clients) for device_uuid, wish in wishes.items()}
        self._lost = {device_uuid: set(wish.lost) for device_uuid, wish in wishes.items()}
        self._requested = set(wishes)
        try:
            await self._supervisor()
        except StorageError as exc:  # the loop reads it again
            logger.warning("MPS: %s", exc)

    async def ensure(self, grant: Grant) -> Edits:
        """Start the daemon of the container's GPU and return the container edits; no edits for another backend.

        Raises: MpsError, StorageError.
        """
        if grant.backend is not Isolation.MPS:
            return NO_EDITS
        (share,) = grant.shares
        device_uuid = share.device_uuid
        async with self._changing[device_uuid]:
            supervisor = await self._living()
            await self._want(device_uuid)
            state = await self._started(device_uuid)
            clients = self._clients.setdefault(device_uuid, {})
            clients.pop(grant.grant_id, None)  # the container starts now and has no connection to lose
            self._lost.get(device_uuid, set()).discard(grant.grant_id)
            self._report_lost(state)
            clients[grant.grant_id] = self._generations[device_uuid] = state.generation
            self._judge()
            await self._want(device_uuid)
        return client_edits(share, pipe_directory(self._directory, device_uuid), supervisor.shared_memory)

    def families(self) -> Iterable[Family]:
        """Return restarts of daemons, and whether the supervisor runs where it is needed; for any thread."""
        models, restarts = self._models(), tuple(self._restarts.items())
        samples = [((self._node_name, device_uuid, models.get(device_uuid, "")), float(count)) for device_uuid, count in restarts]
        text = "MPS control daemons that died and were restarted."
        yield family("mps_daemon_restarts_total", text, ("node", "device_uuid", "model"), samples, Kind.COUNTER)
        if self._clients or not self.trouble:
            up = "Whether aliquot-mps can start MPS daemons, 1 or 0; only on nodes with aliquot-mps or MPS clients."
            yield family("mps_supervisor_up", up, ("node",), [((self._node_name,), 0.0 if self.trouble else 1.0)])

    async def run(self) -> None:
        """Keep the requests current, until cancelled."""
        while True:
            seen = self._manager.changes.count
            await self.look()
            await self._manager.changes.paced_after(seen, LOOK_SECONDS)

    async def look(self) -> None:
        """Request daemons for exactly the GPUs with clients, and report clients that lost their daemon."""
        try:
            living = await self._supervisor() is not None
            stale = await asyncio.to_thread(self._daemons.wanted)
        except StorageError as exc:
            logger.warning("MPS: %s", exc)
            if self.trouble:  # it is unknown which daemons run
                self._generations.clear()
                self._judge()
            return
        for device_uuid in {*self._clients_by_gpu(), *stale, *self._clients}:
            async with self._changing[device_uuid]:
                try:
                    await self._look_at(device_uuid, living=living, wanted=device_uuid in stale)
                except StorageError as exc:
                    logger.warning("MPS: %s", exc, extra={"device_uuid": device_uuid})
                    self._generations.pop(device_uuid, None)
        self._judge()

    async def _look_at(self, device_uuid: str, *, living: bool, wanted: bool) -> None:
        """Bring the request for one GPU's daemon in line with its grants, and report clients that lost their daemon."""
        grants = self._clients_by_gpu().get(device_uuid, {})
        unclear = self._manager.ledger.unclear  # the container of such a grant may be a client
        if not grants and unclear.keys().isdisjoint(self._clients.get(device_uuid, ())):
            await self._withdraw(device_uuid)
            return
        clients = self._clients.setdefault(device_uuid, {})
        gone = clients.keys() - grants.keys() - unclear.keys()
        for grant_id in gone:
            del clients[grant_id]
        self._lost.get(device_uuid, set()).difference_update(gone)
        state = await asyncio.to_thread(self._daemons.state, device_uuid) if living else None
        self._generations[device_uuid] = state.generation if state is not None else ""
        reported = state is not None and self._report_lost(state)
        if gone or reported or not wanted or device_uuid not in self._requested:
            await self._want(device_uuid)

    async def _withdraw(self, device_uuid: str) -> None:
        """Remove the request for the daemon of a GPU without clients."""
        await asyncio.to_thread(self._daemons.withdraw, device_uuid)
        for kept in (self._clients, self._lost, self._generations):
            kept.pop(device_uuid, None)
        self._requested.discard(device_uuid)

    def _report_lost(self, state: DaemonState) -> bool:
        """Report the clients of an earlier generation as disconnected; return whether there were any."""
        clients = self._clients.get(state.device_uuid, {})
        lost = [grant_id for grant_id, generation in clients.items() if generation != state.generation]
        if not state.generation or not lost:
            return False
        self._restarts[state.device_uuid] = self._restarts.get(state.device_uuid, 0) + 1
        grants = self._clients_by_gpu().get(state.device_uuid, {})
        for grant_id in lost:
            clients[grant_id] = state.generation
            self._lost.setdefault(state.device_uuid, set()).add(grant_id)
            if grant_id in grants:
                self._report(grants[grant_id], state.device_uuid)
        return True

    def _judge(self) -> None:
        """Find the clients without a daemon."""
        self.unserved = frozenset(
            grant_id
            for device_uuid, grants in self._clients_by_gpu().items()
            for grant_id in grants
            if not self._generations.get(device_uuid) or grant_id in self._lost.get(device_uuid, ())
        )

    async def _living(self) -> SupervisorState:
        """Return the supervisor's state. Raises MpsError when it can start no daemon, StorageError."""
        supervisor = await self._supervisor()
        if supervisor is None or self.trouble:
            raise MpsError(f"isolation mps is not available: {self.trouble}")
        return supervisor

    async def _supervisor(self) -> SupervisorState | None:
        """Read whether a supervisor runs. Raises StorageError."""
        before = self.trouble
        try:
            supervisor = await asyncio.to_thread(self._daemons.supervisor)
        except StorageError as exc:
            self.supervisor_pid, self.trouble = None, f"the report of aliquot-mps cannot be read: {exc}"
            raise
        else:
            self.supervisor_pid = supervisor.pid if supervisor is not None else None
            self.trouble = supervisor.trouble if supervisor is not None else ABSENT
        finally:
            if self.trouble != before:
                self._log_trouble()
        return supervisor

    def _log_trouble(self) -> None:
        self.changes.notify()
        if self.trouble and self._clients:
            logger.warning("isolation mps is not available, but there are clients: %s", self.trouble)
        else:
            logger.info("isolation mps is available" if not self.trouble else f"isolation mps is not available: {self.trouble}")

    async def _want(self, device_uuid: str) -> None:
        wish = DaemonRequest(device_uuid, dict(self._clients.get(device_uuid, {})), tuple(sorted(self._lost.get(device_uuid, ()))))
        await asyncio.to_thread(self._daemons.want, wish)
        self._requested.add(device_uuid)

    async def _started(self, device_uuid: str) -> DaemonState:
        """Wait until the daemon runs. Raises MpsError, StorageError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_SECONDS
        while loop.time() < deadline:
            state = await asyncio.to_thread(self._daemons.state, device_uuid)
            if state is not None and state.generation:
                return state
            if state is not None and state.trouble:
                raise MpsError(state.trouble)
            await asyncio.sleep(POLL_SECONDS)
        raise MpsError(
            f"aliquot-mps has not started the MPS daemon of {device_uuid} within {START_SECONDS:g} s: read the log of aliquot-mps"
        )

    def _clients_by_gpu(self) -> Mapping[str, Mapping[str, Grant]]:
        """Return the clients by GPU and grant id."""
        found: dict[str, dict[str, Grant]] = {}
        for grant in self._manager.ledger.grants.values():
            if grant.backend is Isolation.MPS:
                for share in grant.shares:
                    found.setdefault(share.device_uuid, {})[grant.grant_id] = grant
        return found

    def _report(self, grant: Grant, device_uuid: str) -> None:
        message = (
            f"the MPS daemon of {device_uuid} died and was restarted: container {grant.container} has lost its connection. "
            "Restart the container to use CUDA again"
        )
        self._events.record(
            PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, contract.EVENT_REASON_MPS_RESTARTED, message, warning=True)
        )
