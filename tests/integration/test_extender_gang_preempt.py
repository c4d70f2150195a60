# SPDX-License-Identifier: Apache-2.0
"""Preemption and gangs: a gang that runs is ended whole or keeps its minimum, and pods end for a gang only where it then starts whole."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from aliquot import contract
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.preempt import choose_victims
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod, make_share

IMPORTANT = 100
GPUS = {"n1": 4, "n2": 2}


def gang(name: str, minimum: int) -> dict[str, str]:
    return {contract.ANNOTATION_GANG: name, contract.ANNOTATION_GANG_MIN: str(minimum)}


def running(name: str, node: str, minor: int, annotations: dict[str, str] | None = None, *, priority: int = 0, mib: int = 1000):
    shares = {"main": [make_share(node, minor, mib)]}
    return make_pod(name, node=node, annotations=annotations, shares=shares, priority=priority, vgpu="1", vgpu_memory=str(mib))


def context_of(*pods) -> ExtenderContext:
    state = ClusterState()
    for name, count in GPUS.items():
        state.set_gpu_node(make_node(name, count))
    for pod in pods:
        state.set_pod(pod)
    return make_context(state)


def preempt(
    context: ExtenderContext, proposed: dict[str, Iterable[str]], annotations: dict[str, str] | None = None, **limits: Any
) -> dict[str, set[str]]:
    """Ask for the important pod; return the UIDs that end by node."""
    pod = pod_object("important", annotations=annotations, **(limits or {"vgpu": "1"}))
    pod["spec"]["priority"] = IMPORTANT
    meta = {node: {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 0} for node, uids in proposed.items()}
    answer = json.loads(asyncio.run(choose_victims(context, json.dumps({"Pod": pod, "NodeNameToMetaVictims": meta}).encode())))
    return {node: {pod["UID"] for pod in victims["Pods"]} for node, victims in answer["NodeNameToMetaVictims"].items()}


def filled(node: str, count: int | None = None, **fields) -> list:
    return [running(f"{node}-single-{minor}", node, minor, **fields) for minor in range(GPUS[node] if count is None else count)]


# --- gangs among the victims ----------------------------------------------------------------------------------------


def test_a_single_pod_ends_rather_than_a_gang():
    members = [running(f"g{minor}", "n1", minor, gang("g", 3)) for minor in range(3)]
    context = context_of(*members, running("single", "n1", 3))
    assert preempt(context, {"n1": []}) == {"n1": {"single"}}


def test_a_gang_ends_whole_where_nothing_else_helps():
    members = [running(f"g{minor}", "n1", minor, gang("g", 3)) for minor in range(3)]
    context = context_of(*members, running("single", "n1", 3, priority=IMPORTANT))
    assert preempt(context, {"n1": []}) == {"n1": {"g0", "g1", "g2"}}


def test_a_gang_with_members_elsewhere_is_left_alone():
    members = [running(f"g{minor}", "n1", minor, gang("g", 5)) for minor in range(4)]
    context = context_of(*members, running("g4", "n2", 0, gang("g", 5)))
    assert preempt(context, {"n1": []}) == {}


def test_members_beyond_the_minimum_end_one_by_one():
    members = [running(f"g{minor}", "n1", minor, gang("g", 4)) for minor in range(4)]
    context = context_of(*members, running("g4", "n2", 0, gang("g", 4)))
    (ended,) = preempt(context, {"n1": []}).values()
    assert len(ended) == 1
    assert preempt(context, {"n1": []}, vgpu="2") == {}, "the gang can spare one"


@pytest.mark.parametrize(
    ("elsewhere", "want"),
    [(0, {"n1": {"g0", "g1", "g2"}}), (1, {})],
    ids=["all on the node: the others end too", "one elsewhere: the node is dropped"],
)
def test_kube_scheduler_victims_end_gang_whole_or_not_at_all(elsewhere, want):
    members = [running(f"g{minor}", "n1", minor, gang("g", 3 + elsewhere)) for minor in range(3)]
    others = [running(f"e{minor}", "n2", minor, gang("g", 3 + elsewhere)) for minor in range(elsewhere)]
    context = context_of(*members, *others)
    assert preempt(context, {"n1": ["g0"]}) == want


def test_a_member_of_equal_priority_keeps_its_whole_gang():
    members = [running(f"g{minor}", "n1", minor, gang("g", 2), priority=minor * IMPORTANT) for minor in range(2)]
    context = context_of(*members, *(running(f"s{minor}", "n1", minor, priority=IMPORTANT) for minor in (2, 3)))
    assert preempt(context, {"n1": []}) == {}


def test_a_gang_never_ends_members_of_its_own():
    members = [running(f"g{minor}", "n1", minor, gang("g", 2)) for minor in range(4)]
    context = context_of(*members)
    assert preempt(context, {"n1": []}, gang("g", 2)) == {}
    assert preempt(context, {"n1": ["g0"]}, gang("g", 2)) == {}


@pytest.mark.parametrize(("minimum", "want"), [(1, {"n1": {"g0"}}), (2, {"n1": {"g0", "g1"}}), (3, {})])
def test_a_pod_without_gpus_breaks_no_gang_either(minimum, want):
    members = [running(f"g{minor}", "n1", minor, gang("g", minimum)) for minor in range(2)]
    elsewhere = [running("g2", "n2", 0, gang("g", minimum))] if minimum == 3 else []
    assert preempt(context_of(*members, *elsewhere), {"n1": ["g0"]}, cpu="1") == want


# --- a gang that needs room -----------------------------------------------------------------------------------------


def waiting(count: int, minimum: int) -> list:
    """Make the other members of the important pod's gang."""
    fields: dict[str, Any] = {"annotations": gang("new", minimum), "priority": IMPORTANT, "vgpu": "1"}
    return [make_pod(f"other-{number}", **fields) for number in range(count)]


def test_pods_of_one_node_end_for_all_members_of_a_gang():
    context = context_of(*filled("n1"), *filled("n2", priority=IMPORTANT), *waiting(1, 2))
    (ended,) = preempt(context, {"n1": []}, gang("new", 2)).values()
    assert len(ended) == 2
    assert not context.state.reservations, "what was tried is forgotten"


def test_no_pod_ends_for_member_that_may_not_preempt():
    members = [replace(member, preempts=False) for member in waiting(1, 2)]
    assert preempt(context_of(*filled("n1"), *filled("n2", priority=IMPORTANT), *members), {"n1": []}, gang("new", 2)) == {}
    (ended,) = preempt(context_of(*filled("n1"), *filled("n2", 1, priority=IMPORTANT), *members), {"n1": []}, gang("new", 2)).values()
    assert len(ended) == 1, "it fits where there is room"


def test_members_that_fit_elsewhere_cost_no_victims():
    context = context_of(*filled("n1"), *filled("n2", 1, priority=IMPORTANT), *waiting(1, 2))
    (ended,) = preempt(context, {"n1": []}, gang("new", 2)).values()
    assert len(ended) == 1


def test_no_pod_ends_for_gang_that_still_could_not_start():
    context = context_of(*filled("n1"), *filled("n2"), *waiting(4, 5))
    assert preempt(context, {"n1": [], "n2": []}, gang("new", 5)) == {}


@pytest.mark.parametrize("present", [0, 1])
def test_no_pod_ends_for_gang_that_lacks_members(present):
    context = context_of(*filled("n1"), *filled("n2"), *waiting(present, 3))
    assert preempt(context, {"n1": []}, gang("new", 3)) == {}


def test_a_member_beyond_the_minimum_is_preempted_for_like_any_pod():
    others = [running(f"m{minor}", "n2", minor, gang("new", 2), priority=IMPORTANT) for minor in range(2)]
    context = context_of(*filled("n1"), *others)
    (ended,) = preempt(context, {"n1": []}, gang("new", 2)).values()
    assert len(ended) == 1


def test_filter_lets_kube_scheduler_try_preemption_where_only_room_is_lacking():
    context = context_of(*filled("n1", 3), *filled("n2"), *waiting(1, 2))
    pod = pod_object("important", annotations=gang("new", 2), vgpu="1")
    answer = json.loads(filter_body(context, json.dumps({"Pod": pod, "NodeNames": list(GPUS)}).encode(), 0.0))
    assert answer["FailedNodes"] == dict.fromkeys(GPUS, "gang: no room for enough members at once")
    lonely = pod_object("lonely", annotations=gang("lonely", 2), vgpu="1")
    answer = json.loads(filter_body(context, json.dumps({"Pod": lonely, "NodeNames": list(GPUS)}).encode(), 0.0))
    assert answer["FailedAndUnresolvableNodes"] == dict.fromkeys(GPUS, "gang: 2 members must start together, and fewer with GPUs exist")


# --- any cluster ----------------------------------------------------------------------------------------------------

GANGS = {"": 0, "a": 2, "b": 3}


@given(
    st.lists(st.tuples(st.sampled_from([*GANGS, ""]), st.integers(0, 5), st.sampled_from([0, 0, 0, IMPORTANT])), max_size=6),
    st.sets(st.integers(0, 5), max_size=2),
    st.integers(0, 3),
    st.sampled_from(["1", "2"]),
)
def test_no_gang_that_runs_is_broken_and_what_is_freed_suffices(pods, proposed, minimum, vgpus):
    places = [("n1", minor) for minor in range(4)] + [("n2", minor) for minor in range(2)]
    taken: dict[int, str] = {}
    context = context_of(*waiting(2, minimum))
    for number, (name, at, priority) in enumerate(pods):
        if at not in taken:
            taken[at] = f"p{number}"
            node, minor = places[at]
            annotations = gang(name, GANGS[name]) if name else None
            context.state.set_pod(running(f"p{number}", node, minor, annotations, priority=priority))
    chosen = {taken[at] for at in proposed if at in taken and at < 4 and context.state.pods[taken[at]].priority < IMPORTANT}
    sizes = {name: len(list(context.state.gang_members(("team", name)))) for name in GANGS}
    answer = preempt(context, {"n1": chosen}, gang("new", minimum) if minimum else None, vgpu=vgpus)
    event("helps" if answer else "does not help")
    for ended in answer.values():
        assert chosen <= ended
        pods_ended = [context.state.pods[uid] for uid in ended]
        assert all(pod.node_name == "n1" and pod.priority < IMPORTANT for pod in pods_ended)
        for name, least in GANGS.items():
            gone = sum((found := gang_of_pod(pod)) is not None and found.name == name for pod in pods_ended)
            assert not name or not gone or sizes[name] - gone == 0 or sizes[name] - gone >= least, name
        for uid in ended:
            context.state.drop_pod(uid)
        pod = pod_object("important", annotations=gang("new", minimum) if minimum else None, vgpu=vgpus)
        kept = json.loads(filter_body(context, json.dumps({"Pod": pod, "NodeNames": ["n1"]}).encode(), 0.0))["NodeNames"]
        assert kept == ["n1"], "after the end of these pods it fits, with its gang"
