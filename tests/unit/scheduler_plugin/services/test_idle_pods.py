# SPDX-License-Identifier: Apache-2.0
"""Pods that do not use their GPUs give way and end as their class says, and only as long as their agent says so."""

from dataclasses import replace
from typing import Any, cast

import pytest

from aliquot import contract
from aliquot.contract.gpunode import IdlePod
from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.classes import parse_classes
from scheduler_plugin.services.idle_pods import PAUSE_SECONDS, REPEAT_SECONDS, WAIT_SECONDS, IdlePods
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share
from tests.unit.scheduler_plugin.services.test_preemptor import Scene as PreemptorScene

HOUR = 3600
CLASSES = parse_classes({"ended": {"idleEndAfter": "2h"}, "never": {}})


class Scene(PreemptorScene):
    """The pods of the preemptor's scene, more important than those that wait, with the class of their number."""

    def __init__(self, *classes: str, **fields: Any) -> None:
        """Args: classes: of the pods n1-0, n1-1. fields: of these pods."""
        super().__init__("n1")
        self.said: list[tuple[str, str]] = []
        self.fields = {"priority": 50_000, **fields}
        for minor, name in enumerate(classes or ("interactive",)):
            self.set_class(f"n1-{minor}", name)
        self.idle = IdlePods(
            self.context, CLASSES, cast(Any, self), self, self.preemptor.make_room_of_idle, lambda: self.leads, contract.SCHEDULER_NAME
        )

    def set_class(self, uid: str, name: str) -> None:
        self.state.set_pod(replace(self.state.pods[uid], labels=((contract.LABEL_CLASS, name),), **self.fields))

    def report(self, *uids: str, since: int = 0, until: int = 1 << 30) -> None:
        """Have the agent report idle pods."""
        self.state.set_gpu_node(make_node("n1", 2, idle=tuple(IdlePod(uid, since, until) for uid in uids)))

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        self.said.append((reason, message))

    async def idle_after(self, seconds: float) -> set[str]:
        """Let the loop look after a while; return the pods that give way."""
        self.now += seconds
        await self.idle.step()
        return set(self.context.idle)

    def waits(self, uid: str, priority: int = 0, **fields: Any) -> None:
        """Let a pod wait that kube-scheduler refuses by sums: no filter call names it."""
        pod = make_pod(uid, vgpu="1", vgpu_memory="700", priority=priority)
        assert pod.gpu is not None
        gpu = replace(pod.gpu, scheduler_name=contract.SCHEDULER_NAME)
        self.state.set_pod(replace(pod, gpu=gpu, **{"created_at": self.now - WAIT_SECONDS, **fields}))


async def test_idle_pod_gives_way_after_time_of_class_and_says_so():
    scene = Scene("interactive", "never")
    scene.report("n1-0", "n1-1")
    assert await scene.idle_after(HOUR - 1) == set()
    assert await scene.idle_after(1) == {"n1-0"}
    [(reason, message)] = scene.said
    assert reason == contract.EVENT_REASON_IDLE
    assert "1970-01-01T00:00:00Z" in message
    assert contract.ANNOTATION_MIN_RUNTIME in message
    assert await scene.idle_after(HOUR) == {"n1-0"}
    assert len(scene.said) == 1
    assert scene.evicted == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda scene: scene.report(), id="it works again"),
        pytest.param(lambda scene: scene.report("n1-0", until=HOUR + 1), id="the agent is silent"),
        pytest.param(lambda scene: scene.set_class("n1-0", "never"), id="another class"),
        pytest.param(lambda scene: setattr(scene, "leads", False), id="another leader"),
        pytest.param(lambda scene: scene.state.drop_pod("n1-0"), id="it is gone"),
        pytest.param(lambda scene: scene.state.set_pod(replace(scene.state.pods["n1-0"], deletion_requested=True)), id="it ends"),
    ],
)
async def test_pod_gives_way_only_while_it_is_idle(change):
    scene = Scene()
    scene.report("n1-0")
    assert await scene.idle_after(HOUR) == {"n1-0"}
    change(scene)
    assert await scene.idle_after(1) == set()


async def test_report_of_another_node_does_not_count():
    scene = Scene()
    scene.state.set_gpu_node(make_node("n2", 1, idle=(IdlePod("n1-0", 0, 1 << 30),)))
    assert await scene.idle_after(2 * HOUR) == set()


async def test_pod_stays_for_its_minimal_run_time():
    scene = Scene()
    shares = {"main": [make_share("n1", 0, 600)]}
    annotations = {contract.ANNOTATION_MIN_RUNTIME: "3h"}
    pod = make_pod("n1-0", node="n1", shares=shares, annotations=annotations, vgpu="1", vgpu_memory="600")
    scene.state.set_pod(replace(pod, started_at=0.0, labels=((contract.LABEL_CLASS, "interactive"),)))
    scene.report("n1-0")
    assert await scene.idle_after(3 * HOUR - 1) == set()
    assert await scene.idle_after(1) == {"n1-0"}


async def test_class_ends_its_idle_pods_and_refused_eviction_is_repeated():
    scene = Scene("ended", "interactive")
    scene.report("n1-0", "n1-1")
    scene.fails = KubeApiError("HTTP 429: the budget refuses")
    await scene.idle_after(2 * HOUR)
    scene.fails = None
    await scene.idle_after(REPEAT_SECONDS - 1)
    assert scene.evicted == []
    await scene.idle_after(1)
    assert scene.evicted == ["n1-0"]
    reason, message = scene.said[-1]
    assert reason == contract.EVENT_REASON_IDLE
    assert "evicted" in message


async def test_gang_gives_way_only_if_all_its_members_are_idle():
    scene = Scene()
    for minor in (0, 1):
        shares = {"main": [make_share("n1", minor, 600)]}
        annotations = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
        pod = make_pod(f"n1-{minor}", node="n1", shares=shares, annotations=annotations, vgpu="1", vgpu_memory="600")
        scene.state.set_pod(replace(pod, labels=((contract.LABEL_CLASS, "interactive"),)))
    scene.report("n1-0")
    assert await scene.idle_after(HOUR) == set()
    scene.report("n1-0", "n1-1")
    assert await scene.idle_after(1) == {"n1-0", "n1-1"}


async def test_idle_pod_ends_for_less_important_pod_that_filter_never_saw():
    scene = Scene()
    scene.report("n1-0")
    await scene.idle_after(HOUR)
    scene.waits("training", priority=-10)
    await scene.idle_after(1)
    assert scene.evicted == ["n1-0"]
    assert scene.said[-1] == (
        contract.EVENT_REASON_PREEMPTED, "evicted on node n1: it did not use its GPU, and pod team/pod-training needs it"
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"created_at": HOUR + 1.0}, id="just created"),
        pytest.param({"nominated_node": "n1"}, id="pods end for it"),
        pytest.param({"is_confined": True}, id="unknown selector"),
        pytest.param({"gates": ("kueue.x-k8s.io/admission",)}, id="gated"),
        pytest.param({"preempts": False}, id="preempts no pod"),
    ],
)
async def test_no_pod_ends_for_one_that_cannot_take_its_place(fields):
    scene = Scene()
    scene.report("n1-0")
    await scene.idle_after(HOUR)
    scene.waits("training", **fields)
    await scene.idle_after(1)
    assert scene.evicted == []


async def test_pod_that_works_does_not_end_with_idle_ones():
    scene = Scene()
    scene.set_class("n1-1", "never")
    scene.report("n1-0")
    await scene.idle_after(HOUR)
    pod = make_pod("training", vgpu="2", vgpu_memory="1400")
    assert pod.gpu is not None
    scene.state.set_pod(replace(pod, gpu=replace(pod.gpu, scheduler_name=contract.SCHEDULER_NAME), created_at=0.0))
    await scene.idle_after(1)
    await scene.idle_after(PAUSE_SECONDS)
    assert scene.evicted == []


@pytest.mark.parametrize(("controller", "ended"), [("", ["n1-0"]), ("statefulset", [])])
async def test_pod_with_controller_gives_way_only_to_its_equals(controller, ended):
    scene = Scene(controller_uid=controller)
    scene.set_class("n1-1", "never")
    scene.report("n1-0")
    await scene.idle_after(HOUR)
    scene.waits("training", priority=-10)
    await scene.idle_after(1)
    assert scene.evicted == ended
    scene.state.drop_pod("training")
    scene.waits("notebook", priority=50_000)
    await scene.idle_after(1)
    assert scene.evicted == ["n1-0"]


async def test_idle_pod_ends_first_though_it_is_more_important():
    scene = Scene()
    scene.set_class("n1-1", "never")
    scene.state.set_pod(replace(scene.state.pods["n1-1"], priority=1))
    scene.report("n1-0")
    await scene.idle_after(HOUR)
    scene.refused("important")
    assert await scene.after(5) == ["n1-0"]
