"""What the desk remembers of a pod is true of the pod as it is, and what it expects of a pod lasts as long as kube-scheduler needs."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from placement.demand import WEIGHT_SUM, Demand, Shape
from placement.request import pod_request
from proto.model import Policy
from scheduler_plugin.__main__ import decode_pod
from scheduler_plugin.core import state as state_module
from scheduler_plugin.core.budgets import Budgets
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.core.wanted import MIN_PODS
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.desk import PREPARE_SECONDS, Desk
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.services.cluster_watch import ClusterWatch
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share


def test_a_request_that_was_decided_on_is_read_anew_only_when_the_pod_is_another():
    state = ClusterState()
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: 0.0)
    pod = make_pod("u", vgpu="1", vgpu_memory="300")
    decision = Decision(pod, pod_request(pod.gpu), 0.0, 0, 1, {})
    desk.decisions.record(decision)
    assert desk.request_of(make_pod("u", vgpu="1", vgpu_memory="300")) is decision.request
    changed = make_pod("u", annotations={"aliquot.dev/numa": "strict"}, vgpu="1", vgpu_memory="300")
    assert desk.request_of(changed) == pod_request(changed.gpu) != decision.request


PLAIN = {"vgpu": "1", "vgpu_memory": "300"}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"vgpu": "2"},
        {"vgpu_memory": "301"},
        {"annotations": {"aliquot.dev/numa": "strict"}},
        {"requests": {"cpu": "2"}},
        {"requests": {"memory": "2Gi"}},
    ],
    ids=str,
)
def test_a_pod_that_comes_after_another_is_judged_by_what_it_asks_itself(changed):
    def asked(desk: Desk, name: str, **arguments: Any) -> Any:
        requests = arguments.pop("requests", {})
        pod = pod_object(name, **arguments)
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1", "memory": "1Gi", **requests}
        return desk.asked(msgspec.Raw(json.dumps(pod).encode()))

    desks = [Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=lambda: 0.0) for state in (ClusterState(),) * 2]
    first, later = asked(desks[0], "first", **PLAIN), asked(desks[0], "later", **PLAIN | changed)
    assert later == asked(desks[1], "later", **PLAIN | changed)
    assert (later.shape is first.shape) == (changed == {})


SOFT_SECONDS = 10.0
CLAIM = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
TOKEN = {"volumes": [{"name": "token", "projected": {"sources": []}}]}


class Scene:
    """Nodes of one GPU each, whole pods that ask for one, and kube-scheduler; it is the clock and the pods' API too."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes or ("n1",)
        self.seconds = 0.0
        self.bound: list[str] = []
        self.state = ClusterState()
        for node in self.nodes:
            self.state.set_gpu_node(make_node(node, 1))
        self.desk = Desk(self.state, Shapes(self.state, DEFAULT_WEIGHTS), Policy.FRAG, SOFT_SECONDS, monotonic=self.monotonic)
        self.watch = ClusterWatch(self.state, Budgets(), self)
        self.watch.on_nominated = self.desk.follow

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> float:
        return self.seconds

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: dict[str, str]) -> None:
        self.bound.append(f"{name} on {node}")

    def sees(self, uid: str, *, message: str = "", nominated: str = "", **spec: Any) -> dict:
        """Have the watch tell a pod, with why kube-scheduler's latest attempt on it failed; return it as the API has it."""
        pod = pod_object(uid, uid=uid, vgpu="1")
        pod["spec"] |= spec
        pod["status"]["nominatedNodeName"] = nominated
        pod["status"]["conditions"] = [
            {"type": "Initialized", "status": "False", "message": "never mind"},
            *([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}] if message else []),
        ]
        self.watch.pods.changed(decode_pod(msgspec.Raw(json.dumps(pod).encode())))
        return pod

    def filter(self, pod: dict, *nodes: str) -> list[str]:
        body = {"Pod": pod, "NodeNames": nodes or self.nodes}
        return json.loads(filter_nodes(self.desk, json.dumps(body).encode(), self.seconds))["NodeNames"]

    def asks_to_bind(self, uid: str, node: str) -> str:
        """Return why not, or nothing."""
        body = {"PodName": uid, "PodNamespace": "team", "PodUID": uid, "Node": node}
        error: str = json.loads(asyncio.run(Binder(self.desk, self, lambda: True).bind(json.dumps(body).encode())))["Error"]
        return error

    async def get_pod(self, namespace: str, name: str) -> None:
        """Every pod that lives is known by the watch."""
        return

    def after(self, seconds: float) -> dict[str, str]:
        """Let time pass; return where pods are expected then."""
        self.seconds += seconds
        self.state.expire(self.seconds, self.seconds)
        return {uid: held.node for uid, held in self.state.reservations.items()}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(CLAIM, id="a claim"),
        pytest.param({"volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}}]}, id="a volume of its own"),
        pytest.param({"resourceClaims": [{"name": "nic", "resourceClaimName": "nic"}]}, id="a claim to a device"),
    ],
)
def test_the_place_of_a_pod_is_kept_while_its_volumes_and_claims_are_made(spec):
    scene = Scene()
    first, second = scene.sees("first", **spec), scene.sees("second")
    assert scene.filter(first) == ["n1"]
    assert scene.after(PREPARE_SECONDS) == {"first": "n1"}
    assert scene.filter(second) == []
    freed = scene.state.freed_count
    assert scene.after(SOFT_SECONDS) == {}, "kube-scheduler has given up by then"
    assert scene.state.freed_count == freed + 1
    assert scene.filter(second) == ["n1"]


def test_the_place_of_a_pod_of_which_nothing_is_made_is_given_to_the_next_soon():
    scene = Scene()
    assert scene.filter(scene.sees("first", **TOKEN)) == ["n1"]
    assert scene.after(SOFT_SECONDS) == {}


def test_a_pod_is_bound_where_it_was_expected_once_its_volume_is_there():
    scene = Scene()
    first, second = scene.sees("first", **CLAIM), scene.sees("second")
    scene.filter(first)
    scene.after(20.0)
    assert scene.filter(second) == []
    assert scene.asks_to_bind("first", "n1") == ""
    assert scene.bound == ["first on n1"]


def test_a_failed_attempt_that_the_watch_tells_ends_the_place_in_the_usual_time():
    scene = Scene()
    scene.filter(scene.sees("first", message="0/1 nodes are available", **CLAIM))
    scene.sees("first", message="binding volumes: provisioning failed", **CLAIM)
    assert scene.after(SOFT_SECONDS - 1) == {"first": "n1"}
    assert scene.after(1.0) == {}


def test_a_failure_that_the_watch_tells_again_is_not_that_of_the_attempt_under_way():
    scene = Scene()
    scene.filter(scene.sees("first", message="0/1 nodes are available", **CLAIM))
    scene.sees("first", message="0/1 nodes are available", priority=1, **CLAIM)
    assert scene.after(SOFT_SECONDS) == {"first": "n1"}


def test_an_attempt_that_fails_as_the_one_before_shows_in_the_choice_of_a_node_that_is_undone():
    scene, message = Scene(), "binding volumes: timed out"
    scene.filter(scene.sees("first", message=message, **CLAIM))
    scene.sees("first", message=message, nominated="n1", **CLAIM)
    assert scene.after(SOFT_SECONDS) == {"first": "n1"}
    scene.sees("first", message=message, **CLAIM)
    assert scene.after(0.0) == {}


def test_a_pod_that_is_tried_again_and_fits_nowhere_is_expected_no_longer():
    scene = Scene()
    first = scene.sees("first", **CLAIM)
    scene.filter(first)
    scene.state.set_gpu_node(make_node("n1", 1, cordoned=True))
    assert scene.after(SOFT_SECONDS) == {"first": "n1"}
    assert scene.filter(first) == []
    assert scene.after(0.0) == {}


def test_a_pod_that_is_gone_is_expected_no_longer_though_its_volume_is_being_made():
    scene = Scene()
    scene.filter(scene.sees("first", **CLAIM))
    scene.state.drop_pod("first")
    assert scene.after(0.0) == {}


@pytest.mark.parametrize(("taken", "want"), [(False, {"first": "n2"}), (True, {})], ids=["free", "taken"])
def test_the_place_moves_to_the_node_that_kube_scheduler_says_it_chose(taken, want):
    scene = Scene("n1", "n2")
    scene.filter(scene.sees("first", **CLAIM), "n1")
    if taken:
        scene.filter(scene.sees("other", **CLAIM), "n2")
    scene.sees("first", nominated="n2", **CLAIM)
    after = scene.after(SOFT_SECONDS)
    assert {uid: node for uid, node in after.items() if uid == "first"} == want
    scene.sees("first", nominated="n2", message="binding volumes: timed out", **CLAIM)
    assert "first" not in scene.after(0.0)


def test_nothing_is_kept_for_long_for_a_pod_whose_end_was_told_before_it_was_asked_about():
    scene = Scene("n1")
    first = scene.sees("first", **CLAIM)
    scene.state.drop_pod("first")
    scene.filter(first)
    assert scene.after(SOFT_SECONDS) == {}


def test_a_list_without_the_pod_ends_the_long_time():
    scene = Scene("n1")
    scene.filter(scene.sees("first", **CLAIM))
    scene.state.replace_pods([])
    assert scene.after(SOFT_SECONDS - 1) == {"first": "n1"}, "the list can be older than the pod"
    assert scene.after(1.0) == {}


def test_bind_lets_go_of_what_was_kept_for_a_pod_that_is_gone():
    scene = Scene("n1")
    scene.filter(scene.sees("first", **CLAIM))
    scene.state.replace_pods([])
    assert "there is no pod team/first" in scene.asks_to_bind("first", "n1")
    assert scene.after(0.0) == {}


class Ahead:
    """Two nodes of two GPUs, on which what is worked out is noted; kube-scheduler rates pods and binds them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = ClusterState()
        for node in ("n1", "n2"):
            self.state.set_gpu_node(make_node(node, 2))
        self.desk = Desk(self.state, Shapes(self.state, DEFAULT_WEIGHTS), Policy.FRAG, SOFT_SECONDS, monotonic=lambda: 0.0)
        self.planned: list[str] = []
        self.judged: list[list[int]] = []
        plan, judge = state_module.plan_on_node, Shapes._judge
        monkeypatch.setattr(state_module, "plan_on_node", lambda *a: (self.planned.append(a[4]), plan(*a))[1])
        monkeypatch.setattr(Shapes, "_judge", lambda *a: (self.judged.append(a[2].tolist()), judge(*a))[1])

    def rate(self, uid: str, **limits: str) -> str:
        """Return the best node."""
        body = {"Pod": pod_object(uid, uid=uid, **limits), "NodeNames": ["n1", "n2"]}
        json.loads(filter_nodes(self.desk, json.dumps(body).encode(), 0.0))
        scores = {entry["Host"]: entry["Score"] for entry in json.loads(prioritize_nodes(self.desk, json.dumps(body).encode()))}
        return max(scores, key=lambda node: scores[node])

    def prepare(self) -> None:
        while self.desk.prepare():
            pass

    def worked_out_since(self) -> tuple[list[str], list[list[int]]]:
        since = self.planned[:], self.judged[:]
        self.planned.clear()
        self.judged.clear()
        return since


def test_what_was_prepared_is_not_worked_out_again(monkeypatch):
    ahead = Ahead(monkeypatch)
    ahead.rate("first", **PLAIN)
    node = ahead.rate("second", **PLAIN)
    ahead.worked_out_since()
    ahead.prepare()
    planned, judged = ahead.worked_out_since()
    assert planned == ["first", "second"]
    assert judged
    devices = ahead.state.plan(node, pod_request(make_pod("second", **PLAIN).gpu), Policy.FRAG, "second")
    assert devices.containers[0].shares
    ahead.rate("third", **PLAIN)
    assert ahead.worked_out_since() == ([], [])


@pytest.mark.parametrize("what", ["health", "use", "request", "policy", "demand"])
def test_devices_are_chosen_anew_once_what_the_choice_rests_on_is_another(monkeypatch, what):
    ahead = Ahead(monkeypatch)
    node, request, policy = ahead.rate("pod", **PLAIN), pod_request(make_pod("pod", **PLAIN).gpu), Policy.FRAG
    ahead.prepare()
    ahead.worked_out_since()
    match what:
        case "health":
            known = ahead.state.gpu_node(node)
            ahead.state.set_gpu_node(replace(known, cordoned=True))
        case "use":
            ahead.state.set_pod(make_pod("other", node=node, shares={"main": [make_share(node, 0, 10)]}, vgpu="1"))
        case "request":
            request = pod_request(make_pod("pod", vgpu="1", vgpu_memory="301").gpu)
        case "policy":
            policy = Policy.SPREAD
        case "demand":
            ahead.desk.shapes.learn()
            ahead.state.columns.set_demand(Demand(((Shape(1, 500), WEIGHT_SUM),)))
    ahead.state.plan(node, request, policy, "pod")
    assert ahead.worked_out_since()[0] == ["pod"]


@pytest.mark.parametrize("pods_between", [0, MIN_PODS], ids=["nothing between", "the demand is learned anew between"])
def test_of_pods_that_come_in_rounds_the_next_shape_is_prepared(monkeypatch, pods_between):
    ahead = Ahead(monkeypatch)
    other = {"vgpu": "1", "vgpu_memory": "200"}
    for uid, limits in (("a1", PLAIN), ("b1", other), ("a2", PLAIN)):
        ahead.rate(uid, **limits)
        ahead.prepare()
    for number in range(pods_between):
        ahead.state.set_pod(make_pod(f"waits-{number}", vgpu="1", vgpu_memory="100"))
    ahead.prepare()
    ahead.worked_out_since()
    ahead.rate("b2", **other)
    assert ahead.worked_out_since()[1] == []


def test_a_verdict_that_may_take_a_search_is_left_until_it_is_asked_for(monkeypatch):
    ahead = Ahead(monkeypatch)
    for uid in ("first", "second"):
        pod = pod_object(uid, uid=uid, **PLAIN)
        main = pod["spec"]["containers"][0]
        pod["spec"]["containers"] = [main, {**main, "name": "beside"}]
        filter_nodes(ahead.desk, json.dumps({"Pod": pod, "NodeNames": ["n1", "n2"]}).encode(), 0.0)
    ahead.state.set_pod(make_pod("other", node="n1", shares={"main": [make_share("n1", 0, 10)]}, vgpu="1"))
    ahead.worked_out_since()
    ahead.prepare()
    assert ahead.worked_out_since() == ([], [])
