"""Gangs start together or not at all, whatever the order of calls, and never keep a device that is not theirs.

The world of test_extender_model, with pods in gangs; the test plays kube-scheduler, which filters a pod and then binds it beside others.
"""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from placement.request import RequestError
from proto import contract
from scheduler_plugin.core.gang import Gang, gang_of
from scheduler_plugin.extender import gang as gang_module
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.telemetry import Telemetry
from tests.integration.test_extender_model import CONFIRM_SECONDS, NODES, World
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_pod

# The nodes have two devices of 1000 MiB each: each gang fits alone, not both.
GANGS = {"a": (3, "700"), "b": (2, "900")}
MEMBERS = {"a0": "a", "a1": "a", "a2": "a", "b0": "b", "b1": "b", "b2": "b", "s0": "", "s1": ""}
BOTH = tuple(NODES)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(gang_module, "WAIT_SECONDS", 0.01)


def fields_of(name: str) -> dict:
    gang = MEMBERS[name]
    if not gang:
        return {"vgpu": "1", "vgpu_memory": "600"}
    minimum, memory = GANGS[gang]
    annotations = {contract.ANNOTATION_GANG: gang, contract.ANNOTATION_GANG_MIN: str(minimum)}
    return {"vgpu": "1", "vgpu_memory": memory, "annotations": annotations}


def at_once(question: Coroutine[None, None, bytes]) -> bytes:
    """Let a question be answered in one go, with nothing in between."""
    while True:
        try:
            question.send(None)
        except StopIteration as answer:
            return answer.value


class Play:
    """kube-scheduler's part."""

    def __init__(self) -> None:
        self.world = World()
        self.tasks: set[asyncio.Task] = set()
        self.attempts: list[str] = []
        self.blocked: set[str] = set()
        """Pods for which kube-scheduler itself finds no node."""
        self.world.desk.gangs.on_attempt = self.attempts.append

    async def create(self, name: str) -> None:
        world = self.world
        if name not in world.pods:
            world.created += 1
            pod = make_pod(f"uid-{name}-{world.created}", **fields_of(name))
            gpu = replace(pod.gpu, name=name)
            world.pods[name] = replace(pod, name=name, gpu=gpu)
            world.untold.append(world.pods[name])
            world.tell(len(world.untold))

    async def delete(self, name: str) -> None:
        pod = self.world.pods.pop(name, None)
        if pod is not None:
            self.world.untold.append(pod.uid)

    def filter(self, name: str, nodes: tuple[str, ...] = BOTH) -> dict:
        pod = pod_object(name, uid=self.world.uid_of(name), **fields_of(name))
        return json.loads(filter_nodes(self.world.desk, json.dumps({"Pod": pod, "NodeNames": nodes}).encode(), 0.0))

    async def schedule(self, name: str) -> None:
        """Filter, and begin to bind where that leads."""
        if name not in self.world.pods or self.world.pods[name].node_name or name in self.blocked:
            return
        nodes = self.filter(name)["NodeNames"]
        if nodes:
            args = {"PodName": name, "PodNamespace": "team", "PodUID": self.world.uid_of(name), "Node": nodes[0]}
            self.tasks.add(asyncio.create_task(self.world.binder.bind(json.dumps(args).encode())))

    async def preempt(self, name: str) -> None:
        """Ask whom to end for a pod: a question, which changes nothing."""
        world = self.world
        pod = pod_object(name, uid=world.uid_of(name), **fields_of(name))
        pod["spec"]["priority"] = 100
        proposed = {node: {"Pods": [], "NumPDBViolations": 0} for node in NODES}
        before = dict(world.state.reservations), [world.state.device_states(node) for node in NODES]
        at_once(choose_victims(world.desk, json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed}).encode()))
        assert (dict(world.state.reservations), [world.state.device_states(node) for node in NODES]) == before

    async def settle(self) -> None:
        """Let everything under way end, and try again what was turned down, as kube-scheduler does."""
        for _ in range(3):
            await asyncio.gather(*self.tasks)
            self.tasks.clear()
            self.world.tell(len(self.world.untold))
            for name in self.world.pods:
                await self.schedule(name)
        await asyncio.gather(*self.tasks)
        self.tasks.clear()
        self.world.tell(len(self.world.untold))

    def bound(self, gang: str) -> int:
        return sum(bool(pod.node_name) for name, pod in self.world.pods.items() if MEMBERS[name] == gang)

    def known(self, gang: str) -> int:
        return sum(MEMBERS[name] == gang for name in self.world.pods)


names = st.sets(st.sampled_from(sorted(MEMBERS)), max_size=2)
orders = st.lists(st.sampled_from(sorted(MEMBERS)), min_size=4, max_size=20)


@settings(max_examples=50, deadline=None)
@given(
    created=st.sets(st.sampled_from(sorted(MEMBERS)), min_size=2),
    calls=orders,
    blocked=names,
    proceed=st.integers(0, 6),
    lose=st.booleans(),
)
def test_a_gang_runs_with_enough_members_or_not_at_all(created, calls, blocked, proceed, lose):
    async def play() -> None:
        run = Play()
        run.world.lose_answers = int(lose)
        run.blocked = blocked
        for name in sorted(created):
            await run.create(name)
        for name in calls:
            await run.schedule(name)
            for _ in range(proceed):
                await asyncio.sleep(0)
            run.world.check_promises()
        await run.settle()
        run.world.check_promises()
        for gang, (minimum, _) in GANGS.items():
            event(f"gang {gang}: {run.bound(gang)} of {run.known(gang)} run")
            assert run.bound(gang) == 0 or run.bound(gang) >= minimum, gang
            if run.known(gang) < minimum:
                assert run.bound(gang) == 0

    asyncio.run(play())


STEPS = ("create", "schedule", "schedule", "schedule", "delete", "tell", "wait", "crash", "lose", "preempt")
steps = st.tuples(st.sampled_from(STEPS), st.sampled_from(sorted(MEMBERS)))


@settings(max_examples=50, deadline=None)
@given(st.lists(steps, min_size=10, max_size=60))
def test_no_interleaving_promises_a_device_twice_or_leaks_what_a_gang_held(history):
    async def play() -> None:
        run = Play()
        for name in MEMBERS:
            await run.create(name)
        for step, name in history:
            match step:
                case "tell":
                    run.world.tell(1)
                case "wait":
                    await asyncio.sleep(0)
                    run.world.now += 25.0
                    run.world.told_at = run.world.told_at if run.world.untold else run.world.now
                    run.world.state.expire(run.world.now, run.world.told_at)
                case "crash":
                    await run.world.binder.stop()
                    await asyncio.gather(*run.tasks, return_exceptions=True)
                    run.tasks.clear()
                    run.world.start()
                case "lose":
                    run.world.lose_answers = 1
                case _:
                    await getattr(run, step)(name)
            await asyncio.sleep(0)
            run.world.check_promises()
        run.world.lose_answers = 0
        await asyncio.gather(*run.tasks, return_exceptions=True)
        run.world.tell(len(run.world.untold))
        run.world.now = run.world.told_at = run.world.now + 10 * CONFIRM_SECONDS
        run.world.state.expire(run.world.now, run.world.told_at)
        run.world.check_promises()
        run.world.check_nothing_leaked()

    asyncio.run(play())


async def test_members_wait_until_enough_exist_and_then_hold_room_for_all():
    run = Play()
    for name in ("a0", "a1"):
        await run.create(name)
        sentence = run.filter(name)["FailedAndUnresolvableNodes"]["n1"]
        assert sentence == "gang: 3 members must start together, fewer exist"
    assert not run.world.state.reservations
    await run.create("a2")
    assert len(run.filter("a2")["NodeNames"]) == 1
    assert len(run.world.state.reservations) == 3, "the others are expected too, before anybody asks for them"
    assert run.filter("s0")["NodeNames"] in (["n1"], ["n2"]), "the fourth device is free"
    first, again = run.filter("a1"), run.filter("a1")
    assert first == again


async def test_a_gang_that_does_not_fit_whole_holds_nothing():
    run = Play()
    for name in ("s0", "s1", "a0", "a1", "a2"):
        await run.create(name)
    for name in ("s0", "s1"):
        await run.schedule(name)
    await run.settle()
    assert run.filter("a0")["FailedNodes"]["n2"] == "gang: no room for enough members at once", "other pods' end could help"
    assert {uid for uid in run.world.state.reservations if "uid-a" in uid} == set()
    assert run.bound("a") == 0


async def test_one_member_is_not_bound_before_the_others_are_ready():
    run = Play()
    for name in ("b0", "b1"):
        await run.create(name)
    await run.schedule("b0")
    (task,) = run.tasks
    assert json.loads(await task)["Error"] == "gang b waits for 1 more of its members"
    await run.settle()
    assert run.bound("b") == 2
    assert run.attempts == ["planned", "completed"]


async def test_a_gang_that_never_completes_lets_go_and_pauses():
    run = Play()
    for name in ("b0", "b1"):
        await run.create(name)
    run.filter("b0")
    assert len(run.world.state.reservations) == 2
    run.world.now = 61.0
    run.world.state.expire(61.0, 61.0)
    assert not run.world.state.reservations
    assert run.filter("b0")["FailedAndUnresolvableNodes"]["n1"] == "gang: it held room without starting and pauses"
    run.world.now = 121.0
    assert len(run.filter("b0")["NodeNames"]) == 1
    assert run.attempts == ["planned", "expired", "planned"]


async def test_members_beyond_the_least_number_start_as_they_fit():
    run = Play()
    for name in ("b0", "b1", "b2"):
        await run.create(name)
    await run.settle()
    assert run.bound("b") == 3


async def test_a_member_is_planned_anew_on_the_nodes_that_it_may_use():
    run = Play()
    for name in ("b0", "b1"):
        await run.create(name)
    (planned,) = run.filter("b0")["NodeNames"]
    (other,) = set(NODES) - {planned}
    assert run.filter("b0", (other,))["NodeNames"] == [other]
    assert len(run.world.state.reservations) == 2


async def test_when_the_last_member_comes_the_waiting_ones_are_tried_again_at_once():
    run, poked = Play(), []

    class Api:
        async def annotate(self, namespace: str, name: str, uid: str, annotations: dict) -> None:
            poked.append(name)

    retry = Retry(run.world.desk, Api(), lambda: True, lambda: 0.0, Telemetry())
    for name in ("a0", "a1"):
        await run.create(name)
        run.filter(name)
    await retry.step()
    assert poked == []
    await run.create("a2")
    run.filter("a2")
    await retry.step()
    assert sorted(poked) == ["a0", "a1"]


BAD_NUMBERS = ("0", "-1", "x", "4097", "9" * 50, "²")


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({contract.ANNOTATION_GANG: "g"}, "give both"),
        ({contract.ANNOTATION_GANG_MIN: "2"}, "give both"),
        ({contract.ANNOTATION_GANG: "", contract.ANNOTATION_GANG_MIN: "2"}, "give both"),
        *(({contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: bad}, "from 1 to 4096") for bad in BAD_NUMBERS),
    ],
)
def test_a_gang_that_cannot_be_read_is_refused_with_a_sentence(annotations, says):
    with pytest.raises(RequestError, match=says):
        gang_of("team", annotations)


def test_a_gang_is_a_name_in_a_namespace_and_a_number():
    assert gang_of("team", {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "4"}) == Gang("team", "g", 4)
    assert gang_of("team", {}) is None
