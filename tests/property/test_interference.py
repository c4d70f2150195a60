# SPDX-License-Identifier: Apache-2.0
"""The term ``interference``: its columnar form agrees with the scalar one, it is monotone, and without a weight nothing changes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from aliquot.contract import units
from aliquot.contract.gpunode import GpuNode, PodUtilization
from aliquot.contract.model import IDLE, ContainerRequest, DeviceShare, PodRequest, Utilization
from aliquot.placement.choose import choose
from aliquot.placement.demand import PPM
from aliquot.placement.fit import share_on
from aliquot.placement.refusal import Refusal
from aliquot.placement.score import cost as device_cost
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.cluster.state import ClusterState, Reservation
from scheduler_plugin.core.fit.columnar import RatingQuery, evaluate
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand, nominal, vgpu_terms
from scheduler_plugin.core.score.interference import Aversion
from tests.property.test_columnar import best_quality, demands, gpu_nodes, policies, preferences, requests
from tests.unit.scheduler_plugin.builders import make_node, make_pod

NODES = ("n1", "n2")
percents = st.integers(0, 100)
uses = st.builds(Utilization, percents, percents)
weights = st.sampled_from([-1.0, 0.01, 0.3, 1.0, 100.0, 1e9])


roomy = st.tuples(
    st.builds(lambda devices, linked: make_node("n1", devices, linked=linked), st.integers(1, 4), st.booleans()),
    st.builds(lambda vgpus, mib: ContainerRequest("main", vgpus, vgpus * mib * units.MIB), st.integers(1, 2), st.integers(1, 100)),
)
"""A node and a request that nearly always fits on all its GPUs, also on busy ones."""
cases = roomy | roomy | st.tuples(gpu_nodes(), requests())


def weighing(weight: float):
    """The default weights, each with a weight for interference."""
    return {policy: replace(own, interference=weight) for policy, own in DEFAULT_WEIGHTS.items()}


def reporting(node: GpuNode, reports: dict[str, Utilization]) -> GpuNode:
    return replace(node, utilization=tuple(PodUtilization(uid, used) for uid, used in reports.items()))


def held(uid: str, node: GpuNode, device: int, template: int) -> PodFacts:
    share = DeviceShare(node.devices[device % len(node.devices)].device.uuid, units.MIB)
    return make_pod(uid, node=node.name, shares={"main": [share]}, vgpu="1", vgpu_memory=str(template))


@st.composite
def busy(draw: st.DrawFn, node: GpuNode, weight: float) -> ClusterState:
    """Give most GPUs of a node pods of three templates, with reports for some of the pods. A pod avoids GPUs in use if it can."""
    state = ClusterState()
    state.utilizations.weigh(weighing(weight))
    state.set_host(node.name, 8000, 8192)
    node = replace(node, shares_per_gpu=4)
    for number in range(draw(st.integers(len(node.devices) // 2, 2 * len(node.devices)))):
        state.set_pod(held(f"held-{number}", node, number, draw(st.integers(1, 3))))
    reports = draw(st.dictionaries(st.sampled_from([f"held-{number}" for number in range(6)]), uses, min_size=3))
    state.set_gpu_node(reporting(node, reports))
    state.read_utilization()
    return state


@given(st.data(), policies, weights, uses)
def test_cost_with_interference_matches_scalar_score(data, policy, weight, used):
    node, request = data.draw(cases)
    state, wishes, demand = data.draw(busy(node, weight)), data.draw(preferences), data.draw(demands)
    state.columns.derive()
    ask = RatingQuery(request, wishes, policy, demand, used)
    result = evaluate(state.columns, np.array([state.row_of("n1")]), ask, weighing(weight)[policy])
    if result.reason[0] or request.mig:
        return
    view = state.view("n1", state.utilizations.aversion(used, policy))
    positions = nominal(view, request, wishes, policy)
    terms = vgpu_terms(
        view,
        [(index, share_on(view.states[index].device, request, wishes)) for index in positions],
        policy=policy,
        demand=demand,
        prefer_numa=wishes.numa is not None,
        best_quality=best_quality(view, request, wishes, node.links, positions),
    )
    assert 0 <= terms.interference <= 1
    event(f"{policy}: slower: {terms.interference > 0}")
    assert float(result.cost[0]) == pytest.approx(terms.cost(weighing(weight)[policy]), rel=1e-12, abs=1e-12)


@given(st.data(), policies, weights, uses)
def test_rated_devices_cost_as_much_as_placement_takes_with_interference(data, policy, weight, used):
    node, request = data.draw(cases)
    state, wishes = data.draw(busy(node, weight)), data.draw(preferences)
    view = state.view("n1", state.utilizations.aversion(used, policy))
    choice = choose(view.states, request, wishes, policy, links=node.links, demand=view.demand)
    if request.mig or isinstance(choice, Refusal):
        return
    by_uuid = {shown.device.uuid: shown for shown in view.states}
    taken = sum(device_cost(policy, by_uuid[share.device_uuid], share, view.demand) for share in choice.shares)
    rated = sum(
        device_cost(policy, view.states[index], share_on(view.states[index].device, request, wishes), view.demand)
        for index in nominal(view, request, wishes, policy)
    )
    assert taken == rated


@given(st.data(), policies, preferences)
def test_reports_change_nothing_without_weight(data, policy, wishes):
    node, request = data.draw(cases)
    reported = data.draw(busy(node, 0.0))
    plain = ClusterState()
    plain.set_host("n1", 8000, 8192)
    plain.set_gpu_node(replace(node, shares_per_gpu=4))
    for pod in reported.pods.values():
        plain.set_pod(pod)
    asked = PodRequest((request,), wishes)
    verdicts = []
    for state in (reported, plain):
        shape = PodShape.of(asked, policy, HostDemand(), state.utilizations.of(make_pod(vgpu="1")))
        shapes = Shapes(state, DEFAULT_WEIGHTS)
        shapes.learn()
        verdicts.append((shape, shapes.verdict(shape)))
    (shape, verdict), (other_shape, other) = verdicts
    assert shape == other_shape
    assert verdict.cost[0] == other.cost[0]
    assert verdict.score[0] == other.score[0]
    assert reported.device_states("n1") == plain.device_states("n1")
    assert reported.plan("n1", asked, policy, "u1") == plain.plan("n1", asked, policy, "u1")


@given(uses, uses, uses, weights.filter(lambda weight: weight > 0), policies)
def test_busier_pods_never_slow_others_less(own, others, more, weight, policy):
    aversion = Aversion.of(own, weight, policy)
    busier = Utilization(others.sm_percent + more.sm_percent, others.dram_percent + more.dram_percent)
    mine = Aversion.of(Utilization(own.sm_percent + more.sm_percent, own.dram_percent + more.dram_percent), weight, policy)
    found = aversion.slowdown_ppm(others)
    assert 0 <= found <= aversion.slowdown_ppm(busier) <= PPM
    assert found <= mine.slowdown_ppm(others)
    assert aversion.cost_ppm(found) <= aversion.cost_ppm(aversion.slowdown_ppm(busier))
    assert aversion.slowdown_ppm(IDLE) == 0


INVENTORIES = tuple(make_node(name) for name in NODES)
uids = st.integers(0, 4).map("u{}".format)
inventories = st.sampled_from(INVENTORIES)
reservations = st.builds(
    lambda uid, node, minor: Reservation(uid, node.name, {f"GPU-{node.name}-{minor}": Use(1, 0, 1, 1)}, HostDemand()),
    uids,
    inventories,
    st.integers(0, 1),
)
changes = st.one_of(
    st.tuples(st.just("set_pod"), st.builds(held, uids, inventories, st.integers(0, 1), st.integers(1, 2))),
    st.tuples(st.just("drop_pod"), uids),
    st.tuples(st.just("reserve"), reservations),
    st.tuples(st.just("release"), uids),
    st.tuples(st.just("set_gpu_node"), st.builds(reporting, inventories, st.dictionaries(uids, uses, max_size=3))),
    st.tuples(st.just("drop_gpu_node"), st.sampled_from(NODES)),
    st.tuples(st.just("read_utilization")),
)


def counted(state: ClusterState, node: GpuNode) -> list[Utilization]:
    """Add up what the pods on each device of a node use, one pod after the other."""
    sums = []
    for entry in node.devices:
        on_device = [uid for uid in {*state.pods, *state.reservations} if entry.device.uuid in state.footprint_of(uid)]
        used = [state.utilizations.of(state.pods.get(uid)) for uid in on_device]
        sums.append(Utilization(sum(one.sm_percent for one in used), sum(one.dram_percent for one in used)))
    return sums


@given(st.lists(changes, max_size=20))
def test_use_counted_over_events_equals_that_of_present_pods(history):
    state = ClusterState()
    state.utilizations.weigh(weighing(1.0))
    for name, *arguments in history:
        getattr(state, name)(*arguments)
    for node in state.gpu_nodes():
        row, columns = state.row_of(node.name), state.columns
        kept = zip(columns.busy_sm[row].tolist(), columns.busy_dram[row].tolist(), strict=True)
        assert [Utilization(*used) for used in kept][: len(node.devices)] == counted(state, node)
