# SPDX-License-Identifier: Apache-2.0
"""Time as an argument, so that tests set it."""

from typing import Protocol


class Clock(Protocol):
    """A monotonic clock and the calendar."""

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        ...

    def now(self) -> float:
        """Return seconds since 1970."""
        ...
