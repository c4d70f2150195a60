# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from aliquot.contract import units
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.hold_uids import claim_uid
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.dashboard.picture import MAX_WAITING, NODES_AT_ONCE, Node, Painter, Picture
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share, make_spec, request_of


@dataclass
class Shown:
    """A picture with nodes that are values again."""

    picture: Picture

    @property
    def nodes(self) -> list[Node]:
        return [msgspec.json.decode(raw, type=Node) for raw in self.picture.nodes]


def picture(state: ClusterState, waiting=(), painter: Painter | None = None, trouble: str = "") -> Shown:
    *pauses, drawn = (painter or Painter(state)).draw(waiting, leads=True, trouble=trouble)
    assert pauses == [None] * (state.node_count // NODES_AT_ONCE)
    assert drawn is not None
    return Shown(drawn)


def waiting_pod(uid: str, failed, **limits: Any) -> Decision:
    pod = make_pod(uid, **limits)
    return Decision(pod, request_of(pod), at=5.0, generation=1, fitting=0, failed=failed)


@pytest.fixture
def state() -> ClusterState:
    state = ClusterState()
    state.set_gpu_node(make_node("n1", [make_device("n1", 0), make_device("n1", 1, instances=2)]))
    return state


def test_a_bound_pod_fills_its_part_of_its_gpu(state):
    state.set_pod(make_pod("a", node="n1", vgpu="1", vgpu_memory="100", vgpu_cores="30", shares={"main": [make_share("n1", 0, 100, 30)]}))
    gpu = picture(state).nodes[0].gpus[0]
    assert [(part.pod, part.memory_mib, part.cores_percent, part.stage) for part in gpu.slices] == [("team/pod-a", 100, 30, "")]
    assert (gpu.used_mib, gpu.memory_mib, gpu.used_cores_percent) == (100, 1000, 30)


def test_a_pod_that_is_expected_is_shown_as_such(state):
    state.reserve(Reservation("b", "n1", {"GPU-n1-0": Use(200, 0, 1, 1)}, HostDemand(0, 0), Stage.BINDING))
    (part,) = picture(state).nodes[0].gpus[0].slices
    assert (part.pod, part.memory_mib, part.stage) == ("", 200, "being bound")


MIG: dict[str, Any] = {"mig_1g.10gb": "1"}


def test_an_allocated_claim_is_no_pod_that_is_expected(state):
    state.reserve(Reservation(claim_uid("c"), "n1", {"GPU-n1-0": Use(200, 0, 1, 1)}, HostDemand(0, 0), Stage.BINDING))
    (part,) = picture(state).nodes[0].gpus[0].slices
    assert (part.pod, part.memory_mib, part.stage) == ("ResourceClaim", 200, "")


def test_a_mig_instance_is_shown_on_its_gpu_with_its_profile(state):
    share = make_share("n1", 1, 100)
    pod = make_pod("c", make_spec(**MIG), node="n1", shares={"main": [type(share)("MIG-n1-1-0", 100 * units.MIB)]})
    state.set_pod(pod)
    gpu = picture(state).nodes[0].gpus[1]
    assert [(part.pod, part.memory_mib, part.instance) for part in gpu.slices] == [("team/pod-c", 100, "1g.10gb")]
    assert gpu.mig


def test_waiting_pods_say_what_they_ask_and_why_they_fit_nowhere(state):
    decision = waiting_pod("w", {NodeReason.MEMORY: 3, NodeReason.NO_GPU: 7}, vgpu="2", vgpu_memory="400", vgpu_cores="60")
    (pod,) = picture(state, [decision]).picture.waiting
    assert (pod.pod, pod.asks) == ("team/pod-w", "2 × 200 MiB, 30 % cores")
    assert pod.reasons == [(NodeReason.NO_GPU.sentence, 7), (NodeReason.MEMORY.sentence, 3)]


def test_only_so_many_waiting_pods_are_listed_and_all_are_counted(state):
    many = [waiting_pod(f"w{number}", {}, vgpu="1") for number in range(MAX_WAITING + 3)]
    drawn = picture(state, many).picture
    assert (len(drawn.waiting), drawn.waiting_count) == (MAX_WAITING, MAX_WAITING + 3)


def test_a_picture_that_is_not_current_says_why(state):
    assert picture(state, trouble="nodes: the API is silent").picture.trouble == "nodes: the API is silent"


def test_a_switched_node_has_one_line_of_links():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 4, linked=True))
    assert picture(state).nodes[0].links == ["all to all NVLink x18"]


def test_a_bound_pod_without_assignment_is_named(state):
    state.set_pod(make_pod("d", node="n1", vgpu="1"))
    assert [name for name, _ in picture(state).picture.unaccounted] == ["team/pod-d"]


def test_only_nodes_that_changed_are_drawn_again(state):
    painter = Painter(state)
    state.set_gpu_node(make_node("n2"))
    before = picture(state, painter=painter).picture.nodes
    state.set_pod(make_pod("e", node="n2", vgpu="1", vgpu_memory="100", shares={"main": [make_share("n2", 0, 100)]}))
    after = picture(state, painter=painter)
    assert after.picture.nodes[0] is before[0]
    assert [part.pod for part in after.nodes[1].gpus[0].slices] == ["team/pod-e"]


def test_a_reservation_that_gets_surer_is_drawn_again(state):
    painter = Painter(state)
    state.reserve(Reservation("b", "n1", {"GPU-n1-0": Use(200, 0, 1, 1)}, HostDemand(0, 0), Stage.BINDING))
    picture(state, painter=painter)
    state.confirm("b", expires_at=1.0)
    assert picture(state, painter=painter).nodes[0].gpus[0].slices[0].stage == "bound"


def test_a_node_that_went_is_not_shown(state):
    painter = Painter(state)
    picture(state, painter=painter)
    state.drop_gpu_node("n1")
    assert picture(state, painter=painter).nodes == []


def test_drawing_many_nodes_lets_others_run_in_between():
    state = ClusterState()
    for number in range(NODES_AT_ONCE * 2 + 1):
        state.set_gpu_node(make_node(f"n{number}"))
    assert len(picture(state).nodes) == NODES_AT_ONCE * 2 + 1
