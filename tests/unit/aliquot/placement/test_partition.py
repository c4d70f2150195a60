# SPDX-License-Identifier: Apache-2.0
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.contract.model import DeviceShare, MigInstance, Policy
from aliquot.contract.units import MIB
from aliquot.placement import mig
from aliquot.placement.demand import PPM
from aliquot.placement.device import DeviceState
from aliquot.placement.partition import Partition, choose_instances
from tests.unit.aliquot.placement.builders import SHAPES, empty, make_instance, names, partitioned, starts

PACKING = (Policy.BINPACK, Policy.FRAG)


@pytest.mark.parametrize("policy", PACKING)
def test_instances_are_packed_on_the_device_most_in_use(policy):
    states = [partitioned(0, 3), partitioned(1, 3, 0), partitioned(2, 3)]
    assert names(choose_instances(states, "1g.10gb", 3, policy)) == ["MIG-1-1", "MIG-1-2", "MIG-0-0"]


def test_instances_are_spread_over_devices_on_request():
    states = [partitioned(0, 3, 0), partitioned(1, 3), partitioned(2, 3)]
    assert names(choose_instances(states, "1g.10gb", 4, Policy.SPREAD)) == ["MIG-1-0", "MIG-2-0", "MIG-0-1", "MIG-1-1"]


@pytest.mark.parametrize("policy", PACKING)
def test_preferred_instances_come_first(policy):
    states = [partitioned(0, 3, 0), partitioned(1, 3)]
    assert names(choose_instances(states, "1g.10gb", 2, policy, preferred_uuids={"MIG-1-2"})) == ["MIG-1-2", "MIG-0-1"]


@pytest.mark.parametrize("policy", PACKING)
def test_too_few_instances_give_no_choice(policy):
    assert choose_instances([partitioned(0, 2)], "1g.10gb", 3, policy) is None
    assert choose_instances([partitioned(0, 2)], "2g.20gb", 1, policy) is None


@pytest.mark.parametrize("policy", PACKING)
def test_a_small_instance_is_made_where_it_leaves_most_room(policy):
    chosen = choose_instances([empty()], "1g.10gb", 3, policy)
    assert starts(chosen) == [6, 4, 5]
    left = empty(used=names(chosen))
    assert starts(mig.free_instances(left, "3g.40gb")) == [0]


@pytest.mark.parametrize("policy", PACKING)
def test_several_instances_of_one_container_do_not_overlap(policy):
    chosen = choose_instances([empty()], "2g.20gb", 3, policy)
    assert sorted(starts(chosen)) == [0, 2, 4]
    assert choose_instances([empty()], "3g.40gb", 3, policy) is None


@pytest.mark.parametrize("policy", PACKING)
def test_an_instance_that_exists_comes_before_one_that_must_be_made(policy):
    assert names(choose_instances([empty(0, make_instance(0, 0))], "1g.10gb", 1, policy)) == ["MIG-0-0"]


def test_partly_used_gpus_are_filled_before_empty_ones_are_partitioned():
    states = [empty(0), empty(1, used=("GPU-1/1g.10gb@6",))]
    for policy in PACKING:
        assert names(choose_instances(states, "2g.20gb", 1, policy)) == ["GPU-1/2g.20gb@4"]
    assert names(choose_instances(states, "2g.20gb", 1, Policy.SPREAD)) == ["GPU-0/2g.20gb@0"]


@given(st.lists(st.tuples(st.sampled_from(sorted(SHAPES)), st.booleans(), st.integers(0, 6)), max_size=24), st.sampled_from(PACKING))
def test_instances_never_overlap_and_room_equals_what_fits(history, policy):
    used: list[MigInstance] = []
    for profile, releasing, position in history:
        if releasing and used:
            used.pop(position % len(used))
            continue
        state = empty(used=names(used))
        chosen = choose_instances([state], profile, 1, policy)
        assert (chosen is None) is (mig.room(state, profile) == 0)
        if chosen is None:
            continue
        assert mig.room(empty(used=names([*used, *chosen])), profile) <= mig.room(state, profile) - 1
        used += chosen
        assert not any(a.overlaps(b) for a, b in combinations(used, 2))
        assert sum(one.profile == profile for one in used) <= SHAPES[profile][1]


# --- fragments ------------------------------------------------------------------------------------------------------


def useless(state: DeviceState) -> Fraction:
    """Return the part of the device's slices that is free and useless to a pod of any of its profiles, each equally likely."""
    total, free = mig.slices(state.device.mig_instances, state.used_instances)
    sizes = mig.sizes(state.device.mig_instances)
    return Fraction(sum(max(0, free - size * mig.room(state, profile)) for profile, size in sizes.items()), total * len(sizes))


@st.composite
def histories(draw: st.DrawFn) -> DeviceState:
    """Draw a GPU after instances were taken at random places."""
    state = empty(0, *([make_instance(0, 2)] if draw(st.booleans()) else []))
    for profile in draw(st.lists(st.sampled_from(sorted(SHAPES)), max_size=7)):
        free = mig.free_instances(state, profile)
        if free:
            state = state.with_share(DeviceShare(draw(st.sampled_from(free)).uuid, MIB))
    return state


@given(histories())
def test_growth_of_each_instance_is_the_change_of_useless_slices(state):
    partition = Partition.of(state.device, state.used_instances)
    assert partition.fragmentation == pytest.approx(float(useless(state) * PPM), abs=1)
    assert partition.slices == mig.slices(state.device.mig_instances, state.used_instances)
    for profile in SHAPES:
        grown = {
            instance.uuid: useless(state.with_share(DeviceShare(instance.uuid, MIB))) - useless(state)
            for instance in mig.free_instances(state, profile)
        }
        found = {state.device.mig_instances[at].uuid: partition.growth(at) for at in partition.free(profile)}
        assert found == {uuid: pytest.approx(float(growth * PPM), abs=1) for uuid, growth in grown.items()}
        assert partition.growths.get(profile) == min(found.values(), default=None)
        chosen = choose_instances([state], profile, 1, Policy.FRAG)
        assert chosen is None if not found else found[chosen[0].uuid] == partition.growths[profile]


def test_frag_fills_half_a_gpu_before_it_blocks_small_instances():
    states = [empty(0, used=("GPU-0/1g.10gb@6",)), empty(1, used=("GPU-1/3g.40gb@0",))]
    assert names(choose_instances(states, "3g.40gb", 1, Policy.FRAG)) == ["GPU-1/3g.40gb@4"]
    assert names(choose_instances(states, "1g.10gb", 1, Policy.FRAG)) == ["GPU-0/1g.10gb@4"]


def test_devices_of_one_model_share_a_layout():
    first, second = (Partition.of(empty(minor).device) for minor in range(2))
    assert first.layout is second.layout
    assert first.using(["GPU-0/1g.10gb@6"]).releasing("GPU-0/1g.10gb@6") == first
