"""Who counts for a gang, and what a gang that waits for room costs the others."""

import json
from dataclasses import replace

import msgspec
import pytest

from proto import contract
from proto.model import Policy
from scheduler_plugin.__main__ import decode_pod
from scheduler_plugin.core.gang_plan import Planner
from scheduler_plugin.core.journal import Rules
from scheduler_plugin.core.replay import recorded, replay
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.gang import REST_FACTOR, gang_asked
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share

RULES = Rules(Policy.FRAG, DEFAULT_WEIGHTS)
NO_ROOM = "gang: no room for enough members at once"
WHOLE = {"vgpu": "1", "vgpu_memory": "1000"}


class Scene:
    """Nodes of two GPUs of 1,000 MiB, and a gang whose members take one each."""

    def __init__(self, minimum: int, *nodes: str) -> None:
        self.nodes = nodes
        self.now = 0.0
        self.state = ClusterState()
        for node in nodes:
            self.state.set_gpu_node(make_node(node, 2))
        self.desk = Desk(self.state, Shapes(self.state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: self.now)
        self.gang = {contract.ANNOTATION_GANG: "train", contract.ANNOTATION_GANG_MIN: str(minimum)}

    def pod(self, uid: str, mib: int = 1000) -> dict:
        """Write down a member as the API has it."""
        return pod_object(f"pod-{uid}", uid=uid, annotations=self.gang, vgpu="1", vgpu_memory=str(mib))

    def member(self, uid: str, mib: int = 1000, *, gated: bool = False) -> None:
        pod = self.pod(uid, mib)
        if gated:
            pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
        self.state.set_pod(decode_pod(msgspec.Raw(json.dumps(pod).encode())))

    def takes(self, uid: str, node: str, minor: int, *, of_gang: bool = False) -> None:
        """Have a GPU taken by a pod, whole."""
        shares = {"main": [make_share(node, minor, 1000)]}
        self.state.set_pod(make_pod(uid, node=node, shares=shares, annotations=self.gang if of_gang else None, **WHOLE))

    def ends(self, uid: str) -> None:
        """Ask a pod to end: it goes on in its grace period."""
        pod = self.state.pods[uid]
        self.state.set_pod(replace(pod, deletion_requested=True, ends_by=30.0, gpu=replace(pod.gpu, deletion_requested=True)))

    def filter(self, uid: str, *nodes: str, mib: int = 1000) -> tuple[list[str], set[str]]:
        """Ask where a member can go; return the nodes, and why not on the others. It is decided the same way again from the record."""
        body = {"Pod": self.pod(uid, mib), "NodeNames": nodes or self.nodes}
        answer = json.loads(filter_nodes(self.desk, json.dumps(body).encode(), self.now))
        assert replay(recorded(self.desk.decisions.recorded[uid], RULES)).differences == ()
        return answer["NodeNames"], {*answer["FailedNodes"].values(), *answer["FailedAndUnresolvableNodes"].values()}


def test_a_gang_that_is_restarted_waits_for_room_for_all_while_its_former_members_end():
    scene = Scene(4, "n1", "n2", "n3")
    for number in range(4):
        scene.takes(f"old{number}", ("n1", "n2")[number // 2], number % 2, of_gang=True)
        scene.ends(f"old{number}")
    for number in range(4):
        scene.member(f"new{number}")
    assert scene.filter("new0") == ([], {NO_ROOM})
    for number in range(2):
        scene.state.drop_pod(f"old{number}")
    assert scene.filter("new0")[0]
    assert len(scene.state.reservations) == 4


def test_a_member_in_the_place_of_one_that_ends_joins_the_gang_that_runs():
    scene = Scene(3, "n1", "n2")
    for number in range(3):
        scene.takes(f"old{number}", ("n1", "n2")[number // 2], number % 2, of_gang=True)
    scene.ends("old0")
    scene.member("new")
    assert scene.filter("new")[0] == ["n2"]


def test_members_that_end_are_not_enough_to_start_with():
    scene = Scene(2, "n1", "n2")
    scene.takes("old", "n1", 0, of_gang=True)
    scene.ends("old")
    scene.member("new")
    assert scene.filter("new") == ([], {"gang: 2 members must start together, fewer exist"})


def test_a_member_that_scheduling_gates_hold_back_counts_once_they_are_gone():
    scene = Scene(2, "n1")
    scene.member("m0")
    scene.member("m1", gated=True)
    assert scene.filter("m0") == ([], {"gang: 2 members must start together, scheduling gates hold back 1"})
    assert not scene.state.reservations
    gang, freed = gang_asked(scene.state.pods["m0"]), scene.state.freed_count
    assert not scene.desk.gangs.may_plan(gang)
    scene.member("m1")
    assert scene.state.freed_count == freed + 1, "those that wait are looked at again"
    assert scene.desk.gangs.may_plan(gang)
    assert scene.filter("m0")[0] == ["n1"]
    assert scene.state.reservations.keys() == {"m0", "m1"}


def test_gates_of_fewer_members_than_are_lacking_are_not_named():
    scene = Scene(3, "n1")
    scene.member("m0")
    scene.member("m1", gated=True)
    assert scene.filter("m0") == ([], {"gang: 3 members must start together, fewer exist"})


def test_a_member_that_is_asked_about_before_it_is_seen_without_gates_counts():
    scene = Scene(2, "n1")
    scene.member("m0")
    scene.member("m1", gated=True)
    assert scene.filter("m1")[0] == ["n1"]
    assert scene.state.reservations.keys() == {"m0", "m1"}


@pytest.fixture
def plans(monkeypatch):
    """Who asked for each plan, and how long plans take."""
    seen, expect_all = Plans(), Planner.expect_all

    def note(planner, members, allowed, expires_at):
        if seen.scene is not None and planner.state is seen.scene.state:
            seen.asked.append(members[0].uid)
            seen.scene.now += seen.seconds
        return expect_all(planner, members, allowed, expires_at)

    monkeypatch.setattr(Planner, "expect_all", note)
    return seen


class Plans:
    def __init__(self) -> None:
        self.scene: Scene | None = None
        self.seconds = 0.0
        self.asked: list[str] = []

    def of(self, scene: Scene) -> Scene:
        self.scene = scene
        return scene


def waiting_gang(minimum: int = 4, members: int = 6) -> Scene:
    """Two of four GPUs are taken, and all members of a gang wait."""
    scene = Scene(minimum, "n1", "n2")
    for minor in (0, 1):
        scene.takes(f"busy{minor}", "n1", minor)
    for number in range(members):
        scene.member(f"m{number}")
    return scene


def test_what_was_planned_in_vain_is_not_planned_again_for_another_member_before_something_is_freed(plans):
    scene = plans.of(waiting_gang())
    for number in (0, 1, 5, 0):
        assert scene.filter(f"m{number}") == ([], {NO_ROOM})
    assert plans.asked == ["m0"]
    scene.state.drop_pod("busy0")
    assert scene.filter("m3") == ([], {NO_ROOM})
    assert plans.asked == ["m0", "m3"]
    scene.state.drop_pod("busy1")
    assert scene.filter("m5")[0]
    assert plans.asked == ["m0", "m3", "m5"]


def test_a_member_that_may_use_other_nodes_or_asks_for_less_is_planned_by_itself(plans):
    scene = plans.of(waiting_gang())
    assert scene.filter("m0", "n2") == ([], {NO_ROOM})
    scene.filter("m1", "n1", "n2")
    assert plans.asked == ["m0", "m1"]
    scene.member("m2", 100)
    scene.filter("m2", mib=100)
    assert plans.asked == ["m0", "m1", "m2"]


def test_a_gang_whose_plan_took_long_rests_and_is_then_tried_again(plans):
    scene, plans.seconds = plans.of(waiting_gang()), 1.0
    assert scene.filter("m0") == ([], {NO_ROOM})
    for minor in (0, 1):
        scene.state.drop_pod(f"busy{minor}")
        assert scene.filter("m1") == ([], {NO_ROOM})
    assert plans.asked == ["m0"]
    freed, gang = scene.state.freed_count, gang_asked(scene.state.pods["m0"])
    assert not scene.desk.gangs.may_plan(gang)
    scene.now += REST_FACTOR - 0.1
    scene.desk.gangs.expire()
    assert scene.state.freed_count == freed
    scene.now += 0.1
    scene.desk.gangs.expire()
    assert scene.state.freed_count == freed + 1, "those that wait are looked at again"
    assert scene.desk.gangs.may_plan(gang)
    assert scene.filter("m2")[0]
