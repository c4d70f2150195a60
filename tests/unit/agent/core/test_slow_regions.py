# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.slow_regions import LOCK_BUDGET_SECONDS, REST_MOST_SECONDS, rest_after

SLOW = 2 * LOCK_BUDGET_SECONDS


def test_region_with_locks_within_budget_is_not_skipped():
    assert rest_after(LOCK_BUDGET_SECONDS, None, 50.0) is None


def test_slow_region_is_skipped_for_hundred_times_its_reading_time():
    rest = rest_after(SLOW, None, 50.0)
    assert (rest.seconds, rest.until) == pytest.approx((100 * SLOW, 50.0 + 100 * SLOW))


def test_region_that_stays_slow_is_skipped_for_longer_up_to_limit():
    rest = None
    lengths = []
    for _ in range(12):
        rest = rest_after(SLOW, rest, 0.0)
        lengths.append(rest.seconds)
    assert lengths[1] == 2 * lengths[0]
    assert lengths == sorted(lengths)
    assert lengths[-1] == REST_MOST_SECONDS
