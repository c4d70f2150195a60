"""Preemption on many nodes at once."""

import json

from proto.model import Policy
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.preempt import ENOUGH_NODES, choose_victims
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
    answer = json.loads(choose_victims(desk, json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed}).encode()))
    assert list(answer["NodeNameToMetaVictims"]) == nodes[20:]
    assert told == [(ENOUGH_NODES, 0, ENOUGH_NODES)]
