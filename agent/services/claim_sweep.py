# SPDX-License-Identifier: Apache-2.0
"""Releases claims that kubelet has forgotten.

Kubelet calls Unprepare once the last pod of a claim ended. It cannot after it lost its state, or when the claim moved to another node.
So the API is asked about each prepared claim once a minute. A claim that was unused in two looks, and has no process, is released.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from agent.core.ledger import Grant
from agent.services.claim_requests import ClaimRequests
from agent.services.claims import ClaimManager
from agent.services.grant_manager import GrantManager
from agent.services.liveness import Liveness
from aliquot.contract.errors import ContractError
from aliquot.kube.errors import KubeApiError, KubeNotFoundError

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 60.0


class ClaimSweep:
    """Compares the prepared claims with the API."""

    def __init__(self, claims: ClaimManager, manager: GrantManager, liveness: Liveness, requests: ClaimRequests, node_name: str) -> None:
        """Args: manager: has the ledger with the grants of claims."""
        self._claims = claims
        self._manager = manager
        self._liveness = liveness
        self._requests = requests
        self._node_name = node_name
        self._absent: frozenset[str] = frozenset()
        """UIDs of the claims that the last look found unused."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Release each claim that was unused in this look and the one before, and has no process."""
        claims = {grant.owner_uid: grant for grant in self._manager.ledger.with_claims}
        absent = {uid for uid, grant in claims.items() if await self._is_unused(grant)}
        ended, self._absent = absent & self._absent, frozenset(absent)
        for uid in sorted(ended):
            await self._claims.release_if(uid, self._have_ended)

    async def _have_ended(self, grants: Sequence[Grant]) -> bool:
        """Whether no process of a claim still runs, and no pod has come to use it since the look."""
        signs = await self._liveness.signs(grants)
        return not signs.live and not signs.claimed and await self._is_unused(grants[0])

    async def _is_unused(self, grant: Grant) -> bool:
        """Whether the claim of a grant is gone, reserved for nothing, or on another node now. A request that fails proves nothing."""
        if grant.claim is None:
            return False
        try:
            claim = await self._requests.read(grant.namespace, grant.claim.name)
        except KubeNotFoundError:
            return True
        except (KubeApiError, ContractError) as exc:
            logger.warning("claim %s not compared: %s", grant.claim.name, exc)
            return False
        here = any(device.pool == self._node_name for request in claim.requests for device in request.devices)
        return claim.uid != grant.claim.uid or not claim.reserved or not here
