import pytest

from agent.core.slow_regions import LOCK_BUDGET_SECONDS, REST_MOST_SECONDS, Rest, rest_after

SLOW = 2 * LOCK_BUDGET_SECONDS


def test_a_region_whose_locks_keep_to_the_budget_is_not_left_alone():
    assert rest_after(LOCK_BUDGET_SECONDS, None, 50.0) is None


def test_a_slow_region_is_left_alone_for_a_hundred_times_what_it_took():
    assert rest_after(SLOW, None, 50.0) == Rest(pytest.approx(100 * SLOW), pytest.approx(50.0 + 100 * SLOW))


def test_one_that_stays_slow_is_left_alone_for_longer_each_time_and_not_for_ever():
    rest = None
    lengths = []
    for _ in range(12):
        rest = rest_after(SLOW, rest, 0.0)
        lengths.append(rest.seconds)
    assert lengths[1] == 2 * lengths[0]
    assert lengths == sorted(lengths)
    assert lengths[-1] == REST_MOST_SECONDS
