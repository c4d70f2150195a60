# SPDX-License-Identifier: Apache-2.0
"""Ends the agent when another process could use the driver and this one cannot.

First case: the driver was replaced. A container keeps the driver library that the node had when the container was created. The agent
reloads the library at each look, which cures what this process can cure; the rest needs a new container, and kubelet creates one when
this process ends. Second case: a call that concerns the whole driver never returns, although the driver answers other processes.

The agent does not end for an unhealthy GPU, a missing driver, or a driver that hangs for all processes: a new container would have the
same problem. It does not end either while a call sleeps in the kernel where no signal reaches it: such a process cannot end, so kubelet
would not start another one.
"""

import asyncio
from collections.abc import Callable

from agent.errors import DriverError, DriverMismatchError
from agent.services.driver_watch import DriverWatch

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""How long library and kernel module may differ, as they do while a driver is being installed. Also how long a call may hang while the
driver answers others: it may still return."""
FIRST_PATIENCE_SECONDS = 600.0
"""How long library and kernel module may differ when the driver has never answered this process. Then they may differ on the node itself,
until a reboot, and a new container helps only if this one was created in the middle of an upgrade. After this time kubelet's restart
back-off is over, so the new container starts at once."""


class _Stretch:
    """How long a condition has held without a break."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, now: float, *, holds: bool) -> float:
        """Record whether the condition holds now; return for how long it has, 0 when it does not."""
        if not holds:
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        return now - self._since


class DriverWatchdog:
    """Checks the results of the driver reads every few seconds."""

    def __init__(self, watch: DriverWatch, monotonic: Callable[[], float]) -> None:
        self._watch = watch
        self._monotonic = monotonic
        self._differing = _Stretch()
        self._locked_out = _Stretch()

    async def run(self) -> None:
        """Check until cancelled. Raises DriverError when a condition has lasted too long."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Check once. Raises DriverError."""
        now = self._monotonic()
        patience_seconds = PATIENCE_SECONDS if self._watch.answered else FIRST_PATIENCE_SECONDS
        if self._differing.seconds(now, holds=isinstance(self._watch.failure, DriverMismatchError)) >= patience_seconds:
            raise DriverError(
                f"the driver's library here and the loaded kernel module have had different versions for {patience_seconds:g} s. "
                "The agent exits, so that kubelet restarts it with the node's current library"
            )
        if self._locked_out.seconds(now, holds=self._is_locked_out()) >= PATIENCE_SECONDS:
            raise DriverError(
                f"{self._watch.locked_out}, but the driver has answered another process for {PATIENCE_SECONDS:g} s. "
                "The agent exits, so that kubelet restarts it without that call"
            )

    def _is_locked_out(self) -> bool:
        calls = self._watch.overdue()
        return (
            bool(self._watch.locked_out)
            and any(call.device_uuid is None for call in calls)
            and not any(call.uninterruptible for call in calls)
        )
