# SPDX-License-Identifier: Apache-2.0
"""The columnar forms agree with their scalar specification, and state kept over events equals state made from the facts.

The oracles: placement's own fit, refusal and score on one node at a time, score.py's terms on the devices that score.nominal names, brute
force over sets for links, and a fresh ClusterState filled with the end of a history.
"""

from dataclasses import fields, replace
from itertools import combinations, cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from aliquot.contract import units
from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot.contract.model import (
    ContainerRequest,
    Device,
    DeviceShare,
    Isolation,
    Link,
    LinkKind,
    MigInstance,
    NumaMode,
    PodRequest,
    Policy,
    Preferences,
)
from aliquot.placement import mig
from aliquot.placement.choose import choose
from aliquot.placement.demand import GENERIC, PPM, Demand, Shape
from aliquot.placement.fit import reject_reason, share_on
from aliquot.placement.refusal import Refusal
from aliquot.placement.score import cost as device_cost
from aliquot.placement.score import fragmentation
from aliquot.placement.topology import LinkTable
from scheduler_plugin.core.cluster.plan import not_offered
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.cluster.reasons import OF_REJECT, NodeReason
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.fit import shapes as shapes_module
from scheduler_plugin.core.fit.columnar import RatingQuery, evaluate, fits_alone, host_cost, surely_fit_together
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import (
    DEFAULT_WEIGHTS,
    HostDemand,
    host_terms,
    mig_terms,
    node_fragmentation,
    nominal,
    vgpu_terms,
)
from scheduler_plugin.core.score.links import LinkClass
from tests.unit.scheduler_plugin.builders import OFFERED, PLACES, PROFILES, make_device, make_node, make_place, make_pod, make_share

NODES = ("n1", "n2")
NOTHING_PREFERRED = Preferences()
PACKING = (Policy.FRAG, Policy.BINPACK)


def rarely(value, usually):
    """Draw ``value`` once in eight times: most nodes and pods must be ordinary for anything to fit."""
    return st.sampled_from([usually] * 7 + [value])


@st.composite
def partitions(draw: st.DrawFn, name: str, minor: int) -> tuple[MigInstance, ...]:
    """Draw what a device is cut into: a layout of somebody's, places for more, both or nothing."""
    existing: list[Any] = []
    device_uuid = f"GPU-{name}-{minor}"
    for profile, start in draw(st.lists(st.sampled_from(PLACES), max_size=3)):
        made = replace(make_place(device_uuid, profile, start), uuid=f"MIG-{name}-{minor}-{len(existing)}", most_on_device=0, engines=None)
        if not any(map(made.overlaps, existing)):
            existing.append(made)
    places = [make_place(device_uuid, *at) for at in PLACES] if draw(st.sampled_from([True, True, False])) else []
    return (*existing, *places)


@st.composite
def gpu_nodes(draw: st.DrawFn, name: str = "n1", max_devices: int = 5) -> GpuNode:
    devices = []
    for minor in range(draw(st.sampled_from([0, 1, 2, 3, 4, max_devices, max_devices]))):
        uuid = f"GPU-{name}-{minor}"
        instances = draw(partitions(name, minor)) if draw(st.integers(0, 3)) == 3 else ()
        device = Device(
            uuid,
            draw(st.sampled_from(["NVIDIA A100", "NVIDIA H100"])),
            minor,
            "",
            draw(st.integers(16, 64)) * units.MIB,
            draw(st.sampled_from([None, 0, 0, 1])),
            None,
            bool(instances) or draw(rarely(True, False)),
            instances,
        )
        devices.append(GpuDevice(device, draw(rarely("XID 79", ""))))
    kinds = st.none() | st.tuples(st.sampled_from(LinkKind), st.integers(0, 18))
    links = [
        Link(a.device.uuid, b.device.uuid, kind[0], kind[1] if kind[0] is LinkKind.NVLINK else 0)
        for a, b in combinations(devices, 2)
        if (kind := draw(kinds)) is not None
    ]
    return GpuNode(
        name,
        tuple(devices),
        tuple(links),
        shares_per_gpu=draw(st.integers(1, 4)),
        isolation=draw(rarely((), OFFERED)),
        memory_oversubscription=draw(st.sampled_from([1.0, 2.0])),
        cordoned=draw(rarely(True, False)),
        cordoned_devices=draw(rarely((f"GPU-{name}-1",), ())),
    )


@st.composite
def mig_requests(draw: st.DrawFn) -> ContainerRequest:
    profiles = draw(st.lists(st.sampled_from([*PROFILES, "2g.20gb"]), min_size=1, max_size=2, unique=True))
    return ContainerRequest("main", mig=tuple((profile, draw(st.integers(1, 4))) for profile in sorted(profiles)))


@st.composite
def requests(draw: st.DrawFn) -> ContainerRequest:
    if draw(st.integers(0, 9)) == 0:
        return draw(mig_requests())
    vgpus = draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    cores = draw(st.none() | st.sampled_from([1, 30, 50, 99, 100]))
    total_cores = None if cores is None else cores * vgpus
    if draw(rarely(True, False)):
        return ContainerRequest("main", vgpus, None, total_cores, memory_percent=vgpus * draw(st.sampled_from([1, 10, 33, 50, 99])))
    mib = draw(rarely(None, 7) | st.integers(1, 40))
    return ContainerRequest("main", vgpus, None if mib is None else mib * vgpus * units.MIB, total_cores)


preferences = st.builds(
    Preferences,
    gpu_type=rarely(("a100",), ()) | rarely(("h100", "A100"), ()),
    gpu_type_not=rarely(("H100",), ()),
    gpu_uuid=rarely(("gpu-n1-0", "GPU-n1-2"), ()),
    gpu_uuid_not=rarely(("GPU-n1-0",), ()),
    numa=st.none() | st.sampled_from(NumaMode),
    isolation=rarely(Isolation.EXCLUSIVE, None) | rarely(Isolation.SHIM, None),
    memory_burst=rarely(2.0, None) | rarely(3.0, None) | st.sampled_from([None, 1.0]),
)
policies = st.sampled_from(Policy)
demands = st.builds(HostDemand, st.integers(0, 4000), st.integers(0, 4000))
shapes = st.builds(
    Shape,
    vgpus=st.sampled_from([1, 1, 2, 4]),
    memory_mib=st.integers(1, 64),
    memory_ppm=st.sampled_from([0, 0, 300_000, PPM]),
    cores_percent=st.sampled_from([1, 10, 33, 50, 100]),
    cpu_milli=st.integers(0, 8000),
    ram_mib=st.integers(0, 8000),
    gpu_type=st.sampled_from([(), (), ("A100",), ("h100", "l4")]),
    gpu_type_not=st.sampled_from([(), (), ("H100",)]),
)
expected = st.just(GENERIC) | st.dictionaries(shapes, st.integers(1, 9), min_size=1, max_size=12).map(Demand.of)


@st.composite
def loaded(draw: st.DrawFn, node: GpuNode) -> ClusterState:
    """Give a node pods; some of them do not fit: facts are not checked."""
    state = ClusterState()
    state.set_host(node.name, draw(st.sampled_from([0, 8000])), 8192)
    state.set_gpu_node(node)
    uuids = [uuid for entry in node.devices for uuid in (entry.device.uuid, *(i.uuid for i in entry.device.mig_instances))]
    for number in range(draw(st.integers(0, 6)) if uuids else 0):
        share = DeviceShare(
            draw(st.sampled_from(uuids)), draw(st.integers(1, 40)) * units.MIB, draw(st.none() | st.sampled_from([1, 20, 50, 99]))
        )
        pod = make_pod(f"held-{number}", node=node.name, shares={"main": [share]}, vgpu="1", cpu_milli=draw(st.integers(0, 3000)))
        state.set_pod(pod)
    state.columns.set_demand(draw(expected))
    return state


def judged(state: ClusterState, ask: RatingQuery, node: str = "n1"):
    state.columns.derive()
    row = state.row_of(node)
    result = evaluate(state.columns, np.array([row]), ask, DEFAULT_WEIGHTS[ask.policy])
    return NodeReason(int(result.reason[0])), bool(result.curable[0]), float(result.cost[0])


def scalar_reason(states, request, wishes, node) -> NodeReason:
    """Ask placement, which has the last word; a node without GPUs or isolation is the node's own matter."""
    if not states:
        return NodeReason.NO_GPU
    if not_offered(node, PodRequest((request,), wishes)):
        return NodeReason.ISOLATION
    choice = choose(states, request, wishes, Policy.FRAG)
    return OF_REJECT[choice.reason] if isinstance(choice, Refusal) else NodeReason.FITS


@given(st.data())
def test_row_fits_exactly_when_placement_finds_devices(data):
    node = data.draw(gpu_nodes())
    state, request, wishes, policy = data.draw(loaded(node)), data.draw(requests()), data.draw(preferences), data.draw(policies)
    want = scalar_reason(state.device_states("n1"), request, wishes, node)
    event(want.name)
    if len(request.mig) < 2:
        assert judged(state, RatingQuery(request, wishes, policy, HostDemand()))[0] is want
    else:
        assert filtered(state, request, policy, wishes) is want


@st.composite
def partitioned_nodes(draw: st.DrawFn) -> GpuNode:
    """Draw a node with all its GPUs in MIG mode."""
    devices = [
        Device(f"GPU-n1-{minor}", "NVIDIA A100", minor, "", 80 * units.MIB, 0, None, True, draw(partitions("n1", minor)))
        for minor in range(draw(st.integers(1, 3)))
    ]
    return GpuNode("n1", tuple(map(GpuDevice, devices)), isolation=OFFERED)


def filtered(state: ClusterState, request: ContainerRequest, policy: Policy, wishes: Preferences = NOTHING_PREFERRED) -> NodeReason:
    """Ask as the filter does."""
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(PodShape(PodRequest((request,), wishes), policy, HostDemand()))
    return NodeReason(int(verdict.reason[state.row_of("n1")]))


@given(st.data())
def test_node_passes_filter_exactly_when_bind_finds_or_can_create_instances(data):
    state = ClusterState()
    state.set_gpu_node(data.draw(partitioned_nodes()))
    for number in range(data.draw(st.integers(0, 6))):
        request, policy = data.draw(mig_requests()), data.draw(policies)
        reason = filtered(state, request, policy)
        planned = state.plan("n1", PodRequest((request,)), policy, f"u{number}")
        event(reason.name)
        assert (reason is NodeReason.FITS) == (not isinstance(planned, Refusal))
        if isinstance(planned, Refusal):
            assert reason is OF_REJECT[planned.reason]
            continue
        (assigned,) = planned.containers
        state.set_pod(make_pod(f"u{number}", node="n1", shares={"main": assigned.shares}, vgpu="1"))
        held = [i for s in state.device_states("n1") for i in s.device.mig_instances if i.uuid in s.used_instances]
        assert not [(a, b) for a, b in combinations(held, 2) if a.overlaps(b)]


@given(st.data())
def test_the_room_kept_for_each_profile_is_that_of_placement(data):
    state = data.draw(loaded(data.draw(partitioned_nodes())))
    columns, row = state.columns, state.row_of("n1")
    columns.derive()
    for column, shown in enumerate(state.device_states("n1")):
        unused = replace(shown, used_instances=frozenset())
        for number, profile in enumerate(columns.profiles):
            assert columns.mig_room[number][row, column] == mig.room(shown, profile)
            assert columns.mig_capacity[number][row, column] == mig.room(unused, profile)


@given(st.data())
def test_a_row_is_curable_exactly_when_the_empty_node_fits(data):
    node = data.draw(gpu_nodes())
    state, request, wishes = data.draw(loaded(node)), data.draw(requests()), data.draw(preferences)
    empty = ClusterState()
    empty.set_gpu_node(node)
    fits_empty = scalar_reason(empty.device_states("n1"), request, wishes, node) is NodeReason.FITS
    curable = judged(state, RatingQuery(request, wishes, Policy.FRAG, HostDemand()))[1]
    if len(request.mig) > 1 and state.columns.by_place[state.row_of("n1")]:
        assert curable or not fits_empty  # profiles are looked at one by one: preemption's own search finds out the rest
    else:
        assert curable == fits_empty


@given(st.data(), st.sampled_from([1, 1, 2, 3]), st.integers(10, 70), st.sampled_from([None, None, NumaMode.STRICT]), policies)
def test_whole_gpu_with_amount_fits_and_is_curable_as_placement_says(data, vgpus, mib, numa, policy):
    node = replace(data.draw(gpu_nodes()), isolation=OFFERED)
    state, request = data.draw(loaded(node)), ContainerRequest("main", vgpus, vgpus * mib * units.MIB)
    wishes = Preferences(isolation=Isolation.EXCLUSIVE, numa=numa)
    empty = ClusterState()
    empty.set_gpu_node(node)
    want, when_empty = (scalar_reason(known.device_states("n1"), request, wishes, node) for known in (state, empty))
    event(want.name)
    ask = RatingQuery(request, wishes, policy, HostDemand())
    assert judged(state, ask)[:2] == (want, when_empty is NodeReason.FITS)
    assert fits_alone(state.columns, np.array([state.row_of("n1")]), ask)[0] == (want is NodeReason.FITS)
    planned = state.plan("n1", PodRequest((request,), wishes), policy, "u1")
    if not isinstance(planned, Refusal):
        assert all(share.memory_bytes <= mib * units.MIB for container in planned.containers for share in container.shares)


def best_quality(view, request, wishes, links, positions) -> int:
    """Try all sets of fitting devices; when the devices lie on one NUMA node because the pod asked for it, those of that node."""
    fitting = [index for index, state in enumerate(view.states) if reject_reason(state, request, wishes) is None]
    numa = {view.states[index].device.numa_node for index in positions}
    if wishes.numa is not None and len(positions) > 1 and len(numa) == 1 and None not in numa:
        fitting = [index for index in fitting if view.states[index].device.numa_node in numa]
    table = LinkTable.of(links, (state.device for state in view.states))
    return max(table.within([view.states[index].device.uuid for index in chosen]) for chosen in combinations(fitting, request.vgpus))


@given(st.data())
def test_the_cost_of_a_row_is_that_of_the_scalar_score(data):
    node = data.draw(gpu_nodes())
    state, request, wishes = data.draw(loaded(node)), data.draw(requests()), data.draw(preferences)
    policy, demand = data.draw(policies), data.draw(demands)
    if data.draw(st.booleans()):  # other GPUs on another host: then kinds can be scarce
        state.set_host("n2", data.draw(st.sampled_from([0, 1000, 2000])), 1024)
        state.set_gpu_node(make_node("n2", 2))
        state.columns.set_demand(state.columns.demand_table.demand)
    reason, _, cost = judged(state, RatingQuery(request, wishes, policy, demand))
    event(reason.name)
    if reason is not NodeReason.FITS:
        return
    view = state.view("n1")
    if request.mig:
        terms = mig_terms(view, request, wishes, policy, demand)
    else:
        positions = nominal(view, request, wishes, policy)
        terms = vgpu_terms(
            view,
            [(index, share_on(view.states[index].device, request, wishes)) for index in positions],
            policy=policy,
            demand=demand,
            prefer_numa=wishes.numa is not None,
            best_quality=best_quality(view, request, wishes, node.links, positions),
        )
        assert all(-1 <= getattr(terms, field.name) <= 1 for field in fields(terms)), terms
    assert cost == pytest.approx(terms.cost(DEFAULT_WEIGHTS[policy]), abs=1e-12)


@given(st.data())
def test_leftover_of_devices_and_node_matches_scalar_score(data):
    state = data.draw(loaded(data.draw(gpu_nodes())))
    columns, view = state.columns, state.view("n1")
    columns.derive()
    row = state.row_of("n1")
    of_devices = [fragmentation(device, view.demand) if device.shareable else 0 for device in view.states]
    assert columns.fragmentation[row, : len(view.states)].tolist() == of_devices
    assert columns.node_fragmentation[row] == pytest.approx(node_fragmentation(view.states, view.host, view.demand), abs=1e-12)


@given(st.data())
def test_cost_of_pod_without_gpu_matches_scalar_score(data):
    state, demand, policy = data.draw(loaded(data.draw(gpu_nodes()))), data.draw(demands), data.draw(policies)
    state.columns.derive()
    weights = DEFAULT_WEIGHTS[policy]
    cost = host_cost(state.columns, np.array([state.row_of("n1")]), policy, demand, weights)
    assert cost[0] == pytest.approx(host_terms(state.view("n1"), demand, policy).cost(weights), abs=1e-12)


@given(st.data())
def test_the_devices_rated_cost_as_much_as_those_that_placement_takes(data):
    node = data.draw(gpu_nodes())
    state, request, wishes, policy = data.draw(loaded(node)), data.draw(requests()), data.draw(preferences), data.draw(policies)
    view = state.view("n1")
    choice = choose(view.states, request, wishes, policy, links=node.links, demand=view.demand)
    if request.mig or isinstance(choice, Refusal):
        return
    by_uuid = {shown.device.uuid: shown for shown in view.states}
    taken = sum(device_cost(policy, by_uuid[share.device_uuid], share, view.demand) for share in choice.shares)
    rated = sum(
        device_cost(policy, view.states[i], share_on(view.states[i].device, request, wishes), view.demand)
        for i in nominal(view, request, wishes, policy)
    )
    assert taken == rated


@given(st.integers(2, 8), policies, st.data())
def test_small_pod_keeps_free_pair_when_node_equal_except_links_exists(gpus, policy, data):
    used, mib = data.draw(st.integers(0, gpus - 2)), data.draw(st.none() | st.integers(1, 1000))
    state = ClusterState()
    for name, linked in zip(NODES, (True, False), strict=True):
        state.set_host(name, 64_000, 64_000)
        state.set_gpu_node(make_node(name, gpus, linked=linked))
        for minor in range(used):
            shares = {"main": [make_share(name, minor, 1000, 100)]}
            state.set_pod(make_pod(f"held-{name}-{minor}", node=name, shares=shares, vgpu="1", cpu_milli=1000))
    request = ContainerRequest("main", 1, None if mib is None else mib * units.MIB, data.draw(st.none() | st.integers(1, 100)))
    demand = HostDemand(data.draw(st.integers(0, 8000)), 1000)
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(PodShape(PodRequest((request,)), policy, demand))
    pair, pairless = (int(verdict.score[state.row_of(name)]) for name in NODES)
    assert pairless > pair


@given(st.sampled_from([2, 4, 8]), st.data())
def test_partial_gpu_pod_keeps_last_whole_node_when_used_node_fits(gpus, data):
    used, mib = data.draw(st.integers(1, gpus - 1)), data.draw(st.integers(1, 99)) * 10
    state = ClusterState()
    for name in NODES:
        state.set_host(name, 64_000, 64_000)
        state.set_gpu_node(make_node(name, gpus, linked=data.draw(st.booleans())))
    for minor in range(used):
        shares = {"main": [make_share("n2", minor, 1000, 100)]}
        state.set_pod(make_pod(f"held-{minor}", node="n2", shares=shares, vgpu="1", cpu_milli=64_000 // gpus, memory_mib=64_000 // gpus))
    request = ContainerRequest("main", 1, mib * units.MIB, mib // 10)
    demand = HostDemand(64 * mib // gpus, 64 * mib // gpus)
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(PodShape(PodRequest((request,)), data.draw(st.sampled_from(PACKING)), demand))
    whole, broken = (int(verdict.score[state.row_of(name)]) for name in NODES)
    assert broken > whole


def out_of_service(draw: st.DrawFn, node: GpuNode) -> GpuNode:
    """Take some of the node's GPUs, not all, from shared pods: by a fault, a cordon, or MIG mode with or without instances."""
    gone = draw(st.sets(st.integers(0, len(node.devices) - 1), min_size=1, max_size=len(node.devices) - 1))
    for minor in sorted(gone):
        entries, uuid = list(node.devices), node.devices[minor].device.uuid
        match draw(st.sampled_from(["fault", "cordon", "mig", "mig without instances"])):
            case "fault":
                entries[minor] = replace(entries[minor], trouble="XID 79")
            case "cordon":
                node = replace(node, cordoned_devices=(*node.cordoned_devices, uuid))
            case "mig":
                entries[minor] = GpuDevice(make_device(node.name, minor, instances=7))
            case _:
                entries[minor] = replace(entries[minor], device=replace(entries[minor].device, mig_enabled=True))
        node = replace(node, devices=tuple(entries))
    return node


@given(st.sampled_from([2, 4, 8]), policies, st.booleans(), st.data())
def test_partial_gpu_pod_keeps_whole_node_when_node_with_failed_gpus_fits(gpus, policy, linked, data):
    state, mib = ClusterState(), data.draw(st.integers(1, 999))
    for name in NODES:
        node = make_node(name, gpus, linked=linked)
        state.set_host(name, 64_000, 64_000)
        state.set_gpu_node(node if name == "n1" else out_of_service(data.draw, node))
    request = ContainerRequest("main", 1, mib * units.MIB, data.draw(st.none() | st.integers(1, 99)))
    demand = HostDemand(data.draw(st.integers(0, 64_000)), data.draw(st.integers(0, 64_000)))
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(PodShape(PodRequest((request,)), policy, demand))
    whole, other = (int(verdict.score[state.row_of(name)]) for name in NODES)
    assert other > whole


@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_the_link_table_holds_the_best_of_every_subset(devices, random):
    matrix = [[0] * devices for _ in range(devices)]
    for i, j in combinations(range(devices), 2):
        matrix[i][j] = matrix[j][i] = random.choice([0, 10, 50, 250, 1850])
    links = LinkClass(tuple(map(tuple, matrix)))
    fitting = np.array([[random.random() < 0.6 for _ in range(devices)] for _ in range(8)])
    for count in range(2, devices + 1):
        want = [
            max((sum(matrix[i][j] for i, j in combinations(chosen, 2)) for chosen in combinations(np.flatnonzero(row), count)), default=0)
            for row in fitting
        ]
        assert links.best_quality(fitting, count).tolist() == want


# --- state over events ----------------------------------------------------------------------------------------------

UIDS = tuple(f"u{number}" for number in range(5))


@st.composite
def pods(draw: st.DrawFn):
    node = draw(st.sampled_from(["", *NODES]))
    shares = [make_share(node or "n1", draw(st.integers(0, 3)), draw(st.integers(1, 30)), draw(st.none() | st.just(20)))]
    if draw(st.booleans()):
        profile, start = draw(st.sampled_from(PLACES))
        shares = [DeviceShare(f"{shares[0].device_uuid}/{profile}@{start}", 8 * units.MIB)]
    return make_pod(
        draw(st.sampled_from(UIDS)),
        node=node,
        shares={"main": shares} if node else None,
        vgpu="1",
        cpu_milli=draw(st.integers(0, 2000)),
        phase=draw(st.sampled_from(["Running", "Running", "Running", "Succeeded"])),
    )


reservations = st.builds(
    lambda uid, node, minor, mib, stage: Reservation(
        uid, node, {f"GPU-{node}-{minor}": Use(mib, 0, 1, 1)}, HostDemand(100, 1), stage, 10.0 if stage is not Stage.BINDING else np.inf
    ),
    st.sampled_from(UIDS),
    st.sampled_from(NODES),
    st.integers(0, 3),
    st.integers(1, 30),
    st.sampled_from(Stage),
)
events = st.one_of(
    st.tuples(st.just("set_pod"), pods()),
    st.tuples(st.just("drop_pod"), st.sampled_from(UIDS)),
    st.tuples(st.just("replace_pods"), st.lists(pods(), max_size=4)),
    st.tuples(st.just("set_gpu_node"), st.sampled_from(NODES).flatmap(gpu_nodes)),
    st.tuples(st.just("drop_gpu_node"), st.sampled_from(NODES)),
    st.tuples(st.just("set_host"), st.sampled_from(NODES), st.integers(0, 8000), st.integers(0, 8000)),
    st.tuples(st.just("drop_host"), st.sampled_from(NODES)),
    st.tuples(st.just("reserve"), reservations),
    st.tuples(st.just("release"), st.sampled_from(UIDS)),
    st.tuples(st.just("confirm"), st.sampled_from(UIDS), st.just(20.0)),
    st.tuples(st.just("expire"), st.sampled_from([5.0, 15.0]), st.sampled_from([5.0, 25.0])),
)


def rebuilt(state: ClusterState) -> ClusterState:
    """Make a state from what the other knows, as a restart does, with the previous reservations."""
    fresh = ClusterState()
    for node in state.gpu_nodes():
        fresh.set_gpu_node(node)
    for name, amounts in state._hosts.items():
        fresh.set_host(name, *amounts)
    for pod in state.pods.values():
        fresh.set_pod(pod)
    for reservation in state.reservations.values():
        fresh.reserve(reservation)
    return fresh


@given(st.lists(events, max_size=25), requests(), preferences, policies)
def test_no_history_leaks_shares_and_cached_verdicts_and_plans_stay_right(history, request, wishes, policy):
    state = ClusterState()
    kept = Shapes(state, DEFAULT_WEIGHTS)
    asked = PodRequest((request,), replace(wishes, gpu_uuid=()))
    shape = PodShape.of(asked, policy, HostDemand())
    for name, *arguments in history:
        getattr(state, name)(*arguments)
        verdict = kept.verdict(shape)
        for uid, node in zip(UIDS, cycle(NODES), strict=False):
            state.plan(node, asked, policy, uid)
    fresh = rebuilt(state)
    relearned = Shapes(fresh, DEFAULT_WEIGHTS)
    for learner in (kept, relearned):
        learner.learn()
    verdict, again = kept.verdict(shape), relearned.verdict(shape)
    for name in [node.name for node in state.gpu_nodes()]:
        assert state.device_states(name) == fresh.device_states(name)
        assert state.view(name) == fresh.view(name)
        for uid in UIDS:
            assert state.plan(name, asked, policy, uid) == fresh.plan(name, asked, policy, uid)
        row, other = state.row_of(name), fresh.row_of(name)
        assert (verdict.reason[row], verdict.score[row], verdict.curable[row]) == (
            again.reason[other],
            again.score[other],
            again.curable[other],
        )
    live = {state.row_of(node.name) for node in state.gpu_nodes()}
    assert not [row for row in range(state.columns.rows) if row not in live and verdict.reason[row] != NodeReason.NO_GPU.value]


@st.composite
def several(draw: st.DrawFn) -> tuple[ClusterState, GpuNode, PodShape]:
    """Draw a node in use and a pod of two or three containers, the first of them perhaps an init container."""
    node = draw(gpu_nodes())
    state, wishes, first_is_init = draw(loaded(node)), draw(preferences), draw(st.booleans())
    drawn = draw(st.lists(requests(), min_size=2, max_size=3))
    containers = tuple(replace(request, container=f"c{at}", init=first_is_init and at == 0) for at, request in enumerate(drawn))
    return state, node, PodShape.of(PodRequest(containers, wishes), draw(policies), HostDemand())


@given(several())
def test_pod_of_several_containers_fits_exactly_when_placement_finds_all_devices(drawn):
    state, node, shape = drawn
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(shape)
    fits = NodeReason(int(verdict.reason[state.row_of("n1")])) is NodeReason.FITS
    assert fits_since(Shapes(state, DEFAULT_WEIGHTS), shape, 0) == fits
    if not_offered(node, shape.request):
        assert not fits
        return
    planned = state.plan("n1", shape.request, shape.policy, "")
    assert fits == (not isinstance(planned, Refusal))
    asks = [RatingQuery(request, shape.request.preferences, shape.policy, shape.demand) for request in shape.request.containers]
    rows = np.array([state.row_of("n1")])
    certain = all(fits_alone(state.columns, rows, ask)[0] for ask in asks) and surely_fit_together(state.columns, rows, asks)[0]
    assert fits or not certain
    event(f"fits: {fits}, without a search: {certain}")


@given(several())
def test_pod_of_several_containers_costs_mean_of_its_lasting_containers(drawn):
    state, _, shape = drawn
    row, shapes = state.row_of("n1"), Shapes(state, DEFAULT_WEIGHTS)
    verdict = shapes.verdict(shape)
    if verdict.reason[row] == NodeReason.FITS.value:
        lasting = [PodRequest((request,), shape.request.preferences) for request in shape.request.containers if not request.init]
        alone = [float(shapes.verdict(replace(shape, request=request)).cost[row]) for request in lasting]
        assert verdict.cost[row] == pytest.approx(sum(alone) / len(alone))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(events | st.just(("foresee",)), max_size=25), st.lists(requests(), min_size=1, max_size=2), preferences, policies)
def test_verdict_foreseen_in_pieces_equals_one_computed_at_once(monkeypatch, history, drawn, wishes, policy):
    monkeypatch.setattr(shapes_module, "MAX_AHEAD", 1)  # a row in each piece
    state = ClusterState()
    shapes = Shapes(state, DEFAULT_WEIGHTS)
    containers = tuple(replace(request, container=f"c{at}") for at, request in enumerate(drawn))
    shape = PodShape.of(PodRequest(containers, wishes), policy, HostDemand())
    shapes.expect(shape)
    pieces = 0
    for name, *arguments in history:
        if name == "foresee":
            pieces += shapes.foresee()
        else:
            getattr(state, name)(*arguments)
    foreseen, fresh = shapes.verdict(shape), Shapes(state, DEFAULT_WEIGHTS).verdict(shape)
    live = [row for row in map(state.row_of, NODES) if row is not None]
    for name in ("reason", "curable", "cost", "score"):
        assert (getattr(foreseen, name)[live] == getattr(fresh, name)[live]).all()
    event(f"pieces: {min(pieces, 3)}")


def fits_since(shapes: Shapes, shape: PodShape, since: int) -> bool:
    takers = shapes.takers(shape, since)
    return any(takers.looks(takers.changed_at > since))


@given(st.lists(events, max_size=15), st.lists(events, max_size=5), requests(), preferences, policies)
def test_what_changed_since_is_all_that_can_make_a_pod_fit(before, after, request, wishes, policy):
    state = ClusterState()
    shapes = Shapes(state, DEFAULT_WEIGHTS)
    shape = PodShape.of(PodRequest((request,), wishes), policy, HostDemand())
    for name, *arguments in before:
        getattr(state, name)(*arguments)
    fitted = fits_since(shapes, shape, 0)
    since = state.columns.change_count
    for name, *arguments in after:
        getattr(state, name)(*arguments)
    fits = bool((shapes.verdict(shape).reason == NodeReason.FITS.value).any())
    assert fits_since(shapes, shape, 0) == fits
    if not fitted:
        assert fits_since(shapes, shape, since) == fits
