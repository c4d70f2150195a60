# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.contract.model import Isolation, PodRequest, Preferences
from aliquot.placement.demand import GENERIC, MAX_SHAPES, PPM, WEIGHT_SUM, Demand, Seat, Shape, shape_of
from aliquot.placement.score import fits, fragmentation
from tests.unit.aliquot.placement.builders import ask, ask_mig, make_states, share


def test_weights_follow_the_counts_and_add_up():
    demand = Demand.of({Shape(memory_mib=1): 2, Shape(memory_mib=2): 1, Shape(memory_mib=3): 0})
    assert [shape.memory_mib for shape, _ in demand.shapes] == [1, 2]
    assert sum(weight for _, weight in demand.shapes) == WEIGHT_SUM
    assert demand.shapes[0][1] == pytest.approx(2 * demand.shapes[1][1], abs=2)


def test_most_frequent_shapes_count_in_any_order_of_pods():
    counts = {Shape(memory_mib=mib): 1 + mib % 3 for mib in range(1, 2 * MAX_SHAPES)}
    demand = Demand.of(counts)
    assert len(demand.shapes) == MAX_SHAPES
    assert {1 + shape.memory_mib % 3 for shape, _ in demand.shapes} == {2, 3}
    assert Demand.of(dict(reversed(counts.items()))) == demand


def test_few_pods_with_many_gpus_count_before_many_small_ones():
    large = Shape(vgpus=8, memory_ppm=PPM)
    demand = Demand.of({Shape(memory_mib=mib): 3 for mib in range(1, 2 * MAX_SHAPES)} | {large: 1})
    assert demand.shapes[0][0] == large
    assert demand.shapes[0][1] < demand.shapes[1][1]


def test_memory_is_an_amount_or_a_part_of_the_device_rounded_up():
    assert Shape(memory_mib=100).memory_on(1000) == 100
    assert Shape(memory_ppm=PPM // 8).memory_on(1001) == 126
    assert Shape(memory_ppm=PPM).memory_on(1001) == 1001


def test_a_shape_wants_models_as_a_pod_does():
    assert Shape(gpu_type=("h200", "A100")).wants("NVIDIA H200")
    assert not Shape(gpu_type=("A100",)).wants("NVIDIA H200")
    assert not Shape(gpu_type_not=("h200",)).wants("NVIDIA H200")


def test_seats_merge_shapes_of_equal_need_and_skip_unfit_ones():
    demand = Demand.of({Shape(memory_mib=10, cpu_milli=1): 1, Shape(memory_mib=10, cpu_milli=2): 1, Shape(memory_mib=2000): 2})
    assert demand.seats_on("any", 1000) == (Seat(10, 1, WEIGHT_SUM // 2),)


@pytest.mark.parametrize(
    ("request_", "want"),
    [
        pytest.param(ask(2, 100, 30), Shape(2, 100, 0, 30, 1000, 64), id="amounts per vGPU"),
        pytest.param(ask(1, None), Shape(1, 0, PPM, 1, 1000, 64), id="a whole device"),
        pytest.param(ask_mig(("1g.10gb", 1)), None, id="MIG instances are no vGPU"),
        pytest.param(ask(1, 100, init=True), None, id="what ends before the pod begins"),
    ],
)
def test_a_pod_is_reduced_to_what_it_asks_for(request_, want):
    assert shape_of(PodRequest((request_,)), 1000, 64) == want


def test_of_several_containers_the_largest_counts_and_exclusive_is_the_whole_device():
    assert shape_of(PodRequest((ask(1, 100), ask(1, 300))), 0, 0).memory_mib == 300
    exclusive = shape_of(PodRequest((ask(1, None),), Preferences(isolation=Isolation.EXCLUSIVE)), 0, 0)
    assert (exclusive.memory_ppm, exclusive.cores_percent) == (PPM, 100)


def test_what_fits_is_what_the_fragmentation_counts_as_useful():
    (state,) = make_states(1, share(0, 600, 60))
    fitting = sum(weight for shape, weight in GENERIC.shapes if fits(state, shape))
    assert fragmentation(state) == 400_000 * (WEIGHT_SUM - fitting) // WEIGHT_SUM
    assert fits(state, Shape(memory_mib=400, cores_percent=40))
    assert not fits(state, Shape(memory_mib=401))
    assert not fits(state, Shape(cores_percent=41))
    assert not fits(state, Shape(memory_mib=1, gpu_type=("T4",)))
