"""What coming calls are likely to need, worked out while kube-scheduler is at its own work between two of them.

A call waits for nothing that could have been done before it came: verdicts are brought up to date with what the last call changed, and the
devices of a pod that was just rated are chosen before its binding is asked for. One piece at a time, and other work of the loop between, so
that a call that comes early waits for one piece, most of which it would have had to do itself.
"""

import asyncio
from collections.abc import Callable


class Forethought:
    """Does the work when there is time for it."""

    def __init__(self, prepare: Callable[[], bool]) -> None:
        """Args: prepare: do one piece; False when there was none left."""
        self._prepare = prepare
        self._is_due = False

    def called(self) -> None:
        """Note that a call was answered, or waits for others: something may have changed."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        if self._prepare():
            self.called()
