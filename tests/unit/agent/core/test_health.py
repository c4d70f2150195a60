# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.health import (
    Answer,
    GpuHealth,
    HealthRules,
    HealthState,
    HealthTable,
    Silence,
    XidClass,
    classify,
    describe_xid,
    parse_xids,
)

RULES = HealthRules(recovery_seconds=30, quarantine_seconds=300, max_recovery_seconds=1000, suspect_seconds=100, suspect_limit=3)
HEALTHY, SUSPECT, QUARANTINED, LOST, RECOVERING = HealthState
CLEAN = Answer()
RESET_DUE = Answer(("a row remap waits for a reset",))
GONE = Silence("GPU is lost", lost=True)
HUNG = Silence("the call does not return")
HARD, SOFT, APPLICATION, OFF_THE_BUS = 62, 92, 31, 79


def after(*steps: tuple[float, int | Answer | Silence], start: GpuHealth | None = None) -> GpuHealth:
    """Feed probes and XIDs, each at its time."""
    health = start or GpuHealth()
    for now, seen in steps:
        health = health.after_xids([seen], now, RULES) if isinstance(seen, int) else health.after_probe(seen, now, RULES)
    return health


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        pytest.param(CLEAN, HEALTHY, id="an answer"),
        pytest.param(RESET_DUE, QUARANTINED, id="a fault that stands"),
        pytest.param(HUNG, QUARANTINED, id="no answer"),
        pytest.param(GONE, LOST, id="gone"),
        pytest.param(APPLICATION, HEALTHY, id="an application's XID"),
        pytest.param(SOFT, SUSPECT, id="a soft XID"),
        pytest.param(HARD, QUARANTINED, id="a hard XID"),
        pytest.param(OFF_THE_BUS, LOST, id="the XID of a lost GPU"),
        pytest.param(777, SUSPECT, id="an XID nobody knows"),
    ],
)
def test_each_observation_leads_to_its_state(seen, state):
    assert after((0, seen)).state is state


@pytest.mark.parametrize(
    ("seen", "silent"),
    [
        ([HUNG], True),
        ([HUNG, CLEAN], True),
        ([HUNG, CLEAN, HUNG], True),
        ([HUNG, SOFT], False),
        ([HUNG, Answer(uncorrected_errors=1), Answer(uncorrected_errors=2)], False),
        ([HUNG, GONE], False),
        ([HUNG, GONE, HUNG], False),
        ([HUNG, HARD], False),
        ([HUNG, RESET_DUE], False),
        ([RESET_DUE, HUNG], False),
        ([HARD, HUNG], False),
        ([GONE, CLEAN], False),
        ([CLEAN], False),
    ],
)
def test_gpu_without_other_fault_is_known_to_be_only_silent(seen, silent):
    assert after(*enumerate(seen)).silent is silent


def test_gpu_that_is_healthy_again_is_not_silent():
    assert not after((0, HUNG), (5, CLEAN), (35, CLEAN)).silent


@pytest.mark.parametrize("fault", [RESET_DUE, HUNG, GONE])
def test_after_fault_device_is_offered_once_clean_for_recovery_time(fault):
    assert after((0, fault), (5, CLEAN)).state is RECOVERING
    assert after((0, fault), (5, CLEAN), (34, CLEAN)).state is RECOVERING
    assert after((0, fault), (5, CLEAN), (35, CLEAN)) == GpuHealth(since=35, hold_seconds=30)


def test_hard_xid_quarantines_longer_and_recovers_at_its_end():
    assert after((0, HARD), (1, CLEAN), (270, CLEAN)).state is QUARANTINED
    assert after((0, HARD), (1, CLEAN), (271, CLEAN)).state is RECOVERING
    assert after((0, HARD), (1, CLEAN), (301, CLEAN)).state is HEALTHY


def test_fault_while_recovering_restarts_and_doubles_wait():
    relapsed = after((0, HUNG), (5, CLEAN), (34, HUNG), (40, CLEAN))
    assert (relapsed.state, relapsed.hold_seconds) == (QUARANTINED, 60)
    assert after((70, CLEAN), start=relapsed).state is RECOVERING
    assert after((99, CLEAN), start=relapsed).state is RECOVERING
    assert after((100, CLEAN), start=relapsed).state is HEALTHY


def test_wait_doubles_up_to_limit_and_resets_after_long_good_time():
    health, now = GpuHealth(), 0.0
    for _ in range(9):
        health = after((now, HUNG), (now + 1, CLEAN), (now + 1 + 1000, CLEAN), start=health)
        assert health.state is HEALTHY
        now += 1002
    assert health.hold_seconds == 1000
    assert after((now + 1000, HUNG), start=health).hold_seconds == 30


def test_fault_during_quarantine_restarts_clean_time_without_doubling_it():
    health = after((0, HARD), (1, CLEAN), (200, HARD), (201, CLEAN), (400, CLEAN))
    assert (health.state, health.hold_seconds) == (QUARANTINED, 300)


def test_lost_gpu_returning_with_fault_stays_lost_until_clean():
    assert after((0, GONE), (5, RESET_DUE)).state is LOST
    assert after((0, GONE), (5, RESET_DUE), (6, CLEAN)).state is RECOVERING


def test_quarantined_gpu_that_leaves_the_bus_is_lost():
    health = after((0, HUNG), (1, GONE))
    assert (health.state, health.reason) == (LOST, "GPU is lost")


def test_the_reason_stays_the_first_one_while_the_fault_lasts():
    assert after((0, HARD), (1, HUNG), (2, RESET_DUE)).reason == "XID 62 (microcontroller halt)"
    assert after((0, HUNG), (1, CLEAN)).reason == "the call does not return"


def test_warnings_expire_without_further_ones():
    assert after((0, SOFT), (99, CLEAN)).state is SUSPECT
    assert after((0, SOFT), (100, CLEAN)).state is HEALTHY


def test_several_warnings_lead_to_quarantine():
    assert after((0, SOFT), (40, SOFT)).state is SUSPECT
    quarantined = after((0, SOFT), (40, SOFT), (80, SOFT))
    assert (quarantined.state, quarantined.reason) == (
        QUARANTINED,
        "3 warnings in a row, the last: XID 92 (high rate of corrected memory errors)",
    )
    assert after((0, SOFT), (40, SOFT), (101, SOFT)).state is SUSPECT


def test_many_xids_in_one_observation_are_one_incident():
    assert GpuHealth().after_xids([SOFT] * 50, 0, RULES).state is SUSPECT
    assert GpuHealth().after_xids([SOFT, APPLICATION, HARD], 0, RULES).reason == describe_xid(HARD)


def test_only_new_uncorrectable_memory_errors_are_a_warning():
    assert after((0, Answer(uncorrected_errors=7)), (1, Answer(uncorrected_errors=7))).state is HEALTHY
    grown = after((0, Answer(uncorrected_errors=7)), (1, Answer(uncorrected_errors=9)))
    assert (grown.state, grown.reason) == (SUSPECT, "2 uncorrectable memory errors")


def test_soft_sign_while_recovering_restarts_clean_time():
    assert after((0, HUNG), (5, CLEAN), (30, SOFT), (59, CLEAN)).state is RECOVERING
    assert after((0, HUNG), (5, CLEAN), (30, SOFT), (60, CLEAN)).state is HEALTHY


def test_only_observations_advance_the_state():
    health = after((0, HUNG), (5, CLEAN))
    assert health.after_xids([APPLICATION], 500, RULES).state is RECOVERING


def test_operators_lists_override_the_catalogue():
    rules = HealthRules(application_xids=parse_xids("62, 777"), hard_xids=parse_xids("31"))
    assert [classify(xid, rules) for xid in (62, 777, 31, 63)] == [
        XidClass.APPLICATION,
        XidClass.APPLICATION,
        XidClass.HARD,
        XidClass.SOFT,
    ]
    with pytest.raises(ValueError, match="invalid literal"):
        parse_xids("31,all")


def test_table_reports_changes_and_keeps_devices_not_read():
    before = HealthTable().after_probes({"GPU-0": CLEAN, "GPU-1": CLEAN}, 0, RULES)
    later = before.after_xids([("GPU-1", SOFT), ("GPU-1", HARD)], 1, RULES)
    (transition,) = before.transitions_to(later)
    assert (transition.device_uuid, transition.before, transition.after) == ("GPU-1", HEALTHY, QUARANTINED)
    healed = later.after_probes({"GPU-1": CLEAN}, 2, RULES).after_probes({"GPU-1": CLEAN}, 400, RULES)
    assert [(one.after, one.reason) for one in later.transitions_to(healed)] == [(HEALTHY, describe_xid(HARD))]
