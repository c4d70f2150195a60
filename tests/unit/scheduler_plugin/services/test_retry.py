"""Pods that wait are tried again when something changed for them, and whoever looks for them holds nobody up."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from proto import contract
from proto.model import Policy
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.errors import KubeApiError
from scheduler_plugin.extender.desk import Desk, request_of
from scheduler_plugin.extender.gang import gang_asked
from scheduler_plugin.extender.preempt import hold
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.telemetry import Telemetry
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share


class Api:
    """Takes annotations, or runs something first."""

    def __init__(self) -> None:
        self.poked: list[str] = []
        self.values: list[str] = []
        self.before = lambda: None

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        self.before()
        self.poked.append(uid)
        self.values.append(annotations[contract.ANNOTATION_RETRY])


class Scene:
    """Two nodes of two GPUs of 1,000 MiB; on n1 one GPU is in use."""

    def __init__(self, started_at: float = 1e9) -> None:
        self.now = 0.0
        self.state = ClusterState()
        self.state.set_gpu_node(make_node("n1", 2))
        self.state.set_gpu_node(make_node("n2", 2))
        self.state.set_pod(make_pod("busy", node="n1", shares={"main": [make_share("n1", 0, 1000)]}, vgpu="1"))
        self.desk = Desk(
            self.state,
            Shapes(self.state, DEFAULT_WEIGHTS),
            Policy.FRAG,
            10.0,
            monotonic=lambda: self.now,
            now=lambda: started_at + self.now,
        )
        self.api = Api()
        self.retry = Retry(self.desk, self.api, lambda: True, lambda: 0.0, Telemetry())

    def waits(self, uid: str, **limits: str) -> Decision:
        """Note that a pod was found to fit nowhere just now."""
        pod = make_pod(uid, **limits)
        self.state.set_pod(pod)
        return self.record(pod)

    def record(self, pod: PodFacts) -> Decision:
        self.state.columns.derive()
        decision = Decision(pod, request_of(pod), 0.0, self.state.columns.change_count, 0, {})
        self.desk.decisions.record(decision)
        return decision

    def plans(self, pod: PodFacts, nodes: frozenset[str]) -> bool:
        """Do as filter does for the first member of a gang; return whether the gang has a place."""
        gang, gangs = gang_asked(pod), self.desk.gangs
        return bool(gangs.place(pod, gang, nodes, nodes, gangs.standing_for(pod, gang, nodes)))

    async def poked(self) -> list[str]:
        """Let the loop look once; return who was tried again."""
        self.api.poked.clear()
        await self.retry.step()
        return self.api.poked


async def test_a_pod_is_tried_again_only_for_nodes_that_changed_since_it_was_refused():
    scene = Scene()
    scene.waits("picky", vgpu="2")  # n2 has room, and something that is not ours to know keeps the pod off it
    scene.state.freed_count += 1
    assert await scene.poked() == []
    scene.state.drop_pod("busy")
    assert await scene.poked() == ["picky"]


async def test_what_was_found_not_to_fit_is_not_judged_again():
    scene = Scene()
    scene.waits("large", vgpu="2", vgpu_memory="4000")
    scene.state.drop_pod("busy")
    assert await scene.poked() == []
    asked = []
    scene.desk.shapes.fits_since = lambda shape, since: asked.append(since) or False
    scene.state.set_gpu_node(make_node("n2", 2, cordoned=True))
    before = scene.state.columns.change_count
    assert await scene.poked() == []
    scene.state.freed_count += 1
    assert await scene.poked() == []
    assert asked[1] == before > asked[0]


async def test_an_older_refusal_of_an_equal_pod_counts_from_its_own_time():
    scene = Scene()
    scene.waits("first", vgpu="2")
    scene.state.drop_pod("busy")
    later = make_pod("second", vgpu="2", priority=9)
    scene.state.set_pod(later)
    scene.record(later)  # refused after the change, for nodes of another zone
    assert sorted(await scene.poked()) == ["first", "second"]


async def test_verbs_are_answered_while_many_kinds_of_pods_are_looked_at():
    scene = Scene()
    for number in range(40):
        scene.waits(f"w{number}", vgpu="2", vgpu_memory=str(4000 + 2 * number))
    scene.state.drop_pod("busy")
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    assert await scene.poked() == []
    task.cancel()
    assert turns >= 40


@pytest.mark.parametrize("meanwhile", ["gone", "refused again", "nothing"])
async def test_a_try_that_the_api_did_not_take_is_made_again_unless_something_newer_is_known(meanwhile):
    scene = Scene()
    decision = scene.waits("large", vgpu="2")
    scene.state.drop_pod("busy")

    def fail() -> None:
        if meanwhile == "gone":
            scene.state.drop_pod("large")
        if meanwhile == "refused again":
            scene.desk.decisions.record(replace(decision, at=9.0))
        raise KubeApiError("no answer")

    scene.api.before = fail
    assert await scene.poked() == []
    known = scene.desk.decisions.by_uid.get("large")
    assert (None if known is None else known.at) == {"gone": None, "refused again": 9.0, "nothing": 0.0}[meanwhile]


async def test_members_of_a_gang_that_has_a_place_are_tried_again_though_their_room_fits_nobody_now():
    scene = Scene()
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(uid, annotations=gang, vgpu="1").pod for uid in ("m0", "m1")]
    scene.waits("other", vgpu="1")
    nodes = frozenset({"n1", "n2"})
    assert scene.plans(members[0], nodes)
    scene.state.set_pod(make_pod("last", node="n2", shares={"main": [make_share("n2", minor, 1000) for minor in (0, 1)]}, vgpu="2"))
    scene.state.freed_count += 1
    assert await scene.poked() == ["m0", "m1"]


async def test_members_of_a_gang_for_which_others_end_are_tried_again_once_filter_has_planned_it():
    scene, gang = full_scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(uid, annotations=gang, vgpu="1", vgpu_memory="500").pod for uid in ("m0", "m1")]
    assert hold(scene.desk, members[0], "n1", ["busy"], 30.0)
    scene.state.freed_count += 1
    assert await scene.poked() == []
    scene.state.drop_pod("busy")
    assert scene.plans(members[0], frozenset({"n1"}))
    assert await scene.poked() == ["m0", "m1"]


async def test_a_member_of_a_gang_that_runs_is_tried_again_once_those_that_end_for_it_have():
    scene, gang = full_scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "1"}
    scene.state.set_pod(make_pod("m0", node="elsewhere", annotations=gang, shares={"main": [make_share("elsewhere", 0)]}, vgpu="1"))
    member = scene.waits("m1", annotations=gang, vgpu="1", vgpu_memory="500").pod
    assert hold(scene.desk, member, "n1", ["busy"], 30.0)
    scene.state.freed_count += 1
    assert await scene.poked() == []
    scene.state.drop_pod("busy")
    assert await scene.poked() == ["m1"]


async def test_of_a_gang_that_waits_for_room_one_member_of_each_kind_is_tried_again():
    scene, gang = Scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "4"}
    small = {"annotations": gang, "vgpu": "1", "vgpu_memory": "100"}
    for number in range(3):
        scene.waits(f"w{number}", annotations=gang, vgpu="2")
    for number in range(3):
        scene.waits(f"s{number}", **small)
    scene.state.drop_pod("busy")
    assert await scene.poked() == ["w0", "s0"]
    assert await scene.poked() == []
    scene.state.freed_count += 1
    assert await scene.poked() == ["w1", "s1"], "each gets its turn"


async def test_all_members_of_a_gang_that_has_a_plan_or_runs_are_tried_again():
    scene, gang = Scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(f"m{number}", annotations=gang, vgpu="1", vgpu_memory="100").pod for number in range(4)]
    assert scene.plans(members[0], frozenset({"n1", "n2"}))
    assert await scene.poked() == ["m0", "m1", "m2", "m3"]


async def test_a_gang_that_held_room_without_starting_is_tried_again_after_its_pause():
    scene, gang = Scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(f"m{number}", annotations=gang, vgpu="1").pod for number in range(2)]
    assert scene.plans(members[0], frozenset({"n1", "n2"}))
    await scene.poked()
    for pod in members:
        scene.record(pod)
    scene.now = scene.desk.gang_seconds
    assert await scene.poked() == [], "it pauses"
    scene.now += scene.desk.gang_seconds - 1
    assert await scene.poked() == []
    scene.now += 1
    assert await scene.poked() == ["m0"]


async def test_a_gang_of_which_the_watch_tells_late_is_tried_again():
    scene, gang = Scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [make_pod(f"m{number}", annotations=gang, vgpu="1") for number in range(2)]
    await scene.poked()
    for pod in members:
        scene.record(pod)
    scene.state.set_pod(members[0])
    assert await scene.poked() == []
    scene.state.set_pod(members[1])
    assert await scene.poked() == ["m0"]


async def test_a_pod_changes_whichever_process_has_it_tried_again():
    values = set()
    for started_at in (1e9, 1e9 + 30):
        scene = Scene(started_at)
        scene.waits("large", vgpu="2")
        scene.state.drop_pod("busy")
        assert await scene.poked() == ["large"]
        values.add(*scene.api.values)
    assert len(values) == 2


def full_scene() -> Scene:
    """Return one whose only node has no room."""
    scene = Scene()
    scene.state.drop_gpu_node("n2")
    scene.state.set_pod(make_pod("busy-too", node="n1", shares={"main": [make_share("n1", 1, 1000)]}, vgpu="1"))
    return scene
