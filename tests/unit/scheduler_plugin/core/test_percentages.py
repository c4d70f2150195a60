# SPDX-License-Identifier: Apache-2.0
"""A percentage of memory means the same MiB to all: filter and bind, the sums of the state, the agent of the chosen node, and why."""

import msgspec
import pytest

from agent.core.ledger import Ledger
from agent.core.planning import Node, Planned, plan_grant
from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.model import Policy
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.objects import NodeObject
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.cluster.template import template_node
from scheduler_plugin.core.explain.why import completed, explain_pod
from scheduler_plugin.core.fit.change import Kind
from scheduler_plugin.core.fit.columnar import device_sizes
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser
from tests.unit.agent.builders import BOOT, ask, ids, inventory
from tests.unit.agent.builders import pod as agent_pod
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_spec, request_of

SIZES = {"small": 1001, "large": 3003}
"""MiB of the GPUs of each node; no percentage below is a whole number of MiB of either."""


def mixed() -> ClusterState:
    state = ClusterState()
    for name, mib in SIZES.items():
        state.set_gpu_node(make_node(name, [make_device(name, minor, mib=mib) for minor in range(2)]))
    return state


def ppod(uid: str = "u1", vgpus: int = 1, percent: int = 50, **fields):
    return make_pod(uid, vgpu=str(vgpus), vgpu_memory_percent=str(percent), **fields)


@pytest.mark.parametrize(("vgpus", "percent"), [(1, 50), (1, 1), (2, 66), (2, 198)])
@pytest.mark.parametrize("name", SIZES)
def test_scheduler_and_agent_resolve_it_on_the_chosen_node(name, vgpus, percent):
    plan = mixed().plan(name, request_of(ppod(vgpus=vgpus, percent=percent)), Policy.FRAG, "u1")
    assert not isinstance(plan, Refusal)
    each = SIZES[name] * percent // vgpus // 100
    assert [share.memory_bytes // units.MIB for share in plan.containers[0].shares] == [each] * vgpus
    raw = [make_device(name, minor, mib=SIZES[name]) for minor in range(2)]
    limits = {contract.RESOURCE_VGPU: str(vgpus), contract.RESOURCE_VGPU_MEMORY_PERCENT: str(percent)}
    one = agent_pod("p", make_spec("main", vgpu=str(vgpus), vgpu_memory_percent=str(percent)), uid="u1")
    assert one.containers[0].limits == limits
    assigned = agent_pod("p", *one.containers, uid="u1", annotations={contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(plan)})
    node = Node(inventory(*raw), Ledger(), 16, BOOT, None, lambda _: True)
    outcome = plan_grant(ask(assigned, ids(*(f"0:{number}" for number in range(vgpus)))), node)
    assert isinstance(outcome, Planned), outcome
    assert outcome.grant.shares == plan.containers[0].shares


def test_bound_percentages_fill_each_node_by_its_own_size():
    state = mixed()
    for name in SIZES:
        for number in range(4):
            uid = f"{name}-{number}"
            plan = state.plan(name, request_of(ppod(uid)), Policy.FRAG, uid)
            assert not isinstance(plan, Refusal)
            state.set_pod(ppod(uid, node=name, shares={one.container: one.shares for one in plan.containers}))
        assert isinstance(state.plan(name, request_of(ppod("late", percent=1)), Policy.FRAG, "late"), Refusal)


def test_why_names_percentage_and_mebibytes_that_would_fit():
    state = mixed()
    for name in SIZES:
        shares = {"main": request_shares(state, name)}
        state.set_pod(make_pod(f"on-{name}", node=name, shares=shares, vgpu="2", vgpu_memory_percent="160"))
    late = ppod("late", percent=30)
    shape = PodShape(request_of(late), Policy.FRAG, HostDemand())
    verdict = Shapes(state, DEFAULT_WEIGHTS).verdict(shape)
    assert {NodeReason(int(value)) for value in verdict.reason[: len(SIZES)]} == {NodeReason.MEMORY}
    why, questions = explain_pod(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, late, None)
    done = completed(why, questions.answered(), "")
    (less,) = [change for change in done.changes if change.kind is Kind.ASK_LESS_MEMORY]
    assert less.sentence == "ask for at most 601 MiB of memory per vGPU instead of 30 % of a GPU's: it would fit on node large"


def request_shares(state: ClusterState, name: str):
    plan = state.plan(name, request_of(ppod("x", vgpus=2, percent=160)), Policy.FRAG, "x")
    assert not isinstance(plan, Refusal)
    return plan.containers[0].shares


def test_pool_at_zero_nodes_serves_percentage_on_its_template():
    """An empty cluster knows no size, so admission keeps the percentage; an autoscaler then asks about a node that does not exist."""
    state = ClusterState()
    rules = Normaliser(Options(lambda preferences: device_sizes(state.columns, preferences)))
    pod = {"metadata": {"annotations": {"gpu-fraction": "0.5"}}, "spec": {"containers": [{"name": "main"}]}}
    (limits,) = [one["value"]["limits"] for one in rules.admit(pod).patch if str(one["path"]).endswith("/resources")]
    assert limits == {contract.RESOURCE_VGPU: "1", contract.RESOURCE_VGPU_MEMORY_PERCENT: "50"}
    template = {
        "metadata": {"name": "template", "labels": {"nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "46068"}},
        "status": {"allocatable": {contract.RESOURCE_VGPU: "20"}},
    }
    node = template_node(msgspec.convert(template, NodeObject))
    assert node is not None
    state.set_gpu_node(node)
    plan = state.plan("template", request_of(make_pod(vgpu="1", vgpu_memory_percent="50")), Policy.FRAG, "u1")
    assert not isinstance(plan, Refusal)
    assert [share.memory_bytes // units.MIB for share in plan.containers[0].shares] == [23034]
