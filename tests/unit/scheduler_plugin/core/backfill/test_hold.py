# SPDX-License-Identifier: Apache-2.0
"""Who may use held room, where it is, and when it is free."""

from collections.abc import Collection
from dataclasses import replace

import msgspec
import pytest

from aliquot import contract
from aliquot.contract.model import Policy
from scheduler_plugin.core.backfill.hold import PATIENCE_SECONDS, Hold, Outlook, may_use
from scheduler_plugin.core.backfill.lifetimes import Lifetimes
from scheduler_plugin.core.backfill.outlook import outlook_of
from scheduler_plugin.core.backfill.search import ending_order, find_hold
from scheduler_plugin.core.cluster.journal import Rules, snapshot_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share

NOW, HOUR = 1_000_000.0, 3600.0
HOLD = Hold("team/big", 5, NOW - HOUR, ())
FREE_AT = NOW + HOUR


def waiting(uid: str = "small", *, priority: int = 0) -> PodFacts:
    return make_pod(uid, vgpu="1", vgpu_memory="100", priority=priority)


CASES = {
    "ends before": (Outlook(FREE_AT), waiting(), HOUR, True),
    "ends after": (Outlook(FREE_AT), waiting(), HOUR + 1, False),
    "unknown end": (Outlook(FREE_AT), waiting(), None, False),
    "unknown time of room": (Outlook(), waiting(), 1.0, False),
    "beside overdue pod": (Outlook(FREE_AT, overdue=("late",)), waiting(), 1.0, False),
    "equally important": (Outlook(FREE_AT), waiting(priority=5), None, False),
    "more important": (Outlook(), waiting(priority=6), None, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_pod_may_use_held_room_only_by_rule(case: tuple[Outlook, PodFacts, float | None, bool]) -> None:
    outlook, pod, seconds, allowed = case
    assert may_use(HOLD, outlook, pod, seconds, NOW) == allowed


def test_patience_ends_backfill() -> None:
    waits = replace(HOLD, waits_since=NOW - PATIENCE_SECONDS)
    assert not may_use(waits, Outlook(FREE_AT), waiting(), 1.0, NOW)


class Cluster:
    """Nodes with two GPUs of 1000 MiB, and pods on them that state their runtimes."""

    def __init__(self, *nodes: str) -> None:
        self.state = ClusterState()
        for node in nodes:
            self.state.set_gpu_node(make_node(node, 2))
            self.state.set_host(node, 16_000, 64_000)

    def run(self, uid: str, node: str, minor: int, hours: int | None, *, mib: int = 1000, kind: str = "Job") -> None:
        annotations = {} if hours is None else {contract.ANNOTATION_EXPECTED_RUNTIME: f"{hours}h"}
        shares = {"main": [make_share(node, minor, mib)]}
        pod = make_pod(uid, node=node, annotations=annotations, shares=shares, vgpu="1", vgpu_memory=str(mib))
        self.state.set_pod(replace(pod, started_at=NOW, controller_kind=kind))

    def hold(self, *uids: str, vgpus: int = 2, mib: int = 2000, allowed: Collection[str] | None = None) -> Hold | None:
        for uid in uids:
            gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: str(len(uids))} if len(uids) > 1 else {}
            pod = make_pod(uid, annotations=gang, vgpu=str(vgpus), vgpu_memory=str(mib))
            self.state.set_pod(replace(pod, created_at=NOW))
        bound = [pod for pod in self.state.pods.values() if pod.node_name]
        lifetimes = Lifetimes()
        ends = {pod.uid: None if (known := lifetimes.of(pod)) is None else NOW + known.usual for pod in bound}
        snapshot = snapshot_of(self.state.moment(), Rules(Policy.FRAG, DEFAULT_WEIGHTS), NOW)
        snapshot = msgspec.structs.replace(snapshot, closed_nodes=tuple(self.state.closed_nodes))
        return find_hold(snapshot, uids, ending_order(bound, ends), allowed)

    def outlook(self, hold: Hold) -> Outlook:
        return outlook_of(self.state, hold, Lifetimes(), NOW)


def test_room_is_held_where_it_is_free_first() -> None:
    cluster = Cluster("n1", "n2")
    for uid, node, minor, hours in (("a", "n1", 0, 1), ("b", "n1", 1, 9), ("c", "n2", 0, 5), ("d", "n2", 1, 4)):
        cluster.run(uid, node, minor, hours)
    hold = cluster.hold("big")
    assert hold is not None
    assert hold.nodes == {"n2"}
    outlook = cluster.outlook(hold)
    assert outlook.low is not None
    assert outlook.middle is not None
    assert outlook.high is not None
    assert outlook.low <= outlook.middle <= outlook.high
    assert outlook.until is not None
    assert outlook.until <= NOW + 5 * HOUR


@pytest.mark.parametrize("members", [1, 2])
def test_room_is_held_on_allowed_nodes_only(members: int) -> None:
    cluster = Cluster("n1", "n2", "n3")
    for number, node in enumerate(("n1", "n2", "n3")):
        cluster.run(f"{node}-0", node, 0, 1 + number)
        cluster.run(f"{node}-1", node, 1, 1 + number)
    hold = cluster.hold(*(f"big-{number}" for number in range(members)), allowed={"n2", "n3"})
    assert hold is not None
    assert hold.nodes == {"n2", "n3"} if members == 2 else hold.nodes == {"n2"}
    assert cluster.hold("nowhere", allowed=()) is None


def test_room_is_held_on_tainted_node_for_pod_that_tolerates_it() -> None:
    cluster = Cluster("n1")
    cluster.run("a", "n1", 0, 1)
    cluster.state.set_closed("n1", closed=True)
    assert cluster.hold("anywhere") is None
    assert cluster.hold("tolerates", allowed={"n1"}) is not None


def test_state_of_search_is_a_copy() -> None:
    cluster = Cluster("n1")
    cluster.run("a", "n1", 0, 1)
    assert cluster.hold("big") is not None
    assert "a" in cluster.state.pods
    assert not cluster.state.reservations


def test_only_what_must_end_counts() -> None:
    cluster = Cluster("n1")
    cluster.run("stays", "n1", 0, 100, mib=400)
    cluster.run("ends", "n1", 0, 2, mib=600)
    cluster.run("other", "n1", 1, 100)
    hold = cluster.hold("half", vgpus=1, mib=600)
    assert hold is not None
    outlook = cluster.outlook(hold)
    assert outlook.high is not None
    assert outlook.high < NOW + 10 * HOUR


def test_service_without_runtime_is_not_waited_for() -> None:
    cluster = Cluster("n1", "n2")
    cluster.run("service", "n1", 0, None, kind="ReplicaSet")
    cluster.run("job", "n2", 0, None)
    hold = cluster.hold("big")
    assert hold is not None
    assert hold.nodes == {"n2"}
    assert cluster.outlook(hold) == Outlook(unknown=1)


def test_no_room_where_only_services_run() -> None:
    cluster = Cluster("n1")
    cluster.run("service", "n1", 0, None, kind="StatefulSet")
    assert cluster.hold("big") is None


def test_gang_gets_room_for_all_members() -> None:
    cluster = Cluster("n1", "n2")
    cluster.run("a", "n1", 0, 1)
    cluster.run("b", "n2", 0, 2)
    hold = cluster.hold("g-0", "g-1")
    assert hold is not None
    assert hold.nodes == {"n1", "n2"}
    assert hold.owners == {"g-0", "g-1"}
    outlook = cluster.outlook(hold)
    assert outlook.until is not None
    assert NOW + HOUR < outlook.until <= NOW + 2 * HOUR


def test_same_state_gives_same_hold() -> None:
    cluster = Cluster("n1", "n2", "n3")
    for number, node in enumerate(("n1", "n2", "n3")):
        cluster.run(f"p{number}", node, 0, 3)
    assert cluster.hold("big") == cluster.hold("big")
