"""The ledger together with its files, changed in an order that a crash at any point leaves safe.

Kept true: the ledger in memory promises at least what the files on disk do, and the row on disk is there before anything a
container could use. Granting: the grants that are replaced go first, then limits and region with a copy of the grant, row, CDI spec.
Releasing: CDI spec, limits and region, row. So whatever a crash leaves is a row without files, which the next PreStart completes;
files whose copy becomes the row; files of a container beside the row of the one that had its IDs before, which the next PreStart or
the end of that pod sets right, since no container starts before its PreStart was answered; or files without either, which are swept.
The row comes after the files it speaks of, because files can be refused: of a row that no files fit, nothing good would come at the
next start. One thread does all file work, one change at a time. Another looks at usage regions, which containers can make slow to look at.

A runtime gives containers what it read of the specs a moment ago (``core.cdi_scans``), and the name of a spec is that of the IDs, which the
next container may have as well. So a spec is never replaced: the earlier one is removed, and the new one written when no container can get
the earlier one any more, so that what comes too early for the runtime is an error and kubelet tries again. A start that follows others
closely is answered when the runtime has begun to read its spec. Nobody else waits meanwhile, and a spec that stays as it is costs nothing.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from agent.core.cdi_scans import ScanBacklog, ScanPace
from agent.core.drift import FilesOfGrant
from agent.core.inventory import DeviceBoard
from agent.core.ledger import Grant, Ledger
from agent.core.limits import pausing
from agent.core.planning import Planned
from agent.core.reconciliation import orphans
from agent.core.region_layout import Limits
from agent.errors import StorageError
from agent.ports import CdiFiles, Clock, ContainerFiles, GrantStore
from agent.services.changes import Changes

logger = logging.getLogger(__name__)

T = TypeVar("T")
Spec = Mapping[str, object]

RUNTIME_PACE = ScanPace()


@dataclass(frozen=True, slots=True)
class Survey:
    """What is promised and what lies on the disk, as of one moment, by grant id."""

    grants: Mapping[str, Grant]
    files: Mapping[str, FilesOfGrant]


@dataclass(frozen=True, slots=True)
class _Written:
    """How far a CDI spec is."""

    ready_at: float
    """From then on it may be written, or containers get it; monotonic."""
    left: Spec | None = None
    """What is left to write; None when it is written."""


class GrantBook:
    """Grants, in memory and on disk."""

    def __init__(
        self,
        store: GrantStore,
        files: ContainerFiles,
        cdi: CdiFiles,
        clock: Clock,
        pace: ScanPace = RUNTIME_PACE,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args: pace: how fast the runtime reads CDI specs. pause: waits for about so many seconds of the clock."""
        self._store = store
        self._files = files
        self._cdi = cdi
        self._clock = clock
        self._pace = pace
        self._pause = pause
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._regions = ThreadPoolExecutor(1, thread_name_prefix="regions")
        self._changing = asyncio.Lock()
        self._unsettled: Counter[str] = Counter()
        """Grant ids whose files are being brought in line with the ledger."""
        self._spec_digests: dict[str, str] = {}
        """Of the CDI specs as they were written, or first seen."""
        self._written_limits: dict[str, Limits] = {}
        """Likewise."""
        self._forgotten_at: dict[str, float] = {}
        """By grant id, when no container gets the spec any more that was removed last; monotonic, kept for a while."""
        self._backlog = ScanBacklog()
        self.ledger = Ledger()
        self.changes = Changes()
        """Counts grants whose files were written, those that were released, and those that were over before their files were written."""

    def load(self, boot_id: str) -> None:
        """Read the ledger at the start. Raises StorageError when the directory itself cannot be read."""
        loaded = self._store.load()
        for quarantined in loaded.quarantined:
            logger.error("a ledger row is damaged and does not count: %s", quarantined)
        known = {grant.grant_id for grant in loaded.grants}
        copies = [grant for grant in self._files.copies() if grant.grant_id not in known]
        for grant in copies:
            logger.warning("a ledger row was lost; its copy beside the container's files is used", extra={"grant": grant.grant_id})
            try:
                self._store.write(grant)
            except StorageError as exc:  # the copy stands for the row, and reconciling writes it once that is possible
                logger.warning("the ledger row is not written again yet: %s", exc, extra={"grant": grant.grant_id})
        self.ledger = self.ledger.adopting((*loaded.grants, *copies))
        forgetting_seconds = self._pace.forgetting_seconds(self._cdi.total_bytes())
        # a crash may have come between the removal of a spec and the writing of the next
        self._forgotten_at = dict.fromkeys(self.ledger.grants, self._clock.monotonic() + forgetting_seconds)
        earlier = sum(grant.boot_id != boot_id for grant in loaded.grants)
        logger.info("ledger loaded", extra={"grants": len(self.ledger.grants), "of_earlier_boots": earlier})

    async def commit(
        self,
        planned: Planned,
        limits: Limits,
        spec: Callable[[], Spec],
        board: DeviceBoard,
        shares_per_gpu: int,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Enter a planned grant and write its files, and wait until a container gets them. Await nothing between planning and this.

        The promise stands from the first moment, also when the caller is cancelled or the files fail: the next PreStart finds it.

        Args:   spec: makes the CDI spec; called with the files in place.
                ready: makes ready what the spec names, with the promise made and before anything is written.
        Raises: StorageError, or whatever ``ready`` and ``spec`` raise.
        """
        grant = planned.grant
        replaced = [earlier.grant_id for earlier in planned.superseded]
        self.ledger = self.ledger.releasing(replaced).granting(grant, board, shares_per_gpu)

        def begin() -> _Written:
            for identifier in replaced:
                self._remove(identifier)
            return self._write(grant, limits, spec)

        async def change() -> None:
            if ready is not None:
                await ready()
            await self._until(await self._write_all(grant, begin))

        await self._whole((grant.grant_id, *replaced), change())

    async def rewrite(self, grant: Grant, limits: Limits, spec: Callable[[], Spec]) -> None:
        """Write the files of a grant again, as they should be; nothing happens when it is over. Raises as ``commit`` does."""

        async def change() -> None:
            await self._write_all(grant, partial(self._write, grant, limits, spec, mounted=True))

        await self._whole((grant.grant_id,), change())

    async def pause(self, grant: Grant, *, paused: bool) -> bool:
        """Let the launches of a container wait, or go on, from now on; return whether it was not over. Raises StorageError."""

        def work() -> bool:
            change = partial(pausing, paused=paused)
            self._files.amend_limits(grant.grant_id, change)
            written = self._written_limits.get(grant.grant_id)
            if written is not None:
                self._written_limits[grant.grant_id] = change(written)
            return True

        return bool(await self._change(partial(self._is_current, grant), work))

    async def release(self, grants: Iterable[Grant]) -> None:
        """Remove files and rows of grants that are over, and then the promises: of each, whatever becomes of the others.

        Raises StorageError at the end, with every grant that stays promised because its files cannot be removed.
        """
        over = tuple(grants)
        failed: list[tuple[str, StorageError]] = []
        for grant in over:
            try:
                await self._whole((grant.grant_id,), self._release(grant))
            except StorageError as exc:
                failed.append((grant.grant_id, exc))
        if failed:
            which = "; ".join(f"{identifier}: {exc}" for identifier, exc in failed)
            raise StorageError(f"{len(failed)} of {len(over)} grants that are over cannot be released: {which}") from failed[0][1]

    async def survey(self, leaving_out: Set[str] = frozenset()) -> Survey:
        """Look at ledger and files as of one moment; grants that are being changed at this moment are left out as well.

        Raises StorageError.
        """
        async with self._changing:
            skipped = leaving_out | frozenset(+self._unsettled)
            granted = {identifier: grant for identifier, grant in self.ledger.grants.items() if identifier not in skipped}
            files = await self.on_disk(lambda: self._look(granted.keys(), skipped))
        return Survey(granted, files)

    async def sweep(self) -> Sequence[str]:
        """Remove files that belong to no grant; return the grant ids of those that are gone. Raises StorageError when looking fails."""
        on_disk = await self.on_disk(self._ids)
        swept = []
        for identifier in orphans(sorted(on_disk), self.ledger.grants):
            try:
                await self._change(partial(self._is_orphan, identifier), partial(self._remove, identifier))
            except StorageError as exc:
                logger.warning("files that belong to no grant stay: %s", exc, extra={"grant": identifier})
            else:
                swept.append(identifier)
        return swept

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run file work in the thread for it."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def on_regions(self, look: Callable[[], T]) -> T:
        """Look at usage regions, in the thread for that: no container that starts waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._regions, look)

    def close(self) -> None:
        """Let work in the threads that has begun finish."""
        for thread in (self._disk, self._regions):
            thread.shutdown(wait=True)

    def _is_current(self, grant: Grant) -> bool:
        return self.ledger.grants.get(grant.grant_id) is grant

    def _is_orphan(self, grant_id: str) -> bool:
        return grant_id not in self.ledger.grants

    async def _write_all(self, grant: Grant, begin: Callable[[], _Written]) -> float:
        """Write the files of a grant, the spec last and not before the earlier one is forgotten; return when containers get it."""
        still_wanted = partial(self._is_current, grant)
        written = await self._change(still_wanted, begin)
        while written is not None and written.left is not None:
            await self._until(written.ready_at)
            written = await self._change(still_wanted, partial(self._write_spec, grant.grant_id, written.left))
        return written.ready_at if written is not None else self._clock.monotonic()

    async def _until(self, moment: float) -> None:
        while (left := moment - self._clock.monotonic()) > 0:
            await self._pause(left)

    async def _change(self, still_wanted: Callable[[], bool], work: Callable[[], T]) -> T | None:
        """Do one change of the files and return what it tells; None when it became pointless while others were done."""
        async with self._changing:
            told = await self.on_disk(work) if still_wanted() else None
            self.changes.notify()  # a pointless one too: what was made ready for it is nobody's by now
            return told

    async def _whole(self, grant_ids: Iterable[str], change: Coroutine[None, None, None]) -> None:
        """Let a change run to its end, also when the caller is cancelled."""
        concerned = tuple(grant_ids)
        self._unsettled.update(concerned)

        async def settle() -> None:
            try:
                await change
            finally:
                self._unsettled.subtract(concerned)
                self._unsettled = +self._unsettled

        task = asyncio.ensure_future(settle())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(_say_failure, concerned))
            raise

    async def _release(self, grant: Grant) -> None:
        await self._change(partial(self._is_current, grant), partial(self._remove, grant.grant_id))
        if self._is_current(grant):
            self.ledger = self.ledger.releasing((grant.grant_id,))
            self.changes.notify()

    # --- in the thread for files ---

    def _ids(self) -> set[str]:
        return {*self._store.ids(), *self._files.ids(), *self._cdi.ids()}

    def _look(self, granted: Iterable[str], skipped: Set[str]) -> Mapping[str, FilesOfGrant]:
        return {identifier: self._files_of(identifier) for identifier in {*self._ids(), *granted} - skipped}

    def _files_of(self, grant_id: str) -> FilesOfGrant:
        spec = self._cdi.digest(grant_id)
        if spec is not None and grant_id in self.ledger.grants:
            self._spec_digests.setdefault(grant_id, spec)
        limits = self._files.limits(grant_id)
        if limits is not None and grant_id in self.ledger.grants:
            self._written_limits.setdefault(grant_id, limits)
        return FilesOfGrant(
            row=self._store.read(grant_id),
            limits=limits,
            written_limits=self._written_limits.get(grant_id),
            region=self._files.has_region(grant_id),
            spec=spec,
            written_spec=self._spec_digests.get(grant_id),
        )

    def _write(self, grant: Grant, limits: Limits, spec: Callable[[], Spec], *, mounted: bool = False) -> _Written:
        self._files.prepare(grant, limits, mounted=mounted)
        self._written_limits[grant.grant_id] = limits
        self._store.write(grant)
        return self._write_spec(grant.grant_id, spec())

    def _write_spec(self, grant_id: str, spec: Spec) -> _Written:
        """Write a spec if no container can get an earlier one of that name; else see to it that none can, later on."""
        found, wanted = self._cdi.digest(grant_id), self._cdi.digest_of(spec)
        if found == wanted:
            self._spec_digests[grant_id] = wanted
            return _Written(self._clock.monotonic())
        if found is not None:
            self._remove_spec(grant_id)
        forgotten_at = self._forgotten_at.get(grant_id, -math.inf)
        if self._clock.monotonic() < forgotten_at:
            return _Written(forgotten_at, spec)
        self._cdi.write(grant_id, spec)
        self._spec_digests[grant_id] = wanted
        return _Written(self._scanned(self._cdi.total_bytes()))

    def _remove(self, grant_id: str) -> None:
        self._remove_spec(grant_id)
        self._written_limits.pop(grant_id, None)
        self._files.remove(grant_id)
        self._store.remove(grant_id)

    def _remove_spec(self, grant_id: str) -> None:
        spec_bytes = self._cdi.total_bytes()
        self._spec_digests.pop(grant_id, None)
        self._cdi.remove(grant_id)
        now = self._clock.monotonic()
        self._forgotten_at = {known: moment for known, moment in self._forgotten_at.items() if moment > now}
        self._forgotten_at[grant_id] = now + self._pace.forgetting_seconds(spec_bytes)
        self._scanned(spec_bytes)

    def _scanned(self, spec_bytes: int) -> float:
        """Take note that the runtime scans the specs once more because of what was changed just now; return when containers get it."""
        now, scan_seconds = self._clock.monotonic(), self._pace.scan_seconds(spec_bytes)
        before, self._backlog = self._backlog, self._backlog.changed(now, scan_seconds)
        return before.seen_from(now, scan_seconds)


def _say_failure(grant_ids: Sequence[str], change: "asyncio.Future[None]") -> None:
    """Say why a change failed whose caller was cancelled, such as by kubelet's deadline, and hears nothing of it."""
    if not change.cancelled() and (exc := change.exception()) is not None:
        logger.warning("grants not brought in line with their files, which the next try does: %s", exc, extra={"grants": grant_ids})
