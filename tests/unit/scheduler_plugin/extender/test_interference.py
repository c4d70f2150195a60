# SPDX-License-Identifier: Apache-2.0
"""Pods find partners by measured use, from the agents' reports to the plan of the binding."""

import json
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.gpunode import PodUtilization
from aliquot.contract.model import ContainerAssignment, PodAssignment, PodRequest, Policy, Utilization
from scheduler_plugin.core.cluster.journal import Rules, snapshot_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.replay import restore
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.settings import Answer
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import FakeClock, filter_body, make_node, make_share

BUSY_MIB, CALM_MIB, NEW_MIB = 300, 301, 302
"""A template is known by its requests."""
USED = {BUSY_MIB: Utilization(90, 60), CALM_MIB: Utilization(10, 5)}


def weighted(interference: float) -> Rules:
    return Rules(Policy.FRAG, {policy: replace(weights, interference=interference) for policy, weights in DEFAULT_WEIGHTS.items()})


def written(name: str, mib: int, node: str = "", minor: int = 0) -> dict:
    """Write a pod; with a node, bound to one of its GPUs."""
    shares = ContainerAssignment("main", (make_share(node, minor, mib),))
    text = {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(PodAssignment(f"uid-{name}", (shares,)))} if node else {}
    return pod_object(name, node=node, annotations=text, vgpu="1", vgpu_memory=str(mib))


def bound(name: str, mib: int, node: str, minor: int) -> PodFacts:
    return decode_pod(msgspec.Raw(json.dumps(written(name, mib, node, minor)).encode()))


def cluster(residents: Mapping[tuple[str, int], int], interference: float = 1.0, used: Mapping[int, Utilization] = USED) -> ExtenderContext:
    """Make nodes of two GPUs with one pod on each named GPU, and a report of each. Args: residents: their MiB, by node and GPU."""
    context = ExtenderContext.create(ClusterState(), weighted(interference), FakeClock())
    pods = {at: bound(f"{at[0]}-{at[1]}", mib, *at) for at, mib in residents.items()}
    for node in sorted({name for name, _ in residents}):
        reports = tuple(PodUtilization(pod.uid, used[residents[at]]) for at, pod in pods.items() if at[0] == node)
        context.state.set_gpu_node(make_node(node, utilization=reports))
    for pod in pods.values():
        context.state.set_pod(pod)
    context.state.read_utilization()
    return context


def placed(context: ExtenderContext, name: str, mib: int) -> tuple[str, str]:
    """Filter a pod and plan it as bind does; return its node and GPU."""
    pod = written(name, mib)
    facts = decode_pod(msgspec.Raw(json.dumps(pod).encode()))
    context.state.set_pod(facts)
    names = sorted(node.name for node in context.state.gpu_nodes())
    (node,) = json.loads(filter_body(context, json.dumps({"Pod": pod, "NodeNames": names}).encode(), 0.0, Answer.ONE))["NodeNames"]
    request = context.verdicts.requests.of(facts)
    assert isinstance(request, PodRequest)
    plan = context.state.plan(node, request, Policy.FRAG, facts.uid)
    assert isinstance(plan, PodAssignment)
    return node, plan.containers[0].shares[0].device_uuid


@pytest.mark.parametrize("mib", [pytest.param(BUSY_MIB, id="known"), pytest.param(NEW_MIB, id="unknown template, as busy as most")])
def test_third_busy_pod_joins_calm_one(mib):
    context = cluster({("n1", 0): BUSY_MIB, ("n1", 1): BUSY_MIB, ("n2", 0): BUSY_MIB, ("n2", 1): CALM_MIB})
    assert placed(context, "new", mib) == ("n2", "GPU-n2-1")


def test_two_busy_pods_in_row_do_not_meet():
    context = cluster({("n1", 0): CALM_MIB, ("n1", 1): BUSY_MIB, ("n2", 0): CALM_MIB, ("n2", 1): BUSY_MIB})
    first, second = placed(context, "first", BUSY_MIB), placed(context, "second", BUSY_MIB)
    assert {first, second} == {("n1", "GPU-n1-0"), ("n2", "GPU-n2-0")}


def test_without_weight_use_decides_nothing():
    residents = {("n1", 0): BUSY_MIB, ("n1", 1): CALM_MIB, ("n2", 0): CALM_MIB, ("n2", 1): BUSY_MIB}
    swapped = {BUSY_MIB: USED[CALM_MIB], CALM_MIB: USED[BUSY_MIB]}
    one, other = cluster(residents, 0.0), cluster(residents, 0.0, swapped)
    for name in ("a", "b", "c", "d"):
        assert placed(one, name, NEW_MIB) == placed(other, name, NEW_MIB)


def test_call_repeated_after_new_report_uses_it():
    context = cluster({("n1", 0): BUSY_MIB, ("n2", 0): CALM_MIB})
    body = json.dumps({"Pod": written("new", NEW_MIB), "NodeNames": ["n1", "n2"]}).encode()
    filter_body(context, body, 0.0)
    before = context.calls.pods.read(msgspec.Raw(json.dumps(written("new", NEW_MIB)).encode())).shape.used
    past = bound("past", NEW_MIB, "n1", 1)
    context.state.set_pod(past)
    node = context.state.gpu_node("n1")
    context.state.set_gpu_node(replace(node, utilization=(*node.utilization, PodUtilization(past.uid, USED[CALM_MIB]))))
    context.state.read_utilization()
    after = context.calls.pods.read(msgspec.Raw(json.dumps(written("new", NEW_MIB)).encode())).shape.used
    assert (before, after) == (USED[BUSY_MIB], USED[CALM_MIB])


def test_state_rebuilt_for_replay_knows_use_of_running_pods():
    context = cluster({("n1", 0): BUSY_MIB, ("n1", 1): CALM_MIB})
    rebuilt = restore(snapshot_of(context.state.moment(), weighted(1.0), 0.0))
    assert rebuilt.utilizations.of(bound("other", CALM_MIB, "n1", 0)) == USED[CALM_MIB]
    assert rebuilt.columns.busy_sm[0].tolist() == context.state.columns.busy_sm[0].tolist()
