# SPDX-License-Identifier: Apache-2.0
"""How the benchmark of the shim makes figures of what it measures."""

from collections.abc import Callable
from functools import partial

from tests.bench.bench_shim import in_batches


def takes(*nanoseconds: float) -> Callable[[], float]:
    return iter(nanoseconds).__next__


def test_those_who_are_compared_are_measured_in_batches():
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return 1.0

    in_batches([partial(measure, "bare"), partial(measure, "shim")], rounds=2, tries=2)
    assert order == ["bare", "shim"] * 4


def test_attempt_slowed_by_machine_is_dropped_when_another_was_not():
    assert in_batches([takes(42, 55), takes(56, 43)], rounds=1, tries=2) == [42, 43]


def test_a_machine_that_became_slow_within_a_round_is_no_cost():
    """The median of the second alone would be 56."""
    assert in_batches([takes(42, 55, 42), takes(43, 56, 56)], rounds=3, tries=1) == [42, 43]


def test_a_round_with_a_rare_lucky_process_is_not_the_figure():
    assert in_batches([takes(42, 42, 42), takes(43, 30, 43)], rounds=3, tries=1) == [42, 43]
