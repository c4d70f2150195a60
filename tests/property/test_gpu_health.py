# SPDX-License-Identifier: Apache-2.0
"""The health of a GPU over any history: never given out with a fault that stands, always back in the end, never flapping."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.core.health import Answer, GpuHealth, HealthRules, HealthState, Silence

STEP_SECONDS = 5.0
XIDS = st.sampled_from([13, 31, 48, 62, 63, 79, 92, 95, 119, 154, 500])
PROBES = st.one_of(
    st.builds(Answer, st.just(()), st.none() | st.integers(0, 3)),
    st.just(Answer(("a row remap waits for a reset",))),
    st.builds(Silence, st.just("no answer"), st.booleans()),
)
HISTORY = st.lists(st.tuples(st.lists(XIDS, max_size=3), PROBES), max_size=120)
RULES = st.builds(
    HealthRules,
    recovery_seconds=st.sampled_from([0.0, 5.0, 30.0]),
    quarantine_seconds=st.sampled_from([0.0, 30.0, 300.0]),
    max_recovery_seconds=st.sampled_from([30.0, 600.0, 3600.0]),
    suspect_seconds=st.sampled_from([10.0, 300.0]),
    suspect_limit=st.integers(1, 4),
)


def run(history, rules, health=None, begin=0.0):
    """Yield the health after each step, and when."""
    health = health or GpuHealth()
    for number, (xids, probe) in enumerate(history):
        now = begin + number * STEP_SECONDS
        health = health.after_xids(xids, now, rules).after_probe(probe, now, rules)
        yield health, probe, now


@given(HISTORY, RULES)
def test_a_gpu_with_a_standing_fault_is_never_given_out(history, rules):
    for health, probe, _ in run(history, rules):
        if isinstance(probe, Silence) or probe.faults:
            assert not health.state.usable


@given(HISTORY, RULES)
def test_clean_readings_make_device_healthy_after_any_history(history, rules):
    *_, (health, _, now) = run([*history, ([], Answer())], rules)
    longest = max(rules.max_recovery_seconds, rules.suspect_seconds)
    clean: list[Any] = [([], Answer())] * (int(longest / STEP_SECONDS) + 2)
    *_, (health, _, _) = run(clean, rules, health, now + STEP_SECONDS)
    assert health.state is HealthState.HEALTHY
    assert health.reason == ""


@given(HISTORY, RULES)
def test_it_comes_back_only_after_a_whole_recovery_time_without_a_fault(history, rules):
    fault_at = None
    before = GpuHealth()
    for health, probe, now in run(history, rules):
        if isinstance(probe, Silence) or probe.faults:
            fault_at = now
        if health.state.usable and not before.state.usable and fault_at is not None:
            assert now - fault_at >= min(rules.recovery_seconds, rules.max_recovery_seconds)
        before = health


@given(st.lists(st.integers(1, 40), min_size=5, max_size=200))
def test_gpu_that_keeps_failing_is_offered_ever_more_rarely(good_steps):
    rules = HealthRules()
    health, now, returns = GpuHealth(), 0.0, 0
    for steps in good_steps:
        probes: list[Answer | Silence] = [Silence("no answer"), *[Answer()] * steps]
        for probe in probes:
            after = health.after_probe(probe, now, rules)
            returns += after.state.usable and not health.state.usable
            health, now = after, now + STEP_SECONDS
    assert returns <= 8  # holds of 30, 60, 120 … seconds: the eighth is an hour, longer than any good time here


@given(HISTORY, RULES)
def test_a_reason_is_given_exactly_while_it_is_not_healthy(history, rules):
    for health, _, _ in run(history, rules):
        assert bool(health.reason) == (health.state is not HealthState.HEALTHY)
