# SPDX-License-Identifier: Apache-2.0
"""Gangs that lack members for a pod that waits learn which have succeeded, with few questions."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.pods import SUCCEEDED, PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.services.succeeded_members import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, SucceededMembers
from tests.unit.scheduler_plugin.builders import make_context, make_node, make_pod, make_share, request_of

GANG = {contract.ANNOTATION_GANG: "train", contract.ANNOTATION_GANG_MIN: "3"}


class Scene:
    """A gang of three: one runs and another waits; it is the API too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leads = True
        self.fails = False
        self.asked: list[str] = []
        self.succeeded: list[PodFacts] = []
        self.state = ClusterState()
        self.state.set_gpu_node(make_node("n1", 4))
        self.context = make_context(self.state, monotonic=lambda: self.now)
        self.service = SucceededMembers(self.context, cast(Any, self), lambda: self.leads)
        self.state.set_pod(ran("runs"))
        self.waits(make_pod("waits", annotations=GANG, vgpu="1"))

    def waits(self, pod: PodFacts) -> None:
        self.state.set_pod(pod)
        self.context.decisions.record(Decision(pod, request_of(pod), 0.0, 0, 0, {}))

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        self.asked.append(namespace)
        if self.fails:
            raise KubeApiError("no answer")
        return self.succeeded

    def known(self) -> set[str]:
        return set(self.state.succeeded_members(("team", "train")))

    async def after(self, seconds: float) -> int:
        """Let the loop look once after a while; return how often it has asked so far."""
        self.now += seconds
        await self.service.step()
        return len(self.asked)


def ran(uid: str, phase: str = "Running", gang: dict[str, str] = GANG) -> PodFacts:
    return make_pod(uid, node="n1", shares={"main": [make_share("n1", 0)]}, annotations=gang, phase=phase, vgpu="1")


async def test_succeeded_members_count_once_queried():
    scene = Scene()
    to_go = replace(ran("to-go", SUCCEEDED), deletion_requested=True)
    other = ran("other", SUCCEEDED, GANG | {contract.ANNOTATION_GANG: "other"})
    scene.succeeded = [ran("done", SUCCEEDED), to_go, other, make_pod("single", node="n1", phase=SUCCEEDED)]
    freed = scene.state.freed_count
    assert await scene.after(0) == 1
    assert scene.asked == ["team"]
    assert scene.known() == {"done"}
    assert scene.state.freed_count == freed + 1
    assert await scene.after(LAST_PAUSE_SECONDS) == 1, "it lacks none any more"


async def test_gang_that_keeps_lacking_members_is_queried_ever_later():
    scene, at = Scene(), []
    for _ in range(2000):
        before = len(scene.asked)
        if await scene.after(1) > before:
            at.append(scene.now)
    waits = [later - earlier for earlier, later in pairwise(at)]
    assert waits[0] == FIRST_PAUSE_SECONDS
    assert waits == sorted(waits)
    assert waits[-1] == LAST_PAUSE_SECONDS


@pytest.mark.parametrize("why", ["it does not run, and nobody manages it", "it has enough", "another one leads"])
async def test_no_query_is_sent_where_it_does_not_matter(why):
    scene = Scene()
    match why:
        case "it does not run, and nobody manages it":
            scene.state.drop_pod("runs")
        case "it has enough":
            scene.state.set_pod(ran("runs-too"))
        case _:
            scene.leads = False
    assert await scene.after(10) == 0


async def test_where_no_member_runs_those_count_that_the_same_controller_made():
    scene = Scene()
    scene.state.drop_pod("runs")
    scene.waits(replace(scene.state.pods["waits"], controller_uid="job"))
    scene.succeeded = [replace(ran("done1", SUCCEEDED), controller_uid="job"), replace(ran("done2", SUCCEEDED), controller_uid="job")]
    scene.succeeded += [replace(ran("before-restart", SUCCEEDED), controller_uid="job-before"), ran("by-itself", SUCCEEDED)]
    assert await scene.after(0) == 1
    assert scene.known() == {"done1", "done2"}


async def test_unanswered_api_query_is_repeated():
    scene = Scene()
    scene.fails = True
    assert await scene.after(0) == 1
    scene.fails, scene.succeeded = False, [ran("done", SUCCEEDED)]
    assert await scene.after(FIRST_PAUSE_SECONDS) == 2
    assert scene.known() == {"done"}
