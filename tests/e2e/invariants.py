# SPDX-License-Identifier: Apache-2.0
"""What must hold of a node at all times: invariants I1 to I7 of docs/development/architecture.md.

The data come from API server, kubelet and driver.

A scenario that breaks something takes the fixture ``invariants`` and calls ``hold`` when the fault is over. Two containers that share a
GPU run meanwhile: what happens to them is what happens to a user's.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aliquot import contract
from aliquot.contract.codec import decode_assignment
from aliquot.contract.model import DeviceShare
from aliquot.contract.units import MIB
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, CLIENT, SHARES_PER_GPU, Client, Slice, agent_pod, metrics, slice_pod

NODE_TRUTH = Path(__file__).with_name("node_truth.py").read_text()
PYTHON = "/opt/aliquot/bin/python"
RECONCILE_SECONDS = 10.0
"""The agent's default: how long a dead pod's share may be held (I3)."""
SETTLE_SECONDS = 4 * RECONCILE_SECONDS
"""How long witnesses that hear of one change at different moments may disagree: some periods, for a busy machine."""

HOLDER, NEIGHBOUR = "holder", "neighbour"
LIMIT_MIB: Mapping[str, int] = {HOLDER: 6144, NEIGHBOUR: 4096}
HELD_MIB: Mapping[str, int] = {HOLDER: 2048, NEIGHBOUR: 1024}
NEWCOMER_MIB = 1024

_REASONS = re.compile(
    r"GPU|vgpu|nvidia\.com/|untolerated taint|unschedulable|device plugin|Allocate failed|assignment|No space left|preempt"
    r"|Post \"http://127\.0\.0\.1:9410/|the extender of aliquot-scheduler decides nothing now: .|the API server has not answered",
    re.IGNORECASE,
)
"""What a refusal has to speak of: a device, a resource, what keeps node or agent from giving one, a server that is away or not ready."""


class Invariants:
    """Two running containers, and how they and the node were before the fault."""

    def __init__(self, kubectl: Kubectl, product: Kubectl, node_name: str, gpu: str) -> None:
        """Args: kubectl: speaks of the scenario's namespace. gpu: UUID of the device that the two share."""
        self._kubectl = kubectl
        self._product = product
        self._node_name = node_name
        self.gpu = gpu
        self._before: Mapping[Container, tuple[str, int]] = {}
        self._forgotten: Set[Container] = frozenset()

    def begin(self) -> None:
        """Start the two containers, and note every container of a GPU pod that runs."""
        for name, held in HELD_MIB.items():
            command = [CLIENT, "hold", "--mib", str(held)]
            self._kubectl.apply(slice_pod(name, Slice(LIMIT_MIB[name]), command, on_gpu(self.gpu)))
        for name in HELD_MIB:
            self._kubectl.wait_for_phase(name, "Running", seconds=60)
        self._wait_until_held()
        self.note()

    def note(self) -> None:
        """Take what runs now as what must not be touched; a pod that is ending may end."""
        self._before = containers(pod for pod in self._pods() if "deletionTimestamp" not in pod["metadata"])

    def kubelet_forgot(self) -> None:
        """The kubelet's record of what runs was lost: it cannot list these containers again, and only the agent knows what they hold."""
        self._forgotten = self._before.keys()

    def untouched(self, *, gpu_answers: bool = True) -> None:
        """I5: every container that ran before still does, and was not restarted; its program has what it had, and its limit counts it.

        Args: gpu_answers: whether the GPU of the two containers was not itself what failed; otherwise their programs are not asked.
        """
        now = containers(self._pods())
        touched = {name: (before, now.get(name)) for name, before in self._before.items() if now.get(name) != before}
        assert not touched, f"containers that a fault must not touch, as (id, restarts) before and after: {touched}"
        if gpu_answers:
            self._wait_until_held()

    def hold(self, *, newcomer_seconds: float = 60, gpu_answers: bool = True) -> None:
        """Check all seven, and that a pod made now gets its share.

        Args: newcomer_seconds: how long that pod may take, where a fault leaves somebody with a lease to wait for.
              gpu_answers: as for ``untouched``.
        """
        self.untouched(gpu_answers=gpu_answers)
        self._kubectl.delete("pod", "newcomer")
        self._kubectl.apply(slice_pod("newcomer", Slice(NEWCOMER_MIB)))
        self._kubectl.wait_for_phase("newcomer", "Running", seconds=newcomer_seconds)
        assert [device["total_bytes"] for device in Client(self._kubectl, "newcomer").devices()] == [NEWCOMER_MIB * MIB]
        self.of_the_node()
        self.refusals_are_explained()

    def of_the_node(self) -> None:
        """I1 to I4 and I6, of all pods of the node; those that rest on several witnesses may take some reconcile periods."""
        eventually(
            lambda: not self._broken(), "the invariants to hold", seconds=SETTLE_SECONDS, otherwise=lambda: "\n".join(self._broken())
        )
        tenants_are_confined(self._kubectl, *HELD_MIB)

    def refusals_are_explained(self) -> None:
        """I7: each pod that was refused or failed in this namespace got a reason."""
        for pod in self._kubectl.all("pods"):
            name, status = pod["metadata"]["name"], pod["status"]
            if (
                status.get("phase") == "Failed" and status.get("reason") is not None
            ):  # the kubelet refused it; a program may fail as it likes
                assert _REASONS.search(status.get("message", "")), f"pod {name} failed and does not say why: {status}"
        for event in self._kubectl.all("events"):
            if event["reason"] in ("FailedScheduling", contract.EVENT_REASON_REFUSED, contract.EVENT_REASON_NO_GPU_FITS):
                assert _REASONS.search(event["message"]), f"a refusal that names no reason: {event['reason']}: {event['message']}"

    def _pods(self) -> list[Object]:
        return gpu_pods(self._product, self._node_name)

    def _device(self, name: str) -> dict[str, Any]:
        [device] = Client(self._kubectl, name).devices()
        return device

    def _wait_until_held(self) -> None:
        """Memory that a program lost does not come back: what is waited for is a kubelet that answers again, or a program that starts."""
        what = f"{HELD_MIB} MiB to be held, of {LIMIT_MIB}"
        eventually(
            lambda: all(self._holds(name) for name in HELD_MIB), what, otherwise=lambda: str([self._device(one) for one in HELD_MIB])
        )

    def _holds(self, name: str) -> bool:
        try:
            device = self._device(name)
        except KubectlError:
            return False
        limit, held = LIMIT_MIB[name] * MIB, HELD_MIB[name] * MIB
        return device["total_bytes"] == limit and device["free_bytes"] <= limit - held and f"GPU-{device['uuid']}" == self.gpu

    def _broken(self) -> list[str]:
        pods = self._pods()
        inventory = self._product.get("gpunode", self._node_name)["status"]
        truth = ask_the_node(self._product, self._node_name)
        granted = {
            labels["device_uuid"]: int(value)
            for name, labels, value in metrics(self._product, self._node_name)
            if name == "aliquot_device_memory_allocated_bytes"
        }
        again = self._pods()  # pods that came or went while the others were asked are for the next look
        if [pod["metadata"]["uid"] for pod in pods] != [pod["metadata"]["uid"] for pod in again]:
            return ["pods of this node come and go"]
        shares = shares_of(pods)
        return [
            *overbooked(shares, inventory),
            *misplaced(pods, shares, truth, self._forgotten),
            *leaked(shares, granted),
            *over_limit(pods, shares, truth),
        ]


# --- what the witnesses say ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Truth:
    """What kubelet and driver say, as ``node_truth.py`` prints it."""

    processes: Sequence[Mapping[str, Any]]
    held: Sequence[Mapping[str, Any]]


Container = tuple[str, str, str]
"""Namespace, pod and container."""


def ask_the_node(product: Kubectl, node_name: str) -> Truth:
    """Ask kubelet and driver of a node."""
    agent = agent_pod(product, node_name)["metadata"]["name"]
    return Truth(**json.loads(product.within(AGENT_NAMESPACE).exec(agent, PYTHON, "-c", NODE_TRUTH, container="agent")))


def gpu_pods(product: Kubectl, node_name: str) -> list[Object]:
    """The pods of a node that hold devices: bound by our scheduler, and not over."""
    bound = product.all("pods", "--all-namespaces", f"--field-selector=spec.nodeName={node_name}")
    return [
        pod
        for pod in bound
        if pod["status"].get("phase") in ("Pending", "Running") and contract.ANNOTATION_ASSIGNMENT in pod["metadata"].get("annotations", {})
    ]


def containers(pods: Iterable[Object]) -> dict[Container, tuple[str, int]]:
    """Id and restarts of every container that runs."""
    return {
        _name(pod, status["name"]): (status["containerID"], status["restartCount"])
        for pod in pods
        for status in pod["status"].get("containerStatuses", [])
        if "running" in status["state"]
    }


def shares_of(pods: Iterable[Object]) -> dict[Container, tuple[DeviceShare, ...]]:
    """What each container was assigned."""
    return {
        _name(pod, container.container): container.shares
        for pod in pods
        for container in decode_assignment(
            pod["metadata"]["annotations"][contract.ANNOTATION_ASSIGNMENT], pod_uid=pod["metadata"]["uid"]
        ).containers
    }


# --- I1 to I4: each returns a sentence for everything that is wrong --------------------------------------------------


def overbooked(shares: Mapping[Container, tuple[DeviceShare, ...]], inventory: Object) -> list[str]:
    """I1: no device is promised more memory, cores or shares than it has."""
    promised: dict[str, list[DeviceShare]] = defaultdict(list)
    for share in (share for several in shares.values() for share in several):
        promised[share.device_uuid].append(share)
    wrong = []
    for device in inventory["devices"]:
        on_it = promised.get(device["uuid"], [])
        mib = sum(share.memory_bytes for share in on_it) // MIB
        cores = sum(share.cores_percent or 0 for share in on_it)
        if mib > device["memoryMib"] or cores > 100 or len(on_it) > inventory.get("sharesPerGpu", SHARES_PER_GPU):
            wrong.append(f"I1: {device['uuid']} is promised {mib} of {device['memoryMib']} MiB, {cores} percent, {len(on_it)} shares")
    return wrong


def misplaced(
    pods: Iterable[Object], shares: Mapping[Container, tuple[DeviceShare, ...]], truth: Truth, forgotten: Set[Container]
) -> list[str]:
    """I2: a container has the devices that its pod was assigned, by kubelet's list and by the driver's; no device ID is held twice."""
    ids = Counter(device_id for one in truth.held for device_id in one["ids"])
    wrong = [f"I2: kubelet lists {device_id} for {count} containers" for device_id, count in ids.items() if count > 1]
    held = {(one["namespace"], one["pod"], one["container"]): len(one["ids"]) for one in truth.held}
    running = _by_container_id(pods)
    wrong += [
        f"I2: {'/'.join(name)} is assigned {len(shares[name])} devices, and kubelet lists {held.get(name, 0)}"
        for name in running.values()
        if name in shares and name not in forgotten and held.get(name, 0) != len(shares[name])
    ]
    for process in truth.processes:
        name = running.get(process["container"])
        if name is None:
            wrong.append(f"I2: process {process['pid']} uses {process['gpu']}, and no pod with an assignment has its container")
        elif process["gpu"] not in {share.device_uuid for share in shares.get(name, ())}:
            wrong.append(f"I2: {'/'.join(name)} uses {process['gpu']}, which it was not assigned")
    return wrong


def leaked(shares: Mapping[Container, tuple[DeviceShare, ...]], granted: Mapping[str, int]) -> list[str]:
    """I3: the agent has promised what the pods that are there were assigned, and nothing for those that are gone."""
    assigned: Counter[str] = Counter()
    for share in (share for several in shares.values() for share in several):
        assigned[share.device_uuid] += share.memory_bytes
    return [
        f"I3: of {uuid}, {granted_bytes // MIB} MiB are granted, and the pods that are there were assigned {assigned[uuid] // MIB} MiB"
        for uuid, granted_bytes in granted.items()
        if granted_bytes != assigned[uuid]
    ]


def over_limit(pods: Iterable[Object], shares: Mapping[Container, tuple[DeviceShare, ...]], truth: Truth) -> list[str]:
    """I4: by the driver's account, no container's processes together hold more than its limit."""
    running, used = _by_container_id(pods), Counter[tuple[Container, str]]()
    for process in truth.processes:
        if (name := running.get(process["container"])) is not None:
            used[name, process["gpu"]] += process["bytes"]
    limits = {(name, share.device_uuid): share.memory_bytes for name, several in shares.items() for share in several}
    return [
        f"I4: {'/'.join(name)} holds {amount // MIB} MiB of {uuid}, and its limit is {limits[name, uuid] // MIB} MiB"
        for (name, uuid), amount in used.items()
        if amount > limits.get((name, uuid), amount)
    ]


# --- I6 --------------------------------------------------------------------------------------------------------------


def tenants_are_confined(kubectl: Kubectl, *pods: str) -> None:
    """I6: a container's root cannot write its limits, and has no other container's region."""
    regions = set()
    for pod in pods:
        tried = kubectl.exec(
            pod, "sh", "-c", f"(echo raised > {contract.CONTAINER_LIMITS}) 2>&1; umount {contract.CONTAINER_LIMITS} 2>&1; true"
        )
        assert "Read-only file system" in tried, f"{pod} may write its limits: {tried}"
        mounted = [line.split() for line in kubectl.exec(pod, "cat", "/proc/self/mountinfo").splitlines()]
        at = {fields[4]: (fields[3], fields[5].split(",")) for fields in mounted}
        assert "ro" in at[contract.CONTAINER_LIMITS][1], f"the limits of {pod} are mounted {at[contract.CONTAINER_LIMITS]}"
        assert contract.CONTAINER_DIR not in at, f"{pod} has all of {contract.CONTAINER_DIR}"
        regions.add(at[contract.CONTAINER_REGION][0])
    assert len(regions) == len(pods), f"containers share a usage region: {regions}"


def on_gpu(uuid: str | None) -> dict[str, str]:
    """Annotations that have a pod placed on one GPU."""
    return {} if uuid is None else {contract.ANNOTATION_GPU_UUID: uuid}


def _name(pod: Object, container: str) -> Container:
    return pod["metadata"]["namespace"], pod["metadata"]["name"], container


def _by_container_id(pods: Iterable[Object]) -> dict[str, Container]:
    return {
        status["containerID"].rpartition("/")[2]: _name(pod, status["name"])
        for pod in pods
        for status in pod["status"].get("containerStatuses", [])
        if "running" in status["state"]
    }
