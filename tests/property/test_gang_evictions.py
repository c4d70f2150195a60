# SPDX-License-Identifier: Apache-2.0
"""Victims for a gang are the cheapest there are on all nodes, and no other gang breaks: compared with all subsets of up to eight pods."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations

from hypothesis import event, given
from hypothesis import strategies as st

from aliquot import contract
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.selectors import exactly
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.gang.plan import finish
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.gang_evictions import plan_over_nodes
from tests.unit.scheduler_plugin.builders import make_context, make_device, make_node, make_pod, make_share

GPU_MIB, IMPORTANT, EQUAL_OR_MORE = 1000, 100, 200


@dataclass(frozen=True)
class Other:
    """A pod that runs."""

    node: int
    gpu: int
    mib: int
    priority: int
    gang: str
    covered: bool
    """Whether the disruption budget counts it."""
    just_started: bool = False
    """Whether it has not run for its minimum yet."""


@dataclass(frozen=True)
class Scene:
    """Nodes with pods, and a gang that waits."""

    gpus: tuple[int, ...]
    """By node."""
    racks: tuple[str, ...]
    """By node."""
    others: tuple[Other, ...]
    minimums: Mapping[str, int]
    """By gang of the others."""
    members: int
    mib: int
    required: bool
    allowed: int
    """How many covered pods may end."""

    def build(self) -> tuple[ExtenderContext, list[str]]:
        state = ClusterState()
        for number, count in enumerate(self.gpus):
            state.set_gpu_node(make_node(f"n{number}", [make_device(f"n{number}", minor, mib=GPU_MIB) for minor in range(count)]))
            state.set_place(f"n{number}", {"example/rack": self.racks[number]})
        context = make_context(state)
        context.budgets.put(Budget("team", "b", tuple(exactly({"covered": "yes"})), self.allowed))
        for number, other in enumerate(self.others):
            annotations = gang(other.gang, self.minimums[other.gang]) if other.gang else {}
            if other.just_started:
                annotations |= {contract.ANNOTATION_MIN_RUNTIME: "1m"}
            shares = {"main": [make_share(f"n{other.node}", other.gpu, other.mib)]}
            pod = make_pod(f"v{number}", node=f"n{other.node}", shares=shares, annotations=annotations, priority=other.priority, vgpu="1")
            state.set_pod(replace(pod, labels=(("covered", "yes"),) if other.covered else (), started_at=0.0))
        annotations = gang("ours", self.members)
        if self.required:
            annotations |= {contract.ANNOTATION_DOMAIN: "required", contract.ANNOTATION_DOMAIN_LEVEL: "rack"}
        uids = [f"m{number}" for number in range(self.members)]
        for uid in uids:
            state.set_pod(make_pod(uid, priority=IMPORTANT, annotations=annotations, vgpu="1", vgpu_memory=str(self.mib)))
        return context, uids

    def subsets(self) -> Iterable[tuple[int, ...]]:
        able = [number for number, other in enumerate(self.others) if other.priority < IMPORTANT and not other.just_started]
        return chain.from_iterable(combinations(able, size) for size in range(len(able) + 1))

    def works(self, ended: Iterable[int]) -> bool:
        """Whether the gang fits, all other gangs keep their minimum or end whole, and the budget holds."""
        gone = set(ended)
        if sum(self.others[number].covered for number in gone) > self.allowed:
            return False
        for name, least in self.minimums.items():
            members = [number for number, other in enumerate(self.others) if other.gang == name]
            left = [number for number in members if number not in gone]
            if 0 < len(left) < min(least, len(members)) or (len(left) < least and 0 < len(left) < len(members)):
                return False
        used: Counter[tuple[int, int]] = Counter()
        for number, other in enumerate(self.others):
            used[other.node, other.gpu] += 0 if number in gone else other.mib
        seats: Counter[str] = Counter()
        for node, count in enumerate(self.gpus):
            for gpu in range(count):
                seats[self.racks[node] if self.required else ""] += max(0, GPU_MIB - used[node, gpu]) // self.mib
        return max(seats.values()) >= self.members

    def rank(self, ended: Iterable[int]) -> tuple[float, int, int]:
        priorities = [self.others[number].priority for number in ended]
        return max(priorities, default=-math.inf), len(priorities), sum(priorities)


def gang(name: str, minimum: int) -> dict[str, str]:
    return {contract.ANNOTATION_GANG: name, contract.ANNOTATION_GANG_MIN: str(minimum)}


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    gpus = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    racks = tuple(draw(st.sampled_from(["r1", "r2"])) for _ in gpus)
    others: list[Other] = []
    for node, count in enumerate(gpus):
        for gpu in range(count):
            for mib in draw(st.sampled_from([(), (600,), (1000,), (400, 500), (400, 500)])):
                priority = draw(st.sampled_from([-5, 0, 0, 10, EQUAL_OR_MORE]))
                in_gang, just_started = draw(st.sampled_from(["", "", "a", "b"])), draw(st.sampled_from([False, False, False, True]))
                others.append(Other(node, gpu, mib, priority, in_gang, draw(st.booleans()), just_started))
    minimums = {"a": draw(st.integers(1, 3)), "b": draw(st.integers(1, 3))}
    mib = draw(st.sampled_from([300, 500, 1000]))
    return Scene(gpus, racks, tuple(others[:8]), minimums, draw(st.integers(2, 4)), mib, draw(st.booleans()), draw(st.integers(0, 3)))


@given(scenes())
def test_no_set_of_victims_on_any_nodes_is_cheaper(scene):
    context, uids = scene.build()
    working = [ended for ended in scene.subsets() if scene.works(ended)]
    before = dict(context.state.reservations)
    plan = finish(plan_over_nodes(context, context.state.pods[uids[0]], frozenset(context.state.names), (), max_checks=100_000))
    event(
        "impossible"
        if plan is None
        else f"{len(plan.ended)} victims on {len({context.state.pods[uid].node_name for uid in plan.ended})} nodes"
    )
    assert context.state.reservations == before, "a search changes nothing"
    assert (plan is None) == (not working)
    if plan is not None:
        ended = [int(uid[1:]) for uid in plan.ended]
        assert scene.works(ended)
        assert scene.rank(ended) == min(map(scene.rank, working))


@given(scenes())
def test_with_few_checks_each_victim_is_needed(scene):
    context, uids = scene.build()
    plan = finish(plan_over_nodes(context, context.state.pods[uids[0]], frozenset(context.state.names), ()))
    if plan is not None:
        ended = {int(uid[1:]) for uid in plan.ended}
        assert scene.works(ended)
        assert not [number for number in ended if scene.works(ended - {number})]
