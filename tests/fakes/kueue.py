# SPDX-License-Identifier: Apache-2.0
"""A cluster with Kueue, as far as an admission check sees it, and the scheduler's parts that live on it.

Kueue's writes come one by one, so that a test can act between any two of them. The order of writes and the traps are those of Kueue
0.19: it sets a check to Pending only when it evicts; it evicts for Retry only a workload that it does not evict already; it admits by a
Ready that is left over; it reserves quota and adds the checks in two writes, either first.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from aliquot import contract
from aliquot.contract import codec
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError, KubeRefusedError
from aliquot.kube.requests import timestamp
from scheduler_plugin.core.admit.kueue import CONTROLLER_NAME, AdmissionCheck, Flavor, decode_workload
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.ports import CheckAnswer
from scheduler_plugin.services.admission_check import AdmissionCheckController
from scheduler_plugin.services.expected_pods import ExpectedPods
from scheduler_plugin.services.kueue_objects import KueueObjects
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.settings import Answer, Settings
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node

CHECK = "fits"
FLAVOR = "gpus"
GPU_MIB = 1000
NEVER = 1e18
SLICE = "kueue.x-k8s.io/workload-slice-name"
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"

Object = dict[str, Any]


def template(mib: int, vgpus: int = 1, **spec: Any) -> Object:
    """Return the template of a pod of this total memory."""
    limits = {contract.RESOURCE_VGPU: str(vgpus), contract.RESOURCE_VGPU_MEMORY: str(mib)}
    return {"spec": {"containers": [{"name": "main", "resources": {"limits": limits, "requests": dict(limits)}}], **spec}}


def pod_set(count: int = 1, mib: int = 400, name: str = "main", *, vgpus: int = 1, **spec: Any) -> Object:
    return {"name": name, "count": count, "template": template(mib, vgpus, **spec)}


@dataclass
class World:
    """Everything outside of the scheduler, and one replica of it."""

    nodes: Mapping[str, int] = field(default_factory=lambda: {"n1": 2, "n2": 2})
    """Numbers of GPUs."""
    quota_mib: int = 1 << 40
    checked: bool = True
    """Whether the queue has the admission check."""

    def __post_init__(self) -> None:
        self.now, self.versions, self.created = 10_000.0, 0, 0
        self.leads = True
        self.workloads: dict[str, Object] = {}
        """By name; the API's truth."""
        self.pods: dict[str, PodFacts] = {}
        """By UID; the API's truth."""
        self.pod_sets_of: dict[str, tuple[str, str]] = {}
        """Workload and pod set of each pod that a workload made."""
        self.templates: dict[str, dict[str, dict[str, str]]] = {}
        """What Kueue added to the template of a job when it was started, by its first workload and pod set."""
        self.unseen: list[PodFacts | str] = []
        self.labels: dict[str, dict[str, str]] = {name: {} for name in self.nodes}
        self.answers: list[CheckAnswer] = []
        """All that the API took."""
        self.broken = self.loses_replies = self.forbids = False
        self.refuses = 0
        """How many further answers the API refuses as conflicts, because Kueue wrote in between."""
        self.ready_without_seats: list[str] = []
        self.telemetry = Telemetry()
        self.start()

    # --- the scheduler ---

    def start(self) -> None:
        """Start a scheduler with only what the API lists."""
        self.state = ClusterState()
        self.state.replace_gpu_nodes([make_node(name, count) for name, count in self.nodes.items()])
        self.state.replace_hosts(dict.fromkeys(self.nodes, (64_000, 512_000, 110)))
        self.state.replace_pods(self.pods.values())
        self.unseen.clear()
        self.caught_up_at = self.now
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now, soft_seconds=10.0)
        self.binder = Binder(self.context, PodApiOf(self), lambda: True)
        self.directory, self.objects = NodeDirectory(), KueueObjects(lambda: self.now)
        self.list_nodes()
        normaliser = Normaliser(Options(lambda _: (GPU_MIB,)), Settings().scheduler_name)
        term = self.now
        parts = (self.context, self.directory, self.objects, ExpectedPods(normaliser), self)
        self.controller = AdmissionCheckController(*parts, lambda: term if self.leads else None, self.telemetry)
        self.objects.checks.listing()
        self.objects.checks.listed([AdmissionCheck(CHECK, CONTROLLER_NAME, 1, 1)])
        self.objects.flavors.listing()
        self.objects.flavors.listed([Flavor(FLAVOR)])
        self.list_workloads()

    def list_nodes(self) -> None:
        for name in self.nodes:
            self.directory.put(NodeFacts(name, self.labels[name]))

    def list_workloads(self) -> None:
        """Let the watch show all workloads as they are."""
        self.objects.workloads.listing()
        self.objects.workloads.listed([decode_workload(json.dumps(item).encode()) for item in self.workloads.values()])

    def deliver(self) -> None:
        """Let the watch show all changes of pods."""
        for change in self.unseen:
            if isinstance(change, str):
                self.state.drop_pod(change)
                self._settled(change)
                continue
            self.state.set_pod(change)
            if change.node_name:
                self._settled(change.uid)
            elif not change.gates:
                self.context.workload_seats.take(change)
        self.unseen.clear()
        self.caught_up_at = self.now

    def _settled(self, uid: str) -> None:
        self.context.decisions.forget(uid)
        self.context.workload_seats.on_gone(uid)

    async def step(self, seconds: float = 1.0) -> None:
        """Let time pass, and the check look once."""
        self.now += seconds
        if not self.unseen:
            self.caught_up_at = self.now
        self.state.expire(self.now, self.caught_up_at)
        await self.controller.step()

    async def schedule(self) -> None:
        """Try all waiting pods once. Their bindings are under way at the same time."""
        waiting = [pod for pod in self.pods.values() if not pod.node_name and not pod.deletion_requested and not pod.gates]
        await asyncio.gather(*(self.attempt(pod) for pod in waiting))

    async def attempt(self, pod: PodFacts) -> None:
        """Do what kube-scheduler does for one pod. Its sums of a node do not see seats."""
        if pod.uid not in self.pods or not self.controller.is_prepared:
            return
        reply = filter_body(self.context, self.call(pod), self.now, Answer.ONE)
        names = json.loads(reply).get("NodeNames") or []
        if names:
            args = {"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": names[0]}
            await self.binder.bind(json.dumps(args).encode())

    def call(self, pod: PodFacts) -> bytes:
        assert pod.gpu is not None
        spec = {"containers": [{"name": "main", "resources": {"limits": dict(pod.gpu.containers[0].limits)}}]}
        metadata = {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid, "annotations": dict(pod.gpu.annotations)}
        return json.dumps({"Pod": {"metadata": metadata, "spec": spec, "status": {}}, "NodeNames": list(self.nodes)}).encode()

    # --- ports.CheckApi ---

    async def activate(self, name: str, generation: int) -> None:
        raise AssertionError(f"{name} is Active already")

    async def answer(self, answer: CheckAnswer) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise KubeApiError("no answer")
        if self.forbids:
            raise KubeRefusedError("the account has no right")
        item = self.workloads.get(answer.name)
        if item is None:
            raise KubeNotFoundError("no such workload")
        if self.refuses:
            self.refuses -= 1
            self._touch(item)
        if item["metadata"]["resourceVersion"] != answer.version:
            raise KubeConflictError("the object has been modified")
        if answer.state == "Ready" and not self._is_held(item):
            self.ready_without_seats.append(answer.name)
        updates = [{"name": name, "annotations": {contract.ANNOTATION_HOLD: text}} for name, text in answer.holds.items()]
        for name in answer.checks:
            entry = next(one for one in item["status"]["admissionChecks"] if one["name"] == name)
            entry.update(state=answer.state, message=answer.message, podSetUpdates=updates)
        self._touch(item)
        self.answers.append(answer)
        if self.loses_replies:
            self.loses_replies = False
            raise KubeApiError("no answer")

    def _is_held(self, item: Object) -> bool:
        """Whether there is a seat or a bound pod for each pod of a workload."""
        hold = self.context.workload_seats.get(("team", self.first_slice(item)))
        seats = 0 if hold is None else sum(seat.holder in self.state.reservations for seat in hold.seats)
        return seats + len(self._bound(item)) >= sum(one["count"] for one in item["spec"]["podSets"])

    def _bound(self, item: Object) -> list[PodFacts]:
        names = item["metadata"]["name"], self.replaced(item)
        return [pod for uid, pod in self.pods.items() if pod.node_name and self.pod_sets_of.get(uid, ("",))[0] in names]

    # --- users ---

    def submit(self, name: str, *pod_sets: Object, priority: int = 0, **spec: Any) -> Object:
        metadata = {"name": name, "namespace": "team", "uid": f"{name}-{self.versions}", "ownerReferences": [{"uid": f"job-{name}"}]}
        sets = list(pod_sets or (pod_set(),))
        item = {"metadata": metadata, "spec": {"podSets": sets, "priority": priority, **spec}, "status": {"conditions": []}}
        self.workloads[name] = item
        self._touch(item)
        return item

    def grow(self, name: str, larger: str, count: int) -> None:
        """Let an elastic job ask for more pods: Kueue makes a workload for the new size. The job's template stays as it is."""
        old = self.workloads[name]["metadata"]
        item = self.submit(larger, {**self.workloads[name]["spec"]["podSets"][0], "count": count})
        first = old.setdefault("annotations", {}).setdefault(SLICE, name)
        item["metadata"] |= {"annotations": {SLICE: first, REPLACES: f"team/{name}"}, "ownerReferences": old["ownerReferences"]}

    def intrude(self, mib: int, vgpus: int = 1) -> PodFacts:
        """Create a pod outside of all queues."""
        return self._create(template(mib, vgpus), {}, f"other-{self.created}")

    def end_pod(self, uid: str) -> None:
        if self.pods.pop(uid, None) is not None:
            self.pod_sets_of.pop(uid, None)
            self.unseen.append(uid)

    def finish(self, name: str) -> None:
        """End a workload's pods, and let Kueue give its quota back."""
        item = self.workloads[name]
        self._end_pods_of(name)
        self._set(item, Finished="True")

    def delete(self, name: str) -> None:
        self._end_pods_of(name)
        del self.workloads[name]

    def _end_pods_of(self, name: str) -> None:
        for uid in [uid for uid, (of, _) in self.pod_sets_of.items() if of == name]:
            self.end_pod(uid)

    # --- Kueue: one write each ---

    def conditions(self, item: Object) -> dict[str, str]:
        return {one["type"]: one["status"] for one in item["status"]["conditions"]}

    def is_true(self, item: Object, condition: str) -> bool:
        return self.conditions(item).get(condition) == "True"

    def entry(self, item: Object) -> Object | None:
        return next((one for one in item["status"].get("admissionChecks", ()) if one["name"] == CHECK), None)

    def kueue(self, name: str, *, adds_checks_first: bool = False) -> bool:
        """Let Kueue do its next write for a workload; return whether there was one."""
        item = self.workloads[name]
        if self.is_true(item, "Finished"):
            return False
        if not self.is_true(item, "QuotaReserved"):
            return self._requeue(item, adds_checks_first=adds_checks_first)
        if self.is_true(item, "Evicted"):
            return self._go_on_evicting(item)
        if self.checked and self.entry(item) is None:
            return self._add_check(item)
        states = {one["state"] for one in item["status"].get("admissionChecks", ())}
        if "Rejected" in states:
            item["spec"]["active"] = False
            return self.evict(name, "the check rejected it")
        if "Retry" in states:
            return self.evict(name, "the check wants a retry")
        if states <= {"Ready"} and not self.is_true(item, "Admitted"):
            self._set(item, Admitted="True")
            self.run(name)
            return True
        return False

    def _requeue(self, item: Object, *, adds_checks_first: bool) -> bool:
        if item["spec"].get("active") is False or self.used_mib() + self.need_mib(item) > self.quota_mib:
            return False
        if adds_checks_first and self.checked and self.entry(item) is None:
            return self._add_check(item)
        assigned = [{"name": one["name"], "count": one["count"], "flavors": {"r": FLAVOR}} for one in item["spec"]["podSets"]]
        item["status"]["admission"] = {"clusterQueue": "q", "podSetAssignments": assigned}
        self._set(item, QuotaReserved="True", **({"Evicted": "False"} if "Evicted" in self.conditions(item) else {}))
        if (old := self.workloads.get(self.replaced(item))) is not None:
            self._set(old, Finished="True")
        return True

    @staticmethod
    def first_slice(item: Object) -> str:
        """The name of the workload for the first size."""
        return str(item["metadata"].get("annotations", {}).get(SLICE, item["metadata"]["name"]))

    @staticmethod
    def replaced(item: Object) -> str:
        """The name of the workload that one for a new size replaces."""
        return str(item["metadata"].get("annotations", {}).get(REPLACES, "").rpartition("/")[2])

    def is_ending(self, name: str) -> bool:
        item = self.workloads[name]
        return self.is_true(item, "Finished") or self.is_true(item, "Evicted")

    def _add_check(self, item: Object) -> bool:
        item["status"].setdefault("admissionChecks", []).append({"name": CHECK, "state": "Pending", "message": ""})
        self._touch(item)
        return True

    def evict(self, name: str, why: str = "preempted") -> bool:
        """Begin to evict: the check is reset in the same write, while the quota is still reserved."""
        item = self.workloads[name]
        entry = self.entry(item)
        if entry is not None and entry["state"] != "Pending":
            entry.update(state="Pending", message=f"Reset to Pending after eviction: {why}", podSetUpdates=[])
        self._set(item, Evicted="True")
        return True

    def _go_on_evicting(self, item: Object) -> bool:
        """End the pods, then give the quota back."""
        name = item["metadata"]["name"]
        if any(of == name for of, _ in self.pod_sets_of.values()):
            self._end_pods_of(name)
            return True
        item["status"].pop("admission", None)
        self._set(item, QuotaReserved="False", Admitted="False")
        return True

    def run(self, name: str) -> None:
        """Create the pods of an admitted workload, with what the answer adds to them."""
        item, running = self.workloads[name], Counter[str]()
        for uid, (_, of) in [(uid, of) for uid, of in self.pod_sets_of.items() if of[0] == self.replaced(item)]:
            running[of] += 1
            self.pod_sets_of[uid] = name, of
        updates = {one["name"]: one["annotations"] for one in (self.entry(item) or {}).get("podSetUpdates", ())}
        first = self.first_slice(item)
        if not running:
            self.templates[first] = updates  # Kueue starts the job; a running one keeps its template
        for one in item["spec"]["podSets"]:
            for _ in range(one["count"] - running[one["name"]]):
                pod = self._create(
                    one["template"], self.templates[first].get(one["name"], {}), f"{name}-{self.created}", controller=f"job-{name}"
                )
                self.pod_sets_of[pod.uid] = name, one["name"]

    def used_mib(self) -> int:
        reserved = (item for item in self.workloads.values() if self.is_true(item, "QuotaReserved") and not self.is_true(item, "Finished"))
        return sum(map(self.need_mib, reserved))

    @staticmethod
    def need_mib(item: Object) -> int:
        def of_pod(one: Object) -> int:
            return int(one["template"]["spec"]["containers"][0]["resources"]["limits"][contract.RESOURCE_VGPU_MEMORY])

        return sum(one["count"] * of_pod(one) for one in item["spec"]["podSets"])

    def _set(self, item: Object, **conditions: str) -> None:
        known = {one["type"]: one for one in item["status"]["conditions"]}
        for name, status in conditions.items():
            if known.get(name, {}).get("status") != status:
                known[name] = {"type": name, "status": status, "lastTransitionTime": timestamp(self.now)}
        item["status"]["conditions"] = list(known.values())
        self._touch(item)

    def _touch(self, item: Object) -> None:
        self.versions += 1
        item["metadata"]["resourceVersion"] = str(self.versions)

    def _create(self, made_from: Object, annotations: Mapping[str, str], name: str, controller: str = "") -> PodFacts:
        self.created += 1
        own = (made_from.get("metadata") or {}).get("annotations") or {}
        metadata: Object = {"name": name, "namespace": "team", "uid": f"uid-{name}-{self.created}", "annotations": own | dict(annotations)}
        metadata["creationTimestamp"] = timestamp(self.now)
        if controller:
            metadata["ownerReferences"] = [{"kind": "Job", "uid": controller, "controller": True}]
        spec = made_from["spec"] | {"schedulerName": contract.SCHEDULER_NAME}
        item = json.dumps({"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
        pod = pod_facts(msgspec.json.decode(item, type=PodObject))
        self.change(pod)
        return pod

    def change(self, pod: PodFacts) -> None:
        self.pods[pod.uid] = pod
        self.unseen.append(pod)

    # --- the oracle ---

    def state_of(self, name: str) -> str:
        entry = self.entry(self.workloads[name])
        return "" if entry is None else str(entry["state"])

    def is_admitted(self, name: str) -> bool:
        return self.is_true(self.workloads[name], "Admitted")

    def unexplained(self) -> list[str]:
        """Names of workloads that have their quota, and wait for the check without a reason in it."""
        reserved = [name for name, item in self.workloads.items() if self.is_true(item, "QuotaReserved") and not self.is_ending(name)]
        entries = {name: self.entry(self.workloads[name]) or {} for name in reserved}
        waiting = {name: one["message"] for name, one in entries.items() if one.get("state") == "Pending"}
        return [name for name, message in waiting.items() if not message or message.startswith("Reset to Pending")]

    def stuck(self) -> list[str]:
        """Names of admitted workloads with a pod that waits."""
        waiting = {self.pod_sets_of[uid][0] for uid, pod in self.pods.items() if uid in self.pod_sets_of and not pod.node_name}
        return sorted(name for name in waiting if self.is_admitted(name))

    def check_devices(self) -> None:
        """No GPU is promised beyond its memory."""
        used = Counter[str]()
        for pod in self.pods.values():
            if pod.node_name and pod.gpu is not None:
                text = pod.gpu.annotations[contract.ANNOTATION_ASSIGNMENT]
                for one in codec.decode_assignment(text, pod_uid=pod.uid).containers:
                    for share in one.shares:
                        used[share.device_uuid] += share.memory_bytes >> 20
        assert max(used.values(), default=0) <= GPU_MIB, used

    async def settle(self, rounds: int = 12, seconds: float = 0.5) -> None:
        """Let all that is under way end, without further events."""
        self.broken, self.refuses = False, 0
        for _ in range(rounds):
            for name in list(self.workloads):
                while self.kueue(name):
                    pass
            self.list_workloads()
            self.deliver()
            await self.schedule()
            self.deliver()
            await self.step(seconds)
            self.list_workloads()
        self.check_devices()


class PodApiOf:
    """Implements ``ports.PodApi`` as far as bindings need it."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        del namespace, name
        pod = self.world.pods.get(uid)
        if pod is None or pod.node_name:
            raise KubeConflictError("gone, or already assigned")
        assert pod.gpu is not None
        gpu = replace(pod.gpu, node_name=node, annotations={**pod.gpu.annotations, **annotations})
        self.world.change(replace(pod, node_name=node, gpu=gpu))

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        return next((pod for pod in self.world.pods.values() if (pod.namespace, pod.name) == (namespace, name)), None)

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        raise AssertionError(namespace)

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        raise AssertionError(uid)

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        raise AssertionError(uid)
