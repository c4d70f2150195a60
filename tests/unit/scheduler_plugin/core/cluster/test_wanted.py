# SPDX-License-Identifier: Apache-2.0
"""The demand that follows from the pods that are known, and what it makes of scarce devices."""

from collections.abc import Mapping

import pytest

from aliquot.contract.model import Policy
from aliquot.placement.demand import GENERIC, Demand, Shape
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.cluster.wanted import MIN_PODS, Wanted
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import (
    DEFAULT_WEIGHTS,
    MAX_SCARCITY,
    MAX_SEAT_VALUE,
    UNSEEN_PART,
    HostDemand,
    Kind,
    Scarcity,
    insistence,
    seat_values,
)
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share, request_of

ALPHA, BETA = Kind("alpha", 1000, 8), Kind("beta", 1000, 8)


def scarcity(demand: Demand, counts: Mapping[Kind, int], free: Mapping[Kind, int] | None = None) -> Scarcity:
    """What a demand makes of these devices. Args: free: all, if not given."""
    return insistence(demand, counts).at(counts if free is None else free)


def seen(count, **limits) -> Wanted:
    wanted = Wanted()
    for number in range(count):
        wanted.see(make_pod(f"u{number}", **(limits or {"vgpu": "1", "vgpu_memory": "250"})))
    return wanted


def test_few_pods_say_nothing():
    assert seen(MIN_PODS - 1).take() == GENERIC
    assert seen(MIN_PODS).take() == Demand.of({Shape(memory_mib=250): 1})


def test_pod_counts_once_until_deleted():
    wanted = seen(MIN_PODS)
    wanted.see(make_pod("u0", node="n1", vgpu="1", vgpu_memory="250", phase="Running"))
    assert wanted.take() == Demand.of({Shape(memory_mib=250): 1})
    wanted.see(make_pod("u0", vgpu="1", vgpu_memory="500"))
    assert wanted.take() == Demand.of({Shape(memory_mib=250): MIN_PODS - 1, Shape(memory_mib=500): 1})
    wanted.forget("u0")
    wanted.forget("u0")
    assert wanted.take() == GENERIC


@pytest.mark.parametrize("limits", [{"cpu": "1"}, {"vgpu": "1", "vgpu_cores": "250"}, {"mig_1g.10gb": "1"}])
def test_pods_that_no_vgpu_serves_do_not_count(limits):
    assert seen(2 * MIN_PODS, **limits).take() == GENERIC


def test_demand_is_recomputed_once_quarter_of_pods_changed():
    wanted = seen(8 * MIN_PODS)
    assert wanted.drifted
    wanted.take()
    assert not wanted.drifted
    for number in range(MIN_PODS):
        wanted.forget(f"u{number}")
    assert not wanted.drifted
    for number in range(MIN_PODS, 2 * MIN_PODS):
        wanted.forget(f"u{number}")
    assert wanted.drifted


def test_verdicts_follow_the_demand():
    state = ClusterState()
    state.set_gpu_node(make_node("a", 2))
    shapes = Shapes(state, DEFAULT_WEIGHTS)
    shape = PodShape.of(request_of(make_pod(vgpu="1", vgpu_memory="250")), Policy.FRAG, HostDemand())
    before = shapes.verdict(shape).cost[0]
    for number in range(MIN_PODS):
        state.set_pod(make_pod(f"u{number}", vgpu="2"))
    assert shapes.verdict(shape).cost[0] > before
    assert state.columns.demand_table.demand == Demand.of({Shape(vgpus=2, memory_ppm=1_000_000): 1})


def test_scarcity_of_kind_follows_demand_that_requires_it():
    picky, easy = Shape(memory_mib=1000, cores_percent=100, gpu_type=("alpha",)), Shape(memory_mib=1000, cores_percent=100)
    assert scarcity(Demand.of({easy: 1}), {ALPHA: 5, BETA: 5}) == {}
    assert scarcity(Demand.of({easy: 3, picky: 1}), {ALPHA: 5, BETA: 5}) == {ALPHA: pytest.approx(0.5 / (1 + UNSEEN_PART))}
    assert scarcity(Demand.of({picky: 1}), {ALPHA: 1, BETA: 9}) == {ALPHA: MAX_SCARCITY}
    assert scarcity(Demand.of({picky: 1}), {BETA: 9}) == {}


@pytest.mark.parametrize("named", [{"gpu_type": ("alpha",)}, {"gpu_type_not": ("beta",)}], ids=["wanted", "unwanted"])
def test_kinds_of_named_model_are_scarcest_once_little_is_free_of_all(named):
    other_alpha = Kind("alpha", 1000, 4)
    counts = {ALPHA: 40, other_alpha: 20, BETA: 40}
    demand = Demand.of({Shape(memory_mib=1000, cores_percent=100): 7, Shape(memory_mib=1000, cores_percent=100, **named): 3})
    empty = scarcity(demand, counts)  # the demand for alpha is that of 27 of 100 GPUs
    for alphas in range(28):
        for beta in (0, 40):
            found = scarcity(demand, counts, {ALPHA: alphas // 2, other_alpha: alphas - alphas // 2, BETA: beta})
            assert found == (empty if alphas > 13 else {**empty, ALPHA: MAX_SCARCITY, other_alpha: MAX_SCARCITY})


def test_nodes_that_large_pods_need_are_no_scarcer_when_they_fill():
    large, small = Kind("m", 1000, 8), Kind("m", 1000, 4)
    demand, counts = Demand.of({Shape(vgpus=8, memory_mib=1): 1}), {large: 8, small: 8}
    assert scarcity(demand, counts, {large: 1, small: 1}) == scarcity(demand, counts)


def alphas_and_betas() -> ClusterState:
    """Eight nodes of each of two models, two GPUs each; a sixth of the pods name alpha."""
    state = ClusterState()
    for number in range(16):
        model = "alpha" if number < 8 else "beta"
        state.set_gpu_node(make_node(f"{model}-{number}", [make_device(f"n{number}", minor, model=model) for minor in range(2)]))
    state.columns.set_demand(Demand.of({Shape(memory_mib=900, gpu_type=("alpha",)): 1, Shape(memory_mib=900): 5}))
    return state


ANY_GPU = PodShape.of(request_of(make_pod(vgpu="1", vgpu_memory="900")), Policy.FRAG, HostDemand())


def fill(state: ClusterState, number: int) -> None:
    devices = [make_share(f"n{number}", minor, 1000) for minor in range(2)]
    state.set_pod(make_pod(f"u{number}", node=f"alpha-{number}", shares={"main": devices}, vgpu="2"))


def test_pods_avoid_named_model_once_nearly_full_on_unchanged_nodes_too():
    state = alphas_and_betas()
    shapes, unchanged, costs = Shapes(state, DEFAULT_WEIGHTS), state.row_of("alpha-0"), []
    for number in range(1, 8):
        costs.append(shapes.verdict(ANY_GPU).cost[unchanged])
        fill(state, number)
        assert shapes.verdict(ANY_GPU).cost.tolist() == Shapes(state, DEFAULT_WEIGHTS).verdict(ANY_GPU).cost.tolist()
    assert costs == sorted(costs)
    assert costs[0] == costs[3] < shapes.verdict(ANY_GPU).cost[unchanged]


def test_scarcer_model_is_no_change_of_its_nodes():
    state = alphas_and_betas()
    shapes, alphas = Shapes(state, DEFAULT_WEIGHTS), [state.row_of(f"alpha-{number}") for number in range(8)]
    for number in range(1, 7):
        fill(state, number)
    shapes.verdict(ANY_GPU)
    changed, before = state.columns.changed[alphas].tolist(), state.columns.demand_table.scarcity_of_kind
    fill(state, 7)
    shapes.verdict(ANY_GPU)
    assert state.columns.demand_table.scarcity_of_kind != before
    assert state.columns.changed[alphas].tolist()[:7] == changed[:7]


@pytest.mark.parametrize("drop", ["drop_gpu_node", "set_gpu_node"])
def test_free_devices_are_counted_right_when_nodes_change(drop):
    state = alphas_and_betas()
    for number in range(1, 6):
        fill(state, number)
        state.columns.derive()
    (kind, *_) = (kind for kind in state.columns.kinds if kind.model == "alpha")
    assert state.columns.free_of_kinds[kind] == 6
    if drop == "drop_gpu_node":
        state.drop_gpu_node("alpha-0")
    else:
        state.set_gpu_node(make_node("alpha-0", []))
    state.drop_pod("u1")
    state.columns.derive()
    assert state.columns.free_of_kinds[kind] == 6
    state.drop_pod("u2")
    state.columns.derive()
    assert state.columns.free_of_kinds[kind] == 8


def test_who_needs_much_memory_insists_on_large_devices():
    large = Shape(memory_mib=900)
    kind, small = Kind("m", 1000, 1), Kind("m", 500, 1)
    assert scarcity(Demand.of({large: 1}), {kind: 1, small: 1}).keys() == {kind}


@pytest.mark.parametrize(
    "shape",
    [Shape(memory_mib=1, vgpus=8), Shape(memory_mib=1, cpu_milli=120_000), Shape(memory_mib=1, ram_mib=720 * 1024)],
    ids=["GPUs", "CPU", "RAM"],
)
def test_large_node_is_scarce_when_demand_needs_its_size(shape):
    large, small = (Kind.of("m", 1000, gpus, cores * 1000, gib * 1024) for gpus, cores, gib in ((8, 128, 768), (4, 96, 384)))
    known = scarcity(Demand.of({shape: 9, Shape(memory_mib=1): 1}), {large: 8, small: 8})
    assert known.keys() == {large}
    assert known[large] > 5 * scarcity(Demand.of({Shape(memory_mib=1): 1}), {large: 8, small: 8})[large] > 0


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        pytest.param((8, 128, 384), (8, 96, 384), id="CPU"),
        pytest.param((8, 96, 768), (8, 96, 384), id="RAM"),
        pytest.param((8, 96, 384), (4, 96, 384), id="GPUs"),
    ],
)
@pytest.mark.parametrize("counts", [(8, 8), (8, 800), (800, 8)])
def test_larger_node_is_scarce_before_its_first_pod_is_known(larger, smaller, counts):
    large, small = (Kind.of("m", 1000, gpus, cores * 1000, gib * 1024) for gpus, cores, gib in (larger, smaller))
    found = scarcity(GENERIC, dict(zip((large, small), counts, strict=True)))
    assert found[large] > found.get(small, 0.0)


SINGLE = (Kind("m", 1000, 1, 128_000, 1024), Kind("m", 1000, 1, 96_000, 1024))


@pytest.mark.parametrize("kinds", [(ALPHA, BETA), SINGLE], ids=["equal nodes", "one GPU"])
def test_unseen_pods_make_no_kind_scarce_where_nodes_are_equal(kinds):
    easy = Shape(memory_mib=1)
    assert scarcity(Demand.of({easy: 1}), dict.fromkeys(kinds, 8)) == {}


def test_node_is_worth_the_pods_with_several_gpus_that_need_it():
    large, small = Kind.of("m", 1000, 8, 128_000, 768 * 1024), Kind.of("m", 1000, 8, 96_000, 384 * 1024)
    counts = {large: 8, small: 24}
    any_node, large_node = (Shape(vgpus=8, memory_mib=1, cpu_milli=cores * 1000) for cores in (64, 120))
    single = Shape(memory_mib=1, cpu_milli=120_000)
    assert seat_values(Demand.of({single: 1}), counts) == {}
    assert seat_values(Demand.of({any_node: 1, single: 9}), counts) == {large: pytest.approx(1.0), small: pytest.approx(1.0)}
    values = seat_values(Demand.of({any_node: 1, large_node: 1}), counts)
    assert values[large] == pytest.approx(5 * values[small], rel=1e-3)
    assert seat_values(Demand.of({large_node: 1}), {large: 1, small: 31}) == {large: MAX_SEAT_VALUE, small: 0.0}


def test_small_pod_breaks_the_node_that_fewer_large_pods_need():
    state = ClusterState()
    for name, cores in (("large", 128), ("small", 96)):
        state.set_host(name, cores * 1000, 1024)
        state.set_gpu_node(make_node(name, 8))
    for number in range(MIN_PODS):
        state.set_pod(make_pod(f"u{number}", vgpu="8", cpu_milli=120_000))
    # The pod takes as much CPU for its GPU as the large host has: without the need of others it would go there.
    shape = PodShape.of(request_of(make_pod(vgpu="1")), Policy.FRAG, HostDemand(16_000))
    cost = Shapes(state, DEFAULT_WEIGHTS).verdict(shape).cost
    assert cost[state.row_of("small")] < cost[state.row_of("large")]


def test_unknown_host_holds_any_shape_of_its_gpus():
    assert Kind.of("m", 1000, 8, 0, 0).can_hold(Shape(vgpus=8, memory_mib=1, cpu_milli=10**9, ram_mib=10**9))


@pytest.mark.parametrize("cores", [95.0, 95.5, 96.0])
def test_nodes_of_one_type_share_a_kind(cores):
    kind = Kind.of("M", 1000, 8, int(cores * 1000), 380 * 1024)
    assert kind == Kind.of("m", 1000, 8, 96_000, 384 * 1024) != Kind.of("m", 1000, 8, 128_000, 384 * 1024)
    assert kind.can_hold(Shape(vgpus=8, memory_mib=1, cpu_milli=95_000, ram_mib=376 * 1024))


def test_kinds_stay_few_on_a_thousand_different_hosts():
    kinds = {Kind.of("m", 1000, 8, 64_000 + 93 * number, (256 * 1024) + 401 * number) for number in range(1000)}
    assert len(kinds) <= 20


def test_host_that_comes_later_gives_its_devices_their_kind():
    early, late = ClusterState(), ClusterState()
    for name in ("a", "b"):
        early.set_host(name, 96_000, 1000)
        for state in (early, late):
            state.set_gpu_node(make_node(name))
        late.set_host(name, 96_000, 1000)
    for state in (early, late):
        for number in range(MIN_PODS):
            state.set_pod(make_pod(f"u{number}", vgpu="1", cpu_milli=1000 * (number % 2)))
        Shapes(state, DEFAULT_WEIGHTS).learn()
    assert early.view("a") == late.view("a")


def test_a_small_pod_leaves_the_large_devices_to_those_that_need_them():
    state = ClusterState()
    state.set_gpu_node(make_node("large", [make_device("large", 0, mib=2000)]))
    state.set_gpu_node(make_node("small", [make_device("small", 0, mib=1000)]))
    for number in range(MIN_PODS):
        state.set_pod(make_pod(f"u{number}", vgpu="1", vgpu_memory="2000"))
    shape = PodShape.of(request_of(make_pod(vgpu="1", vgpu_memory="1000")), Policy.FRAG, HostDemand())
    cost = Shapes(state, DEFAULT_WEIGHTS).verdict(shape).cost
    assert cost[state.row_of("small")] < cost[state.row_of("large")]
