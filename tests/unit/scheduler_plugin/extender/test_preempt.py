"""Preemption on many nodes at once."""

import asyncio
import json
from dataclasses import replace
from itertools import count
from math import inf

from proto.model import Policy
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.preempt import ENOUGH_NODES, ENOUGH_SECONDS, choose_victims, hold
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share


def test_once_enough_nodes_help_the_others_are_left_out_those_that_cost_most_first():
    state, nodes = ClusterState(), [f"n{number}" for number in range(ENOUGH_NODES + 20)]
    for name in nodes:
        state.set_gpu_node(make_node(name, 1))
        state.set_pod(make_pod(f"on-{name}", node=name, shares={"main": [make_share(name, 0, 1000)]}, vgpu="1"))
    told = []
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: 0.0)
    desk.on_preemption = lambda *counts: told.append(counts)
    pod = pod_object("important", vgpu="1")
    pod["spec"]["priority"] = 100
    proposed = {name: {"Pods": [], "NumPDBViolations": int(number < 20)} for number, name in enumerate(nodes)}
    answer = json.loads(asyncio.run(choose_victims(desk, json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed}).encode())))
    assert list(answer["NodeNameToMetaVictims"]) == nodes[20:]
    assert told == [(ENOUGH_NODES, 0, ENOUGH_NODES)]


async def test_a_long_search_lets_others_be_answered_and_ends_in_time():
    state, names = ClusterState(), [f"n{number}" for number in range(12)]
    for name in names:
        state.set_gpu_node(make_node(name, 1))
        state.set_pod(make_pod(f"on-{name}", node=name, shares={"main": [make_share(name, 0, 1000)]}, vgpu="1"))
    clock = count(0.0, ENOUGH_SECONDS / 4)
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=clock.__next__)
    turns, done = 0, asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    answer = await ask(desk, names, vgpu="1")
    done.set()
    await beside
    assert len(answer) == 4
    assert turns >= len(answer)


async def test_victims_come_with_the_most_important_first_whoever_chose_them():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    for minor, (uid, priority) in enumerate((("a-low", 0), ("b-high", 50))):
        state.set_pod(make_pod(uid, node="n1", shares={"main": [make_share("n1", minor, 1000)]}, priority=priority, vgpu="1"))
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: 0.0)
    assert await ask(desk, ["n1"], vgpu="2") == {"n1": ["b-high", "a-low"]}


async def test_a_pod_that_is_merely_expected_on_a_node_is_no_victim_there():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    state.set_pod(make_pod("runs", node="n1", shares={"main": [make_share("n1", 0, 1000)]}, priority=50, vgpu="1"))
    expected = make_pod("expected", vgpu="1", vgpu_memory="1000")
    state.set_pod(expected)
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: 0.0)
    assert desk.gangs.planner.expect(expected, ["n1"], inf)
    assert await ask(desk, ["n1"], vgpu="1", vgpu_memory="1000") == {"n1": ["runs"]}
    assert await ask(desk, ["n1"], vgpu="2", vgpu_memory="1000") == {}


async def test_nobody_ends_elsewhere_for_a_pod_that_is_expected_where_others_end():
    state = ClusterState()
    for name in ("n1", "n2"):
        state.set_gpu_node(make_node(name, 1))
        state.set_pod(make_pod(f"on-{name}", node=name, shares={"main": [make_share(name, 0, 1000)]}, vgpu="1"))
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: 0.0)
    pod = make_pod(pod_object("important")["metadata"]["uid"], priority=100, vgpu="1")
    state.set_pod(pod)
    state.set_pod(replace(state.pods["on-n1"], deletion_requested=True))
    assert hold(desk, pod, "n1", [], 30.0)
    assert await ask(desk, ["n2"], vgpu="1") == {}
    state.drop_pod("on-n1")
    assert await ask(desk, ["n2"], vgpu="1") == {"n2": ["on-n2"]}, "its place is free, and kube-scheduler does not want it"


async def ask(desk: Desk, nodes: list[str], **limits: str) -> dict[str, list[str]]:
    """Ask for a pod of priority 100; return who ends, by node."""
    pod = pod_object("important", **limits)
    pod["spec"]["priority"] = 100
    proposed = {name: {"Pods": [], "NumPDBViolations": 0} for name in nodes}
    answer = json.loads(await choose_victims(desk, json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed}).encode()))
    return {node: [victim["UID"] for victim in victims["Pods"]] for node, victims in answer["NodeNameToMetaVictims"].items()}
