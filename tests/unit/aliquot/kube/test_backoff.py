# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.kube.backoff import HEALTHY_WATCH_SECONDS, MOST_RETRY_AFTER_SECONDS, Backoff, retry_after_seconds


class Tries:
    """Tries of one list-watch, with a clock."""

    def __init__(self) -> None:
        self.backoff = Backoff(1.0, 8.0)
        self.now = 0.0

    def fails_after(self, seconds: float) -> float:
        self.backoff.begin()
        self.now += seconds
        return self.backoff.ended(self.now)

    def is_open_for(self, seconds: float) -> float:
        self.backoff.begin()
        self.backoff.opened(self.now)
        self.now += seconds
        return self.backoff.ended(self.now)


@pytest.mark.parametrize("seconds", [0.0, 1.5, 60.0])
def test_backoff_grows_with_any_refusal_time_of_server(seconds):
    tries = Tries()
    assert [tries.fails_after(seconds) for _ in range(6)] == [1, 2, 4, 8, 8, 8]


def test_a_watch_that_breaks_off_soon_is_a_failure():
    tries = Tries()
    assert [tries.is_open_for(HEALTHY_WATCH_SECONDS - 0.1) for _ in range(3)] == [1, 2, 4]


def test_watch_open_for_while_resets_backoff():
    tries = Tries()
    assert [tries.fails_after(0), tries.fails_after(0), tries.is_open_for(HEALTHY_WATCH_SECONDS), tries.fails_after(0)] == [1, 2, 1, 2]


def test_what_was_open_in_an_earlier_try_says_nothing_of_this_one():
    tries = Tries()
    tries.fails_after(0)
    tries.backoff.begin()
    tries.backoff.opened(tries.now)
    assert tries.fails_after(100) == 2


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("0", 0),
        ("5", 5),
        ("9" * 5000, MOST_RETRY_AFTER_SECONDS),
        ("-1", 0),
        ("1.5", 0),
        ("٣", 0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0),
    ],
)
def test_retry_after_is_read_in_seconds_and_within_bounds(header, seconds):
    assert retry_after_seconds(header) == seconds
