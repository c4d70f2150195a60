import pytest

from agent.core.limits import FailPolicy, limits_of
from proto.model import Priority
from tests.unit.agent.builders import grant, ids, share


def test_limits_follow_the_shares_in_their_order():
    limits = limits_of(grant(ids("0:0", "1:0"), share(1, 200, 30), share(0, 100)), FailPolicy.CLOSED, None)
    assert [(device.uuid, device.memory_bytes >> 20, device.sm_percent) for device in limits.devices] == [
        ("GPU-1", 200, 30),
        ("GPU-0", 100, 0),
    ]
    assert not limits.fail_open


def test_the_fail_policy_reaches_the_shim():
    assert limits_of(grant(ids("0:0")), FailPolicy.OPEN, None).fail_open


@pytest.mark.parametrize(("priority", "sign"), [(Priority.HIGH, 1), (None, 0), (Priority.LOW, -1)])
def test_a_pod_without_a_priority_stands_between_high_and_low(priority, sign):
    assert limits_of(grant(ids("0:0")), FailPolicy.CLOSED, priority).devices[0].priority == sign
