"""Whether processes of a grant still run, whatever became of its pod: memory they hold must not be promised to somebody else.

Two witnesses are heard. The locks in the usage region tell of processes under the shim at this moment, if /proc shows one of the pod: a
container may have handed the open file to another pod, and the lock with it. The last census tells of all that the driver lists, and /proc
whether they have ended since; of a process that entered a GPU after the last census it knows nothing. Before the first census all that the
shim does not witness counts as running, and later all of it on a GPU that did not tell the census. A region that is spoilt, or left alone
because its locks make it slow to look at, witnesses nothing.
"""

import asyncio
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from agent.core.ledger import Grant
from agent.core.liveness import PodsAtWork, Signs, gpus_of, processes_of, still_there
from agent.ports import ContainerFiles, Processes
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook
from agent.services.process_census import Census, ProcessCensus


@dataclass(frozen=True, slots=True)
class _Locks:
    """What usage regions tell, by grant id."""

    held: Set[str]
    """A slot of it is locked."""
    mute: Set[str]
    """It tells nothing: no shim writes it, or it cannot be looked at."""


class Liveness:
    """The two witnesses together."""

    def __init__(self, *, book: GrantBook, files: ContainerFiles, census: ProcessCensus, processes: Processes, watch: DriverWatch) -> None:
        self._book = book
        self._files = files
        self._census = census
        self._processes = processes
        self._watch = watch

    async def live(self, grants: Iterable[Grant]) -> Set[str]:
        """Return the ids of those grants of which a process runs, or may run by the lock it holds."""
        signs = await self.signs(grants)
        return signs.live | signs.claimed

    async def signs(self, grants: Iterable[Grant]) -> Signs:
        """Return the ids of those grants of which a process runs."""
        asked = tuple(grants)
        if not asked:
            return Signs(frozenset(), frozenset())
        locks = await self._book.on_regions(lambda: self._look(asked))
        own, claimed = await self._whose([grant for grant in asked if grant.grant_id in locks.held])
        return Signs(own | await self._at_work(asked, locks.mute), claimed)

    async def _whose(self, locked: Sequence[Grant]) -> tuple[Set[str], Set[str]]:
        """Return the grants whose locks their own pods may hold, and those of which that cannot be seen."""
        if not locked:
            return frozenset(), frozenset()
        pods = await asyncio.to_thread(lambda: PodsAtWork.of(self._processes.cgroups(), self._processes.own_cgroup()))
        runs = {grant.grant_id: pods.has(grant.pod_uid) for grant in locked}
        return {identifier for identifier, told in runs.items() if told}, {identifier for identifier, told in runs.items() if told is None}

    def _look(self, grants: Iterable[Grant]) -> _Locks:
        held, mute = set(), set()
        for grant in grants:
            view = self._files.region(grant.grant_id)
            if view is not None and view.live:
                held.add(grant.grant_id)
            if not grant.under_shim or (view is None and self._files.has_region(grant.grant_id)):
                mute.add(grant.grant_id)
        return _Locks(held, mute)

    async def _at_work(self, grants: Iterable[Grant], mute: Set[str]) -> Set[str]:
        census, parents = self._census.latest, self._watch.board.parents
        unwitnessed = frozenset(
            grant.grant_id for grant in grants if grant.grant_id in mute and (not census.heard or self._is_untold(grant, census))
        )
        seen = {grant.grant_id: processes_of(grant, census.listed, census.processes, parents) for grant in grants}
        known = {process.pid: process for processes in seen.values() for process in processes}
        if not known:
            return unwitnessed
        # not in the thread for files, which containers that start wait for
        there = still_there(known.values(), await asyncio.to_thread(self._processes.read, known.keys()))
        return unwitnessed | {identifier for identifier, processes in seen.items() if any(process.pid in there for process in processes)}

    def _is_untold(self, grant: Grant, census: Census) -> bool:
        """Whether a GPU of the grant did not tell who is on it, or may be one that does not answer and cannot be named yet."""
        board = self._watch.board
        gpus = gpus_of(grant, board.parents)
        if gpus is None:
            return bool(census.unknown or board.unidentified)
        nameless = bool(board.unidentified) and gpus.isdisjoint(entry.device.uuid for entry in board.devices)
        return nameless or not gpus.isdisjoint(census.unknown)
