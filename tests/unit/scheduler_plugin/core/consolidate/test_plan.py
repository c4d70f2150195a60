# SPDX-License-Identifier: Apache-2.0
"""Plans on small clusters that show one rule each; tests/property/test_consolidate.py checks random ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from aliquot import contract
from aliquot.contract.model import Policy
from scheduler_plugin.core.cluster.journal import Rules, Snapshot, snapshot_of
from scheduler_plugin.core.cluster.nodes import CORDONED, NodeFacts, Taint
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.consolidate.certificate import CertificateError, certify, check
from scheduler_plugin.core.consolidate.plan import MAX_MOVES, Goal, NoPlan, Plan, find_plan
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from tests.fakes.node_rules import PICKY, REQUIRED, Object, with_rules
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share

HOUR = 3600.0
NOW = 1000 * HOUR
PREFERS: Object = {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}}


class Scene:
    """Nodes with GPUs of 1,000 MiB."""

    def __init__(self, nodes: int, gpus: int = 2) -> None:
        self.state = ClusterState()
        self.labelled: list[NodeFacts] = []
        """Labels and taints of all nodes; empty if the scheduler does not read them."""
        for number in range(1, nodes + 1):
            self.state.set_gpu_node(make_node(f"n{number}", gpus))
            self.state.set_host(f"n{number}", 16_000, 64_000)

    def label(self, *pools: str, taints: Mapping[str, tuple[Taint, ...]] | None = None) -> None:
        """Give the nodes n1, n2 and so on a label ``pool`` each, and some of them taints."""
        for number, pool in enumerate(pools, 1):
            name = f"n{number}"
            self.labelled.append(NodeFacts(name, {"pool": pool}, (taints or {}).get(name, ())))
            self.state.set_closed(name, closed=name in (taints or {}))

    def run(self, node: str, minor: int, mib: int = 1000, *, hours: float = 1, movable: bool = True, spec: Object | None = None) -> str:
        """Run a pod on one GPU; return its UID. Args: spec: its rules about nodes."""
        uid = f"{node}-{minor}-{len(self.state.pods)}"
        annotations = {contract.ANNOTATION_MOVABLE: "true"} if movable else {}
        shares = {"main": [make_share(node, minor, mib)]}
        pod = make_pod(uid, node=node, annotations=annotations, shares=shares, vgpu="1", vgpu_memory=str(mib))
        started = NOW - hours * HOUR
        pod = replace(pod, controller_uid="rs", controller_kind="ReplicaSet", started_at=started)
        self.state.set_pod(with_rules(pod, spec or {}))
        return uid

    def plan(self, gpus: int = 2, **facts: Any) -> Plan | NoPlan:
        """Plan for a pod with this many whole GPUs; a plan must have a certificate that replays."""
        self.state.set_pod(replace(make_pod("big", vgpu=str(gpus), vgpu_memory=str(1000 * gpus)), **facts))
        return self._checked(Goal("big"))

    def plan_with(self, spec: Object) -> Plan | NoPlan:
        """Plan for a pod with two whole GPUs and these rules about nodes."""
        self.state.set_pod(with_rules(make_pod("big", vgpu="2", vgpu_memory="2000"), spec))
        return self._checked(Goal("big"))

    def whole(self, count: int) -> Plan | NoPlan:
        """Plan for whole nodes."""
        return self._checked(Goal(whole_nodes=count))

    def _checked(self, goal: Goal) -> Plan | NoPlan:
        found = find_plan(self.snapshot(), goal)
        if isinstance(found, Plan):
            check(certify(self.snapshot(), found))
        return found

    def snapshot(self) -> Snapshot:
        taken = snapshot_of(self.state.moment(), Rules(Policy.FRAG, DEFAULT_WEIGHTS), NOW)
        closed = tuple(sorted(self.state.closed_nodes))
        return msgspec.structs.replace(taken, closed_nodes=closed, node_facts=tuple(self.labelled))


def moves(found: Plan | NoPlan) -> list[tuple[str, str]]:
    assert isinstance(found, Plan), found
    return [(move.pod_uid, move.to_node) for move in found.moves]


def test_node_with_least_work_lost_is_freed() -> None:
    scene = Scene(3)
    scene.run("n1", 0, hours=9)
    least = scene.run("n2", 0, hours=2)
    scene.run("n3", 0, hours=5)
    found = scene.plan()
    assert moves(found) in ([(least, "n1")], [(least, "n3")])
    assert isinstance(found, Plan)
    assert (found.nodes, found.lost_gpu_seconds) == (("n2",), 2 * HOUR)


def test_seat_on_another_gpu_of_same_node_is_used() -> None:
    scene = Scene(1, gpus=4)
    first = scene.run("n1", 0, 400)
    second = scene.run("n1", 1, 400, hours=2)
    found = scene.plan(3)
    assert moves(found) in ([(first, "n1")], [(second, "n1")])


def test_pod_that_must_stay_blocks_its_node() -> None:
    scene = Scene(2)
    scene.run("n1", 0, movable=False)
    scene.run("n2", 0, movable=False)
    found = scene.plan()
    assert isinstance(found, NoPlan)
    assert found.nodes == {"not marked aliquot.dev/movable: true": 2}


def test_no_plan_without_seats() -> None:
    scene = Scene(2)
    for node in ("n1", "n2"):
        scene.run(node, 0)
        scene.run(node, 1)
    found = scene.plan()
    assert isinstance(found, NoPlan)
    assert found.nodes == {"a pod that would have to move has no seat elsewhere": 2}


def test_closed_node_neither_frees_nor_seats() -> None:
    scene = Scene(2)
    scene.run("n1", 0)
    scene.run("n2", 0)
    assert isinstance(scene.plan(), Plan)
    scene.state.set_closed("n2", closed=True)
    assert isinstance(scene.plan(), NoPlan)


def test_closed_empty_node_is_no_whole_node() -> None:
    scene = Scene(2)
    scene.run("n1", 0, movable=False)
    open_plan = scene.whole(1)
    assert isinstance(open_plan, Plan)
    scene.state.set_closed("n2", closed=True)
    found = scene.whole(1)
    assert isinstance(found, NoPlan)
    with pytest.raises(CertificateError, match="node n2 cannot count as whole"):
        certify(scene.snapshot(), open_plan)
    assert found.nodes == {"not marked aliquot.dev/movable: true": 1}


def test_pod_that_fits_already_gets_no_moves() -> None:
    found = Scene(1).plan()
    assert isinstance(found, NoPlan)
    assert found.sentence.startswith("it fits on node n1 without a move")


POOL_B: Object = {"nodeSelector": {"pool": "b"}}
IN_A: Object = {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [
    {"key": "pool", "operator": "In", "values": ["a"]}]}]}}}}  # fmt: skip
DEDICATED = (Taint("dedicated", "team", "NoSchedule"),)
TOLERATES: Object = {"tolerations": [{"key": "dedicated", "value": "team", "effect": "NoSchedule"}]}


def test_waiting_pod_with_node_selector_gets_plan_on_its_nodes() -> None:
    scene = Scene(3)
    scene.run("n1", 0, hours=1)
    expensive = scene.run("n2", 0, hours=9)
    scene.run("n3", 0, hours=1)
    without = scene.plan_with(POOL_B)
    assert isinstance(without, NoPlan)
    assert "requires labels of its node" in without.sentence
    scene.label("a", "b", "a")
    found = scene.plan_with(POOL_B)
    assert isinstance(found, Plan)
    assert (found.nodes, [move.pod_uid for move in found.moves]) == (("n2",), [expensive])


def test_pod_moves_only_to_node_that_its_rules_allow() -> None:
    scene = Scene(3)
    moving = scene.run("n1", 0, spec=IN_A)
    scene.run("n2", 0, hours=5, movable=False)
    scene.run("n3", 0, hours=5, movable=False)
    without = scene.plan()
    assert isinstance(without, NoPlan)
    assert (
        without.nodes[
            "it requires labels of its node, which the scheduler has not read: featureGates: Consolidation=true makes it read them"
        ]
        == 1
    )
    scene.label("a", "b", "a")
    assert moves(scene.plan()) == [(moving, "n3")]
    scene.labelled[2] = NodeFacts("n3", {"pool": "b"})
    found = scene.plan()
    assert isinstance(found, NoPlan)
    assert found.nodes["a pod that would have to move has no seat elsewhere"] == 1


@pytest.mark.parametrize("spec", [TOLERATES, {}], ids=["tolerates", "does not"])
def test_pod_moves_to_tainted_node_only_if_it_tolerates_it(spec: Object) -> None:
    scene = Scene(2)
    scene.label("a", "a", taints={"n2": DEDICATED})
    moving = scene.run("n1", 0, spec=spec)
    found = scene.plan_with({})
    assert (moves(found) == [(moving, "n2")]) if spec else isinstance(found, NoPlan)


def test_waiting_pod_gets_plan_on_tainted_node_only_if_it_tolerates_it() -> None:
    scene = Scene(2)
    scene.label("a", "a", taints={"n2": DEDICATED})
    scene.run("n1", 0, movable=False)
    moving = scene.run("n2", 0)
    assert moves(scene.plan_with(TOLERATES)) == [(moving, "n1")]
    assert isinstance(scene.plan_with({}), NoPlan)


def test_node_under_drain_takes_no_pod_whatever_it_tolerates() -> None:
    scene = Scene(2)
    scene.label("a", "a")
    scene.run("n1", 0, spec={"tolerations": [{"operator": "Exists", "key": "", "effect": ""}]})
    scene.run("n2", 0, hours=5, movable=False)
    assert isinstance(scene.plan_with({}), Plan)
    scene.labelled[1] = NodeFacts("n2", {}, (CORDONED,))
    assert isinstance(scene.plan_with({}), NoPlan)


@pytest.mark.parametrize("spec", [*PICKY, {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]}], ids=str)
def test_pod_with_rules_about_other_pods_neither_waits_nor_moves(spec: Object) -> None:
    scene = Scene(2)
    scene.label("a", "a")
    scene.run("n1", 0)
    scene.run("n2", 0)
    assert isinstance(scene.plan_with({}), Plan)
    waiting = scene.plan_with(spec)
    assert isinstance(waiting, NoPlan)
    assert waiting.sentence.endswith("rules about other pods are known to kube-scheduler only")
    for uid in ("n1-0-0", "n2-0-1"):
        scene.state.set_pod(with_rules(scene.state.pods[uid], spec))
    moving = scene.plan_with({})
    assert isinstance(moving, NoPlan)
    assert moving.nodes == {waiting.sentence: 2}


@pytest.mark.parametrize("spec", [{"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}, PREFERS], ids=str)
def test_pod_with_preferences_about_other_pods_is_served(spec: Object) -> None:
    scene = Scene(2)
    scene.run("n1", 0, spec=spec)
    scene.run("n2", 0, spec=spec)
    assert isinstance(scene.plan_with(spec), Plan)


def test_cpu_of_seats_is_counted() -> None:
    scene = Scene(2)
    scene.run("n1", 0)
    scene.run("n2", 0)
    scene.state.set_pod(replace(make_pod("web", node="n1"), cpu_milli=15_500))
    uid = next(iter(scene.state.pods))
    scene.state.set_pod(replace(scene.state.pods[uid], cpu_milli=500))
    assert moves(scene.plan(cpu_milli=16_000)) == [("n2-0-1", "n1")]
    scene.state.set_pod(replace(scene.state.pods["n2-0-1"], cpu_milli=500))
    assert isinstance(scene.plan(cpu_milli=16_000), NoPlan)


def test_more_moves_than_allowed_are_no_plan() -> None:
    scene = Scene(3, gpus=4)
    for number in range(MAX_MOVES + 1):
        scene.run("n1", number % 4, 100)
    for minor in range(4):
        scene.run("n2", minor, movable=False)
    scene.run("n3", 0, movable=False)
    found = scene.plan(4)
    assert isinstance(found, NoPlan)
    assert found.nodes[f"more than {MAX_MOVES} moves"] == 1


def test_whole_nodes_count_those_that_are_free() -> None:
    scene = Scene(3)
    moved = scene.run("n1", 0, 400)
    scene.run("n2", 0, 400, hours=5)
    assert isinstance(scene.whole(1), Plan)
    assert moves(scene.whole(1)) == []
    found = scene.whole(2)
    assert moves(found) == [(moved, "n2")]
    assert isinstance(found, Plan)
    assert sorted(found.nodes) == ["n1", "n3"]
    assert isinstance(scene.whole(3), NoPlan)


@pytest.mark.parametrize("bound", [True, False])
def test_pod_that_does_not_wait_gets_no_plan(bound: bool) -> None:
    scene = Scene(1)
    uid = scene.run("n1", 0) if bound else "gone"
    assert isinstance(find_plan(scene.snapshot(), Goal(uid)), NoPlan)
