"""Has an MPS control daemon on each GPU that has MPS clients, by saying so to ``aliquot-mps``, which outlives the agent.

A server that died is made anew by its daemon when the next client comes; a daemon that died is started again by the supervisor as another
generation, and its clients are told by an event that their connection is lost. So they are after the supervisor itself was away. Which
generation each client was given stands in the wishes, so that an agent that starts anew misses nothing of this.

Kept true: a container counts as served only while the daemon that it started with runs. What begins in another finds no daemon where it
looks for one, and has the whole GPU.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set

from agent.core.cdi import NO_EDITS, Edits
from agent.core.ledger import Grant
from agent.core.metrics import Family, Kind, family
from agent.core.mps import client_edits, pipe_directory
from agent.core.mps_records import DaemonState, SupervisorState, Wish
from agent.errors import MpsError, StorageError
from agent.ports import MpsDaemons, PodEvent
from agent.services.changes import Changes
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from proto import contract
from proto.model import Isolation

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often the supervisor, and what it says of the daemons, is looked at."""
START_SECONDS = 15.0
"""How long a container waits for the daemon of its GPU: one that hangs on another GPU keeps the supervisor busy for ten seconds."""
POLL_SECONDS = 0.05
Models = Callable[[], Mapping[str, str]]
ABSENT = "no aliquot-mps runs on this node, which the component mps adds"


class MpsKeeper:
    """What this node's containers need of MPS daemons."""

    def __init__(
        self, node_name: str, daemons: MpsDaemons, directory: str, *, book: GrantBook, models: Models, events: EventRecorder
    ) -> None:
        """Args: directory: of the host, below which the daemons have theirs. models: of the GPUs, by UUID."""
        self._node_name = node_name
        self._models = models
        self._daemons = daemons
        self._directory = directory
        self._book = book
        self._events = events
        self._changing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._clients: dict[str, dict[str, str]] = {}
        """By GPU and grant id, the generation that a container was given, or was told of."""
        self._lost: dict[str, set[str]] = {}
        """By GPU, ids of the grants whose containers started with an earlier daemon."""
        self._generations: dict[str, str] = {}
        """By GPU, the daemon that runs, as of the last look."""
        self.unserved: Set[str] = frozenset()
        """Ids of the grants of clients whose daemon does not run any more, as of the last look; replaced as a whole."""
        self._wished: set[str] = set()
        """The GPUs whose wish this agent has written, or read."""
        self._restarts: dict[str, int] = {}
        self.supervisor_pid: int | None = None
        """The supervisor's process on the host, whose servers are on the GPUs; None while none lives."""
        self.trouble = ABSENT
        """Why no container can be a client now; empty while one can."""
        self.changes = Changes()
        """Counts the changes of ``trouble``."""

    async def load(self) -> None:
        """Remember what an earlier agent knew, and look whether there is a supervisor. Raises StorageError."""
        wishes = await asyncio.to_thread(self._daemons.load)
        self._clients = {device_uuid: dict(wish.clients) for device_uuid, wish in wishes.items()}
        self._lost = {device_uuid: set(wish.lost) for device_uuid, wish in wishes.items()}
        self._wished = set(wishes)
        try:
            await self._supervisor()
        except StorageError as exc:  # it is looked at again
            logger.warning("MPS: %s", exc)

    async def ensure(self, grant: Grant) -> Edits:
        """Return what the container needs, with the daemon of its GPU running; nothing for another backend.

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
            clients.pop(grant.grant_id, None)  # it starts now: it has nothing to lose
            self._lost.get(device_uuid, set()).discard(grant.grant_id)
            self._tell_of(state)
            clients[grant.grant_id] = self._generations[device_uuid] = state.generation
            self._judge()
            await self._want(device_uuid)
        return client_edits(share, pipe_directory(self._directory, device_uuid), supervisor.shared_memory)

    def families(self) -> Iterable[Family]:
        """Return how often a daemon had died, and whether there is a supervisor where there was one; for any thread."""
        models, restarts = self._models(), tuple(self._restarts.items())
        samples = [((self._node_name, device_uuid, models.get(device_uuid, "")), float(count)) for device_uuid, count in restarts]
        text = "MPS control daemons that had died, and were started again."
        yield family("mps_daemon_restarts_total", text, ("node", "device_uuid", "model"), samples, Kind.COUNTER)
        if self._clients or not self.trouble:
            up = "Whether aliquot-mps can start MPS daemons, 1 or 0; where it runs, or MPS clients do."
            yield family("mps_supervisor_up", up, ("node",), [((self._node_name,), 0.0 if self.trouble else 1.0)])

    async def run(self) -> None:
        """Look after the wishes for ever."""
        while True:
            seen = self._book.changes.count
            await self.look()
            await self._book.changes.after(seen, LOOK_SECONDS)

    async def look(self) -> None:
        """Want what has clients and nothing else, and tell clients whose daemon is another by now."""
        try:
            living = await self._supervisor() is not None
            stale = await asyncio.to_thread(self._daemons.wanted)
        except StorageError as exc:
            logger.warning("MPS: %s", exc)
            if self.trouble:  # which daemons run is not known
                self._generations.clear()
                self._judge()
            return
        for device_uuid in {*self._grants(), *stale, *self._clients}:
            async with self._changing[device_uuid]:
                try:
                    await self._look_at(device_uuid, living=living, wanted=device_uuid in stale)
                except StorageError as exc:
                    logger.warning("MPS: %s", exc, extra={"device_uuid": device_uuid})
                    self._generations.pop(device_uuid, None)
        self._judge()

    async def _look_at(self, device_uuid: str, *, living: bool, wanted: bool) -> None:
        grants = self._grants().get(device_uuid, {})
        if not grants:
            await asyncio.to_thread(self._daemons.withdraw, device_uuid)
            for kept in (self._clients, self._lost, self._generations):
                kept.pop(device_uuid, None)
            self._wished.discard(device_uuid)
            return
        clients = self._clients.setdefault(device_uuid, {})
        gone = clients.keys() - grants.keys()
        for grant_id in gone:
            del clients[grant_id]
        self._lost.get(device_uuid, set()).difference_update(gone)
        state = await asyncio.to_thread(self._daemons.state, device_uuid) if living else None
        self._generations[device_uuid] = state.generation if state is not None else ""
        told = state is not None and self._tell_of(state)
        if gone or told or not wanted or device_uuid not in self._wished:
            await self._want(device_uuid)

    def _tell_of(self, state: DaemonState) -> bool:
        """Tell the clients of an earlier generation that they have lost their connection; return whether there were any."""
        clients = self._clients.get(state.device_uuid, {})
        lost = [grant_id for grant_id, generation in clients.items() if generation != state.generation]
        if not state.generation or not lost:
            return False
        self._restarts[state.device_uuid] = self._restarts.get(state.device_uuid, 0) + 1
        grants = self._grants().get(state.device_uuid, {})
        for grant_id in lost:
            clients[grant_id] = state.generation
            self._lost.setdefault(state.device_uuid, set()).add(grant_id)
            if grant_id in grants:
                self._tell(grants[grant_id], state.device_uuid)
        return True

    def _judge(self) -> None:
        """Say which clients no daemon serves."""
        self.unserved = frozenset(
            grant_id
            for device_uuid, grants in self._grants().items()
            for grant_id in grants
            if not self._generations.get(device_uuid) or grant_id in self._lost.get(device_uuid, ())
        )

    async def _living(self) -> SupervisorState:
        """Return what the supervisor says. Raises MpsError where it can start no daemon, StorageError."""
        supervisor = await self._supervisor()
        if supervisor is None or self.trouble:
            raise MpsError(f"isolation mps is not available: {self.trouble}")
        return supervisor

    async def _supervisor(self) -> SupervisorState | None:
        """Look whether there is a supervisor. Raises StorageError."""
        before = self.trouble
        try:
            supervisor = await asyncio.to_thread(self._daemons.supervisor)
        except StorageError as exc:
            self.supervisor_pid, self.trouble = None, f"what aliquot-mps says is not to be read: {exc}"
            raise
        else:
            self.supervisor_pid = supervisor.pid if supervisor is not None else None
            self.trouble = supervisor.trouble if supervisor is not None else ABSENT
        finally:
            if self.trouble != before:
                self._say_trouble()
        return supervisor

    def _say_trouble(self) -> None:
        self.changes.notify()
        if self.trouble and self._clients:
            logger.warning("isolation mps is not available, and there are clients: %s", self.trouble)
        else:
            logger.info("isolation mps is available" if not self.trouble else f"isolation mps is not available: {self.trouble}")

    async def _want(self, device_uuid: str) -> None:
        wish = Wish(device_uuid, dict(self._clients.get(device_uuid, {})), tuple(sorted(self._lost.get(device_uuid, ()))))
        await asyncio.to_thread(self._daemons.want, wish)
        self._wished.add(device_uuid)

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
        raise MpsError(f"aliquot-mps has not started the MPS daemon of {device_uuid} within {START_SECONDS:g} s: see its log")

    def _grants(self) -> Mapping[str, Mapping[str, Grant]]:
        """Return the clients by GPU and grant id."""
        found: dict[str, dict[str, Grant]] = {}
        for grant in self._book.ledger.grants.values():
            if grant.backend is Isolation.MPS:
                for share in grant.shares:
                    found.setdefault(share.device_uuid, {})[grant.grant_id] = grant
        return found

    def _tell(self, grant: Grant, device_uuid: str) -> None:
        message = (
            f"the MPS daemon of {device_uuid} had died and was started again: container {grant.container} has lost its connection, "
            "and CUDA works again after the container restarts"
        )
        self._events.record(
            PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, contract.EVENT_REASON_MPS_RESTARTED, message, warning=True)
        )
