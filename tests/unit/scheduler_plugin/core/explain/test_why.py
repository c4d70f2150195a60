# SPDX-License-Identifier: Apache-2.0
"""A pod learns what keeps it off nodes, kube-scheduler's own filters included as far as they are known."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from aliquot.contract.model import Policy
from aliquot_cli.explain.show import why_lines
from scheduler_plugin.core.cluster.decisions import QueriedNodes
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.why import Why, completed, explain_pod
from scheduler_plugin.core.fit.change import Kind
from scheduler_plugin.core.fit.kube_filters import LEFT_OUT, NO_HOST_ROOM, NOT_CHECKED, Scope, host_has_room
from scheduler_plugin.core.fit.shapes import Shapes
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share, make_spec


def make_state(**hosts: tuple[int, int]) -> ClusterState:
    """Make nodes of one empty GPU of 1000 MiB, with so much CPU in thousandths and RAM in MiB."""
    state = ClusterState()
    for name, amounts in hosts.items():
        state.set_gpu_node(make_node(name, 1))
        state.set_host(name, *amounts)
    return state


def fill(state: ClusterState, node: str, mib: int = 900, **fields) -> None:
    state.set_pod(make_pod(f"on-{node}", node=node, shares={"main": [make_share(node, 0, mib)]}, vgpu="1", vgpu_memory=str(mib), **fields))


def explained(state: ClusterState, pod: PodFacts, asked: tuple[str, ...] | None = None) -> Why:
    rows = None if asked is None else QueriedNodes.of(np.array([state.row_of(name) for name in asked]), state.naming_count)
    why, questions = explain_pod(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, pod, rows)
    return completed(why, questions.answered(), "")


def reasons(why: Why) -> dict[str, tuple[str, ...]]:
    return {count.reason: count.examples for count in why.reasons}


def test_node_without_cpu_does_not_fit_and_is_proposed_only_for_cpu():
    state = make_state(full=(64000, 512000), small=(4000, 16000))
    fill(state, "full")
    why = explained(state, make_pod("late", vgpu="1", vgpu_memory="400", cpu_milli=32000, memory_mib=200000))
    assert (why.fitting, why.waits) == (0, True)
    assert reasons(why) == {NO_HOST_ROOM: ("small",), NodeReason.MEMORY.sentence: ("full",)}
    assert {change.node for change in why.changes if change.kind is not Kind.ASK_LESS_HOST} == {"full"}
    (less,) = [change for change in why.changes if change.kind is Kind.ASK_LESS_HOST]
    assert less.sentence == (
        "ask for at most 4 CPUs and 16000 MiB of RAM instead of 32 CPUs and 200000 MiB of RAM: it would fit on node small"
    )
    assert less.host == HostDemand(4000, 16000)


def test_an_amount_of_the_host_that_is_not_requested_is_never_lacking():
    state = make_state(n1=(4000, 16000))
    fill(state, "n1", mib=100, cpu_milli=9000, memory_mib=1000)
    assert explained(state, make_pod("late", vgpu="1", vgpu_memory="100", memory_mib=15000)).fitting == 1, "no CPU is asked for"
    assert explained(state, make_pod("late", vgpu="1", vgpu_memory="100", cpu_milli=1)).fitting == 0
    assert explained(state, make_pod("late", vgpu="1", vgpu_memory="100", memory_mib=15001)).fitting == 0


def test_what_is_not_known_of_a_host_is_not_held_against_it():
    state = ClusterState()
    state.set_gpu_node(make_node("n1"))
    state.columns.derive()
    assert host_has_room(state.columns, np.array([0]), HostDemand(10**6, 10**6)).all()


def test_the_host_with_the_least_to_free_is_named():
    state = make_state(n1=(8000, 16000), n2=(8000, 16000), n3=(2000, 16000))
    for name, cpu in {"n1": 5000, "n2": 4500, "n3": 0}.items():
        fill(state, name, mib=100, cpu_milli=cpu)
    by_kind = {change.kind: change for change in explained(state, make_pod("late", vgpu="1", vgpu_memory="100", cpu_milli=4000)).changes}
    assert by_kind[Kind.FREE_HOST].sentence == "free 0.5 CPUs on the host of node n2"
    assert by_kind[Kind.ASK_LESS_HOST].sentence == "ask for at most 3.5 CPUs instead of 4 CPUs: it would fit on node n2"
    assert set(by_kind) == {Kind.FREE_HOST, Kind.ASK_LESS_HOST}


def test_pods_are_proposed_to_end_only_where_the_host_has_room_then():
    state = make_state(n1=(8000, 16000), n2=(8000, 16000))
    fill(state, "n1", cpu_milli=1000)
    fill(state, "n2", cpu_milli=3000, priority=5)
    state.set_pod(make_pod("other", node="n1", cpu_milli=4000))
    state.set_pod(make_pod("another", node="n2", cpu_milli=3000))
    late = make_pod("late", vgpu="1", vgpu_memory="400", cpu_milli=5000)
    (ended,) = [change for change in explained(state, late).changes if change.kind is Kind.END_PODS]
    assert ended.node == "n2", "the pod on n1 matters less, and its end frees too little CPU"


def test_changes_of_several_containers_and_of_preferences_keep_to_hosts_with_room():
    state = make_state(small=(1000, 16000), large=(8000, 16000))
    fill(state, "large")
    specs = [make_spec("left", vgpu="1", vgpu_memory="300"), make_spec("right", vgpu="1", vgpu_memory="800")]
    why = explained(state, make_pod("late", *specs, cpu_milli=4000))
    assert {change.node for change in why.changes} <= {"large"}
    picky = make_pod("picky", vgpu="1", vgpu_memory="400", cpu_milli=4000, annotations={"aliquot.dev/gpu-type": "A100"})
    assert not [change for change in explained(state, picky).changes if change.kind is Kind.DROP_PREFERENCE]


def test_pod_is_judged_on_nodes_from_kube_scheduler_query():
    state = make_state(n1=(8000, 16000), n2=(8000, 16000), n3=(8000, 16000))
    fill(state, "n1")
    late = make_pod("late", vgpu="1", vgpu_memory="400")
    why = explained(state, late, asked=("n1",))
    assert (why.nodes, why.left_out, why.fitting, why.waits, why.not_checked) == (3, 2, 0, True, "")
    assert reasons(why) == {LEFT_OUT: ("n2", "n3"), NodeReason.MEMORY.sentence: ("n1",)}
    assert {change.node for change in why.changes} == {"n1"}
    assert why.sentence.startswith(f"0 of 3 nodes fit: 2 {LEFT_OUT}; 1 not enough free memory on one GPU. What would help: ")


def test_node_added_after_kube_scheduler_query_is_included():
    state = make_state(n1=(8000, 16000), n2=(8000, 16000))
    asked = QueriedNodes.of(np.array([state.row_of("n1")]), state.naming_count)
    state.drop_gpu_node("n2")
    state.set_gpu_node(make_node("n3"))
    scope = Scope.of(state, asked)
    assert ([state.names[row] for row in scope.judged], len(scope.left_out)) == (["n1", "n3"], 0)
    state.drop_gpu_node("n1")
    assert [state.names[row] for row in Scope.of(state, asked).judged] == ["n3"]


@pytest.mark.parametrize(
    ("generation", "age_seconds", "says"),
    [
        (7, 12.0, []),
        (7, 312.4, ["this is the cluster's state 312 s ago: the API server has sent the scheduler no complete update since then"]),
        (7, None, ["the scheduler has not listed the whole cluster yet: this result can be incomplete"]),
        (None, None, []),
    ],
    ids=["of now", "old", "not all known", "from a scheduler that does not tell"],
)
def test_stale_explanation_states_its_age_for_every_result(generation, age_seconds, says):
    for fields in ({"node": "n1"}, {"fitting": 1, "left_out": 0}, {"left_out": 0}):
        fresh = Why("team/p", "u", nodes=1, **fields)
        as_of = msgspec.structs.replace(fresh, generation=generation, age_seconds=age_seconds)
        assert list(why_lines(as_of)) == [*why_lines(fresh), *says]


def test_an_answer_without_kube_scheduler_s_question_says_what_was_not_checked():
    state = make_state(n1=(8000, 16000))
    why = explained(state, make_pod("late", vgpu="1"))
    assert (why.left_out, why.not_checked) == (None, NOT_CHECKED)
    assert why.sentence == f"1 of 1 nodes fit (not checked: {NOT_CHECKED})"
    assert msgspec.json.decode(msgspec.json.encode(why), type=Why) == why


@pytest.mark.parametrize(
    ("memory", "sentence", "lines"),
    [
        ("400", "without them 1 of 1 nodes fit (not checked: ", "without them 1 of 1 nodes fit (not checked: "),
        ("9000", "without them 0 of 1 nodes fit: 1 not enough free memory on one GPU.", "without them 0 of 1 nodes fit"),
    ],
)
def test_a_pod_behind_scheduling_gates_waits_for_them_wherever_it_fits(memory, sentence, lines):
    state = make_state(n1=(8000, 16000))
    gated = replace(make_pod("late", vgpu="1", vgpu_memory=memory), gates=("kueue.x-k8s.io/admission", "example.com/quota"))
    why = explained(state, gated)
    held_back = "scheduling gates hold it back (kueue.x-k8s.io/admission, example.com/quota); "
    assert (why.waits, why.fitting) == (True, int(memory == "400"))
    assert why.sentence.startswith(held_back + sentence)
    assert next(why_lines(why)).startswith(f"team/pod-late: {held_back}{lines}")


def test_a_bound_pod_is_held_back_by_nothing():
    bound = replace(make_pod("there", node="n1", shares={"main": [make_share("n1", 0)]}, vgpu="1"), gates=("example.com/quota",))
    why = explained(make_state(n1=(8000, 16000)), bound)
    assert (why.gates, why.waits) == ((), False)
