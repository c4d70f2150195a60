# SPDX-License-Identifier: Apache-2.0
"""Long work in pieces: calls are served in between, and filter finds the gang that it would have planned itself."""

import asyncio
import json

import msgspec
import pytest

from aliquot import contract
from scheduler_plugin.core.cluster.state import Stage
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.cooperative import SMALL_GANG, IdleWorker, plan_ahead
from scheduler_plugin.extender.gang_backoff import REST_FACTOR
from tests.unit.scheduler_plugin.builders import filter_body, known_gang, make_node
from tests.unit.scheduler_plugin.extender.test_gang import NO_ROOM
from tests.unit.scheduler_plugin.extender.test_gang import Scene as GangScene


class Scene(GangScene):
    """Six nodes of two GPUs, and a gang with members that take one each."""

    def __init__(self, minimum: int = 8) -> None:
        super().__init__(minimum, *(f"n{number}" for number in range(6)))
        for number in range(minimum):
            self.member(f"m{number}")

    def fill(self, free: int) -> None:
        """Leave so many GPUs."""
        for number in range(2 * len(self.nodes) - free):
            self.takes(f"busy{number}", self.nodes[number // 2], number % 2)

    def body(self, uid: str, *nodes: str) -> bytes:
        return json.dumps({"Pod": self.pod(uid), "NodeNames": nodes or self.nodes}).encode()

    def begin(self, uid: str, *nodes: str) -> asyncio.Task:
        """Begin to plan for a filter call."""
        return asyncio.create_task(plan_ahead(self.context, wire.decode_args(self.body(uid, *nodes))))

    def refuse(self, uid: str) -> None:
        """Have a pod outside of the gang refused, because it finds no room."""
        pod = {**self.pod(uid), "metadata": {**self.pod(uid)["metadata"], "annotations": {}}}
        body = {"Pod": pod, "NodeNames": self.nodes}
        assert json.loads(filter_body(self.context, json.dumps(body).encode(), self.now))["NodeNames"] == []

    @property
    def held(self) -> dict[str, str]:
        return {uid: reservation.node for uid, reservation in self.state.reservations.items()}


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def plans(monkeypatch):
    """The pods for which a gang was planned."""
    asked, expecting = [], Planner.expecting

    def noted(planner, members, allowed, expires_at):
        asked.append(members[0].uid)
        return expecting(planner, members, allowed, expires_at)

    monkeypatch.setattr(Planner, "expecting", noted)
    return asked


async def test_others_work_between_two_members_and_filter_finds_the_gang_planned(plans):
    scene = Scene()
    begun = scene.begin("m0")
    await steps(3)
    assert 0 < len(scene.held) < 8
    await begun
    assert len(scene.held) == 8
    assert plans == ["m0"]
    answer = json.loads(filter_body(scene.context, scene.body("m0"), 0.0))
    assert answer["NodeNames"] == [scene.held["m0"]]
    assert plans == ["m0"], "not again"


@pytest.mark.parametrize("free", [3, 12])
async def test_the_answer_is_that_of_filter_alone(free):
    answers = []
    for is_ahead in (False, True):
        scene = Scene()
        scene.fill(free)
        if is_ahead:
            await plan_ahead(scene.context, wire.decode_args(scene.body("m3")))
        answers.append((scene.filter("m3"), scene.held, scene.state.freed_count))
    assert answers[0] == answers[1]


async def test_failed_plan_leaves_state_unchanged_and_is_not_repeated(plans):
    scene = Scene()
    scene.fill(4)
    before = [scene.state.device_states(node) for node in scene.nodes], scene.state.freed_count
    begun = scene.begin("m0")
    await steps(3)
    assert scene.held
    await begun
    assert ([scene.state.device_states(node) for node in scene.nodes], scene.state.freed_count) == before
    assert not scene.held
    assert json.loads(filter_body(scene.context, scene.body("m0"), 0.0))["NodeNames"] == []
    assert plans == ["m0"]


async def test_a_call_that_is_given_up_leaves_everything_as_it_was():
    scene = Scene()
    begun = scene.begin("m0")
    await steps(3)
    assert scene.held
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    assert not scene.held
    assert not scene.context.gangs.standing(known_gang(scene.state.pods["m0"])).planned
    assert not scene.context.gangs.planning.locked()


async def test_decision_of_others_on_member_survives_abandoned_plan():
    scene = Scene()
    begun = scene.begin("m0")
    await steps(3)
    assert not scene.context.gangs.planner.reserve_on(scene.state.pods["m0"], "n5", 1e9, Stage.READY)
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    assert scene.held == {"m0": "n5"}


async def test_abandoned_new_plan_restores_earlier_places_of_members():
    scene = Scene()
    await plan_ahead(scene.context, wire.decode_args(scene.body("m0")))
    before = dict(scene.state.reservations)
    elsewhere = next(node for node in scene.nodes if node != scene.held["m0"])
    begun = scene.begin("m0", elsewhere)
    await steps(3)
    assert scene.state.reservations != before
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    assert scene.state.reservations == before


def test_room_taken_meanwhile_is_not_promised_to_earlier_member_again():
    scene = Scene()
    scene.filter("m0")
    lost = scene.held["m7"]
    plan = scene.context.gangs.planner.expecting([scene.state.pods[f"m{number}"] for number in range(8)], scene.nodes, 1e9)
    next(plan)
    scene.takes("quick0", lost, 0)
    scene.takes("quick1", lost, 1)
    plan.close()
    assert lost not in scene.held.values()
    assert len(scene.held) == 6


@pytest.mark.parametrize("meanwhile", ["a GPU became free", "a pod was refused", "nothing"])
async def test_after_failed_plan_only_affected_members_are_checked_again(meanwhile):
    scene = Scene()
    scene.fill(6)
    freed, gang = scene.state.freed_count, known_gang(scene.state.pods["m0"])
    begun = scene.begin("m0")
    await steps(6)
    scene.now = 0.1
    if meanwhile == "a GPU became free":
        scene.state.drop_pod("busy0")
    elif meanwhile == "a pod was refused":
        scene.refuse("other")
    await begun
    assert scene.filter("m0") == ([], {NO_ROOM})
    assert (scene.state.freed_count > freed) == (meanwhile != "nothing"), "whoever was refused is looked at again"
    assert scene.context.gangs.may_plan(gang) == (meanwhile == "nothing")
    freed = scene.state.freed_count
    scene.now = 0.1 + 0.1 * REST_FACTOR
    assert scene.context.gangs.may_plan(gang)
    assert (scene.state.freed_count > freed) == (meanwhile != "nothing"), "and so is the gang after a rest"


async def test_member_deleted_before_its_planning_gets_no_place():
    scene = Scene()
    begun = scene.begin("m0")
    await steps(3)
    scene.state.drop_pod("m7")
    await begun
    assert "m7" not in scene.held
    assert scene.filter("m0") == ([], {"gang: 8 members must start together, and fewer with GPUs exist"})


async def test_member_bound_meanwhile_is_left_in_place():
    scene = Scene()
    begun = scene.begin("m0")
    await steps(3)
    for uid in ("m0", "m7"):
        scene.takes(uid, "n5", int(uid == "m7"), of_gang=True)
    await begun
    assert scene.held.keys() == {f"m{number}" for number in range(1, 7)}


async def test_member_placed_meanwhile_keeps_its_place():
    scene = Scene()
    begun = scene.begin("m0")
    await steps(3)
    member = scene.state.pods["m7"]
    assert not scene.context.gangs.planner.reserve_on(member, "n5", 1e9, Stage.READY)
    ready = scene.state.reservations["m7"]
    await begun
    assert scene.state.reservations["m7"] is ready
    assert scene.filter("m0")[0]
    assert scene.state.reservations["m7"] is ready


async def test_two_gangs_are_planned_one_after_the_other():
    scene = Scene()
    others = {contract.ANNOTATION_GANG: "other", contract.ANNOTATION_GANG_MIN: "8"}
    first, scene.gang = scene.gang, others
    for number in range(8):
        scene.member(f"o{number}")
    second = scene.begin("o0")
    scene.gang = first
    begun = scene.begin("m0")
    await asyncio.gather(second, begun)
    assert {uid[0] for uid in scene.held} == {"o"}
    assert len(scene.held) == 8


@pytest.mark.parametrize("minimum", [1, SMALL_GANG])
async def test_a_small_gang_is_left_to_filter(minimum, plans):
    scene = Scene(minimum)
    await plan_ahead(scene.context, wire.decode_args(scene.body("m0")))
    assert plans == []
    assert scene.filter("m0")[0]


async def test_pod_is_not_read_when_no_pod_is_in_gang():
    scene = Scene(0)
    await plan_ahead(scene.context, wire.CallArgs(msgspec.Raw(b"not JSON"), None, b"null"))


async def test_node_lost_meanwhile_holds_no_member():
    scene = Scene()
    begun = scene.begin("m0")
    await steps(6)
    lost = next(iter(scene.held.values()))
    scene.state.set_gpu_node(make_node(lost, 2, cordoned=True))
    await begun
    (node,) = scene.filter("m0")[0]
    assert node != lost


class Work:
    """So many pieces, and what happened in which order."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.done: list[str] = []

    def prepare(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.done.append("piece")
        return True

    async def others(self, turns: int) -> None:
        for _ in range(turns):
            self.done.append("other")
            await asyncio.sleep(0)


async def test_a_piece_at_a_time_is_done_between_what_others_do():
    work = Work(3)
    IdleWorker(work.prepare).wake()
    await work.others(5)
    assert work.done == ["other", "piece", "other", "piece", "other", "piece", "other", "other"]


async def test_calls_that_follow_each_other_at_once_make_one_round():
    work = Work(2)
    worker = IdleWorker(work.prepare)
    for _ in range(3):
        worker.wake()
    await work.others(1)
    assert work.done == ["other", "piece"]


async def test_call_after_completion_starts_again():
    work = Work(1)
    worker = IdleWorker(work.prepare)
    worker.wake()
    await work.others(3)
    work.left = 1
    worker.wake()
    await work.others(3)
    assert work.done.count("piece") == 2
