"""The demand that follows from the pods that are known, and what it makes of scarce devices."""

import pytest

from placement.demand import GENERIC, Demand, Shape
from proto.model import Policy
from scheduler_plugin.core.score import DEFAULT_WEIGHTS, MAX_SCARCITY, HostDemand, scarcity
from scheduler_plugin.core.shapes import PodShape, Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.core.wanted import MIN_PODS, Wanted
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, request_of

ALPHA, BETA = ("alpha", 1000), ("beta", 1000)


def seen(count, **limits) -> Wanted:
    wanted = Wanted()
    for number in range(count):
        wanted.see(make_pod(f"u{number}", **(limits or {"vgpu": "1", "vgpu_memory": "250"})))
    return wanted


def test_few_pods_say_nothing():
    assert seen(MIN_PODS - 1).take() == GENERIC
    assert seen(MIN_PODS).take() == Demand.of({Shape(memory_mib=250): 1})


def test_a_pod_counts_once_until_it_is_gone():
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


def test_the_demand_is_taken_anew_once_a_quarter_of_the_pods_changed():
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


def test_a_kind_is_as_scarce_as_the_part_of_the_demand_that_insists_on_it():
    picky, easy = Shape(memory_mib=1000, cores_percent=100, gpu_type=("alpha",)), Shape(memory_mib=1000, cores_percent=100)
    assert scarcity(Demand.of({easy: 1}), {ALPHA: 5, BETA: 5}) == {}
    assert scarcity(Demand.of({easy: 3, picky: 1}), {ALPHA: 5, BETA: 5}) == {ALPHA: pytest.approx(0.5)}
    assert scarcity(Demand.of({picky: 1}), {ALPHA: 1, BETA: 9}) == {ALPHA: MAX_SCARCITY}
    assert scarcity(Demand.of({picky: 1}), {BETA: 9}) == {}


def test_who_needs_much_memory_insists_on_large_devices():
    large = Shape(memory_mib=900)
    assert scarcity(Demand.of({large: 1}), {("m", 1000): 1, ("m", 500): 1}).keys() == {("m", 1000)}


def test_a_small_pod_leaves_the_large_devices_to_those_that_need_them():
    state = ClusterState()
    state.set_gpu_node(make_node("large", [make_device("large", 0, mib=2000)]))
    state.set_gpu_node(make_node("small", [make_device("small", 0, mib=1000)]))
    for number in range(MIN_PODS):
        state.set_pod(make_pod(f"u{number}", vgpu="1", vgpu_memory="2000"))
    shape = PodShape.of(request_of(make_pod(vgpu="1", vgpu_memory="1000")), Policy.FRAG, HostDemand())
    cost = Shapes(state, DEFAULT_WEIGHTS).verdict(shape).cost
    assert cost[state.row_of("small")] < cost[state.row_of("large")]
