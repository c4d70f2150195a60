# SPDX-License-Identifier: Apache-2.0
"""How long to wait before the next try of a list-watch, or of anything else that should stay open. Pure: time is an argument.

A try that fails late is no better than one that fails at once: an overloaded server first keeps its clients waiting and then refuses.
So waits grow until a watch has stayed open for a while, even if other requests succeeded or took long. The caller adds the jitter.
"""

from typing import Final

HEALTHY_WATCH_SECONDS: Final = 5.0
"""A watch that stayed open this long resets the wait to the shortest one."""
MOST_RETRY_AFTER_SECONDS: Final = 30.0
"""Upper bound of Retry-After: what a server cannot serve now may be over by then."""


class Backoff:
    """Waits between the tries of one list-watch; each is twice the one before, up to a limit."""

    def __init__(self, first_seconds: float, last_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._last_seconds = last_seconds
        self._seconds = first_seconds
        self._opened_at: float | None = None

    def begin(self) -> None:
        """Start a try."""
        self._opened_at = None

    def opened(self, now: float) -> None:
        """Note that the server accepted the watch, at ``now`` in monotonic seconds."""
        self._opened_at = now

    def ended(self, now: float) -> float:
        """End the try, failed or not; return the seconds to wait before the next one."""
        if self._opened_at is not None and now - self._opened_at >= HEALTHY_WATCH_SECONDS:
            self._seconds = self._first_seconds
        wait_seconds, self._seconds = self._seconds, min(2 * self._seconds, self._last_seconds)
        return wait_seconds


def retry_after_seconds(header: str | None) -> float:
    """Read a Retry-After header, which Kubernetes sends in whole seconds; 0 if it is missing or has another form."""
    if header is None or not (header.isascii() and header.isdigit()):
        return 0.0
    return min(float(header), MOST_RETRY_AFTER_SECONDS)
