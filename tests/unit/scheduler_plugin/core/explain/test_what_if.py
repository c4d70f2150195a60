# SPDX-License-Identifier: Apache-2.0
"""A trial places pods only where their GPUs and their host have room, and says what it cannot see."""

from typing import Any

from aliquot import contract
from aliquot.contract.model import Policy
from scheduler_plugin.core.cluster.journal import Rules, snapshot_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.what_if import Placement, WhatIf
from scheduler_plugin.core.fit.kube_filters import NO_HOST_ROOM
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share


def make_state(*names: str, cpu_milli: int = 8000, ram_mib: int = 16000, gpus: int = 1) -> ClusterState:
    state = ClusterState()
    for name in names:
        state.set_gpu_node(make_node(name, gpus))
        state.set_host(name, cpu_milli, ram_mib)
    return state


def trial_of(state: ClusterState) -> WhatIf:
    return WhatIf(snapshot_of(state.moment(), Rules(Policy.FRAG, DEFAULT_WEIGHTS), 0.0))


def said(placements: tuple[Placement, ...]) -> dict[str, str]:
    return {one.pod.removeprefix("team/pod-"): one.node or "; ".join(count.reason for count in one.reasons) for one in placements}


def test_new_pods_use_up_the_cpu_of_hosts():
    trial = trial_of(make_state("n1", gpus=4))
    pods = [make_pod(uid, vgpu="1", vgpu_memory="10", cpu_milli=3000) for uid in ("a", "b", "c")]
    assert said(trial.add(pods)) == {"a": "n1", "b": "n1", "c": NO_HOST_ROOM}


def test_gang_gets_no_room_without_each_of_its_roles():
    def member(uid: str, role: str) -> PodFacts:
        sizes = {contract.ANNOTATION_GANG_MIN: "2", contract.ANNOTATION_GANG_ROLE_MIN: "1"}
        own = sizes | {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_ROLE: role}
        return make_pod(uid, vgpu="1", vgpu_memory="10", annotations=own)

    workers = [member("a", "worker"), member("b", "worker")]
    sentence = "gang g: 2 members must start together, and no role other than worker (1) has members"
    assert {one.refusal for one in trial_of(make_state("n1")).add(workers)} == {sentence}
    placed = trial_of(make_state("n1")).add([*workers, member("c", "master")])
    assert [one.node for one in placed] == ["n1", "n1", "n1"]


def test_a_drained_pod_goes_nowhere_without_cpu_and_ram_for_it():
    state = make_state("n1", "n2")
    state.set_pod(make_pod("busy", node="n2", cpu_milli=6000))
    for uid, cpu in {"large": 4000, "little": 1000}.items():
        shares = {"main": [make_share("n1", 0, 100)]}
        state.set_pod(make_pod(uid, node="n1", shares=shares, cpu_milli=cpu, vgpu="1", vgpu_memory="100"))
    placed = said(trial_of(state).drain(["n1"]))
    assert placed["little"] == "n2"
    assert NO_HOST_ROOM in placed["large"]


def test_nodes_that_are_drained_together_take_no_pod_of_each_other():
    state = make_state("n1", "n2", "n3")
    for name in ("n1", "n2"):
        state.set_pod(make_pod(f"on-{name}", node=name, shares={"main": [make_share(name, 0, 600)]}, vgpu="1", vgpu_memory="600"))
    placed = said(trial_of(state).drain(["n1", "n2"]))
    assert sorted(placed) == ["on-n1", "on-n2"], "each once"
    assert "n3" in placed.values()
    assert not {"n1", "n2"} & {*placed.values()}


def test_a_waiting_pod_without_room_on_hosts_is_not_counted_as_fitting():
    state = make_state("n1")
    state.set_pod(make_pod("late", vgpu="1", cpu_milli=9000))
    state.set_pod(make_pod("modest", vgpu="1", cpu_milli=8000))
    figures = trial_of(state).figures()
    assert (figures.waiting_pods_that_fit, figures.waiting_pods) == (1, 2)


def test_mig_instances_count_as_allocated():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", [make_device("n1", 0, instances=7)]))
    trial = trial_of(state)
    limits: dict[str, Any] = {"mig-1g.10gb": "1"}
    trial.add([make_pod(f"m{number}", **limits) for number in range(7)])
    assert trial.figures().memory_allocated_ratio == 1


def test_most_important_new_pod_is_placed_first_and_equals_in_order():
    trial = trial_of(make_state("n1"))
    pods = [make_pod(uid, vgpu="1", priority=priority) for uid, priority in {"low": 0, "first": 100, "second": 100}.items()]
    placed = said(trial.add(pods))
    assert list(placed) == ["first", "second", "low"]
    assert placed["first"] == "n1"
    assert "n1" not in (placed["second"], placed["low"])
