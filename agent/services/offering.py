"""What kubelet is offered at this moment: the IDs of every resource, from the GPUs as they are and what of them is promised."""

import asyncio
from collections.abc import Callable, Mapping

from agent.core.backends import Abilities, Offer, offer_of
from agent.core.inventory import AdvertisedDevice
from agent.core.mig import offered_devices, strategy_trouble
from agent.services.changes import Changes
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook


class Offering:
    """The IDs, and a count of the changes after which they may be others."""

    def __init__(self, watch: DriverWatch, book: GrantBook, shares_per_gpu: int, abilities: Callable[[], Abilities]) -> None:
        self._watch = watch
        self._book = book
        self._shares_per_gpu = shares_per_gpu
        self._abilities = abilities
        self.changes = Changes()

    def devices(self) -> Mapping[str, tuple[AdvertisedDevice, ...]]:
        """Return the IDs by resource."""
        return offered_devices(self._watch.board, self._book.ledger, self._shares_per_gpu, self._abilities().mig_strategy)

    def backends(self) -> Offer:
        """Return the enforcement backends that pods may ask for."""
        return offer_of(self._watch.board, self._abilities())

    @property
    def trouble(self) -> str:
        """Why GPUs are not offered as configured; empty while they are."""
        return strategy_trouble(self._watch.board, self._abilities().mig_strategy)

    async def run(self) -> None:
        """Count changes of the GPUs, and of what is promised: where MIG instances are made on demand, one takes room from others."""
        async with asyncio.TaskGroup() as group:
            for source in (self._watch.changes, self._book.changes):
                group.create_task(self._forward(source))

    async def _forward(self, source: Changes) -> None:
        seen = source.count
        self.changes.notify()
        while True:
            seen = await source.after(seen)
            self.changes.notify()
