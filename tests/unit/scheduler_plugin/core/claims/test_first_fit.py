# SPDX-License-Identifier: Apache-2.0
"""Cases with a name; tests/property/test_first_fit.py compares with Kubernetes' allocator."""

from fractions import Fraction

import pytest

from aliquot.contract.errors import ContractError
from scheduler_plugin.core.claims.first_fit import Capacity, Claim, Device, Match, Request, SearchTooLongError, Usage, predict
from scheduler_plugin.core.claims.objects import claim_of, devices_of
from scheduler_plugin.core.claims.selecting import meets


def device(number: int, memory: int = 10) -> Device:
    return Device(("d", "p", f"gpu-{number}"), {"memory": Capacity(Fraction(memory), default=Fraction(memory))}, shared=True)


def asks(memory: int, count: int = 1) -> Claim:
    return Claim(((Request("r", count, {"memory": Fraction(memory)}),),))


def names(*claims: Claim, devices: int = 2, usage: Usage | None = None) -> list[list[str]] | None:
    found = predict([device(number) for number in range(devices)], usage or Usage(), claims, lambda _expression, _device: True)
    return None if found is None else [[taken.device[2] for taken in one] for one in found]


def test_first_device_with_room_is_taken_not_the_best():
    assert names(asks(1), usage=Usage(consumed={("d", "p", "gpu-1"): {"memory": Fraction(9)}})) == [["gpu-0"]]


def test_claims_share_a_device_until_it_is_full():
    assert names(asks(5), asks(5), asks(1)) == [["gpu-0"], ["gpu-0"], ["gpu-1"]]


def test_devices_of_one_request_differ():
    assert names(asks(1, count=2)) == [["gpu-0", "gpu-1"]]
    assert names(asks(1, count=3)) is None


def test_search_with_too_many_combinations_is_given_up():
    with pytest.raises(SearchTooLongError):
        names(*(asks(1) for _ in range(12)), asks(11), devices=8)


def test_attribute_of_another_kind_is_an_error_not_a_prediction():
    """Such as a list, since Kubernetes 1.36."""
    spec = {"driver": "d", "nodeName": "n", "pool": {"name": "n", "resourceSliceCount": 1}}
    device = {"name": "nic-0", "attributes": {"rail": {"strings": ["a", "b"]}}}
    found = devices_of("n", [{"metadata": {"name": "s"}, "spec": {**spec, "devices": [device]}}])
    claim = Claim(((Request("r"),),), (Match("d/rail"),))
    with pytest.raises(ContractError, match="not predicted"):
        predict(found, Usage(), [claim], lambda *_: True)
    with pytest.raises(ContractError, match="of a known kind"):
        meets("device.attributes['d'].rail != 'c'", found[0])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"allocationMode": "All"}, id="all devices"),
        pytest.param({"adminAccess": True}, id="admin access"),
        pytest.param({"deviceClassName": "other"}, id="unknown class"),
    ],
)
def test_claims_beyond_the_search_are_errors_not_predictions(change):
    exactly = {"deviceClassName": "c", **change}
    claim = {"spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}}
    with pytest.raises(ContractError):
        claim_of(claim, {"c": {"spec": {}}})


def test_devices_with_shared_counters_are_errors_not_predictions():
    spec = {
        "driver": "d", "nodeName": "n", "pool": {"name": "p", "resourceSliceCount": 1},
        "devices": [{"name": "g", "consumesCounters": [{"counterSet": "s", "counters": {}}]}],
    }  # fmt: skip
    with pytest.raises(ContractError, match="shared counters"):
        devices_of("n", [{"metadata": {"name": "s"}, "spec": spec}])
