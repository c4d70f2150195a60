# SPDX-License-Identifier: Apache-2.0
"""Lowers the SM limit of containers that use more than their cores, for ``auditPolicy: throttle``.

The limit is lowered in the container's limits file, so it binds programs that launch in a way the shim charges too little for. A program
that does not read its limits file is not bound by it: only ``kill`` and ``evict`` end that. The lower limit lasts until the container has
kept to its cores for a while. It is not saved: the next agent gives every container its cores back, and lowers them again if need be.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from agent.core.audit import Finding
from agent.core.ledger import Grant
from agent.core.limits import with_sm_limit
from agent.core.region_layout import DeviceLimit
from agent.errors import StorageError
from agent.ports.clock import Clock
from agent.ports.grants import ContainerFiles
from agent.services.grant_manager import GrantManager

logger = logging.getLogger(__name__)

HOLD_SECONDS = 600.0
"""How long after the last finding the lower limit stays: it would be lowered again and again otherwise."""

Key = tuple[str, str]
"""A grant id and a device UUID."""


class Throttler:
    """The containers with a lowered limit."""

    def __init__(self, manager: GrantManager, files: ContainerFiles, clock: Clock) -> None:
        self._manager = manager
        self._files = files
        self._clock = clock
        self._until: dict[Key, float] = {}

    async def throttle(self, finding: Finding) -> bool:
        """Lower the SM limit that a finding is about; return whether it was not lowered before."""
        grant, key = self._manager.ledger.grants.get(finding.grant_id), (finding.grant_id, finding.device_uuid)
        if grant is None:
            return False
        known = key in self._until
        if not known and not await self._set(grant, finding.device_uuid, finding.throttled_percent):
            return False
        self._until[key] = self._clock.monotonic() + HOLD_SECONDS
        return not known

    async def settle(self) -> None:
        """Give containers their cores back: those that keep to them by now, and those that an earlier agent throttled."""
        now = self._clock.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        grants = self._manager.ledger.grants
        lowered = await asyncio.to_thread(self._lowered, tuple(grants.values()))
        for (grant_id, device_uuid), cores_percent in lowered.items():
            if (grant_id, device_uuid) not in self._until and (grant := grants.get(grant_id)) is not None:
                await self._set(grant, device_uuid, cores_percent)

    def _lowered(self, grants: Iterable[Grant]) -> Mapping[Key, int]:
        """Return the cores of the containers with a fixed SM limit below them."""
        found = {}
        for grant in grants:
            current = self._current(grant)
            for share in grant.shares:
                device = current.get(share.device_uuid)
                if device is not None and not device.sm_weight and 0 < device.sm_percent < (share.cores_percent or 0):
                    found[grant.grant_id, share.device_uuid] = share.cores_percent or 0
        return found

    def _current(self, grant: Grant) -> Mapping[str, DeviceLimit]:
        limits = self._files.limits(grant.grant_id) if grant.under_shim else None
        return {device.uuid: device for device in limits.devices} if limits is not None else {}

    async def _set(self, grant: Grant, device_uuid: str, percent: int) -> bool:
        try:
            done = await self._manager.change_limits(grant, partial(with_sm_limit, device_uuid=device_uuid, percent=percent))
        except StorageError as exc:
            logger.warning("audit: the SM limit is not changed: %s", exc, extra={"grant": grant.grant_id})
            return False
        if done:
            about = {"grant": grant.grant_id, "device_uuid": device_uuid, "pod_uid": grant.pod_uid}
            logger.warning("audit: SM limit of container %s set to %d %%", grant.container, percent, extra=about)
        return done
