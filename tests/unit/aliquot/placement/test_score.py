# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.contract.model import Policy
from aliquot.placement.device import DeviceState
from aliquot.placement.score import cost, fragmentation
from tests.unit.aliquot.placement.builders import make_device, share


def state_with(*used) -> DeviceState:
    return DeviceState.of(make_device(), used)


@pytest.mark.parametrize(
    "full_or_empty",
    [
        pytest.param(state_with(), id="empty"),
        pytest.param(state_with(share(mib=1000, cores=100)), id="full"),
    ],
)
def test_an_empty_and_a_full_device_strand_nothing(full_or_empty):
    assert fragmentation(full_or_empty) == 0


def test_memory_without_compute_is_stranded():
    balanced = state_with(share(mib=500, cores=50))
    lopsided = state_with(share(mib=0 + 1, cores=100))
    assert fragmentation(lopsided) > fragmentation(balanced)


def test_free_memory_and_compute_are_stranded_where_no_share_is_left():
    assert fragmentation(DeviceState.of(make_device(), [share(mib=500, cores=50)], max_shares=1)) > fragmentation(
        state_with(share(mib=500, cores=50))
    )


def test_frag_prefers_to_complete_a_device_over_breaking_an_empty_one():
    half = share(mib=500, cores=50)
    assert cost(Policy.FRAG, state_with(half), half) < cost(Policy.FRAG, state_with(), half)


def test_frag_puts_a_share_where_its_shape_fits_what_is_left():
    memory_left = state_with(share(mib=250, cores=75))
    balanced = state_with(share(mib=500, cores=50))
    memory_heavy = share(mib=500, cores=25)
    assert cost(Policy.FRAG, memory_left, memory_heavy) < cost(Policy.FRAG, balanced, memory_heavy)
    assert cost(Policy.BINPACK, memory_left, memory_heavy) == cost(Policy.BINPACK, balanced, memory_heavy)


def test_binpack_prefers_the_fuller_device_and_spread_the_emptier():
    fuller, emptier = state_with(share(mib=500)), state_with(share(mib=100))
    assert cost(Policy.BINPACK, fuller, share()) < cost(Policy.BINPACK, emptier, share())
    assert cost(Policy.SPREAD, fuller, share()) > cost(Policy.SPREAD, emptier, share())


def test_topology_has_no_opinion_on_a_single_device():
    assert cost(Policy.TOPOLOGY, state_with(), share()) == cost(Policy.TOPOLOGY, state_with(share(mib=500)), share())
