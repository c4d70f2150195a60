# SPDX-License-Identifier: Apache-2.0
"""How much is searched for a pod of several containers: nothing where sums tell, and a bounded number of nodes at a time elsewhere."""

from typing import Any

import numpy as np
import pytest

from aliquot import contract
from aliquot.contract.model import ContainerSpec, Policy
from aliquot.placement.fit import Reject
from aliquot.placement.refusal import Refusal
from aliquot.placement.request import pod_request
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit import shapes as under_test
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share

NODES = 300


@pytest.fixture
def searched(monkeypatch):
    """Names of the nodes that were searched."""
    names = []
    search = Shapes._search

    def noting(self, shape, node):
        names.append(node)
        return search(self, shape, node)

    monkeypatch.setattr(Shapes, "_search", noting)
    return names


def cluster(**device) -> ClusterState:
    state = ClusterState()
    for number in range(NODES):
        name = f"n{number:03}"
        devices = [make_device(name, minor, numa=minor // 2, **device) for minor in range(4)]
        state.set_gpu_node(make_node(name, devices))
        state.set_host(name, 1000 * (number + 1), 1 << 20)
    return state


def shape_of(count: int, annotations=None, **limits: Any) -> PodShape:
    specs = [
        ContainerSpec(f"c{number}", {f"nvidia.com/{name.replace('_', '-')}": amount for name, amount in limits.items()})
        for number in range(count)
    ]
    pod = make_pod("u1", *specs, annotations=annotations)
    return PodShape.of(pod_request(pod.gpu), Policy.FRAG, HostDemand(100, 100))


@pytest.mark.parametrize("annotation", [contract.ANNOTATION_PAUSED, contract.ANNOTATION_PRIORITY])
def test_what_does_not_change_where_a_pod_fits_makes_no_other_shape(annotation):
    value = {contract.ANNOTATION_PAUSED: "true", contract.ANNOTATION_PRIORITY: "low"}[annotation]
    assert shape_of(1, {annotation: value}, vgpu="1") == shape_of(1, vgpu="1")


def test_instances_that_are_there_need_only_be_counted(searched):
    state = cluster(instances=2)
    shapes = Shapes(state, DEFAULT_WEIGHTS)
    assert (shapes.verdict(shape_of(4, **{"mig-1g.10gb": "2"})).reason[:NODES] == NodeReason.FITS.value).all()
    assert (shapes.verdict(shape_of(5, **{"mig-1g.10gb": "2"})).reason[:NODES] == NodeReason.MIG_PROFILE.value).all()
    assert not searched


def test_instances_on_gpus_that_the_pod_does_not_want_do_not_count(searched):
    state = cluster(instances=2)
    unwanted = {contract.ANNOTATION_GPU_UUID: ",".join(f"GPU-n{number:03}-0" for number in range(NODES))}
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(shape_of(2, unwanted, **{"mig-1g.10gb": "2"}))
    assert (verdict.reason[:NODES] == NodeReason.MIG_PROFILE.value).all()
    assert not searched


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"vgpu": "2", "vgpu_memory": "1600"}, NodeReason.MEMORY),
        ({"vgpu": "2", "vgpu_memory": "200", "vgpu_cores": "160"}, NodeReason.CORES),
        ({"vgpu": "2"}, NodeReason.MEMORY),
    ],
)
def test_what_is_not_there_in_sum_is_not_searched_for(searched, limits, reason):
    state = cluster()
    for number in range(NODES):
        name = f"n{number:03}"
        state.set_pod(
            make_pod(f"u-{name}", node=name, shares={"main": [make_share(name, 3, 900, 90)]}, vgpu="1", vgpu_memory="900", vgpu_cores="90")
        )
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(shape_of(2, **limits))
    assert {NodeReason(int(value)) for value in verdict.reason[:NODES]} == {reason}
    assert not searched


def test_nodes_are_searched_in_small_batches_with_best_first(searched, monkeypatch):
    monkeypatch.setattr(under_test, "MAX_SEARCHED", 100)
    state = cluster()
    shapes, shape = Shapes(state, DEFAULT_WEIGHTS), shape_of(2, {contract.ANNOTATION_NUMA: "strict"}, vgpu="2", vgpu_memory="1400")
    verdict = shapes.verdict(shape)
    assert len(searched) == 50
    best = np.argsort(-verdict.score[:NODES], kind="stable")[:50]
    assert set(searched) == {state.names[row] for row in best.tolist()}
    assert (verdict.reason[:NODES] == NodeReason.FITS.value).all()
    assert fits_since(shapes, shape, 0)
    assert shapes.verdict(shape) is verdict
    searched.clear()
    for number in range(NODES):  # one GPU of each NUMA node is taken: no two of them are free on one
        name = f"n{number:03}"
        shares = {"main": [make_share(name, minor, 900) for minor in (0, 2)]}
        state.set_pod(make_pod(f"u-{name}", node=name, shares=shares, vgpu="2", vgpu_memory="1800"))
    assert not (shapes.verdict(shape).reason[:NODES] == NodeReason.FITS.value).any()
    assert not searched
    for number in range(0, NODES, 3):
        state.drop_pod(f"u-n{number:03}")
    calls = 0
    while len(shapes.verdict(shape).unsearched):
        calls += 1
        assert calls < 10  # though nothing changes in between
    fresh = Shapes(state, DEFAULT_WEIGHTS)
    monkeypatch.setattr(under_test, "MAX_SEARCHED", 10_000)
    assert np.array_equal(shapes.verdict(shape).reason, fresh.verdict(shape).reason)


def test_nodes_with_many_failed_tries_count_more(searched, monkeypatch):
    monkeypatch.setattr(under_test, "MAX_SEARCHED", 100)
    refusal = Refusal("c0", Reject.MEMORY, (), "no layout has room", sets_tried=80)
    monkeypatch.setattr(under_test, "choose_pod", lambda *args, **options: refusal)
    shapes, shape = Shapes(cluster(), DEFAULT_WEIGHTS), shape_of(2, {contract.ANNOTATION_NUMA: "strict"}, vgpu="2", vgpu_memory="1400")
    verdict = shapes.verdict(shape)
    assert len(searched) == 9, "each costs 2 containers and 80 sets, as much as 12 containers"
    assert len(verdict.unsearched) == NODES - 9
    searched.clear()
    assert fits_since(shapes, shape, 0), "nodes that are too many count as fitting"
    assert len(searched) == 9
    searched.clear()
    takers = shapes.takers(shape, 0)
    for number, takes in enumerate(takers.looks(takers.changed_at > 0), 1):
        assert (takes, len(searched)) == (number == 10, min(number, 9)), "whoever asks may let others work after each search"


def fits_since(shapes: Shapes, shape: PodShape, since: int) -> bool:
    takers = shapes.takers(shape, since)
    return any(takers.looks(takers.changed_at > since))
