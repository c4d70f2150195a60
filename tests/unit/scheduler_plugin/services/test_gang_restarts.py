# SPDX-License-Identifier: Apache-2.0
"""A gang that restarts whole: when the others end, and when they do not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.cluster.pods import SUCCEEDED, PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.services.gang_restarts import REPEAT_SECONDS, SETTLE_SECONDS, GangRestarts
from tests.unit.scheduler_plugin.builders import make_context, make_node, make_pod, make_share

GANG = {contract.ANNOTATION_GANG: "train", contract.ANNOTATION_GANG_MIN: "3"}
WHOLE = GANG | {contract.ANNOTATION_GANG_RESTART: "whole"}


class Scene:
    """A gang with members that run; it is the API too."""

    def __init__(self, members: int = 3, annotations: dict[str, str] = WHOLE) -> None:
        self.now = 0.0
        self.leads = True
        self.annotations = annotations
        self.fails = False
        self.kept: set[str] = set()
        self.evicted: list[str] = []
        self.reported: list[str] = []
        self.ended: dict[str, PodFacts] = {}
        """Pods with a final phase, by name."""
        self.state = ClusterState()
        self.state.set_gpu_node(make_node("n1", 8))
        self.context = make_context(self.state, monotonic=lambda: self.now)
        self.service = GangRestarts(self.context, cast(Any, self), self, lambda: self.leads)
        for number in range(members):
            self.runs(f"m{number}")

    def runs(self, uid: str) -> None:
        self.state.set_pod(make_pod(uid, node="n1", shares={"main": [make_share("n1", 0)]}, annotations=self.annotations, vgpu="1"))

    def ends(self, uid: str, phase: str = "Failed") -> None:
        """Have a member end; the watch says only that it is gone."""
        pod = self.state.pods[uid]
        self.ended[pod.name] = replace(pod, active=False, gpu=replace(pod.gpu, phase=phase))
        self.state.drop_pod(uid)

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        if self.fails:
            raise KubeApiError("no answer")
        return self.ended.get(name)

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        return [pod for pod in self.ended.values() if pod.gpu is not None and pod.gpu.phase == SUCCEEDED]

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        if uid in self.kept:
            raise KubeApiError("HTTP 429: the budget refuses")
        self.evicted.append(uid)
        self.state.set_pod(replace(self.state.pods[uid], deletion_requested=True))

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        assert reason == contract.EVENT_REASON_GANG_RESTARTED
        self.reported.append(message)

    async def after(self, seconds: float) -> list[str]:
        """Let the loop look now and again after a while; return who was evicted so far."""
        await self.service.step()
        self.now += seconds
        await self.service.step()
        return sorted(self.evicted)


async def test_others_end_if_a_member_failed():
    scene = Scene()
    scene.ends("m0")
    assert await scene.after(SETTLE_SECONDS) == ["m1", "m2"]
    assert scene.reported[0] == "evicted to restart gang train whole: member pod-m0 ended, and fewer than 3 are left"
    for uid in ("m1", "m2"):
        scene.state.drop_pod(uid)
    scene.runs("new")
    assert await scene.after(REPEAT_SECONDS) == ["m1", "m2"]


@pytest.mark.parametrize(("lost", "broken"), [("master", True), ("w0", False)])
async def test_lost_role_breaks_gang_though_enough_others_are_left(lost, broken):
    def of_role(name: str, minimum: str) -> dict[str, str]:
        return WHOLE | {contract.ANNOTATION_GANG_ROLE: name, contract.ANNOTATION_GANG_ROLE_MIN: minimum}

    scene = Scene(members=0, annotations=of_role("worker", "2"))
    for number in range(3):
        scene.runs(f"w{number}")
    scene.annotations = of_role("master", "1")
    scene.runs("master")
    scene.ends(lost)
    assert await scene.after(SETTLE_SECONDS) == (["w0", "w1", "w2"] if broken else [])
    assert scene.reported[:1] == (
        ["evicted to restart gang train whole: member pod-master ended, and fewer than 3 that count for their roles are left"]
        if broken
        else []
    )


async def test_others_end_if_a_member_is_being_deleted():
    scene = Scene()
    scene.state.set_pod(replace(scene.state.pods["m0"], deletion_requested=True))
    assert await scene.after(SETTLE_SECONDS) == ["m1", "m2"]
    assert len(scene.reported) == 2


@pytest.mark.parametrize(
    ("members", "annotations", "phase"),
    [
        pytest.param(3, GANG, "Failed", id="it does not say so"),
        pytest.param(4, WHOLE, "Failed", id="enough are left"),
        pytest.param(3, WHOLE, SUCCEEDED, id="the member succeeded"),
    ],
)
async def test_no_member_ends_otherwise(members, annotations, phase):
    scene = Scene(members, annotations)
    scene.ends("m0", phase)
    assert await scene.after(SETTLE_SECONDS) == []
    assert await scene.after(REPEAT_SECONDS) == []


async def test_members_that_succeeded_count_for_the_minimum():
    scene = Scene(4)
    scene.ends("m0", SUCCEEDED)
    await scene.after(SETTLE_SECONDS)
    scene.ends("m1")
    assert await scene.after(SETTLE_SECONDS) == []
    scene.ends("m2")
    assert await scene.after(SETTLE_SECONDS) == ["m3"]


async def test_replacement_that_came_in_time_does_not_save_a_broken_gang():
    scene = Scene()
    scene.ends("m0")
    scene.runs("new")
    assert await scene.after(SETTLE_SECONDS) == ["m1", "m2"]


async def test_no_eviction_if_the_controller_deletes_all():
    scene = Scene()
    scene.ends("m0")
    await scene.service.step()
    for uid in ("m1", "m2"):
        scene.state.set_pod(replace(scene.state.pods[uid], deletion_requested=True))
    assert await scene.after(SETTLE_SECONDS) == []


async def test_refused_eviction_and_failed_query_are_repeated():
    scene = Scene()
    scene.ends("m0")
    scene.kept, scene.fails = {"m2"}, True
    assert await scene.after(SETTLE_SECONDS) == []
    scene.fails = False
    assert await scene.after(REPEAT_SECONDS) == ["m1"]
    scene.kept = set()
    assert await scene.after(REPEAT_SECONDS) == ["m1", "m2"]


async def test_replica_that_does_not_lead_evicts_nothing():
    scene = Scene()
    scene.leads = False
    scene.ends("m0")
    assert await scene.after(SETTLE_SECONDS) == []
    scene.leads = True
    assert await scene.after(SETTLE_SECONDS) == []
