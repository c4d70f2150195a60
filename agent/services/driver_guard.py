"""Ends the agent when the driver was changed underneath and this container cannot follow.

A container has the driver's library that the node had when the container was made. The library that is found here is loaded anew at each
look, which cures what can be cured in this process; the rest only another container does, and it comes when this one ends. A sick GPU, a
driver that is not there or one that hangs is no reason: another container would meet the same.
"""

import asyncio
from collections.abc import Callable

from agent.errors import DriverError, DriverMismatchError
from agent.services.driver_watch import DriverWatch

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""How long library and kernel module may differ: while a driver is being installed they do."""
FIRST_PATIENCE_SECONDS = 600.0
"""The same where the driver has not answered this process yet. Then they may differ on the node itself, until it is rebooted, and another
container helps only if this one was made in the middle of an upgrade. By then kubelet has forgotten the end before: it starts at once."""


class DriverGuard:
    """Looks at what the driver's readings brought every few seconds."""

    def __init__(self, watch: DriverWatch, monotonic: Callable[[], float]) -> None:
        self._watch = watch
        self._monotonic = monotonic
        self._since: float | None = None
        """When library and module were first found to differ, if they still do."""

    async def run(self) -> None:
        """Look for ever. Raises DriverError when library and module have differed for too long."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Look once. Raises DriverError."""
        if not isinstance(self._watch.failure, DriverMismatchError):
            self._since = None
            return
        now = self._monotonic()
        self._since = now if self._since is None else self._since
        patience_seconds = PATIENCE_SECONDS if self._watch.answered else FIRST_PATIENCE_SECONDS
        if now - self._since >= patience_seconds:
            raise DriverError(
                f"the driver's library here and the loaded kernel module have had different versions for {patience_seconds:g} s. "
                "The agent ends, to be started again with the library that the node has now"
            )
