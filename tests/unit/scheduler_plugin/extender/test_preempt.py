# SPDX-License-Identifier: Apache-2.0
"""Preemption on many nodes at once."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

import pytest

from aliquot import contract
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.preempt import ENOUGH_NODES, ENOUGH_SECONDS, SOON_SECONDS, UNTIL_BOUND_SECONDS, choose_victims, reserve_room
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_context, make_node, make_pod, make_share


def test_once_enough_nodes_help_costliest_others_are_left_out():
    state, nodes = ClusterState(), [f"n{number}" for number in range(ENOUGH_NODES + 20)]
    for name in nodes:
        state.set_gpu_node(make_node(name, 1))
        state.set_pod(make_pod(f"on-{name}", node=name, shares={"main": [make_share(name, 0, 1000)]}, vgpu="1"))
    context = make_context(state)
    pod = pod_object("important", vgpu="1")
    pod["spec"]["priority"] = 100
    proposed = {name: {"Pods": [], "NumPDBViolations": int(number < 20)} for number, name in enumerate(nodes)}
    body = json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed}).encode()
    answer = json.loads(asyncio.run(choose_victims(context, body)))
    assert list(answer["NodeNameToMetaVictims"]) == nodes[20:]
    assert {len(victims["Pods"]) for victims in answer["NodeNameToMetaVictims"].values()} == {1}


async def test_a_long_search_lets_others_be_answered_and_ends_in_time():
    state, names = ClusterState(), [f"n{number}" for number in range(12)]
    for name in names:
        state.set_gpu_node(make_node(name, 1))
        state.set_pod(make_pod(f"on-{name}", node=name, shares={"main": [make_share(name, 0, 1000)]}, vgpu="1"))
    clock = count(0.0, ENOUGH_SECONDS / 4)
    context = make_context(state, monotonic=clock.__next__)
    turns, done = 0, asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    answer = await ask(context, names, vgpu="1")
    done.set()
    await beside
    assert len(answer) == 4
    assert turns >= len(answer)


async def test_most_important_victims_come_first_from_either_chooser():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    for minor, (uid, priority) in enumerate((("a-low", 0), ("b-high", 50))):
        state.set_pod(make_pod(uid, node="n1", shares={"main": [make_share("n1", minor, 1000)]}, priority=priority, vgpu="1"))
    context = make_context(state)
    assert await ask(context, ["n1"], vgpu="2") == {"n1": ["b-high", "a-low"]}


def half_used(host: tuple[int, int, int] = (64_000, 512 * 1024, 110)) -> ExtenderContext:
    """Two GPUs of two shares each: x and a more important pod on the first, y and z on the second, which is cheaper to free."""
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2, shares_per_gpu=2))
    state.set_host("n1", *host)
    for uid, minor, priority in (("keeps", 0, 200), ("x", 0, 0), ("y", 1, 0), ("z", 1, 0)):
        shares = {"main": [make_share("n1", minor, 500)]}
        state.set_pod(make_pod(uid, node="n1", shares=shares, priority=priority, cpu_milli=2000, vgpu="1", vgpu_memory="500"))
    return make_context(state)


async def test_redundant_victim_is_spared_and_violations_are_recounted():
    pod = pod_object("important", vgpu="1")
    pod["spec"]["priority"] = 100
    victims = {"n1": {"Pods": [{"UID": "x"}], "NumPDBViolations": 1}}
    body = json.dumps({"Pod": pod, "NodeNameToMetaVictims": victims}).encode()
    answer = json.loads(await choose_victims(half_used(), body))["NodeNameToMetaVictims"]["n1"]
    assert answer == {"Pods": [{"UID": "y"}, {"UID": "z"}], "NumPDBViolations": 0}


def needs_its_cpu(context: ExtenderContext) -> None:
    context.state.set_host("n1", 3000, 512 * 1024, 110)


def takes_no_more_pods(context: ExtenderContext) -> None:
    context.state.set_host("n1", 64_000, 512 * 1024, 2)


def does_not_tell_how_many_pods_it_takes(context: ExtenderContext) -> None:
    context.state.set_host("n1", 64_000, 512 * 1024)


def has_a_sick_gpu(context: ExtenderContext) -> None:
    """Its shares are missing in the sums that kube-scheduler counts."""
    node = context.state.gpu_node("n1")
    context.state.set_gpu_node(replace(node, devices=(replace(node.devices[0], trouble="XID 79"), node.devices[1])))


def has_a_pod_without_assignment(context: ExtenderContext) -> None:
    context.state.set_pod(make_pod("strange", node="n1", vgpu="1"))


def repels(context: ExtenderContext) -> None:
    context.state.set_pod(replace(context.state.pods["x"], repels=True))


@pytest.mark.parametrize(
    "spoil",
    [needs_its_cpu, takes_no_more_pods, does_not_tell_how_many_pods_it_takes, has_a_sick_gpu, has_a_pod_without_assignment, repels],
    ids=lambda spoil: spoil.__name__,
)
async def test_a_victim_stays_that_may_be_needed_for_something_else(spoil):
    context = half_used()
    spoil(context)
    assert set((await ask(context, ["n1"], ["x"], vgpu="1"))["n1"]) == {"x", "y", "z"}


@pytest.mark.parametrize(
    ("cpu_milli", "ended"),
    [
        pytest.param(64_000, {"y"}, id="the other GPU is cheaper when its victim is not needed at all"),
        pytest.param(4000, {"x", "w"}, id="its victim is needed for its CPU, and then its GPU is cheaper"),
    ],
)
async def test_the_gpu_is_chosen_by_what_ends_in_all(cpu_milli, ended):
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2, shares_per_gpu=2))
    state.set_host("n1", cpu_milli, 512 * 1024, 110)
    for uid, minor, priority, cpu in (("x", 0, 10, 4000), ("w", 0, 0, 0), ("y", 1, 5, 0)):
        shares = {"main": [make_share("n1", minor, 500)]}
        state.set_pod(make_pod(uid, node="n1", shares=shares, priority=priority, cpu_milli=cpu, vgpu="1", vgpu_memory="500"))
    context = make_context(state)
    assert set((await ask(context, ["n1"], ["x"], vgpu="1"))["n1"]) == ended


async def test_pod_only_reserved_on_node_is_no_victim_there():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    state.set_pod(make_pod("runs", node="n1", shares={"main": [make_share("n1", 0, 1000)]}, priority=50, vgpu="1"))
    expected = make_pod("expected", vgpu="1", vgpu_memory="1000")
    state.set_pod(expected)
    context = make_context(state)
    assert context.gangs.planner.expect(expected, ["n1"], inf)
    assert await ask(context, ["n1"], vgpu="1", vgpu_memory="1000") == {"n1": ["runs"]}
    assert await ask(context, ["n1"], vgpu="2", vgpu_memory="1000") == {}


async def test_no_pod_ends_elsewhere_for_pod_with_victims_under_way():
    state = ClusterState()
    for name in ("n1", "n2"):
        state.set_gpu_node(make_node(name, 1))
        state.set_pod(make_pod(f"on-{name}", node=name, shares={"main": [make_share(name, 0, 1000)]}, vgpu="1"))
    context = make_context(state)
    pod = make_pod(pod_object("important")["metadata"]["uid"], priority=100, vgpu="1")
    state.set_pod(pod)
    state.set_pod(replace(state.pods["on-n1"], deletion_requested=True))
    assert reserve_room(context, pod, "n1", [], 30.0)
    assert await ask(context, ["n2"], vgpu="1") == {}
    state.drop_pod("on-n1")
    assert await ask(context, ["n2"], vgpu="1") == {"n2": ["on-n2"]}, "its place is free, and kube-scheduler does not want it"


def ends(context: ExtenderContext, *uids: str, **facts: Any) -> ExtenderContext:
    for uid in uids:
        context.state.set_pod(replace(context.state.pods[uid], deletion_requested=True, **{"ends_by": 10.0} | facts))
    return context


@pytest.mark.parametrize("nodes", [["n1", "n2"], ["n2", "n1"]], ids=" ".join)
async def test_no_pod_ends_while_ending_ones_make_room(nodes):
    context = half_used()
    context.state.set_gpu_node(make_node("n2", 1))
    context.state.set_host("n2", 64_000, 512 * 1024, 110)
    context.state.set_pod(make_pod("on-n2", node="n2", shares={"main": [make_share("n2", 0, 1000)]}, vgpu="1"))
    assert await ask(ends(context, "y"), nodes, ["x"], vgpu="1", vgpu_memory="500") == {"n1": ["y"]}
    assert "y" not in (await ask(context, ["n1"], ["x"], name="second", vgpu="1", vgpu_memory="500"))["n1"], "that room is promised"


@pytest.mark.parametrize(
    "facts",
    [{"is_preempted": True}, {"ends_by": SOON_SECONDS + 1.0}, {"ends_by": None}, {"ends_by": -UNTIL_BOUND_SECONDS - 1.0}],
    ids=["for another pod", "not soon", "at an unknown time", "overdue"],
)
async def test_room_of_pods_that_end_otherwise_is_not_counted_on(facts):
    context = half_used()
    assert await ask(ends(context, "y", **facts), ["n1"], ["x"], vgpu="1", vgpu_memory="500") == {"n1": ["x"]}


async def test_ending_pods_that_hold_nothing_needed_replace_no_victim():
    context = half_used()
    context.state.set_pod(make_pod("cpu", node="n1"))
    context.state.set_pod(replace(context.state.pods["z"], active=False))
    assert await ask(ends(context, "cpu"), ["n1"], ["x"], vgpu="1", vgpu_memory="500") == {"n1": ["x"]}


@pytest.mark.parametrize(("ending", "ended"), [(["x", "y"], {"y"}), (["x"], {"keeps"})], ids=["enough", "too few"])
async def test_gang_ends_no_pod_while_ending_ones_make_room(ending, ended):
    context = half_used()
    context.state.set_pod(replace(context.state.pods["keeps"], priority=0))
    gang = {contract.ANNOTATION_GANG: "train", contract.ANNOTATION_GANG_MIN: "2"}
    for name in ("important", "other"):
        pod = pod_object(name, annotations=gang, vgpu="1", vgpu_memory="500")
        context.state.set_pod(make_pod(pod["metadata"]["uid"], priority=100, annotations=gang, vgpu="1", vgpu_memory="500"))
    answer = await ask(ends(context, *ending), ["n1"], ["keeps"], annotations=gang, vgpu="1", vgpu_memory="500")
    assert set(answer["n1"]) == ended


@pytest.mark.parametrize("key", ["NodeNameToMetaVictims", "NodeNameToVictims"])
async def test_null_victims_mean_no_victims(key):
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 1))
    state.set_pod(make_pod("on-n1", node="n1", shares={"main": [make_share("n1", 0, 1000)]}, vgpu="1"))
    context = make_context(state)
    pod = pod_object("important", vgpu="1")
    pod["spec"]["priority"] = 100
    answer = json.loads(await choose_victims(context, json.dumps({"Pod": pod, key: {"n1": None}}).encode()))
    assert answer == {"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "on-n1"}], "NumPDBViolations": 0}}}


async def ask(
    context: ExtenderContext, nodes: list[str], chosen: Sequence[str] = (), name: str = "important", **asked: Any
) -> dict[str, list[str]]:
    """Ask for a pod of priority 100; return who ends, by node. Args: chosen: UIDs of those that kube-scheduler would end on each."""
    pod = pod_object(name, **asked)
    pod["spec"]["priority"] = 100
    proposed = {name: {"Pods": [{"UID": uid} for uid in chosen], "NumPDBViolations": 0} for name in nodes}
    answer = json.loads(await choose_victims(context, json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed}).encode()))
    return {node: [victim["UID"] for victim in victims["Pods"]] for node, victims in answer["NodeNameToMetaVictims"].items()}
