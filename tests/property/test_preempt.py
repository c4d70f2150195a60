# SPDX-License-Identifier: Apache-2.0
"""Victims are the cheapest there are, and no gang is broken: compared with all subsets of up to ten pods on small nodes.

Once for the search by itself, and once for the verb, to which kube-scheduler proposes what it would end by the node's sums.
"""

import asyncio
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, Isolation, NumaMode, PodRequest, Policy, Preferences
from aliquot.placement.choose import choose_pod
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.gang.preempt import Band, Preemption, Victim, cheapest_victims
from scheduler_plugin.extender.preempt import choose_victims
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_context, make_device, make_node, make_pod, make_share

OURS, THEIRS = ("team", "ours"), ("team", "theirs")


@st.composite
def questions(draw: st.DrawFn) -> tuple[ClusterState, Preemption]:
    count = draw(st.integers(1, 4))
    devices = [make_device("n1", minor, mib=draw(st.sampled_from([30, 40])), numa=draw(st.integers(0, 1))) for minor in range(count)]
    state = ClusterState()
    node = make_node("n1", devices, shares_per_gpu=draw(st.integers(2, 4)))
    state.set_gpu_node(node)
    victims = []
    for number in range(draw(st.integers(0, 9))):
        on = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True))
        mib, cores = draw(st.sampled_from([5, 10, 20])), draw(st.none() | st.sampled_from([30, 60]))
        pod = make_pod(f"v{number}", node="n1", shares={"main": [make_share("n1", minor, mib, cores) for minor in on]}, vgpu="1")
        state.set_pod(pod)
        covered = frozenset(draw(st.sampled_from([(), (), (OURS,), (THEIRS,), (OURS, THEIRS)])))
        victims.append(Victim(pod.uid, draw(st.sampled_from([-5, 0, 0, 10])), state.footprint_of(pod.uid), covered))
    vgpus = draw(st.integers(1, min(3, count)))
    mib = draw(st.none() | st.sampled_from([5, 15, 30, 40]))
    cores = draw(st.none() | st.sampled_from([50, 100]))
    main = ContainerRequest("main", vgpus, None if mib is None else mib * vgpus * units.MIB, None if cores is None else cores * vgpus)
    other = ContainerRequest("side", 1, 5 * units.MIB)
    preferences = Preferences(
        numa=draw(st.sampled_from([None, None, NumaMode.STRICT])), isolation=draw(st.sampled_from([None, None, Isolation.EXCLUSIVE]))
    )
    request = PodRequest((main, other) if draw(st.integers(0, 5)) == 0 else (main,), preferences)
    allowed = {OURS: draw(st.integers(0, 2)), THEIRS: draw(st.integers(0, 2))}
    states, gangs = state.device_states("n1"), tuple(draw(bands(victims)))
    return state, Preemption(states, node.links, request, Policy.FRAG, tuple(victims), gangs, allowed)


@st.composite
def bands(draw: st.DrawFn, victims: list[Victim]) -> list[Band]:
    """Put some of the victims into gangs, which may have more members elsewhere."""
    gang_of = {victim.uid: draw(st.sampled_from(["", "", "a", "b"])) for victim in victims}
    members = {gang: frozenset(uid for uid, name in gang_of.items() if name == gang) for gang in ("a", "b")}
    return [
        Band(uids, draw(st.integers(0, len(uids))), draw(st.booleans()), draw(roles(sorted(uids)))) for uids in members.values() if uids
    ]


@st.composite
def roles(draw: st.DrawFn, uids: list[str]) -> tuple[tuple[frozenset[str], int], ...]:
    """Give some of the members of a gang roles with members beyond the minimum."""
    role_of = {uid: draw(st.sampled_from(["", "", "head", "work"])) for uid in uids}
    members = [frozenset(uid for uid, name in role_of.items() if name == role) for role in ("head", "work")]
    return tuple((one, draw(st.integers(0, len(one)))) for one in members)


def breaks_a_gang(question: Preemption, chosen: tuple[str, ...]) -> bool:
    return any(lost_of(band, chosen) > band.spare and not (band.whole and band.members <= set(chosen)) for band in question.bands)


def lost_of(band: Band, chosen: tuple[str, ...]) -> int:
    """Count the members that end and count, one after the other: a role first loses those beyond its minimum."""
    surplus, lost = [count for _, count in band.roles], 0
    for uid in band.members.intersection(chosen):
        found = [number for number, (uids, _) in enumerate(band.roles) if uid in uids]
        if found and surplus[found[0]]:
            surplus[found[0]] -= 1
        else:
            lost += 1
    return lost


def ranking(question: Preemption, chosen: Iterable[str]) -> tuple[int, float, int, int]:
    """What kube-scheduler compares, stated again: pods beyond what budgets allow, the highest priority, how many pods, their priorities."""
    victims = [victim for victim in question.candidates if victim.uid in chosen]
    priorities = [victim.priority for victim in victims]
    exceeded = 0
    for budget, allowed in question.allowed.items():
        counted = [victim for victim in victims if budget in victim.budgets]
        exceeded += len(counted[allowed:])
    return exceeded, max(priorities, default=-math.inf), len(victims), sum(priorities)


@given(questions())
def test_no_set_of_victims_is_cheaper(question_and_state):
    state, question = question_and_state
    uids = [victim.uid for victim in question.candidates]
    best = None
    for chosen in chain.from_iterable(combinations(uids, size) for size in range(len(uids) + 1)):
        rank = ranking(question, chosen)
        if (best is not None and rank >= best) or breaks_a_gang(question, chosen):
            continue
        gone = [state.pods[uid] for uid in chosen]
        for pod in gone:
            state.drop_pod(pod.uid)
        if not isinstance(choose_pod(state.device_states("n1"), question.request, question.policy), Refusal):
            best = rank
        for pod in gone:
            state.set_pod(pod)
    found = cheapest_victims(question)
    event("impossible" if found is None else f"{len(found)} victims")
    assert found is None or not breaks_a_gang(question, tuple(found))
    assert (None if found is None else ranking(question, found)) == best


# --- the verb --------------------------------------------------------------------------------------------------------

GPU_MIB, PRIORITY, RAM_MIB = 40, 100, 64_000


@dataclass(frozen=True)
class Scene:
    """A node with pods, and one pod that kube-scheduler wants to preempt for."""

    gpus: int
    shares_per_gpu: int
    cpu_milli: int
    most_pods: int
    pods: tuple[PodFacts, ...]
    asked_mib: int | None
    """None: a whole GPU."""

    def state_without(self, ended: Iterable[str]) -> ClusterState:
        state, ended = ClusterState(), set(ended)
        state.set_gpu_node(
            make_node("n1", [make_device("n1", i, mib=GPU_MIB) for i in range(self.gpus)], shares_per_gpu=self.shares_per_gpu)
        )
        state.set_host("n1", self.cpu_milli, RAM_MIB, self.most_pods)
        for pod in self.pods:
            if pod.uid not in ended:
                state.set_pod(pod)
        return state

    def sums_suffice(self, ended: Iterable[str]) -> bool:
        """What kube-scheduler counts: requests of the pods that stay, plus those of the one that comes."""
        staying = [pod for pod in self.pods if pod.uid not in set(ended)]
        limits = [pod.gpu.containers[0].limits for pod in staying if pod.gpu is not None]
        return (
            sum(pod.cpu_milli for pod in staying) + 1000 <= self.cpu_milli
            and len(staying) + 1 <= self.most_pods
            and len(limits) + 1 <= self.gpus * self.shares_per_gpu
            and sum(int(one["nvidia.com/vgpu-memory"]) for one in limits) + (self.asked_mib or 0) <= self.gpus * GPU_MIB
        )

    def gpu_suffices(self, ended: Iterable[str]) -> bool:
        memory = None if self.asked_mib is None else self.asked_mib * units.MIB
        request = PodRequest((ContainerRequest("main", 1, memory),))
        return not isinstance(choose_pod(self.state_without(ended).device_states("n1"), request, Policy.FRAG), Refusal)

    def fits_as_known_here(self) -> bool:
        has_place = sum(pod.cpu_milli for pod in self.pods) + 1000 <= self.cpu_milli and len(self.pods) + 1 <= self.most_pods
        return has_place and self.gpu_suffices(())

    @property
    def evictable(self) -> list[PodFacts]:
        return [pod for pod in self.pods if pod.priority < PRIORITY]

    def proposed(self) -> list[str] | None:
        """Do as kube-scheduler does: all may end, except for those that can stay, the most important first; None if that is not enough."""
        ended = {pod.uid for pod in self.evictable}
        if not self.sums_suffice(ended):
            return None
        for pod in sorted(self.evictable, key=lambda pod: -pod.priority):
            if self.sums_suffice(ended - {pod.uid}):
                ended.remove(pod.uid)
        return sorted(ended)

    def rank(self, ended: Iterable[str]) -> tuple[float, int, int]:
        priorities = [pod.priority for pod in self.pods if pod.uid in set(ended)]
        return max(priorities, default=-math.inf), len(priorities), sum(priorities)

    def subsets(self) -> Iterator[tuple[str, ...]]:
        uids = [pod.uid for pod in self.evictable]
        return chain.from_iterable(combinations(uids, size) for size in range(len(uids) + 1))

    def answer(self, proposed: list[str], ending: Iterable[str] = (), **spec: object) -> set[str] | None:
        """Call the verb; None where it says that no pod's end helps."""
        state = self.state_without(())
        for uid in ending:
            state.set_pod(replace(state.pods[uid], deletion_requested=True, ends_by=10.0))
        context = make_context(state)
        asked: dict[str, Any] = {"vgpu": "1"} | ({} if self.asked_mib is None else {"vgpu_memory": str(self.asked_mib)})
        pod = pod_object("important", **asked)
        pod["spec"] |= {"priority": PRIORITY} | spec
        victims = {"n1": {"Pods": [{"UID": uid} for uid in proposed], "NumPDBViolations": 0}}
        body = json.dumps({"Pod": pod, "NodeNameToMetaVictims": victims}).encode()
        found = json.loads(asyncio.run(choose_victims(context, body)))["NodeNameToMetaVictims"]
        return {victim["UID"] for victim in found["n1"]["Pods"]} if "n1" in found else None


@st.composite
def scenes(draw: st.DrawFn, tight: bool = False) -> Scene:
    """Draw a node; tight: on which CPU or the number of pods may be short too."""
    gpus, shares_per_gpu = draw(st.sampled_from([1, 2, 2, 2, 3])), draw(st.sampled_from([1, 2, 2, 3]))
    pods, is_full = [], draw(st.sampled_from([True, True, False]))
    for minor in range(gpus):
        free_mib, keeps = GPU_MIB, draw(st.booleans())
        for number in range(shares_per_gpu if is_full else draw(st.integers(0, shares_per_gpu))):
            mib = GPU_MIB // shares_per_gpu if is_full else draw(st.sampled_from([5, 10, 20]))
            if mib > free_mib:
                break
            free_mib -= mib
            priority = 200 if keeps and not number else draw(st.sampled_from([-5, 0, 0, 10]))
            uid, shares = f"on{minor}-{number}", {"main": [make_share("n1", minor, mib)]}
            cpu = draw(st.sampled_from([0, 500, 2000]))
            pods.append(make_pod(uid, node="n1", shares=shares, priority=priority, cpu_milli=cpu, vgpu="1", vgpu_memory=str(mib)))
    waiting = draw(st.lists(st.sampled_from([-5, 10]), max_size=2))
    pods += [make_pod(f"cpu-{number}", node="n1", priority=priority, cpu_milli=1000) for number, priority in enumerate(waiting)]
    cpu_milli = draw(st.integers(1, 8)) * 1000 if tight else 64_000
    most_pods = draw(st.integers(max(1, len(pods)), len(pods) + 1)) if tight else 110
    return Scene(gpus, shares_per_gpu, cpu_milli, most_pods, tuple(pods), draw(st.sampled_from([None, None, 10, 30])))


@given(scenes())
def test_preempt_ends_cheapest_victims_when_cpu_and_ram_suffice(scene):
    proposed = scene.proposed()
    if proposed is None:
        return
    answer = scene.answer(proposed)
    event(f"{len(proposed)} proposed, {'none helps' if answer is None else len(answer)}, {len(set(proposed) - (answer or set()))} let go")
    if scene.gpu_suffices(proposed):
        assert answer == set(proposed), "the least of what it counts"
        return
    enough = [chosen for chosen in scene.subsets() if scene.sums_suffice(chosen) and scene.gpu_suffices(chosen)]
    assert (answer is None) == (not enough)
    if answer is not None:
        assert scene.rank(answer) == min(map(scene.rank, enough))


@given(scenes(tight=True))
def test_spared_victim_is_not_needed_for_gpu_or_any_sum(scene):
    proposed = scene.proposed()
    if proposed is None or (answer := scene.answer(proposed)) is None:
        return
    event(f"{len(set(proposed) - answer)} let go")
    assert scene.sums_suffice(answer)
    assert scene.gpu_suffices(answer)
    if not scene.gpu_suffices(proposed):
        needless = [uid for uid in answer if scene.sums_suffice(answer - {uid}) and scene.gpu_suffices(answer - {uid})]
        assert needless == []


@given(scenes(tight=True), st.data())
def test_no_pod_ends_where_ending_pods_make_room_alone(scene, data):
    if not scene.pods or (proposed := scene.proposed()) is None:
        return
    ending = set(data.draw(st.lists(st.sampled_from([pod.uid for pod in scene.pods]), unique=True), "ending"))
    suffice = bool(ending) and scene.sums_suffice(ending) and scene.gpu_suffices(ending) and not scene.fits_as_known_here()
    event(f"they suffice: {suffice}")
    answer = scene.answer(proposed, ending)
    if suffice:
        assert answer is not None
        assert (len(answer), answer <= ending) == (1, True)
    elif answer is not None:
        assert scene.gpu_suffices(answer | ending)


@given(
    scenes(tight=True), st.sampled_from([{"hostNetwork": True}, {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}])
)
def test_victims_stay_for_pod_that_kube_scheduler_checks_further(scene, wish):
    proposed = scene.proposed()
    if "hostNetwork" in wish:
        wish = wish | {"containers": [port_of_the_host(scene)]}
    if proposed and (answer := scene.answer(proposed, **wish)) is not None:
        assert answer >= set(proposed)


def port_of_the_host(scene: Scene) -> dict:
    limits = {"nvidia.com/vgpu": "1"} | ({} if scene.asked_mib is None else {"nvidia.com/vgpu-memory": str(scene.asked_mib)})
    resources = {"limits": limits, "requests": limits | {"cpu": "1"}}
    return {"name": "main", "resources": resources, "ports": [{"containerPort": 80, "hostPort": 80}]}
