# SPDX-License-Identifier: Apache-2.0
"""Finds pods that hold GPUs and do not use them, for the node's object in the API. The scheduler decides what that means for a pod.

A pod uses its GPUs while the counters of one of its containers change: launches, time on the GPU, waiting, refused memory, memory in use.
It also does while the driver's samples show work of its processes: one kernel may run for hours.

Invariant: what is not known counts as use. That is a container that does not run yet, a region that cannot be read, a driver that does not
say how busy processes are, a MIG instance, and a ResourceClaim. After a restart of the agent, every pod counts as in use at that moment.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.core.holdings import Holdings
from agent.core.ledger import Grant
from agent.core.tally import Tally
from agent.ports.clock import Clock
from agent.ports.grants import ContainerFiles, RegionView
from agent.services.changes import Changes
from agent.services.state import AgentState
from aliquot.contract.gpunode import IdlePod
from aliquot.contract.model import ContainerState

PERIOD_SECONDS: Final = 5.0
LEAST_SECONDS: Final = 60.0
"""A shorter pause is not reported: each report, and each end of one, is a write to the API."""
LIFE_SECONDS: Final = 600.0
"""How long a report is valid. It is renewed at half of this time."""


@dataclass(slots=True)
class _Watched:
    """A container between two looks."""

    owner: tuple[str, str]
    """Pod UID and container. The next container with the same device IDs has the same grant id."""
    tally: Tally
    sign: Hashable
    """Changes with each use."""
    used_at: float
    """Monotonic."""


class IdleWatch:
    """The loop."""

    def __init__(self, *, state: AgentState, files: ContainerFiles, holdings: Callable[[], Holdings], clock: Clock) -> None:
        self._pods = state.pods
        self._manager = state.manager
        self._files = files
        self._holdings = holdings
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        """By grant id."""
        self.pods: tuple[IdlePod, ...] = ()
        """The idle pods as they are to be published, sorted by UID."""
        self.changes = Changes()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(PERIOD_SECONDS)

    async def step(self) -> None:
        """Look once."""
        grants = tuple(self._manager.ledger.grants.values())
        signs = await self._manager.on_regions(lambda: self._look(grants))
        now = self._clock.monotonic()
        used_at = {grant.grant_id: self._note(grant, *signs[grant.grant_id], now) for grant in grants}
        self._watched = {identifier: one for identifier, one in self._watched.items() if identifier in used_at}
        found = self._renewed(self._idle_since(grants, used_at, now))
        if found != self.pods:
            self.pods = found
            self.changes.notify()

    def _look(self, grants: Sequence[Grant]) -> Mapping[str, tuple[Tally, Hashable]]:
        """Return the tally of each container, and what changes with its use; None for the latter if that is unknown."""
        holdings = self._holdings()
        return {grant.grant_id: self._sign(grant, holdings) for grant in grants}

    def _sign(self, grant: Grant, holdings: Holdings) -> tuple[Tally, Hashable]:
        is_counted = grant.under_shim and grant.grant_id not in holdings.uncounted
        view = self._files.region(grant.grant_id) if is_counted else None
        if view is not None:
            return self._sign_of_counters(grant, holdings, view)
        is_unknown = is_counted or _may_be_busy(grant, holdings)
        return Tally.empty(len(grant.shares)), None if is_unknown else _used_bytes(grant, holdings)

    def _sign_of_counters(self, grant: Grant, holdings: Holdings, view: RegionView) -> tuple[Tally, Hashable]:
        tally = self._tally_of(grant).after(view.snapshot)
        if view.live and _may_be_busy(grant, holdings):
            return tally, None
        devices = [device for slot in view.snapshot.slots if slot.index not in view.dead for device in slot.devices]
        is_waiting = any(device.waiting for device in devices)
        return tally, None if is_waiting else (tally.totals, *(device.used_bytes for device in devices))

    def _tally_of(self, grant: Grant) -> Tally:
        watched = self._watched.get(grant.grant_id)
        return watched.tally if watched is not None and watched.owner == _owner(grant) else Tally.empty(len(grant.shares))

    def _note(self, grant: Grant, tally: Tally, sign: Hashable, now: float) -> float:
        """Note one look at a container; return when it was last used."""
        watched = self._watched.get(grant.grant_id)
        is_same = watched is not None and watched.owner == _owner(grant) and watched.sign == sign and sign is not None
        used_at = watched.used_at if watched is not None and is_same and self._runs(grant) else now
        self._watched[grant.grant_id] = _Watched(_owner(grant), tally, sign, used_at)
        return used_at

    def _runs(self, grant: Grant) -> bool:
        pod = self._pods.by_uid.get(grant.pod_uid)
        return pod is not None and pod.state_of(grant.container) is not ContainerState.WAITING

    def _idle_since(self, grants: Sequence[Grant], used_at: Mapping[str, float], now: float) -> Mapping[str, int]:
        """Return since when pods are idle, in seconds since 1970, by UID: the latest use of all their containers counts."""
        latest: dict[str, float] = {}
        for grant in grants:
            latest[grant.pod_uid] = max(latest.get(grant.pod_uid, 0.0), used_at[grant.grant_id])
        of_claims = {grant.pod_uid for grant in grants if grant.claim is not None}
        pods, seconds_since_1970 = self._pods.by_uid, self._clock.now()
        return {
            uid: int(seconds_since_1970 - (now - at))
            for uid, at in latest.items()
            if now - at >= LEAST_SECONDS and uid in pods and pods[uid].active and uid not in of_claims
        }

    def _renewed(self, idle_since: Mapping[str, int]) -> tuple[IdlePod, ...]:
        """Return the reports. One that is in force stays as it is until half of its time is over, so that nothing is written before."""
        now, known = int(self._clock.now()), {pod.pod_uid: pod for pod in self.pods}
        found: list[IdlePod] = []
        for uid, since in sorted(idle_since.items()):
            before = known.get(uid)
            is_same = before is not None and abs(before.since - since) < PERIOD_SECONDS  # the two clocks may drift
            if before is not None and is_same and before.until - now > LIFE_SECONDS / 2:
                found.append(before)
            else:
                found.append(IdlePod(uid, before.since if before is not None and is_same else since, now + int(LIFE_SECONDS)))
        return tuple(found)


def _may_be_busy(grant: Grant, holdings: Holdings) -> bool:
    """Whether the driver's samples show work of a container, or say nothing."""
    return any(holdings.utilization_ratio(grant.grant_id, share.device_uuid) != 0 for share in grant.shares)


def _used_bytes(grant: Grant, holdings: Holdings) -> Hashable:
    return tuple(holdings.used_bytes(grant.grant_id, share.device_uuid) for share in grant.shares)


def _owner(grant: Grant) -> tuple[str, str]:
    return grant.owner_uid, grant.container
