# SPDX-License-Identifier: Apache-2.0
"""Who counts for a gang, and what a gang that waits for room costs the others."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from aliquot import contract
from aliquot.contract.model import Policy
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.pods import STUCK_SECONDS, SUCCEEDED, PodFacts
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.core.explain.replay import recorded, replay
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.extender.gang_backoff import FORGET_SECONDS, REST_FACTOR, SETTLE_SECONDS
from scheduler_plugin.extender.preempt import LAST_SECONDS, MAX_GANG_NODES, choose_victims, reserve_room
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, known_gang, make_context, make_node, make_pod, make_share

RULES = Rules(Policy.FRAG, DEFAULT_WEIGHTS)
NO_ROOM = "gang: no room for enough members at once"
WHOLE: dict[str, Any] = {"vgpu": "1", "vgpu_memory": "1000"}


class Scene:
    """Nodes of two GPUs of 1,000 MiB, and a gang with members that take one each."""

    def __init__(self, minimum: int, *nodes: str) -> None:
        self.nodes = nodes
        self.priority = 100
        self.now = 0.0
        self.state = ClusterState()
        for node in nodes:
            self.state.set_gpu_node(make_node(node, 2))
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now)
        self.gang = {contract.ANNOTATION_GANG: "train", contract.ANNOTATION_GANG_MIN: str(minimum)}

    def pod(self, uid: str, mib: int = 1000) -> dict:
        """Write down a member as the API has it."""
        pod = pod_object(f"pod-{uid}", uid=uid, annotations=self.gang, vgpu="1", vgpu_memory=str(mib))
        pod["spec"]["priority"] = self.priority
        return pod

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

    def succeeds(self, uid: str) -> None:
        """Have the API report of a pod that all its containers ended well."""
        pod = self.state.pods[uid]
        self.state.drop_pod(uid)
        self.state.set_pod(replace(pod, active=False, gpu=replace(pod.gpu, phase=SUCCEEDED)))

    def filter(self, uid: str, *nodes: str, mib: int = 1000) -> tuple[list[str], set[str]]:
        """Ask where a member can go; return the nodes, and why not on the others. It is decided the same way again from the record."""
        answer = self.answer(uid, *nodes, mib=mib)
        return answer["NodeNames"], {*answer["FailedNodes"].values(), *answer["FailedAndUnresolvableNodes"].values()}

    def answer(self, uid: str, *nodes: str, mib: int = 1000) -> dict:
        body = {"Pod": self.pod(uid, mib), "NodeNames": nodes or self.nodes}
        answer = json.loads(filter_body(self.context, json.dumps(body).encode(), self.now))
        assert replay(recorded(self.context.decisions.recorded[uid], RULES)).differences == ()
        return answer

    def helped(self, uid: str) -> set[str]:
        """Ask where a member can go, and nowhere it can; return the nodes where kube-scheduler may look for pods to end."""
        answer = self.answer(uid)
        assert answer["NodeNames"] == []
        return set(answer["FailedNodes"])

    async def preempt(self, uid: str, **proposed: list[str]) -> dict[str, set[str]]:
        """Ask who ends for a member on nodes with these victims; return the victims by node."""
        meta = {node: {"Pods": [{"UID": victim} for victim in victims], "NumPDBViolations": 0} for node, victims in proposed.items()}
        body = {"Pod": self.pod(uid), "NodeNameToMetaVictims": meta}
        answer = json.loads(await choose_victims(self.context, json.dumps(body).encode()))
        return {node: {pod["UID"] for pod in victims["Pods"]} for node, victims in answer["NodeNameToMetaVictims"].items()}


def test_restarted_gang_waits_for_room_for_all_while_old_members_end():
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


def test_replacement_of_ending_member_joins_running_gang():
    scene = Scene(3, "n1", "n2")
    for number in range(3):
        scene.takes(f"old{number}", ("n1", "n2")[number // 2], number % 2, of_gang=True)
    scene.ends("old0")
    scene.member("new")
    assert scene.filter("new")[0] == ["n2"]


def running_gang() -> Scene:
    """Four members run on four GPUs."""
    scene = Scene(4, "n1", "n2", "n3")
    for number in range(4):
        scene.takes(f"old{number}", ("n1", "n2")[number // 2], number % 2, of_gang=True)
    return scene


def test_replacement_of_failed_member_joins_though_another_has_succeeded():
    scene = running_gang()
    scene.state.drop_pod("old2")
    scene.state.drop_pod("old0")
    scene.member("new")
    assert scene.filter("new") == ([], {"gang: 4 members must start together, and fewer with GPUs exist"})
    scene.takes("old0", "n1", 0, of_gang=True)
    freed = scene.state.freed_count
    scene.succeeds("old0")
    assert scene.state.freed_count > freed, "those that wait are looked at again"
    assert scene.filter("new")[0]
    for number in (1, 3):
        scene.succeeds(f"old{number}")
    scene.state.set_pod(replace(scene.state.pods["new"], labels=(("app", "a"),)))
    assert scene.filter("new")[0], "all others have succeeded"


@pytest.mark.parametrize("how", ["asked to end", "gone"])
def test_members_that_succeeded_do_not_count_for_a_gang_that_is_restarted(how):
    scene = running_gang()
    scene.succeeds("old0")
    for number in range(1, 4):
        if how == "asked to end":
            scene.ends(f"old{number}")
        else:
            scene.state.drop_pod(f"old{number}")
    for number in range(3):
        scene.member(f"new{number}")
    assert scene.filter("new0") == ([], {"gang: 4 members must start together, and fewer with GPUs exist"})


def test_what_succeeded_is_part_of_a_picture_of_the_state(monkeypatch):
    scene = running_gang()
    scene.state.drop_pod("old2")
    scene.succeeds("old0")
    scene.member("new")
    monkeypatch.setattr("scheduler_plugin.core.cluster.state.MAX_EVENTS", 1)
    scene.member("other", 100)
    assert not any(event.pod is not None and event.pod.uid == "old0" for event in scene.state.moment().part.events)
    assert scene.filter("new")[0]


def test_members_that_end_are_not_enough_to_start_with():
    scene = Scene(2, "n1", "n2")
    scene.takes("old", "n1", 0, of_gang=True)
    scene.ends("old")
    scene.member("new")
    assert scene.filter("new") == ([], {"gang: 2 members must start together, and fewer with GPUs exist"})


def test_gated_member_counts_once_its_gates_are_removed():
    scene = Scene(2, "n1")
    scene.member("m0")
    scene.member("m1", gated=True)
    assert scene.filter("m0") == ([], {"gang: 2 members must start together, and scheduling gates hold back 1"})
    assert not scene.state.reservations
    gang, freed = known_gang(scene.state.pods["m0"]), scene.state.freed_count
    assert not scene.context.gangs.may_plan(gang)
    scene.member("m1")
    assert scene.state.freed_count == freed + 1, "those that wait are looked at again"
    assert scene.context.gangs.may_plan(gang)
    assert scene.filter("m0")[0] == ["n1"]
    assert scene.state.reservations.keys() == {"m0", "m1"}


def test_gates_of_fewer_members_than_are_lacking_are_not_named():
    scene = Scene(3, "n1")
    scene.member("m0")
    scene.member("m1", gated=True)
    assert scene.filter("m0") == ([], {"gang: 3 members must start together, and fewer with GPUs exist"})


def test_member_queried_before_it_is_seen_ungated_counts():
    scene = Scene(2, "n1")
    scene.member("m0")
    scene.member("m1", gated=True)
    assert scene.filter("m1")[0] == ["n1"]
    assert scene.state.reservations.keys() == {"m0", "m1"}


@pytest.fixture
def plans(monkeypatch):
    """The caller of each plan, the pods for which plans were tried in search of pods to end, and how long each takes."""
    seen, expecting, trying = Plans(), Planner.expecting, Planner.trying

    def note_trying(planner, members):
        seen.tried.append(members[0].uid)
        seen.scene.now += seen.seconds
        return trying(planner, members)

    def note(planner, members, allowed, expires_at):
        if seen.scene is not None and planner.state is seen.scene.state:
            seen.asked.append(members[0].uid)
            seen.scene.now += seen.seconds
        return expecting(planner, members, allowed, expires_at)

    monkeypatch.setattr(Planner, "expecting", note)
    monkeypatch.setattr(Planner, "trying", note_trying)
    return seen


class Plans:
    def __init__(self) -> None:
        self.scene: Scene | None = None
        self.seconds = 0.0
        self.asked: list[str] = []
        self.tried: list[str] = []

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


def test_failed_plan_is_not_repeated_for_other_members_until_room_is_freed(plans):
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


def test_member_with_other_nodes_or_smaller_request_is_planned_separately(plans):
    scene = plans.of(waiting_gang())
    assert scene.filter("m0", "n2") == ([], {NO_ROOM})
    scene.filter("m1", "n1", "n2")
    assert plans.asked == ["m0", "m1"]
    scene.member("m2", 100)
    scene.filter("m2", mib=100)
    assert plans.asked == ["m0", "m1", "m2"]


def test_gang_with_long_planning_pauses_and_is_then_retried(plans):
    scene, plans.seconds = plans.of(waiting_gang()), 1.0
    assert scene.filter("m0") == ([], {NO_ROOM})
    for minor in (0, 1):
        scene.state.drop_pod(f"busy{minor}")
        assert scene.filter("m1") == ([], {NO_ROOM})
    assert plans.asked == ["m0"]
    freed, gang = scene.state.freed_count, known_gang(scene.state.pods["m0"])
    assert not scene.context.gangs.may_plan(gang)
    scene.now += REST_FACTOR - 0.1
    scene.context.gangs.expire()
    assert scene.state.freed_count == freed
    scene.now += 0.1
    scene.context.gangs.expire()
    assert scene.state.freed_count == freed + 1, "those that wait are looked at again"
    assert scene.context.gangs.may_plan(gang)
    assert scene.filter("m2")[0]


async def test_victims_for_gang_are_searched_once_until_room_is_freed(plans):
    scene = plans.of(waiting_gang(minimum=5))
    assert scene.helped("m0") == {"n1", "n2"}
    assert await scene.preempt("m0", n1=["busy0"]) == {}
    tried = len(plans.tried)
    assert tried > 0
    for uid in ("m1", "m2", "m0"):
        assert scene.helped(uid) == {"n2"}, "nothing was proposed there"
        assert await scene.preempt(uid, n1=["busy0"]) == {}
    assert len(plans.tried) == tried
    scene.state.drop_pod("busy0")
    assert scene.helped("m3") == {"n1", "n2"}
    assert await scene.preempt("m3", n1=["busy1"]) == {}
    assert len(plans.tried) > tried


def starting(scene: Scene, *uids: str) -> list[PodFacts]:
    """Take bound pods back to where they were before their bindings were reported; return them as bound."""
    bound = [scene.state.pods[uid] for uid in uids]
    for pod in bound:
        scene.state.drop_pod(pod.uid)
        scene.state.set_pod(replace(pod, node_name="", gpu=replace(pod.gpu, annotations={})))
        assert not scene.context.gangs.planner.reserve_on(scene.state.pods[pod.uid], pod.node_name, 1000.0, Stage.STARTING)
    return bound


async def test_pods_starting_during_victim_search_are_found_once_bound():
    scene = two_full_nodes()
    bound = starting(scene, "n1-0", "n1-1", "n2-0", "n2-1")
    assert await scene.preempt("m0", n1=[], n2=[]) == {}
    assert scene.helped("m0") == set()
    freed = scene.state.freed_count
    for pod in bound[:2]:
        scene.state.set_pod(pod)
    assert scene.state.freed_count == freed
    assert scene.helped("m1") == {"n1"}
    assert await scene.preempt("m1", n1=[]) == {"n1": {"n1-0", "n1-1"}}


def bind_both(scene, bound):
    for pod in bound[:2]:
        scene.state.set_pod(pod)


async def test_failed_search_ignores_pod_bound_during_search_of_next_node(monkeypatch):
    scene = two_full_nodes()
    bound = starting(scene, "n1-0", "n1-1", "n2-0", "n2-1")
    tries = iter((lambda: None, lambda: bind_both(scene, bound)))

    async def others_work(_seconds: float) -> None:
        next(tries)()

    with monkeypatch.context() as patched:
        patched.setattr("scheduler_plugin.extender.preempt.asyncio.sleep", others_work)
        assert await scene.preempt("m0", n1=[], n2=[]) == {}
    assert scene.helped("m0") == {"n1"}


async def test_failed_search_is_forgotten_after_while():
    scene = waiting_gang(minimum=5)
    assert await scene.preempt("m0", n1=["busy0"]) == {}
    scene.now += FORGET_SECONDS - 0.1
    assert scene.helped("m0") == {"n2"}
    scene.now += 0.1
    assert scene.helped("m0") == {"n1", "n2"}


async def test_failed_search_is_repeated_for_more_important_member():
    scene = two_full_nodes()
    for uid in scene.state.pods.keys() - {"m0", "m1", "m2"}:
        scene.state.set_pod(replace(scene.state.pods[uid], priority=100))
    assert await scene.preempt("m0", n1=[]) == {}
    assert scene.helped("m1") == {"n2"}
    scene.priority = 101
    assert scene.helped("m1") == {"n1", "n2"}


def many_nodes_of_which_the_last_helps() -> Scene:
    """A gang of two that needs one of twelve full nodes; on all but the last the end of only one pod could make room."""
    scene = Scene(2, *(f"n{number:02}" for number in range(1, 13)))
    for node in scene.nodes:
        for minor in (0, 1):
            scene.takes(f"{node}-{minor}", node, minor)
        if node != "n12":
            scene.state.set_pod(replace(scene.state.pods[f"{node}-0"], priority=1000))
    for number in range(2):
        scene.member(f"m{number}")
    return scene


async def test_nodes_beyond_the_first_few_are_searched_with_the_next_try():
    scene = many_nodes_of_which_the_last_helps()
    proposed = {node: [f"{node}-1"] for node in scene.nodes}
    assert await scene.preempt("m0", **proposed) == {}
    assert scene.helped("m1") == set(scene.nodes[MAX_GANG_NODES:])
    assert await scene.preempt("m1", **proposed) == {"n12": {"n12-0", "n12-1"}}


async def test_nodes_skipped_for_time_are_searched_on_next_tries_only(plans):
    scene = plans.of(many_nodes_of_which_the_last_helps())
    proposed = {node: [f"{node}-1"] for node in scene.nodes}
    scene.helped("m0")
    answers = []
    for _ in range(4):
        plans.seconds = 1.0
        answers.append(await scene.preempt("m0", **proposed))
        plans.seconds = 0.0
        freed = scene.state.freed_count
        scene.now += 100.0
        scene.context.gangs.expire()
        assert answers[-1] or scene.state.freed_count == freed + 1, "those that wait are looked at again"
    assert answers == [{}, {}, {}, {"n12": {"n12-0", "n12-1"}}]


async def test_a_search_that_takes_too_long_looks_at_one_node_at_least(plans):
    scene = plans.of(many_nodes_of_which_the_last_helps())
    scene.helped("m0")
    plans.seconds = LAST_SECONDS + 1.0
    assert await scene.preempt("m0", n01=["n01-1"], n02=["n02-1"]) == {}
    plans.seconds = 0.0
    scene.now += 100.0
    assert scene.helped("m0") == {*scene.nodes} - {"n01"}


async def test_nodes_that_are_too_small_for_a_gang_are_searched_once():
    scene = two_full_nodes()
    scene.nodes = (*scene.nodes, "small")
    scene.state.set_gpu_node(make_node("small", 1))
    scene.takes("small-0", "small", 0)
    assert await scene.preempt("m0", small=["small-0"]) == {}
    assert scene.helped("m1") == {"n1", "n2"}


async def test_after_long_failed_search_gang_pauses_before_kube_scheduler_may_retry(plans):
    scene = plans.of(waiting_gang(minimum=5))
    scene.filter("m0")
    plans.seconds = 1.0
    assert await scene.preempt("m0", n1=["busy0"]) == {}
    tried, lasted = len(plans.tried), scene.now
    plans.seconds = 0.0
    scene.state.drop_pod("busy0")
    assert scene.helped("m1") == set()
    assert await scene.preempt("m1", n1=["busy1"]) == {}
    assert len(plans.tried) == tried
    freed = scene.state.freed_count
    scene.now += REST_FACTOR * lasted
    scene.context.gangs.expire()
    assert scene.state.freed_count == freed + 1, "those that wait are looked at again"
    assert scene.helped("m1") == {"n1", "n2"}
    assert await scene.preempt("m1", n1=["busy1"]) == {}
    assert len(plans.tried) > tried


async def test_search_before_pause_is_not_repeated_if_no_room_was_freed(plans):
    scene = plans.of(waiting_gang(minimum=5))
    plans.seconds = 1.0
    scene.filter("m0")
    await scene.preempt("m0", n1=["busy0"])
    freed, rest = scene.state.freed_count, REST_FACTOR * scene.now
    plans.asked.clear()
    plans.tried.clear()
    assert scene.helped("m1") == set()
    scene.now += rest
    scene.context.gangs.expire()
    assert scene.state.freed_count == freed, "nobody was refused for the rest's sake"
    scene.filter("m2")
    assert await scene.preempt("m2", n1=["busy0"]) == {}
    assert (plans.asked, plans.tried) == ([], [])


def test_only_member_refused_because_of_pause_is_planned_after_it(plans):
    scene, plans.seconds = plans.of(waiting_gang()), 1.0
    assert scene.filter("m0", "n2") == ([], {NO_ROOM})
    freed = scene.state.freed_count
    assert scene.filter("m1", "n1", "n2") == ([], {NO_ROOM})
    scene.now += REST_FACTOR
    scene.context.gangs.expire()
    assert scene.state.freed_count == freed + 1
    scene.filter("m0", "n2")
    assert plans.asked == ["m0"]
    scene.filter("m1", "n1", "n2")
    assert plans.asked == ["m0", "m1"]


def two_full_nodes() -> Scene:
    """A gang of two that needs one of two nodes, both taken by less important pods."""
    scene = Scene(2, "n1", "n2")
    for node in scene.nodes:
        for minor in (0, 1):
            scene.takes(f"{node}-{minor}", node, minor)
    for number in range(3):
        scene.member(f"m{number}")
    return scene


async def test_shortly_after_preemption_for_member_no_pod_ends_for_another():
    scene = two_full_nodes()
    assert await scene.preempt("m0", n1=["n1-0"]) == {"n1": {"n1-0", "n1-1"}}
    assert await scene.preempt("m1", n2=["n2-0"]) == {}
    assert await scene.preempt("m0", n1=["n1-0"]) == {"n1": {"n1-0", "n1-1"}}
    scene.now += SETTLE_SECONDS
    assert await scene.preempt("m1", n2=["n2-0"]) == {"n2": {"n2-0", "n2-1"}}


@pytest.mark.parametrize("known", ["nominated", "expected"])
async def test_no_pod_ends_on_second_node_while_room_for_all_is_freed(known):
    scene = two_full_nodes()
    for minor in (0, 1):
        scene.ends(f"n1-{minor}")
    if known == "nominated":
        scene.state.set_pod(replace(scene.state.pods["m0"], nominated_node="n1"))
    else:
        assert reserve_room(scene.context, scene.state.pods["m0"], "n1", [], 30.0)
    assert await scene.preempt("m1", n2=["n2-0"]) == {}
    scene.now = 30.0 + STUCK_SECONDS
    scene.state.expire(scene.now, scene.now)
    assert await scene.preempt("m1", n2=["n2-0"]) == {"n2": {"n2-0", "n2-1"}}, "they are stuck"


async def test_ending_pods_outside_planned_places_do_not_block_preemption_for_member():
    scene = two_full_nodes()
    scene.nodes = ("n1", "n2", "n3")
    scene.state.set_gpu_node(make_node("n3", 3))
    scene.takes("ending", "n3", 2)
    scene.ends("ending")
    assert scene.filter("m0")[0] == ["n3"]
    assert {held.node for held in scene.state.reservations.values()} == {"n3"}
    assert await scene.preempt("m1", n2=["n2-0"]) == {"n2": {"n2-0"}}, "it may not use n3"


async def test_pods_end_where_what_is_ending_is_not_enough_for_all():
    scene = two_full_nodes()
    scene.ends("n1-0")
    scene.state.set_pod(replace(scene.state.pods["m0"], nominated_node="n1"))
    assert await scene.preempt("m1", n2=["n2-0"]) == {"n2": {"n2-0", "n2-1"}}
