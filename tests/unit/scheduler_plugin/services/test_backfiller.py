# SPDX-License-Identifier: Apache-2.0
"""Who gets held room, when it goes, who is retried, and what filter and why say. tests/integration has whole histories."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from aliquot import contract
from aliquot.contract.model import Policy
from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.backfill.hold import SENTENCE
from scheduler_plugin.core.backfill.lifetimes import MIN_ENDED
from scheduler_plugin.core.cluster.hold_uids import hold_uid
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts, NodeRules
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.replay import Recorded, read_document, replay
from scheduler_plugin.core.explain.why import Why
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.dashboard.picture import Painter
from scheduler_plugin.ports import EndedPod
from scheduler_plugin.services.backfiller import WAIT_SECONDS, Backfiller
from scheduler_plugin.services.explainer import Explainer
from scheduler_plugin.settings import Answer
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod, make_share

HOUR = 3600.0


class Scene:
    """A node with two GPUs, one of them in use for an hour, and a pod that waits for both."""

    def __init__(self) -> None:
        self.now = 100_000.0
        self.leads = True
        self.retried: list[str] = []
        self.ended: list[EndedPod] | None = []
        """None: the API does not answer."""
        self.state = ClusterState()
        self.state.set_gpu_node(make_node("n1", 2))
        self.state.set_host("n1", 16_000, 64_000)
        stated = {contract.ANNOTATION_EXPECTED_RUNTIME: "1h"}
        running = make_pod(
            "runs", node="n1", annotations=stated, shares={"main": [make_share("n1", 0, 1000)]}, vgpu="1", vgpu_memory="1000"
        )
        self.state.set_pod(replace(running, started_at=self.now, controller_kind="Job"))
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now)
        self.explainer = Explainer(self.context, Rules(Policy.FRAG, DEFAULT_WEIGHTS), lambda: 0.0)
        self.directory = NodeDirectory()
        self.directory.put(NodeFacts("n1", {"pool": "a"}))
        self.service = Backfiller(self.context, self.explainer.full_snapshot, self.retry, lambda: self.leads, "ours", self, self.directory)

    async def ended_pods(self) -> Sequence[EndedPod]:
        if self.ended is None:
            raise KubeApiError("no answer")
        return self.ended

    async def retry(self, uid: str) -> None:
        self.retried.append(uid)

    def create(self, uid: str, vgpus: int = 2, *, priority: int = 0, scheduler: str = "ours", **fields: Any) -> None:
        pod = make_pod(uid, vgpu=str(vgpus), vgpu_memory=str(1000 * vgpus), priority=priority)
        assert pod.gpu is not None
        self.state.set_pod(replace(pod, gpu=replace(pod.gpu, scheduler_name=scheduler), created_at=self.now, **fields))

    async def pass_time(self, seconds: float = WAIT_SECONDS) -> None:
        self.now += seconds
        await self.service.step()
        self.state.expire(self.now, self.now)

    def filter(self, uid: str, vgpus: int = 1, *, stated: str = "", priority: int = 0) -> dict[str, Any]:
        annotations = {contract.ANNOTATION_EXPECTED_RUNTIME: stated} if stated else {}
        item = pod_object(f"pod-{uid}", uid=uid, annotations=annotations, vgpu=str(vgpus), vgpu_memory=str(1000 * vgpus))
        item["spec"]["priority"] = priority
        body = json.dumps({"Pod": item, "NodeNames": ["n1"]}).encode()
        reply: dict[str, Any] = json.loads(filter_body(self.context, body, self.now, Answer.ONE))
        return reply

    @property
    def owners(self) -> set[str]:
        held = self.context.held_room.held
        return set() if held is None else set(held.owners)


async def held_scene() -> Scene:
    scene = Scene()
    scene.create("big")
    await scene.pass_time()
    assert scene.owners == {"big"}
    return scene


async def test_pod_that_just_came_gets_no_room() -> None:
    scene = Scene()
    scene.create("big")
    await scene.pass_time(WAIT_SECONDS / 2)
    assert not scene.owners


@pytest.mark.parametrize(
    "fields",
    [{"gates": ("g",)}, {"is_picky": True}, {"nodes": NodeRules((("pool", "b"),))}, {"nominated_node": "n1"}, {"deletion_requested": True}],
    ids=lambda one: next(iter(one)),
)
async def test_pod_that_room_does_not_help_gets_none(fields: dict[str, Any]) -> None:
    scene = Scene()
    scene.create("big", **fields)
    await scene.pass_time()
    assert not scene.owners


async def test_pod_that_selects_full_nodes_gets_room_though_others_are_empty() -> None:
    scene = Scene()
    scene.state.set_gpu_node(make_node("n2", 2))
    scene.state.set_host("n2", 16_000, 64_000)
    scene.directory.put(NodeFacts("n2", {"pool": "b"}))
    scene.create("anywhere")
    await scene.pass_time()
    assert not scene.owners
    scene.create("here", nodes=NodeRules((("pool", "a"),)))
    await scene.pass_time()
    assert scene.owners == {"here"}
    assert scene.context.held_room.held is not None
    assert scene.context.held_room.held.nodes == {"n1"}
    scene.directory.put(NodeFacts("n1", {"pool": "c"}))
    await scene.pass_time()
    assert not scene.owners


async def test_pod_of_another_scheduler_gets_no_room() -> None:
    scene = Scene()
    scene.create("big", scheduler="theirs")
    await scene.pass_time()
    assert not scene.owners


async def test_pod_that_fits_or_never_fits_is_passed_over() -> None:
    scene = Scene()
    scene.create("huge", 3)
    scene.create("fits", 1)
    scene.now += 1
    scene.create("big")
    await scene.pass_time()
    assert scene.owners == {"big"}


async def test_more_important_pod_takes_over_and_equal_one_does_not() -> None:
    scene = await held_scene()
    scene.create("equal")
    await scene.pass_time()
    assert scene.owners == {"big"}
    scene.create("first", priority=7)
    await scene.pass_time()
    assert scene.owners == {"first"}
    assert hold_uid("big") not in scene.state.reservations


@pytest.mark.parametrize("change", ["gone", "bound", "not leading"])
async def test_hold_goes_with_its_reason(change: str) -> None:
    scene = await held_scene()
    if change == "gone":
        scene.state.drop_pod("big")
    elif change == "bound":
        scene.state.set_pod(replace(scene.state.pods["big"], node_name="n9"))
    else:
        scene.leads = False
    await scene.pass_time(1)
    assert not scene.owners
    assert not scene.state.reservations
    assert not scene.state.passes


async def test_killed_process_leaves_nothing_for_longer_than_hold() -> None:
    scene = await held_scene()
    scene.state.expire(scene.now + 31, scene.now)
    assert not scene.state.reservations


async def test_owner_is_retried_when_room_is_free() -> None:
    scene = await held_scene()
    assert not scene.retried
    scene.state.drop_pod("runs")
    await scene.pass_time(1)
    assert scene.retried == ["big"]
    assert scene.filter("big", 2)["NodeNames"] == ["n1"]


FILTERED: dict[str, tuple[dict[str, Any], bool]] = {
    "no statement": ({}, False),
    "ends before": ({"stated": "10m"}, True),
    "ends after": ({"stated": "2h"}, False),
    "more important": ({"priority": 9}, True),
}


@pytest.mark.parametrize("name", FILTERED)
async def test_filter_gives_held_room_by_rule(name: str) -> None:
    fields, fits = FILTERED[name]
    scene = await held_scene()
    reply = scene.filter("new", **fields)
    assert bool(reply["NodeNames"]) == fits
    if not fits:
        assert reply["FailedAndUnresolvableNodes"] == {"n1": SENTENCE}


async def test_filter_without_hold_gives_room_to_all() -> None:
    assert Scene().filter("new")["NodeNames"] == ["n1"]


@pytest.mark.parametrize("stated", ["10m", ""])
async def test_decision_beside_hold_is_replayed_equally(stated: str) -> None:
    scene = await held_scene()
    scene.filter("new", stated=stated)
    reply = await scene.explainer.record("team", "pod-new")
    assert not replay(read_document(reply.body, Recorded)).differences


async def test_waiting_pod_that_may_use_room_is_retried_when_it_is_freed() -> None:
    scene = await held_scene()
    filled = make_pod("fills", node="n1", shares={"main": [make_share("n1", 1, 1000)]}, vgpu="1", vgpu_memory="1000")
    scene.state.set_pod(
        replace(
            filled,
            started_at=scene.now,
            gpu=replace(filled.gpu, annotations={**filled.gpu.annotations, contract.ANNOTATION_EXPECTED_RUNTIME: "1h"}),
        )
    )
    assert not scene.filter("new", stated="10m")["NodeNames"]
    scene.state.drop_pod("fills")
    await scene.pass_time(1)
    assert scene.retried == ["new"]


async def explained(scene: Scene, uid: str) -> Why:
    return msgspec.json.decode((await scene.explainer.why("team", f"pod-{uid}")).body, type=Why)


async def test_why_says_when_owner_starts() -> None:
    why = await explained(await held_scene(), "big")
    assert why.start is not None
    assert why.start.nodes == ("n1",)
    assert why.start.earliest_at is not None
    assert why.start.latest_at is not None
    assert why.start.earliest_at <= 100_000.0 + HOUR <= why.start.latest_at
    assert "Expected to start 1970-01-02 0" in why.sentence


async def test_why_says_that_time_is_unknown() -> None:
    scene = Scene()
    pod = scene.state.pods["runs"]
    assert pod.gpu is not None
    annotations = {name: value for name, value in pod.gpu.annotations.items() if name != contract.ANNOTATION_EXPECTED_RUNTIME}
    scene.state.set_pod(replace(pod, gpu=replace(pod.gpu, annotations=annotations)))
    scene.create("big")
    await scene.pass_time()
    assert "it is unknown when it is free: 1 pod there has no expected end" in (await explained(scene, "big")).sentence


async def test_why_names_owner_to_pod_that_is_kept_off() -> None:
    scene = await held_scene()
    scene.create("small", 1)
    why = await explained(scene, "small")
    assert why.held.startswith("room on node n1 is held for team/pod-big")
    assert why.start is None


async def test_dashboard_lists_expected_start_and_no_held_share() -> None:
    scene = await held_scene()
    scene.filter("big", 2)
    holds = scene.context.held_room
    drawn = list(Painter(scene.state, lambda: (holds.held, holds.outlook)).draw(scene.context.decisions.waiting(), leads=True, trouble=""))
    picture = drawn[-1]
    assert picture is not None
    [waiting] = picture.waiting
    assert waiting.holds == ("n1",)
    assert waiting.start is not None
    node = json.loads(bytes(picture.nodes[0]))
    assert [gpu["usedMib"] for gpu in node["gpus"]] == [1000, 0]


def test_pods_that_end_by_themselves_are_learned() -> None:
    scene = Scene()
    pod = replace(make_pod("done", node="n1", vgpu="1", vgpu_memory="7"), started_at=scene.now - HOUR)
    for _ in range(8):
        scene.service.learn(pod)
    known = scene.context.held_room.lifetimes.of(pod)
    assert known is not None
    assert known.usual == HOUR


async def test_new_process_learns_from_pods_that_ended_before() -> None:
    scene = Scene()
    scene.ended = None
    assert not await scene.service.learn_from_ended()
    pods = [make_pod(f"e{number}", node="n1", phase="Succeeded", vgpu="1") for number in range(MIN_ENDED)]
    deleted = replace(make_pod("d", node="n1", phase="Failed", vgpu="1"), started_at=0.0, deletion_requested=True)
    scene.ended = [EndedPod(HOUR, replace(pod, started_at=0.0)) for pod in pods] + [EndedPod(9 * HOUR, deleted)]
    assert await scene.service.learn_from_ended()
    known = scene.context.held_room.lifetimes.of(make_pod("next", vgpu="1"))
    assert known is not None
    assert known.usual == HOUR
