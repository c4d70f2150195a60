# SPDX-License-Identifier: Apache-2.0
"""Any interleaving of filter, prioritize, bind, preparing, deletion, time, lost answers, late watches, crashes and takeovers keeps the
invariants, after each step.

The oracle is the API's own picture of the pods, summed up by hand:

- I1: no device is promised more than it has.
- I2: a bound pod's devices are its own, on its node, as many as it asked for.
- I3: the scheduler holds nothing for a pod that is gone, once it received that. At the end it holds exactly what the bound pods hold.
- I4: the memory and cores of a pod are what it asked for.
- I5: node and devices of a bound pod never change, whichever process crashes or takes over.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract import codec
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from aliquot.placement.request import pod_request
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender import bind as bind_module
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.prioritize import prioritize_nodes
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod

NODES = ("n1", "n2")
PODS = tuple(f"p{number}" for number in range(6))
DEVICE_MIB, MAX_SHARES = 1000, 3
SOFT_SECONDS, CONFIRM_SECONDS = 10.0, 30.0


class World:
    """The API's truth, and the scheduler that lives on it."""

    def __init__(self) -> None:
        self.pods: dict[str, PodFacts] = {}
        self.untold: list[PodFacts | str] = []
        """What the scheduler has not received yet, in order: pods as they became, UIDs of pods that were deleted."""
        self.created = 0
        self.replica = 0
        """The one that leads; an earlier one goes on until it finds that it does not lead any more."""
        self.lose_answers = 0
        self.drop_requests = 0
        self.now = 0.0
        self.caught_up_at = 0.0
        self.nodes = [make_node(name, 2, shares_per_gpu=MAX_SHARES) for name in NODES]
        self.bound: dict[str, tuple[str, str]] = {}
        """Node and assignment of each pod that was seen bound, by UID."""
        self.start()

    def start(self) -> None:
        """Start the scheduler with only what the API lists."""
        self.state = ClusterState()
        self.state.replace_gpu_nodes(self.nodes)
        self.context = make_context(self.state, soft_seconds=SOFT_SECONDS, monotonic=lambda: self.now)
        self.replica += 1
        mine = self.replica
        self.binder = Binder(self.context, self, lambda: self.replica == mine)
        self.list_pods()

    def list_pods(self) -> None:
        self.state.replace_pods(self.pods.values())
        self.untold.clear()
        self.caught_up_at = self.now

    def uid_of(self, name: str) -> str:
        """Return the UID by which kube-scheduler knows a pod; it does not know yet that one is gone."""
        return self.pods[name].uid if name in self.pods else "uid-of-one-that-is-gone"

    def tell(self, count: int) -> None:
        """Let the watch deliver some changes."""
        for change in self.untold[:count]:
            if isinstance(change, str):
                self.state.drop_pod(change)
            else:
                self.state.set_pod(change)
        del self.untold[:count]
        if not self.untold:
            self.caught_up_at = self.now

    # --- ports.PodApi ---

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        del namespace
        await asyncio.sleep(0)
        if self.drop_requests:
            self.drop_requests -= 1
            raise KubeApiError("no answer, and nothing happened")
        pod = self.pods.get(name)
        if pod is None:
            raise KubeNotFoundError("no such pod")
        if pod.node_name or pod.uid != uid:
            raise KubeConflictError("already assigned")
        gpu = replace(pod.gpu, node_name=node, annotations={**pod.gpu.annotations, **annotations})
        self.pods[name] = replace(pod, node_name=node, gpu=gpu)
        self.untold.append(self.pods[name])
        if self.lose_answers:
            self.lose_answers -= 1
            raise KubeApiError("no answer")

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        del namespace
        await asyncio.sleep(0)
        return self.pods.get(name)

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        raise AssertionError("nothing asks for succeeded pods here")

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        raise AssertionError("nobody retries here")

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        raise AssertionError("nothing preempts here")

    # --- the oracle ---

    def promised(self) -> dict[str, list[tuple[int, int | None]]]:
        held = defaultdict(list)
        for pod in self.pods.values():
            if pod.node_name:
                text = pod.gpu.annotations[contract.ANNOTATION_ASSIGNMENT]
                for container in codec.decode_assignment(text, pod_uid=pod.uid).containers:
                    for share in container.shares:
                        held[share.device_uuid].append((share.memory_bytes >> 20, share.cores_percent))
        return held

    def check_promises(self) -> None:
        for uuid, shares in self.promised().items():
            assert sum(mib for mib, _ in shares) <= DEVICE_MIB, uuid
            assert sum(cores or 0 for _, cores in shares) <= (100 if None not in [cores for _, cores in shares] else 99), uuid
            assert len(shares) <= MAX_SHARES, uuid

    def check_invariants(self) -> None:
        """Check what must hold after each step."""
        self.check_promises()
        for pod in self.pods.values():
            if pod.node_name:
                self.check_pod(pod)
        if not self.untold:
            known = {pod.uid for pod in self.pods.values()} | self.state.reservations.keys()
            assert self.state.pods.keys() <= known
            assert all(not self.state.footprint_of(uid) for uid in self.bound.keys() - known)

    def check_pod(self, pod: PodFacts) -> None:
        text = pod.gpu.annotations[contract.ANNOTATION_ASSIGNMENT]
        assert self.bound.setdefault(pod.uid, (pod.node_name, text)) == (pod.node_name, text)
        (asked,) = pod_request(pod.gpu).containers
        (given,) = codec.decode_assignment(text, pod_uid=pod.uid).containers
        (node,) = [node for node in self.nodes if node.name == pod.node_name]
        assert given.container == asked.container
        assert len({share.device_uuid for share in given.shares}) == asked.vgpus
        assert {share.device_uuid for share in given.shares} <= {entry.device.uuid for entry in node.devices}
        memory = asked.memory_bytes_per_vgpu or DEVICE_MIB << 20
        assert {(share.memory_bytes, share.cores_percent) for share in given.shares} == {(memory, asked.cores_percent_per_vgpu)}

    def check_nothing_leaked(self) -> None:
        held = self.promised()
        for node in NODES:
            for state in self.state.device_states(node):
                shares = held.get(state.device.uuid, [])
                assert state.used_memory_bytes >> 20 == sum(mib for mib, _ in shares)
                assert state.used_shares == len(shares)
        assert not self.state.reservations


SHAPES: tuple[dict[str, Any], ...] = (
    {"vgpu": "1", "vgpu_memory": "400"},
    {"vgpu": "2", "vgpu_memory": "1200", "vgpu_cores": "80"},
    {"vgpu": "1"},
)


class Play:
    """One history: a method per step, which is given two numbers."""

    def __init__(self) -> None:
        self.world = World()
        self.tasks: set[asyncio.Task] = set()

    async def run(self, history: list[tuple[str, int, int]]) -> int:
        for step, number, other in history:
            await getattr(self, step)(number, other)
            self.world.check_invariants()
        await self.settle()
        self.world.check_nothing_leaked()
        return sum(bool(pod.node_name) for pod in self.world.pods.values())

    async def create(self, number: int, _: int) -> None:
        name, world = PODS[number], self.world
        if name not in world.pods:
            world.created += 1
            pod = make_pod(f"uid-{name}-{world.created}", **SHAPES[number % len(SHAPES)])
            world.pods[name] = replace(pod, name=name, namespace="team")
            world.untold.append(world.pods[name])

    async def delete(self, number: int, _: int) -> None:
        pod = self.world.pods.pop(PODS[number], None)
        if pod is not None:
            self.world.untold.append(pod.uid)

    async def filter(self, number: int, other: int) -> None:
        filter_body(self.world.context, self.call(number, NODES[: 1 + other % 2]), 0.0)

    async def prioritize(self, number: int, _: int) -> None:
        prioritize_nodes(self.world.context, self.call(number, NODES))

    async def prepare(self, *_: int) -> None:
        self.world.context.prepare()

    def call(self, number: int, names: tuple[str, ...]) -> bytes:
        pod = pod_object(PODS[number], uid=self.world.uid_of(PODS[number]), **SHAPES[number % len(SHAPES)])
        return json.dumps({"Pod": pod, "NodeNames": names}).encode()

    async def bind(self, number: int, other: int) -> None:
        name = PODS[number]
        args = {"PodName": name, "PodNamespace": "team", "PodUID": self.world.uid_of(name), "Node": NODES[other % len(NODES)]}
        self.tasks.add(asyncio.create_task(self.world.binder.bind(json.dumps(args).encode())))

    async def lose(self, *_: int) -> None:
        self.world.lose_answers = 1

    async def drop(self, _: int, other: int) -> None:
        self.world.drop_requests = other

    async def proceed(self, _: int, other: int) -> None:
        for _turn in range(2 * other):
            await asyncio.sleep(0)

    async def tell(self, _: int, other: int) -> None:
        self.world.tell(other)

    async def relist(self, *_: int) -> None:
        self.world.list_pods()

    async def wait(self, *_: int) -> None:
        world = self.world
        world.now += 6.0
        world.caught_up_at = world.caught_up_at if world.untold else world.now
        world.state.expire(world.now, world.caught_up_at)

    async def crash(self, *_: int) -> None:
        await self.world.binder.stop()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        self.world.start()

    async def takeover(self, *_: int) -> None:
        """The leader loses its lease; what it has sent arrives before the next one lists the pods (services.leadership)."""
        self.world.replica += 1
        for _turn in range(3):
            await asyncio.sleep(0)
        self.world.start()

    async def settle(self) -> None:
        """Let everything under way end, tell everything, and let time pass."""
        world = self.world
        world.lose_answers = world.drop_requests = 0
        await asyncio.gather(*self.tasks, return_exceptions=True)
        world.tell(len(world.untold))
        world.now = world.caught_up_at = world.now + 10 * CONFIRM_SECONDS
        world.state.expire(world.now, world.caught_up_at)


STEPS = (
    "create",
    "delete",
    "filter",
    "prioritize",
    "prepare",
    "bind",
    "bind",
    "bind",
    "bind",
    "lose",
    "drop",
    "proceed",
    "proceed",
    "tell",
    "relist",
    "wait",
    "crash",
    "takeover",
)
WIDE = tuple(number for number in range(len(PODS)) if SHAPES[number % len(SHAPES)]["vgpu"] == "2")
"""Those that take every GPU of a node: two of them on one node are the shortest way to a device that is promised twice."""
steps = st.tuples(st.sampled_from(STEPS), st.sampled_from((*range(len(PODS)), *2 * WIDE)), st.integers(0, 4))


@given(st.lists(steps, min_size=5, max_size=60))
@example(
    [("bind", 2, 0), ("proceed", 0, 2), ("bind", 2, 1), ("bind", 0, 0), ("proceed", 0, 2)]
)  # bound, not yet seen bound, bound elsewhere
@example(
    [("drop", 0, 4), ("bind", 2, 0), ("takeover", 0, 0), ("bind", 5, 0), ("bind", 0, 0), *[("proceed", 0, 4)] * 3]
)  # the old leader still tries to bind when the new one gives the device away
@example(
    [("bind", 1, 0), ("proceed", 0, 1), ("wait", 0, 0), ("bind", 4, 0), *[("proceed", 0, 4)] * 2]
)  # the API takes its time, and what was planned may not be given away meanwhile
@example(
    [("lose", 0, 0), ("bind", 1, 0), *[("proceed", 0, 4)] * 2, ("bind", 4, 0), *[("proceed", 0, 4)] * 2]
)  # written without an answer: the conflict of the second try is the first one's success
@example(
    [("prioritize", 2, 0), ("prepare", 0, 0), *[("bind", 0, node) for node in range(2)], *[("bind", 2, node) for node in range(2)]]
)  # what was planned for a pod is not there any more when it is bound
@example([("drop", 0, 3), ("bind", 2, 0), ("takeover", 0, 0), ("bind", 5, 0), ("bind", 0, 0), *[("proceed", 0, 4)] * 3])
def test_no_interleaving_promises_a_device_twice_or_leaks_a_share(history):
    event(f"{play(history)} pods bound at the end")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(st.lists(steps, min_size=5, max_size=60))
def test_ten_thousand_histories_keep_the_invariants_after_each_step(history):
    play(history)


@pytest.mark.parametrize("trouble", ["none", "lose", "drop"])
@pytest.mark.parametrize("between", ["nothing", "wait", "tell", "relist", "delete", "crash", "takeover"])
def test_of_two_pods_wanting_same_whole_node_one_gets_it(trouble, between):
    """Every history of this form: a drawn one has each of its steps in its place too seldom."""
    first, second = WIDE
    start = [] if trouble == "none" else [(trouble, 0, 2)]
    middle = [] if between == "nothing" else [(between, first, 1)]
    for turns in range(6):
        play([*start, ("bind", first, 0), ("proceed", 0, turns), *middle, ("bind", second, 0), *[("proceed", 0, 4)] * 4])


def play(history: list[tuple[str, int, int]]) -> int:
    """Play a history; return how many pods are bound at its end."""
    prelude = [("create", number, 0) for number in range(len(PODS))] + [("tell", 0, 6)]
    # The world's clock stands still meanwhile, and a replica that lost the lease looks up what it sent until its caller is answered.
    with mock.patch.object(bind_module, "FIRST_RETRY_SECONDS", 0.0), mock.patch.object(bind_module, "REPLY_SECONDS", 0.2):
        return asyncio.run(Play().run(prelude + history))
