"""Victims are the cheapest there are, and no gang is broken: compared with all subsets of up to ten pods on small nodes."""

import math
from collections.abc import Iterable
from itertools import chain, combinations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from placement.choose import choose_pod
from placement.refusal import Refusal
from proto import units
from proto.model import ContainerRequest, Isolation, NumaMode, PodRequest, Policy, Preferences
from scheduler_plugin.core.preempt import Band, Preemption, Victim, cheapest_victims
from scheduler_plugin.core.state import ClusterState
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share

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
    return [Band(uids, draw(st.integers(0, len(uids))), draw(st.booleans())) for uids in members.values() if uids]


def breaks_a_gang(question: Preemption, chosen: tuple[str, ...]) -> bool:
    counts = [(band, len(band.members.intersection(chosen))) for band in question.bands]
    return any(count > band.spare and not (band.whole and count == len(band.members)) for band, count in counts)


def ranking(question: Preemption, chosen: Iterable[str]) -> tuple[int, float, int, int]:
    """What kube-scheduler compares, said anew: pods beyond what budgets allow, the highest priority, how many pods, their priorities."""
    victims = [victim for victim in question.candidates if victim.uid in chosen]
    priorities = [victim.priority for victim in victims]
    exceeded = 0
    for budget, allowed in question.allowed.items():
        counted = [victim for victim in victims if budget in victim.budgets]
        exceeded += len(counted[allowed:])
    return exceeded, max(priorities, default=-math.inf), len(victims), sum(priorities)


@settings(max_examples=200, deadline=None)
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
