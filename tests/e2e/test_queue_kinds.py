# SPDX-License-Identifier: Apache-2.0
"""Kueue with the controllers of other kinds: each kind is counted by its template, starts as a gang, and waits while its quota is used.

Also fair sharing between queues, which other queues of a cluster cannot be without, and an autoscaler's answer before ours.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from aliquot import contract
from scheduler_plugin.core.admit.kueue import PRIORITY_BOOST
from scheduler_plugin.core.cluster.durations import parse_duration
from scheduler_plugin.services.max_waits import BOOST
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.host import KUEUE, GoModule, module_source
from tests.e2e.controllers import JOBSET_CONTROLLER, KUBERAY_CONTROLLER, KUEUE_CONTROLLER, LWS_CONTROLLER, TRAINING_CONTROLLER, installed
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, Slice, with_components
from tests.e2e.test_admission import SCHEDULER_ACCOUNT
from tests.e2e.test_owner_groups import RAY, TORCH, annotation, gangs_from_owners, job, jobset, leader_worker_set, members, template
from tests.e2e.test_queues import (
    CONFIGURATION,
    QUEUE,
    START_SECONDS,
    WHOLE,
    answer,
    condition,
    configure,
    queued_job,
    running,
    why_waiting,
    workloads_of,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

TWO_GPUS = Slice(2 * GPU_MEMORY_MIB, vgpus=2)
COUNTED = {contract.RESOURCE_VGPU: 4, contract.RESOURCE_VGPU_MEMORY: 4 * GPU_MEMORY_MIB}
"""Of a workload with two pods."""
API = "kueue.x-k8s.io/v1beta2"
AUTOSCALER = GoModule(KUEUE.module.folder, "k8s.io/autoscaler/cluster-autoscaler/apis")
MAX_WAIT = "45s"
REQUESTS = "provisioningrequests.autoscaling.x-k8s.io"


def configure_kinds(objects: Sequence[Object]) -> None:
    """Let Kueue serve PyTorchJobs too, share fairly between queues, and read boosts of priorities."""
    configure(objects)
    [data] = [item["data"] for item in objects if item["kind"] == "ConfigMap" and CONFIGURATION in item["data"]]
    settings = yaml.safe_load(data[CONFIGURATION])
    settings["integrations"]["frameworks"].append("kubeflow.org/pytorchjob")
    settings["featureGates"] = {"PriorityBoost": True}
    settings["fairSharing"] = {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]}
    data[CONFIGURATION] = yaml.safe_dump(settings)


@pytest.fixture(scope="module")
def kinds(product: Kubectl, node: Cluster) -> Iterator[Kubectl]:
    """The product with its check, longest waits and gangs from owners, Kueue, and the controllers of the kinds; gone afterwards."""
    request_kind = module_source(AUTOSCALER) / "config/crd/autoscaling.x-k8s.io_provisioningrequests.yaml"
    controllers = (JOBSET_CONTROLLER, LWS_CONTROLLER, KUBERAY_CONTROLLER, TRAINING_CONTROLLER)
    product.run("apply", "--server-side", f"--filename={request_kind}")
    with (
        with_components(product, ["kueue", "kueue-max-wait", "gangs-from-owners"]),
        installed(product, node, *controllers, replace(KUEUE_CONTROLLER, configure=configure_kinds)),
    ):
        yield product
    product.delete("crd", REQUESTS)


@pytest.fixture
def labelled(kinds: Kubectl, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace with gangs from owners. The workloads go first, or their controllers would create deleted pods again."""
    del kinds
    with gangs_from_owners(kubectl, "jobs,jobsets,leaderworkersets,rayclusters,pytorchjobs"):
        yield kubectl


@contextmanager
def queues(kubectl: Kubectl, *made: Object) -> Iterator[None]:
    """Have queues in the block, and a flavor for them. Their workloads must be gone at the end."""
    objects = [{"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "gpus"}}, *made]
    kubectl.apply(*objects)
    try:
        yield
    finally:
        for item in reversed(objects):
            kubectl.delete(f"{item['kind'].lower()}.{item['apiVersion'].partition('/')[0]}", item["metadata"]["name"])


def queue(name: str, gpus: int, **spec: object) -> list[Object]:
    """A queue with this many GPUs of its own, and the way into it."""
    amounts = {contract.RESOURCE_VGPU: 64, contract.RESOURCE_VGPU_MEMORY: gpus * GPU_MEMORY_MIB}
    resources = [{"name": resource, "nominalQuota": str(amount)} for resource, amount in amounts.items()]
    group = {"coveredResources": list(amounts), "flavors": [{"name": "gpus", "resources": resources}]}
    wanted = {"namespaceSelector": {}, "resourceGroups": [group], **spec}
    metadata = {"name": name}
    return [
        {"apiVersion": API, "kind": "ClusterQueue", "metadata": metadata, "spec": wanted},
        {"apiVersion": API, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": name}},
    ]


def counted(kubectl: Kubectl) -> dict[str, int]:
    """What Kueue counts for all workloads that it admitted: some kinds have one for each group of their pods."""
    used = dict[str, int]()
    for workload in kubectl.all("workloads.kueue.x-k8s.io"):
        for assigned in workload.get("status", {}).get("admission", {}).get("podSetAssignments", ()):
            for name, amount in assigned.get("resourceUsage", {}).items():
                used[name] = used.get(name, 0) + int(parse_quantity(amount))
    return used


def waits_for_quota(kubectl: Kubectl) -> bool:
    """Whether Kueue says of a workload that its quota is used."""
    conditions = (one for item in kubectl.all("workloads.kueue.x-k8s.io") for one in item.get("status", {}).get("conditions", ()))
    return any(one["type"] == "QuotaReserved" and "insufficient unused quota" in one["message"] for one in conditions)


def with_gpus(kubectl: Kubectl, owner: str) -> list[Object]:
    """The pods of an owner that ask for GPUs."""
    return [pod for pod in members(kubectl, owner) if contract.RESOURCE_VGPU in str(pod["spec"]["containers"])]


def placed(kubectl: Kubectl, owner: str) -> int:
    return sum(bool(pod["spec"].get("nodeName")) for pod in with_gpus(kubectl, owner))


def explain(kubectl: Kubectl) -> str:
    """The workloads and pods, and the latest events."""
    texts = [kubectl.run("get", "pods,workloads.kueue.x-k8s.io", "--output=wide"), kubectl.run("get", "events")[-3000:]]
    return "\n".join([*texts, *(json.dumps(item.get("status", {})) for item in kubectl.all("workloads.kueue.x-k8s.io"))])


def in_queue(workload: Object, name: str) -> Object:
    """A workload under a name, for the queue of these tests."""
    metadata = {**workload["metadata"], "name": name, "labels": {QUEUE: "kinds"}}
    return {**workload, "metadata": metadata}


def ray_cluster(name: str) -> Object:
    """A head and a worker."""
    spec = dict(RAY["spec"])
    [workers] = spec["workerGroupSpecs"]
    spec["workerGroupSpecs"] = [{**workers, "replicas": 1, "minReplicas": 1, "maxReplicas": 1}]
    return in_queue({**RAY, "spec": spec}, name)


def torch_job(name: str) -> Object:
    """A master and a worker."""
    replicas = {kind: {**spec, "replicas": 1} for kind, spec in TORCH["spec"]["pytorchReplicaSpecs"].items()}
    return in_queue({**TORCH, "spec": {"pytorchReplicaSpecs": replicas}}, name)


KINDS = {
    "jobset": lambda name: in_queue(jobset(name, job("workers", template(TWO_GPUS), 2)), name),
    "lws": lambda name: in_queue(leader_worker_set(name, TWO_GPUS, 2), name),
    "ray": ray_cluster,
    "pytorch": torch_job,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_counted_starts_as_gang_and_waits_for_quota(labelled: Kubectl, kind: str) -> None:
    check_kind(labelled, KINDS[kind])


def check_kind(kubectl: Kubectl, make: Callable[[str], Object]) -> None:
    """Run a workload of two pods with two GPUs each, and a second one that has no quota before the first is gone."""
    first = make("first")
    with queues(kubectl, *queue("kinds", 4)):
        try:
            kubectl.apply(first)
            wait_until_placed(kubectl, "first")
            assert counted(kubectl) == COUNTED
            assert {annotation(pod, contract.ANNOTATION_GANG_MIN) for pod in with_gpus(kubectl, "first")} == {"2"}

            kubectl.apply(make("second"))
            eventually(lambda: waits_for_quota(kubectl), "Kueue to say why the second one waits", seconds=START_SECONDS,
                       otherwise=lambda: explain(kubectl))  # fmt: skip
            assert placed(kubectl, "second") == 0
            assert counted(kubectl) == COUNTED
            kubectl.run("delete", first["kind"].lower(), "first", "--cascade=foreground", timeout_seconds=START_SECONDS)
            wait_until_placed(kubectl, "second")
        finally:
            kubectl.run("delete", first["kind"].lower(), "--all", "--cascade=foreground", timeout_seconds=START_SECONDS)


def wait_until_placed(kubectl: Kubectl, owner: str) -> None:
    # Not until they run: a worker of PyTorch first runs an image of its operator's, which is not on the node.
    eventually(lambda: placed(kubectl, owner) == 2, f"both pods of {owner} to be placed", seconds=START_SECONDS,
               otherwise=lambda: explain(kubectl))  # fmt: skip


def test_two_queues_without_quota_share_what_is_lent_in_halves(labelled: Kubectl) -> None:
    preemption = {"reclaimWithinCohort": "Any", "withinClusterQueue": "LowerPriority"}
    lent = [item for name in ("early", "late") for item in queue(name, 0, cohortName="fair", preemption=preemption)]

    def run(name: str) -> int:
        pods = labelled.all("pods", "--field-selector=status.phase=Running")
        return sum(pod["metadata"]["name"].startswith(name) and "deletionTimestamp" not in pod["metadata"] for pod in pods)

    def shares() -> tuple[int, int]:
        return run("early"), run("late")

    with queues(labelled, *queue("pool", GPUS, cohortName="fair"), *lent):
        try:
            labelled.apply(*(queued_job(f"early-{number}", WHOLE.limits, "early") for number in range(GPUS)))
            eventually(lambda: shares() == (GPUS, 0), "the first queue to use all GPUs", seconds=START_SECONDS)
            labelled.apply(*(queued_job(f"late-{number}", WHOLE.limits, "late") for number in range(GPUS)))
            eventually(lambda: shares() == (GPUS // 2, GPUS // 2), "half of the GPUs for each queue", seconds=START_SECONDS,
                       otherwise=lambda: f"{shares()}\n{explain(labelled)}")  # fmt: skip
            reasons = {condition(labelled, f"early-{number}", "Preempted").get("reason") for number in range(GPUS)}
            assert reasons - {None} == {"InCohortFairSharing"}
        finally:
            labelled.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)


def test_low_job_starts_after_longest_wait_of_its_class(labelled: Kubectl) -> None:
    classes = [priority_class("e2e-important", 1000), priority_class("e2e-low", 0), priority_class("e2e-patient", 0, MAX_WAIT)]
    important = [f"important-{number}" for number in range(3)]

    def runs(name: str) -> bool:
        return bool(labelled.all("pods", f"--selector=batch.kubernetes.io/job-name={name}", "--field-selector=status.phase=Running"))

    with queues(labelled, *classes, *queue("waits", 1, preemption={"withinClusterQueue": "LowerPriority"})):
        try:
            labelled.apply(*(queued_job(name, WHOLE.limits, "waits", priority_class="e2e-important") for name in important))
            labelled.apply(*(queued_job(name, WHOLE.limits, "waits", priority_class=f"e2e-{name}") for name in ("low", "patient")))
            # One important job after the other: for the others there is never room.
            first = eventually(lambda: next(filter(runs, important), None), "an important job to run", seconds=START_SECONDS)
            labelled.delete("job", first)
            later = [name for name in important if name != first]
            second = eventually(lambda: next(filter(runs, later), None), "the next important job to run", seconds=START_SECONDS)

            running(labelled, "patient", 1)
            [waited] = workloads_of(labelled, "patient")
            reserved = condition(labelled, "patient", "QuotaReserved")["lastTransitionTime"]
            assert seconds_between(waited["metadata"]["creationTimestamp"], reserved) >= parse_duration(MAX_WAIT)
            assert waited["metadata"]["annotations"][PRIORITY_BOOST] == str(BOOST)
            other = {"apiVersion": API, "kind": "Workload", "metadata": {"name": waited["metadata"]["name"], "labels": {"other": "label"}}}
            with pytest.raises(KubectlError, match="changes only annotation"):
                labelled.run(
                    "apply", "--server-side", "--validate=false", "--filename=-", f"--as={SCHEDULER_ACCOUNT}", stdin=yaml.safe_dump(other)
                )
            assert condition(labelled, second, "Preempted")["reason"] == "InClusterQueue"
            # Of another size: Kueue gives no reason of its own to a job that equals one which it looked at before.
            labelled.apply(queued_job("newest", Slice(1024).limits, "waits", priority_class="e2e-important"))
            eventually(lambda: why_waiting(labelled, "newest"), "Kueue to say why an important job waits", seconds=START_SECONDS)
            assert [name for name in (*later, "low", "patient", "newest") if runs(name)] == ["patient"]
        finally:
            labelled.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)


def priority_class(name: str, value: int, max_wait: str = "") -> Object:
    """A class of Kubernetes, with the longest wait in a queue."""
    metadata = {"name": name, "annotations": {contract.ANNOTATION_MAX_WAIT: max_wait} if max_wait else {}}
    return {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": metadata, "value": value}


def seconds_between(early: str, late: str) -> float:
    return (datetime.fromisoformat(late) - datetime.fromisoformat(early)).total_seconds()


def asking_autoscaler() -> tuple[list[Object], Object]:
    """What lets a queue ask an autoscaler and then us: the objects, and the queue's strategy."""
    wanted: Object = {"provisioningClassName": "check-capacity.autoscaling.x-k8s.io", "managedResources": [contract.RESOURCE_VGPU]}
    parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": "more-nodes"}
    made = [
        {"apiVersion": API, "kind": "ProvisioningRequestConfig", "metadata": {"name": "more-nodes"}, "spec": wanted},
        check("more-nodes", "kueue.x-k8s.io/provisioning-request", parameters=parameters),
        check("fits", "aliquot.dev/fits"),
    ]
    return made, {"admissionChecks": [{"name": name} for name in ("more-nodes", "fits")]}


def check_states(kubectl: Kubectl, job: str) -> dict[str, str]:
    """The state of each check of a job's workload."""
    found = [one for workload in workloads_of(kubectl, job) for one in workload.get("status", {}).get("admissionChecks", ())]
    return {one["name"]: one["state"] for one in found}


def test_no_seat_is_held_before_autoscaler_has_answered(labelled: Kubectl) -> None:
    made, checks = asking_autoscaler()
    with queues(labelled, *made, *queue("scaled", GPUS, admissionChecksStrategy=checks)):
        try:
            labelled.apply(queued_job("scaled", WHOLE.limits, "scaled", pods=2))
            [request] = eventually(lambda: labelled.all(REQUESTS), "Kueue to ask the autoscaler", seconds=START_SECONDS,
                                   otherwise=lambda: explain(labelled))  # fmt: skip
            assert check_states(labelled, "scaled") == {"more-nodes": "Pending", "fits": "Pending"}
            assert answer(labelled, "scaled").count("gpu") == 0

            labelled.run("patch", REQUESTS, request["metadata"]["name"], "--subresource=status", "--type=merge",
                         f"--patch={json.dumps({'status': {'conditions': provisioned(request)}})}")  # fmt: skip
            pods = [labelled.get("pod", name) for name in running(labelled, "scaled", 2)]
            assert check_states(labelled, "scaled") == {"more-nodes": "Ready", "fits": "Ready"}
            assert all(contract.ANNOTATION_HOLD in pod["metadata"]["annotations"] for pod in pods)
        finally:
            labelled.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)


def check(name: str, controller: str, **spec: object) -> Object:
    """An admission check."""
    return {"apiVersion": API, "kind": "AdmissionCheck", "metadata": {"name": name}, "spec": {"controllerName": controller, **spec}}


def provisioned(request: Object) -> list[Object]:
    """The conditions with which an autoscaler says that there is room."""
    moment, generation = request["metadata"]["creationTimestamp"], request["metadata"].get("generation", 1)
    common = {"status": "True", "reason": "Test", "message": "", "lastTransitionTime": moment, "observedGeneration": generation}
    return [{"type": kind, **common} for kind in ("Accepted", "Provisioned")]
