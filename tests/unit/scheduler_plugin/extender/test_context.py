# SPDX-License-Identifier: Apache-2.0
"""What the context remembers of a pod is true of the pod as it is, and what it expects of a pod lasts as long as kube-scheduler needs."""

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from aliquot.contract.model import PodAssignment, Policy
from aliquot.placement.demand import WEIGHT_SUM, Demand, Shape
from aliquot.placement.request import pod_request
from scheduler_plugin.core.cluster import state as state_module
from scheduler_plugin.core.cluster.budgets import Budgets
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.cluster.state import ClusterState, Reservation
from scheduler_plugin.core.cluster.wanted import MIN_PODS
from scheduler_plugin.core.fit import shapes as shapes_module
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.extender.reservations import PREPARE_SECONDS
from scheduler_plugin.services.cluster_watch import ClusterWatch
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod, make_share

PLAIN: dict[str, Any] = {"vgpu": "1", "vgpu_memory": "300"}


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
def test_later_pod_is_judged_by_its_own_request(changed):
    def asked(context: Any, name: str, **arguments: Any) -> Any:
        requests = arguments.pop("requests", {})
        pod = pod_object(name, **arguments)
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1", "memory": "1Gi", **requests}
        return context.calls.pods.read(msgspec.Raw(json.dumps(pod).encode()))

    contexts = [make_context(state) for state in (ClusterState(),) * 2]
    first, later = asked(contexts[0], "first", **PLAIN), asked(contexts[0], "later", **PLAIN | changed)
    assert later == asked(contexts[1], "later", **PLAIN | changed)
    assert (later.shape is first.shape) == (changed == {})


SOFT_SECONDS = 10.0
CLAIM: dict[str, Any] = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
TOKEN: dict[str, Any] = {"volumes": [{"name": "token", "projected": {"sources": []}}]}


class Scene:
    """Nodes of one GPU each, whole pods that ask for one, and kube-scheduler; it is the clock and the pods' API too."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes or ("n1",)
        self.seconds = 0.0
        self.bound: list[str] = []
        self.state = ClusterState()
        for node in self.nodes:
            self.state.set_gpu_node(make_node(node, 1))
        self.context = make_context(self.state, soft_seconds=SOFT_SECONDS, monotonic=self.monotonic)
        self.watch = ClusterWatch(self.state, Budgets(), self)
        self.watch.on_nominated = self.context.reservations.follow_nomination

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
        return json.loads(filter_body(self.context, json.dumps(body).encode(), self.seconds))["NodeNames"]

    def asks_to_bind(self, uid: str, node: str) -> str:
        """Return why not, or nothing."""
        body = {"PodName": uid, "PodNamespace": "team", "PodUID": uid, "Node": node}
        error: str = json.loads(asyncio.run(Binder(self.context, cast(Any, self), lambda: True).bind(json.dumps(body).encode())))["Error"]
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
def test_reservation_lasts_while_volumes_and_claims_are_created(spec):
    scene = Scene()
    first, second = scene.sees("first", **spec), scene.sees("second")
    assert scene.filter(first) == ["n1"]
    assert scene.after(PREPARE_SECONDS) == {"first": "n1"}
    assert scene.filter(second) == []
    freed = scene.state.freed_count
    assert scene.after(SOFT_SECONDS) == {}, "kube-scheduler has given up by then"
    assert scene.state.freed_count == freed + 1
    assert scene.filter(second) == ["n1"]


def test_reservation_of_pod_without_progress_goes_to_next_pod_soon():
    scene = Scene()
    assert scene.filter(scene.sees("first", **TOKEN)) == ["n1"]
    assert scene.after(SOFT_SECONDS) == {}


def test_pod_is_bound_on_reserved_node_once_volume_exists():
    scene = Scene()
    first, second = scene.sees("first", **CLAIM), scene.sees("second")
    scene.filter(first)
    scene.after(20.0)
    assert scene.filter(second) == []
    assert scene.asks_to_bind("first", "n1") == ""
    assert scene.bound == ["first on n1"]


def test_failed_attempt_seen_by_watch_ends_reservation_in_usual_time():
    scene = Scene()
    scene.filter(scene.sees("first", message="0/1 nodes are available", **CLAIM))
    scene.sees("first", message="binding volumes: provisioning failed", **CLAIM)
    assert scene.after(SOFT_SECONDS - 1) == {"first": "n1"}
    assert scene.after(1.0) == {}


def test_failure_repeated_by_watch_does_not_count_for_current_attempt():
    scene = Scene()
    scene.filter(scene.sees("first", message="0/1 nodes are available", **CLAIM))
    scene.sees("first", message="0/1 nodes are available", priority=1, **CLAIM)
    assert scene.after(SOFT_SECONDS) == {"first": "n1"}


def test_repeated_failure_shows_in_undone_choice_of_node():
    scene, message = Scene(), "binding volumes: timed out"
    scene.filter(scene.sees("first", message=message, **CLAIM))
    scene.sees("first", message=message, nominated="n1", **CLAIM)
    assert scene.after(SOFT_SECONDS) == {"first": "n1"}
    scene.sees("first", message=message, **CLAIM)
    assert scene.after(0.0) == {}


def test_retried_pod_that_fits_no_node_loses_reservation():
    scene = Scene()
    first = scene.sees("first", **CLAIM)
    scene.filter(first)
    scene.state.set_gpu_node(make_node("n1", 1, cordoned=True))
    assert scene.after(SOFT_SECONDS) == {"first": "n1"}
    assert scene.filter(first) == []
    assert scene.after(0.0) == {}


def test_deleted_pod_loses_reservation_though_its_volume_is_being_created():
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


def test_pod_deleted_before_first_query_gets_no_long_reservation():
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


def test_bind_releases_reservation_of_deleted_pod():
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
        self.context = make_context(self.state, soft_seconds=SOFT_SECONDS)
        self.planned: list[str] = []
        self.judged: list[list[int]] = []
        plan, judge = cast(Any, state_module).plan_on_node, Shapes._judge

        def noted_plan_on_node(*a):
            self.planned.append(a[4])
            return plan(*a)

        monkeypatch.setattr(state_module, "plan_on_node", noted_plan_on_node)

        def noted_judge(*a):
            self.judged.append(a[2].tolist())
            return judge(*a)

        monkeypatch.setattr(Shapes, "_judge", noted_judge)

    def rate(self, uid: str, **limits: Any) -> str:
        """Return the best node."""
        body = {"Pod": pod_object(uid, uid=uid, **limits), "NodeNames": ["n1", "n2"]}
        json.loads(filter_body(self.context, json.dumps(body).encode(), 0.0))
        scores = {entry["Host"]: entry["Score"] for entry in json.loads(prioritize_nodes(self.context, json.dumps(body).encode()))}
        return max(scores, key=lambda node: scores[node])

    def prepare(self) -> None:
        while self.context.prepare():
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
    assert isinstance(devices, PodAssignment)
    assert devices.containers[0].shares
    ahead.rate("third", **PLAIN)
    assert ahead.worked_out_since() == ([], [])


@pytest.mark.parametrize("what", ["health", "use", "request", "policy", "demand"])
def test_devices_are_chosen_again_once_their_basis_changes(monkeypatch, what):
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
            ahead.context.verdicts.shapes.learn()
            ahead.state.columns.set_demand(Demand(((Shape(1, 500), WEIGHT_SUM),)))
    ahead.state.plan(node, request, policy, "pod")
    assert ahead.worked_out_since()[0] == ["pod"]


@pytest.mark.parametrize("pods_between", [0, MIN_PODS], ids=["nothing between", "the demand is learned again between"])
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


def test_verdict_that_may_need_search_is_computed_on_demand(monkeypatch):
    ahead = Ahead(monkeypatch)
    for uid in ("first", "second"):
        pod = pod_object(uid, uid=uid, **PLAIN)
        main = pod["spec"]["containers"][0]
        pod["spec"]["containers"] = [main, {**main, "name": "beside"}]
        filter_body(ahead.context, json.dumps({"Pod": pod, "NodeNames": ["n1", "n2"]}).encode(), 0.0)
    ahead.state.set_pod(make_pod("other", node="n1", shares={"main": [make_share("n1", 0, 10)]}, vgpu="1"))
    ahead.worked_out_since()
    ahead.prepare()
    assert ahead.worked_out_since() == ([], [])


class Watched:
    """A scheduler of four nodes that sees pods by the watch, and notes which shape was judged for how many nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shapes_module, "MAX_AHEAD", 1)  # a node in each piece
        self.context = make_context(ClusterState())
        for number in range(4):
            self.context.state.set_gpu_node(make_node(f"n{number}"))
        self.watch = ClusterWatch(self.context.state, self.context.budgets, self.context.clock)
        self.watch.on_waiting = self.context.verdicts.expect
        self.judged: list[tuple[PodShape, int]] = []
        judge = Shapes._judge

        def noting(shapes: Shapes, shape: PodShape, rows: Any, verdict: Any) -> None:
            self.judged.append((shape, len(rows)))
            judge(shapes, shape, rows, verdict)

        monkeypatch.setattr(Shapes, "_judge", noting)

    def shape(self, pod: PodFacts) -> PodShape:
        assert pod.gpu is not None
        return self.context.verdicts.shape_of(pod, pod_request(pod.gpu))

    def prepared(self) -> list[tuple[PodShape, int]]:
        """What is judged until there is nothing to prepare."""
        self.judged.clear()
        while self.context.prepare():
            pass
        return list(self.judged)

    def asked(self, uid: str, **limits: Any) -> list[tuple[PodShape, int]]:
        """What is judged in a call for a pod, which then is bound to the first node."""
        pod = make_pod(uid, **limits)
        self.judged.clear()
        self.context.verdicts.of(pod, self.shape(pod))
        judged = list(self.judged)
        self.watch.pods.changed(make_pod(uid, node="n0", shares={"main": [make_share("n0", 0)]}, **limits))
        return judged


SMALL: dict[str, Any] = {"vgpu": "1", "vgpu_memory": "300"}
LARGE: dict[str, Any] = {"vgpu": "1", "vgpu_memory": "600"}


def test_new_shape_of_waiting_pods_is_judged_before_its_first_call(monkeypatch):
    scheduler = Watched(monkeypatch)
    gated = replace(make_pod("gated", vgpu="2"), gates=("quota",))
    bound = make_pod("bound", node="n1", shares={"main": [make_share("n1", 0)]}, vgpu="1", vgpu_memory="302")
    for pod in (make_pod("a", **SMALL), make_pod("b", **SMALL), make_pod("c", **LARGE), gated, bound, make_pod("cpu", cpu_milli=1)):
        scheduler.watch.pods.changed(pod)
    small, large = scheduler.shape(make_pod(**SMALL)), scheduler.shape(make_pod(**LARGE))
    assert scheduler.prepared() == [(small, 1)] * 4 + [(large, 1)] * 4
    assert scheduler.asked("a", **SMALL) == []
    scheduler.watch.pods.changed(replace(gated, gates=()))
    assert scheduler.prepared() == [(small, 1)] + [(scheduler.shape(gated), 1)] * 4


def test_shape_is_judged_once_an_admission_review_announced_a_pod(monkeypatch):
    scheduler = Watched(monkeypatch)
    announced = make_pod("", **SMALL)
    for pod in (announced, make_pod("", cpu_milli=1)):
        scheduler.context.verdicts.foretell(pod)
    assert scheduler.prepared() == [(scheduler.shape(announced), 1)] * 4
    assert scheduler.context.verdicts.next_pods(9) == []
    assert scheduler.asked("a", **SMALL) == []


@pytest.mark.parametrize("listed", [False, True], ids=["watched", "listed"])
def test_verdict_is_up_to_date_for_the_pod_next_in_queue(monkeypatch, listed):
    scheduler = Watched(monkeypatch)
    waiting = [make_pod("a", **SMALL), make_pod("b", **LARGE), make_pod("c", **SMALL), make_pod("first", priority=7, **LARGE)]
    if listed:
        scheduler.watch.pods.listing()
        scheduler.watch.pods.listed(waiting)
    else:
        for pod in waiting:
            scheduler.watch.pods.changed(pod)
    scheduler.prepared()
    small, large = scheduler.shape(waiting[0]), scheduler.shape(waiting[1])
    assert scheduler.asked("first", **LARGE) == [], "it comes before those of lower priority"
    for uid, limits, changed in (("a", SMALL, small), ("b", LARGE, large)):
        assert scheduler.prepared() == [(changed, 1)]
        assert scheduler.asked(uid, **limits) == []


@pytest.mark.parametrize("nominated", ["n1", "n2", ""])
def test_next_pod_with_room_on_nominated_node_needs_no_verdict(monkeypatch, nominated):
    scheduler = Watched(monkeypatch)
    pod = replace(make_pod("a", **SMALL), nominated_node=nominated)
    scheduler.watch.pods.changed(pod)
    scheduler.prepared()
    scheduler.context.state.reserve(Reservation("a", "n1", {"GPU-n1-0": Use(300, 0, 1, 1)}, HostDemand()))
    assert scheduler.prepared() == ([] if nominated == "n1" else [(scheduler.shape(pod), 1)])


def test_pod_that_is_gone_or_passed_over_is_not_expected_next(monkeypatch):
    scheduler = Watched(monkeypatch)
    others = make_pod("of another scheduler", **LARGE), make_pod("deleted", **LARGE)
    for pod in (make_pod("a", **SMALL), others[0], make_pod("b", **SMALL), others[1], make_pod("c", **SMALL)):
        scheduler.watch.pods.changed(pod)
    scheduler.prepared()
    scheduler.asked("a", **SMALL)
    scheduler.asked("b", **SMALL)
    scheduler.watch.pods.deleted(others[1])
    assert scheduler.prepared() == [(scheduler.shape(make_pod(**SMALL)), 1)]
