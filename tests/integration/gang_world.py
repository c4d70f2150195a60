# SPDX-License-Identifier: Apache-2.0
"""A cluster of gangs and single pods for histories with preemption: API, controllers, kube-scheduler, and the scheduler that lives on them.

The scheduler is made of its real parts: state, watch, verbs, binder, and the services that retry, evict and restart. kube-scheduler is a
model of its scheduling and preemption by sums of a node. The API's own picture of the pods is the oracle.

Invariants at every step:

- I1: no device is promised more than it has.
- I2, I4: the devices of a bound pod are on its node, as many as it requests, and of the amounts that it requests.
- I3: nothing is held for a pod that is gone, once the watch has reported that. At the end only bound pods hold something.
- I5: node and devices of a bound pod never change.
- Gangs: a member is bound only when enough members of each role have a place, never more than the maximum, and in the required domain.
- Evictions: only for a more important pod that waits as far as the watch says, after the minimum runtime of the pod that ends, and
  within its disruption budget. Unless the watch is late, they leave a gang that runs whole, with its minimum, or without members.
"""

import asyncio
import json
import selectors
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from aliquot import contract
from aliquot.contract import codec
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from aliquot.placement.request import pod_request
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.durations import may_end_from
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.selectors import exactly
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.services.cluster_watch import ClusterWatch
from scheduler_plugin.services.gang_restarts import GangRestarts
from scheduler_plugin.services.new_victims import NewVictims
from scheduler_plugin.services.preemptor import Preemptor
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.telemetry import Telemetry
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod

RACKS = {"n1": "r1", "n2": "r1", "n3": "r2"}
GPUS, GPU_MIB, MAX_SHARES = 2, 1000, 3
GRACE_SECONDS = 30.0
TURN_SECONDS = 0.01
LEAST_COVERED = 2
"""How many of the covered pods the disruption budget keeps."""
COVERED = (("covered", "yes"),)

_T = TypeVar("_T")


def gang(name: str, minimum: int, **more: str) -> dict[str, str]:
    return {contract.ANNOTATION_GANG: name, contract.ANNOTATION_GANG_MIN: str(minimum), **more}


@dataclass(frozen=True)
class Template:
    """The pods of one controller."""

    pods: int
    mib: int
    priority: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    covered: bool = False

    @property
    def limits(self) -> dict[str, Any]:
        return {"vgpu": "1", "vgpu_memory": str(self.mib)}


TEMPLATES = {
    "a": Template(3, 700, 0, gang("a", 3)),
    "b": Template(2, 900, 50, gang("b", 2) | {contract.ANNOTATION_GANG_RESTART: "whole"}),
    "d": Template(2, 900, 100, gang("d", 2) | {contract.ANNOTATION_DOMAIN: "required", contract.ANNOTATION_DOMAIN_LEVEL: "rack"}),
    "e": Template(4, 500, 0, gang("e", 2) | {contract.ANNOTATION_GANG_MAX: "3"}, covered=True),
    "m": Template(1, 600, 0, {contract.ANNOTATION_MIN_RUNTIME: "1m"}),
    "s": Template(2, 400, 0, covered=True),
    "t": Template(1, GPU_MIB, 100),
}
ROLES = {"e0": "master", "e1": "worker", "e2": "worker", "e3": "worker"}
"""By slot; the gang needs one of each role."""
SLOTS = tuple(f"{name}{number}" for name, template in TEMPLATES.items() for number in range(template.pods))
"""One pod of a slot lives at a time, in addition to those that terminate."""
IMPORTANT = ("d0", "d1", "t0")
"""All others can end for them, and wherever the pods are that the budget keeps, these fit beside those."""


class _IdleSelector(selectors.DefaultSelector):
    """Lets virtual time pass instead of waiting, and a little of it with each turn of the loop."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "the program waits for something that never comes"
        self.passed += max(TURN_SECONDS, timeout)
        return []


def run_in_virtual_time(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine; a wait takes no time, and the order of all steps is the same in each run."""
    selector = _IdleSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.passed
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


class World:
    """See the module."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pods: dict[str, PodFacts] = {}
        """By UID; the API's truth."""
        self.created = 0
        self.unseen: list[Callable[[], None]] = []
        """Changes that the scheduler has not received yet."""
        self.lose_answers = 0
        self.drop_requests = 0
        self.replica = 0
        self.actor = ""
        """The service that runs now."""
        self.evicted: list[PodFacts] = []
        """By the preemptor, as they were before."""
        self.placed: dict[str, tuple[str, str]] = {}
        """Node and assignment of each pod that was seen bound, by UID."""
        self.bindings: dict[str, asyncio.Task[bytes]] = {}
        """By UID."""
        self.faults: list[str] = []
        """What is wrong with bindings: the binder catches what a request raises."""
        self.sent: set[str] = set()
        """UIDs of pods for which a binding was sent."""
        self.seen = Counter[str]()
        """What happened, to see that histories get somewhere."""
        self.start()

    # --- the scheduler ---

    def start(self) -> None:
        """Start the scheduler with only what the API lists."""
        self.replica += 1
        mine = self.replica
        state = self.state = ClusterState()
        self.nodes = {name: make_node(name, GPUS, shares_per_gpu=MAX_SHARES) for name in RACKS}
        state.replace_gpu_nodes(self.nodes.values())
        state.replace_hosts(dict.fromkeys(RACKS, (64_000, 512_000, 110)))
        for name, rack in RACKS.items():
            state.set_place(name, {"example/rack": rack})
        context = self.context = make_context(state, monotonic=lambda: self.now, now=lambda: self.now)
        self.watch = ClusterWatch(state, context.budgets, context.clock)
        self.watch.on_pod_gone = context.decisions.forget
        self.watch.on_nominated = context.reservations.follow_nomination
        api, telemetry = cast(Any, self), Telemetry()

        def leads() -> bool:
            return self.replica == mine

        self.binder = Binder(context, api, leads)
        self.retry = Retry(context, api, leads, lambda: self.caught_up_at, telemetry)
        self.preemptor = Preemptor(context, api, api, self.retry.retry_pod, leads, telemetry)
        self.victims = NewVictims(context, self.retry.retry_pod, lambda: self.retry.undecided, self.preemptor.look_again, leads)
        self.restarts = GangRestarts(context, api, api, leads)
        self.relist()

    def relist(self) -> None:
        self.unseen.clear()
        self.watch.budgets.listing()
        self.watch.budgets.listed([self.budget()])
        self.watch.pods.listing()
        self.watch.pods.listed(list(self.pods.values()))
        self.caught_up_at = self.now

    def deliver(self, count: int) -> None:
        """Let the watch deliver some changes."""
        for change in self.unseen[:count]:
            change()
        del self.unseen[:count]
        if not self.unseen:
            self.caught_up_at = self.now

    def deliver_all(self) -> None:
        self.deliver(len(self.unseen))

    async def serve(self, service: str) -> None:
        """Let a service of the scheduler act once."""
        is_current, runs_before, done = not (self.unseen or self.bindings), self.running_by_gang(), len(self.evicted)
        self.actor = service
        await getattr(self, service).step()
        self.actor = ""
        if is_current:
            self.check_gangs_after(runs_before, self.evicted[done:])

    # --- controllers ---

    def create(self, slot: str) -> None:
        """Create the pod of a slot, unless one lives."""
        if self.live(slot) is not None:
            return
        self.created += 1
        template, name = TEMPLATES[slot[0]], f"{slot}-{self.created}"
        role = {contract.ANNOTATION_GANG_ROLE: ROLES[slot], contract.ANNOTATION_GANG_ROLE_MIN: "1"} if slot in ROLES else {}
        pod = make_pod(name, priority=template.priority, annotations={**template.annotations, **role}, **template.limits)
        assert pod.gpu is not None
        gpu = replace(pod.gpu, name=name, scheduler_name=contract.SCHEDULER_NAME)
        labels = COVERED if template.covered else ()
        self.change(replace(pod, name=name, gpu=gpu, labels=labels, controller_uid=slot[0], controller_kind="Job", created_at=self.now))

    def live(self, slot: str) -> PodFacts | None:
        return next((pod for pod in self.pods.values() if slot_of(pod) == slot and not pod.deletion_requested), None)

    def delete(self, slot: str) -> None:
        if (pod := self.live(slot)) is not None:
            self.terminate(pod)

    def fail(self, slot: str) -> None:
        """End a pod that runs, all at once."""
        pod = self.live(slot)
        if pod is not None and pod.node_name:
            self.remove(pod)

    def terminate(self, pod: PodFacts) -> None:
        if not pod.node_name:
            self.remove(pod)
        elif not pod.deletion_requested:
            self.change(replace(pod, deletion_requested=True, ends_by=self.now + GRACE_SECONDS))

    def end_pods(self) -> None:
        """End all pods that terminate."""
        for pod in [pod for pod in self.pods.values() if pod.deletion_requested]:
            self.remove(pod)

    def change(self, pod: PodFacts) -> None:
        self.pods[pod.uid] = pod
        self.unseen.append(lambda: self.watch.pods.changed(pod))
        self.tell_budget()

    def remove(self, pod: PodFacts) -> None:
        if self.pods.pop(pod.uid, None) is not None:
            self.unseen.append(lambda: self.watch.pods.deleted(pod))
            self.tell_budget()

    def tell_budget(self) -> None:
        budget = self.budget()
        self.unseen.append(lambda: self.watch.budgets.changed(budget))

    def budget(self) -> Budget:
        covered = sum(bool(pod.labels) for pod in self.running())
        return Budget("team", "b", tuple(exactly(dict(COVERED))), max(0, covered - LEAST_COVERED))

    def running(self) -> list[PodFacts]:
        return [pod for pod in self.pods.values() if pod.node_name and not pod.deletion_requested]

    def running_by_gang(self) -> dict[str, list[str]]:
        """Return the UIDs of the running members of each gang."""
        found: dict[str, list[str]] = {name: [] for name in TEMPLATES}
        for pod in self.running():
            if gang_of_pod(pod) is not None:
                found[pod.uid[0]].append(pod.uid)
        return found

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.caught_up_at = self.caught_up_at if self.unseen else self.now

    # --- kube-scheduler ---

    async def schedule(self, slot: str) -> None:
        """Try a pod once: filter, then bind or preempt."""
        pod = self.live(slot)
        if pod is None or pod.node_name or pod.uid in self.bindings:
            return
        fitting: list[str] = []
        refused: dict[str, str] = {}
        for names in [[pod.nominated_node], list(RACKS)] if pod.nominated_node else [list(RACKS)]:
            enough = [name for name in names if self.has_room(pod, name)]
            reply = json.loads(filter_body(self.context, body_of(pod, NodeNames=enough), self.now)) if enough else {}
            fitting, refused = reply.get("NodeNames") or [], reply.get("FailedAndUnresolvableNodes") or {}
            if fitting:
                break
        if fitting:
            self.bind_to(pod, sorted(fitting)[self.created % len(fitting)])
        else:
            await self.preempt(pod, refused)

    def bind_to(self, pod: PodFacts, node: str) -> None:
        args = {"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": node}
        task = self.bindings[pod.uid] = asyncio.create_task(self.binder.bind(json.dumps(args).encode()))
        task.add_done_callback(lambda _: self.bindings.pop(pod.uid, None))

    def has_room(self, pod: PodFacts, node: str, gone: Iterable[str] = ()) -> bool:
        """Whether a node has enough in sum, once some pods are gone. Nominated pods of the same or a higher priority count."""
        others = [other for other in self.pods.values() if other.uid not in {pod.uid, *gone}]
        here = [o for o in others if node == (o.node_name or (o.nominated_node if o.priority >= pod.priority else ""))]
        mib = sum(TEMPLATES[other.uid[0]].mib for other in here)
        return mib + TEMPLATES[pod.uid[0]].mib <= GPUS * GPU_MIB and len(here) < GPUS * MAX_SHARES

    async def preempt(self, pod: PodFacts, hopeless: Mapping[str, str]) -> None:
        """Preempt by sums, as kube-scheduler does, with the extender's word on which nodes help and who ends there."""
        ending = [o for o in self.pods.values() if o.node_name == pod.nominated_node and o.deletion_requested and o.priority < pod.priority]
        if pod.nominated_node and ending:
            return  # it waits for them
        proposed = {name: uids for name in RACKS if name not in hopeless and (uids := self.proposed_on(pod, name))}
        named = {name: {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 0} for name, uids in proposed.items()}
        helpful: dict[str, list[str]] = {}
        if named:
            reply = json.loads(await choose_victims(self.context, body_of(pod, NodeNameToMetaVictims=named)))
            helpful = {name: [one["UID"] for one in victims["Pods"]] for name, victims in reply["NodeNameToMetaVictims"].items()}
        node = min(helpful, key=lambda name: (len(helpful[name]), name), default="")
        for uid in helpful.get(node, ()):
            if (victim := self.pods.get(uid)) is not None:
                assert victim.priority < pod.priority or victim.deletion_requested, "a pod as important ends"
                self.terminate(victim)
        if (now := self.pods.get(pod.uid)) is not None and now.nominated_node != node:
            self.change(replace(now, nominated_node=node))
        self.seen["preempted by kube-scheduler"] += bool(node)

    def proposed_on(self, pod: PodFacts, node: str) -> list[str]:
        """Return the pods that kube-scheduler would end on a node; no pod if all of them may stay or their end does not help."""
        lower = [other for other in self.pods.values() if other.node_name == node and other.priority < pod.priority]
        lower = sorted(lower, key=lambda other: (-other.priority, other.uid))
        gone = {other.uid for other in lower}
        if not self.has_room(pod, node, gone):
            return []
        for other in lower:
            if self.has_room(pod, node, gone - {other.uid}):
                gone.discard(other.uid)
        return sorted(gone)

    # --- ports.PodApi, ports.EventApi ---

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        del namespace, name
        self.check_gate(uid)
        await asyncio.sleep(0)
        if self.drop_requests:
            self.drop_requests -= 1
            raise KubeApiError("no answer, and nothing happened")
        pod = self.pods.get(uid)
        if pod is None:
            raise KubeNotFoundError("no such pod")
        if pod.node_name:
            raise KubeConflictError("already assigned")
        assert pod.gpu is not None
        gpu = replace(pod.gpu, node_name=node, annotations={**pod.gpu.annotations, **annotations})
        self.change(replace(pod, node_name=node, nominated_node="", gpu=gpu, started_at=self.now))
        if self.lose_answers:
            self.lose_answers -= 1
            raise KubeApiError("no answer")

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        await asyncio.sleep(0)
        return next((pod for pod in self.pods.values() if (pod.namespace, pod.name) == (namespace, name)), None)

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        del namespace
        return ()

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        del namespace, name
        pod = self.pods.get(uid)
        if pod is None or pod.gpu is None:
            raise KubeNotFoundError("no such pod")
        self.change(replace(pod, gpu=replace(pod.gpu, annotations={**pod.gpu.annotations, **annotations})))

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        del namespace, name
        await asyncio.sleep(0)
        pod = self.pods.get(uid)
        if pod is None:
            raise KubeNotFoundError("no such pod")
        if pod.deletion_requested:
            return
        if pod.labels and pod.node_name and not self.budget().allowed:
            raise KubeApiError("HTTP 429: the budget refuses")
        if dry_run:
            return
        if self.actor == "preemptor":
            known = self.state.pods.values()
            assert any(other.priority > pod.priority for other in known if not other.node_name), f"{uid} ends for no pod"
            assert may_end_from(pod) <= self.now, f"{uid} ends before its minimum runtime"
            self.evicted.append(pod)
        self.seen[f"evicted by {self.actor}"] += 1
        self.terminate(pod)

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        assert reason in (contract.EVENT_REASON_PREEMPTED, contract.EVENT_REASON_GANG_RESTARTED)

    # --- the oracle ---

    def check_gate(self, uid: str) -> None:
        """Note, when the first binding of a member is sent, if too few members have a firm place, as far as the scheduler knows."""
        pod = self.state.pods.get(uid)
        own = None if pod is None else gang_of_pod(pod)
        if own is None or uid in self.sent:
            return
        self.sent.add(uid)
        firm = {uid for uid, reservation in self.state.reservations.items() if reservation.stage.is_firm}
        placed = {uid for uid, other in self.state.pods.items() if other.node_name} | firm
        members = sorted(other for other in placed if other[0] == uid[0])
        if counted(members) < own.minimum:
            self.faults.append(f"{uid} is bound, and only {members} have a place")

    def check_gangs_after(self, before: Mapping[str, Sequence[str]], evicted: Iterable[PodFacts]) -> None:
        """Check that evictions leave a gang that ran whole with its minimum, or without members."""
        after = self.running_by_gang()
        for name in {pod.uid[0] for pod in evicted if gang_of_pod(pod) is not None}:
            minimum = int(TEMPLATES[name].annotations[contract.ANNOTATION_GANG_MIN])
            assert counted(before[name]) < minimum or not after[name] or counted(after[name]) >= minimum, (
                f"gang {name}: {before[name]} ran, {after[name]} do"
            )

    def promised(self) -> dict[str, list[int]]:
        held = defaultdict(list)
        for pod in self.pods.values():
            if pod.node_name and pod.gpu is not None:
                text = pod.gpu.annotations[contract.ANNOTATION_ASSIGNMENT]
                for container in codec.decode_assignment(text, pod_uid=pod.uid).containers:
                    for share in container.shares:
                        held[share.device_uuid].append(share.memory_bytes >> 20)
        return held

    def check(self) -> None:
        """Check what must hold after each step."""
        assert not self.faults, self.faults
        for uuid, amounts in self.promised().items():
            assert sum(amounts) <= GPU_MIB, uuid
            assert len(amounts) <= MAX_SHARES, uuid
        for pod in self.pods.values():
            if pod.node_name:
                self.check_pod(pod)
        running = self.running()
        most = int(TEMPLATES["e"].annotations[contract.ANNOTATION_GANG_MAX])
        assert sum(pod.uid[0] == "e" for pod in running) <= most
        assert len({RACKS[pod.node_name] for pod in running if pod.uid[0] == "d"}) <= 1, "a gang is split over domains"
        if not self.unseen:
            known = self.pods.keys() | self.state.reservations.keys()
            assert self.state.pods.keys() <= known
            assert all(not self.state.footprint_of(uid) for uid in self.placed.keys() - known)

    def check_pod(self, pod: PodFacts) -> None:
        assert pod.gpu is not None
        text = pod.gpu.annotations[contract.ANNOTATION_ASSIGNMENT]
        if pod.uid in self.placed:
            assert self.placed[pod.uid] == (pod.node_name, text)
            return
        self.placed[pod.uid] = pod.node_name, text
        (asked,) = pod_request(pod.gpu).containers
        (given,) = codec.decode_assignment(text, pod_uid=pod.uid).containers
        assert given.container == asked.container
        assert {share.device_uuid for share in given.shares} <= {one.device.uuid for one in self.nodes[pod.node_name].devices}
        assert [share.memory_bytes >> 20 for share in given.shares] == [TEMPLATES[pod.uid[0]].mib]

    def check_nothing_leaked(self) -> None:
        held = self.promised()
        assert not self.state.reservations
        for node in RACKS:
            for device in self.state.device_states(node):
                amounts = held.get(device.device.uuid, [])
                assert (device.used_memory_bytes >> 20, device.used_shares) == (sum(amounts), len(amounts))


def counted(uids: Sequence[str]) -> int:
    """Count members towards the minimum of their gang: one of each role, and all without a role."""
    slots = [uid.partition("-")[0] for uid in uids]
    return sum(slot not in ROLES for slot in slots) + len({ROLES[slot] for slot in slots if slot in ROLES})


def slot_of(pod: PodFacts) -> str:
    return pod.uid.partition("-")[0]


def body_of(pod: PodFacts, **fields: Any) -> bytes:
    """Write a call of kube-scheduler on a pod."""
    template = TEMPLATES[pod.uid[0]]
    annotations = dict(pod.gpu.annotations) if pod.gpu is not None else {}
    item = pod_object(pod.name, uid=pod.uid, annotations=annotations, controller=pod.controller_uid, **template.limits)
    item["spec"]["priority"] = template.priority
    item["spec"]["containers"][0]["resources"]["requests"].pop("cpu")
    item["metadata"]["labels"] = dict(pod.labels)
    item["status"]["nominatedNodeName"] = pod.nominated_node
    return json.dumps({"Pod": item, **fields}).encode()
