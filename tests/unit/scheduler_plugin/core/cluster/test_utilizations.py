# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.contract.gpunode import PodUtilization
from aliquot.contract.model import IDLE, Policy, Utilization
from scheduler_plugin.core.cluster.pod_template import MAX_TEMPLATES
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.cluster.utilizations import KEPT, STEP_PERCENT, Utilizations
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.core.score.interference import NO_AVERSION
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share

WEIGHTS = {Policy.FRAG: replace(DEFAULT_WEIGHTS[Policy.FRAG], interference=1.0)}


def weighed() -> Utilizations:
    found = Utilizations()
    found.weigh(WEIGHTS)
    return found


def of_template(number: int, uid: str = ""):
    return make_pod(uid or f"u{number}", vgpu="1", vgpu_memory=str(100 + number))


def test_template_has_mean_of_its_latest_pods():
    known = weighed()
    for number in range(KEPT + 1):
        known.learn(of_template(0, f"u{number}"), Utilization(0 if number == 0 else 40, 20))
    assert known.of(of_template(0)) == IDLE
    assert known.settle()
    assert known.of(of_template(0, "new")) == Utilization(40, 20)
    known.learn(of_template(0, "u1"), Utilization(40, 20))
    assert not known.settle()


@given(st.lists(st.integers(0, 100).map(lambda percent: percent // STEP_PERCENT * STEP_PERCENT), min_size=1, max_size=40))
def test_unknown_template_counts_as_upper_quartile_of_known_ones(percents):
    known = weighed()
    for number, percent in enumerate(percents):
        known.learn(of_template(number), Utilization(percent, 100 - percent))
    known.settle()
    for pod in (of_template(99), None):
        sm, dram = known.of(pod)
        for found, of_all in ((sm, percents), (dram, [100 - percent for percent in percents])):
            assert 4 * sum(one <= found for one in of_all) >= 3 * len(of_all)
            assert 4 * sum(one < found for one in of_all) < 3 * len(of_all)


def test_number_of_templates_is_bounded():
    known = weighed()
    for number in range(MAX_TEMPLATES + 1):
        known.learn(of_template(number), Utilization(number % 100, 0))
    known.settle()
    assert len(known._known) == MAX_TEMPLATES


def test_policy_without_weight_has_no_aversion_and_nothing_is_learned_without_any():
    assert weighed().aversion(Utilization(90, 90), Policy.SPREAD) is NO_AVERSION
    known = Utilizations()
    known.weigh(DEFAULT_WEIGHTS)
    known.learn(of_template(0), Utilization(90, 90))
    assert not known.settle()
    assert known.of(of_template(0)) is IDLE
    assert known.aversion(Utilization(90, 90), Policy.FRAG) is NO_AVERSION


@pytest.mark.parametrize("known_before", ["nothing", "waiting", "bound"])
def test_report_is_learned_whichever_of_pod_and_node_is_known_first(known_before):
    state, used = ClusterState(), Utilization(80, 40)
    state.utilizations.weigh(WEIGHTS)
    pod = make_pod("u1", node="n1", shares={"main": [make_share("n1", 0)]}, vgpu="1")
    if known_before != "nothing":
        state.set_pod(pod if known_before == "bound" else make_pod("u1", vgpu="1"))
    state.set_gpu_node(make_node(utilization=(PodUtilization("u1", used),)))
    state.read_utilization()
    state.set_pod(pod)
    state.read_utilization()
    assert (state.columns.busy_sm[0, 0], state.columns.busy_dram[0, 0]) == used


def test_node_reports_only_its_own_pods():
    state = ClusterState()
    state.utilizations.weigh(WEIGHTS)
    pod = make_pod("u1", node="n1", shares={"main": [make_share("n1", 0)]}, vgpu="1")
    state.set_pod(pod)
    state.set_gpu_node(make_node("n2", utilization=(PodUtilization("u1", Utilization(80, 40)),)))
    state.read_utilization()
    assert state.utilizations.of(pod) == IDLE


def test_report_alone_is_no_change_for_waiting_pods():
    state, node = ClusterState(), make_node()
    state.set_gpu_node(node)
    freed, changed = state.freed_count, state.pod_change_count
    state.set_gpu_node(replace(node, utilization=(PodUtilization("u1", Utilization(80, 40)),)))
    assert (state.freed_count, state.pod_change_count) == (freed, changed)
    assert state.gpu_node("n1").utilization
