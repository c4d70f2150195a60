# SPDX-License-Identifier: Apache-2.0
"""What kubelet is offered at this moment: the IDs of every resource, from the GPUs as they are and what of them is promised."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.core.backends import Abilities, Offer, offer_of
from agent.core.inventory import AdvertisedDevice
from agent.core.ledger import claims_trouble
from agent.core.mig import offered_devices, strategy_trouble
from agent.services.changes import Changes
from agent.services.driver_watch import DriverWatch
from agent.services.grant_manager import GrantManager
from aliquot.contract.model import Allocation


class Offering:
    """The IDs, and a count of the changes that may affect them."""

    def __init__(
        self,
        watch: DriverWatch,
        manager: GrantManager,
        shares_per_gpu: int,
        abilities: Callable[[], Abilities],
        allocation: Allocation = Allocation.PLUGIN,
    ) -> None:
        self._watch = watch
        self._manager = manager
        self._shares_per_gpu = shares_per_gpu
        self._abilities = abilities
        self._allocation = allocation
        self.changes = Changes()

    def devices(self) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
        """Return the IDs by resource.

        Where no new container may get IDs, they stay, as unhealthy ones, until the last container with such IDs has ended: kubelet calls
        the plugin again when that container restarts.
        """
        ledger, by_ids = self._manager.ledger, self._allocation.by_ids
        if not by_ids and not ledger.with_ids:
            return {}
        offered = offered_devices(self._watch.inventory, ledger, self._shares_per_gpu, self._abilities().mig_strategy)
        if by_ids and not claims_trouble(ledger, self._allocation):
            return offered
        return {name: tuple(replace(one, healthy=False) for one in ids) for name, ids in offered.items()}

    def backends(self) -> Offer:
        """Return the enforcement backends that pods may request."""
        return offer_of(self._watch.inventory, self._abilities())

    @property
    def trouble(self) -> str:
        """Why GPUs are not offered as configured; empty while they are."""
        return strategy_trouble(self._watch.inventory, self._abilities().mig_strategy)

    async def run(self) -> None:
        """Count changes of GPUs and grants, until cancelled. A MIG instance that is created on demand takes room from others."""
        async with asyncio.TaskGroup() as group:
            for source in (self._watch.changes, self._manager.changes):
                group.create_task(self.changes.follow(source))
