# SPDX-License-Identifier: Apache-2.0
"""Any history of pods, controllers, lost and late answers, late watches, crashes and takeovers keeps the invariants of planned claims.

- I1: no capacity of a device is allocated twice, to claims or to pods with vGPUs on the same GPUs.
- A gate opens only after all claims of its pod are allocated, and for a gang only after enough members have theirs.
- A pod ends only for a more important one.
- A pod that waits has an explanation, and explaining changes nothing.
- At the end: a pod with allocated claims has no gate, no part of a gang keeps devices without starting, and nothing waits that fits.
"""

import asyncio
from collections.abc import Sequence
from math import inf
from unittest import mock

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from aliquot import contract
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.services import claim_planner
from tests.integration.claim_world import DEVICE_MIB, ClaimWorld, Json, is_planned
from tests.unit.scheduler_plugin.claim_builders import asking

NODES = ("n1", "n2")
SHAPES = (
    ((asking(memory="400Mi"),), 0),
    ((asking(memory="700Mi", cores="60"),), 0),
    ((asking(count=2, memory="600Mi"),), 0),
    ((asking("a", memory="300Mi"), asking("b", memory="500Mi")), 0),
    ((asking(memory="900Mi"),), 3),
)
"""Requests, and the minimum of the gang."""
NAMES = tuple(f"p{number}" for number in range(8))
WITH_IDS = ((300, None), (500, 70), (900, None), (100, 30))
"""Memory in MiB and cores of pods with vGPUs."""


class Watched(ClaimWorld):
    """Checks each gate that opens, and each eviction."""

    def _open(self, pod: PodFacts) -> None:
        is_there = pod.name in self.pods and self.pods[pod.name]["metadata"]["uid"] == pod.uid
        if is_there and self.is_gated(pod.name):
            self.check_opening(pod.name)
        super()._open(pod)

    def check_opening(self, name: str) -> None:
        annotations = self.pods[name]["metadata"]["annotations"]
        least = int(annotations.get(contract.ANNOTATION_GANG_MIN, "1"))
        assert len(self.allocated(name) if least > 1 else [name]) >= least - self.lost
        if not self.lost:
            assert self.results(name)

    def allocated(self, like: str) -> Sequence[str]:
        def gang_of(name: str) -> object:
            return self.pods[name]["metadata"]["annotations"].get(contract.ANNOTATION_GANG)

        return [name for name in self.pods if gang_of(name) == gang_of(like) and self.results(name)]

    lost = 0
    """How many pods or allocations others took away while a round was running: the planner cannot know of them in time."""

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        priorities = [pod["spec"]["priority"] for pod in self.pods.values() if not pod["spec"].get("nodeName")]
        if name in self.pods and not self.lost:
            assert self.pods[name]["spec"]["priority"] < max(priorities)
        await super().evict(namespace, name, uid, dry_run=dry_run)


class Play:
    """One history: a method for each step, which gets two numbers."""

    def __init__(self) -> None:
        self.world = Watched(NODES)
        self.rounds: set[asyncio.Task[None]] = set()

    async def run(self, history: Sequence[tuple[str, int, int]]) -> int:
        for step, number, other in history:
            await getattr(self, step)(number, other)
            self.world.check()
        for name in NODES:
            self.world.return_node(name)
        self.world.land()
        self.world.drop_requests = self.world.lose_answers = self.world.delay_requests = 0
        await asyncio.gather(*self.rounds)
        self.world.lost = 0
        await self.world.settle()
        self.check_end()
        return sum(bool(self.world.results(name)) for name in self.world.pods)

    def check_end(self) -> None:
        world = self.world
        world.check()
        for name in filter(lambda name: is_planned(world.pods[name]), world.pods):
            assert not (world.results(name) and world.is_gated(name)), name
            if not world.results(name):
                self.check_waits(name)
        self.check_explained()

    def check_explained(self) -> None:
        """Each pod that waits has an explanation, which changes nothing."""
        world, before = self.world, dict(self.world.state.reservations)
        for pod in world.planned.by_uid.values():
            assert bool(world.why.sentence(pod.facts)) >= (pod.is_held and not pod.facts.node_name)
        assert world.state.reservations == before

    def check_waits(self, name: str) -> None:
        """A single pod that waits finds no free memory."""
        annotations = self.world.pods[name]["metadata"]["annotations"]
        [request, *more] = self.world.claims[self.world.claim_name(self.world.pods[name])]["spec"]["devices"]["requests"]
        if contract.ANNOTATION_GANG in annotations or request["exactly"]["count"] > 1 or more:
            return
        wanted, used = request["exactly"]["capacity"]["requests"], self.world.used()
        for node in NODES:
            for minor in range(2):
                amounts = used.get((node, f"gpu-{minor}"), {})
                memory = DEVICE_MIB - int(amounts.get("memory", 0)) // (1 << 20)
                assert memory < int(wanted["memory"][:-2]) or 100 - amounts.get("cores", 0) < int(wanted.get("cores", 1))

    async def create(self, number: int, other: int) -> None:
        if NAMES[number] not in self.world.pods:
            requests, gang = SHAPES[number % len(SHAPES)] if number < 5 else SHAPES[4]
            self.world.create_pod(NAMES[number], *requests, gang=gang, priority=other % 2)

    async def create_with_ids(self, number: int, other: int) -> None:
        name = f"v{number}"
        if name not in self.world.pods:
            self.world.create_with_ids(name, *WITH_IDS[number % len(WITH_IDS)], priority=other % 2)

    async def schedule_with_ids(self, number: int, _: int) -> None:
        if f"v{number}" in self.world.pods:
            self.world.kube_scheduler(f"v{number}")

    async def delete_with_ids(self, number: int, _: int) -> None:
        if f"v{number}" in self.world.pods:
            self.note_loss()
            self.world.delete_pod(f"v{number}")

    async def delete(self, number: int, _: int) -> None:
        if NAMES[number] in self.world.pods:
            self.note_loss()
            self.world.delete_pod(NAMES[number])

    async def terminate(self, number: int, _: int) -> None:
        if NAMES[number] in self.world.pods:
            self.note_loss()
            self.world.terminate(NAMES[number])

    async def schedule(self, number: int, other: int) -> None:
        if NAMES[number] in self.world.pods:
            if not other:
                self.note_loss()
            self.world.kube_scheduler(NAMES[number], accepts=bool(other))

    def note_loss(self) -> None:
        self.world.lost += 1

    async def plan(self, *_: int) -> None:
        if all(task.done() for task in self.rounds):
            if not self.world.untold:
                self.world.lost = 0
            self.rounds.add(asyncio.create_task(self.world.planner.step()))

    async def proceed(self, _: int, other: int) -> None:
        for _turn in range(3 * other):
            await asyncio.sleep(0)

    async def tell(self, number: int, other: int) -> None:
        self.world.tell(None if number % 2 else other)

    async def relist(self, *_: int) -> None:
        self.world.relist()

    async def drop(self, _: int, other: int) -> None:
        self.world.drop_requests = other

    async def lose(self, _: int, other: int) -> None:
        self.world.lose_answers = other

    async def delay(self, _: int, other: int) -> None:
        self.world.delay_requests = other

    async def land(self, *_: int) -> None:
        self.world.land()

    async def explain(self, *_: int) -> None:
        self.check_explained()

    async def wait(self, _: int, other: int) -> None:
        for _seconds in range(other):  # a write that failed is repeated at least every 30 seconds
            await self.proceed(0, 4)
            self.world.now += 10.0
            self.world.state.expire(self.world.now, -inf)

    async def node_leaves(self, number: int, _: int) -> None:
        self.note_loss()
        self.world.remove_node(NODES[number % 2])

    async def node_returns(self, number: int, _: int) -> None:
        self.world.return_node(NODES[number % 2])

    async def crash(self, *_: int) -> None:
        for task in self.rounds:
            task.cancel()
        await asyncio.gather(*self.rounds, return_exceptions=True)
        self.rounds.clear()
        self.world.start()

    async def takeover(self, *_: int) -> None:
        """The leader loses its lease; what it has sent arrives before the next one lists the claims."""
        self.world.replica += 1
        for _turn in range(4):
            await asyncio.sleep(0)
        self.world.start()


STEPS = (
    *("create", "create", "create", "delete", "terminate", "schedule", "schedule", "plan", "plan", "plan", "proceed", "proceed", "tell"),
    *("tell", "relist", "drop", "lose", "delay", "land", "wait", "node_leaves", "node_returns", "crash", "takeover"),
    *("explain", "create_with_ids", "create_with_ids", "schedule_with_ids", "schedule_with_ids", "schedule_with_ids", "delete_with_ids"),
)
steps = st.tuples(st.sampled_from(STEPS), st.integers(0, len(NAMES) - 1), st.integers(0, 4))
GANG = [("create", number, 0) for number in (4, 5, 6)]


def play(history: Sequence[tuple[str, int, int]]) -> int:
    with mock.patch.object(claim_planner, "FIRST_PAUSE_SECONDS", 0.0):
        return asyncio.run(Play().run(history))


@settings(max_examples=60, derandomize=True)
@given(st.lists(steps, min_size=5, max_size=60))
@example([*GANG, ("tell", 1, 0), ("plan", 0, 0), ("proceed", 0, 1), ("crash", 0, 0), ("delete", 5, 0), ("plan", 0, 0)])
@example([("create", 0, 0), ("create", 1, 0), ("tell", 1, 0), ("delay", 0, 1), ("plan", 0, 0), ("proceed", 0, 4), ("crash", 0, 0)])
@example([*GANG, ("tell", 1, 0), ("plan", 0, 0), ("proceed", 0, 4), ("proceed", 0, 4), ("node_leaves", 0, 0), ("tell", 1, 0)])
def test_no_history_allocates_capacity_twice_or_starts_half_a_gang(history: list[tuple[str, int, int]]) -> None:
    event(f"{play(history)} pods with devices at the end")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(st.lists(steps, min_size=5, max_size=60))
def test_ten_thousand_histories_of_planned_claims(history: list[tuple[str, int, int]]) -> None:
    play(history)


def test_world_is_no_easier_than_kubernetes() -> None:
    """The controllers of the world free what they should: otherwise the invariants would say little."""
    world = ClaimWorld(["n1"])
    world.create_pod("p", asking(memory="400Mi"))
    asyncio.run(world.settle())
    pod: Json = world.pods["p"]
    assert pod["spec"]["nodeName"] == "n1"
    world.delete_pod("p")
    assert not world.used()
