# SPDX-License-Identifier: Apache-2.0
"""Nodes that are imagined compare with those that exist."""

import json

from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.cluster.wanted import MIN_PODS
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.prioritize import prioritize_nodes
from tests.unit.scheduler_plugin.api import node_object, pod_object
from tests.unit.scheduler_plugin.builders import make_context, make_node, make_pod


def make_context_with(waiting: int) -> ExtenderContext:
    """Make a cluster of one empty node, for which so many pods wait that ask for 300 MiB of each of two GPUs."""
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    state.set_host("n1", 64_000, 512 << 10)
    for number in range(waiting):
        state.set_pod(make_pod(f"waits-{number}", vgpu="2", vgpu_memory="600"))
    return make_context(state)


def scores(context: ExtenderContext, uid: str = "u") -> dict[str, int]:
    """Rate the node and one that is imagined to be like it."""
    imagined = node_object("imagined")
    imagined["metadata"]["labels"] = {"nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "1000"}
    nodes = {"items": [imagined, node_object("n1")]}
    body = {"Pod": pod_object(uid, uid=uid, vgpu="1", vgpu_memory="400"), "Nodes": nodes, "NodeNames": None}
    return {entry["Host"]: entry["Score"] for entry in json.loads(prioritize_nodes(context, json.dumps(body).encode()))}


def test_of_equal_nodes_the_one_that_exists_comes_first_whichever_pod_asks():
    context = make_context_with(0)
    for number in range(16):
        rated = scores(context, f"u{number}")
        assert rated["n1"] == rated["imagined"] + 1


def test_both_are_rated_by_what_the_known_pods_ask_for():
    unknown, known = scores(make_context_with(0)), scores(make_context_with(MIN_PODS))
    assert known["n1"] != unknown["n1"]
    assert known["imagined"] == known["n1"] - 1
