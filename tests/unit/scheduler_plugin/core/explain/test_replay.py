# SPDX-License-Identifier: Apache-2.0
"""A recorded decision, written and read as JSON, is decided the same way again, whatever happened before and since."""

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract.model import Policy
from scheduler_plugin.core.cluster import state as state_module
from scheduler_plugin.core.cluster.gang import Standing
from scheduler_plugin.core.cluster.journal import Rules, Snapshot, snapshot_of
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.core.explain.replay import Answer, Recorded, SnapshotError, read_document, recorded, replay, restore
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.prioritize import prioritize_nodes
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod, make_share

RULES = Rules(Policy.FRAG, DEFAULT_WEIGHTS)
NODES = ("n0", "n1", "n2")
ASKS: tuple[dict[str, Any], ...] = (
    {"vgpu": "1", "vgpu_memory": "300"},
    {"vgpu": "2", "vgpu_memory": "1200"},
    {"vgpu": "1"},
    {"vgpu": "1", "vgpu_cores": "70"},
)


def make_context_with(state: ClusterState) -> ExtenderContext:
    return make_context(state)


def change(state: ClusterState, what: int, number: int) -> None:
    """Make one of the changes that watches tell."""
    node = NODES[number % len(NODES)]
    match what:
        case 0:
            state.set_gpu_node(make_node(node, 2, cordoned=number % 5 == 0, shares_per_gpu=3))
        case 1:
            state.drop_gpu_node(node)
        case 2:
            state.set_host(node, 1000 * (1 + number), 64_000)
        case 3:
            state.drop_host(node)
        case 4:
            shares = {"main": [make_share(node, number % 2, 200 + number)]}
            state.set_pod(make_pod(f"b{number}", node=node, shares=shares, vgpu="1", cpu_milli=100))
        case 5:
            state.drop_pod(f"b{number}")
        case 6:
            state.expire(float(number), float(number))


def decide(context: ExtenderContext, number: int, names: list[str], most_rated: int = len(NODES)) -> None:
    """Filter, and prioritize the last few of those that fit, as many as kube-scheduler's percentageOfNodesToScore may leave."""
    pod = pod_object(f"p{number}", **ASKS[number % len(ASKS)])
    answer = json.loads(filter_body(context, json.dumps({"Pod": pod, "NodeNames": names}).encode(), 1.0))
    prioritize_nodes(context, json.dumps({"Pod": pod, "NodeNames": answer["NodeNames"][-most_rated:]}).encode())


def decide_on_member(context: ExtenderContext, number: int, names: list[str]) -> None:
    """Let a member of one of two gangs come into being, if it is not there, and ask for it."""
    annotations = {contract.ANNOTATION_GANG: f"g{number % 2}", contract.ANNOTATION_GANG_MIN: str(2 + number % 2)}
    fields = {"annotations": annotations, **ASKS[number % 2]}
    if f"m{number}" not in context.state.pods:
        context.state.set_pod(make_pod(f"m{number}", **fields))
    pod = pod_object(f"pod-m{number}", uid=f"m{number}", **fields)
    filter_body(context, json.dumps({"Pod": pod, "NodeNames": names}).encode(), 1.0)


def begin_to_bind(state: ClusterState, number: int, stage: Stage) -> None:
    """Let the binding of a member that is expected somewhere be under way, or wait for its gang."""
    if (reservation := state.reservations.get(f"m{number}")) is not None:
        state.reserve(replace(reservation, stage=stage))


steps = st.one_of(
    st.tuples(st.just("change"), st.integers(0, 6), st.integers(0, 11)),
    st.tuples(st.just("decide"), st.integers(0, 7), st.integers(1, 3)),
    st.tuples(st.just("decide on some"), st.integers(0, 7), st.integers(1, 3)),
    st.tuples(st.just("member"), st.integers(0, 7), st.integers(1, 3)),
    st.tuples(st.just("bind"), st.integers(0, 7), st.sampled_from([Stage.BINDING, Stage.READY])),
)


@given(st.lists(steps, min_size=5, max_size=40), st.sampled_from([3, 7, 1000]))
def test_a_recorded_decision_is_decided_the_same_way_again(history, events_per_picture):
    with mock.patch.object(state_module, "MAX_EVENTS", events_per_picture):
        state = ClusterState()
        context = make_context_with(state)
        for name in NODES:
            state.set_gpu_node(make_node(name, 2))
        for kind, first, second in history:
            if kind == "change":
                change(state, first, second)
            elif kind == "bind":
                begin_to_bind(state, first, second)
            elif kind == "decide on some":
                decide(context, first, [*NODES, "stranger"], second)
            else:
                (decide if kind == "decide" else decide_on_member)(context, first, [*NODES[:second], "stranger"])
    event(f"{len(context.decisions.recorded)} records")
    turns = [record.gang for record in context.decisions.recorded.values() if record.gang is not None]
    event(f"{sum(bool(turn.node) for turn in turns)} planned with their gang, {sum(bool(turn.refusal) for turn in turns)} refused")
    for record in context.decisions.recorded.values():
        document = read_document(msgspec.json.encode(recorded(record, RULES)), Recorded)
        assert replay(document).differences == ()
        assert document.answer.fitting == record.decision.fitting


def test_only_nodes_from_prioritize_query_are_chosen_again():
    state = ClusterState()
    context = make_context_with(state)
    for name in NODES:
        state.set_gpu_node(make_node(name, 2))
    for number in range(20):
        decide(context, number, list(NODES), 2)
        decide(context, 100 + number, list(NODES))
    documents = [recorded(record, RULES) for record in context.decisions.recorded.values()]
    assert {None, ("n1", "n2")} <= {document.prioritized and tuple(document.prioritized) for document in documents}
    assert [replay(document).differences for document in documents] == [()] * 40
    older = [msgspec.structs.replace(document, prioritized=None) for document in documents]
    text = [msgspec.json.encode(document).replace(b',"prioritized":null', b"") for document in older]
    again = [replay(read_document(document, Recorded)) for document in text]
    assert any(replayed.answer.chosen == "n0" for replayed in again), "a record that does not tell is read, and rated over all"


def test_choice_among_all_queried_nodes_stores_no_own_rows():
    state = ClusterState()
    context = make_context_with(state)
    for name in NODES:
        state.set_gpu_node(make_node(name, 2))
    decide(context, 0, list(NODES))
    record = context.decisions.recorded["uid-p0"]
    assert record.choice.rows is record.rows


def test_changed_decision_is_distinguished():
    state = ClusterState()
    context = make_context_with(state)
    for name in NODES:
        state.set_gpu_node(make_node(name, 2))
    decide(context, 0, list(NODES))
    document = recorded(context.decisions.recorded["uid-p0"], RULES)
    other = msgspec.structs.replace(document, snapshot=msgspec.structs.replace(document.snapshot, events=document.snapshot.events[:1]))
    assert [difference.split(":")[0] for difference in replay(other).differences][:2] == ["fitting", "failed"]


def test_gang_that_would_start_elsewhere_or_not_at_all_is_distinguished():
    state = ClusterState()
    context = make_context_with(state)
    state.set_gpu_node(make_node("n0", 1))
    for number in (0, 2):
        decide_on_member(context, number, list(NODES))
    refused, planned = (recorded(context.decisions.recorded[uid], RULES) for uid in ("m0", "m2"))
    assert refused.answer == Answer(0, {}, refusal="gang: 2 members must start together, and fewer with GPUs exist")
    assert planned.answer == Answer(1, {}, "n0")
    pausing = replay(msgspec.structs.replace(planned, gang=Standing(pauses=True)))
    assert [difference.split(":")[0] for difference in pausing.differences] == ["fitting", "chosen", "refusal"]
    assert pausing.answer.refusal == "gang: it reserved room without starting, and planning pauses for a while"
    with pytest.raises(SnapshotError, match="no gang annotations"):
        replay(msgspec.structs.replace(planned, pod=make_pod("p", vgpu="1", vgpu_memory="10")))


def test_old_pictures_are_let_go_of():
    with mock.patch.object(state_module, "MAX_EVENTS", 5):
        state = ClusterState()
        context = make_context_with(state)
        state.set_gpu_node(make_node("n0", 2))
        for number in range(40):
            change(state, 4, number)
            decide(context, number, ["n0"])
        kept = list(context.decisions.recorded.values())
    assert len({id(record.moment.part) for record in kept}) == 2
    assert kept[-1].decision.pod.name == "p39"


def test_a_restored_state_counts_what_the_original_counts():
    state = ClusterState()
    state.set_gpu_node(make_node("n0", 2))
    change(state, 2, 0)
    change(state, 4, 0)
    decide(make_context_with(state), 1, ["n0"])
    again = restore(snapshot_of(state.moment(), RULES, 0.0))
    assert again.device_states("n0") == state.device_states("n0")
    assert again.view("n0").host == state.view("n0").host
    assert again.reservations.keys() == state.reservations.keys() == {"uid-p1"}


def test_a_snapshot_from_before_its_age_was_written_down_is_read():
    snapshot = snapshot_of(ClusterState().moment(), RULES, 5.0, 7, 1.5)
    assert read_document(msgspec.json.encode(snapshot), Snapshot) == snapshot
    older = msgspec.to_builtins(snapshot)
    del older["generation"], older["age_seconds"]
    assert read_document(msgspec.json.encode(older), Snapshot) == msgspec.structs.replace(snapshot, generation=None, age_seconds=None)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version":1}', b"\xff", b"[" * 100_000])
def test_what_is_no_document_is_refused(data):
    with pytest.raises(SnapshotError, match="expected a recorded document"):
        read_document(data, Recorded)


def test_a_snapshot_of_another_version_is_refused():
    snapshot = snapshot_of(ClusterState().moment(), RULES, 0.0)
    with pytest.raises(SnapshotError, match="version 1, found 2"):
        restore(msgspec.structs.replace(snapshot, version=2))
