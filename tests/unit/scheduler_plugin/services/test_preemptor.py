# SPDX-License-Identifier: Apache-2.0
"""Pods end for one that lacks only the right GPU: as few calls as possible, and no GPU is held for a pod when no pod ends for it."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.decisions import MAX_RECORDED, Decision
from scheduler_plugin.core.cluster.pods import STUCK_SECONDS
from scheduler_plugin.core.cluster.selectors import Operator, Requirement, exactly
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.extender import gang as gang_module
from scheduler_plugin.extender import put_off as put_off_module
from scheduler_plugin.extender.cooperative import MAX_PER_BATCH
from scheduler_plugin.extender.preempt import ENOUGH_SECONDS, LAST_SECONDS, choose_victims
from scheduler_plugin.services import preemptor as module
from scheduler_plugin.services.preemptor import Preemptor
from scheduler_plugin.services.telemetry import Telemetry
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, known_gang, make_context, make_node, make_pod, make_share, request_of
from tests.unit.scheduler_plugin.claim_builders import asking, claim_of, pod_of, result, serve

imported: Any = module
"""With the names that the module imports."""


class Scene:
    """Nodes of two GPUs of 1,000 MiB, with a pod of 600 MiB on each; it is the pods' API and the clock too."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes or ("n1",)
        self.now = 0.0
        self.leads = True
        self.evicted: list[str] = []
        self.retried: list[str] = []
        self.fails: KubeApiError | None = None
        self.kept: set[str] = set()
        """UIDs of pods that the API server does not let end."""
        self.state = ClusterState()
        for node in self.nodes:
            self.state.set_gpu_node(make_node(node, 2))
            self.state.set_host(node, 64_000, 512 * 1024)
            for minor in (0, 1):
                shares = {"main": [make_share(node, minor, 600)]}
                self.state.set_pod(make_pod(f"{node}-{minor}", node=node, shares=shares, priority=minor, vgpu="1", vgpu_memory="600"))
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now)
        self.preemptor = Preemptor(self.context, cast(Any, self), self, self._retry, lambda: self.leads, Telemetry())

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        if self.fails is not None:
            raise self.fails
        if uid in self.kept:
            raise KubeApiError("HTTP 429: the budget refuses")
        if not dry_run:
            self.evicted.append(uid)

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        assert reason == contract.EVENT_REASON_PREEMPTED
        assert uid in self.evicted

    async def _retry(self, uid: str) -> None:
        self.retried.append(uid)
        self.context.decisions.forget(uid)

    def refused(
        self, name: str, annotations: dict[str, str] | None = None, *, priority: int = 100, memory: str = "700", vgpu: str = "1"
    ) -> str:
        """Have a pod refused on all nodes; return its UID."""
        fields: dict[str, Any] = {"vgpu": vgpu, "vgpu_memory": memory}
        pod = asked_pod(name, annotations, priority=priority, **fields)
        self.state.set_pod(make_pod(name, priority=priority, annotations=annotations, **fields))
        answer = filter_body(self.context, json.dumps({"Pod": pod, "NodeNames": list(self.nodes)}).encode(), self.now)
        assert json.loads(answer)["NodeNames"] == []
        return name

    def waits(self, uid: str) -> None:
        """Note that a pod was refused by all nodes that kube-scheduler's own filters left: no node."""
        pod = make_pod(uid, vgpu="1")
        self.state.set_pod(pod)
        self.context.decisions.record(Decision(pod, request_of(pod), self.now, 0, 0, {}))

    async def after(self, seconds: float) -> list[str]:
        """Let the loop look once after a while; return whom it had ended so far."""
        self.now += seconds
        await self.preemptor.step()
        return self.evicted


def asked_pod(
    name: str, annotations: dict[str, str] | None = None, *, priority: int = 100, vgpu: str = "1", vgpu_memory: str = "700"
) -> dict:
    """Write a pod as kube-scheduler sends it."""
    pod = pod_object(name, uid=name, annotations=annotations, vgpu=vgpu, vgpu_memory=vgpu_memory)
    pod["spec"]["priority"] = priority
    return pod


async def test_kube_scheduler_has_its_turn_first():
    scene = Scene()
    scene.refused("important")
    assert await scene.after(imported.SETTLE_SECONDS / 2) == []
    assert await scene.after(imported.SETTLE_SECONDS) == ["n1-0"]


async def test_of_several_nodes_the_one_with_the_least_important_pod_is_freed():
    scene = Scene("n1", "n2", "n3")
    for uid in ("n1-0", "n3-0"):
        scene.state.drop_pod(uid)
        node = uid.partition("-")[0]
        scene.state.set_pod(make_pod(uid, node=node, shares={"main": [make_share(node, 0, 600)]}, priority=5, vgpu="1", vgpu_memory="600"))
    scene.refused("important")
    assert await scene.after(5) == ["n2-0"]


async def test_pod_with_claims_ends_where_no_pod_with_vgpus_runs():
    scene = Scene()
    for minor in (0, 1):
        scene.state.drop_pod(f"n1-{minor}")
    serve(scene.context, make_node("n1", 2))
    results = [result("n1", minor, memory="600Mi") for minor in (0, 1)]
    scene.context.claims.holds.set_claim(claim_of("c", asking(count=2, memory="600Mi"), results=results, reserved_for=["claimed"]))
    scene.state.set_pod(pod_of("claimed", "c", node="n1"))
    scene.refused("important")
    assert await scene.after(5) == ["claimed"]


@pytest.mark.parametrize(("helps", "seconds"), [(True, ENOUGH_SECONDS), (False, LAST_SECONDS)])
async def test_long_search_ends_in_time_and_yields_between_nodes(helps, seconds, monkeypatch):
    scene = Scene(*(f"n{number:02}" for number in range(40)))
    looked, turns, search = [], [], imported.eviction_plans

    def slow_ways(context, pod, nodes, spared):
        for way in search(context, pod, nodes, spared):
            scene.now += 0.25
            looked.append(way)
            yield way if helps else None

    async def others() -> None:
        while True:
            turns.append(len(looked))
            await asyncio.sleep(0)

    monkeypatch.setattr(module, "eviction_plans", slow_ways)
    scene.refused("important")
    beside = asyncio.create_task(others())
    await scene.after(5)
    beside.cancel()
    assert scene.evicted == (["n00-0"] if helps else [])
    assert len(looked) == seconds / 0.25 + 1
    assert set(range(1, len(looked))) <= set(turns)


async def test_victims_end_once_and_reservation_lasts_until_they_are_gone():
    scene = Scene()
    uid = scene.refused("important")
    assert await scene.after(5) == ["n1-0"]
    for _ in range(3):
        assert await scene.after(module.HOLD_SECONDS - 1) == ["n1-0"]
        assert scene.state.reservations[uid].expires_at > scene.now
    scene.state.drop_pod("n1-0")
    await scene.after(1)
    assert scene.retried == [uid]
    scene.refused("other", priority=0)
    assert scene.state.reservations[uid].node == "n1"


async def test_pod_deleted_meanwhile_counts_as_ended():
    scene = Scene()
    scene.fails = KubeNotFoundError("it is gone")
    uid = scene.refused("important")
    await scene.after(5)
    scene.state.drop_pod("n1-0")
    await scene.after(1)
    assert scene.retried == [uid]


async def test_when_api_server_refuses_no_room_is_held_and_retries_slow_down():
    scene = Scene()
    scene.fails = KubeApiError("no answer")
    uid, tries = scene.refused("important"), []
    evict = scene.evict

    async def counted(namespace: str, name: str, victim: str, **options: bool) -> None:
        tries.append((scene.now, victim))
        await evict(namespace, name, victim, **options)

    cast(Any, scene).evict = counted
    for _ in range(400):
        await scene.after(1)
        assert uid not in scene.state.reservations
    waits = [later - earlier for (earlier, _), (later, _) in pairwise(tries)]
    assert [victim for _, victim in tries[:2]] == ["n1-0", "n1-1"]
    assert waits[0] == module.FIRST_PAUSE_SECONDS
    assert len(tries) >= 4
    assert waits == sorted(waits)


async def test_pod_without_helpful_victim_waits_longer_though_it_is_retried(monkeypatch):
    scene, looked = Scene(), []

    def noted_eviction_plans(*_):
        looked.append(scene.now)
        return []

    monkeypatch.setattr(module, "eviction_plans", noted_eviction_plans)
    uid = scene.refused("important")
    for second in range(200):
        if second % 7 == 0:
            await scene._retry(uid)
            await scene.after(0.5)
            scene.refused("important")
        await scene.after(1)
    waits = [later - earlier for earlier, later in pairwise(looked)]
    assert len(waits) >= 3
    assert all(later >= 2 * earlier - 8 for earlier, later in pairwise(waits))
    assert waits[-1] > 30


async def test_no_pod_ends_when_one_victim_cannot_and_another_node_is_freed():
    scene = Scene("n1", "n2")
    scene.kept = {"n1-1"}
    scene.state.set_pod(replace(scene.state.pods["n2-1"], priority=50))
    scene.refused("important", memory="1400", vgpu="2")
    assert await scene.after(5) == []
    assert await scene.after(module.FIRST_PAUSE_SECONDS) == ["n2-0", "n2-1"]


async def test_pod_under_two_budgets_is_spared_as_api_server_refuses_eviction():
    scene = Scene()
    scene.state.set_pod(replace(scene.state.pods["n1-0"], labels=(("app", "a"),)))
    for name in ("x", "y"):
        scene.context.budgets.put(Budget("team", name, (Requirement("app", Operator.EXISTS),), allowed=1))
    scene.refused("important")
    assert await scene.after(5) == ["n1-1"]


@pytest.mark.parametrize("change", ["the node", "the leader"])
async def test_what_was_begun_is_given_up_when_it_no_longer_leads_anywhere(change):
    scene = Scene()
    uid = scene.refused("important")
    await scene.after(5)
    assert uid in scene.state.reservations
    if change == "the node":
        scene.state.drop_gpu_node("n1")
    else:
        scene.leads = False
    await scene.after(1)
    scene.leads = True
    scene.state.drop_pod("n1-0")
    await scene.after(1)
    assert scene.retried == []


async def test_enough_victims_end_for_all_gang_members_and_all_get_places():
    scene = Scene()
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    first = scene.refused("m0", gang)
    assert await scene.after(5) == [], "the gang has too few members"
    second = scene.refused("m1", gang)
    scene.refused("m0", gang)
    for _ in range(30):
        await scene.after(1)
    assert scene.evicted == ["n1-0", "n1-1"]
    assert {first, second} <= scene.state.reservations.keys()
    for uid in scene.evicted:
        scene.state.drop_pod(uid)
    await scene.after(1)
    assert len(scene.retried) >= 1
    answer = filter_body(
        scene.context,
        json.dumps({"Pod": pod_object("m0", uid="m0", annotations=gang, vgpu="1", vgpu_memory="700"), "NodeNames": ["n1"]}).encode(),
        scene.now,
    )
    assert json.loads(answer)["NodeNames"] == ["n1"]


async def test_no_pod_ends_for_gang_with_gated_member():
    scene = Scene()
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    member = make_pod("m1", priority=100, annotations=gang, vgpu="1", vgpu_memory="700")
    scene.state.set_pod(replace(member, gates=("example.com/quota",)))
    scene.refused("m0", gang)
    proposal = {"Pod": asked_pod("m0", gang), "NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}
    assert json.loads(await choose_victims(scene.context, json.dumps(proposal).encode())) == {"NodeNameToMetaVictims": {}}
    for _ in range(10):
        assert await scene.after(3) == []
        assert not scene.state.reservations
    scene.state.set_pod(member)
    for _ in range(30):
        await scene.after(3)
    assert scene.evicted == ["n1-0", "n1-1"]
    assert scene.state.reservations.keys() == {"m0", "m1"}


async def test_what_kube_scheduler_frees_is_kept_for_whom_it_nominated():
    scene = Scene()
    uid = scene.refused("important", memory="1000")
    pod = scene.state.pods[uid]
    ended = replace(scene.state.pods["n1-0"], deletion_requested=True)
    scene.state.set_pod(ended)
    scene.state.set_pod(replace(pod, nominated_node="n1"))
    await scene.after(0.5)
    assert scene.state.reservations[uid].node == "n1"
    scene.state.drop_pod("n1-0")
    scene.refused("other", priority=0, memory="500")
    await scene.after(module.HOLD_SECONDS - 1)
    assert scene.retried == [uid]
    assert scene.evicted == []


@pytest.mark.parametrize("decided", ["again", "no more"])
async def test_firm_reservation_of_pod_being_bound_is_kept(decided):
    scene = Scene()
    uid = scene.refused("important")
    await scene.after(5)
    scene.state.drop_pod("n1-0")
    if decided == "again":
        pod = pod_object("important", uid=uid, vgpu="1", vgpu_memory="700")
        pod["spec"]["priority"] = 100
        answer = filter_body(scene.context, json.dumps({"Pod": pod, "NodeNames": ["n1"]}).encode(), scene.now)
        assert json.loads(answer)["NodeNames"] == ["n1"]
    firm = replace(scene.state.reservations[uid], stage=Stage.BINDING)
    scene.state.reserve(firm)
    for _ in range(3):
        await scene.after(1)
    assert scene.state.reservations[uid] == firm


async def test_a_pod_that_is_merely_expected_somewhere_is_not_ended():
    scene = Scene("n1", "n2")
    scene.nodes = ("n1",)
    scene.state.drop_pod("n1-0")
    scene.state.set_pod(replace(scene.state.pods["n1-1"], priority=1000))
    waiting = pod_object("expected", uid="expected", vgpu="1", vgpu_memory="700")
    scene.state.set_pod(make_pod("expected", vgpu="1", vgpu_memory="700"))
    filter_body(scene.context, json.dumps({"Pod": waiting, "NodeNames": ["n1"]}).encode(), scene.now)
    assert scene.state.reservations["expected"].node == "n1"
    scene.refused("important")
    assert await scene.after(5) == []


async def test_reservation_lasts_while_victims_run_though_pod_is_retried():
    scene = Scene()
    uid = scene.refused("important")
    assert await scene.after(5) == ["n1-0"]
    scene.context.decisions.forget(uid)  # as the retry does
    await scene.after(1)
    scene.refused("important")
    for _ in range(3):
        await scene.after(module.HOLD_SECONDS - 1)
        assert scene.state.reservations[uid].expires_at > scene.now
    scene.state.drop_pod("n1-0")
    await scene.after(1)
    assert scene.retried == [uid]


async def test_pod_retried_too_early_after_victims_end_is_retried_once_more():
    scene = Scene()
    uid = scene.refused("important")
    await scene.after(5)
    decision = scene.context.decisions.by_uid[uid]
    scene.context.decisions.forget(uid)
    scene.state.drop_pod("n1-0")
    await scene.after(1)
    assert scene.retried == []
    scene.context.decisions.record(decision)
    await scene.after(1)
    assert scene.retried == [uid]


async def test_important_pod_is_served_after_any_number_of_refusals():
    scene = Scene()
    scene.refused("important", priority=1000)
    for number in range(MAX_RECORDED):
        scene.refused(f"waits-{number}", priority=0)
    assert await scene.after(5) == ["n1-0"]


async def test_node_replaced_after_query_is_left_alone():
    scene = Scene("n1", "n2")
    scene.nodes = ("n1",)
    scene.refused("important")
    row = scene.state.row_of("n1")
    scene.state.drop_gpu_node("n1")
    scene.state.set_gpu_node(make_node("n3", 2))
    scene.state.set_pod(make_pod("other", node="n3", shares={"main": [make_share("n3", minor, 600) for minor in (0, 1)]}, vgpu="2"))
    assert scene.state.row_of("n3") == row
    assert await scene.after(5) == []


async def test_only_one_pod_relies_on_ending_pod_and_next_needs_others():
    scene = Scene("n1", "n2")
    scene.state.set_pod(replace(scene.state.pods["n2-1"], deletion_requested=True))
    first, second = scene.refused("first"), scene.refused("second")
    assert await scene.after(5) == []
    assert scene.state.reservations[first].node == "n2"
    assert await scene.after(1) == ["n1-0"]
    assert scene.state.reservations[second].node == "n1"
    scene.state.drop_pod("n2-1")
    await scene.after(1)
    assert scene.retried == [first]


async def test_pod_stuck_beyond_grace_period_is_not_relied_on():
    scene = Scene()
    scene.state.set_pod(replace(scene.state.pods["n1-0"], deletion_requested=True, ends_by=30.0))
    uid = scene.refused("important")
    assert await scene.after(30) == []
    assert uid in scene.state.reservations
    assert await scene.after(STUCK_SECONDS) == ["n1-1"]
    assert uid in scene.state.reservations


@pytest.mark.parametrize(("victim_cpu", "want"), [pytest.param(0, ["n2-0"], id="taken"), pytest.param(500, ["n1-0"], id="the victim's")])
async def test_node_with_cpu_taken_is_freed_only_if_victims_hold_enough(victim_cpu, want):
    scene = Scene("n1", "n2")
    scene.state.set_pod(replace(scene.state.pods["n1-0"], cpu_milli=victim_cpu, priority=-1))
    for node in scene.nodes:
        scene.state.set_host(node, 1000, 1000)
    uid = scene.refused("important")
    scene.state.set_pod(replace(scene.state.pods[uid], cpu_milli=500, memory_mib=500))
    decision = scene.context.decisions.by_uid[uid]
    scene.context.decisions.record(replace(decision, pod=scene.state.pods[uid]))
    taken = replace(make_pod("cpu-only", node="n1"), cpu_milli=1000 - victim_cpu, priority=1000)
    scene.state.set_pod(taken)
    assert await scene.after(5) == want


@pytest.mark.parametrize("when", ["before", "during the search"])
async def test_no_pod_ends_for_pod_bound_after_its_refusal(when, monkeypatch):
    scene, search = Scene(), imported.eviction_plans
    bound = make_pod("important", node="elsewhere", shares={"main": [make_share("elsewhere", 0, 700)]}, vgpu="1", vgpu_memory="700")
    scene.refused("important")
    if when == "before":
        scene.state.set_pod(bound)

    def ways(*args):
        assert when == "during the search", "nothing is looked for"
        yield from search(*args)
        scene.state.set_pod(bound)

    monkeypatch.setattr(module, "eviction_plans", ways)
    assert await scene.after(5) == []


@pytest.mark.parametrize("runs", [False, True])
async def test_members_of_waiting_gang_are_not_served_one_by_one(runs, monkeypatch):
    scene, served = Scene(), []
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "1" if runs else "3"}
    if runs:
        shares = {"main": [make_share("elsewhere", 0)]}
        scene.state.set_pod(make_pod("first", node="elsewhere", shares=shares, annotations=gang, vgpu="1"))
    members = [make_pod(f"m{number}", priority=100, annotations=gang, vgpu="1", vgpu_memory="700") for number in range(3)]
    for pod in members:
        scene.state.set_pod(pod)
    for pod in members:
        scene.refused(pod.uid, gang)

    def noted_eviction_plans(context, pod, *_):
        served.append(pod.uid)
        return []

    monkeypatch.setattr(module, "eviction_plans", noted_eviction_plans)
    await scene.after(imported.SETTLE_SECONDS)
    await scene.after(1.0)
    assert served == (["m0", "m1"] if runs else ["m0"])
    await scene.after(module.FIRST_PAUSE_SECONDS)
    await scene.after(module.FIRST_PAUSE_SECONDS)
    assert set(served) >= {"m0", "m1"}


@pytest.fixture
def plans(monkeypatch):
    """The pods for which a place was searched."""
    asked, found = [], imported.reserve_room

    def noted_reserve_room(context, pod, *rest):
        asked.append(pod.uid)
        return found(context, pod, *rest)

    monkeypatch.setattr(module, "reserve_room", noted_reserve_room)
    return asked


async def test_place_is_searched_again_only_after_change(plans):
    scene = Scene("n1", "n2")
    uid = scene.refused("important")
    await scene.after(5)
    assert plans == [uid]
    for _ in range(5):
        await scene.after(module.PERIOD_SECONDS)
        assert scene.state.reservations[uid].expires_at == scene.now + module.HOLD_SECONDS
    assert plans == [uid]
    scene.state.drop_pod("n2-0")
    await scene.after(module.PERIOD_SECONDS)
    assert plans == [uid] * 2
    scene.state.set_gpu_node(make_node("n1", 2, cordoned=True))
    await scene.after(module.PERIOD_SECONDS)
    assert plans == [uid] * 3
    assert uid not in scene.state.reservations


def nominated_gang(scene: Scene, count: int, minimum: int) -> list[str]:
    """Have kube-scheduler say that members of a gang, which does not run, are to go to n1."""
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: str(minimum)}
    uids = [scene.refused(f"m{number}", gang) for number in range(count)]
    for uid in uids:
        scene.state.set_pod(replace(scene.state.pods[uid], nominated_node="n1"))
    return uids


async def test_gang_without_room_on_nominated_nodes_is_planned_once_then_pauses(plans, monkeypatch):
    scene = Scene()
    nominated_gang(scene, 3, 3)
    await scene.after(module.PERIOD_SECONDS)
    await scene.after(module.PERIOD_SECONDS)
    assert plans == ["m0", "m0"]
    counted = imported.reserve_room

    def slow(*args):
        scene.now += 1.0
        return counted(*args)

    monkeypatch.setattr(module, "reserve_room", slow)
    await scene.after(module.PERIOD_SECONDS)
    assert len(plans) == 3
    for _ in range(3):
        await scene.after(module.PERIOD_SECONDS)
    assert len(plans) == 3
    await scene.after(module.PERIOD_SECONDS)
    assert len(plans) == 4


async def test_others_work_between_the_looks_at_two_nominated_pods(plans):
    scene, turns = Scene("n1", "n2"), []
    for uid in (scene.refused("a"), scene.refused("b")):
        scene.state.set_pod(replace(scene.state.pods[uid], nominated_node="n1"))

    async def others() -> None:
        while True:
            turns.append(len(plans))
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await scene.after(module.PERIOD_SECONDS)
    beside.cancel()
    assert plans == ["a", "b"]
    assert 1 in turns


async def test_pod_with_pause_ended_is_served_at_once_with_unchanged_next_check(monkeypatch):
    scene, looked = Scene(), []

    def noted_eviction_plans(*_):
        looked.append(scene.now)
        return []

    monkeypatch.setattr(module, "eviction_plans", noted_eviction_plans)
    uid = scene.refused("important")
    for _ in range(30):
        await scene.after(1)
    seen = len(looked)
    assert scene.now - looked[-1] < 2 * module.FIRST_PAUSE_SECONDS * 2 ** (seen - 1) - 1, "it pauses"
    scene.preemptor.look_again(uid)
    await scene.after(1)
    assert looked[seen:] == [scene.now]
    pause = module.FIRST_PAUSE_SECONDS * 2**seen
    await scene.after(pause - 1)
    assert len(looked) == seen + 1
    await scene.after(1)
    assert len(looked) == seen + 2
    scene.preemptor.look_again("unknown")


async def test_nodes_with_recently_changed_pods_come_first(monkeypatch):
    scene, looked = Scene("n1", "n2", "n3"), []

    def noted_eviction_plans(context, pod, nodes, spared):
        looked.append(list(nodes))
        return []

    monkeypatch.setattr(module, "eviction_plans", noted_eviction_plans)
    scene.refused("important")
    await scene.after(5)
    scene.state.set_pod(replace(scene.state.pods["n3-0"], labels=(("app", "a"),)))
    await scene.after(module.FIRST_PAUSE_SECONDS)
    assert looked == [["n1", "n2", "n3"], ["n3", "n1", "n2"]]


async def test_other_work_runs_while_waiting_pods_are_checked():
    scene, turns = Scene(), 0
    for number in range(3 * MAX_PER_BATCH):
        scene.waits(f"w{number}")

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await scene.after(5)
    beside.cancel()
    assert turns >= 2 * 3, "for nominations, and for whose turn it is"


def gang_of(name: str, minimum: int) -> dict[str, str]:
    return {contract.ANNOTATION_GANG: name, contract.ANNOTATION_GANG_MIN: str(minimum)}


async def test_victims_end_on_several_nodes_for_a_gang():
    scene = Scene("n1", "n2")
    members = [scene.refused(f"m{number}", gang_of("g", 3)) for number in range(3)]
    scene.refused(members[0], gang_of("g", 3))
    for _ in range(30):
        await scene.after(1)
    assert len(scene.evicted) == 3
    assert {"n1-0", "n2-0"} <= set(scene.evicted), "the less important pods"
    assert scene.state.reservations.keys() == set(members)
    for uid in scene.evicted:
        scene.state.drop_pod(uid)
    await scene.after(1)
    assert scene.retried


async def test_no_pod_ends_if_all_nodes_together_are_not_enough():
    scene = Scene("n1", "n2")
    for number in range(5):
        scene.refused(f"m{number}", gang_of("g", 5))
    scene.refused("m0", gang_of("g", 5))
    for _ in range(30):
        await scene.after(1)
    assert scene.evicted == []
    assert not scene.state.reservations


async def test_gang_on_several_nodes_ends_whole_for_one_pod():
    scene = Scene("n1", "n2")
    for node in scene.nodes:
        scene.state.drop_pod(f"{node}-0")
        shares = {"main": [make_share(node, 0, 600)]}
        scene.state.set_pod(make_pod(f"{node}-0", node=node, shares=shares, annotations=gang_of("old", 2), vgpu="1", vgpu_memory="600"))
        scene.state.set_pod(replace(scene.state.pods[f"{node}-1"], priority=200))
    scene.refused("important")
    assert sorted(await scene.after(5)) == ["n1-0", "n2-0"]


def with_budget() -> tuple[Scene, Budget]:
    """Pods with a budget that lets one of them end."""
    scene, budget = Scene("n1", "n2"), Budget("team", "b", tuple(exactly({"covered": "yes"})), 1)
    for pod in list(scene.state.pods.values()):
        scene.state.set_pod(replace(pod, priority=0, labels=(("covered", "yes"),)))
    scene.context.budgets.put(budget)
    return scene, budget


async def test_second_plan_counts_evictions_that_watch_has_not_reported():
    scene, _ = with_budget()
    for name in ("first", "second"):
        scene.refused(name)
    for _ in range(10):
        await scene.after(5)
    assert len(scene.evicted) == 1, "the budget allows one"
    assert [budget.allowed for budget in scene.context.budgets.all()] == [0]


@pytest.mark.parametrize("reports", [False, True])
async def test_what_the_watch_reports_of_a_budget_counts_in_the_end(reports):
    """The API server counts no pod that is pending or not ready. Then the budget does not change, and the watch reports nothing."""
    scene, budget = with_budget()
    scene.refused("first")
    await scene.after(5)
    assert [known.allowed for known in scene.context.budgets.all()] == [0]
    if reports:
        budget = replace(budget, allowed=0, let_go=frozenset({"pod-n1-0"}))
        scene.context.budgets.put(budget)
    await scene.after(imported.COUNTED_SECONDS)
    assert list(scene.context.budgets.all()) == [budget]


async def test_gang_ends_not_at_all_if_one_member_cannot():
    scene = Scene("n1", "n2")
    for node in scene.nodes:
        scene.state.drop_pod(f"{node}-0")
        shares = {"main": [make_share(node, 0, 600)]}
        scene.state.set_pod(make_pod(f"{node}-0", node=node, shares=shares, annotations=gang_of("old", 2), vgpu="1", vgpu_memory="600"))
        scene.state.set_pod(replace(scene.state.pods[f"{node}-1"], priority=200))
    scene.kept = {"n2-0"}
    scene.refused("important")
    for _ in range(10):
        await scene.after(5)
    assert scene.evicted == []


@pytest.mark.parametrize(
    ("annotations", "is_picky", "want"),
    [(None, False, ["n1-0", "n2-0"]), ({"of": "running gang"}, False, ["n1-0", "n2-0"]), (None, True, [])],
    ids=["single pod", "member of a gang that runs", "pod with constraints unknown here"],
)
async def test_gang_on_several_nodes_ends_whole_for_pod_without_room_in_sum(annotations, is_picky, want):
    scene = Scene("n1", "n2")
    own = gang_of("own", 1) if annotations else None
    for node in scene.nodes:
        fields: dict[str, Any] = {
            "node": node,
            "shares": {"main": [make_share(node, 0, 600)]},
            "annotations": gang_of("old", 2),
            "vgpu": "1",
        }
        scene.state.set_pod(make_pod(f"{node}-0", vgpu_memory="600", **fields))
        scene.state.set_pod(replace(scene.state.pods[f"{node}-1"], priority=200))
    if own:
        scene.state.set_pod(make_pod("mate", node="n9", annotations=own, vgpu="1"))
    scene.state.set_pod(make_pod("important", priority=100, annotations=own, vgpu="1", vgpu_memory="900"))
    pod = asked_pod("important", own, vgpu_memory="900")
    if is_picky:
        pod["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 80}]
    victims = {node: {"Pods": [{"UID": f"{node}-0"}], "NumPDBViolations": 0} for node in scene.nodes}
    body = json.dumps({"Pod": pod, "NodeNameToMetaVictims": victims}).encode()
    assert json.loads(await choose_victims(scene.context, body)) == {"NodeNameToMetaVictims": {}}, "kube-scheduler would break the gang"
    for _ in range(3):
        await scene.after(1)
    assert sorted(scene.evicted) == want


def put_off(scene: Scene, name: str, priority: int = 200) -> None:
    """Leave a pod to our own evictions, on all nodes."""
    scene.state.set_pod(make_pod(name, priority=priority, vgpu="1", vgpu_memory="900"))
    scene.context.put_off.at_once(name, scene.nodes)


async def test_pods_put_off_are_served_beside_many_decisions():
    scene = Scene("n1", "n2")
    for uid in ("n1-0", "n1-1"):
        scene.state.set_pod(replace(scene.state.pods[uid], labels=(("covered", "yes"),)))
    scene.context.budgets.put(Budget("team", "b", tuple(exactly({"covered": "yes"})), 0))
    put_off(scene, "put-off")
    for number in range(30):  # none of them can be helped, and each step serves one
        scene.refused(f"waits-{number}", memory="2000")
    scene.now += imported.SETTLE_SECONDS
    for _ in range(3):
        await scene.after(1)
    assert scene.evicted == ["n2-0"]


async def test_pods_put_off_are_served_in_steps_the_most_important_first(monkeypatch):
    scene, tried = Scene(*(f"n{number:02}" for number in range(10))), list[str]()

    def slow_plan(context, pod, node, spared):
        scene.now += 0.25
        tried.append(pod.uid)

    monkeypatch.setattr(module, "plan_eviction", slow_plan)
    for number in range(20):
        put_off(scene, f"p{number:02}", priority=100 + number)
    for _ in range(20):
        begun = scene.now
        await scene.preemptor.step()
        assert scene.now - begun <= LAST_SECONDS + 0.5, "reservations of moves under way must be renewed in time"
    assert list(dict.fromkeys(tried)) == [f"p{number:02}" for number in reversed(range(20))]
    assert not scene.context.put_off.take_due(scene.now)


async def unhelped(scene: Scene, count: int, *, vgpu: str = "2", vgpu_memory: str = "2000") -> list[str]:
    """Have kube-scheduler find too little in sum on all nodes: it calls preempt for each member of a gang, and no filter."""
    uids = [f"m{number}" for number in range(count)]
    for uid in uids:
        scene.state.set_pod(make_pod(uid, priority=100, annotations=gang_of("g", count), vgpu=vgpu, vgpu_memory=vgpu_memory))
    for uid in uids:
        victims = {node: {"Pods": [{"UID": f"{node}-{minor}"} for minor in (0, 1)], "NumPDBViolations": 0} for node in scene.nodes}
        body = {"Pod": asked_pod(uid, gang_of("g", count), vgpu=vgpu, vgpu_memory=vgpu_memory), "NodeNameToMetaVictims": victims}
        assert json.loads(await choose_victims(scene.context, json.dumps(body).encode())) == {"NodeNameToMetaVictims": {}}
    return uids


async def test_without_preemptor_few_pods_are_kept_for_it(monkeypatch):
    for kept in (gang_module, put_off_module):
        monkeypatch.setattr(kept, "MAX_PODS", 5)
    scene = Scene("n1", "n2")
    await unhelped(scene, 12)
    for number in range(12):
        put_off(scene, f"p{number}")
        scene.context.put_off.until(f"p{number}", 0.0, scene.nodes)
    assert len(scene.context.gangs.unhelped) == 5
    assert list(scene.context.put_off.take_due(scene.now)) == [f"p{number}" for number in range(7, 12)]


async def test_gang_without_room_in_sum_gets_victims_on_several_nodes():
    scene = Scene("n1", "n2", "n3")
    uids = await unhelped(scene, 2)
    assert len(await scene.after(1)) == 4
    assert scene.state.reservations.keys() == set(uids)
    freed = {scene.state.pods[uid].node_name for uid in scene.evicted}
    assert {reservation.node for reservation in scene.state.reservations.values()} == freed
    for _ in range(20):
        await scene.after(1)
    assert len(scene.evicted) == 4
    for uid in scene.evicted:
        scene.state.drop_pod(uid)
    await scene.after(1)
    assert scene.context.gangs.unhelped == {}
    nodes = {}
    for uid in uids:
        pod = asked_pod(uid, gang_of("g", 2), vgpu="2", vgpu_memory="2000")
        body = json.dumps({"Pod": pod, "NodeNames": list(scene.nodes)}).encode()
        (nodes[uid],) = json.loads(filter_body(scene.context, body, scene.now))["NodeNames"]
    members, gangs = [scene.state.pods[uid] for uid in uids], scene.context.gangs
    assert await asyncio.gather(*(gangs.admit(pod, known_gang(pod), nodes[pod.uid]) for pod in members)) == ["", ""]
    assert set(nodes.values()) == freed


async def test_nodes_of_later_preempt_call_count_beside_those_of_filter():
    scene = Scene("n1", "n2", "n3")
    for uid in ("n1-0", "n1-1"):
        scene.state.set_pod(replace(scene.state.pods[uid], priority=200))
    uids = await unhelped(scene, 2)
    for uid in uids:  # only n1 passed kube-scheduler's own filters, at some earlier time
        body = {"Pod": asked_pod(uid, gang_of("g", 2), vgpu="2", vgpu_memory="2000"), "NodeNames": ["n1"]}
        assert json.loads(filter_body(scene.context, json.dumps(body).encode(), scene.now))["NodeNames"] == []
    for _ in range(3):
        await scene.after(5)
    assert sorted(scene.evicted) == ["n2-0", "n2-1", "n3-0", "n3-1"]


@pytest.mark.parametrize("change", ["bound", "gone"])
async def test_member_that_no_longer_waits_gets_no_victims(change):
    scene = Scene("n1", "n2")
    for uid in await unhelped(scene, 2):
        if change == "gone":
            scene.state.drop_pod(uid)
        else:
            scene.state.set_pod(make_pod(uid, node="n9", annotations=gang_of("g", 2), vgpu="2"))
    assert await scene.after(1) == []
    assert scene.context.gangs.unhelped == {}


async def test_gang_that_two_nodes_cannot_help_is_tried_less_and_less():
    scene = Scene("n1", "n2")
    for node in scene.nodes:
        scene.state.set_pod(replace(scene.state.pods[f"{node}-1"], priority=200))
    await unhelped(scene, 2)
    for _ in range(10):
        assert await scene.after(30) == []
    scene.state.drop_pod("n1-1")
    scene.state.drop_pod("n2-1")
    await scene.after(300)
    await scene.after(300)
    assert sorted(scene.evicted) == ["n1-0", "n2-0"]
