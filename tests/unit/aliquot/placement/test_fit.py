# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from aliquot.contract.model import DeviceShare, Isolation, Preferences
from aliquot.contract.units import MIB
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import Reject, reject_reason, share_on
from tests.unit.aliquot.placement.builders import ANYTHING, ask, ask_mig, make_device, make_instance, share


def state_with(*used: DeviceShare, **settings) -> DeviceState:
    return DeviceState.of(make_device(), used, **settings)


@pytest.mark.parametrize(
    ("state", "request_", "want"),
    [
        pytest.param(state_with(share(mib=900)), ask(mib=100), None, id="exact fit of memory"),
        pytest.param(state_with(share(mib=900)), ask(mib=101), Reject.MEMORY, id="one MiB short"),
        pytest.param(state_with(), ask(mib=None), None, id="a whole device that is empty"),
        pytest.param(state_with(share(mib=1)), ask(mib=None), Reject.MEMORY, id="a whole device that is shared"),
        pytest.param(state_with(share(mib=1000)), ask(mib=1), Reject.MEMORY, id="beside a whole device's memory"),
        pytest.param(DeviceState.of(make_device(mib=0)), ask(mib=None), Reject.MEMORY, id="all the memory of a device that reports none"),
        pytest.param(state_with(share(cores=50)), ask(cores=50), None, id="exact fit of cores"),
        pytest.param(state_with(share(cores=50)), ask(cores=51), Reject.CORES, id="one percent short"),
        pytest.param(state_with(share(cores=50)), ask(cores=None), None, id="shares what is free"),
        pytest.param(state_with(share(cores=100)), ask(cores=None), Reject.CORES, id="nothing free to share"),
        pytest.param(state_with(share(cores=None)), ask(cores=100), Reject.CORES, id="all compute beside one that shares"),
        pytest.param(state_with(), ask(cores=100), None, id="all compute of an empty device"),
        pytest.param(state_with(share(), max_shares=1), ask(), Reject.SHARES, id="no share left"),
        pytest.param(state_with(healthy=False), ask(), Reject.UNHEALTHY, id="unhealthy"),
        pytest.param(state_with(cordoned=True), ask(), Reject.CORDONED, id="cordoned"),
        pytest.param(DeviceState.of(make_device(mig=(make_instance(0, 0),))), ask(), Reject.MIG_MODE, id="vGPU on a partitioned device"),
        pytest.param(state_with(), ask_mig(("1g.10gb", 1)), Reject.MIG_PROFILE, id="MIG on a device that is not partitioned"),
    ],
)
def test_a_device_is_rejected_only_for_what_it_lacks(state, request_, want):
    assert reject_reason(state, request_, ANYTHING) is want


@pytest.mark.parametrize(
    ("preferences", "want"),
    [
        pytest.param(Preferences(gpu_type=("h200",)), None, id="case does not matter"),
        pytest.param(Preferences(gpu_type=("A100", "H200")), None, id="any of the list"),
        pytest.param(Preferences(gpu_type=("A100",)), Reject.TYPE, id="another type"),
        pytest.param(Preferences(gpu_type_not=("h200",)), Reject.TYPE, id="a type not wanted"),
        pytest.param(Preferences(gpu_type=("H200",), gpu_type_not=("NVIDIA",)), Reject.TYPE, id="wanted and not wanted"),
        pytest.param(Preferences(gpu_uuid=("gpu-0",)), None, id="this UUID"),
        pytest.param(Preferences(gpu_uuid=("GPU-",)), Reject.UUID, id="a UUID is no prefix"),
        pytest.param(Preferences(gpu_uuid_not=("GPU-1", "GPU-0")), Reject.UUID, id="not this UUID"),
    ],
)
def test_types_match_by_word_and_uuids_as_a_whole(preferences, want):
    assert reject_reason(state_with(), ask(), preferences) is want


def test_an_exclusive_share_is_the_whole_device_alone():
    preferences = Preferences(isolation=Isolation.EXCLUSIVE)
    assert share_on(make_device(), ask(mib=None), preferences) == DeviceShare("GPU-0", 1000 * MIB, 100)
    assert reject_reason(state_with(), ask(mib=None), preferences) is None
    assert reject_reason(state_with(share(mib=1, cores=1)), ask(mib=None), preferences) is Reject.EXCLUSIVE


def test_exclusive_share_excludes_all_others():
    taken = state_with(share_on(make_device(), ask(mib=None), Preferences(isolation=Isolation.EXCLUSIVE)))
    assert reject_reason(taken, ask(mib=1), ANYTHING) is Reject.MEMORY


@pytest.mark.parametrize(
    ("device_mib", "named", "want"),
    [
        pytest.param(1000, 1, Reject.MEMORY, id="quotas counted 1 MiB"),
        pytest.param(1000, 999, Reject.MEMORY, id="one MiB short"),
        pytest.param(1000, 1000, None, id="all of it"),
        pytest.param(1000, 2000, None, id="counted as a larger GPU"),
    ],
)
def test_no_whole_gpu_is_given_for_less_memory_than_it_has(device_mib, named, want):
    state, exclusive = DeviceState.of(make_device(mib=device_mib)), Preferences(isolation=Isolation.EXCLUSIVE)
    assert reject_reason(state, ask(mib=named), exclusive) is want
    assert reject_reason(state, ask(vgpus=2, mib=named), exclusive) is want, "the amount of each, not their sum"


def test_fraction_of_mib_below_promised_memory_may_be_omitted():
    state = DeviceState.of(replace(make_device(), memory_bytes=10 * MIB + 7))
    assert reject_reason(state, ask(mib=10), Preferences(isolation=Isolation.EXCLUSIVE)) is None


def test_gpu_too_large_for_amount_is_rejected_even_in_use():
    exclusive = Preferences(isolation=Isolation.EXCLUSIVE)
    assert reject_reason(state_with(share(mib=1, cores=1)), ask(mib=1), exclusive) is Reject.MEMORY


def test_amounts_are_the_even_split_of_the_totals():
    assert share_on(make_device(), ask(vgpus=4, mib=50, cores=20), ANYTHING) == DeviceShare("GPU-0", 50 * MIB, 20)


def test_a_whole_device_is_promised_in_whole_mib():
    device = replace(make_device(), memory_bytes=10 * MIB + 7)
    assert share_on(device, ask(mib=None), ANYTHING).memory_bytes == 10 * MIB


def test_a_mig_instance_in_use_is_not_free():
    partitioned = DeviceState.of(
        make_device(mig=(make_instance(0, 0), make_instance(0, 1, profile="2g.20gb"))), [DeviceShare("MIG-0-0", MIB)]
    )
    assert reject_reason(partitioned, ask_mig(("1g.10gb", 1)), ANYTHING) is Reject.MIG_PROFILE
    assert reject_reason(partitioned, ask_mig(("2g.20gb", 1)), ANYTHING) is None
