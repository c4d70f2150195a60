# SPDX-License-Identifier: Apache-2.0
import random
from itertools import combinations

import numpy as np
import pytest

from aliquot_lab.simulate import baselines
from aliquot_lab.simulate.baselines import BASELINES, Fgd
from aliquot_lab.simulate.engine import most_frequent
from aliquot_lab.simulate.fragmentation import Measure
from aliquot_lab.simulate.trace import NODE_LIST, PodClass, TraceNode, TracePod, pod_lists, read_nodes, read_pods
from tests.unit.aliquot_lab.simulate.test_trace import TRACE


def node(name="n", cpu=10_000, ram=10_000, gpus=2, model="M"):
    return TraceNode(name, cpu, ram, gpus, model)


def pod(name="p", cpu=1000, ram=1000, gpus=1, milli=500, models=()):
    return TracePod(name, PodClass(cpu, ram, gpus, milli if gpus == 1 else 1000 * bool(gpus), frozenset(models)))


def left_over(node, cpu_free, free, classes):
    """Count as the paper says it, one class at a time."""
    total = 0.0
    for kind, weight in classes:
        usable = [gpu for gpu in free if gpu >= max(1, kind.milli)]
        fed = kind.gpus and (not kind.models or node.model in kind.models) and kind.cpu_milli <= cpu_free
        useful = sum(usable) if fed and len(usable) >= kind.gpus else 0
        total += weight * (sum(free) - useful)
    return total


def test_measure_equals_definition_of_paper():
    rng = random.Random(3)
    pods = read_pods(pod_lists(TRACE)["small"])
    classes = most_frequent(pods, 1.0)
    for _ in range(50):
        one = node(gpus=4, model=rng.choice(["Alpha", "Beta"]))
        cpu_free, free = rng.randrange(70_000), [rng.choice([0, 100, 480, 700, 1000, 1000]) for _ in range(4)]
        measured = Measure(classes, ["Alpha", "Beta"]).fragmentation(
            np.array([cpu_free]), np.array([free]), np.array([["Alpha", "Beta"].index(one.model)])
        )
        assert measured[0] == pytest.approx(left_over(one, cpu_free, free, classes))


def test_fgd_takes_gpu_with_least_fragmentation():
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    engine, rng = Fgd(nodes, pods, 1.0), random.Random(4)
    classes = most_frequent(pods, 1.0)
    for number in range(60):
        one = rng.choice(pods)
        room, kind = engine.room(), one.kind
        best = -1.0
        for row, there in enumerate(nodes):
            free = [gpu for gpu in room.gpu_milli[row].tolist() if gpu >= 0]
            fits = there.model in kind.models or not kind.models
            if not fits or engine.cpu[row] < kind.cpu_milli or engine.ram[row] < kind.ram_mib:
                continue
            usable = [index for index, gpu in enumerate(free) if gpu >= max(1, kind.milli)]
            sets = list(combinations(usable, kind.gpus))[: 1 if kind.gpus > 1 else None]
            before = left_over(there, int(room.cpu_milli[row]), free, classes)
            for chosen in sets:
                after = [gpu - kind.milli * (index in chosen) for index, gpu in enumerate(free)]
                gain = before - left_over(there, int(room.cpu_milli[row]) - kind.cpu_milli, after, classes)
                best = max(best, float(np.floor(100 / (1 + np.exp(-gain / 1000)))))
        placed = engine.place(TracePod(f"try-{number}", kind))
        assert placed == (best >= 0)
        if placed:
            assert engine._kept[kind].score[engine._placed[f"try-{number}"][1]] == best


@pytest.mark.parametrize("policy", [*BASELINES])
def test_engine_allocates_once_and_frees_all(policy):
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    engine = baselines.make(policy, nodes, pods, 1)
    empty = engine.room()
    held = [one for one in pods if engine.place(one)]
    assert 0 < len(held) < len(pods)
    room = engine.room()
    assert (room.cpu_milli >= 0).all()
    assert (room.gpu_milli >= -1).all()
    assert np.maximum(room.gpu_milli, 0).sum() == np.maximum(empty.gpu_milli, 0).sum() - sum(one.kind.demand_milli for one in held)
    for one in held:
        engine.remove(one)
    assert (engine.room().gpu_milli == empty.gpu_milli).all()
    assert (engine.room().cpu_milli == empty.cpu_milli).all()


def place(policy, nodes, *pods):
    engine = baselines.make(policy, nodes, pods, 1)
    assert all(engine.place(one) for one in pods)
    return engine.room().gpu_milli.tolist()


def test_bestfit_leaves_least():
    assert place("bestfit", [node("a", cpu=20_000), node("b", cpu=5000)], pod()) == [[1000, 1000], [500, 1000]]


def test_dotprod_avoids_node_with_much_free_of_requested_resource():
    assert place("dotprod", [node("a", gpus=4), node("b", gpus=2)], pod())[1][:2] == [500, 1000]


def test_gpupacking_uses_gpus_in_use_first():
    assert place("gpupacking", [node("a"), node("b")], pod("x", milli=900), pod("y", milli=100)) == [[0, 1000], [1000, 1000]]
    assert place("gpupacking", [node("a"), node("b")], pod("x", milli=900), pod("y", milli=200)) == [[100, 800], [1000, 1000]]


def test_hami_binpack_takes_the_node_then_the_gpu_with_most_in_use():
    large, small = pod("x", milli=700), pod("y", milli=200)
    assert place("hami-binpack", [node("a"), node("b")], large, small) == [[100, 1000], [1000, 1000]]
    # As much memory in use, but in more shares.
    shares = [pod(str(number), milli=200, models=["Beta"]) for number in range(4)]
    nodes = [node("a", gpus=1, model="Alpha"), node("b", gpus=1, model="Beta")]
    assert place("hami-binpack", nodes, pod("x", milli=800, models=["Alpha"]), *shares, pod("y", milli=100)) == [[200], [100]]


def test_kai_binpack_takes_a_shared_gpu_before_a_nearly_full_node():
    nodes, first = [node("a", gpus=1, model="A"), node("b", model="B")], pod("x", milli=500, models=["B"])
    assert place("kai-binpack", nodes, first, pod("y", milli=200)) == [[1000, -1], [300, 1000]]
    assert place("kai-binpack", nodes[::-1], pod("y", milli=1000)) == [[1000, 1000], [0, -1]]


def test_kube_least_allocated_takes_the_emptiest_host_and_its_first_gpu():
    small, large = pod("x", cpu=1000, milli=500), pod("y", cpu=1000, milli=600)
    nodes = [node("a", cpu=8000), node("b", cpu=9000)]
    assert place("kube-least-allocated", nodes, small, large) == [[400, 1000], [500, 1000]]
    assert place("kube-least-allocated", nodes[:1], small, large) == [[500, 400]]


def test_kube_most_allocated_takes_the_node_with_most_in_use():
    nodes = [node("a", gpus=4), node("b", gpus=2)]
    assert place("kube-most-allocated", nodes, pod("x", milli=500), pod("y", milli=600)) == [[1000] * 4, [500, 400, -1, -1]]


def test_gpuclustering_keeps_kinds_together():
    nodes = [node("a"), node("b")]
    assert place("gpuclustering", nodes, pod("x", milli=1000), pod("y", milli=500), pod("z", milli=500)) == [[0, 1000], [0, 1000]]


def test_gpupacking_prefers_the_fuller_gpu_and_then_the_smaller_empty_node():
    nodes = [node("a", model="A"), node("b", model="B")]
    filled = pod("x", milli=500, models=["A"]), pod("y", milli=800, models=["B"])
    assert place("gpupacking", nodes, *filled, pod("z", milli=200)) == [[500, 1000], [0, 1000]]
    assert place("gpupacking", [node("a", gpus=4), node("b", gpus=2)], pod())[1][:2] == [500, 1000]


@pytest.mark.parametrize("policy", ["gpuclustering", "gpupacking"])
def test_for_pod_without_gpus_all_nodes_are_equal(policy):
    engine = baselines.make(policy, [node("a", model="A"), node("b", model="B")], [], 1)
    assert engine.place(pod("x", models=["B"]))
    assert engine.place(pod("cpu", gpus=0, cpu=3000))
    assert engine.room().cpu_milli.tolist() == [7000, 9000]


@pytest.mark.parametrize("policy", ["bestfit", "dotprod", "gpuclustering"])
def test_nodes_with_scores_rounding_to_same_integer_are_equal(policy):
    """As kube-scheduler sees them: a hundredth of the cores, or a thousandth of a GPU, makes no difference."""
    nodes = [node("a", cpu=20_000, model="A"), node("b", cpu=19_900, model="B")]
    filled = pod("x", milli=310, models=["A"]), pod("y", milli=311, models=["B"])
    assert place(policy, nodes, *filled, pod("z", milli=100)) == [[590, 1000], [689, 1000]]


def test_equal_nodes_are_taken_by_name():
    assert place("bestfit", [node("a"), node("b")], pod()) == [[500, 1000], [1000, 1000]]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="bestfit"):
        baselines.make("best", [node()], [], 1)
