# SPDX-License-Identifier: Apache-2.0
"""The search for victims is short, and what it has found when it stops is good. That it is exact before: property/test_preempt."""

import random

import pytest

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, PodRequest, Policy
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.gang import preempt
from scheduler_plugin.core.gang.preempt import MAX_CHECKS, Preemption, Victim, cheapest_victims
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share

DEVICES, PODS_EACH = 8, 10


def question(vgpus: int, memory_mib: int | None, priority_on: dict[int, int]) -> Preemption:
    """Ask for so many vGPUs on a full node; priority_on: by minor, of the pods there, and by chance on other devices."""
    chance, state, victims = random.Random(1), ClusterState(), []
    node = make_node("n1", [make_device("n1", minor, mib=80_000) for minor in range(DEVICES)], shares_per_gpu=PODS_EACH)
    state.set_gpu_node(node)
    for minor in range(DEVICES):
        for number in range(PODS_EACH):
            shares = {"main": [make_share("n1", minor, chance.choice([4_000, 6_000, 8_000]), 10)]}
            pod = make_pod(f"{minor}-{number}", node="n1", shares=shares, vgpu="1")
            state.set_pod(pod)
            priority = chance.randrange(5)
            victims.append(Victim(pod.uid, priority_on.get(minor, priority), state.footprint_of(pod.uid)))
    request = PodRequest((ContainerRequest("main", vgpus, memory_mib and memory_mib * vgpus * units.MIB),))
    return Preemption(state.device_states("n1"), node.links, request, Policy.FRAG, tuple(victims))


@pytest.fixture
def checks(monkeypatch):
    """One entry for each set of pods that is tried."""
    made, works = [], preempt._Search._works

    def noted_works(*args):
        made.append(args)
        return works(*args)

    monkeypatch.setattr(preempt._Search, "_works", noted_works)
    return made


@pytest.mark.parametrize(("vgpus", "memory_mib"), [(4, 40_000), (4, None), (2, 40_000)])
def test_many_device_sets_with_many_pods_are_searched_with_few_checks(checks, vgpus, memory_mib):
    assert cheapest_victims(question(vgpus, memory_mib, {}))
    assert len(checks) < MAX_CHECKS / 4


def test_without_checks_left_first_result_spares_devices_of_important_pods(checks, monkeypatch):
    monkeypatch.setattr(preempt, "MAX_CHECKS", 0)
    ended = cheapest_victims(question(4, 40_000, dict.fromkeys((0, 1, 5), 90)))
    assert {uid.partition("-")[0] for uid in ended} <= {"2", "3", "4", "6", "7"}
    as_they_are, each_device, the_answer = 70, DEVICES * 2 * (PODS_EACH + 1), 4 * PODS_EACH + 1
    assert len(checks) <= as_they_are + each_device + the_answer
