# SPDX-License-Identifier: Apache-2.0
"""Gangs start together or not at all, in any order of calls, and never keep a device that is not theirs.

The world of test_extender_model, with pods in gangs; the test plays kube-scheduler, which filters a pod and then binds it beside others.
"""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract.gpunode import encode_gpu_node
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.gang import Gang, gang_of
from scheduler_plugin.core.cluster.state import Stage
from scheduler_plugin.extender import cooperative as cooperative_module
from scheduler_plugin.extender import gang as gang_module
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.cooperative import plan_ahead
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.ports import PodApi
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.telemetry import Telemetry
from tests.integration.test_extender import running
from tests.integration.test_extender_model import CONFIRM_SECONDS, MAX_SHARES, NODES, World
from tests.unit.scheduler_plugin.api import FakeApi, node_object, pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_device, make_node, make_pod

# The nodes have two devices of 1000 MiB each: each gang fits alone, not both.
GANGS = {"a": (3, "700"), "b": (2, "900")}
MEMBERS = {"a0": "a", "a1": "a", "a2": "a", "b0": "b", "b1": "b", "b2": "b", "s0": "", "s1": ""}
BOTH = tuple(NODES)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(gang_module, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(cooperative_module, "SMALL_GANG", 0)


def fields_of(name: str) -> dict:
    gang = MEMBERS[name]
    if not gang:
        return {"vgpu": "1", "vgpu_memory": "600"}
    minimum, memory = GANGS[gang]
    annotations = {contract.ANNOTATION_GANG: gang, contract.ANNOTATION_GANG_MIN: str(minimum)}
    return {"vgpu": "1", "vgpu_memory": memory, "annotations": annotations}


def at_once(question: Coroutine[None, None, bytes]) -> bytes:
    """Run a call to its reply in one go, with no other step in between."""
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
        self.calls: list[asyncio.Task] = []
        """To filter, with what follows."""
        self.attempts: list[str] = []
        self.faults: list[str] = []
        """What is wrong with bindings."""
        self.blocked: set[str] = set()
        """Pods for which kube-scheduler itself finds no node."""
        self.confined: dict[str, tuple[str, ...]] = {}
        """The nodes that kube-scheduler offers for a pod, where they are not all: only each call names them."""
        self.world.context.gangs.attempts.on_attempt = self.attempts.append

    def add_tainted_nodes(self) -> None:
        """Add nodes that kube-scheduler never offers and plans prefer, one GPU that a member fills: a plan that uses them is wrong."""
        for number, (_, memory) in enumerate([*GANGS.values(), *GANGS.values()]):
            name = f"tainted-{number}"
            node = make_node(name, [make_device(name, 0, mib=int(memory))], shares_per_gpu=MAX_SHARES)
            self.world.nodes.append(node)
            self.world.state.set_gpu_node(node)

    def watch_the_gate(self) -> None:
        """Note each binding that is sent while too few members of its gang have a firm place."""
        world, send = self.world, self.world.bind

        async def bind(namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
            gang = MEMBERS[name]
            if gang:
                firm = {uid for uid, reservation in world.state.reservations.items() if reservation.stage.is_firm}
                placed = [other for other, pod in world.pods.items() if MEMBERS[other] == gang and (pod.node_name or pod.uid in firm)]
                if len(placed) < GANGS[gang][0]:
                    self.faults.append(f"{name} is bound, and only {placed} have a place")  # the binder catches what a request raises
            await send(namespace, name, uid, node, annotations)

        world.bind = bind

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

    def filter(self, name: str, nodes: tuple[str, ...] | None = None) -> dict:
        return json.loads(filter_body(self.world.context, self.question(name, nodes), 0.0))

    def question(self, name: str, nodes: tuple[str, ...] | None = None) -> bytes:
        nodes = nodes or self.confined.get(name, BOTH)
        pod = pod_object(name, uid=self.world.uid_of(name), **fields_of(name))
        return json.dumps({"Pod": pod, "NodeNames": nodes}).encode()

    async def schedule(self, name: str) -> None:
        """Filter, and begin to bind where that leads."""
        if name not in self.world.pods or self.world.pods[name].node_name or name in self.blocked:
            return
        nodes = self.filter(name)["NodeNames"]
        if nodes:
            self.bind(name, nodes[0])

    async def begin(self, name: str) -> None:
        """Begin to schedule, while other things happen: the gang is planned ahead."""
        self.calls.append(asyncio.create_task(self.planned(name)))

    async def planned(self, name: str) -> None:
        context = self.world.context
        await plan_ahead(context, wire.decode_args(self.question(name)))
        if context is self.world.context:  # or the scheduler has ended since
            await self.schedule(name)

    async def give_up(self, _: str) -> None:
        """Give up the call that was begun first."""
        if self.calls:
            self.calls.pop(0).cancel()

    async def calls_end(self) -> None:
        for call in self.calls:
            await call
        self.calls.clear()

    def bind(self, name: str, node: str) -> asyncio.Task:
        args = {"PodName": name, "PodNamespace": "team", "PodUID": self.world.uid_of(name), "Node": node}
        task = asyncio.create_task(self.world.binder.bind(json.dumps(args).encode()))
        self.tasks.add(task)
        return task

    async def preempt(self, name: str) -> None:
        """Ask whom to end for a pod: a question, which changes nothing."""
        world = self.world
        pod = pod_object(name, uid=world.uid_of(name), **fields_of(name))
        pod["spec"]["priority"] = 100
        proposed = {node: {"Pods": [], "NumPDBViolations": 0} for node in NODES}
        before = dict(world.state.reservations), [world.state.device_states(node) for node in NODES]
        at_once(choose_victims(world.context, json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed}).encode()))
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
confinements = st.dictionaries(st.sampled_from(sorted(MEMBERS)), st.sampled_from([(node,) for node in NODES]))
orders = st.lists(st.sampled_from(sorted(MEMBERS)), min_size=4, max_size=20)


@given(
    created=st.sets(st.sampled_from(sorted(MEMBERS)), min_size=2),
    calls=orders,
    blocked=names,
    confined=confinements,
    tainted=st.booleans(),
    proceed=st.integers(0, 6),
    lose=st.booleans(),
)
def test_a_gang_runs_with_enough_members_or_not_at_all(created, calls, blocked, confined, tainted, proceed, lose):
    async def play() -> None:
        run = Play()
        if tainted:
            run.add_tainted_nodes()
        run.watch_the_gate()
        run.world.lose_answers = int(lose)
        run.blocked, run.confined = blocked, confined
        for name in sorted(created):
            await run.create(name)
        for name in calls:
            await run.schedule(name)
            for _ in range(proceed):
                await asyncio.sleep(0)
            run.world.check_promises()
        await run.settle()
        assert not run.faults
        run.world.check_promises()
        for gang, (minimum, _) in GANGS.items():
            event(f"gang {gang}: {run.bound(gang)} of {run.known(gang)} run")
            assert run.bound(gang) == 0 or run.bound(gang) >= minimum, gang
            if run.known(gang) < minimum:
                assert run.bound(gang) == 0

    asyncio.run(play())


STEPS = ("create", "schedule", "schedule", "schedule", "delete", "tell", "wait", "crash", "lose", "preempt", "begin", "begin", "give_up")
steps = st.tuples(st.sampled_from(STEPS), st.sampled_from(sorted(MEMBERS)))


@given(st.lists(steps, min_size=10, max_size=60), confinements)
def test_no_interleaving_promises_a_device_twice_or_leaks_what_a_gang_held(history, confined):
    asyncio.run(play_history(history, confined))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=10_000)
@given(st.lists(steps, min_size=10, max_size=60), confinements)
def test_ten_thousand_histories_of_gangs_keep_the_invariants(history, confined):
    asyncio.run(play_history(history, confined))


async def play_history(history: list[tuple[str, str]], confined: Mapping[str, tuple[str, ...]]) -> None:
    """Play one history with gangs, and check the invariants after each step."""
    run = Play()
    run.confined = dict(confined)
    for name in MEMBERS:
        await run.create(name)
    for step, name in history:
        match step:
            case "tell":
                run.world.tell(1)
            case "wait":
                await asyncio.sleep(0)
                run.world.now += 25.0
                run.world.caught_up_at = run.world.caught_up_at if run.world.untold else run.world.now
                run.world.state.expire(run.world.now, run.world.caught_up_at)
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
        run.world.check_invariants()
    run.world.lose_answers = 0
    await run.calls_end()
    await asyncio.gather(*run.tasks, return_exceptions=True)
    run.world.tell(len(run.world.untold))
    run.world.now = run.world.caught_up_at = run.world.now + 10 * CONFIRM_SECONDS
    run.world.state.expire(run.world.now, run.world.caught_up_at)
    run.world.check_promises()
    run.world.check_nothing_leaked()


async def test_members_wait_until_enough_exist_and_then_hold_room_for_all():
    run = Play()
    for name in ("a0", "a1"):
        await run.create(name)
        sentence = run.filter(name)["FailedAndUnresolvableNodes"]["n1"]
        assert sentence == "gang: 3 members must start together, and fewer with GPUs exist"
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
    refused = run.filter("b0")["FailedAndUnresolvableNodes"]["n1"]
    assert refused == "gang: it reserved room without starting, and planning pauses for a while"
    run.world.now = 121.0
    assert len(run.filter("b0")["NodeNames"]) == 1
    assert run.attempts == ["planned", "expired", "planned"]


async def test_members_beyond_the_least_number_start_as_they_fit():
    run = Play()
    for name in ("b0", "b1", "b2"):
        await run.create(name)
    await run.settle()
    assert run.bound("b") == 3


async def test_member_is_replanned_on_its_allowed_nodes():
    run = Play()
    for name in ("b0", "b1"):
        await run.create(name)
    (planned,) = run.filter("b0")["NodeNames"]
    (other,) = set(NODES) - {planned}
    assert run.filter("b0", (other,))["NodeNames"] == [other]
    assert len(run.world.state.reservations) == 2


async def test_gang_limited_to_one_small_node_does_not_start_in_part():
    members = [f"g{number}" for number in range(4)]
    annotations = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "4"}
    async with FakeApi() as api:
        for name, gpus in (("a1", 2), ("b1", 1), ("b2", 1), ("b3", 1), ("b4", 1)):
            await api.put("nodes", node_object(name))
            await api.put("gpunodes", json.loads(encode_gpu_node(make_node(name, gpus))))
        async with running(api) as extender:
            pods = [await api.put("pods", pod_object(name, vgpu="1", annotations=annotations)) for name in members]
            await extender.until(lambda: len(extender.state.pods) == 4)
            for _ in range(3):  # each finds room on a1 as long as the others seem to fit on the nodes that only we would give them
                calls = []
                for pod in pods:
                    chosen = (await extender.filter(pod, "a1"))["NodeNames"]
                    calls += [asyncio.create_task(extender.bind(pod, node)) for node in chosen]
                    await asyncio.sleep(0.005)
                assert [answer for answer in await asyncio.gather(*calls) if not answer] == []
            assert not any(pod.node_name for pod in extender.state.pods.values())
            chosen = [(await extender.filter(pod, "a1"))["NodeNames"] for pod in pods]
            assert sorted(chosen) == [[], [], ["a1"], ["a1"]], "a1 has two GPUs, at which members wait"


async def test_a_member_that_waits_makes_way_for_one_that_fits_nowhere_else():
    run = Play()
    run.watch_the_gate()
    for name in ("s0", "b0", "b1"):
        await run.create(name)
    await run.bind("s0", "n1")  # leaves one GPU there
    run.filter("b0", ("n1",))
    await run.bind("b0", "n1")
    run.confined = {"b1": ("n1",)}
    await run.schedule("b1")
    await run.settle()
    assert {name: run.world.pods[name].node_name for name in ("b0", "b1")} == {"b0": "n2", "b1": "n1"}


async def test_waiting_member_keeps_place_when_another_is_replanned():
    run = Play()
    for name in ("a0", "a1", "a2"):
        await run.create(name)
    run.filter("a0", ("n1",))
    await run.bind("a0", "n1")
    for nodes in (("n2",), ("n1",), ("n2",)):
        assert run.filter("a1", nodes)["NodeNames"] == list(nodes)
        held = run.world.state.reservations[run.world.uid_of("a0")]
        assert (held.node, held.stage) == ("n1", Stage.READY)


async def test_gang_does_not_start_on_place_lost_by_waiting_member():
    run = Play()
    run.watch_the_gate()
    for name in ("b0", "b1"):
        await run.create(name)
    run.filter("b0", ("n1",))
    await run.bind("b0", "n1")
    run.world.state.set_gpu_node(make_node("n1", 2, shares_per_gpu=MAX_SHARES, cordoned=True))
    run.filter("b1", ("n2",))
    assert json.loads(await run.bind("b1", "n2"))["Error"] == "gang b waits for 1 more of its members"
    await run.settle()
    assert [run.world.pods[name].node_name for name in ("b0", "b1")] == ["n2", "n2"]


async def test_a_member_for_which_filter_finds_nothing_any_more_is_not_ready():
    run = Play()
    run.watch_the_gate()
    for name in ("s0", "s1", "b0", "b1"):
        await run.create(name)
    for name in ("s0", "s1"):
        await run.bind(name, "n2")
    run.filter("b0", ("n1",))
    await run.bind("b0", "n1")
    assert run.filter("b0", ("n2",))["NodeNames"] == []
    run.filter("b1")
    assert json.loads(await run.bind("b1", "n1"))["Error"] == "gang b waits for 1 more of its members"


async def test_room_of_members_past_gate_is_kept_for_limited_time():
    run = Play()
    for name in ("b0", "b1"):
        await run.create(name)
    run.filter("b0", ("n1",))
    await run.bind("b0", "n1")  # kube-scheduler tries it again later
    run.filter("b1", ("n1",))
    await run.bind("b1", "n1")
    run.world.tell(len(run.world.untold))
    state, uid = run.world.state, run.world.uid_of("b0")
    assert (state.reservations[uid].node, state.reservations[uid].stage) == ("n1", Stage.STARTING)
    run.world.now = run.world.caught_up_at = gang_module.START_SECONDS
    state.expire(run.world.now, run.world.caught_up_at)
    assert not state.reservations


async def test_last_member_causes_immediate_retry_of_waiting_ones():
    run, poked = Play(), []

    class Api:
        async def annotate(self, namespace: str, name: str, uid: str, annotations: dict) -> None:
            poked.append(name)

    pod_api = cast(PodApi, Api())  # the retry only annotates
    retry = Retry(run.world.context, pod_api, lambda: True, lambda: 0.0, Telemetry())
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
        ({contract.ANNOTATION_GANG: "g"}, "set both"),
        ({contract.ANNOTATION_GANG_MIN: "2"}, "set both"),
        ({contract.ANNOTATION_GANG: "", contract.ANNOTATION_GANG_MIN: "2"}, "set both"),
        *(({contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: bad}, "from 1 to 4096") for bad in BAD_NUMBERS),
        ({contract.ANNOTATION_DOMAIN: "required"}, "pods of a gang"),
        ({contract.ANNOTATION_DOMAIN_LEVEL: "rack"}, "without aliquot.dev/domain"),
        ({contract.ANNOTATION_DOMAIN: "yes"}, "required or preferred"),
        ({contract.ANNOTATION_DOMAIN: "required", contract.ANNOTATION_DOMAIN_LEVEL: "pool"}, "key of a node label"),
    ],
)
def test_a_gang_that_cannot_be_read_is_refused_with_a_sentence(annotations, says):
    with pytest.raises(RequestError, match=says):
        gang_of("team", annotations)


def test_a_gang_is_a_name_in_a_namespace_and_a_number():
    assert gang_of("team", {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "4"}) == Gang("team", "g", 4)
    assert gang_of("team", {}) is None
