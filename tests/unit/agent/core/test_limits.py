# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.limits import DeviceFacts, FailPolicy, limits_of, pausing
from aliquot.contract.model import CoresMode, Preferences, Priority
from aliquot.contract.units import MIB
from tests.unit.agent.builders import grant, ids, share


def test_limits_follow_the_shares_in_their_order():
    limits = limits_of(grant(ids("0:0", "1:0"), share(1, 200, 30), share(0, 100)), FailPolicy.CLOSED)
    assert [(device.uuid, device.memory_bytes >> 20, device.sm_percent) for device in limits.devices] == [
        ("GPU-1", 200, 30),
        ("GPU-0", 100, 0),
    ]
    assert not limits.fail_open


def test_the_fail_policy_reaches_the_shim():
    assert limits_of(grant(ids("0:0")), FailPolicy.OPEN).fail_open


@pytest.mark.parametrize(("priority", "sign"), [(Priority.HIGH, 1), (None, 0), (Priority.LOW, -1)])
def test_pod_without_priority_is_between_high_and_low(priority, sign):
    assert limits_of(grant(ids("0:0")), FailPolicy.CLOSED, Preferences(priority=priority)).devices[0].priority == sign


@pytest.mark.parametrize("paused", [True, False])
def test_a_paused_pod_is_paused_on_all_its_devices(paused):
    both = limits_of(grant(ids("0:0", "1:0"), share(0), share(1)), FailPolicy.CLOSED, Preferences(paused=paused))
    assert [device.paused for device in both.devices] == [paused, paused]
    assert [device.paused for device in pausing(both, paused=not paused).devices] == [not paused, not paused]
    assert pausing(pausing(both, paused=not paused), paused=paused) == both


def test_only_a_pod_with_a_priority_has_a_line_in_the_page():
    facts = DeviceFacts(priority_lines={"GPU-0": 4})
    assert limits_of(grant(ids("0:0")), FailPolicy.CLOSED, Preferences(priority=Priority.LOW), facts).devices[0].priority_line == 4
    assert limits_of(grant(ids("0:0")), FailPolicy.CLOSED, Preferences(), facts).devices[0].priority_line == 0


@pytest.mark.parametrize(("ratio", "line"), [(None, 0), (1.0, 0), (1.5, 4)])
def test_burstable_pod_has_line_in_time_slot_page(ratio, line):
    facts = DeviceFacts(priority_lines={"GPU-0": 4})
    assert limits_of(grant(ids("0:0")), FailPolicy.CLOSED, Preferences(memory_burst=ratio), facts).devices[0].priority_line == line


def test_context_cost_is_written_when_known():
    facts = DeviceFacts(context_bytes={"GPU-1": 7})
    both = limits_of(grant(ids("0:0", "1:0"), share(0), share(1)), FailPolicy.CLOSED, facts=facts)
    assert [device.context_bytes for device in both.devices] == [0, 7]


@pytest.mark.parametrize(("cores", "percent"), [(30, 30), (100, 99)])
def test_weight_mode_uses_cores_as_weight_and_first_limit(cores, percent):
    by_weight = limits_of(grant(ids("0:0"), share(0, cores=cores)), FailPolicy.CLOSED, Preferences(cores_mode=CoresMode.WEIGHT))
    assert (by_weight.devices[0].sm_weight, by_weight.devices[0].sm_percent) == (cores, percent)
    as_ceiling = limits_of(grant(ids("0:0"), share(0, cores=cores)), FailPolicy.CLOSED)
    assert (as_ceiling.devices[0].sm_weight, as_ceiling.devices[0].sm_percent) == (0, cores)


@pytest.mark.parametrize(("ratio", "want_mib"), [(None, 0), (1.0, 0), (1.5, 150), (1.005, 100)])
def test_share_may_burst_up_to_request_of_pod(ratio, want_mib):
    (limit,) = limits_of(grant(ids("0:0"), share(0, 100)), FailPolicy.CLOSED, Preferences(memory_burst=ratio)).devices
    assert (limit.memory_bytes, limit.burst_bytes) == (100 * MIB, want_mib * MIB)
