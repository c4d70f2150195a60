"""What the desk remembers of a pod is true of the pod as it is."""

from placement.request import pod_request
from proto.model import Policy
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.extender.desk import Desk
from tests.unit.scheduler_plugin.builders import make_pod


def test_a_request_that_was_decided_on_is_read_anew_only_when_the_pod_is_another():
    state = ClusterState()
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: 0.0)
    pod = make_pod("u", vgpu="1", vgpu_memory="300")
    decision = Decision(pod, pod_request(pod.gpu), 0.0, 0, 1, {})
    desk.decisions.record(decision)
    assert desk.request_of(make_pod("u", vgpu="1", vgpu_memory="300")) is decision.request
    changed = make_pod("u", annotations={"aliquot.dev/numa": "strict"}, vgpu="1", vgpu_memory="300")
    assert desk.request_of(changed) == pod_request(changed.gpu) != decision.request
