# SPDX-License-Identifier: Apache-2.0
"""An API with ResourceClaims, pods and the controllers around them, for tests of the planner; and the planner that lives on it."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import inf
from typing import Any

import msgspec

from aliquot import contract
from aliquot.contract.codec import decode_assignment, encode_assignment
from aliquot.contract.model import Allocation, PodAssignment, PodRequest, Policy
from aliquot.contract.units import parse_quantity
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.claims.planned import FINALIZER, decode_planned
from scheduler_plugin.core.claims.stored import StoredClaim, decode_claim
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts, Use, footprint
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.extender.planned import ClaimPlacer
from scheduler_plugin.extender.planned_why import PlannedWhy
from scheduler_plugin.services.claim_planner import ClaimPlanner, Leads
from scheduler_plugin.services.claim_watch import ClaimWatch
from scheduler_plugin.services.evictions import Evictions
from scheduler_plugin.services.planned_pods import PlannedPods
from scheduler_plugin.services.telemetry import Telemetry
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_context, make_node
from tests.unit.scheduler_plugin.claim_builders import class_of, pod_json, slice_of

DEVICE_MIB = 1000
TAINT = {"key": contract.PLANNED, "effect": "NoSchedule"}

Json = dict[str, Any]


class ClaimWorld:
    """The truth of the API. Implements ``ports.ClaimApi``, ``ports.PodApi`` as far as evictions need it, and ``ports.EventApi``."""

    def __init__(self, nodes: Sequence[str] = ("n1", "n2"), devices: int = 2, *, linked: bool = False) -> None:
        both = Allocation.BOTH
        self.nodes = {name: make_node(name, devices, linked=linked, shares_per_gpu=16, allocation=both) for name in nodes}
        self.gone: set[str] = set()
        """Nodes that do not exist now."""
        self.pods: dict[str, Json] = {}
        self.claims: dict[str, Json] = {}
        self.version = 100
        self.now = 0.0
        self.untold: list[Callable[[], None]] = []
        """What the watches have not delivered yet."""
        self.replica = 0
        self.drop_requests = 0
        """Requests that fail without an effect."""
        self.lose_answers = 0
        """Requests that take effect and fail."""
        self.delay_requests = 0
        """Requests that fail, and take effect later."""
        self.late: list[Callable[[], object]] = []
        self.opened: list[str] = []
        self.evicted: list[str] = []
        self.events: dict[str, str] = {}
        self.start()

    # --- the planner ---

    def start(self) -> None:
        """Start a planner with only what the API lists; what an earlier one has sent has arrived."""
        self.land()
        self.replica += 1
        mine = self.replica
        self.state = ClusterState()
        self.context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now)
        self.planned, self.directory = PlannedPods(self.context.planned), NodeDirectory()
        self.watch = ClaimWatch(self.context.claims)
        evictions = Evictions(self, self, self.context, Telemetry(), lambda _: None)
        leads = Leads(lambda: self.replica == mine, lambda: self.replica == mine)
        placer = ClaimPlacer(self.context, self.directory)
        self.planner = ClaimPlanner(self.context, placer, self.planned, self, self, leads, evictions)
        self.why = PlannedWhy(self.context, placer, self.planned.by_uid, self.planner)
        self.relist()

    def relist(self) -> None:
        """Deliver full lists."""
        self.untold.clear()
        for name in self.nodes:
            self._show_node(name)
        self.watch.slices.listed([slice_of(node, taints=[TAINT]) for name, node in self.nodes.items() if name not in self.gone])
        self.watch.classes.listed([class_of()])
        pods = [decode_planned(json.dumps(pod).encode()) for pod in self.pods.values() if is_planned(pod)]
        self.state.replace_pods(map(facts_of, self.pods.values()))
        self.planned.receiver.listed(pods)
        self.watch.claims.listed([stored(claim) for claim in self.claims.values()])

    def tell(self, count: int | None = None) -> None:
        """Deliver changes."""
        changes, self.untold = self.untold[:count], [] if count is None else self.untold[count:]
        for change in changes:
            change()

    def land(self) -> None:
        """Let late requests take effect, as far as they still can."""
        for write in self.late:
            with suppress(KubeApiError):
                write()
        self.late.clear()

    async def settle(self, rounds: int = 12) -> None:
        """Let all work end, with the help of the controllers and kube-scheduler."""
        self.drop_requests = self.lose_answers = self.delay_requests = 0
        self.land()
        for _ in range(rounds):
            self.tell()
            await self.planner.step()
            for name in list(self.pods):
                if self.pods[name]["metadata"].get("deletionTimestamp"):
                    self.delete_pod(name)
                else:
                    self.kube_scheduler(name)
            self.now += 10.0
            self.tell()

    async def crash_after_first_allocation(self) -> None:
        """Kill the planner within a round, as soon as it has written an allocation; then start the next one."""
        self.tell()
        round_ = asyncio.create_task(self.planner.step())
        for _turn in range(1000):
            if not self.used():
                await asyncio.sleep(0)
        round_.cancel()
        await asyncio.gather(round_, return_exceptions=True)

    # --- clients and controllers ---

    def create_pod(self, name: str, *requests: Json, gang: int = 0, priority: int = 0, gated: bool = True, **annotations: str) -> None:
        """Create a pod with a claim of its own."""
        self.version += 1
        uid = f"uid-{name}-{self.version}"
        pod = pod_json(uid, f"claim-{uid}", cpu="100m")
        pod["metadata"] |= {
            "name": name,
            "labels": {contract.LABEL_ALLOCATION: "planned"},
            "creationTimestamp": "1970-01-01T00:00:00Z",
            "annotations": {f"{contract.ANNOTATION_PREFIX}{key.replace('_', '-')}": text for key, text in annotations.items()},
        }
        if gang:
            pod["metadata"]["annotations"] |= {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: str(gang)}
        pod["spec"] |= {"priority": priority, **({"schedulingGates": [{"name": contract.PLANNED}]} if gated else {})}
        self.pods[name] = pod
        metadata = {"name": f"claim-{uid}", "namespace": "team", "uid": f"uid-of-claim-{uid}", "resourceVersion": str(self.version)}
        self.claims[f"claim-{uid}"] = {"metadata": metadata, "spec": {"devices": {"requests": list(requests)}}, "status": {}}
        self._show_pod(name)
        self._show_claim(f"claim-{uid}")

    def create_with_ids(self, name: str, mib: int, cores: int | None = None, *, priority: int = 0, **annotations: str) -> None:
        """Create a pod that gets a vGPU by the device plugin."""
        self.version += 1
        uid = f"uid-{name}-{self.version}"
        stated: dict[str, Any] = {} if cores is None else {"vgpu_cores": str(cores)}
        pod = pod_object(uid, vgpu="1", vgpu_memory=str(mib), **stated)
        pod["metadata"] |= {
            "name": name,
            "uid": uid,
            "namespace": "team",
            "annotations": {f"{contract.ANNOTATION_PREFIX}{key.replace('_', '-')}": text for key, text in annotations.items()},
        }
        pod["spec"]["priority"] = priority
        self.pods[name] = pod
        self._show_pod(name)

    def delete_pod(self, name: str) -> None:
        """Delete a pod. Kubernetes deletes its claim."""
        pod = self.pods.pop(name)
        self._told(lambda: self.state.drop_pod(pod["metadata"]["uid"]))
        if not is_planned(pod):
            return
        planned = decode_planned(json.dumps(pod).encode())
        self._told(lambda: self.planned.receiver.deleted(planned))
        claim = self.claims.pop(self.claim_name(pod), None)
        if claim is not None:
            self._told(lambda: self.watch.claims.deleted(stored(claim)))

    def kube_scheduler(self, name: str, *, accepts: bool = True) -> None:
        """Bind a pod to the node of its claims. Args: accepts: otherwise free the claims, as after a filter that we do not know."""
        pod = self.pods[name]
        if not is_planned(pod):
            self._bind_with_ids(name)
            return
        claim = self.claims.get(self.claim_name(pod))
        node = self.node_of(name)
        if pod["spec"].get("schedulingGates") or pod["spec"].get("nodeName") or claim is None or not node:
            return
        if accepts and node not in self.gone:
            assert pod["metadata"]["uid"] in [user["uid"] for user in claim["status"]["reservedFor"]]
            pod["spec"]["nodeName"] = node
            pod["status"] |= {"phase": "Running", "startTime": "1970-01-01T00:00:00Z"}
            self._show_pod(name)
        else:
            self._write(claim, status={})

    def _bind_with_ids(self, name: str) -> None:
        """Bind a pod with vGPUs to the node and the GPUs that the extender chooses, if it finds any."""
        pod, facts, state = self.pods[name], facts_of(self.pods[name]), self.state
        request, planner = self.context.verdicts.requests.of(facts), self.context.gangs.planner
        if pod["spec"].get("nodeName") or not isinstance(request, PodRequest) or not planner.expect(facts, None, inf):
            return
        reservation = state.reservations[facts.uid]
        chosen = state.plan(reservation.node, request, Policy.FRAG, facts.uid)
        if not isinstance(chosen, PodAssignment) or reservation.node in self.gone or facts.gpu is None:
            state.release(facts.uid)
            return
        state.reserve(replace(reservation, footprint=footprint(facts.gpu.containers, chosen), stage=Stage.BINDING))
        pod["metadata"]["annotations"][contract.ANNOTATION_ASSIGNMENT] = encode_assignment(chosen)
        pod["spec"]["nodeName"] = reservation.node
        pod["status"] |= {"phase": "Running", "startTime": "1970-01-01T00:00:00Z"}
        self._show_pod(name)

    def terminate(self, name: str) -> None:
        """Request the deletion of a pod."""
        self.pods[name]["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:00Z"
        self._show_pod(name)

    def remove_node(self, name: str) -> None:
        """Delete a node with its slices."""
        if name not in self.gone:
            self.gone.add(name)
            self._told(lambda: self._show_node(name))
            self._told(lambda: self.watch.slices.deleted(slice_of(self.nodes[name])))

    def return_node(self, name: str) -> None:
        """Create a node again."""
        if name in self.gone:
            self.gone.discard(name)
            self._told(lambda: self._show_node(name))
            self._told(lambda: self.watch.slices.changed(slice_of(self.nodes[name], taints=[TAINT])))

    def _show_node(self, name: str) -> None:
        if name in self.gone:
            self.directory.drop(name)
            self.state.drop_gpu_node(name)
        else:
            self.directory.put(NodeFacts(name))
            self.state.set_host(name, 64_000, 512 << 10, 110)
            self.state.set_gpu_node(self.nodes[name])

    def _show_pod(self, name: str) -> None:
        facts = facts_of(self.pods[name])
        self._told(lambda: self.state.set_pod(facts))
        if is_planned(self.pods[name]):
            planned = decode_planned(json.dumps(self.pods[name]).encode())
            self._told(lambda: self.planned.receiver.changed(planned))

    def _show_claim(self, name: str) -> None:
        claim = stored(self.claims[name])
        self._told(lambda: self.watch.claims.changed(claim))

    def _told(self, change: Callable[[], None]) -> None:
        self.untold.append(change)

    # --- what is true ---

    def claim_name(self, pod: Json) -> str:
        name: str = pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
        return name

    def results(self, name: str) -> Sequence[Json]:
        """The devices of a pod."""
        claim = self.claims.get(self.claim_name(self.pods[name]), {}) if is_planned(self.pods[name]) else {}
        found: Sequence[Json] = (claim.get("status", {}).get("allocation") or {}).get("devices", {}).get("results", ())
        return found

    def node_of(self, name: str) -> str:
        """The node of a pod's devices; empty without any."""
        return next((result["pool"] for result in self.results(name)), "")

    def is_gated(self, name: str) -> bool:
        return bool(self.pods[name]["spec"].get("schedulingGates"))

    def used(self) -> Mapping[tuple[str, str], Mapping[str, Fraction]]:
        """What claims and pods with vGPUs have of each device. Pods without cores need one percent, together."""
        sums: dict[tuple[str, str], dict[str, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
        for claim in self.claims.values():
            for result in (claim["status"].get("allocation") or {}).get("devices", {}).get("results", ()):
                for capacity, amount in result["consumedCapacity"].items():
                    sums[result["pool"], result["device"]][capacity] += parse_quantity(amount)
        for device, use in self.used_by_ids().items():
            sums[device]["memory"] += use.memory_mib << 20
            sums[device]["cores"] += use.cores_percent + bool(use.unreserved)
            sums[device]["shares"] += use.shares
        return sums

    def used_by_ids(self) -> Mapping[tuple[str, str], Use]:
        """What pods with vGPUs have of each device."""
        found: dict[tuple[str, str], Use] = {}
        for pod in self.pods.values():
            text = pod["metadata"].get("annotations", {}).get(contract.ANNOTATION_ASSIGNMENT)
            assigned = () if text is None else decode_assignment(text, pod_uid=pod["metadata"]["uid"]).containers
            for share in (share for one in assigned for share in one.shares):
                _, node, minor = share.device_uuid.split("-")
                found[node, f"gpu-{minor}"] = found.get((node, f"gpu-{minor}"), Use()).plus(share)
        return found

    def check(self) -> None:
        """No capacity is allocated twice."""
        for device, amounts in self.used().items():
            assert amounts["memory"] <= DEVICE_MIB << 20, device
            assert amounts["cores"] <= 100, device
            assert amounts["shares"] <= 16, device

    # --- ports.ClaimApi ---

    async def read(self, claim: StoredClaim) -> StoredClaim | None:
        await asyncio.sleep(0)
        found = self.claims.get(claim.key[1])
        return None if found is None else stored(found)

    async def protect(self, claim: StoredClaim) -> StoredClaim:
        return await self._request(lambda: self._change(claim, finalizers=[FINALIZER]))

    async def allocate(self, claim: StoredClaim, allocation: Mapping[str, Any], pod: PodFacts) -> StoredClaim:
        assert FINALIZER in claim.finalizers
        assert allocation["allocationTimestamp"]
        user = {"resource": "pods", "name": pod.name, "uid": pod.uid}
        return await self._request(lambda: self._change(claim, status={"allocation": allocation, "reservedFor": [user]}))

    async def free(self, claim: StoredClaim) -> StoredClaim:
        return await self._request(lambda: self._change(claim, status={}))

    async def open_gate(self, pod: PodFacts) -> None:
        await self._request(lambda: self._open(pod))

    async def _request(self, write: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        if self.drop_requests:
            self.drop_requests -= 1
            raise KubeApiError("no answer, and nothing happened")
        if self.delay_requests:
            self.delay_requests -= 1
            self.late.append(write)
            raise KubeApiError("no answer yet")
        done = write()
        if self.lose_answers:
            self.lose_answers -= 1
            raise KubeApiError("no answer")
        return done

    def _change(self, claim: StoredClaim, **fields: Any) -> StoredClaim:
        found = self.claims.get(claim.key[1])
        if found is None:
            raise KubeNotFoundError("no such claim")
        if (found["metadata"]["uid"], found["metadata"]["resourceVersion"]) != (claim.uid, claim.version):
            raise KubeConflictError("the claim changed")
        return self._write(found, **fields)

    def _write(self, claim: Json, *, status: Json | None = None, finalizers: list[str] | None = None) -> StoredClaim:
        self.version += 1
        name = claim["metadata"]["name"]
        metadata = claim["metadata"] | {"resourceVersion": str(self.version)} | ({"finalizers": finalizers} if finalizers else {})
        self.claims[name] = claim | {"metadata": metadata} | ({} if status is None else {"status": status})
        self._show_claim(name)
        return stored(self.claims[name])

    def _open(self, pod: PodFacts) -> None:
        found = self.pods.get(pod.name)
        if found is None or found["metadata"]["uid"] != pod.uid:
            raise KubeNotFoundError("no such pod")
        found["spec"].pop("schedulingGates", None)
        self.opened.append(pod.name)
        self._show_pod(pod.name)

    # --- evictions and events ---

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        del namespace
        await asyncio.sleep(0)
        if name not in self.pods or self.pods[name]["metadata"]["uid"] != uid:
            raise KubeNotFoundError("no such pod")
        if not dry_run:
            self.evicted.append(name)
            self.terminate(name)

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        del namespace, uid
        self.events[name] = f"{reason}: {message}"


def is_planned(pod: Json) -> bool:
    """Whether a pod has claims that the planner allocates."""
    return contract.LABEL_ALLOCATION in (pod["metadata"].get("labels") or {})


def facts_of(pod: Json) -> PodFacts:
    """A pod as the stream of all pods shows it."""
    return pod_facts(msgspec.convert(pod, PodObject))


def stored(claim: Json) -> StoredClaim:
    return decode_claim(json.dumps(claim).encode())
