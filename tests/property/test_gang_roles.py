# SPDX-License-Identifier: Apache-2.0
"""Gangs with roles against a model that counts each role by itself: when a gang starts, and which members may end."""

import asyncio
from collections import Counter
from itertools import chain, combinations
from math import inf
from unittest import mock

from hypothesis import event, given
from hypothesis import strategies as st

from aliquot import contract
from scheduler_plugin.core.cluster.state import Stage
from scheduler_plugin.core.gang.standing import is_placed
from scheduler_plugin.core.gang.victims import ending_on, is_extra
from scheduler_plugin.extender import gang as gang_module
from tests.unit.scheduler_plugin.builders import known_gang
from tests.unit.scheduler_plugin.extender.test_gang import Scene

NODES = ("n1", "n2", "n3", "n4")


class Roles(Scene):
    """A gang. Each member has a role, or none."""

    def __init__(self, minima: dict[str, int], free: int, most: int | None = None) -> None:
        """Args: free: how many members without a role the gang needs in addition."""
        super().__init__(max(1, sum(minima.values()) + free), *NODES)
        self.minimum, self.minima, self.role_of = max(1, sum(minima.values()) + free), minima, dict[str, str]()
        self.common = self.gang | ({} if most is None else {contract.ANNOTATION_GANG_MAX: str(max(most, self.minimum))})

    def become(self, uid: str, role: str) -> None:
        """Write the annotations of a member: of its role, or without one."""
        self.role_of[uid] = role
        own = {contract.ANNOTATION_GANG_ROLE: role, contract.ANNOTATION_GANG_ROLE_MIN: str(self.minima.get(role))} if role else {}
        self.gang = self.common | own

    def pod(self, uid: str, mib: int = 1000) -> dict:
        self.become(uid, self.role_of[uid])
        return super().pod(uid, mib)

    def come(self, uid: str, role: str) -> None:
        self.role_of[uid] = role
        self.member(uid)

    def run(self, uid: str, role: str, number: int) -> None:
        """Have a member run on the GPU of this number."""
        self.become(uid, role)
        self.takes(uid, NODES[number // 2], number % 2, of_gang=True)

    def count(self, uids: list[str]) -> int:
        """The model: each role by itself."""
        counts = Counter(self.role_of[uid] for uid in uids)
        return counts[""] + sum(min(count, self.minima[role]) for role, count in counts.items() if role)

    @property
    def placed(self) -> list[str]:
        return [uid for uid in self.role_of if is_placed(self.state, self.state.pods[uid])]

    async def start(self, uid: str, nodes: list[str] | None = None) -> None:
        """Begin the binding of a member; a gang never holds a firm place with too few of a role. Args: nodes: what filter said before."""
        nodes = self.filter(uid)[0] if nodes is None else nodes
        if nodes:
            pod = self.state.pods[uid]
            if not await self.context.gangs.admit(pod, known_gang(pod), nodes[0]):
                self.context.gangs.planner.reserve_on(pod, nodes[0], inf, Stage.BINDING)
        assert not self.placed or self.count(self.placed) >= self.minimum


MINIMA = st.fixed_dictionaries({"master": st.integers(0, 2), "worker": st.integers(0, 3)})
MEMBERS = st.lists(st.sampled_from(["master", "worker", "worker", "worker", ""]), max_size=8)


@given(MINIMA, st.integers(0, 2), MEMBERS, st.none() | st.integers(1, 8), st.randoms(use_true_random=False))
def test_gang_starts_only_when_each_role_has_its_minimum(minima, free, members, most, random):
    async def play() -> None:
        scene = Roles(minima, free, most)
        for number, role in enumerate(members):
            scene.come(f"m{number}", role)
        uids = list(scene.role_of)
        random.shuffle(uids)
        planned = {uid: scene.filter(uid)[0] for uid in uids}
        await asyncio.gather(*(scene.start(uid, planned[uid]) for uid in uids))
        for _ in range(3):  # a member beyond the minimum of its role is tried again once the gang has started
            random.shuffle(uids)
            await asyncio.gather(*(scene.start(uid) for uid in uids if uid not in scene.placed))
        starts = scene.count(uids) >= scene.minimum
        event("starts" if starts else "waits")
        at_most = len(uids) if most is None else max(most, scene.minimum)
        assert len(scene.placed) == (min(len(uids), at_most) if starts else 0)
        if uids and not starts:
            pod = scene.state.pods[uids[0]]
            why = scene.context.gangs.why(pod, known_gang(pod))
            assert f"{scene.minimum} members must start together" in why
            assert ("role" in why) == any(members)

    with mock.patch.object(gang_module, "WAIT_SECONDS", 0.01):
        asyncio.run(play())


@given(MINIMA, st.integers(0, 2), MEMBERS.filter(bool), st.sets(st.integers(0, 7)), st.booleans())
def test_members_end_only_while_each_role_keeps_its_minimum(minima, free, members, elsewhere, chosen):
    scene = Roles(minima, free)
    for number, role in enumerate(members):
        scene.run(f"m{number}", role, number)
    uids = list(scene.role_of)
    gone = uids[:1] if chosen else []
    left = uids[len(gone) :]
    here = [uid for number, uid in enumerate(uids) if uid in left and number not in elsewhere]
    ending = ending_on(scene.state, gone, [scene.state.pods[uid] for uid in here])
    for uid in uids:
        without = [other for other in uids if other != uid]
        assert is_extra(scene.state, scene.state.pods[uid]) == (scene.count(without) >= scene.minimum)
    if gone and left and scene.count(left) < scene.minimum:
        event("the chosen one breaks the gang")
        assert (ending is None) == (here != left)
        assert ending is None or ending.also == set(left)
        return
    assert ending is not None
    bands = {uid: band for band in ending.bands for uid in band.members}
    spare = max(scene.minimum, 0)
    for ended in chain.from_iterable(combinations(here, size) for size in range(1, len(here) + 1)):
        stay = [uid for uid in left if uid not in ended]
        keeps = scene.count(stay) >= min(spare, scene.count(left))
        assert bands[here[0]].spares(frozenset(ended)) == (keeps or not stay)


async def test_needed_members_start_before_extras_where_maximum_is_small():
    scene = Roles({"master": 2, "worker": 2}, 0, most=4)
    names = {"w0": "worker", "w1": "worker", "w2": "worker", "m0": "master", "m1": "master"}
    for uid, role in names.items():
        scene.come(uid, role)
    for uid in names:
        assert scene.filter(uid)[0], "each takes the place of another one of its role in the plan"
    planned = {uid: scene.filter(uid)[0] for uid in names}
    with mock.patch.object(gang_module, "WAIT_SECONDS", 0.01):
        for uid in names:
            await scene.start(uid, planned[uid])
    assert Counter(names[uid] for uid in scene.placed) == {"master": 2, "worker": 2}
