"""How the benchmark of the shim makes figures of what it measures."""

from collections.abc import Callable

from tests.bench.bench_shim import PROCESSES, in_turns

ROUNDS = 7


def steady(nanoseconds: float) -> Callable[[], float]:
    return lambda: nanoseconds


def test_those_who_are_compared_are_measured_in_turns():
    order = []
    in_turns([lambda: order.append("bare") or 1.0, lambda: order.append("shim") or 1.0], rounds=2, tries=2)
    assert order == ["bare", "shim"] * 4


def test_what_slows_most_processes_down_is_in_no_figure():
    """Bursts of six to nine processes, between which one or two of each contender see the machine as it is."""
    measured = 0

    def disturbed(nanoseconds: float) -> Callable[[], float]:
        def measure() -> float:
            nonlocal measured
            measured += 1
            return nanoseconds * (1.0 if measured % 11 < 3 else 1.4)

        return measure

    assert in_turns([disturbed(42.0), disturbed(52.0)], ROUNDS, PROCESSES) == [42.0, 52.0]


def test_a_process_that_was_lucky_once_is_not_the_figure():
    measured = 0

    def lucky_once() -> float:
        nonlocal measured
        measured += 1
        return 30.0 if measured == 20 else 42.0

    assert in_turns([lucky_once, steady(42.0)], ROUNDS, PROCESSES) == [42.0, 42.0]
