# SPDX-License-Identifier: Apache-2.0
"""The ledger together with its files, changed in an order that is safe against a crash at any point.

Invariant: the ledger in memory contains at least the grants on disk, and the row on disk is there before a container can use anything.

- Order of a grant: remove replaced grants; limits and region with a copy of the grant; row; CDI spec.
- Order of a release: CDI spec; limits and region; row.

So a crash can leave four states. A row without files: the next PreStart completes it. Files with a copy and no row: the copy becomes the
row. Files of a container next to the row of an earlier container with the same IDs: the next PreStart or the end of that pod corrects it,
since no container starts before PreStart has replied. Files without row and copy: they are swept. The row is written after its files,
because writing files can fail, and a row without matching files would be useless at the next start.

One thread does all file work, one change at a time. Grants that wait for it are written as one group: the files of each, then all rows
with one sync of their directory, then the specs. So the order above holds for each grant, and a crash leaves each in one of those four
states. An error concerns its own grant only. Another thread reads usage regions, since containers can make that slow.

A container runtime uses CDI specs as it read them a moment ago (``core.cdi_scans``), and the name of a spec comes from the IDs, which the
next container may have too. So a spec is never replaced. The earlier spec is removed, and the new one is written when the runtime has
forgotten the earlier one; a start in between fails and kubelet retries. A start that closely follows others is answered once the runtime
has begun to read its spec. Other starts do not wait meanwhile, and an unchanged spec needs no wait.
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
from agent.core.inventory import DeviceInventory
from agent.core.ledger import Grant, Ledger
from agent.core.limits import pausing
from agent.core.planning import Planned
from agent.core.reconciliation import orphans
from agent.core.region_layout import Limits
from agent.errors import StorageError
from agent.ports.clock import Clock
from agent.ports.grants import CdiFiles, ContainerFiles, GrantStore
from agent.services.changes import Changes
from agent.services.group_queue import GroupQueue

logger = logging.getLogger(__name__)

T = TypeVar("T")
Spec = Mapping[str, object]

RUNTIME_PACE = ScanPace()
GROUP_MOST = 32
"""Grants that are written together. A group takes some 50 ms; releases and comparisons wait for it."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Grants and files on disk at one moment, by grant id."""

    grants: Mapping[str, Grant]
    files: Mapping[str, FilesOfGrant]


@dataclass(frozen=True, slots=True)
class _Written:
    """How far the write of a CDI spec has come."""

    ready_at: float
    """When it may be written or, once written, when containers get it; monotonic."""
    left: Spec | None = None
    """The spec that is still to write; None when it is written."""
    changed: bool = False
    """Whether the runtime has to scan the specs again."""


@dataclass(frozen=True, slots=True)
class _Write:
    """The files of a grant that are to be written."""

    grant: Grant
    limits: Limits
    spec: Callable[[], Spec]
    replaced: Sequence[str] = ()
    """Ids of grants whose files are removed first."""
    mounted: bool = False


class GrantManager:
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
        """Args: pace: how fast the runtime reads CDI specs. pause: waits for about this many seconds of the clock."""
        self._store = store
        self._files = files
        self._cdi = cdi
        self._clock = clock
        self._pace = pace
        self._pause = pause
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._regions = ThreadPoolExecutor(1, thread_name_prefix="regions")
        self._changing = asyncio.Lock()
        self._writes = GroupQueue(self._changing, self._carry_out, GROUP_MOST)
        self._unsettled: Counter[str] = Counter()
        """Ids of grants with a file change in progress."""
        self._spec_digests: dict[str, str] = {}
        """Digests of the CDI specs as written, or as first seen; by grant id."""
        self._written_limits: dict[str, Limits] = {}
        """Limits as written, or as first seen; by grant id."""
        self._forgotten_at: dict[str, float] = {}
        """By grant id, from when on the runtime has forgotten the spec that was removed last; monotonic, kept for a while."""
        self._backlog = ScanBacklog()
        self.ledger = Ledger()
        self.changes = Changes()
        """Counts grants with written files, released grants, and grants that ended before their files were written."""

    def load(self, boot_id: str) -> None:
        """Read the ledger at the start. Raises StorageError when the directory itself cannot be read."""
        loaded = self._store.load()
        for quarantined in loaded.quarantined:
            logger.error("damaged ledger row ignored: %s", quarantined)
        known = {grant.grant_id for grant in loaded.grants}
        copies = [grant for grant in self._files.copies() if grant.grant_id not in known]
        for grant in copies:
            logger.warning("ledger row lost; the copy next to the container's files is used", extra={"grant": grant.grant_id})
        for identifier, error in self._store.write(copies).items():  # the copy serves as the row; the reconciler writes it later
            logger.warning("ledger row not restored yet: %s", error, extra={"grant": identifier})
        self.ledger = self.ledger.adopting((*loaded.grants, *copies))
        self.ledger = self.ledger.with_unclear(self._unclear(loaded.damaged))
        forgetting_seconds = self._pace.forgetting_seconds(self._cdi.total_bytes())
        # the agent may have crashed between the removal of a spec and the write of the next
        self._forgotten_at = dict.fromkeys(self.ledger.grants, self._clock.monotonic() + forgetting_seconds)
        earlier = sum(grant.boot_id != boot_id for grant in loaded.grants)
        logger.info("ledger loaded", extra={"grants": len(self.ledger.grants), "of_earlier_boots": earlier})

    def _unclear(self, damaged_rows: Set[str]) -> Mapping[str, Set[str]]:
        """Return the grants that were once made and cannot be read, with their devices as far as the limits file names them.

        A CDI spec is written after row and copy and removed before them, so one without both is no leftover of a crash. A process that
        holds a lock in a usage region runs.
        """
        on_disk = [identifier for identifier in self._files.ids() if identifier not in self.ledger.grants]
        live = {identifier for identifier in on_disk if (view := self._files.region(identifier)) is not None and view.live}
        found = (damaged_rows | self._files.damaged_copies() | set(self._cdi.ids()) | live) - self.ledger.grants.keys()
        unclear = {}
        for identifier in sorted(found):
            limits = self._files.limits(identifier)
            unclear[identifier] = frozenset(device.uuid for device in limits.devices) if limits is not None else frozenset[str]()
            logger.error(
                "ledger row and its copy are damaged: nothing more is granted on %s until this grant's container has ended",
                ", ".join(sorted(unclear[identifier])) or "any GPU",
                extra={"grant": identifier},
            )
        return unclear

    def settle_unclear(self, grant_ids: Iterable[str]) -> None:
        """Forget unclear grants after their containers have ended: their files are strays now."""
        gone = set(grant_ids)
        self.ledger = self.ledger.with_unclear({known: names for known, names in self.ledger.unclear.items() if known not in gone})
        self.changes.notify()

    async def commit(
        self,
        planned: Planned,
        limits: Limits,
        spec: Callable[[], Spec],
        inventory: DeviceInventory,
        shares_per_gpu: int,
        ready: Callable[[], Awaitable[None]] | None = None,
        *,
        mounted: bool = False,
        start_seconds: float = 0.0,
    ) -> None:
        """Add a planned grant to the ledger, write its files, and wait until a container gets them.

        There must be no await between planning and this call. The grant is in the ledger at once and stays there when the caller is
        cancelled or a file fails: the next PreStart finds it.

        Args:   spec: makes the CDI spec; called with the files in place.
                ready: prepares what the spec names; called with the grant in the ledger, before any file is written.
                mounted: whether running containers may have its files, so that intact ones are kept.
                start_seconds: the least time until the runtime looks for the spec.
        Raises: StorageError, and the errors of ``ready`` and ``spec``.
        """
        grant = planned.grant
        replaced = [earlier.grant_id for earlier in planned.superseded]
        self.ledger = self.ledger.releasing(replaced).granting(grant, inventory, shares_per_gpu)

        async def change() -> None:
            if ready is not None:
                await ready()
            await self._until(await self._write_files(_Write(grant, limits, spec, replaced, mounted)) - start_seconds)

        await self._whole((grant.grant_id, *replaced), change())

    async def rewrite(self, grant: Grant, limits: Limits, spec: Callable[[], Spec]) -> None:
        """Write the files of a grant again; do nothing when it has ended. Raises the same errors as ``commit``."""

        async def change() -> None:
            await self._write_files(_Write(grant, limits, spec, mounted=True))

        await self._whole((grant.grant_id,), change())

    async def pause(self, grant: Grant, *, paused: bool) -> bool:
        """Pause or resume the launches of a container; return whether its grant still exists. Raises StorageError."""
        return await self.change_limits(grant, partial(pausing, paused=paused))

    async def change_limits(self, grant: Grant, change: Callable[[Limits], Limits]) -> bool:
        """Change the limits of a container on purpose; return whether its grant still exists. Raises StorageError."""

        def work() -> bool:
            self._files.amend_limits(grant.grant_id, change)
            written = self._written_limits.get(grant.grant_id)
            if written is not None:
                self._written_limits[grant.grant_id] = change(written)
            return True

        return bool(await self._change(partial(self._is_current, grant), work))

    async def release(self, grants: Iterable[Grant]) -> None:
        """Remove the files and rows of grants, then the grants themselves; an error with one does not stop the others.

        Raises StorageError at the end. It names every grant that stays because its files cannot be removed.
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
            raise StorageError(f"{len(failed)} of {len(over)} ended grants cannot be released: {which}") from failed[0][1]

    async def survey(self, leaving_out: Set[str] = frozenset()) -> Survey:
        """Read ledger and files at one moment. Grants with a change in progress are left out, too.

        Raises StorageError.
        """
        async with self._changing:
            skipped = leaving_out | frozenset(self._unsettled)
            granted = {identifier: grant for identifier, grant in self.ledger.grants.items() if identifier not in skipped}
            files = await self.on_disk(lambda: self._look(granted.keys(), skipped))
        return Survey(granted, files)

    async def are_complete(self, grants: Sequence[Grant]) -> bool:
        """Whether every grant is current and has all its files. Raises StorageError."""

        def work() -> bool:
            found = [(grant, self._files_of(grant.grant_id)) for grant in grants]
            return all(files.row == grant and files.limits and files.region and files.spec for grant, files in found)

        return all(map(self._is_current, grants)) and await self.on_disk(work)

    async def sweep(self) -> Sequence[str]:
        """Remove files without a grant; return the grant ids of removed files. Raises StorageError when the files cannot be listed."""
        on_disk = await self.on_disk(self._ids)
        swept = []
        for identifier in orphans(sorted(on_disk - self.ledger.unclear.keys()), self.ledger.grants):
            try:
                await self._change(partial(self._is_orphan, identifier), partial(self._remove, identifier))
            except StorageError as exc:
                logger.warning("files without a grant not removed: %s", exc, extra={"grant": identifier})
            else:
                swept.append(identifier)
        return swept

    @property
    def settled(self) -> bool:
        """Whether no change of a grant's files is in progress."""
        return not self._unsettled

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run file work in the thread for files."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def on_regions(self, look: Callable[[], T]) -> T:
        """Read usage regions in their own thread, so that a starting container does not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._regions, look)

    def close(self) -> None:
        """Wait for the work in the threads."""
        for thread in (self._disk, self._regions):
            thread.shutdown(wait=True)

    def _is_current(self, grant: Grant) -> bool:
        return self.ledger.grants.get(grant.grant_id) is grant

    def _is_orphan(self, grant_id: str) -> bool:
        return grant_id not in self.ledger.grants and grant_id not in self.ledger.unclear

    async def _write_files(self, write: _Write) -> float:
        """Write the files of a grant, the spec last, after the runtime has forgotten the earlier one. Return when containers get it."""
        grant = write.grant
        written = await self._writes.add(grant.grant_id, write)
        while written is not None and written.left is not None:
            await self._until(written.ready_at)
            again = partial(self._write_specs, {grant.grant_id: partial(_given, written.left)})
            outcomes = await self._change(partial(self._is_current, grant), again)
            written = _result(outcomes[grant.grant_id]) if outcomes is not None else None
        return written.ready_at if written is not None else self._clock.monotonic()

    async def _carry_out(self, writes: Sequence[_Write]) -> Sequence[_Written | Exception | None]:
        """Write the files of a group; None for grants that ended while other changes ran."""
        wanted = [write for write in writes if self._is_current(write.grant)]
        outcomes = await self.on_disk(partial(self._write_group, wanted)) if wanted else {}
        self.changes.notify()  # also without a change: what was prepared for it is unused now
        return [outcomes.get(write.grant.grant_id) for write in writes]

    async def _until(self, moment: float) -> None:
        while (left := moment - self._clock.monotonic()) > 0:
            await self._pause(left)

    async def _change(self, still_wanted: Callable[[], bool], work: Callable[[], T]) -> T | None:
        """Make one change of the files and return its result; None when its grant ended while other changes ran."""
        async with self._changing:
            result = await self.on_disk(work) if still_wanted() else None
            self.changes.notify()  # also without a change: what was prepared for it is unused now
            return result

    async def _whole(self, grant_ids: Iterable[str], change: Coroutine[None, None, None]) -> None:
        """Run a change to its end, also when the caller is cancelled."""
        concerned = tuple(grant_ids)
        self._unsettled.update(concerned)

        async def settle() -> None:
            try:
                await change
            finally:
                self._unsettled.subtract(concerned)
                for identifier in concerned:
                    if not self._unsettled[identifier]:
                        del self._unsettled[identifier]

        task = asyncio.ensure_future(settle())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(_log_failure, concerned))
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

    def _write_group(self, writes: Sequence[_Write]) -> Mapping[str, _Written | Exception]:
        begun = {write.grant.grant_id: _attempt(partial(self._begin, write)) for write in writes}
        failed: dict[str, Exception] = {identifier: error for identifier, error in begun.items() if isinstance(error, Exception)}
        failed |= self._store.write([write.grant for write in writes if write.grant.grant_id not in failed])
        return failed | self._write_specs({write.grant.grant_id: write.spec for write in writes if write.grant.grant_id not in failed})

    def _begin(self, write: _Write) -> None:
        for identifier in write.replaced:
            self._remove(identifier)
        self._files.prepare(write.grant, write.limits, mounted=write.mounted)
        self._written_limits[write.grant.grant_id] = write.limits

    def _write_specs(self, specs: Mapping[str, Callable[[], Spec]]) -> dict[str, _Written | Exception]:
        """Write specs as far as the runtime has forgotten earlier ones of their names."""
        with self._cdi.one_look():
            outcomes = {identifier: _attempt(partial(self._write_spec, identifier, spec)) for identifier, spec in specs.items()}
        changed = [identifier for identifier, one in outcomes.items() if isinstance(one, _Written) and one.changed]
        spec_bytes = _attempt(self._cdi.total_bytes) if changed else 0
        for identifier in changed:
            outcomes[identifier] = _Written(self._scanned(spec_bytes)) if isinstance(spec_bytes, int) else spec_bytes
        return outcomes

    def _write_spec(self, grant_id: str, make: Callable[[], Spec]) -> _Written:
        """Write a spec if no container can get an earlier spec of this name; else remove that one and return when to write."""
        spec = make()
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
        return _Written(self._clock.monotonic(), changed=True)

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
        """Record that the runtime rescans the specs after a change; return when containers get the change."""
        now, scan_seconds = self._clock.monotonic(), self._pace.scan_seconds(spec_bytes)
        before, self._backlog = self._backlog, self._backlog.changed(now, scan_seconds)
        return before.seen_from(now, scan_seconds)


def _attempt(work: Callable[[], T]) -> T | Exception:
    """Return an error as a value: other grants of its group go on."""
    try:
        return work()
    except Exception as exc:  # noqa: BLE001 - raised where its grant is awaited
        return exc


def _given(spec: Spec) -> Spec:
    return spec


def _result(outcome: T | Exception) -> T:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _log_failure(grant_ids: Sequence[str], change: "asyncio.Future[None]") -> None:
    """Log why a change failed after its caller was cancelled, such as by kubelet's deadline."""
    if not change.cancelled() and (exc := change.exception()) is not None:
        logger.warning("change of a grant's files failed, the next attempt repeats it: %s", exc, extra={"grants": grant_ids})
