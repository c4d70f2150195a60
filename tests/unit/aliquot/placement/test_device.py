# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.contract.model import DeviceShare
from aliquot.contract.units import MIB
from aliquot.placement.device import AccountingError, DeviceState
from tests.unit.aliquot.placement.builders import make_device, make_instance, share


def test_a_share_is_counted_in_every_dimension():
    state = DeviceState.of(make_device(), max_shares=4).with_share(share(mib=300, cores=20)).with_share(share(mib=100, cores=None))
    assert (state.free_memory_bytes, state.free_cores_percent, state.free_shares) == (600 * MIB, 79, 2)


def test_taking_a_share_back_gives_the_state_before():
    before = DeviceState.of(make_device(), [share(mib=10, cores=None)])
    for given in (share(mib=300, cores=20), share(mib=300, cores=None)):
        assert before.with_share(given).without_share(given) == before


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(share(mib=601), id="one MiB too many"),
        pytest.param(share(cores=51), id="one percent too many"),
    ],
)
def test_more_than_is_free_is_never_promised(given):
    state = DeviceState.of(make_device(), [share(mib=400, cores=50)])
    with pytest.raises(AccountingError, match="expected room"):
        state.with_share(given)


def test_no_more_shares_are_promised_than_the_device_takes():
    state = DeviceState.of(make_device(), [share(), share()], max_shares=2)
    with pytest.raises(AccountingError, match="expected room"):
        state.with_share(share())


def test_share_without_compute_prevents_reserving_all_compute():
    beside = DeviceState.of(make_device(), [share(cores=None)])
    assert beside.with_share(share(cores=99)).free_cores_percent == 0
    with pytest.raises(AccountingError):
        beside.with_share(share(cores=100))


def test_share_without_reserved_compute_is_refused_when_no_compute_is_left():
    with pytest.raises(AccountingError):
        DeviceState.of(make_device(), [share(cores=100)]).with_share(share(cores=None))


def test_memory_is_promised_in_whole_mib():
    device = make_device()
    odd = DeviceState.of(type(device)(device.uuid, device.model, 0, "", 10 * MIB + 5))
    assert odd.capacity_bytes == odd.free_memory_bytes == 10 * MIB


def test_facts_beyond_the_device_leave_nothing_free():
    state = DeviceState.of(make_device(mib=100), [share(mib=90, cores=80), share(mib=90, cores=80)], max_shares=1)
    assert (state.free_memory_bytes, state.free_cores_percent, state.free_shares) == (0, 0, 0)


def test_shares_of_other_devices_are_left_out():
    assert DeviceState.of(make_device(0), [share(1)]).empty


@pytest.mark.parametrize("given", [share(1), DeviceShare("GPU-0", 0), DeviceShare("GPU-0", -MIB), DeviceShare("GPU-0", MIB, 0)])
def test_what_is_no_share_of_the_device_is_not_counted(given):
    state = DeviceState.of(make_device(0), [share(0)])
    with pytest.raises(AccountingError):
        state.with_share(given)
    with pytest.raises(AccountingError):
        state.without_share(given)


def test_more_than_was_promised_is_not_taken_back():
    with pytest.raises(AccountingError, match="at least 0"):
        DeviceState.of(make_device(), [share(mib=10)]).without_share(share(mib=11))
    with pytest.raises(AccountingError, match="at least 0"):
        DeviceState.of(make_device(), [share(cores=None), share(cores=10)]).without_share(share(cores=20))


def test_a_mig_instance_is_promised_once():
    instance = DeviceShare("MIG-0-0", 100 * MIB)
    state = DeviceState.of(make_device(mig=(make_instance(0, 0),))).with_share(instance)
    assert not state.empty
    with pytest.raises(AccountingError, match="found it in use"):
        state.with_share(instance)
    assert state.without_share(instance).empty
    with pytest.raises(AccountingError, match="found it free"):
        state.without_share(instance).without_share(instance)
