# SPDX-License-Identifier: Apache-2.0
"""Pods that wait in a burst get room and a nominated node, in kube-scheduler's order."""

import asyncio
import random
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeRefusedError
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts, NodeRules
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.fit.shapes import PodShape, Shapes, Verdict
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.seats import Seat
from scheduler_plugin.services.nominator import FIRST, LAST, Nominator
from scheduler_plugin.settings import Answer
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod, request_of

NODES = 80


class Api:
    """Takes nominations."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.called = asyncio.Event()

    async def nominate(self, namespace: str, name: str, uid: str, node: str) -> None:
        if self.error is not None:
            raise self.error
        self.written.append((uid, node))
        self.called.set()


class Scene:
    """Nodes with one GPU of 1,000 MiB each."""

    def __init__(self, nodes: int = NODES, min_nodes: int = 1) -> None:
        self.state = ClusterState()
        for number in range(nodes):
            self.state.set_gpu_node(make_node(f"n{number:02}", 1))
        self.now = 0.0
        self.context = make_context(self.state, monotonic=lambda: self.now)
        self.api = Api()
        self.directory = NodeDirectory()
        self.nominator = Nominator(self.context, self.api, lambda: True, self.directory, min_nodes=min_nodes)

    def comes(self, uid: str, **changed: Any) -> PodFacts:
        """Have the watch show a pod that waits, with a whole GPU."""
        made = make_pod(uid, annotations=changed.pop("annotations", None), priority=changed.pop("priority", 0), cpu_milli=1000, vgpu="1")
        assert made.gpu is not None
        scheduler = changed.pop("scheduler_name", contract.SCHEDULER_NAME)
        pod = replace(made, gpu=replace(made.gpu, scheduler_name=scheduler), **changed)
        self.state.set_pod(pod)
        self.context.verdicts.expect(pod)
        self.nominator.expect(pod)
        return pod

    async def step(self) -> dict[str, str]:
        """Look once, and let the writes end; return all nominations so far, by UID."""
        await self.nominator.step()
        await asyncio.gather(*self.nominator._writes)
        return dict(self.api.written)

    def filtered(self, uid: str, node: str) -> list[str] | None:
        """Return filter's reply to a call with one node."""
        body = msgspec.json.encode({"Pod": pod_object(f"pod-{uid}", uid=uid, vgpu="1"), "NodeNames": [node]})
        names: list[str] | None = msgspec.json.decode(filter_body(self.context, body, 0.0, Answer.ONE))["NodeNames"]
        return names

    def placed(self) -> list[str]:
        """Return the UIDs of the pods with room."""
        return [uid for uid in self.state.pods if uid in self.state.reservations]

    def decide(self, pod: PodFacts, fitting: int) -> None:
        """Note a decision of filter."""
        self.nominator.note(Decision(pod, request_of(pod), 0.0, 0, fitting, {}))


async def test_pods_behind_the_first_are_nominated_where_they_have_room():
    scene = Scene()
    uids = [scene.comes(f"p{number:02}").uid for number in range(LAST + 3)]
    nominated = await scene.step()
    assert list(nominated) == uids[FIRST:LAST]
    assert scene.placed() == uids[:LAST]
    assert nominated == {uid: scene.state.reservations[uid].node for uid in nominated}
    assert len(set(nominated.values())) == LAST - FIRST


async def test_filter_accepts_the_nominated_node_and_the_queue_moves_on():
    scene = Scene()
    for number in range(LAST + 1):
        scene.comes(f"p{number:02}")
    nominated = await scene.step()
    for uid, node in nominated.items():
        assert scene.filtered(uid, node) == [node]
    assert f"p{LAST}" not in await scene.step(), "it is the first of the queue now"
    assert f"p{LAST}" in scene.placed()


async def test_filter_judges_no_node_for_a_pod_with_room_there(monkeypatch):
    scene = Scene()
    pods = [scene.comes(f"p{number:02}") for number in range(LAST)]
    nominated = await scene.step()
    judged: list[PodShape] = []
    decided: list[Decision] = []
    scene.context.log.on_decision = decided.append
    verdict = Shapes.verdict

    def counted(shapes: Shapes, shape: PodShape) -> Verdict:
        judged.append(shape)
        return verdict(shapes, shape)

    monkeypatch.setattr(Shapes, "verdict", counted)
    for uid, node in nominated.items():
        before = scene.state.columns.change_count
        assert scene.filtered(uid, node) == [node]
        assert scene.state.columns.change_count == before, "its room stays as it was"
    assert judged == []
    assert [(decision.pod.uid, decision.fitting) for decision in decided] == [(uid, 1) for uid in nominated]
    assert scene.context.verdicts.next_pods(LAST) == [], "they and those before them were called"
    held = {reservation.node for reservation in scene.state.reservations.values()}
    free = next(node for node in scene.state.rows_by_name if node not in held)
    assert scene.filtered(pods[0].uid, free) == [free]
    assert len(judged) == 1, "a node where it has no room is judged"


UNFIT = {
    "unhealthy": lambda node: replace(node, devices=tuple(replace(entry, trouble="it fell off the bus") for entry in node.devices)),
    "smaller": lambda node: replace(node, devices=()),
    "cordoned": lambda node: replace(node, cordoned=True),
}
"""What can happen to a node between nomination and call."""


@pytest.mark.parametrize("change", UNFIT)
async def test_filter_refuses_a_nominated_node_that_became_unfit(change):
    scene = Scene()
    for number in range(FIRST + 1):
        scene.comes(f"p{number}")
    ((uid, node),) = (await scene.step()).items()
    scene.state.set_gpu_node(UNFIT[change](make_node(node, 1)))
    assert not scene.filtered(uid, node)


async def test_filter_refuses_a_nominated_node_that_is_gone():
    scene = Scene()
    for number in range(FIRST + 1):
        scene.comes(f"p{number}")
    ((uid, node),) = (await scene.step()).items()
    scene.state.drop_gpu_node(node)
    assert not scene.filtered(uid, node)


async def test_nominated_pod_keeps_its_room_for_another_while():
    scene = Scene()
    for number in range(FIRST + 1):
        scene.comes(f"p{number}")
    ((uid, node),) = (await scene.step()).items()
    before = scene.state.reservations[uid]
    scene.now += 5
    assert scene.filtered(uid, node) == [node]
    after = scene.state.reservations[uid]
    assert (after.expires_at, after.footprint) == (before.expires_at + 5, before.footprint)


async def test_short_queue_costs_no_write():
    scene = Scene()
    for number in range(FIRST):
        scene.comes(f"p{number}")
    assert await scene.step() == {}


async def test_small_clusters_are_left_to_kube_scheduler():
    scene = Scene(nodes=9, min_nodes=10)
    for number in range(LAST):
        scene.comes(f"p{number}")
    assert await scene.step() == {}
    assert scene.placed() == []


SPECIAL: dict[str, dict[str, Any]] = {
    "selects a label that no node has": {"nodes": NodeRules((("pool", "a"),))},
    "has a host port": {"is_picky": True},
    "tolerates taints": {"tolerates": True},
    "prefers nodes": {"prefers": True},
    "needs volumes": {"needs_preparing": True},
    "is in a group of Kubernetes": {"scheduling_group": "group"},
    "is in a gang": {"annotations": {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}},
    "is nominated already": {"nominated_node": "n00"},
    "has an invalid request": {"annotations": {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "many"}},
}


async def test_pods_that_select_nodes_get_one_of_these():
    scene = Scene()
    pools = {f"n{number:02}": "a" if number % 4 else "b" for number in range(NODES)}
    for name, pool in pools.items():
        scene.directory.put(NodeFacts(name, {"pool": pool}))
    for number in range(FIRST):
        scene.comes(f"first-{number}")
    for number in range(4):
        scene.comes(f"p{number}", nodes=NodeRules((("pool", "b"),)))
    nominated = await scene.step()
    assert nominated.keys() == {f"p{number}" for number in range(4)}
    assert {pools[node] for node in nominated.values()} == {"b"}


@pytest.mark.parametrize("special", SPECIAL)
async def test_no_pod_overtakes_one_that_cannot_be_nominated(special):
    scene = Scene()
    for number in range(FIRST + 2):
        scene.comes(f"before-{number}")
    scene.comes("special", **SPECIAL[special])
    scene.comes("behind")
    assert set(await scene.step()) == {f"before-{number}" for number in range(FIRST, FIRST + 2)}
    assert not {"special", "behind"} & set(scene.placed())


@pytest.mark.parametrize("seed", range(20))
async def test_pods_with_room_are_always_the_first_of_the_queue(seed):
    rng, scene = random.Random(seed), Scene(nodes=12)
    for number in range(30):
        kind = rng.choice([{}, {}, {}, {}, *SPECIAL.values(), {"scheduler_name": "other"}, {"priority": rng.randrange(3)}])
        scene.comes(f"p{number:02}", **kind)
        if rng.random() < 0.3:
            await scene.step()
        if rng.random() < 0.3:
            scene.context.verdicts._drop_up_to(scene.context.verdicts.next_pods(1)[0])
    await scene.step()
    queue = [pod.uid for pod in scene.context.verdicts.next_pods(LAST) if pod.gpu and pod.gpu.scheduler_name == contract.SCHEDULER_NAME]
    has_room = [uid in scene.state.reservations for uid in queue]
    assert has_room == sorted(has_room, reverse=True)


async def test_pod_of_higher_priority_gets_the_room_of_those_behind_it():
    scene = Scene(nodes=FIRST + 1)
    for number in range(FIRST + 1):
        scene.comes(f"low-{number}")
    assert len(await scene.step()) == 1
    scene.comes("high", priority=5)
    assert scene.placed() == []
    names = [f"n{number:02}" for number in range(FIRST + 1)]
    body = msgspec.json.encode({"Pod": pod_object("pod-high", uid="high", vgpu="1"), "NodeNames": names})
    assert msgspec.json.decode(filter_body(scene.context, body, 0.0, Answer.ONE))["NodeNames"]


async def test_binding_under_way_keeps_its_room_from_higher_priority():
    scene = Scene()
    for number in range(LAST):
        scene.comes(f"low-{number}")
    await scene.step()
    scene.state.reserve(replace(scene.state.reservations["low-0"], stage=Stage.BINDING))
    scene.comes("high", priority=5)
    assert scene.placed() == ["low-0"]


@pytest.mark.parametrize("preempts", [True, False])
@pytest.mark.parametrize("fitting", [0, 1])
async def test_refused_nomination_is_cleared_for_pods_that_cannot_preempt(preempts, fitting):
    scene = Scene()
    pods = [scene.comes(f"p{number:02}", preempts=preempts) for number in range(FIRST + 1)]
    assert list(await scene.step()) == [pods[-1].uid]
    scene.decide(pods[-1], fitting)
    assert (await scene.step())[pods[-1].uid] == "" or preempts or fitting
    assert len(scene.api.written) == 1 + (not preempts and not fitting)


async def test_soft_taint_leaves_the_choice_to_kube_scheduler():
    scene = Scene()
    scene.comes("p")
    scene.state.soft.set_tainted("n00", tainted=True)
    await scene.step()
    assert scene.placed() == []


async def test_closed_nodes_are_not_nominated():
    scene = Scene(nodes=2)
    for number in range(2):
        scene.comes(f"p{number}")
    scene.state.set_closed("n00", closed=True)
    scene.state.set_closed("gone", closed=True)
    await scene.step()
    assert [(uid, one.node) for uid, one in scene.state.reservations.items()] == [("p0", "n01")]


async def test_hosts_without_cpu_are_not_nominated():
    scene = Scene(nodes=2)
    for number in range(2):
        scene.state.set_host(f"n{number:02}", 1000, 1000, 10)
    scene.comes("large", cpu_milli=2000)
    await scene.step()
    assert scene.placed() == []


async def test_replacement_of_a_moved_pod_is_left_to_its_seat():
    scene = Scene()
    moved = replace(make_pod("moved", node="n00", vgpu="1"), controller_uid="job")
    scene.context.seats.put(Seat(moved, "n01"))
    scene.comes("replacement", controller_uid="job")
    await scene.step()
    assert scene.placed() == []


@pytest.mark.parametrize("error", [KubeRefusedError("bound"), KubeApiError("no answer")])
async def test_failed_write_leaves_the_room_to_expire(error, caplog):
    scene = Scene()
    for number in range(LAST):
        scene.comes(f"p{number:02}")
    scene.api.error = error
    assert await scene.step() == {}
    assert len(scene.placed()) == LAST
    assert bool(caplog.records) == (not isinstance(error, KubeRefusedError))


async def test_pod_with_room_from_elsewhere_is_not_nominated():
    scene = Scene()
    scene.state.reserve(Reservation("seated", "n00", {}, HostDemand(0, 0), Stage.SOFT, 10.0))
    scene.comes("seated")
    scene.comes("behind")
    await scene.step()
    assert scene.placed() == ["seated"]


async def test_loop_nominates_when_it_is_woken():
    scene = Scene()
    task = asyncio.create_task(scene.nominator.run())
    uids = [scene.comes(f"p{number:02}").uid for number in range(FIRST + 1)]
    async with asyncio.timeout(60):
        await scene.api.called.wait()
    assert [uid for uid, _ in scene.api.written] == uids[FIRST:]
    task.cancel()
    assert cast(Any, await asyncio.gather(task, return_exceptions=True))


async def test_loop_nominates_when_nodes_come_after_the_queue():
    scene = Scene(nodes=0)
    task = asyncio.create_task(scene.nominator.run())
    uids = [scene.comes(f"p{number:02}").uid for number in range(FIRST + 1)]
    await asyncio.sleep(0)
    for number in range(FIRST + 1):
        scene.state.set_gpu_node(make_node(f"n{number:02}", 1))
    async with asyncio.timeout(60):
        await scene.api.called.wait()
    assert [uid for uid, _ in scene.api.written] == uids[FIRST:]
    task.cancel()
    assert cast(Any, await asyncio.gather(task, return_exceptions=True))
