# SPDX-License-Identifier: Apache-2.0
"""Invariant I1 and the honesty of placement: no room is promised twice, a refusal is true, and the best is the best.

The oracles here count from first principles (plain sums over shares, brute force over sets) and share no code with aliquot/placement/.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from aliquot.contract.model import (
    ContainerRequest,
    Device,
    DeviceShare,
    Isolation,
    Link,
    LinkKind,
    NumaMode,
    PodRequest,
    Policy,
    Preferences,
)
from aliquot.contract.units import MIB
from aliquot.placement import score
from aliquot.placement.choose import Choice, choose, choose_pod, with_shares
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import Reject, reject_reason, share_on
from aliquot.placement.refusal import Refusal
from aliquot.placement.topology import LinkTable
from tests.unit.aliquot.placement.builders import make_device, make_instance

MAX_SHARES = 4

vgpu_devices = st.builds(make_device, mib=st.integers(1, 64), numa=st.none() | st.integers(0, 1), model=st.sampled_from(["A100", "H100"]))
mig_devices = st.builds(lambda count: make_device(mig=tuple(make_instance(0, index, mib=8) for index in range(count))), st.integers(1, 3))


@st.composite
def nodes(draw: st.DrawFn, devices: st.SearchStrategy[Device] = vgpu_devices, max_size: int = 6) -> list[Device]:
    """Draw a node; its devices are renumbered so that each is itself."""
    drawn = draw(st.lists(devices, min_size=1, max_size=max_size))
    return [
        make_device(
            minor,
            mib=device.memory_bytes // MIB,
            model=device.model,
            numa=device.numa_node,
            mig=tuple(make_instance(minor, index, mib=8) for index in range(len(device.mig_instances))),
        )
        for minor, device in enumerate(drawn)
    ]


@st.composite
def requests(draw: st.DrawFn, name: str = "main", max_vgpus: int = 4) -> ContainerRequest:
    vgpus = draw(st.integers(1, max_vgpus))
    cores = draw(st.none() | st.sampled_from([1, 30, 50, 99, 100]) | st.integers(1, 100))
    if draw(st.integers(0, 5)) == 0:
        percent = vgpus * draw(st.integers(1, 99))
        return ContainerRequest(name, vgpus, None, None if cores is None else cores * vgpus, memory_percent=percent)
    mib = draw(st.none() | st.integers(1, 70))
    return ContainerRequest(name, vgpus, None if mib is None else mib * vgpus * MIB, None if cores is None else cores * vgpus)


mig_requests = st.builds(lambda count: ContainerRequest("main", mig=(("1g.10gb", count),)), st.integers(1, 4))
policies = st.sampled_from(Policy)
preferences = st.builds(
    Preferences,
    gpu_type=st.sampled_from([(), (), ("a100",)]),
    gpu_uuid_not=st.sampled_from([(), (), ("GPU-0",)]),
    numa=st.none() | st.sampled_from(NumaMode),
)
seeds = st.text(max_size=3)


def links_between(devices: list[Device]) -> st.SearchStrategy[list[Link]]:
    pairs = list(combinations([device.uuid for device in devices], 2))
    paths = st.sampled_from([None, *(kind for kind in LinkKind if kind is not LinkKind.NVLINK)])
    one = st.builds(
        lambda pair, kind, lanes, pcie: Link(pair[0], pair[1], kind, lanes, pcie if kind is LinkKind.NVLINK else None),
        st.sampled_from(pairs),
        st.sampled_from(LinkKind),
        st.integers(0, 18),
        paths,
    )
    return st.lists(one, max_size=12) if pairs else st.just([])


# --- the oracle -----------------------------------------------------------------------------------------------------


def assert_within_capacity(devices: list[Device], shares: list[DeviceShare]) -> None:
    """Count what was promised on every device, by plain sums."""
    held = defaultdict(list)
    for share in shares:
        held[share.device_uuid].append(share)
    for device in devices:
        on_device = held.pop(device.uuid, [])
        assert sum(share.memory_bytes for share in on_device) <= device.memory_bytes
        assert sum(share.cores_percent or 0 for share in on_device) <= 100
        assert len(on_device) <= MAX_SHARES
        for instance in device.mig_instances:
            assert len(held.pop(instance.uuid, [])) <= 1
    assert not held, "a share of a device that does not exist"


def takes(device: Device, shares: list[DeviceShare], request: ContainerRequest, preferences: Preferences) -> bool:
    """Say whether a device has room for one vGPU next to these shares."""
    on_device = [share for share in shares if share.device_uuid == device.uuid]
    memory = device.memory_bytes if request.memory_bytes is None else request.memory_bytes // request.vgpus
    if request.memory_percent is not None:
        percent = request.memory_percent // request.vgpus
        memory = max(1, device.memory_bytes // MIB * percent // 100) * MIB
    cores = None if request.cores_percent is None else request.cores_percent // request.vgpus
    reserved = [share.cores_percent for share in on_device] + [cores]
    total = sum(amount or 0 for amount in reserved)
    return (
        not device.mig_enabled
        and len(on_device) < MAX_SHARES
        and sum(share.memory_bytes for share in on_device) + memory <= device.memory_bytes
        and (total <= 99 if None in reserved else total <= 100)
        and (not preferences.gpu_type or device.model == "A100")
        and not (preferences.gpu_uuid_not and device.minor == 0)
    )


def fitting_sets(
    devices: list[Device], shares: list[DeviceShare], request: ContainerRequest, preferences: Preferences
) -> list[tuple[Device, ...]]:
    able = [device for device in devices if takes(device, shares, request, preferences)]
    sets = combinations(able, request.vgpus)
    if preferences.numa is not NumaMode.STRICT or request.vgpus == 1:
        return list(sets)
    return [chosen for chosen in sets if chosen[0].numa_node is not None and len({device.numa_node for device in chosen}) == 1]


def states_of(devices: list[Device], shares: list[DeviceShare]) -> list[DeviceState]:
    return [DeviceState.of(device, shares, max_shares=MAX_SHARES) for device in devices]


@st.composite
def loaded_nodes(draw: st.DrawFn) -> tuple[list[Device], list[DeviceShare]]:
    """Draw a node with whatever some earlier containers were given."""
    devices = draw(nodes())
    shares: list[DeviceShare] = []
    for request in draw(st.lists(requests(max_vgpus=2), max_size=6)):
        choice = choose(states_of(devices, shares), request, Preferences(), Policy.SPREAD)
        shares += choice.shares if isinstance(choice, Choice) else ()
    return devices, shares


alike_nodes: st.SearchStrategy[tuple[list[Device], list[DeviceShare]]] = st.integers(3, 6).map(
    lambda count: ([make_device(minor) for minor in range(count)], [])
)
"""Unused nodes of equal devices, where links alone tell these apart."""


# --- I1 -------------------------------------------------------------------------------------------------------------


@given(
    nodes(vgpu_devices | mig_devices),
    st.lists(st.tuples(requests() | mig_requests, preferences, policies) | st.integers(0, 100), max_size=30),
)
def test_no_history_of_grants_and_releases_promises_more_than_a_device_has(devices, history):
    states = states_of(devices, [])
    granted: list[Any] = []
    for step in history:
        if isinstance(step, int):
            if granted:
                for share in granted.pop(step % len(granted)):
                    states = [state.without_share(share) if state.carries(share) else state for state in states]
        else:
            choice = choose(states, *step)
            event("granted" if isinstance(choice, Choice) else "refused")
            if isinstance(choice, Choice):
                states = with_shares(states, choice.shares)
                granted.append(choice.shares)
        shares = [share for grant in granted for share in grant]
        assert_within_capacity(devices, shares)
        assert states == states_of(devices, shares), "the running state is the sum of what is granted"


@given(nodes(), st.lists(requests(), min_size=1, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4), policies, seeds)
def test_no_phase_of_a_pod_holds_more_than_its_devices_have(devices, drawn, inits, policy, seed):
    containers = [
        replace(request, container=f"c{position}", init=init) for position, (request, init) in enumerate(zip(drawn, inits, strict=False))
    ]
    choice = choose_pod(states_of(devices, []), PodRequest(tuple(containers)), policy, seed=seed)
    if isinstance(choice, Refusal):
        return
    assert [given.container for given in choice.containers] == [request.container for request in containers]
    staying: list[DeviceShare] = []
    for request, given_ in zip(containers, choice.containers, strict=True):
        assert len({share.device_uuid for share in given_.shares}) == request.vgpus
        assert_within_capacity(devices, staying + list(given_.shares))
        staying += () if request.init else given_.shares


def layouts_exist(
    devices: list[Device],
    shares: list[DeviceShare],
    containers: list[ContainerRequest],
    wanted: Preferences,
    given: tuple[list[DeviceShare], ...] = (),
) -> bool:
    """Say whether the containers that are left find devices other than those already given, and then every init container its own."""
    if len(given) < sum(not request.init for request in containers):
        request = [request for request in containers if not request.init][len(given)]
        return any(
            layouts_exist(devices, shares, containers, wanted, (*given, [share_on(device, request, wanted) for device in chosen]))
            for chosen in fitting_sets(devices, shares + [share for part in given for share in part], request, wanted)
        )
    placed, staying = iter(given), list(shares)
    for request in containers:
        if not request.init:
            staying += next(placed)
        elif not fitting_sets(devices, staying, request, wanted):
            return False
    return True


@given(
    nodes(max_size=4), st.lists(requests(max_vgpus=2), max_size=3), st.lists(requests(max_vgpus=2), min_size=2, max_size=3),
    st.sampled_from([None, None, 0, 1, 2]), preferences, policies,
)  # fmt: skip
def test_pod_is_refused_only_when_no_layout_has_room(devices, earlier, drawn, init, wanted, policy):
    shares: list[DeviceShare] = []
    for request in earlier:
        choice = choose(states_of(devices, shares), request, Preferences(), Policy.SPREAD)
        shares += choice.shares if isinstance(choice, Choice) else ()
    states = states_of(devices, shares)
    containers = [replace(request, container=f"c{position}", init=position == init) for position, request in enumerate(drawn)]
    pod = PodRequest(tuple(containers), wanted)
    possible = layouts_exist(devices, shares, containers, wanted)
    chosen = choose_pod(states, pod, policy)
    event(f"{'granted' if possible else 'refused'} a pod {'with' if any(request.init for request in containers) else 'without'} init")
    assert possible == (not isinstance(chosen, Refusal))
    for given_ in () if isinstance(chosen, Refusal) else chosen.containers:
        assert [share.device_uuid for share in given_.shares] == sorted({share.device_uuid for share in given_.shares})


@given(loaded_nodes())
def test_exclusive_device_is_never_shared(node):
    devices, shares = node
    choice = choose(states_of(devices, shares), ContainerRequest("main", 1), Preferences(isolation=Isolation.EXCLUSIVE), Policy.FRAG)
    idle = [device for device in devices if device.uuid not in {share.device_uuid for share in shares}]
    assert isinstance(choice, Choice) == bool(idle)
    if isinstance(choice, Choice):
        (taken,) = choice.shares
        after = with_shares(states_of(devices, shares), [taken])
        again = choose(after, ContainerRequest("other", 1, MIB), Preferences(gpu_uuid=(taken.device_uuid,)), Policy.FRAG)
        assert isinstance(again, Refusal)


@given(loaded_nodes(), st.integers(1, 3), st.integers(1, 70), policies, seeds)
def test_whole_gpu_is_granted_only_when_its_memory_does_not_exceed_request(node, vgpus, named_mib, policy, seed):
    """Quotas count what is named, and annotations can change after that."""
    devices, shares = node
    request = ContainerRequest("main", vgpus, vgpus * named_mib * MIB)
    choice = choose(states_of(devices, shares), request, Preferences(isolation=Isolation.EXCLUSIVE), policy, seed=seed)
    used = {share.device_uuid for share in shares}
    small = {device.uuid: device.memory_bytes for device in devices if device.memory_bytes <= named_mib * MIB and device.uuid not in used}
    event(type(choice).__name__)
    assert isinstance(choice, Choice) == (len(small) >= vgpus)
    if isinstance(choice, Choice):
        assert all(share.memory_bytes == small[share.device_uuid] for share in choice.shares)
        assert sum(share.memory_bytes for share in choice.shares) <= vgpus * named_mib * MIB


of_one_size = st.builds(make_device, mib=st.just(64), numa=st.none() | st.integers(0, 1))


@given(nodes(of_one_size), st.lists(requests(), max_size=3), st.integers(1, 4), st.booleans(), policies, seeds)
def test_whole_gpu_is_same_with_or_without_memory_amount_in_request(devices, earlier, vgpus, exclusive, policy, seed):
    """The webhook says it where it can, for quotas to count."""
    states = states_of(devices, [])
    for request in earlier:
        choice = choose(states, request, Preferences(), policy)
        states = states if isinstance(choice, Refusal) else with_shares(states, choice.shares)
    wishes = Preferences(isolation=Isolation.EXCLUSIVE if exclusive else None)
    asked = [ContainerRequest("main", vgpus, memory_bytes) for memory_bytes in (None, vgpus * 64 * MIB)]
    plain, counted = (choose(states, request, wishes, policy, seed=seed) for request in asked)
    assert isinstance(plain, Refusal) == isinstance(counted, Refusal)
    if isinstance(plain, Choice) and isinstance(counted, Choice):
        assert counted.shares == plain.shares
        after = with_shares(states, counted.shares)
        rest = Preferences(gpu_uuid=tuple(share.device_uuid for share in counted.shares))
        assert isinstance(choose(after, ContainerRequest("other", 1, MIB), rest, policy), Refusal)


# --- truth ----------------------------------------------------------------------------------------------------------


@given(loaded_nodes(), requests(), preferences, policies, seeds)
def test_a_request_is_refused_exactly_when_no_set_of_devices_takes_it(node, request, wishes, policy, seed):
    devices, shares = node
    possible = fitting_sets(devices, shares, request, wishes)
    choice = choose(states_of(devices, shares), request, wishes, policy, seed=seed)
    event(type(choice).__name__)
    if isinstance(choice, Refusal):
        assert not possible
        assert dict(choice.by_device).keys() <= {device.uuid for device in devices}
        assert choice.sentence
    else:
        assert tuple(share.device_uuid for share in choice.shares) in {tuple(device.uuid for device in chosen) for chosen in possible}


@given(loaded_nodes(), requests())
def test_every_reason_for_one_device_is_true_of_it(node, request):
    devices, shares = node
    choice = choose(states_of(devices, shares), request, Preferences(), Policy.FRAG)
    rejected = dict(choice.by_device) if isinstance(choice, Refusal) else {}
    for device in devices:
        if device.uuid in rejected:
            assert not takes(device, shares, request, Preferences())
            assert rejected[device.uuid] in (Reject.MEMORY, Reject.CORES, Reject.SHARES)
        elif isinstance(choice, Refusal):
            assert takes(device, shares, request, Preferences())


@given(loaded_nodes(), requests(), preferences, policies, seeds, st.randoms(use_true_random=False), st.data())
def test_a_choice_depends_on_nothing_but_its_inputs(node, request, wishes, policy, seed, random, data):
    devices, shares = node
    links = data.draw(links_between(devices))
    first = choose(states_of(devices, shares), request, wishes, policy, links=links, seed=seed)
    shuffled_states, shuffled_links = states_of(devices, shares), list(links)
    random.shuffle(shuffled_states)
    random.shuffle(shuffled_links)
    second = choose(shuffled_states, request, wishes, policy, links=shuffled_links, seed=seed)
    if isinstance(first, Choice):
        assert second == first
    else:
        assert isinstance(second, Refusal)
        assert (second.reason, dict(second.by_device)) == (first.reason, dict(first.by_device))


# --- the best -------------------------------------------------------------------------------------------------------


@given(loaded_nodes(), requests(), st.none() | st.sampled_from(NumaMode), seeds, st.data())
def test_topology_takes_the_best_linked_set_there_is(node, request, numa, seed, data):
    devices, shares = node
    links = data.draw(links_between(devices))
    wishes = Preferences(numa=numa)
    choice = choose(states_of(devices, shares), request, wishes, Policy.TOPOLOGY, links=links, seed=seed)
    if isinstance(choice, Refusal):
        return
    sets = fitting_sets(devices, shares, request, wishes)
    if numa is NumaMode.PREFER and request.vgpus > 1:
        sets = fitting_sets(devices, shares, request, Preferences(numa=NumaMode.STRICT)) or sets
    table = LinkTable.of(links, devices)
    best = max(table.within([device.uuid for device in chosen]) for chosen in sets)
    assert table.within([share.device_uuid for share in choice.shares]) == best


@given(loaded_nodes() | alike_nodes, st.integers(1, 60), st.none() | st.integers(1, 100), policies, st.data(), seeds)
def test_share_of_one_device_keeps_free_pair_when_equal_device_exists(node, mib, cores, policy, data, seed):
    devices, shares = node
    links = data.draw(links_between(devices))
    request = ContainerRequest("main", 1, mib * MIB, cores)
    lost, cordoned = (data.draw(st.sets(st.integers(0, len(devices) - 1), max_size=2)) for _ in range(2))
    states = [
        replace(state, healthy=state.device.minor not in lost, cordoned=state.device.minor in cordoned)
        for state in states_of(devices, shares)
    ]
    choice = choose(states, request, Preferences(), policy, links=links, seed=seed)
    if isinstance(choice, Refusal):
        return
    table = LinkTable.of(links, devices)
    empty = [state.device.uuid for state in states if state.empty and state.healthy and not state.cordoned]

    def cost_and_links_taken(state):
        uuid = state.device.uuid
        taken = sum(table.between(uuid, other) for other in empty if other != uuid) if uuid in empty else 0
        return score.cost(policy, state, share_on(state.device, request, Preferences())), taken

    fitting = {state.device.uuid: cost_and_links_taken(state) for state in states if reject_reason(state, request, Preferences()) is None}
    assert fitting[choice.shares[0].device_uuid] == min(fitting.values())


@given(loaded_nodes(), requests(), st.sets(st.integers(0, 5)), policies, seeds)
def test_as_many_preferred_devices_are_taken_as_fit(node, request, preferred, policy, seed):
    devices, shares = node
    uuids = {f"GPU-{minor}" for minor in preferred}
    choice = choose(states_of(devices, shares), request, Preferences(), policy, preferred_uuids=uuids, seed=seed)
    if isinstance(choice, Refusal):
        return
    most = max(len(uuids & {device.uuid for device in chosen}) for chosen in fitting_sets(devices, shares, request, Preferences()))
    assert len(uuids & {share.device_uuid for share in choice.shares}) == most


@given(loaded_nodes(), requests(max_vgpus=1), seeds)
def test_binpack_and_spread_take_the_least_and_the_most_free_device(node, request, seed):
    devices, shares = node
    states = {state.device.uuid: state for state in states_of(devices, shares)}

    def free(uuid: str) -> int:
        state = states[uuid].with_share(next(iter(tried[uuid])))
        return sum(
            part * 1_000_000 // whole
            for part, whole in (
                (state.free_memory_bytes, state.capacity_bytes),
                (state.free_cores_percent, 100),
                (state.free_shares, state.max_shares),
            )
        )

    tried = {
        device.uuid: choice.shares
        for device in devices
        if isinstance(choice := choose([states[device.uuid]], request, Preferences(), Policy.FRAG), Choice)
    }
    for policy, extreme in ((Policy.BINPACK, min), (Policy.SPREAD, max)):
        choice = choose(list(states.values()), request, Preferences(), policy, seed=seed)
        assert isinstance(choice, Choice) == bool(tried)
        if isinstance(choice, Choice):
            assert free(choice.shares[0].device_uuid) == extreme(map(free, tried))


@given(nodes(mig_devices), st.lists(mig_requests, max_size=6), policies)
def test_instances_are_refused_exactly_when_too_few_are_free(devices, asked, policy):
    states = states_of(devices, [])
    free = sum(len(device.mig_instances) for device in devices)
    for request in asked:
        choice = choose(states, request, Preferences(), policy)
        ((_, count),) = request.mig
        assert isinstance(choice, Choice) == (count <= free)
        if isinstance(choice, Choice):
            states = with_shares(states, choice.shares)
            free -= count
