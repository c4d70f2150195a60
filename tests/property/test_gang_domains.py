# SPDX-License-Identifier: Apache-2.0
"""A gang uses the fewest domains, or one if it must: compared with all sets of domains on small clusters.

The members of a gang are equal here, because only then the fewest domains can be counted in advance.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import inf

from hypothesis import event, given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract.gpunode import GpuDevice
from scheduler_plugin.core.cluster.state import ClusterState
from tests.unit.scheduler_plugin.builders import make_context, make_device, make_node, make_pod, make_share

LEVELS = {"clique": "clique", "rack": "cloud.example/topology-rack", "zone": "topology.kubernetes.io/zone", "row": "example/topology-row"}


@dataclass(frozen=True)
class Scene:
    """Nodes by domain, each with the seats that its GPUs have, and a gang."""

    level: str
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    """The domain of each node, empty for a node without one, and the free seats of its GPUs."""
    members: int
    vgpus: int
    placed_on: int | None
    """A node on which one more member runs already."""

    def build(self, mode: str) -> tuple[ClusterState, list[str]]:
        """Return the state, and the UIDs of the waiting members."""
        state = ClusterState()
        for number, (domain, seats) in enumerate(self.nodes):
            name = f"n{number}"
            devices = [make_device(name, minor, mib=1010) for minor in range(len(seats))]
            clique = domain if self.level == "clique" else ""
            node = make_node(name, devices)
            entries = tuple(GpuDevice(device, fabric_clique=clique) for device in devices)
            state.set_gpu_node(make_node(name, devices) if not clique else node.__class__(name, entries, isolation=node.isolation))
            if self.level != "clique" and domain:
                state.set_place(name, {LEVELS[self.level]: domain})
            for minor, free in enumerate(seats):
                taken = {"main": [make_share(name, minor, 1000 - 300 * free)]}
                state.set_pod(make_pod(f"other-{number}-{minor}", node=name, shares=taken, vgpu="1", vgpu_memory="1"))
        level = LEVELS["row"] if self.level == "row" else self.level
        annotations = {
            contract.ANNOTATION_GANG: "g",
            contract.ANNOTATION_GANG_MIN: str(self.members + (self.placed_on is not None)),
            contract.ANNOTATION_DOMAIN: mode,
            contract.ANNOTATION_DOMAIN_LEVEL: level,
        }
        if self.placed_on is not None:
            shares = {"main": [make_share(f"n{self.placed_on}", 0, 1)]}
            state.set_pod(make_pod("placed", node=f"n{self.placed_on}", shares=shares, annotations=annotations, vgpu="1", vgpu_memory="1"))
        uids = [f"m{number}" for number in range(self.members)]
        for uid in uids:
            state.set_pod(make_pod(uid, annotations=annotations, vgpu=str(self.vgpus), vgpu_memory=str(300 * self.vgpus)))
        return state, uids

    def domain(self, number: int) -> str:
        return self.nodes[number][0] or f"n{number}"

    def seats(self) -> Counter[str]:
        """Count how many members fit in each domain."""
        counts: Counter[str] = Counter()
        for number, (_, seats) in enumerate(self.nodes):
            counts[self.domain(number)] += most_members(tuple(sorted(seats)), self.vgpus)
        return counts

    def fewest(self) -> int | None:
        """Return how many domains the waiting members need at least, besides the one in use; None if all are too few."""
        counts = self.seats()
        used = set() if self.placed_on is None else {self.domain(self.placed_on)}
        others = [name for name in counts if name not in used]
        for size in range(len(others) + 1):
            for chosen in combinations(others, size):
                if sum(counts[name] for name in {*used, *chosen}) >= self.members:
                    return size
        return None


@cache
def most_members(seats: tuple[int, ...], vgpus: int) -> int:
    """Return how many members fit on one node, by trying all ways."""
    most = 0
    for chosen in combinations(range(len(seats)), vgpus):
        if all(seats[device] for device in chosen):
            left = tuple(sorted(free - (device in chosen) for device, free in enumerate(seats)))
            most = max(most, 1 + most_members(left, vgpus))
    return most


@st.composite
def scenes(draw: st.DrawFn, vgpus: Sequence[int] = (1,)) -> Scene:
    seats = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
    nodes = tuple(draw(st.lists(st.tuples(st.sampled_from(["a", "a", "b", "b", "c", ""]), seats), min_size=1, max_size=6)))
    placed = draw(st.none() | st.integers(0, len(nodes) - 1))
    return Scene(draw(st.sampled_from([*LEVELS])), nodes, draw(st.integers(1, 6)), draw(st.sampled_from(vgpus)), placed)


def places(scene: Scene, mode: str) -> list[int] | None:
    """Plan the gang; return the number of the node of each member, or None without a plan. All members have a place, or no member."""
    state, uids = scene.build(mode)
    planner = make_context(state).gangs.planner
    members = [state.pods[uid] for uid in uids]
    complete = planner.reserve_all(members, frozenset(state.names), inf)
    assert len(state.reservations) == (len(uids) if complete else 0)
    return [int(state.reservations[uid].node[1:]) for uid in uids] if complete else None


@given(scenes())
def test_preferred_gang_uses_fewest_domains(scene):
    found, fewest = places(scene, "preferred"), scene.fewest()
    event(f"{fewest} more domains")
    assert (found is None) == (fewest is None)
    if found is not None:
        used = {scene.domain(number) for number in found} - ({scene.domain(scene.placed_on)} if scene.placed_on is not None else set())
        assert len(used) == fewest


@given(scenes())
def test_required_gang_is_in_one_domain_if_one_has_room(scene):
    found, counts = places(scene, "required"), scene.seats()
    able = [name for name, count in counts.items() if count >= scene.members]
    if scene.placed_on is not None:
        able = [name for name in able if name == scene.domain(scene.placed_on)]
    event("a domain has room" if able else "no domain has room")
    assert (found is None) == (not able)
    if found is not None:
        (used,) = {scene.domain(number) for number in found}
        assert used in able
        assert counts[used] == min(counts[name] for name in able), "the smallest with room"


@given(scenes(vgpus=(2,)), st.sampled_from(["required", "preferred"]))
def test_domains_of_members_with_two_gpus_each_have_room(scene, mode):
    """Which GPUs a member takes decides whether the next one fits, so a plan can fail here. It never breaks the rules."""
    found = places(scene, mode)
    if found is None:
        return
    taken = Counter(found)
    assert all(taken[number] <= most_members(tuple(sorted(scene.nodes[number][1])), 2) for number in taken)
    assert mode == "preferred" or len({scene.domain(number) for number in found}) == 1
