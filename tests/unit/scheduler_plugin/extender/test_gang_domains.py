# SPDX-License-Identifier: Apache-2.0
"""Gangs that need one domain: where the members go, what preemption may do for them, and which reasons their pods show."""

from dataclasses import replace

import pytest

from aliquot import contract
from scheduler_plugin.core.cluster.domains import place_labels
from scheduler_plugin.core.cluster.objects import NodeMetadata, NodeObject
from scheduler_plugin.core.explain.why import completed, explain_pod
from tests.unit.scheduler_plugin.builders import known_gang, make_node
from tests.unit.scheduler_plugin.extender.test_gang import Scene

CLIQUES = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b", "b3": "b"}


class Fabric(Scene):
    """Three nodes of two GPUs in each of two cliques."""

    def __init__(self, minimum: int, mode: str = "required") -> None:
        super().__init__(minimum, *CLIQUES)
        self.gang |= {contract.ANNOTATION_DOMAIN: mode}
        for name, clique in CLIQUES.items():
            node = make_node(name, 2)
            self.state.set_gpu_node(replace(node, devices=tuple(replace(entry, fabric_clique=clique) for entry in node.devices)))

    def fill(self, free_a: int, free_b: int) -> None:
        """Leave this many GPUs free in each clique."""
        for clique, free in (("a", free_a), ("b", free_b)):
            seats = [(f"{clique}{number}", minor) for number in (1, 2, 3) for minor in range(2)]
            for node, minor in seats[free:]:
                self.takes(f"other-{node}-{minor}", node, minor)

    def cliques(self) -> set[str]:
        return {CLIQUES[reservation.node] for reservation in self.state.reservations.values()}


def with_members(scene: Fabric, count: int) -> Fabric:
    for number in range(count):
        scene.member(f"m{number}")
    return scene


def test_required_gang_goes_to_the_clique_with_room():
    scene = with_members(Fabric(4), 4)
    scene.fill(5, 3)
    assert scene.filter("m0")[0]
    assert scene.cliques() == {"a"}


def test_on_level_of_hosts_each_node_is_a_domain():
    level = {contract.ANNOTATION_DOMAIN_LEVEL: "kubernetes.io/hostname"}
    fits, too_large = Fabric(2), Fabric(3)
    for scene, count in ((fits, 2), (too_large, 3)):
        scene.gang |= level
        with_members(scene, count)
    assert fits.filter("m0")[0]
    assert len({reservation.node for reservation in fits.state.reservations.values()}) == 1
    sentence = "gang: 3 members need one kubernetes.io/hostname, and the one with most room, a1, takes 2"
    assert too_large.filter("m0") == ([], {sentence})


def test_required_gang_waits_and_says_why_if_no_clique_has_room():
    scene = with_members(Fabric(4), 4)
    scene.fill(3, 3)
    sentence = "gang: 4 members need one clique, and the one with most room, a, takes 3"
    assert scene.filter("m0") == ([], {sentence})
    assert scene.context.gangs.explain(scene.state.pods["m0"], known_gang(scene.state.pods["m0"])) == (sentence, "")
    assert not scene.state.reservations


def test_preferred_gang_starts_in_two_cliques_if_it_must():
    scene = with_members(Fabric(4, "preferred"), 4)
    scene.fill(3, 3)
    assert scene.filter("m0")[0]
    assert scene.cliques() == {"a", "b"}


@pytest.mark.parametrize(("mode", "goes"), [("required", []), ("preferred", ["b1"])])
def test_further_member_joins_the_clique_of_its_gang(mode, goes):
    scene = Fabric(2, mode)
    for number in range(2):
        scene.takes(f"old{number}", "a1", number, of_gang=True)
    scene.member("new")
    assert set(scene.filter("new", "a2", "b1")[0]) == {"a2"}
    for node in ("a2", "a3"):
        for minor in range(2):
            scene.takes(f"other-{node}-{minor}", node, minor)
    scene.state.release("new")
    names, reasons = scene.filter("new")
    assert set(goes) <= set(names)
    gang = known_gang(scene.state.pods["new"])
    if mode == "required":
        assert "gang: no room in clique a, where its other members are" in reasons
        assert scene.context.gangs.why(scene.state.pods["new"], gang) == "gang: no room in clique a, where its other members are"
    else:
        assert scene.context.gangs.why(scene.state.pods["new"], gang) == ""


def test_why_names_the_domains_of_placed_members():
    scene = Fabric(2)
    for number in range(2):
        scene.takes(f"old{number}", "a1", number, of_gang=True)
    pod = scene.state.pods["old0"]
    why, _ = explain_pod(scene.state, scene.context.verdicts.shapes, scene.context.verdicts.default_policy, pod)
    why = completed(why, (), *scene.context.gangs.explain(pod, known_gang(pod)))
    assert why.sentence.endswith("; members by clique: a (2)")


async def test_no_pod_ends_in_a_clique_that_does_not_help():
    scene = Fabric(2)
    scene.takes("old", "a1", 0, of_gang=True)
    scene.takes("old1", "a1", 1, of_gang=True)
    scene.fill(2, 0)
    scene.member("new")
    assert scene.helped("new") == {"a1", "a2", "a3"}
    victims = {node: [f"other-{node}-0"] for node in ("a2", "b2")}
    assert set(await scene.preempt("new", **victims)) == {"a2"}


def test_only_labels_that_name_a_place_are_kept():
    labels = {"topology.kubernetes.io/zone": "z", "example/Rack": "r", "nvidia.com/gpu.product": "H200", "x/topology-block": ""}
    assert place_labels(NodeObject(NodeMetadata("n", labels)).metadata.labels or {}) == {
        "topology.kubernetes.io/zone": "z",
        "example/Rack": "r",
    }


def test_changed_label_moves_a_node_to_another_rack():
    scene = Fabric(2)
    scene.state.set_place("a1", {"example/rack": "r1"})
    assert scene.state.domain_of("a1", "rack") == "r1"
    freed = scene.state.freed_count
    scene.state.set_place("a1", {"example/rack": "r2"})
    assert (scene.state.domain_of("a1", "rack"), scene.state.freed_count) == ("r2", freed + 1)
    scene.state.drop_host("a1")
    assert scene.state.domain_of("a1", "rack") == "a1"


async def test_member_is_not_bound_outside_the_domain_of_ready_members():
    """Another member can be planned again, in another clique, between filter and bind of the first one."""
    scene = with_members(Fabric(2), 2)
    gangs = scene.context.gangs
    first, second = scene.state.pods["m0"], scene.state.pods["m1"]
    gang = known_gang(first)
    assert scene.filter("m0", "a1")[0] == ["a1"]
    assert "waits for 1 more" in await gangs.admit(first, gang, "a1")
    assert "not in the domain" in await gangs.admit(second, gang, "b1")
    assert "m1" not in scene.state.reservations
    (node,) = scene.filter("m1")[0]
    assert CLIQUES[node] == "a"
    assert await gangs.admit(second, gang, node) == ""
