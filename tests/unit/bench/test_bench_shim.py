"""How the benchmark of the shim makes figures of what it measures."""

from collections.abc import Callable

from tests.bench.bench_shim import in_turns


def takes(*nanoseconds: float) -> Callable[[], float]:
    return iter(nanoseconds).__next__


def test_those_who_are_compared_are_measured_in_turns():
    order = []
    in_turns([lambda: order.append("bare") or 1.0, lambda: order.append("shim") or 1.0], rounds=2, tries=2)
    assert order == ["bare", "shim"] * 4


def test_a_try_that_the_machine_slowed_down_does_not_count_beside_one_that_it_did_not():
    assert in_turns([takes(42, 55), takes(56, 43)], rounds=1, tries=2) == [42, 43]


def test_a_machine_that_became_slow_within_a_round_is_no_cost():
    """The median of the second alone would be 56."""
    assert in_turns([takes(42, 55, 42), takes(43, 56, 56)], rounds=3, tries=1) == [42, 43]


def test_a_round_with_a_rare_lucky_process_is_not_the_figure():
    assert in_turns([takes(42, 42, 42), takes(43, 30, 43)], rounds=3, tries=1) == [42, 43]
