"""Who counts for a gang, and what a gang that waits for room costs the others."""

import json
from dataclasses import replace

from proto import contract
from proto.model import Policy
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.filter import filter_nodes
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share

WHOLE = {"vgpu": "1", "vgpu_memory": "1000"}


class Scene:
    """Nodes of two GPUs of 1,000 MiB, and a gang whose members take one each."""

    def __init__(self, minimum: int, *nodes: str) -> None:
        self.nodes = nodes
        self.now = 0.0
        self.state = ClusterState()
        for node in nodes:
            self.state.set_gpu_node(make_node(node, 2))
        self.desk = Desk(self.state, Shapes(self.state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: self.now)
        self.gang = {contract.ANNOTATION_GANG: "train", contract.ANNOTATION_GANG_MIN: str(minimum)}

    def member(self, uid: str) -> None:
        self.state.set_pod(make_pod(uid, annotations=self.gang, **WHOLE))

    def takes(self, uid: str, node: str, minor: int, *, of_gang: bool = False) -> None:
        """Have a GPU taken by a pod, whole."""
        shares = {"main": [make_share(node, minor, 1000)]}
        self.state.set_pod(make_pod(uid, node=node, shares=shares, annotations=self.gang if of_gang else None, **WHOLE))

    def ends(self, uid: str) -> None:
        """Ask a pod to end: it goes on in its grace period."""
        pod = self.state.pods[uid]
        self.state.set_pod(replace(pod, deletion_requested=True, ends_by=30.0, gpu=replace(pod.gpu, deletion_requested=True)))

    def filter(self, uid: str) -> tuple[list[str], set[str]]:
        """Ask where a member can go; return the nodes, and why not on the others."""
        pod = pod_object(f"pod-{uid}", uid=uid, annotations=self.gang, **WHOLE)
        answer = json.loads(filter_nodes(self.desk, json.dumps({"Pod": pod, "NodeNames": self.nodes}).encode(), self.now))
        return answer["NodeNames"], {*answer["FailedNodes"].values(), *answer["FailedAndUnresolvableNodes"].values()}


def test_a_gang_that_is_restarted_waits_for_room_for_all_while_its_former_members_end():
    scene = Scene(4, "n1", "n2", "n3")
    for number in range(4):
        scene.takes(f"old{number}", ("n1", "n2")[number // 2], number % 2, of_gang=True)
        scene.ends(f"old{number}")
    for number in range(4):
        scene.member(f"new{number}")
    assert scene.filter("new0") == ([], {"gang: no room for enough members at once"})
    for number in range(2):
        scene.state.drop_pod(f"old{number}")
    assert scene.filter("new0")[0]
    assert len(scene.state.reservations) == 4


def test_a_member_in_the_place_of_one_that_ends_joins_the_gang_that_runs():
    scene = Scene(3, "n1", "n2")
    for number in range(3):
        scene.takes(f"old{number}", ("n1", "n2")[number // 2], number % 2, of_gang=True)
    scene.ends("old0")
    scene.member("new")
    assert scene.filter("new")[0] == ["n2"]


def test_members_that_end_are_not_enough_to_start_with():
    scene = Scene(2, "n1", "n2")
    scene.takes("old", "n1", 0, of_gang=True)
    scene.ends("old")
    scene.member("new")
    assert scene.filter("new") == ([], {"gang: 2 members must start together, fewer exist"})
