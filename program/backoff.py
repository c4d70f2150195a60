"""How long a list-watch of the Kubernetes API waits before it tries again. Time is an argument, and chance is the caller's.

A try that fails late is no better than one that fails at once: an overloaded server keeps everybody waiting, and then refuses. So waits
grow until a watch was open for a while, whatever else went well or took long.
"""

from typing import Final

HEALTHY_WATCH_SECONDS: Final = 5.0
"""A watch that was open this long was no failure: the wait before the next one is the shortest again."""
MOST_RETRY_AFTER_SECONDS: Final = 30.0
"""A server that asks for more is asked again after this long: what it cannot serve may be over by then."""


class Backoff:
    """The waits of one list-watch, between two tries each; doubled from one to the next."""

    def __init__(self, first_seconds: float, last_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._last_seconds = last_seconds
        self._seconds = first_seconds
        self._opened_at: float | None = None

    def begin(self) -> None:
        """Note that a try begins."""
        self._opened_at = None

    def opened(self, now: float) -> None:
        """Note that the server has accepted the watch."""
        self._opened_at = now

    def ended(self, now: float) -> float:
        """Note that the try is over, however it ended; return how long to wait before the next one, in seconds."""
        if self._opened_at is not None and now - self._opened_at >= HEALTHY_WATCH_SECONDS:
            self._seconds = self._first_seconds
        wait_seconds, self._seconds = self._seconds, min(2 * self._seconds, self._last_seconds)
        return wait_seconds


def retry_after_seconds(header: str | None) -> float:
    """Read the header Retry-After, of which Kubernetes knows the form in seconds only; 0 where there is none to read."""
    if header is None or not (header.isascii() and header.isdigit()):
        return 0.0
    return min(float(header), MOST_RETRY_AFTER_SECONDS)
