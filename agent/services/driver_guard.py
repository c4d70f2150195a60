"""Ends the agent where another process could work with the driver and this one cannot.

That is so when the driver was changed underneath: a container has the driver's library that the node had when the container was made. The
library that is found here is loaded anew at each look, which cures what can be cured in this process; the rest only another container does,
and it comes when this one ends. It is so, too, when a call about the driver as a whole never comes back, though the driver answers others
by now. A sick GPU, a driver that is not there or one that hangs for everybody is no reason: another container would meet the same. Nor is a
call that sleeps where no signal reaches it: a process with such a thread does not end, and its container is not started again.
"""

import asyncio
from collections.abc import Callable

from agent.errors import DriverError, DriverMismatchError
from agent.services.driver_watch import DriverWatch

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""How long library and kernel module may differ: while a driver is being installed they do. And how long a call may be out while the driver
answers others: it may be about to come back."""
FIRST_PATIENCE_SECONDS = 600.0
"""The first of these where the driver has not answered this process yet. Then they may differ on the node itself, until it is rebooted, and
another container helps only if this one was made in the middle of an upgrade. By then kubelet has forgotten the end before: it starts at
once."""


class _Stretch:
    """How long something has been so without a break."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, now: float, *, so: bool) -> float:
        """Take in whether it is so now; return for how long it has been, 0 when it is not."""
        if not so:
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        return now - self._since


class DriverGuard:
    """Looks at what the driver's readings brought every few seconds."""

    def __init__(self, watch: DriverWatch, monotonic: Callable[[], float]) -> None:
        self._watch = watch
        self._monotonic = monotonic
        self._differing = _Stretch()
        self._locked_out = _Stretch()

    async def run(self) -> None:
        """Look for ever. Raises DriverError when it has been bad for too long."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Look once. Raises DriverError."""
        now = self._monotonic()
        patience_seconds = PATIENCE_SECONDS if self._watch.answered else FIRST_PATIENCE_SECONDS
        if self._differing.seconds(now, so=isinstance(self._watch.failure, DriverMismatchError)) >= patience_seconds:
            raise DriverError(
                f"the driver's library here and the loaded kernel module have had different versions for {patience_seconds:g} s. "
                "The agent ends, to be started again with the library that the node has now"
            )
        if self._locked_out.seconds(now, so=self._is_locked_out()) >= PATIENCE_SECONDS:
            raise DriverError(
                f"{self._watch.locked_out}, though the driver has answered another process for {PATIENCE_SECONDS:g} s. "
                "The agent ends, to be started again without that call"
            )

    def _is_locked_out(self) -> bool:
        calls = self._watch.overdue()
        return (
            bool(self._watch.locked_out)
            and any(call.device_uuid is None for call in calls)
            and not any(call.uninterruptible for call in calls)
        )
