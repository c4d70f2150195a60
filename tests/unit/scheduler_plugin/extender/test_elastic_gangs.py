# SPDX-License-Identifier: Apache-2.0
"""Gangs with more members than they need: how many run, and that the extra ones end first."""

import asyncio
from dataclasses import replace
from math import inf
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.gang import gang_of
from scheduler_plugin.core.cluster.state import Stage
from scheduler_plugin.extender import gang as gang_module
from scheduler_plugin.extender.preempt import plan_eviction
from tests.unit.scheduler_plugin.builders import known_gang, make_pod
from tests.unit.scheduler_plugin.extender.test_gang import WHOLE, Scene


class Elastic(Scene):
    """A gang with a minimum of 2 and a maximum."""

    def __init__(self, maximum: int, *nodes: str) -> None:
        super().__init__(2, *nodes)
        self.gang |= {contract.ANNOTATION_GANG_MAX: str(maximum)}

    async def start(self, uid: str) -> str:
        """Filter a member and begin its binding; return why it is not bound."""
        nodes, reasons = self.filter(uid)
        if not nodes:
            return "; ".join(reasons)
        pod = self.state.pods[uid]
        if not (answer := await self.context.gangs.admit(pod, known_gang(pod), nodes[0])):
            self.context.gangs.planner.reserve_on(pod, nodes[0], inf, Stage.BINDING)
        return answer


async def started(scene: Elastic, count: int) -> list[str]:
    """Let members come one after the other; return the answers for each."""
    for number in range(count):
        scene.member(f"m{number}")
        scene.filter(f"m{number}")
    answers = await asyncio.gather(*(scene.start(f"m{number}") for number in range(count)))
    for number, answer in enumerate(answers):
        if not answer:
            node = scene.state.reservations[f"m{number}"].node
            minor = sum(pod.node_name == node for pod in scene.state.pods.values())
            scene.takes(f"m{number}", node, minor, of_gang=True)
    return answers


async def test_gang_starts_with_as_many_as_have_room():
    scene = Elastic(6, "n1", "n2")
    assert await started(scene, 4) == [""] * 4
    scene.member("m4")
    assert scene.filter("m4")[0] == []


async def test_no_more_members_than_maximum_run():
    scene = Elastic(3, "n1", "n2", "n3")
    answers = await started(scene, 5)
    assert answers.count("") == 3
    full = scene.state.pods[f"m{next(number for number, answer in enumerate(answers) if answer)}"]
    scene.state.release(full.uid)
    assert scene.filter(full.uid) == ([], {"gang: 3 members run, and no more may"})
    assert scene.context.gangs.why(full, known_gang(full)) == "gang: 3 members run, and no more may"


@given(st.integers(2, 4), st.lists(st.tuples(st.sampled_from(["comes", "comes", "ends"]), st.integers(0, 7)), max_size=14))
def test_at_most_the_maximum_runs_while_members_come_and_end(maximum, steps):
    async def play() -> None:
        scene, waiting, running = Elastic(maximum, "n1", "n2", "n3"), list[str](), list[str]()
        for number, (step, which) in enumerate(steps):
            if step == "comes":
                scene.member(f"m{number}")
                waiting.append(f"m{number}")
            elif running:
                scene.state.drop_pod(running.pop(which % len(running)))
            for uid in waiting:
                scene.filter(uid)
            answers = await asyncio.gather(*map(scene.start, waiting))
            started = [uid for uid, answer in zip(waiting, answers, strict=True) if not answer]
            assert len(running) + len(started) <= maximum
            assert not started or len(running) + len(started) >= 2
            assert not waiting or started or len(running) == maximum or len(running) + len(waiting) < 2
            running, waiting = [*running, *started], [uid for uid in waiting if uid not in started]

    with mock.patch.object(gang_module, "WAIT_SECONDS", 0.01):
        asyncio.run(play())


async def test_member_joins_when_another_has_ended():
    scene = Elastic(2, "n1", "n2")
    await started(scene, 2)
    scene.member("new")
    assert scene.filter("new") == ([], {"gang: 2 members run, and no more may"})
    scene.state.drop_pod("m0")
    assert scene.filter("new")[0]


def test_no_pod_ends_for_member_beyond_maximum():
    scene = Elastic(2, "n1", "n2")
    for number in range(2):
        scene.takes(f"m{number}", "n1", number, of_gang=True)
        scene.takes(f"other{number}", "n2", number)
    scene.member("new")
    assert scene.helped("new") == set()


@pytest.mark.parametrize("running", [2, 3, 4])
def test_extra_member_ends_before_equal_pods(running):
    scene = Elastic(6, "n1", "n2", "n3")
    for number in range(running):
        scene.takes(f"m{number}", ("n1", "n2")[number // 2], number % 2, of_gang=True)
    scene.takes("alone0", "n3", 0)
    scene.takes("alone1", "n3", 1)
    for number in range(running, 4):
        scene.takes(f"keep{number}", "n2", number % 2)
        scene.state.set_pod(replace(scene.state.pods[f"keep{number}"], priority=200))
    important = make_pod("important", priority=100, **WHOLE)
    scene.state.set_pod(important)
    plans = [plan for node in scene.nodes if (plan := plan_eviction(scene.context, important, node, ())) is not None]
    cheapest = min(plans, key=lambda plan: plan.cost).ended
    assert len(cheapest) == 1
    assert next(iter(cheapest)).startswith("m" if running > 2 else "alone")


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({contract.ANNOTATION_GANG_MAX: "1"}, "from 2 to 4096"),
        ({contract.ANNOTATION_GANG_MAX: "many"}, "from 2 to 4096"),
        ({contract.ANNOTATION_GANG_RESTART: "yes"}, "expected whole"),
    ],
)
def test_wrong_value_is_refused(annotations, says):
    with pytest.raises(RequestError, match=says):
        gang_of("team", {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2", **annotations})


@pytest.mark.parametrize("name", [contract.ANNOTATION_GANG_MAX, contract.ANNOTATION_GANG_RESTART])
def test_annotation_of_gangs_without_gang_is_refused(name):
    with pytest.raises(RequestError, match="pods of a gang"):
        gang_of("team", {name: "2"})


# --- roles ---------------------------------------------------------------------------------------------------------------


class Training(Elastic):
    """One master and two workers are the minimum, and five members the maximum."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(5, *nodes)
        self.gang[contract.ANNOTATION_GANG_MIN] = "3"

    def pod(self, uid: str, mib: int = 1000) -> dict:
        self.become(uid)
        return super().pod(uid, mib)

    def become(self, uid: str, minimum: int | None = None) -> None:
        """Write the annotations of a member; the first letter of its name says its role."""
        role, usual = ("master", 1) if uid.startswith("m") else ("worker", 2)
        own = {contract.ANNOTATION_GANG_ROLE: role, contract.ANNOTATION_GANG_ROLE_MIN: str(usual if minimum is None else minimum)}
        self.gang = self.gang | own

    def run(self, uid: str, node: str, minor: int) -> None:
        self.become(uid)
        self.takes(uid, node, minor, of_gang=True)


def test_workers_do_not_start_in_place_of_the_master():
    scene = Training("n1", "n2", "n3")
    for number in range(4):
        scene.member(f"w{number}")
    sentence = "gang: 3 members must start together, and no role other than worker (2) has members"
    assert scene.filter("w0") == ([], {sentence})
    assert not scene.context.gangs.may_plan(known_gang(scene.state.pods["w0"]))
    scene.member("master")
    assert scene.context.gangs.may_plan(known_gang(scene.state.pods["w0"]))
    assert scene.filter("w0")[0]
    assert len(scene.state.reservations) == 3
    assert "master" in scene.state.reservations


async def test_member_beyond_its_role_waits_until_the_gang_has_started():
    scene = Training("n1", "n2", "n3")
    for uid in ("master", "w0", "w1", "w2"):
        scene.member(uid)
    nodes = {uid: scene.filter(uid)[0][0] for uid in ("w0", "w1", "master")}
    with mock.patch.object(gang_module, "WAIT_SECONDS", 0.01):
        for uid, lacking in (("w0", 2), ("w1", 1)):
            pod = scene.state.pods[uid]
            answer = await scene.context.gangs.admit(pod, known_gang(pod), nodes[uid])
            assert answer == f"gang train waits for {lacking} more of its members"
        after = "gang: role worker has its minimum of 2 without this member, which starts after the gang"
        assert scene.filter("w2") == ([], {after})
        assert scene.context.gangs.needed_with(scene.state.pods["w2"], known_gang(scene.state.pods["w2"])) == []
        freed_count = scene.state.freed_count
        assert not await scene.start("master")
    assert scene.state.freed_count > freed_count, "the others are tried again"
    assert scene.filter("w2")[0]


async def test_members_that_state_different_minima_of_a_role_do_not_start():
    scene = Training("n1", "n2", "n3")
    for uid in ("w0", "w1", "master"):
        scene.member(uid)
    pod = scene.state.pods["w1"]
    annotations = {**pod.gpu.annotations, contract.ANNOTATION_GANG_ROLE_MIN: "1"}
    scene.state.set_pod(replace(pod, gpu=replace(pod.gpu, annotations=annotations)))
    sentence = "gang: members of role worker state 1 and 2 as aliquot.dev/gang-role-min: give all of them the same"
    assert scene.filter("w0") == ([], {sentence})
    assert await scene.context.gangs.admit(scene.state.pods["w0"], known_gang(scene.state.pods["w0"]), "n1") == sentence
    scene.state.set_pod(pod)
    assert scene.filter("w0")[0]


def test_member_that_contradicts_a_running_gang_takes_no_room_and_says_why():
    scene = Training("n1", "n2", "n3")
    for number, uid in enumerate(("master", "w0", "w1")):
        scene.run(uid, ("n1", "n1", "n2")[number], number % 2)
    scene.member("w2")
    pod = scene.state.pods["w2"]
    annotations = {**pod.gpu.annotations, contract.ANNOTATION_GANG_ROLE_MIN: "1"}
    scene.state.set_pod(replace(pod, gpu=replace(pod.gpu, annotations=annotations)))
    sentence = "gang: members of role worker state 1 and 2 as aliquot.dev/gang-role-min: give all of them the same"
    assert scene.filter("w2") == ([], {sentence})
    assert "w2" not in scene.state.reservations
    scene.state.set_pod(pod)
    assert scene.filter("w2")[0]


def test_extra_worker_ends_before_the_master_and_no_worker_of_the_minimum():
    scene = Training("n1", "n2")
    for number, uid in enumerate(("master", "w0", "w1", "w2")):
        scene.run(uid, ("n1", "n2")[number // 2], number % 2)
    important = make_pod("important", priority=100, **WHOLE)
    scene.state.set_pod(important)
    assert [plan_eviction(scene.context, important, node, ()).ended for node in scene.nodes] == [frozenset({"w0"}), frozenset({"w1"})]
    scene.state.drop_pod("w2")
    ended = plan_eviction(scene.context, important, "n1", ()).ended
    assert ended == frozenset({"master", "w0", "w1"}), "the whole gang, also where its master is not on the node"
