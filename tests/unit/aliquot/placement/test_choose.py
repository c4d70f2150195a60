# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from itertools import chain, pairwise

import pytest

from aliquot.contract.model import ContainerAssignment, DeviceShare, Isolation, NumaMode, PodRequest, Policy, Preferences
from aliquot.contract.units import MIB
from aliquot.placement.choose import Choice, PodChoice, choose, choose_pod, with_shares
from aliquot.placement.device import AccountingError, DeviceState
from aliquot.placement.fit import Reject
from aliquot.placement.refusal import Refusal
from aliquot.placement.together import MAX_SETS_TRIED
from tests.unit.aliquot.placement.builders import (
    ANYTHING,
    all_to_all,
    ask,
    ask_mig,
    make_device,
    make_instance,
    make_states,
    nvlinks,
    share,
)


def minors(choice: Choice | Refusal) -> list[int]:
    assert isinstance(choice, Choice), choice
    return [int(given.device_uuid.removeprefix("GPU-")) for given in choice.shares]


def placed(pod: PodChoice | Refusal) -> dict[str, list[int]]:
    assert isinstance(pod, PodChoice), pod
    return {choice.container: minors(choice) for choice in pod.containers}


def test_shares_match_request_on_distinct_devices():
    choice = choose(make_states(4), ask(2, mib=50, cores=20), ANYTHING, Policy.FRAG)
    assert isinstance(choice, Choice)
    assert len({given.device_uuid for given in choice.shares}) == 2
    assert {(given.memory_bytes, given.cores_percent) for given in choice.shares} == {(50 * MIB, 20)}


def test_shares_are_in_order_of_minor_numbers_for_any_seed():
    for seed in map(str, range(20)):
        assert all(a < b for a, b in pairwise(minors(choose(make_states(12), ask(6), ANYTHING, Policy.FRAG, seed=seed))))


def test_a_choice_becomes_a_part_of_an_assignment():
    shares = (share(0),)
    assert Choice("main", shares).assignment() == ContainerAssignment("main", shares)


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        pytest.param(Policy.BINPACK, 1, id="binpack takes the fullest that fits"),
        pytest.param(Policy.SPREAD, 3, id="spread takes the emptiest"),
        pytest.param(Policy.FRAG, 1, id="frag completes a device"),
        pytest.param(Policy.TOPOLOGY, 1, id="topology leaves empty devices empty"),
    ],
)
def test_policies_choose_differently_among_devices_that_fit(policy, want):
    states = make_states(4, share(0, mib=800, cores=80), share(1, mib=500, cores=50), share(2, mib=250, cores=25))
    assert minors(choose(states, ask(mib=500, cores=50), ANYTHING, policy)) == [want]


def test_the_pods_own_policy_wins():
    states = make_states(2, share(0))
    assert minors(choose(states, ask(), Preferences(policy=Policy.SPREAD), Policy.BINPACK)) == [1]


def test_ties_fall_by_seed_and_not_by_the_order_of_devices():
    states = make_states(8)
    chosen = {seed: minors(choose(states, ask(), ANYTHING, Policy.FRAG, seed=seed)) for seed in map(str, range(40))}
    assert len(set(map(tuple, chosen.values()))) > 4
    for seed, want in chosen.items():
        assert minors(choose(states[::-1], ask(), ANYTHING, Policy.FRAG, seed=seed)) == want


def test_preferred_devices_are_taken_when_they_fit():
    states = make_states(4, share(2, mib=950))
    assert minors(choose(states, ask(2), ANYTHING, Policy.BINPACK, preferred_uuids=["GPU-1", "GPU-3"])) == [1, 3]
    assert 2 not in minors(choose(states, ask(2), ANYTHING, Policy.BINPACK, preferred_uuids=["GPU-2", "GPU-3"]))
    assert 3 in minors(choose(states, ask(2), ANYTHING, Policy.BINPACK, preferred_uuids=["GPU-2", "GPU-3"]))


def test_preference_outweighs_the_policy():
    states = make_states(4, share(0, mib=500), share(1, mib=400))
    assert minors(choose(states, ask(2), ANYTHING, Policy.BINPACK, preferred_uuids=["GPU-3"])) == [0, 3]


def test_familiar_devices_break_ties_and_nothing_else():
    assert minors(choose(make_states(4), ask(2), ANYTHING, Policy.BINPACK, familiar_uuids=["GPU-1", "GPU-3"])) == [1, 3]
    states = make_states(4, share(0, mib=500))
    assert minors(choose(states, ask(), ANYTHING, Policy.BINPACK, familiar_uuids=["GPU-3"])) == [0]


# --- topology -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Policy))
def test_of_equal_devices_the_best_linked_are_taken(policy):
    pairs = nvlinks([(0, 5), (1, 4), (2, 7), (3, 6)])
    assert minors(choose(make_states(8), ask(2, mib=None), ANYTHING, policy, links=pairs)) in ([0, 5], [1, 4], [2, 7], [3, 6])


def test_topology_prefers_links_over_fuller_devices_and_binpack_does_not():
    states = make_states(4, share(0), share(1))
    links = nvlinks([(2, 3)])
    assert minors(choose(states, ask(2), ANYTHING, Policy.TOPOLOGY, links=links)) == [2, 3]
    assert minors(choose(states, ask(2), ANYTHING, Policy.BINPACK, links=links)) == [0, 1]


def test_a_single_container_does_not_break_a_linked_pair():
    assert minors(choose(make_states(3), ask(), ANYTHING, Policy.FRAG, links=nvlinks([(0, 2)]))) == [1]


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("gone", [{"healthy": False}, {"cordoned": True}, {"device": make_device(0, mig=(make_instance(0, 0),))}])
def test_single_container_takes_gpu_without_free_partner(gone, policy):
    states = make_states(4)
    states = [replace(states[0], **gone), *states[1:]]
    chosen = [choose(states, ask(), ANYTHING, policy, links=nvlinks([(0, 1), (2, 3)]), seed=str(seed)) for seed in range(60)]
    assert {minor for choice in chosen for minor in minors(choice)} == {1}


def test_a_second_pair_is_left_whole():
    states, links = make_states(6), nvlinks([(0, 1), (2, 3), (4, 5)])
    first = choose(states, ask(2, mib=None), ANYTHING, Policy.TOPOLOGY, links=links)
    assert isinstance(first, Choice)
    second = choose(with_shares(states, first.shares), ask(2, mib=None), ANYTHING, Policy.TOPOLOGY, links=links)
    assert minors(first) in ([0, 1], [2, 3], [4, 5])
    assert minors(second) in ([0, 1], [2, 3], [4, 5])


def test_a_link_between_two_chosen_devices_is_not_taken_from_anyone():
    states = make_states(6, share(2))
    links = nvlinks([(0, 1), (2, 3)], lanes=2) + nvlinks([(3, 4), (3, 5)], lanes=1)
    assert minors(choose(states, ask(2), ANYTHING, Policy.TOPOLOGY, links=links)) == [0, 1]


def test_search_over_many_equal_devices_is_bounded_and_keeps_island():
    islands = nvlinks((a, b) for a in range(24) for b in range(a) if a % 2 == b % 2)
    chosen = minors(choose(make_states(24), ask(8, mib=None), ANYTHING, Policy.TOPOLOGY, links=islands))
    assert len({minor % 2 for minor in chosen}) == 1


# --- NUMA ---------------------------------------------------------------------------------------------------------


def test_numa_strict_keeps_devices_on_one_node():
    states = make_states(8, share(0), share(7), numa_nodes=2)
    strict = Preferences(numa=NumaMode.STRICT)
    assert minors(choose(states, ask(4), strict, Policy.BINPACK)) in ([0, 1, 2, 3], [4, 5, 6, 7])
    assert minors(choose(states, ask(2), ANYTHING, Policy.BINPACK)) == [0, 7]


def test_numa_strict_refuses_what_no_node_has():
    refusal = choose(make_states(8, numa_nodes=2), ask(5), Preferences(numa=NumaMode.STRICT), Policy.FRAG)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reject.NUMA


def test_numa_strict_rejects_unknown_nodes_except_for_one_device():
    unknown = [DeviceState.of(make_device(minor, numa=None)) for minor in range(2)]
    strict = Preferences(numa=NumaMode.STRICT)
    assert isinstance(choose(unknown, ask(2), strict, Policy.FRAG), Refusal)
    assert isinstance(choose(unknown, ask(1), strict, Policy.FRAG), Choice)


def test_numa_prefer_outweighs_the_policy_but_not_the_fit():
    states = make_states(4, share(0), share(3), numa_nodes=2)
    prefer = Preferences(numa=NumaMode.PREFER)
    assert minors(choose(states, ask(2), prefer, Policy.BINPACK)) in ([0, 1], [2, 3])
    assert minors(choose(states, ask(3), prefer, Policy.BINPACK))


def test_preferred_devices_outweigh_numa_prefer():
    states, prefer = make_states(4, numa_nodes=2), Preferences(numa=NumaMode.PREFER)
    assert minors(choose(states, ask(2), prefer, Policy.FRAG, preferred_uuids=["GPU-0", "GPU-3"])) == [0, 3]


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_node_without_room_refuses_with_every_devices_reason():
    refusal = choose(make_states(2, share(0, mib=950), healthy=False), ask(), ANYTHING, Policy.FRAG)
    assert isinstance(refusal, Refusal)
    assert dict(refusal.by_device) == {"GPU-0": Reject.UNHEALTHY, "GPU-1": Reject.UNHEALTHY}


def test_more_devices_than_the_node_has_are_refused():
    refusal = choose(make_states(2), ask(3), ANYTHING, Policy.FRAG)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reject.COUNT


# --- MIG ----------------------------------------------------------------------------------------------------------


def partitioned(parent: int, count: int) -> DeviceState:
    return DeviceState.of(make_device(parent, mig=tuple(make_instance(parent, index) for index in range(count))))


def test_instances_are_chosen_whole_and_once():
    choice = choose([partitioned(0, 2), *make_states(1)], ask_mig(("1g.10gb", 2)), ANYTHING, Policy.FRAG)
    assert isinstance(choice, Choice)
    assert choice.shares == (DeviceShare("MIG-0-0", 100 * MIB), DeviceShare("MIG-0-1", 100 * MIB))


def test_instances_of_two_profiles_are_chosen_together():
    device = make_device(0, mig=(make_instance(0, 0), make_instance(0, 1, profile="2g.20gb", mib=200)))
    choice = choose([DeviceState.of(device)], ask_mig(("1g.10gb", 1), ("2g.20gb", 1)), ANYTHING, Policy.FRAG)
    assert isinstance(choice, Choice)
    assert [given.device_uuid for given in choice.shares] == ["MIG-0-0", "MIG-0-1"]


def test_instance_with_id_from_kubelet_is_taken():
    choice = choose([partitioned(0, 4)], ask_mig(("1g.10gb", 1)), ANYTHING, Policy.FRAG, preferred_uuids=["MIG-0-2"])
    assert isinstance(choice, Choice)
    assert choice.shares[0].device_uuid == "MIG-0-2"


def test_too_few_instances_are_refused():
    refusal = choose([partitioned(0, 2)], ask_mig(("1g.10gb", 3)), ANYTHING, Policy.FRAG)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reject.MIG_PROFILE


# --- pods ---------------------------------------------------------------------------------------------------------


def test_containers_of_a_pod_count_each_other():
    pod = PodRequest((ask(mib=600, name="a"), ask(mib=600, name="b")))
    assert sorted(chain.from_iterable(placed(choose_pod(make_states(2), pod, Policy.BINPACK)).values())) == [0, 1]
    refusal = choose_pod(make_states(1), pod, Policy.BINPACK)
    assert isinstance(refusal, Refusal)
    assert refusal.sentence.endswith("The devices of this pod's other containers (a) count as used.")


def test_the_first_container_is_refused_without_a_word_about_others():
    refusal = choose_pod(make_states(1), PodRequest((ask(mib=2000),)), Policy.FRAG)
    assert isinstance(refusal, Refusal)
    assert "this pod's" not in refusal.sentence


def test_small_container_leaves_only_device_that_large_one_needs():
    states = make_states(2, share(0, mib=100))
    pod = PodRequest((ask(mib=100, name="small"), ask(mib=None, name="large")))
    assert placed(choose_pod(states, pod, Policy.SPREAD)) == {"small": [0], "large": [1]}


def test_container_yields_when_its_best_device_leaves_another_no_room():
    pod = PodRequest((ask(2, mib=6, name="left"), ask(mib=16, name="right")))
    states = [DeviceState(make_device(minor, mib=mib), max_shares=2) for minor, mib in enumerate((20, 30))]
    right = choose(states, pod.containers[1], ANYTHING, Policy.FRAG)
    assert minors(right) == [0], "which leaves 4 MiB there"
    assert placed(choose_pod(states, pod, Policy.FRAG)) == {"left": [0, 1], "right": [1]}


@pytest.mark.parametrize(
    ("free_mib", "asked"),
    [
        ([*range(20_000, 20_800, 100), *range(40_000, 40_400, 100)], [(4, 20_000), (12, 19_000)]),
        ([22_000, 23_000, 24_000, 25_000, 41_000, 42_000, 43_000, 44_000], [(2, 21_000), (2, 20_000), (8, 19_000)]),
        ([22_000, 23_000, 24_000, 25_000, 26_000, 41_000, 42_000, 43_000], [(1, 21_000), (1, 20_500), (1, 20_000), (8, 19_000)]),
    ],
)
@pytest.mark.parametrize("policy", Policy)
def test_a_layout_is_found_among_many_gpus_that_all_differ(free_mib, asked, policy):
    states = [DeviceState(make_device(minor, mib=mib)) for minor, mib in enumerate(free_mib)]
    pod = PodRequest(tuple(ask(vgpus, mib=mib, name=f"c{position}") for position, (vgpus, mib) in enumerate(asked)))
    assert isinstance(choose_pod(states, pod, policy), PodChoice)


@pytest.mark.parametrize("policy", Policy)
def test_a_sidecar_gives_way_to_an_init_container(policy):
    states = [DeviceState(make_device(minor, mib=mib)) for minor, mib in enumerate((20, 30))]
    pod = PodRequest((ask(mib=16, name="cache"), ask(2, mib=6, name="prepare", init=True)))
    assert placed(choose_pod(states, pod, policy)) == {"cache": [1], "prepare": [0, 1]}


def test_search_ends_when_many_different_gpus_do_not_fit():
    states = [DeviceState(make_device(minor, mib=1000 + 70 * minor), used_cores_percent=40) for minor in range(16)]
    containers = tuple(ask(3, mib=100 + position, cores=31, name=f"c{position}") for position in range(6))
    refusal = choose_pod(states, PodRequest(containers), Policy.FRAG)
    assert isinstance(refusal, Refusal)
    assert refusal.sets_tried == MAX_SETS_TRIED


def test_containers_come_back_in_spec_order():
    pod = PodRequest((ask(mib=1, name="small"), ask(mib=900, name="large")))
    assert list(placed(choose_pod(make_states(2), pod, Policy.FRAG))) == ["small", "large"]


def test_an_init_container_gets_the_devices_of_the_app_containers_again():
    pod = PodRequest((ask(mib=100, name="prepare", init=True), ask(mib=None, name="train")))
    assert placed(choose_pod(make_states(2, share(0)), pod, Policy.BINPACK)) == {"prepare": [1], "train": [1]}


def test_init_container_counts_with_sidecars_declared_before_it():
    sidecar = ask(mib=600, name="cache")
    prepare = ask(mib=600, name="prepare", init=True)
    app = ask(mib=100, name="app")
    assert isinstance(choose_pod(make_states(1), PodRequest((sidecar, prepare, app)), Policy.FRAG), Refusal)
    assert isinstance(choose_pod(make_states(1), PodRequest((prepare, sidecar, app)), Policy.FRAG), PodChoice)


def test_exclusive_containers_of_one_pod_get_devices_of_their_own():
    pod = PodRequest((ask(mib=None, name="a"), ask(mib=None, name="b")), Preferences(isolation=Isolation.EXCLUSIVE))
    assert sorted(chain.from_iterable(placed(choose_pod(make_states(3, share(1)), pod, Policy.FRAG)).values())) == [0, 2]


def test_shares_of_a_device_that_is_not_there_are_an_error():
    with pytest.raises(AccountingError, match="expected a device that carries"):
        with_shares(make_states(1), [share(7)])


def test_a_fully_linked_node_of_sixteen_devices_is_chosen_from_exactly():
    assert len(minors(choose(make_states(16), ask(8, mib=None), ANYTHING, Policy.FRAG, links=all_to_all(16)))) == 8
