# SPDX-License-Identifier: Apache-2.0
"""Waiting pods are retried when something changed for them, and the search for them delays no other work."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.shapes import Takers
from scheduler_plugin.extender.preempt import reserve_room
from scheduler_plugin.extender.verdicts import Verdicts
from scheduler_plugin.services.retry import FIRST_AT_ONCE, LATEST_SECONDS, MAX_EXAMINED, MAX_READ, MAX_UNDER_WAY, QUIET_SECONDS, Retry
from scheduler_plugin.services.telemetry import Telemetry
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, known_gang, make_context, make_node, make_pod, make_share, request_of


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
        self.caught_up_at = 0.0
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: started_at + self.now)
        self.api = Api()
        self.retry = Retry(self.context, cast(Any, self.api), lambda: True, lambda: self.caught_up_at, Telemetry())

    def waits(self, uid: str, **limits: Any) -> Decision:
        """Note that a pod was found to fit nowhere just now."""
        pod = make_pod(uid, **limits)
        self.state.set_pod(pod)
        return self.record(pod)

    def is_refused(self, uid: str, nodes: list[str], containers: int = 1, **limits: Any) -> None:
        """Have filter refuse a pod of containers that ask for the same on the nodes that kube-scheduler's own filters leave."""
        raw = pod_object(uid, uid=uid, **limits)
        (container,) = raw["spec"]["containers"]
        raw["spec"]["containers"] = [{**container, "name": f"c{number}"} for number in range(containers)]
        self.state.set_pod(pod_facts(msgspec.convert(raw, PodObject)))
        filter_body(self.context, msgspec.json.encode({"Pod": raw, "NodeNames": nodes}), 1.0)

    def record(self, pod: PodFacts) -> Decision:
        self.state.columns.derive()
        decision = Decision(pod, request_of(pod), 0.0, self.state.columns.change_count, 0, {})
        self.context.decisions.record(decision)
        return decision

    def plans(self, pod: PodFacts, nodes: frozenset[str]) -> bool:
        """Do as filter does for the first member of a gang; return whether the gang has a place."""
        gang, gangs = known_gang(pod), self.context.gangs
        return bool(gangs.place(pod, gang, nodes, nodes, gangs.standing_for(pod, gang, nodes)))

    async def poked(self) -> list[str]:
        """Let the loop look once; return who was tried again."""
        self.api.poked.clear()
        await self.retry.step()
        return self.api.poked


async def test_pod_is_retried_only_for_nodes_changed_since_refusal():
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
    asked, takers = [], scene.context.verdicts.shapes.takers

    def noted(shape, since):
        asked.append(since)
        return takers(shape, since)

    scene.context.verdicts.shapes.takers = noted
    scene.state.set_gpu_node(make_node("n2", 2, cordoned=True))
    before = scene.state.columns.change_count
    assert await scene.poked() == []
    scene.state.freed_count += 1
    assert await scene.poked() == []
    assert asked[1] >= before > asked[0]


async def test_each_equal_pod_is_retried_for_changes_since_its_own_refusal():
    scene = Scene()
    scene.waits("first", vgpu="2")
    scene.state.drop_pod("busy")
    later = make_pod("second", vgpu="2", priority=9)
    scene.state.set_pod(later)
    scene.record(later)  # after the change
    assert await scene.poked() == ["first"]


@pytest.mark.parametrize("pods", [20, 60])
async def test_pods_barred_from_freed_node_are_not_retried_for_it(pods):
    scene = full_scene()
    scene.state.set_gpu_node(make_node("n2", 2))
    waiting = [f"w{number}" for number in range(pods)]
    for uid in waiting:
        scene.is_refused(uid, ["n1"], vgpu="1", vgpu_memory="500")
    for number in range(5):
        scene.state.set_pod(make_pod(f"other-{number}", node="n2", shares={"main": [make_share("n2", 0, 100)]}, vgpu="1"))
        scene.state.drop_pod(f"other-{number}")
        assert await scene.poked() == []
    scene.state.drop_pod("busy")
    tried: list[str] = []
    for _ in range(3):
        tried += await scene.poked()
    assert sorted(tried) == sorted(waiting), "each once, where it may run"


async def test_pods_that_are_refused_again_wait_for_the_next_change():
    scene = full_scene()
    waiting = [f"w{number:02}" for number in range(FIRST_AT_ONCE + 8)]
    for uid in waiting:
        scene.is_refused(uid, ["n1"], vgpu="1", vgpu_memory="500")
    for end in ("busy", "busy-too"):
        scene.state.drop_pod(end)
        tried = []
        for _ in range(4):
            now = list(await scene.poked())
            tried += now
            for uid in now:  # something that is not ours to know keeps it off
                scene.record(scene.state.pods[uid])
        assert sorted(tried) == waiting


async def test_retries_start_few_and_grow_while_earlier_ones_leave_room():
    scene = Scene()
    for free in ("busy", "busy-too"):
        for number in range(450):
            scene.waits(f"w{number}", vgpu="2", vgpu_memory="20")
        scene.state.drop_pod(free)
        assert [len(await scene.poked()) for _ in range(5)] == [32, 128, 256, 34, 0]
        scene.state.set_pod(make_pod("busy-too", node="n2", shares={"main": [make_share("n2", 0, 1000)]}, vgpu="1"))


async def test_refusing_server_is_retried_with_few_pods():
    scene = Scene()
    for number in range(600):
        scene.waits(f"w{number}", vgpu="2", vgpu_memory="20")
    scene.state.drop_pod("busy")
    assert [len(await scene.poked()) for _ in range(2)] == [32, 128]

    def fail() -> None:
        raise KubeApiError("HTTP 429: too many requests")

    scene.api.before = fail
    assert await scene.poked() == []
    scene.api.before = lambda: None
    assert len(await scene.poked()) == 32


async def test_patches_under_way_are_few_at_a_time():
    scene, under_way, most = Scene(), 0, 0
    for number in range(200):
        scene.waits(f"w{number}", vgpu="2", vgpu_memory="20")

    async def annotate(*_: object) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1

    cast(Any, scene.api).annotate = annotate
    scene.state.drop_pod("busy")
    for _ in range(3):
        await scene.poked()
    assert not scene.context.decisions.waiting()
    assert most == MAX_UNDER_WAY


async def test_node_added_after_query_is_candidate_for_pod():
    scene = full_scene()
    scene.is_refused("w", ["n1"], vgpu="2", vgpu_memory="1000")
    scene.state.set_gpu_node(make_node("n3", 2))
    assert await scene.poked() == ["w"]


async def test_pods_of_several_containers_are_tried_where_they_may_run():
    scene = full_scene()
    scene.state.set_gpu_node(make_node("n2", 2))
    scene.is_refused("w", ["n1"], containers=2, vgpu="1", vgpu_memory="800")
    scene.state.set_pod(make_pod("other", node="n2", shares={"main": [make_share("n2", 0, 100)]}, vgpu="1"))
    scene.state.drop_pod("other")
    assert await scene.poked() == []
    scene.state.drop_pod("busy")
    assert await scene.poked() == []
    scene.state.drop_pod("busy-too")
    assert await scene.poked() == ["w"]


@pytest.mark.parametrize("end", ["gone", "bound"])
async def test_pod_that_ended_before_its_refusal_stops_waiting(end):
    scene = Scene(started_at=0.0)
    for uid in ("ends", "waits"):
        scene.is_refused(uid, ["n1", "n2"], vgpu="2", vgpu_memory="4000")
    if end == "gone":
        scene.state.drop_pod("ends")
    else:
        scene.state.set_pod(make_pod("ends", node="n2", shares={"main": [make_share("n2", 0, 100)]}, vgpu="1"))
    scene.is_refused("new", ["n1", "n2"], vgpu="2", vgpu_memory="4000")
    scene.state.drop_pod("new")
    new = scene.context.decisions.by_uid["new"]
    scene.context.decisions.record(replace(new, at=70.0))

    async def waiting(now: float, caught_up_at: float) -> set[str]:
        scene.now, scene.caught_up_at = now, caught_up_at
        await scene.poked()
        return {decision.pod.uid for decision in scene.context.decisions.waiting()}

    assert await waiting(60.0, 2.0) == {"ends", "waits", "new"}, "what happened since may not have been reported"
    assert await waiting(75.0, 75.0) == {"ends", "waits", "new"}, "once a minute is enough"
    assert await waiting(120.0, 76.0) == {"waits", "new"}, "it may be too new to be known"
    assert await waiting(180.0, 180.0) == {"waits"}


async def test_verbs_are_served_while_many_pod_kinds_are_checked():
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
async def test_retry_refused_by_api_is_repeated_unless_superseded(meanwhile):
    scene = Scene()
    decision = scene.waits("large", vgpu="2")
    scene.state.drop_pod("busy")

    def fail() -> None:
        if meanwhile == "gone":
            scene.state.drop_pod("large")
        if meanwhile == "refused again":
            scene.context.decisions.record(replace(decision, at=9.0))
        raise KubeApiError("no answer")

    scene.api.before = fail
    assert await scene.poked() == []
    known = scene.context.decisions.by_uid.get("large")
    assert (None if known is None else known.at) == {"gone": None, "refused again": 9.0, "nothing": 0.0}[meanwhile]


async def test_members_of_gang_with_place_are_retried_though_their_room_seems_unfit():
    scene = Scene()
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(uid, annotations=gang, vgpu="1").pod for uid in ("m0", "m1")]
    scene.waits("other", vgpu="1")
    nodes = frozenset({"n1", "n2"})
    assert scene.plans(members[0], nodes)
    scene.state.set_pod(make_pod("last", node="n2", shares={"main": [make_share("n2", minor, 1000) for minor in (0, 1)]}, vgpu="2"))
    scene.state.freed_count += 1
    assert await scene.poked() == ["m0", "m1"]


async def test_members_of_gang_with_victims_are_retried_once_filter_has_planned():
    scene, gang = full_scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(uid, annotations=gang, vgpu="1", vgpu_memory="500").pod for uid in ("m0", "m1")]
    assert reserve_room(scene.context, members[0], "n1", ["busy"], 30.0)
    scene.state.freed_count += 1
    assert await scene.poked() == []
    scene.state.drop_pod("busy")
    assert scene.plans(members[0], frozenset({"n1"}))
    assert await scene.poked() == ["m0", "m1"]


async def test_member_of_running_gang_is_retried_once_its_victims_have_ended():
    scene, gang = full_scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "1"}
    scene.state.set_pod(make_pod("m0", node="elsewhere", annotations=gang, shares={"main": [make_share("elsewhere", 0)]}, vgpu="1"))
    member = scene.waits("m1", annotations=gang, vgpu="1", vgpu_memory="500").pod
    assert reserve_room(scene.context, member, "n1", ["busy"], 30.0)
    scene.state.freed_count += 1
    assert await scene.poked() == []
    scene.state.drop_pod("busy")
    assert await scene.poked() == ["m1"]


async def test_one_member_per_kind_is_retried_for_gang_waiting_for_room():
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


async def test_all_members_are_retried_for_planned_or_running_gang():
    scene, gang = Scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(f"m{number}", annotations=gang, vgpu="1", vgpu_memory="100").pod for number in range(4)]
    assert scene.plans(members[0], frozenset({"n1", "n2"}))
    assert await scene.poked() == ["m0", "m1", "m2", "m3"]


async def test_gang_that_held_room_without_starting_is_retried_after_pause():
    scene, gang = Scene(), {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    members = [scene.waits(f"m{number}", annotations=gang, vgpu="1").pod for number in range(2)]
    assert scene.plans(members[0], frozenset({"n1", "n2"}))
    await scene.poked()
    for pod in members:
        scene.record(pod)
    scene.now = scene.context.gangs.attempts.gang_seconds
    assert await scene.poked() == [], "it pauses"
    scene.now += scene.context.gangs.attempts.gang_seconds - 1
    assert await scene.poked() == []
    scene.now += 1
    assert await scene.poked() == ["m0"]


async def test_gang_reported_late_by_watch_is_retried():
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
    values: set[Any] = set()
    for started_at in (1e9, 1e9 + 30):
        scene = Scene(started_at)
        scene.waits("large", vgpu="2")
        scene.state.drop_pod("busy")
        assert await scene.poked() == ["large"]
        values.add(*scene.api.values)
    assert len(values) == 2


def full_scene() -> Scene:
    """Return a pod that has no room on its only node."""
    scene = Scene()
    scene.state.drop_gpu_node("n2")
    scene.state.set_pod(make_pod("busy-too", node="n1", shares={"main": [make_share("n1", 1, 1000)]}, vgpu="1"))
    return scene


async def test_pod_behind_thousands_of_unfit_pods_is_tried_once_it_fits():
    scene = full_scene()
    for number in range(MAX_EXAMINED + 1):
        large = make_pod(f"large-{number}", priority=9, vgpu="1", vgpu_memory="4000")
        scene.state.set_pod(large)
        scene.record(large)
    scene.waits("small", vgpu="1", vgpu_memory="10")
    assert await scene.poked() == []
    scene.state.set_gpu_node(make_node("n2", 2))
    assert await scene.poked() == ["small"]


def asked_of(uid: str, scheduler: str = contract.SCHEDULER_NAME, **fields) -> PodFacts:
    pod = make_pod(uid, vgpu="1", vgpu_memory="500")
    return replace(pod, gpu=replace(pod.gpu, scheduler_name=scheduler), **fields)


async def test_pods_refused_before_a_restart_are_tried_when_they_fit():
    scene = full_scene()
    scene.state.set_pod(asked_of("late"))
    scene.state.set_pod(asked_of("important", priority=9))
    scene.state.set_pod(asked_of("gated", gates=("quota",)))
    scene.state.set_pod(asked_of("foreign", scheduler="default-scheduler"))
    assert await scene.poked() == []
    scene.now = QUIET_SECONDS
    assert await scene.poked() == []
    scene.state.set_gpu_node(make_node("n2", 2))
    assert await scene.poked() == ["important", "late"]
    scene.state.freed_count += 1
    assert await scene.poked() == [], "kube-scheduler tries them now, and says what came of it"


async def test_a_kube_scheduler_that_asks_comes_to_the_pods_by_itself():
    scene = Scene()
    scene.state.set_pod(asked_of("late"))
    assert await scene.poked() == []
    for _ in range(3):
        scene.now += QUIET_SECONDS - 1
        other = asked_of("other")
        scene.context.decisions.record(Decision(other, request_of(other), scene.context.clock.now(), 0, 1, {}))
        assert await scene.poked() == []
    scene.now += QUIET_SECONDS
    assert await scene.poked() == ["late"]


async def test_pods_refused_by_previous_leader_are_tried_after_takeover():
    scene, leads = full_scene(), False
    retry = Retry(scene.context, cast(Any, scene.api), lambda: leads, lambda: scene.caught_up_at, Telemetry())
    await retry.step()
    scene.state.set_pod(asked_of("late"))
    scene.state.set_gpu_node(make_node("n2", 2))
    await retry.step()
    assert scene.api.poked == []
    leads = True
    await retry.step()
    scene.now += QUIET_SECONDS
    await retry.step()
    assert scene.api.poked == ["late"]


async def test_a_pod_without_a_decision_that_cannot_be_tried_is_tried_again():
    scene = full_scene()
    scene.state.set_pod(asked_of("late"))
    scene.state.set_gpu_node(make_node("n2", 2))

    def fail() -> None:
        raise KubeApiError("slow")

    scene.api.before = fail
    assert await scene.poked() == []
    scene.now = QUIET_SECONDS
    assert await scene.poked() == []
    scene.api.before = lambda: None
    assert await scene.poked() == ["late"]


async def most_at_a_time(scene: Scene, done: Sequence[object]) -> int:
    """Let the loop look once; return of how many things that it did others saw nothing at a time, of all that it did."""
    looking, seen, most = asyncio.create_task(scene.retry.step()), 0, 0
    while not looking.done():
        await asyncio.sleep(0)
        most, seen = max(most, len(done) - seen), len(done)
    return most


async def test_few_pods_are_read_at_a_time(monkeypatch):
    scene, read, shape_of = full_scene(), [], Verdicts.shape_of
    for number in range(300):
        scene.is_refused(f"w{number}", ["n1"], vgpu="1", vgpu_memory="600")

    def noted_shape_of(*args):
        read.append(args)
        return shape_of(*args)

    monkeypatch.setattr(Verdicts, "shape_of", noted_shape_of)
    scene.state.drop_pod("busy")
    assert await most_at_a_time(scene, read) == MAX_READ
    assert len(read) == 300


async def test_others_work_between_two_searches_on_nodes(monkeypatch):
    scene, searched = full_scene(), []
    scene.is_refused("w", ["n1"], vgpu="1", vgpu_memory="600")

    def looks(*_: object):
        for number in range(20):
            searched.append(number)
            yield False

    monkeypatch.setattr(Takers, "looks", looks)
    scene.state.drop_pod("busy")
    assert await most_at_a_time(scene, searched) == 1
    assert len(searched) == 20


@pytest.mark.parametrize("meanwhile", ["is bound", "fits now", "is refused again"])
async def test_pod_decided_during_check_is_not_tried_for_older_changes(meanwhile):
    scene = Scene()
    for number in range(3):
        scene.waits(f"w{number}", vgpu="2", vgpu_memory=str(20 + 2 * number))
    scene.state.drop_pod("busy")
    looking = asyncio.create_task(scene.retry.step())
    await asyncio.sleep(0)
    scene.now = 1.0
    last = scene.context.decisions.by_uid["w2"]
    if meanwhile == "is bound":
        scene.state.set_pod(make_pod("w2", node="n2", shares={"main": [make_share("n2", 0, 10)]}, vgpu="1"))
        scene.context.decisions.forget("w2")
    else:
        scene.context.decisions.record(replace(last, at=9.0, fitting=int(meanwhile == "fits now"), generation=last.generation))
    await looking
    assert scene.api.poked[:2] == ["w0", "w1"]
    assert ("w2" in scene.api.poked) == (meanwhile == "is refused again")


async def test_changes_during_check_are_checked_next(monkeypatch):
    scene = full_scene()
    scene.waits("w", vgpu="1", vgpu_memory="500")
    scene.state.freed_count += 1

    def looks(*_: object):
        yield False
        scene.state.drop_pod("busy")

    with monkeypatch.context() as patched:
        patched.setattr(Takers, "looks", looks)
        assert await scene.poked() == []
    assert await scene.poked() == ["w"]


async def test_of_equal_pods_those_are_tried_that_may_run_where_room_came():
    scene = full_scene()
    scene.state.set_gpu_node(make_node("n2", 2, cordoned=True))
    for uid, node in (("a", "n1"), ("b", "n2"), ("c", "n1"), ("d", "n2")):
        scene.is_refused(uid, [node], vgpu="1", vgpu_memory="500")
    scene.state.set_gpu_node(make_node("n2", 2))
    assert await scene.poked() == ["b", "d"]


async def test_busy_kube_scheduler_gets_minute_to_reach_every_pod():
    scene = Scene()
    scene.state.set_pod(asked_of("late"))
    tried = []
    for _ in range(int(LATEST_SECONDS) + 1):
        other = asked_of("other")
        scene.context.decisions.record(Decision(other, request_of(other), scene.context.clock.now(), 0, 1, {}))
        tried.append(list(await scene.poked()))
        scene.now += 1.0
    assert tried == [[]] * int(LATEST_SECONDS) + [["late"]]
