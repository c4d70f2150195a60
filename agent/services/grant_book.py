"""The ledger together with its files, changed in an order that a crash at any point leaves safe.

Kept true: the ledger in memory promises at least what the files on disk do, and the row on disk is there before anything a
container could use. Granting: the grants that are replaced go first, then row, limits and region, CDI spec. Releasing: CDI spec,
limits and region, row. So whatever a crash leaves is either a row without files, which the next PreStart completes, or files
without a row, which are swept. One thread does all file work, one change at a time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from agent.core.inventory import DeviceBoard
from agent.core.ledger import Grant, Ledger
from agent.core.planning import Planned
from agent.core.reconciliation import orphans
from agent.core.region_layout import Limits
from agent.ports import CdiFiles, ContainerFiles, GrantStore
from agent.services.changes import Changes

logger = logging.getLogger(__name__)

T = TypeVar("T")
Spec = Mapping[str, object]


class GrantBook:
    """Grants, in memory and on disk."""

    def __init__(self, store: GrantStore, files: ContainerFiles, cdi: CdiFiles) -> None:
        self._store = store
        self._files = files
        self._cdi = cdi
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._changing = asyncio.Lock()
        self.ledger = Ledger()
        self.changes = Changes()
        """Counts grants whose files were written, and those that were released."""

    def load(self, boot_id: str) -> None:
        """Read the ledger at the start. Raises StorageError when the directory itself cannot be read."""
        loaded = self._store.load()
        for quarantined in loaded.quarantined:
            logger.error("a ledger row was damaged and set aside: %s", quarantined)
        known = {grant.grant_id for grant in loaded.grants}
        copies = [grant for grant in self._files.copies() if grant.grant_id not in known]
        for grant in copies:
            logger.warning("a ledger row was lost; its copy beside the container's files is used", extra={"grant": grant.grant_id})
            self._store.write(grant)
        self.ledger = self.ledger.adopting((*loaded.grants, *copies))
        earlier = sum(grant.boot_id != boot_id for grant in loaded.grants)
        logger.info("ledger loaded", extra={"grants": len(self.ledger.grants), "of_earlier_boots": earlier})

    async def commit(self, planned: Planned, limits: Limits, spec: Callable[[], Spec], board: DeviceBoard, shares_per_gpu: int) -> None:
        """Enter a planned grant and write its files. To be called without awaiting anything since planning.

        The promise stands from the first moment, also when the caller is cancelled or the files fail: the next PreStart finds it.

        Args:   spec: makes the CDI spec; called with the files in place.
        Raises: StorageError, or whatever ``spec`` raises.
        """
        grant = planned.grant
        replaced = [earlier.grant_id for earlier in planned.superseded]
        self.ledger = self.ledger.releasing(replaced).granting(grant, board, shares_per_gpu)

        def write() -> None:
            for identifier in replaced:
                self._remove(identifier)
            self._store.write(grant)
            self._files.prepare(grant, limits)
            self._cdi.write(grant.grant_id, spec())

        await asyncio.shield(asyncio.ensure_future(self._change(partial(self._is_current, grant), write)))

    async def release(self, grants: Iterable[Grant]) -> None:
        """Remove files and rows of grants that are over, and then the promises. Raises StorageError at the first that fails."""
        for grant in grants:
            removal = self._change(partial(self._is_current, grant), partial(self._remove, grant.grant_id))
            await asyncio.shield(asyncio.ensure_future(removal))
            if self._is_current(grant):
                self.ledger = self.ledger.releasing((grant.grant_id,))
                self.changes.notify()

    async def sweep(self) -> Sequence[str]:
        """Remove files that belong to no grant; return their grant ids. Raises StorageError."""
        on_disk = await self.on_disk(lambda: {*self._store.ids(), *self._files.ids(), *self._cdi.ids()})
        swept = orphans(sorted(on_disk), self.ledger.grants)
        for identifier in swept:
            await self._change(partial(self._is_orphan, identifier), partial(self._remove, identifier))
        return swept

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run file work in the thread for it."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def close(self) -> None:
        """Let file work that has begun finish."""
        self._disk.shutdown(wait=True)

    def _is_current(self, grant: Grant) -> bool:
        return self.ledger.grants.get(grant.grant_id) is grant

    def _is_orphan(self, grant_id: str) -> bool:
        return grant_id not in self.ledger.grants

    async def _change(self, still_wanted: Callable[[], bool], work: Callable[[], None]) -> None:
        """Do one change of the files, unless it became pointless while others were done."""
        async with self._changing:
            if still_wanted():
                await self.on_disk(work)
                self.changes.notify()

    def _remove(self, grant_id: str) -> None:
        self._cdi.remove(grant_id)
        self._files.remove(grant_id)
        self._store.remove(grant_id)
