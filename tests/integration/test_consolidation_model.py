# SPDX-License-Identifier: Apache-2.0
"""Consolidation on a cluster that changes at any step: a killed scheduler, late watches, refused evictions, new pods, controllers.

Kept at every step: no device is promised beyond what it has, over the pods that the API has bound (I1). A pod is evicted only if it may
move, the API does not protect it, and its replacement has a seat that is reserved at that moment, on a node that it may use by what the
scheduler has received of the nodes. At the end nothing stays: no seat, no reservation, no annotation of a run on a pod that waits (I3). The
API's own picture of pods and nodes is the oracle.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.model import Policy
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.objects import is_closed, node_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.consolidate.plan import seat_uid
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.services.consolidator import Consolidator, Scope
from scheduler_plugin.services.explainer import Explainer
from scheduler_plugin.services.move_api import MoveApi
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.settings import Answer
from tests.fakes.node_rules import REQUIRED, Object, may_run, node_object, with_rules
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod

NODES, GPUS, PODS_PER_NODE, GPU_MIB = ("n1", "n2", "n3"), 4, 2, 1000
MOVABLE = {contract.ANNOTATION_MOVABLE: "true", contract.ANNOTATION_MIN_RUNTIME: "0s"}
GRACE_SECONDS = 30.0
POOLS = {"n1": "a", "n2": "b", "n3": "a"}
NOT_C = {"matchExpressions": [{"key": "pool", "operator": "NotIn", "values": ["c"]}]}
RULES: Mapping[str, Object] = {
    "job-n1": {"nodeSelector": {"pool": "a"}},
    "job-n2": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [NOT_C]}}}},
    "job-n3": {"tolerations": [{"key": "dedicated", "value": "team", "effect": "NoSchedule"}]},
    "big": {"nodeSelector": {"pool": "a"}},
}
"""By workload, in a world with rules."""
BIG = f"big.{len(NODES) * PODS_PER_NODE + 1}"
"""UID of the pod that wants a whole node."""


class World:
    """The API, the controllers and kube-scheduler, as far as they matter here, and the scheduler that lives on them."""

    def __init__(self, *, stays: bool = False, acts: bool = True, ruled: bool = False) -> None:
        """Make it.

        Args: stays: whether the pods on n3 state that they must not move. acts: whether the scheduler moves pods or only plans.
              ruled: whether pods have rules about nodes, and the scheduler reads labels and taints.
        """
        self.ruled = ruled
        self.nodes: dict[str, Object] = {
            name: {"metadata": {"name": name, "labels": {"pool": pool}}, "spec": {"taints": [], "unschedulable": False}}
            for name, pool in POOLS.items()
        }
        """By name; the API's truth."""
        self.seen: dict[str, Object] = {}
        """What the scheduler has received of the nodes."""
        self.acts, self.leads, self.replaces = acts, True, True
        self.now = 10_000.0
        self.created = 0
        self.pods: dict[str, PodFacts] = {}
        """By UID; the API's truth."""
        self.unseen: list[PodFacts | str | Object] = []
        """Changes that the scheduler has not received yet."""
        self.protected: set[str] = set()
        """Names of workloads that the API lets no pod end of."""
        self.broken = False
        """Whether the API answers writes with errors."""
        self.evicted: list[str] = []
        self.retried: list[str] = []
        self.reported: list[tuple[str, str]] = []
        """Events: UID of the pod and message."""
        self.outcomes = Counter[str]()
        """How many runs of moves had each outcome, over all processes."""
        self.telemetry = Telemetry()
        self.start()
        for node in NODES:
            for _ in range(PODS_PER_NODE):
                self.create(f"job-{node}", {} if stays and node == "n3" else MOVABLE)
        self.create("big", {}, vgpus=GPUS, controller="")

    def start(self) -> None:
        """Start the scheduler with only what the API lists."""
        self.state = ClusterState()
        self.state.replace_gpu_nodes([make_node(name, GPUS) for name in NODES])
        self.state.replace_hosts(dict.fromkeys(NODES, (64_000, 512_000, 110)))
        self.state.replace_pods(self.pods.values())
        self.unseen.clear()
        self.caught_up_at = self.now
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now, soft_seconds=10.0)
        for node in self.nodes.values():
            self.receive(node)
        self.binder = Binder(self.context, self, lambda: True)
        explainer = Explainer(self.context, Rules(Policy.FRAG, DEFAULT_WEIGHTS), lambda: 0.0)
        self.note_outcomes()
        self.telemetry = Telemetry()
        api, scope = MoveApi(self, self), Scope(self.acts)
        parts = (self.context, api, explainer.full_snapshot, self.retry, lambda: self.leads, self.telemetry, scope)
        self.consolidator = Consolidator(*parts)

    def receive(self, node: Object) -> None:
        """Let the scheduler have a new or changed node."""
        item = node_object(node)
        self.seen[item.metadata.name] = node
        self.state.set_closed(item.metadata.name, closed=is_closed(item))
        if self.ruled:
            self.context.directory.put(node_facts(item))

    def change_node(self, name: str, **spec: Any) -> None:
        """Change the spec of a node."""
        self.nodes[name] = {**self.nodes[name], "spec": {**self.nodes[name]["spec"], **spec}}
        self.unseen.append(self.nodes[name])

    def relabel(self, name: str, pool: str) -> None:
        self.nodes[name] = {**self.nodes[name], "metadata": {"name": name, "labels": {"pool": pool}}}
        self.unseen.append(self.nodes[name])

    def rules_of(self, uid: str) -> Object:
        return RULES.get(uid.partition(".")[0], {}) if self.ruled else {}

    def note_outcomes(self) -> None:
        """Add what the present process counted."""
        for metric in self.telemetry.consolidations.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    self.outcomes[sample.labels["outcome"]] += int(sample.value)

    # --- controllers and kube-scheduler ---

    def create(self, workload: str, annotations: Mapping[str, str], *, vgpus: int = 1, controller: str | None = None) -> None:
        """Create a pod of a workload; its GPUs are whole ones."""
        self.created += 1
        uid = f"{workload}.{self.created}"
        pod = make_pod(uid, annotations=annotations, vgpu=str(vgpus), vgpu_memory=str(vgpus * GPU_MIB))
        owner = workload if controller is None else controller
        assert pod.gpu is not None
        gpu = replace(pod.gpu, scheduler_name=contract.SCHEDULER_NAME)
        self.change(with_rules(replace(pod, gpu=gpu, controller_uid=owner, controller_kind="Job" if owner else ""), self.rules_of(pod.uid)))

    def change(self, pod: PodFacts) -> None:
        self.pods[pod.uid] = pod
        self.unseen.append(pod)

    def remove(self, uid: str) -> None:
        """End a pod; its controller, if any, has replaced it when its deletion was requested."""
        if self.pods.pop(uid, None) is not None:
            self.unseen.append(uid)

    def deliver(self) -> None:
        """Let the watch deliver all changes."""
        for change in self.unseen:
            if isinstance(change, str):
                self.state.drop_pod(change)
                self.context.decisions.forget(change)
            elif not isinstance(change, PodFacts):
                self.receive(change)
            else:
                self.state.set_pod(change)
                if change.node_name:
                    self.context.decisions.forget(change.uid)
        self.unseen.clear()
        self.caught_up_at = self.now

    def end_pods(self) -> None:
        """End all pods with a requested deletion."""
        for pod in [pod for pod in self.pods.values() if pod.deletion_requested]:
            self.remove(pod.uid)

    async def schedule(self) -> None:
        """Try all waiting pods once, in the order of their creation."""
        for pod in [pod for pod in self.pods.values() if not pod.node_name and not pod.deletion_requested]:
            await self.attempt(pod)

    async def attempt(self, pod: PodFacts) -> None:
        assert pod.gpu is not None
        limits = {name.rpartition("/")[2].replace("-", "_"): amount for name, amount in pod.gpu.containers[0].limits.items()}
        item = pod_object(pod.name, uid=pod.uid, annotations=dict(pod.gpu.annotations), controller=pod.controller_uid, **limits)
        item["spec"]["containers"][0]["resources"]["requests"].pop("cpu")
        enough = [node for node in NODES if self.free_on(node) >= int(limits["vgpu"]) and may_run(self.rules_of(pod.uid), self.nodes[node])]
        if not enough:
            return  # kube-scheduler's own filters leave no node, so it does not call
        reply = filter_body(self.context, json.dumps({"Pod": item, "NodeNames": enough}).encode(), self.now, Answer.ONE)
        names = json.loads(reply)["NodeNames"]
        if names:
            args = {"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": names[0]}
            await self.binder.bind(json.dumps(args).encode())

    def free_on(self, node: str) -> int:
        """How many vGPUs kube-scheduler counts as free."""
        bound = (pod.gpu for pod in self.pods.values() if pod.gpu is not None and pod.node_name == node)
        return GPUS - sum(int(gpu.containers[0].limits[contract.RESOURCE_VGPU]) for gpu in bound)

    async def retry(self, uid: str) -> None:
        self.retried.append(uid)
        self.context.decisions.forget(uid)

    # --- ports.PodApi, ports.EventApi ---

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        del namespace, name
        pod = self.pods.get(uid)
        if pod is None:
            raise KubeNotFoundError("no such pod")
        if pod.node_name:
            raise KubeConflictError("already assigned")
        assert pod.gpu is not None
        gpu = replace(pod.gpu, node_name=node, annotations={**pod.gpu.annotations, **annotations})
        self.change(replace(pod, node_name=node, gpu=gpu, started_at=self.now))

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        return next((pod for pod in self.pods.values() if (pod.namespace, pod.name) == (namespace, name)), None)

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        raise AssertionError(f"a list of succeeded pods in {namespace} is not needed here")

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        del namespace, name
        if self.broken:
            raise KubeApiError("no answer")
        pod = self.pods.get(uid)
        if pod is None:
            raise KubeNotFoundError("no such pod")
        assert pod.gpu is not None
        self.change(replace(pod, gpu=replace(pod.gpu, annotations={**pod.gpu.annotations, **annotations})))

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        del namespace, name
        pod = self.pods.get(uid)
        if pod is None:
            raise KubeNotFoundError("no such pod")
        if self.broken or pod.controller_uid in self.protected:
            raise KubeApiError("HTTP 429: the budget refuses")
        if dry_run or pod.deletion_requested:
            return
        assert pod.gpu is not None
        assert pod.gpu.annotations[contract.ANNOTATION_MOVABLE] == "true"
        assert self.has_seat(pod), "a pod ends only if its replacement has a seat"
        assert may_run(self.rules_of(BIG), self.seen[self.state.reservations[BIG].node])
        self.evicted.append(uid)
        self.change(replace(pod, deletion_requested=True, ends_by=self.now + GRACE_SECONDS))
        if self.replaces:
            self.create(pod.controller_uid, MOVABLE)

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        assert reason in (contract.EVENT_REASON_MOVED, contract.EVENT_REASON_CONSOLIDATION)
        assert len(message) < 1000
        self.reported.append((uid, message))

    # --- the oracle ---

    def has_seat(self, pod: PodFacts) -> bool:
        """Whether room is reserved for a pod's replacement, on a node that it may use."""
        held, rules = self.state.reservations, self.rules_of(pod.uid)
        others = [other.uid for other in self.pods.values() if other.controller_uid == pod.controller_uid and not other.node_name]
        seats = [held[uid] for uid in (seat_uid(pod.uid), *others) if uid in held and held[uid].footprint]
        return any(may_run(rules, self.seen[seat.node]) for seat in seats)

    def check(self) -> None:
        """No GPU is promised twice: all requests here are for whole GPUs."""
        used = Counter[str]()
        for pod in self.pods.values():
            if pod.node_name and pod.gpu is not None:
                text = pod.gpu.annotations[contract.ANNOTATION_ASSIGNMENT]
                shares = [share for one in codec.decode_assignment(text, pod_uid=pod.uid).containers for share in one.shares]
                used.update(share.device_uuid for share in shares)
        assert max(used.values(), default=0) <= 1, used

    async def step(self, seconds: float = 1.0) -> None:
        """Let time pass, and the scheduler act once."""
        self.now += seconds
        if not self.unseen:
            self.caught_up_at = self.now
        self.state.expire(self.now, self.caught_up_at)
        await self.consolidator.step()
        self.check()

    async def settle(self) -> None:
        """Let everything that is under way end, with an API that answers."""
        self.broken = False
        for _ in range(40):
            self.deliver()
            await self.schedule()
            self.end_pods()
            self.deliver()
            await self.step(20.0)
        for pod in self.pods.values():
            if not pod.node_name:
                assert not (pod.gpu and pod.gpu.annotations.get(contract.ANNOTATION_CONSOLIDATION)), "a run is left over"
        bound = {uid for uid, pod in self.pods.items() if pod.node_name}
        assert not self.state.reservations.keys() - {pod.uid for pod in self.waiting()}, "a reservation is left over"
        assert not bound & self.state.reservations.keys()

    def waiting(self) -> list[PodFacts]:
        return [pod for pod in self.pods.values() if not pod.node_name]

    def big_runs(self) -> bool:
        return bool(self.pods[BIG].node_name)


async def begin(world: World) -> None:
    """Bind the small pods, one on each node, and have the large one refused."""
    world.deliver()
    for pod in [pod for pod in world.waiting() if not pod.uid.startswith("big")]:
        assert pod.gpu is not None
        node = pod.controller_uid.removeprefix("job-")
        await world.binder.bind(json.dumps({"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": node}).encode())
    world.deliver()
    await world.schedule()
    assert [pod.uid for pod in world.waiting()] == [BIG]


async def act(world: World, action: str) -> None:
    """Do one thing that can happen at any time."""
    match action:
        case "step" | "long step":
            await world.step(16.0 if action == "long step" else 1.0)
        case "schedule":
            await world.schedule()
        case "protect" | "unprotect":
            world.protected = {"job-n1", "job-n2"} if action == "protect" else set()
        case "break" | "mend":
            world.broken = action == "break"
        case _:
            {
                "end pods": world.end_pods,
                "deliver": world.deliver,
                "kill": world.start,
                "intruder": lambda: world.create("intruder", {}, controller=""),
                "forget big": lambda: world.remove(BIG),
                "cordon": lambda: world.change_node("n2", unschedulable=True),
                "uncordon": lambda: world.change_node("n2", unschedulable=False),
                "taint": lambda: world.change_node("n3", taints=[{"key": "dedicated", "value": "team", "effect": "NoSchedule"}]),
                "relabel": lambda: world.relabel("n1", "c"),
                "label again": lambda: world.relabel("n1", "a"),
            }[action]()
    world.check()


ACTIONS = ("step", "long step", "schedule", "end pods", "deliver", "kill")
ODD_ACTIONS = ("protect", "unprotect", "break", "mend", "intruder", "forget big", "cordon", "uncordon", "taint", "relabel", "label again")


@pytest.mark.parametrize("ruled", [False, True])
async def test_large_pod_starts_after_all_moves(ruled: bool) -> None:
    world = World(ruled=ruled)
    await begin(world)
    await world.settle()
    assert world.big_runs()
    assert len(world.evicted) == PODS_PER_NODE
    world.note_outcomes()
    assert world.outcomes == {"found": 1, "completed": 1}


async def test_without_labels_of_nodes_pods_with_rules_wait() -> None:
    world = World(ruled=True)
    await begin(world)
    world.context.directory.keep(())
    await world.settle()
    assert not world.big_runs()
    assert not world.evicted


@pytest.mark.parametrize("ruled", [False, True])
async def test_no_pod_ends_while_node_of_its_seat_is_cordoned(ruled: bool) -> None:
    world = World(ruled=ruled)
    await begin(world)
    for action in ("long step", "long step"):
        await act(world, action)
    for node in NODES:
        world.change_node(node, unschedulable=True)
    for action in ("deliver", "long step", "long step"):
        await act(world, action)
    assert not world.evicted
    for node in NODES:
        world.change_node(node, unschedulable=False)
    await world.settle()
    assert world.big_runs()


async def test_killed_between_any_two_steps_large_pod_still_starts() -> None:
    outcomes = Counter[str]()
    for killed_after in range(36):
        world = World()
        await begin(world)
        for number in range(36):
            if number == killed_after:
                world.start()
            await act(world, ("long step", "deliver", "schedule", "step", "end pods", "deliver")[number % 6])
        await world.settle()
        assert world.big_runs()
        world.note_outcomes()
        outcomes.update(world.outcomes)
    assert outcomes["completed"] >= 30
    assert outcomes["resumed"] >= 6


@pytest.mark.parametrize("history", [("protect",), ("break",), ("forget big",)], ids=lambda history: history[0])
async def test_run_that_cannot_go_on_is_given_up(history: tuple[str, ...]) -> None:
    world = World()
    await begin(world)
    for action in ("long step", "long step", *history):
        await act(world, action)
    assert len(world.state.reservations) == 1 + PODS_PER_NODE
    for _ in range(60):
        await act(world, "deliver")
        await act(world, "long step")
    assert not world.state.reservations
    assert not world.evicted
    world.note_outcomes()
    assert world.outcomes["given_up"] >= 1


async def test_plan_alone_moves_nothing_and_is_reported() -> None:
    world = World(acts=False)
    await begin(world)
    for _ in range(4):
        await act(world, "long step")
    assert not world.evicted
    assert not world.state.reservations
    [(uid, message)] = world.reported
    assert uid == BIG
    assert message.startswith("2 moves, which lose ")


async def test_replica_that_stops_leading_lets_go_and_next_leader_resumes() -> None:
    world = World()
    await begin(world)
    for action in ("long step", "long step", "deliver", "step"):
        await act(world, action)
    assert len(world.evicted) == 1
    world.leads = False
    await act(world, "step")
    assert not world.state.reservations
    assert not world.context.seats.row_for(world.waiting()[-1])
    world.leads = True
    await act(world, "deliver")
    await act(world, "step")
    assert world.state.reservations.keys() >= {BIG}
    await world.settle()
    assert world.big_runs()


async def test_no_pod_ends_after_a_seat_was_lost() -> None:
    world = World()
    await begin(world)
    for action in ("long step", "long step"):
        await act(world, action)
    [first, *_] = [uid for uid in world.state.reservations if uid != BIG]
    world.state.release(first)
    await act(world, "step")
    assert not world.evicted
    assert not world.state.reservations
    world.note_outcomes()
    assert world.outcomes == {"found": 1, "given_up": 1}


async def test_pods_that_are_not_replaced_do_not_stop_the_run() -> None:
    world = World()
    await begin(world)
    world.replaces = False
    await world.settle()
    assert world.big_runs()
    assert len(world.evicted) == PODS_PER_NODE


async def test_seat_is_kept_for_replacement_of_its_pod_only() -> None:
    world = World()
    await begin(world)
    for action in ("long step", "long step", "step", "deliver"):
        await act(world, action)
    [replacement] = [pod for pod in world.waiting() if pod.controller_uid]
    seats = world.context.seats
    assert replacement.gpu is not None
    others = (
        replace(replacement, uid="x", controller_uid="another"),
        replace(replacement, uid="x", controller_uid=""),
        replace(replacement, uid="x", namespace="another"),
        replace(replacement, uid="x", cpu_milli=1),
    )
    assert [seats.row_for(pod) for pod in others] == [None] * len(others)
    row = seats.row_for(replacement)
    assert row is not None
    assert world.state.reservations[replacement.uid].node == world.state.names[row]
    assert seats.row_for(replacement) == row, "it is asked for again at each attempt"


def play(actions: list[str], stays: bool, begun: bool, ruled: bool) -> None:
    async def run() -> None:
        world = World(stays=stays, ruled=ruled)
        await begin(world)
        for action in ("long step", *(["long step", "deliver"] if begun else []), *actions):
            await act(world, action)
        await world.settle()
        event(f"{len(world.evicted)} evicted")

    asyncio.run(run())


HISTORIES = (st.lists(st.sampled_from((*ACTIONS, *ACTIONS, *ODD_ACTIONS)), max_size=30), st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=60, derandomize=True)
@given(*HISTORIES)
@example(["long step", "long step", "kill", "deliver", "schedule", "long step"], False, False, False)
@example(["step", "schedule", "kill", "break", "step", "protect"], False, True, False)
@example(["relabel", "deliver", "step", "kill", "long step", "label again", "deliver", "long step"], False, True, True)
@example(["taint", "cordon", "deliver", "step", "uncordon", "deliver", "long step", "schedule"], False, True, True)
def test_any_history_keeps_promises_and_leaves_nothing(actions: list[str], stays: bool, begun: bool, ruled: bool) -> None:
    play(actions, stays, begun, ruled)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=10_000)
@given(*HISTORIES)
def test_ten_thousand_histories_keep_promises_and_leave_nothing(actions: list[str], stays: bool, begun: bool, ruled: bool) -> None:
    play(actions, stays, begun, ruled)
