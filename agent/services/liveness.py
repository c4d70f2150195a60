# SPDX-License-Identifier: Apache-2.0
"""Finds out whether processes of a grant still run, with or without its pod: memory they hold must not be granted again.

There are two sources. First, the locks in the usage region show processes under the shim at this moment. They count if /proc shows a
process of the pod, since a container may have passed the open file, and with it the lock, to another pod. Second, the last census has all
processes that the driver lists, and /proc tells whether they have ended since. The census does not have a process that opened a GPU later.

Without a readable region, a grant counts as running until the first census, and later on each GPU that did not answer the census. A
damaged region, or one that is skipped because its locks make it slow to read, counts as unreadable.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.ledger import Grant
from agent.core.liveness import PodsAtWork, Signs, gpus_of, processes_of, still_there
from agent.core.overhead import HostProcess
from agent.ports.grants import ContainerFiles
from agent.ports.processes import Processes
from agent.services.driver_watch import DriverWatch
from agent.services.grant_manager import GrantManager
from agent.services.process_census import Census, ProcessCensus


@dataclass(frozen=True, slots=True)
class _Locks:
    """What usage regions show, by grant id."""

    held: Set[str]
    """A slot of it is locked."""
    mute: Set[str]
    """It shows no processes: the container runs without the shim, or the region cannot be read."""


class Liveness:
    """Both sources together."""

    def __init__(
        self, *, manager: GrantManager, files: ContainerFiles, census: ProcessCensus, processes: Processes, watch: DriverWatch
    ) -> None:
        self._manager = manager
        self._files = files
        self._census = census
        self._processes = processes
        self._watch = watch

    async def live(self, grants: Iterable[Grant]) -> Set[str]:
        """Return the ids of the grants with a process that runs, or may run because a lock is held."""
        signs = await self.signs(grants)
        return signs.live | signs.claimed

    async def signs(self, grants: Iterable[Grant]) -> Signs:
        """Return the ids of the grants with a running process, and of those with an unconfirmed lock."""
        asked = tuple(grants)
        if not asked:
            return Signs(frozenset(), frozenset())
        locks = await self._manager.on_regions(lambda: self._look(asked))
        own, claimed = await self._lock_owners([grant for grant in asked if grant.grant_id in locks.held])
        return Signs(own | await self._at_work(asked, locks.mute), claimed)

    def locked(self, grant_ids: Iterable[str]) -> Set[str]:
        """Return the grant ids with a lock in their usage region. Call it in the thread for regions."""
        return {one for one in grant_ids if (view := self._files.region(one)) is not None and view.live}

    async def _lock_owners(self, locked: Sequence[Grant]) -> tuple[Set[str], Set[str]]:
        """Return the grants with a lock held by their own pod, and those where this cannot be confirmed."""
        if not locked:
            return frozenset(), frozenset()
        pods = await asyncio.to_thread(lambda: PodsAtWork.of(self._processes.cgroups(), self._processes.own_cgroup()))
        runs = {grant.grant_id: _runs(grant, pods) for grant in locked}
        return {identifier for identifier, reported in runs.items() if reported}, {
            identifier for identifier, reported in runs.items() if reported is None
        }

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
        """Return the ids of grants with a listed process that still runs, or without any source. Args: mute: without a region."""
        census, parents = self._census.latest, self._watch.inventory.parents
        unknown = frozenset(grant.grant_id for grant in grants if grant.grant_id in mute and self._is_unknown(grant, census))
        seen = {grant.grant_id: processes_of(grant, census.listed, census.processes, parents) for grant in grants}
        there = await self._still_there({process.pid: process for processes in seen.values() for process in processes})
        return unknown | {identifier for identifier, processes in seen.items() if not there.isdisjoint(one.pid for one in processes)}

    async def _still_there(self, known: Mapping[int, HostProcess]) -> Set[int]:
        """Return the pids of the processes that still run. Not in the thread for files: starting containers wait for that one."""
        return still_there(known.values(), await asyncio.to_thread(self._processes.read, known.keys())) if known else frozenset()

    def _is_unknown(self, grant: Grant, census: Census) -> bool:
        """Whether the processes on a GPU of the grant are unknown, or the GPU may be one without a known UUID."""
        if not census.heard:
            return True
        inventory = self._watch.inventory
        gpus = gpus_of(grant, inventory.parents)
        if gpus is None:
            return bool(census.unknown or inventory.unidentified)
        nameless = bool(inventory.unidentified) and gpus.isdisjoint(entry.device.uuid for entry in inventory.devices)
        return nameless or not gpus.isdisjoint(census.unknown)


def _runs(grant: Grant, pods: PodsAtWork) -> bool | None:
    """Whether the pod of a grant runs; None if that is unknown. A later pod of a claim, which is not recorded, may have the lock."""
    reported = pods.has(grant.pod_uid)
    return None if reported is False and grant.claim is not None else reported
