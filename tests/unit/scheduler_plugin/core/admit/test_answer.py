# SPDX-License-Identifier: Apache-2.0
"""What a workload needs, for every combination of what Kueue can have written."""

from itertools import product

import pytest

from scheduler_plugin.core.admit.answer import Step, state_of, step_for
from scheduler_plugin.core.admit.kueue import CheckEntry, State, Workload

OURS = ("fits",)


def make(
    ours: State | None = State.PENDING,
    other: State | None = None,
    *,
    reserved: bool = True,
    evicted: bool = False,
    admitted: bool = False,
    finished: bool = False,
    active: bool = True,
) -> Workload:
    checks = {name: CheckEntry(state, "") for name, state in (("fits", ours), ("other", other)) if state is not None}
    return Workload("team", "w", "u", "1", 0, active, reserved, evicted, admitted, finished, checks, ())


@pytest.mark.parametrize(
    ("workload", "step"),
    [
        (make(), Step.PLAN),
        (make(None), Step.IGNORE),
        (make(None, State.PENDING), Step.IGNORE),
        (make(finished=True), Step.IGNORE),
        (make(reserved=False), Step.IGNORE),
        (make(evicted=True), Step.LEAVE),
        (make(active=False), Step.LEAVE),
        (make(State.RETRY), Step.LEAVE),
        (make(State.REJECTED), Step.LEAVE),
        (make(State.REJECTED, reserved=False), Step.IGNORE),
        (make(State.RETRY, reserved=False, evicted=True), Step.RESET),
        (make(State.READY, reserved=False, evicted=True), Step.RESET),
        (make(State.READY, reserved=False), Step.RESET),
        (make(State.READY, evicted=True), Step.LEAVE),
        (make(State.READY), Step.HOLD),
        (make(State.READY, admitted=True), Step.SERVE),
        (make(State.READY, State.PENDING), Step.HOLD),
        (make(other=State.PENDING), Step.WAIT),
        (make(other=State.READY), Step.PLAN),
    ],
)
def test_step_follows_what_kueue_wrote(workload: Workload, step: Step) -> None:
    assert step_for(workload, OURS) is step


def test_answers_are_found_only_with_quota_and_without_eviction() -> None:
    for ours, other, *flags in product(State, (None, *State), *[(False, True)] * 5):
        reserved, evicted, admitted, finished, active = flags
        workload = make(ours, other, reserved=reserved, evicted=evicted, admitted=admitted, finished=finished, active=active)
        if step_for(workload, OURS) in (Step.PLAN, Step.HOLD, Step.SERVE, Step.WAIT):
            assert (reserved, evicted, finished, active) == (True, False, False, True)
            assert ours in (State.PENDING, State.READY)


def test_several_checks_of_ours_count_as_the_worst() -> None:
    entries = {"a": CheckEntry(State.READY, ""), "b": CheckEntry(State.PENDING, "")}
    both = Workload("team", "w", "u", "1", 0, True, True, False, False, False, entries, ())
    assert state_of(both, ("a", "b")) is State.PENDING
    assert state_of(make(None), ("a", "b")) is None
