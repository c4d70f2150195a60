# SPDX-License-Identifier: Apache-2.0
"""Waiting pods are retried when new pods came that would make room by ending, and a thousand pods are not written for one."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from aliquot import contract
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.decisions import Decision, Queue
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.selectors import Operator, Requirement
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.services import new_victims as module
from scheduler_plugin.services.new_victims import NewVictims
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, known_gang, make_context, make_node, make_pod, make_share, request_of

imported: Any = module
"""With the names that the module imports."""


class Scene:
    """Nodes of two GPUs of 1,000 MiB, taken by pods as important as any; each pod that is retried is noted, and refused again."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes or ("n1",)
        self.now = 0.0
        self.leads = True
        self.undecided = Queue()
        self.tried: list[str] = []
        self.woken: list[str] = []
        """The pods for which the preemptor looks again."""
        self.state = ClusterState()
        for node in self.nodes:
            self.state.set_gpu_node(make_node(node, 2))
            for minor in (0, 1):
                self.runs(f"{node}-{minor}", node, minor, priority=1000)
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now)
        self.service = NewVictims(self.context, self.retry, lambda: self.undecided, self.woken.append, lambda: self.leads)

    def runs(self, uid: str, node: str, minor: int, *, priority: int = 0, labels: tuple[tuple[str, str], ...] = ()) -> PodFacts:
        """Have a pod bound to a whole GPU."""
        pod = make_pod(uid, node=node, shares={"main": [make_share(node, minor, 1000)]}, priority=priority, vgpu="1")
        self.state.set_pod(replace(pod, labels=labels))
        return self.state.pods[uid]

    def expected(self, uid: str, node: str, minor: int) -> None:
        """Have a pod that is being bound in the place of the one there: it holds the GPU, and it cannot be ended yet."""
        self.state.drop_pod(f"{node}-{minor}")
        pod = make_pod(uid, vgpu="1", vgpu_memory="1000")
        self.state.set_pod(pod)
        assert not self.context.gangs.planner.reserve_on(pod, node, 1e9, Stage.BINDING)

    def waits(self, uid: str, *, priority: int = 100, gang: dict[str, str] | None = None, of: str = "", **facts) -> PodFacts:
        """Have a pod refused by all nodes that kube-scheduler's own filters leave: no node, as its sums are exceeded too."""
        pod = make_pod(uid, priority=priority, annotations=gang, vgpu="1", vgpu_memory="1000")
        self.state.set_pod(replace(pod, controller_uid=of, **facts))
        self.refuse(uid)
        return self.state.pods[uid]

    def refuse(self, uid: str) -> None:
        pod = self.state.pods[uid]
        self.state.columns.derive()
        self.context.decisions.record(Decision(pod, request_of(pod), self.now, self.state.columns.change_count, 0, {}))

    async def retry(self, uid: str) -> None:
        self.tried.append(uid)
        self.undecided.pop(uid)
        self.refuse(uid)

    async def after(self, seconds: float = 1.0) -> list[str]:
        """Let the loop look once after a while; return who was tried again in that time."""
        self.now += seconds
        self.tried.clear()
        await self.service.step()
        return list(self.tried)


async def test_pod_is_retried_once_when_possible_victim_is_bound():
    scene = Scene()
    scene.expected("new", "n1", 0)
    scene.waits("important")
    assert await scene.after() == []
    freed = scene.state.freed_count
    scene.runs("new", "n1", 0)
    assert scene.state.freed_count == freed, "nothing became free"
    assert await scene.after() == ["important"]
    assert scene.woken == ["important"]
    for _ in range(300):
        assert await scene.after() == []


async def test_what_is_bound_right_after_the_refusal_counts():
    scene = Scene()
    await scene.after()
    scene.expected("new", "n1", 0)
    scene.waits("important")
    scene.runs("new", "n1", 0)
    assert await scene.after() == ["important"]


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"priority": 0}, id="not more important"),
        pytest.param({"preempts": False}, id="never preempts"),
        pytest.param({"deletion_requested": True}, id="ends"),
        pytest.param({"nominated_node": "n2"}, id="others end for it already"),
    ],
)
async def test_pod_without_possible_victims_is_not_tried(facts):
    scene = Scene()
    scene.waits("w", **facts)
    scene.runs("n1-0", "n1", 0, priority=0)
    assert await scene.after() == []


async def test_a_pod_that_has_a_place_already_is_left_alone():
    scene = Scene("n1", "n2")
    pod = scene.waits("w")
    scene.state.drop_pod("n2-0")
    assert not scene.context.gangs.planner.reserve_on(pod, "n2", 1e9)
    scene.runs("n1-0", "n1", 0, priority=0)
    assert await scene.after() == []


async def test_node_with_recovered_gpu_is_checked_though_it_stays_full():
    scene = Scene()
    scene.runs("n1-0", "n1", 0, priority=0)
    scene.state.set_gpu_node(make_node("n1", 2, cordoned=True))
    scene.waits("w")
    assert await scene.after() == []
    scene.state.set_gpu_node(make_node("n1", 2))
    assert await scene.after() == ["w"]


async def test_end_of_more_important_pod_helps_together_with_another():
    scene = Scene()
    pod = make_pod("w", priority=100, vgpu="2", vgpu_memory="2000")
    scene.state.set_pod(pod)
    scene.refuse("w")
    scene.runs("n1-0", "n1", 0, priority=0)
    assert await scene.after() == [], "of two GPUs one would be free"
    scene.state.drop_pod("n1-1")
    assert await scene.after() == ["w"]


@pytest.mark.parametrize("change", ["lets one go", "is gone", "covers others", "lets fewer go"])
async def test_budget_that_allows_more_causes_check_of_its_nodes(change):
    scene = Scene("n1", "n2")
    scene.runs("n1-0", "n1", 0, labels=(("app", "a"),))
    budget = Budget("team", "b", (Requirement("app", Operator.EXISTS),), allowed=0)
    scene.context.budgets.put(budget)
    await scene.after()
    scene.waits("w")
    await scene.after()
    if change == "lets one go":
        scene.context.budgets.put(replace(budget, allowed=1))
    elif change == "is gone":
        scene.context.budgets.replace([])
    elif change == "covers others":
        scene.context.budgets.replace([replace(budget, selector=None)])
    else:
        scene.context.budgets.put(replace(budget, allowed=-1))
    assert await scene.after() == ([] if change == "lets fewer go" else ["w"])
    assert await scene.after(100.0) == []


async def test_of_thousand_equal_pods_one_is_tried_per_binding():
    scene = Scene()
    for number in range(1000):
        scene.waits(f"w{number:04}", of="deployment")
    writes = 0
    for second in range(60):
        scene.runs("n1-0", "n1", 0, priority=second % 2)  # and no plugin of kube-scheduler lets them onto n1
        writes += len(await scene.after())
    assert 1 < writes < 6


async def test_thousand_different_pods_are_tried_in_small_batches_per_node():
    scene = Scene("n1", "n2", "n3", "n4", "n5", "n6")
    for number in range(1000):
        scene.waits(f"w{number:04}")
    for node in ("n1", "n2"):
        scene.runs(f"{node}-0", node, 0, priority=0)
    assert await scene.after() == ["w0000", "w0001"]
    for node in scene.nodes:
        scene.runs(f"{node}-1", node, 1, priority=0)
    assert len(await scene.after()) == module.MAX_TRIED
    tried = [await scene.after() for _ in range(200)]
    assert max(map(len, tried)) <= module.MAX_TRIED


async def test_pod_that_cannot_use_node_does_not_block_next():
    scene = Scene()
    for uid in ("elsewhere", "here"):
        scene.waits(uid)
    scene.runs("n1-0", "n1", 0, priority=0)
    assert await scene.after() == ["elsewhere"]
    assert await scene.after() == ["here"]
    assert await scene.after() == []


async def test_pod_that_keeps_failing_pauses_longer_and_then_sees_changes():
    scene, tries = Scene(), []
    scene.waits("w")
    for second in range(400):
        scene.runs("n1-0", "n1", 0, priority=second % 2)
        if await scene.after():
            tries.append(second)
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses[:5] == [5, 10, 20, 40, 60]
    assert set(pauses[5:]) == {60}
    assert await scene.after(59.0) == ["w"]
    await scene.after(2 * module.LAST_PAUSE_SECONDS)
    scene.runs("n1-0", "n1", 0, priority=2)
    assert await scene.after() == ["w"]
    scene.runs("n1-0", "n1", 0, priority=1)
    assert await scene.after(module.FIRST_PAUSE_SECONDS) == ["w"], "it began anew"


async def test_more_nodes_than_one_batch_are_all_checked(monkeypatch):
    looked, would_help = [], imported.would_help

    def noted(context, pod, node):
        looked.append(node)
        return would_help(context, pod, node)

    monkeypatch.setattr(module, "would_help", noted)
    names = [f"n{number:03}" for number in range(2 * module.MAX_LOOKED + 1)]
    scene = Scene(*names)
    pod = make_pod("w", priority=100, vgpu="2", vgpu_memory="2000")
    scene.state.set_pod(pod)
    scene.refuse("w")
    await scene.after()
    for name in names:
        scene.runs(f"{name}-0", name, 0, priority=0)
    for _ in range(3):
        assert await scene.after() == []
    assert looked == names, "each once"
    assert await scene.after() == []
    assert looked == names


def gang_of(minimum: int) -> dict[str, str]:
    return {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: str(minimum)}


async def test_one_member_of_gang_is_tried_when_node_becomes_helpful():
    scene = Scene()
    for number in range(3):
        scene.waits(f"m{number}", gang=gang_of(3))
    assert await scene.after() == []
    scene.runs("n1-0", "n1", 0, priority=0)
    assert await scene.after() == ["m0"]


@pytest.mark.parametrize("why", ["it rests from searching", "it pauses"])
async def test_a_gang_that_may_not_search_is_tried_once_it_may(why):
    scene = Scene()
    member = scene.waits("m0", gang=gang_of(1))
    gangs, gang = scene.context.gangs, known_gang(member)
    if why == "it rests from searching":
        scene.now = 5.0
        gangs.back_off_searching(gang, 0.0)
        until = 25.0
    else:
        scene.state.drop_pod("n1-0")
        assert gangs.place(member, gang, frozenset({"n1"}), frozenset({"n1"}), gangs.standing_for(member, gang, frozenset({"n1"})))
        scene.state.release("m0")
        scene.now = scene.context.gangs.attempts.gang_seconds
        until = 2 * scene.now
    scene.runs("n1-0", "n1", 0, priority=0)
    while scene.now < until - 1.0:
        assert await scene.after() == []
    assert await scene.after() == ["m0"]


async def test_after_restart_pods_with_possible_victims_are_tried_once_in_batches():
    scene = Scene()
    scene.runs("n1-0", "n1", 0, priority=5)
    uids = [f"w{number}" for number in range(6)]
    for uid in (*uids, "unimportant", "polite"):
        pod = make_pod(uid, priority=5 if uid == "unimportant" else 100, vgpu="1", vgpu_memory="1000")
        scene.state.set_pod(replace(pod, preempts=uid != "polite"))
        scene.undecided.put(Decision(scene.state.pods[uid], request_of(pod), float("-inf"), 0, 0, {}))
    assert await scene.after() == uids[:4]
    assert await scene.after() == uids[4:]
    assert await scene.after() == []


async def test_after_a_restart_one_member_of_a_gang_is_enough():
    scene = Scene()
    scene.runs("n1-0", "n1", 0, priority=5)
    for number in range(4):
        pod = make_pod(f"m{number}", priority=100, annotations=gang_of(4), vgpu="1", vgpu_memory="1000")
        scene.state.set_pod(pod)
        scene.undecided.put(Decision(pod, request_of(pod), float("-inf"), 0, 0, {}))
    assert await scene.after() == ["m0"]
    assert await scene.after() == []


async def test_changes_under_other_leader_are_not_checked():
    scene = Scene()
    scene.waits("w")
    scene.leads = False
    scene.runs("n1-0", "n1", 0, priority=0)
    assert await scene.after() == []
    scene.leads = True
    assert await scene.after() == []
    scene.runs("n1-1", "n1", 1, priority=0)
    assert await scene.after() == ["w"]


async def test_gang_without_possible_victims_is_queried_where_node_changed():
    """The whole way: filter says that no pod's end helps, one is bound, and filter then leaves the node to kube-scheduler's preemption."""
    scene = Scene()
    scene.waits("m0", gang=gang_of(1))
    pod = pod_object("m0", uid="m0", annotations=gang_of(1), vgpu="1", vgpu_memory="1000")
    pod["spec"]["priority"] = 100
    scene.runs("n1-0", "n1", 0, priority=0)
    assert await scene.after() == ["m0"]
    answer = json.loads(filter_body(scene.context, json.dumps({"Pod": pod, "NodeNames": ["n1"]}).encode(), scene.now))
    assert list(answer["FailedNodes"]) == ["n1"]


async def test_tried_pod_is_not_retried_for_same_while_others_remain():
    scene = Scene()
    member = scene.waits("m0", gang=gang_of(1))
    scene.now = 1000.0
    scene.context.gangs.back_off_searching(known_gang(member), 0.0)
    scene.waits("w")
    scene.runs("n1-0", "n1", 0, priority=0)
    tried = [uid for _ in range(200) for uid in await scene.after()]
    assert tried == ["w"]


async def test_equal_pods_are_checked_together_per_node(monkeypatch):
    looked, scene = [], Scene("n1", "n2")
    scene.waits("first")
    for number in range(10):
        scene.waits(f"w{number}", of="deployment")
    for node in scene.nodes:
        scene.runs(f"{node}-0", node, 0, priority=0)

    def noted_would_help(context, pod, node):
        looked.append((pod.uid, node))
        return node == "n1"

    monkeypatch.setattr(module, "would_help", noted_would_help)
    assert await scene.after() == ["first"]
    assert looked == [("first", "n1"), ("w0", "n2")], "n1 is for the first"
