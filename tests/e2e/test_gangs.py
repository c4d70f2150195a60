# SPDX-License-Identifier: Apache-2.0
"""Gangs on several nodes, on the real kube-scheduler: domains, elastic members, victims, restarts, and processes that are killed."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.fleet import HIGH, LOW, Fleet, gang, pod, running_fleet
from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.scale import GPUS_PER_NODE

CLIQUES = {"fleet-a1": "a", "fleet-a2": "a", "fleet-b1": "b", "fleet-b2": "b"}
DOMAINS = {
    "clique": CLIQUES,
    "zone": {"fleet-a1": "zone-1", "fleet-b1": "zone-1", "fleet-a2": "zone-2", "fleet-b2": "zone-2"},
    "rack": {"fleet-a1": "r7", "fleet-b2": "r7", "fleet-a2": "r8", "fleet-b1": "r8"},
}
"""By the level, the domain of each node: each level pairs the nodes in another way. The fleet's nodes have their zones."""
RACK_LABEL = "example.com/rack"
RESTARTED_SECONDS = 1.5
"""A process that is killed starts again a second later."""


@pytest.fixture(scope="module")
def nodes(without_product: None, node: Cluster) -> Iterator[Fleet]:
    """Four nodes of eight GPUs in two cliques."""
    del without_product
    with running_fleet(node, CLIQUES) as running:
        for name, rack in DOMAINS["rack"].items():
            running.kubectl.run("label", "node", name, f"{RACK_LABEL}={rack}")
        yield running


@pytest.fixture
def fleet(nodes: Fleet, kubectl: Kubectl) -> Iterator[Fleet]:
    """The nodes, for pods in a namespace of the test's own."""
    nodes.wait_until_it_answers()
    yield replace(nodes, kubectl=kubectl)
    kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0")  # no kubelet has to end them


@pytest.mark.parametrize("level", DOMAINS)
def test_gang_goes_to_domain_with_room_or_waits_and_says_why(fleet: Fleet, level: str) -> None:
    domains = DOMAINS[level]
    wide, narrow = sorted(set(domains.values()))
    (wide_1, wide_2), (narrow_1, narrow_2) = ([node for node, name in domains.items() if name == one] for one in (wide, narrow))
    fleet.fill({wide_1: 4, wide_2: 1, narrow_1: 1, narrow_2: 2})
    one_domain = {"domain": "required", "domain_level": level}
    fleet.create(*(pod(f"first-{number}", priority=HIGH, annotations=gang("first", 4, **one_domain)) for number in range(4)))
    eventually(lambda: len(fleet.nodes_of(prefix="first")) == 4, "the gang to start", otherwise=lambda: fleet.kubectl.explain("first-0"))
    assert {domains[node] for node in fleet.nodes_of(prefix="first").values()} == {wide}
    assert fleet.why("first-0")["domain"] == f"members by {level}: {wide} (4)"

    fleet.end("first-0", "first-1")  # 3 and 3 are free
    fleet.create(*(pod(f"second-{number}", priority=HIGH, annotations=gang("second", 4, **one_domain)) for number in range(4)))
    sentence = f"gang: 4 members need one {level}, and the one with most room, "
    eventually(
        lambda: fleet.why("second-0").get("gang", "").startswith(sentence), "the reason", otherwise=lambda: str(fleet.why("second-0"))
    )
    assert fleet.why("second-0")["gang"].endswith("takes 3")
    eventually(
        lambda: any(sentence in event for event in fleet.kubectl.events("second-0")),
        "the reason in an event, which comes a moment after the decision",
        otherwise=lambda: str(fleet.kubectl.events("second-0")),
    )
    assert not fleet.nodes_of(prefix="second")

    fleet.end(f"filler-{narrow_1}-0")
    eventually(lambda: len(fleet.nodes_of(prefix="second")) == 4, "the gang to start", otherwise=lambda: fleet.kubectl.explain("second-0"))
    assert {domains[node] for node in fleet.nodes_of(prefix="second").values()} == {narrow}


def test_elastic_gang_starts_shrinks_and_grows(fleet: Fleet) -> None:
    fleet.fill({"fleet-a1": 4, "fleet-a2": 0, "fleet-b1": 0, "fleet-b2": 0})
    annotations = gang("elastic", 2, gang_max="6")
    fleet.create(*(pod(f"elastic-{number}", annotations=annotations) for number in range(6)))
    eventually(lambda: len(fleet.nodes_of(prefix="elastic")) == 4, "as many as have room")
    for number, left in enumerate((3, 2)):
        fleet.create(pod(f"important-{number}", priority=HIGH))
        fleet.wait_until_bound(f"important-{number}")
        assert len(fleet.nodes_of(prefix="elastic")) == left
    fleet.end("important-0")
    eventually(lambda: len(fleet.nodes_of(prefix="elastic")) == 3, "the gang to grow")
    for number in (2, 3):
        fleet.create(pod(f"important-{number}", priority=HIGH))
        fleet.wait_until_bound(f"important-{number}")
        assert len(fleet.nodes_of(prefix="elastic")) in (0, 2), "all of them, or the minimum"


def test_elastic_workers_wait_for_their_master_and_end_before_it(fleet: Fleet) -> None:
    fleet.fill({"fleet-a1": 5, "fleet-a2": 0, "fleet-b1": 0, "fleet-b2": 0})
    worker, master = ({"gang_role": role, "gang_role_min": least} for role, least in (("worker", "2"), ("master", "1")))
    annotations = gang("team", 3, gang_max="5", **worker)
    workers = [f"team-worker-{number}" for number in range(4)]
    fleet.create(*(pod(name, annotations=annotations) for name in workers))
    # The first ones may be looked at before the others exist, and then say less.
    sentence = "gang: 3 members must start together, and no role other than worker (2) has members"
    eventually(
        lambda: any(sentence in event for name in workers for event in fleet.kubectl.events(name)),
        "the reason in an event",
        otherwise=lambda: str([fleet.kubectl.events(name) for name in workers]),
    )
    assert fleet.why("team-worker-0")["gang"] == sentence
    assert not fleet.nodes_of(prefix="team")

    fleet.create(pod("team-master", annotations=gang("team", 3, gang_max="5", **master)))
    eventually(lambda: len(fleet.nodes_of(prefix="team")) == 5, "all to start", otherwise=lambda: fleet.kubectl.explain("team-worker-0"))
    for number, left in enumerate((4, 3)):
        fleet.create(pod(f"important-{number}", priority=HIGH))
        fleet.wait_until_bound(f"important-{number}")
        found = fleet.nodes_of(prefix="team")
        assert len(found) == left, str([fleet.kubectl.events(name) for name in (*workers, "team-master", f"important-{number}")])
        assert "team-master" in fleet.nodes_of(prefix="team")


@pytest.mark.timeout(300)
def test_victims_end_on_two_nodes_for_one_gang(fleet: Fleet) -> None:
    fleet.fill(dict.fromkeys(CLIQUES, 0), priority=LOW)
    kept = {"matchLabels": {"part-of": "filler-fleet-b1"}}
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "kept"},
              "spec": {"minAvailable": GPUS_PER_NODE, "selector": kept}}  # fmt: skip
    fleet.kubectl.apply(budget)
    eventually(lambda: fleet.kubectl.get("pdb", "kept").get("status", {}).get("expectedPods") == GPUS_PER_NODE, "the budget to count")
    members = [pod(f"large-{number}", gpus=GPUS_PER_NODE, priority=HIGH, annotations=gang("large", 2)) for number in range(2)]
    fleet.create(*members)
    eventually(lambda: len(fleet.nodes_of(prefix="large")) == 2, "the gang to start", seconds=120,
               otherwise=lambda: fleet.kubectl.explain("large-0"))  # fmt: skip
    taken = set(fleet.nodes_of(prefix="large").values())
    assert len(taken) == 2
    assert "fleet-b1" not in taken, "its budget allows no disruption"
    left = Counter(fleet.nodes_of(prefix="filler").values())
    assert left == {node: GPUS_PER_NODE for node in CLIQUES if node not in taken}, "no pod ended in vain"


def test_broken_gang_restarts_whole_and_another_one_goes_on(fleet: Fleet) -> None:
    fleet.create(*(pod(f"whole-{number}", annotations=gang("whole", 3, gang_restart="whole")) for number in range(3)))
    fleet.create(*(pod(f"loose-{number}", annotations=gang("loose", 3)) for number in range(3)))
    eventually(lambda: len(fleet.nodes_of()) == 6, "both gangs to start")
    fleet.end("whole-0", "loose-0")
    eventually(lambda: not fleet.nodes_of(prefix="whole"), "the rest of the gang to end")
    assert fleet.nodes_of(prefix="loose").keys() == {"loose-1", "loose-2"}
    why = contract.EVENT_REASON_GANG_RESTARTED
    eventually(
        lambda: any(event.startswith(why) and "whole-0" in event for event in fleet.kubectl.events("whole-1")),
        "an event on the rest of the gang",
        otherwise=lambda: str(fleet.kubectl.events("whole-1")),
    )


@pytest.mark.timeout(300)
def test_gangs_start_whole_while_scheduler_and_extender_are_killed(fleet: Fleet, node: Cluster) -> None:
    """Seven gangs of six on 32 GPUs: five fit."""
    choices, minimum = random.Random(21), 6
    for name in "abcdefg":
        fleet.create(*(pod(f"{name}-{number}", annotations=gang(name, minimum)) for number in range(minimum)))
        time.sleep(choices.uniform(RESTARTED_SECONDS, 2 * RESTARTED_SECONDS))
        node.kill(choices.choice(fleet.processes))

    def started() -> Counter[str]:
        return Counter(name.partition("-")[0] for name in fleet.nodes_of())

    eventually(lambda: sum(started().values()) == 5 * minimum, "five gangs to start", seconds=150, otherwise=lambda: str(started()))
    assert set(started().values()) == {minimum}
