# SPDX-License-Identifier: Apache-2.0
"""filter returns the best node alone exactly where kube-scheduler has nothing else to weigh."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugin.core.cluster.objects import NodeObject, has_soft_taint
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.settings import Answer
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node

NODES = ["n1", "n2", "n3"]
TERM = {"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": "kubernetes.io/hostname"}
WEIGHTED = [{"weight": 1, "podAffinityTerm": TERM}]
REQUIRED, PREFERRED = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
NODE_TERM = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}

WEIGHED: dict[str, dict[str, Any]] = {
    "node affinity": {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": NODE_TERM}]}}},
    "pod affinity": {"affinity": {"podAffinity": {PREFERRED: WEIGHTED}}},
    "pod anti-affinity": {"affinity": {"podAntiAffinity": {PREFERRED: WEIGHTED}}},
    "soft spread": {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]},
    "claims": {"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]},
}
"""Parts of a pod's spec that kube-scheduler weighs."""
NOT_WEIGHED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "required node affinity": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [NODE_TERM]}}}},
    "required pod affinity": {"affinity": {"podAffinity": {REQUIRED: [TERM]}}},
    "required anti-affinity": {"affinity": {"podAntiAffinity": {REQUIRED: [TERM]}}},
    "required spread": {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]},
    "empty lists": {"affinity": {"nodeAffinity": {PREFERRED: []}, "podAffinity": {PREFERRED: []}}, "topologySpreadConstraints": []},
    "a selector and a toleration": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
}


def new_pod(spec: Mapping[str, Any] | None = None, *, labels: Mapping[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """Write a pod that asks for 300 MiB, with more fields in its spec."""
    pod = pod_object(**({"name": "new", "vgpu": "1", "vgpu_memory": "300"} | fields))
    pod["spec"] |= spec or {}
    pod["metadata"]["labels"] = dict(labels or {"app": "a"})
    return pod


def cluster() -> ExtenderContext:
    state = ClusterState()
    for name in NODES:
        state.set_gpu_node(make_node(name, 2))
    return make_context(state)


def answer(context: ExtenderContext, pod: Mapping[str, Any], wanted: Answer = Answer.ONE) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(filter_body(context, json.dumps({"Pod": pod, "NodeNames": NODES}).encode(), 0.0, wanted))
    return reply


def bind(context: ExtenderContext, spec: Mapping[str, Any], *, node: str = "n1", namespace: str = "team") -> None:
    """Show a bound pod without GPUs."""
    pod = pod_object("bound", node=node)
    pod["metadata"]["namespace"] = namespace
    pod["spec"] |= spec
    context.state.set_pod(decode_pod(msgspec.Raw(json.dumps(pod).encode())))


@pytest.mark.parametrize("name", WEIGHED)
def test_a_pod_with_a_preference_gets_all_nodes(name):
    assert answer(cluster(), new_pod(WEIGHED[name]))["NodeNames"] == NODES


@pytest.mark.parametrize("name", NOT_WEIGHED)
def test_a_pod_without_preference_gets_the_node_that_prioritize_prefers(name):
    context, pod = cluster(), new_pod(NOT_WEIGHED[name])
    ratings = json.loads(prioritize_nodes(cluster(), json.dumps({"Pod": pod, "NodeNames": NODES}).encode()))
    reply = answer(context, pod)
    assert reply["NodeNames"] == [max(ratings, key=lambda rating: rating["Score"])["Host"]]
    assert [held.node for held in context.state.reservations.values()] == reply["NodeNames"]
    assert answer(cluster(), pod, Answer.ALL)["NodeNames"] == NODES


@pytest.mark.parametrize(
    ("spec", "namespace", "labels", "count"),
    [
        ({"podAffinity": {PREFERRED: WEIGHTED}}, "team", {"app": "a"}, 3),
        ({"podAntiAffinity": {PREFERRED: WEIGHTED}}, "team", {"app": "a"}, 3),
        ({"podAffinity": {REQUIRED: [TERM]}}, "team", {"app": "a"}, 3),
        ({"podAntiAffinity": {REQUIRED: [TERM]}}, "team", {"app": "a"}, 1),
        ({"podAffinity": {PREFERRED: WEIGHTED}}, "other", {"app": "a"}, 1),
        ({"podAffinity": {PREFERRED: WEIGHTED}}, "team", {"app": "b"}, 1),
        ({"podAffinity": {REQUIRED: [TERM | {"namespaces": ["team"]}]}}, "other", {"app": "a"}, 3),
        ({"podAffinity": {REQUIRED: [TERM | {"namespaceSelector": {}}]}}, "other", {"app": "a"}, 3),
        ({"podAffinity": {REQUIRED: [TERM | {"labelSelector": None}]}}, "team", {"app": "a"}, 1),
        ({"podAffinity": {REQUIRED: [TERM | {"labelSelector": {}}]}}, "team", {"x": "y"}, 3),
        ({"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": NODE_TERM}]}}, "team", {"app": "a"}, 1),
    ],
)
def test_preference_of_bound_pod_counts_where_it_covers_the_pod(spec, namespace, labels, count):
    context = cluster()
    bind(context, {"affinity": spec}, namespace=namespace)
    assert len(answer(context, new_pod(labels=labels))["NodeNames"]) == count
    context.state.drop_pod("uid-bound")
    assert len(answer(context, new_pod(labels=labels))["NodeNames"]) == 1
    assert not context.state.soft.concern(decode_pod(msgspec.Raw(json.dumps(new_pod()).encode())))


def test_soft_taint_counts_on_a_node_that_fits():
    context = cluster()
    context.state.soft.set_tainted("n2", tainted=True)
    assert answer(context, new_pod())["NodeNames"] == NODES
    full = new_pod(name="full", node="n2", vgpu="2")
    context.state.drop_gpu_node("n2")
    assert len(answer(context, full)["NodeNames"]) == 1, "the node does not fit"
    context.state.set_gpu_node(make_node("n2", 2))
    context.state.drop_host("n2")
    assert len(answer(context, new_pod())["NodeNames"]) == 1, "the node is gone"


@pytest.mark.parametrize("effect", ["NoSchedule", "PreferNoSchedule", "NoExecute", ""])
def test_only_soft_taints_are_weighed(effect):
    node = msgspec.json.decode(json.dumps({"spec": {"taints": [{"key": "k", "effect": effect}]}}), type=NodeObject)
    assert has_soft_taint(node) == (effect == "PreferNoSchedule")
    assert not has_soft_taint(NodeObject())


def test_refusals_are_listed_when_no_node_fits():
    reply = answer(cluster(), new_pod(vgpu_memory="4Gi"))
    assert reply["NodeNames"] == []
    assert set(reply["FailedNodes"]) | set(reply["FailedAndUnresolvableNodes"]) == set(NODES)


def test_equal_calls_get_the_same_node():
    context = cluster()
    assert answer(context, new_pod())["NodeNames"] == answer(context, new_pod())["NodeNames"]
    assert len(context.state.reservations) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["put", "change", "drop"]), st.integers(0, 2)), max_size=30))
def test_terms_of_bound_pods_are_counted_as_those_that_are_there(steps):
    state, there = ClusterState(), dict[str, int]()
    for number, step, kind in steps:
        uid = f"u{number}"
        if step == "drop":
            state.drop_pod(uid)
            there.pop(uid, None)
            continue
        pod = pod_object(uid, uid=uid, node="n1")
        pod["metadata"]["annotations"] = {"aliquot.dev/x": f"{step}{kind}"}
        if kind:
            pod["spec"]["affinity"] = {"podAffinity": {REQUIRED: [TERM | {"labelSelector": {"matchLabels": {"app": str(kind)}}}]}}
        state.set_pod(decode_pod(msgspec.Raw(json.dumps(pod).encode())))
        there[uid] = kind
    for kind in (1, 2):
        newcomer = decode_pod(msgspec.Raw(json.dumps(new_pod(labels={"app": str(kind)})).encode()))
        assert state.soft.concern(newcomer) == (kind in there.values())
