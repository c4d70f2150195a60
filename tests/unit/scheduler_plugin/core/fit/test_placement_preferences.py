# SPDX-License-Identifier: Apache-2.0
"""What the scores make kube-scheduler choose, policy by policy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aliquot.contract.gpunode import GpuDevice
from aliquot.contract.model import Link, LinkKind, Policy
from aliquot.placement.demand import GENERIC, PPM, Demand, Shape
from aliquot.placement.device import DEFAULT_MAX_SHARES
from scheduler_plugin.core.cluster.columns import COLUMN_BITS
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit import kube_filters
from scheduler_plugin.core.fit.shapes import MAX_SCORE, PodShape, Shapes
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share, request_of


def make_state(*nodes, used=()):
    """Make a cluster; ``used`` are shares, each of a pod of its own."""
    state = ClusterState()
    for node in nodes:
        state.set_gpu_node(node)
        state.set_host(node.name, 64_000, 500_000)
    for number, share in enumerate(used):
        node = share.device_uuid.split("-")[1]
        state.set_pod(make_pod(f"held-{number}", node=node, shares={"main": [share]}, vgpu="1"))
    return state


def scores(state, *, policy=Policy.FRAG, cpu_milli=0, memory_mib=0, annotations=None, **limits):
    """Return the score of every node that fits."""
    request = request_of(make_pod(annotations=annotations, **limits))
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(PodShape.of(request, policy, HostDemand(cpu_milli, memory_mib)))
    return {
        node.name: int(verdict.score[state.row_of(node.name)])
        for node in state.gpu_nodes()
        if verdict.reason[state.row_of(node.name)] == NodeReason.FITS.value
    }


def best(found):
    return max(found, key=found.__getitem__)


def test_scores_lie_in_their_range_and_differ_finely():
    state = make_state(make_node("a"), make_node("b"), used=[make_share("b", 0, 1)])
    for policy in Policy:
        found = scores(state, policy=policy, vgpu="1", vgpu_memory="400")
        assert all(0 <= score <= MAX_SCORE for score in found.values())
    assert found["a"] != found["b"]


def test_binpack_fills_and_spread_avoids():
    state = make_state(make_node("a"), make_node("b"), used=[make_share("b", 0, 500, 20)])
    assert best(scores(state, policy=Policy.BINPACK, vgpu="1", vgpu_memory="100")) == "b"
    assert best(scores(state, policy=Policy.SPREAD, vgpu="1", vgpu_memory="100")) == "a"


def test_the_pod_overrides_the_policy():
    state = make_state(make_node("a"), make_node("b"), used=[make_share("b", 0, 500, 20)])
    wish = {"aliquot.dev/placement": "spread"}
    assert best(scores(state, policy=Policy.BINPACK, vgpu="1", vgpu_memory="100", annotations=wish)) == "a"


def test_frag_completes_a_half_used_gpu():
    state = make_state(make_node("a"), make_node("b"), used=[make_share("b", 0, 500, 50)])
    assert best(scores(state, vgpu="1", vgpu_memory="500", vgpu_cores="50")) == "b"


def test_frag_leaves_gpus_where_their_cpu_is():
    """Of two equal GPUs, take the one on the host that lacks the CPU which later pods need."""
    state = make_state(make_node("a"), make_node("b"))
    state.columns.set_demand(Demand.of({Shape(memory_ppm=PPM, cpu_milli=20_000): 1}))
    for node, cpu in (("a", 10_000), ("b", 48_000)):
        state.set_pod(make_pod(f"cpu-{node}", node=node, cpu_milli=cpu))
    assert best(scores(state, vgpu="1", cpu_milli=1000)) == "b"


def test_a_shared_pod_leaves_the_last_whole_node_alone():
    used = [make_share("b", 0, 250, 25)]
    assert best(scores(make_state(make_node("a"), make_node("b"), used=used), vgpu="1", vgpu_memory="250", vgpu_cores="25")) == "b"


def with_fault(node, count):
    return replace(node, devices=tuple(replace(entry, trouble="XID 79" if at < count else "") for at, entry in enumerate(node.devices)))


def with_cordon(node, count):
    return replace(node, cordoned_devices=tuple(entry.device.uuid for entry in node.devices[:count]))


def with_mig(node, count):
    return replace(
        node, devices=tuple(GpuDevice(make_device(node.name, at, instances=7 * (at < count))) for at in range(len(node.devices)))
    )


def with_mig_without_instances(node, count):
    cut = [replace(entry.device, mig_enabled=at < count) for at, entry in enumerate(node.devices)]
    return replace(node, devices=tuple(map(GpuDevice, cut)))


LEARNED = Demand.of({Shape(vgpus=8, memory_ppm=PPM, cores_percent=100): 1, Shape(memory_ppm=PPM // 2, cores_percent=50): 1})


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("demand", [GENERIC, LEARNED], ids=["generic", "half-of-it-whole-nodes"])
@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("without", [with_fault, with_cordon, with_mig, with_mig_without_instances])
def test_shared_pod_leaves_whole_node_when_incomplete_one_is_available(without, count, demand, policy):
    state = make_state(make_node("a", 8), without(make_node("b", 8), count))
    state.columns.set_demand(demand)
    found = scores(state, policy=policy, cpu_milli=4000, vgpu="1", vgpu_memory="500", vgpu_cores="50")
    assert found["b"] > found["a"]


@pytest.mark.parametrize("policy", Policy)
def test_a_node_is_whole_again_once_its_cordoned_gpu_is_back(policy):
    node = make_node("b", 2)
    for cordoned, alike in ((("GPU-b-0",), False), ((), True)):
        found = scores(make_state(make_node("a", 2), replace(node, cordoned_devices=cordoned)), policy=policy, vgpu="1", vgpu_memory="500")
        assert (found["a"] == found["b"]) is alike


@pytest.mark.parametrize("without", [with_fault, with_cordon, with_mig, with_mig_without_instances])
def test_link_to_gpu_unavailable_for_shares_does_not_count(without):
    """Both nodes are pairs; that of ``b`` is no pair while one half of it is away."""
    state = make_state(make_node("a", 2, linked=True), without(make_node("b", 2, linked=True), 1))
    state.columns.derive()
    row = state.row_of("b")
    assert (state.columns.order[row] >> COLUMN_BITS).sum() == sum(map(state.view("b").open_links, range(2))) == 0
    assert sum(map(state.view("a").open_links, range(2))) > 0


def test_a_pod_of_one_gpu_does_not_break_a_free_pair():
    """Both nodes lose a free GPU; on ``b`` its partner is in use already."""
    linked, pairless = make_node("a", 2, linked=True), make_node("b", 2, linked=True)
    state = make_state(linked, pairless, used=[make_share("b", 0, 1000)])
    assert best(scores(state, vgpu="1")) == "b"


@pytest.mark.parametrize("policy", [Policy.FRAG, Policy.TOPOLOGY])
def test_several_gpus_go_where_they_are_linked_best(policy):
    weak = make_node("b", 2)
    pcie = replace(weak, links=(Link("GPU-b-0", "GPU-b-1", LinkKind.SYSTEM, 0),))
    found = scores(make_state(make_node("a", 2, linked=True), pcie, make_node("c", 2)), policy=policy, vgpu="2")
    assert found["a"] > found["b"] > found["c"]


def test_numa_prefer_prefers_nodes_that_can_and_strict_rejects_the_others():
    split = make_node("b", [make_device("b", 0, numa=0), make_device("b", 1, numa=1)])
    state = make_state(make_node("a", 2), split)
    assert best(scores(state, vgpu="2", annotations={"aliquot.dev/numa": "prefer"})) == "a"
    assert set(scores(state, vgpu="2", annotations={"aliquot.dev/numa": "prefer"})) == {"a", "b"}
    assert set(scores(state, vgpu="2", annotations={"aliquot.dev/numa": "strict"})) == {"a"}


@pytest.mark.parametrize("policy", Policy)
def test_numa_prefer_decides_between_nodes_with_equal_links(policy):
    nodes = [make_node(name, [make_device(name, 0, numa=0), make_device(name, 1, numa=numa)]) for name, numa in (("a", 0), ("b", 1))]
    nodes = [replace(node, links=(Link(f"GPU-{node.name}-0", f"GPU-{node.name}-1", LinkKind.SYSTEM),)) for node in nodes]
    found = scores(make_state(*nodes), policy=policy, vgpu="2", annotations={"aliquot.dev/numa": "prefer"})
    assert found["a"] > found["b"]
    indifferent = scores(make_state(*nodes), policy=policy, vgpu="2")
    assert indifferent["a"] == indifferent["b"]


def test_spread_prefers_emptier_node_with_any_links():
    """A pair is worth less than the smallest pod next to it: a hundredth of one GPU's memory, on a node of eight."""
    state = make_state(make_node("a", 8, linked=True), make_node("b", 8), used=[make_share("b", 0, 10, 1)])
    assert best(scores(state, policy=Policy.SPREAD, vgpu="1", vgpu_memory="100")) == "a"


def test_mig_instances_are_packed():
    state = make_state(*(make_node(name, [make_device(name, 0, instances=4)]) for name in ("a", "b")))
    request: dict[str, Any] = {"mig_1g.10gb": "1"}
    state.set_pod(make_pod("held", node="b", shares={"main": [replace(make_share("b", 0), device_uuid="MIG-b-0-2")]}, **request))
    assert best(scores(state, **request)) == "b"
    assert best(scores(state, policy=Policy.SPREAD, **request)) == "a"


def test_a_pod_of_several_containers_is_rated_like_any_other():
    from tests.unit.scheduler_plugin.builders import make_spec

    state = make_state(make_node("a"), make_node("b"), used=[make_share("b", 0, 500, 50)])
    pod = make_pod(
        "u", make_spec("x", vgpu="1", vgpu_memory="250", vgpu_cores="25"), make_spec("y", vgpu="1", vgpu_memory="250", vgpu_cores="25")
    )
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(PodShape.of(request_of(pod), Policy.BINPACK, HostDemand()))
    rows = [state.row_of("a"), state.row_of("b")]
    assert verdict.reason[rows].tolist() == [0, 0]
    assert np.argmax(verdict.score[rows]) == 1


def test_equal_nodes_are_ordered_by_pod_and_always_same():
    state = make_state(*(make_node(f"n{number}") for number in range(20)))
    shapes, rows = Shapes(state, DEFAULT_WEIGHTS), np.arange(20)
    chosen = [shapes.tie_break(rows, f"uid-{number}") for number in range(50)]
    assert chosen == [shapes.tie_break(rows, f"uid-{number}") for number in range(50)]
    assert len(set(chosen)) > 10


def test_reasons_are_few_fixed_sentences_and_explanations_have_two_more():
    sentences = [reason.sentence for reason in NodeReason if reason is not NodeReason.FITS]
    assert len(set(sentences)) == len(sentences) <= 14  # two of them for claims
    assert len({*sentences, *kube_filters.SENTENCES}) == len(sentences) + len(kube_filters.SENTENCES) <= 16


def test_shares_per_gpu_come_from_the_inventory():
    state = make_state(make_node("a", 1, shares_per_gpu=1), make_node("b", 1), used=[make_share("a", 0, 1), make_share("b", 0, 1)])
    assert set(scores(state, vgpu="1", vgpu_memory="1")) == {"b"}
    assert DEFAULT_MAX_SHARES > 1
