# SPDX-License-Identifier: Apache-2.0
"""Kueue itself in front of our shares: it counts GPU memory and lets a job go in its turn, and our scheduler places what it let go."""

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from aliquot import contract
from aliquot.contract.gpunode import API_VERSION
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.controllers import KUEUE_CONTROLLER, installed
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    CLIENT_IMAGE,
    GPU_MEMORY_MIB,
    GPUS,
    HOLD_OPEN,
    MIB,
    Client,
    Slice,
    Variant,
    assigned_uuids,
    wait_until_rolled_out,
)
from tests.e2e.scale import inventory, node_object
from tests.rendering import DEPLOY, EXAMPLES

SHIPPED = DEPLOY / "kueue"
CONFIGURATION = "controller_manager_config.yaml"
QUEUE = "kueue.x-k8s.io/queue-name"
CHECKPOINT_SECONDS = 4
START_SECONDS = 90
HALF_LIFE_SECONDS = 10
SMALL_MIB = 81_558
"""Of the GPUs of a second node."""
WHOLE = Slice(GPU_MEMORY_MIB)


VARIANT = Variant(("kueue",))
"""The scheduler answers the admission check."""


@pytest.fixture(scope="module")
def kueue(product: Kubectl, node: Cluster) -> Iterator[Kubectl]:
    """Kueue with our sections in its configuration; gone afterwards."""
    with installed(product, node, replace(KUEUE_CONTROLLER, configure=configure)):
        yield product


def configure(objects: Sequence[Object]) -> None:
    """Put our sections into Kueue's configuration."""
    [configuration] = [item["data"] for item in objects if item["kind"] == "ConfigMap" and CONFIGURATION in item["data"]]
    configuration[CONFIGURATION] = yaml.safe_dump({**yaml.safe_load(configuration[CONFIGURATION]), **our_sections()})


def our_sections() -> Object:
    """The sections of Kueue's configuration as deploy/ has them, except that use is forgotten while a test can wait for it."""
    sections: Object = yaml.safe_load((SHIPPED / "configuration.yaml").read_text())
    sections["admissionFairSharing"] |= {"usageHalfLifeTime": f"{HALF_LIFE_SECONDS}s", "usageSamplingInterval": "1s"}
    return sections


@contextmanager
def shipped(kubectl: Kubectl, name: str, change: Callable[[list[Object]], list[Object]] = lambda objects: objects) -> Iterator[None]:
    """Have the queues of a file of deploy/kueue in the block, perhaps changed; gone afterwards, all workloads first."""
    objects = change(list(yaml.safe_load_all((SHIPPED / f"{name}.yaml").read_text())))
    try:
        kubectl.run("apply", "--validate=strict", "--filename=-", stdin=yaml.safe_dump_all(objects))
        yield
    finally:
        kubectl.run("delete", "jobs,statefulsets", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)
        for item in reversed(objects):
            kubectl.delete(f"{item['kind'].lower()}.kueue.x-k8s.io", item["metadata"]["name"])


@pytest.fixture
def queue(kueue: Kubectl, kubectl: Kubectl) -> Iterator[list[Object]]:
    """The example of a queue."""
    del kueue
    with example(kubectl, "kueue") as objects:
        yield objects


@contextmanager
def example(kubectl: Kubectl, name: str) -> Iterator[list[Object]]:
    """Have the objects of an example in the block, unchanged except for their image; gone afterwards, its job first."""
    objects = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
    [job] = [item for item in objects if item["kind"] == "Job"]
    for container in job["spec"]["template"]["spec"]["containers"]:
        container.update(image=CLIENT_IMAGE, imagePullPolicy="IfNotPresent")
    try:
        kubectl.run("apply", "--validate=strict", "--filename=-", stdin=yaml.safe_dump_all(objects))
        yield objects
    finally:
        kubectl.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)
        for item in reversed(objects):
            group = item["apiVersion"].partition("/")[0]
            kubectl.delete(f"{item['kind'].lower()}.{group}", item["metadata"]["name"])


def used(kubectl: Kubectl) -> dict[str, int]:
    """What the queue says of its quota is in use, by resource."""
    flavors: list[Any] = kubectl.get("clusterqueue", "shared-gpus").get("status", {}).get("flavorsUsage", [])
    return {resource["name"]: int(parse_quantity(resource["total"])) for flavor in flavors for resource in flavor["resources"]}


def running(kubectl: Kubectl, job: str, count: int) -> list[str]:
    """Wait for the pods of a job to run; return their names."""

    def names() -> list[str] | None:
        pods = kubectl.all("pods", f"--selector=batch.kubernetes.io/job-name={job}")
        found = [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"]
        return found if len(found) == count else None

    def explained() -> str:
        return kubectl.run("get", "pods,workloads.kueue.x-k8s.io", "--output=yaml")[-3000:]

    found: list[str] = eventually(names, f"{count} pods of job {job} to run", seconds=START_SECONDS, otherwise=explained)
    return found


def why_waiting(kubectl: Kubectl, job: str) -> str:
    """What Kueue says of a job that it does not let go; nothing while it has not said."""
    reserved = condition(kubectl, job, "QuotaReserved")
    return str(reserved["message"]) if reserved.get("status") == "False" else ""


def queued_job(
    name: str,
    limits: dict[str, str],
    queue: str = "gpus",
    *,
    pods: int = 1,
    annotations: dict[str, str] | None = None,
    priority_class: str | None = None,
) -> Object:
    """A job for a queue, by default the example's."""
    template = {"metadata": {"annotations": annotations or {}}, "spec": {**pod_spec(limits), "restartPolicy": "Never"}}
    if priority_class is not None:
        template["spec"]["priorityClassName"] = priority_class
    spec = {"parallelism": pods, "completions": pods, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": {QUEUE: queue}}, "spec": spec}


def pod_spec(limits: dict[str, str]) -> Object:
    container = {
        "name": "main",
        "image": CLIENT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": [*HOLD_OPEN],
        "resources": {"limits": limits},
    }
    return {"terminationGracePeriodSeconds": 1, "containers": [container]}


def counts(kubectl: Kubectl, owner: str) -> dict[str, int]:
    """What Kueue counts for an object that it admitted; empty for others."""
    for workload in workloads_of(kubectl, owner):
        for assigned in workload.get("status", {}).get("admission", {}).get("podSetAssignments", ()):
            return {name: int(parse_quantity(amount)) for name, amount in assigned["resourceUsage"].items()}
    return {}


def wait_until_counted(kubectl: Kubectl, owner: str, wanted: dict[str, int]) -> None:
    """Wait until Kueue has admitted an object and counts this for it."""
    eventually(
        lambda: counts(kubectl, owner) == wanted,
        f"Kueue to count {wanted} for {owner}",
        otherwise=lambda: f"{counts(kubectl, owner)} {condition(kubectl, owner, 'QuotaReserved')}",
    )


def workloads_of(kubectl: Kubectl, owner: str) -> list[Object]:
    """The workloads of an object."""
    found = kubectl.all("workloads.kueue.x-k8s.io")
    return [one for one in found if any(reference["name"] == owner for reference in one["metadata"].get("ownerReferences", ()))]


def condition(kubectl: Kubectl, job: str, kind: str) -> Object:
    """A condition of a job's workload; empty before it is there."""
    for workload in workloads_of(kubectl, job):
        return next((one for one in workload.get("status", {}).get("conditions", ()) if one["type"] == kind), {})
    return {}


def job_pods(kubectl: Kubectl, jobs: Sequence[str]) -> dict[str, Object]:
    """The one pod of each job that has one."""
    pods = kubectl.all("pods", "--selector=batch.kubernetes.io/job-name")
    names = [pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] for pod in pods]
    return {name: pod for name, pod in zip(names, pods, strict=True) if name in jobs and pod["metadata"].get("deletionTimestamp") is None}


@pytest.mark.timeout(300)
def test_kueue_counts_share_memory_and_job_waits_until_enough_is_free(kubectl: Kubectl, queue: list[Object]) -> None:
    first = next(item["metadata"]["name"] for item in queue if item["kind"] == "Job")
    pods = running(kubectl, first, 2)
    for pod in pods:
        assert [device["total_bytes"] for device in Client(kubectl, pod).devices()] == [16384 * MIB]
    expected = {contract.RESOURCE_VGPU: 2, contract.RESOURCE_VGPU_MEMORY: 2 * 16384}
    eventually(lambda: used(kubectl) == expected, f"the queue to count {expected}", otherwise=lambda: str(used(kubectl)))

    kubectl.apply(queued_job("large", Slice(245760, vgpus=2).limits))
    said = eventually(lambda: why_waiting(kubectl, "large"), "Kueue to say why the second job waits")
    assert f"insufficient unused quota for {contract.RESOURCE_VGPU_MEMORY} in flavor shared-gpus" in said
    assert kubectl.get("job", "large")["spec"]["suspend"]

    kubectl.delete("job", first)
    [pod] = running(kubectl, "large", 1)
    assert [device["total_bytes"] for device in Client(kubectl, pod).devices()] == [122880 * MIB] * 2


COUNTED_AS = {
    "kai": {contract.RESOURCE_VGPU: 1, contract.RESOURCE_VGPU_MEMORY: 40960},
    "hami": {contract.RESOURCE_VGPU: 2, contract.RESOURCE_VGPU_MEMORY: 16384},
    "service": {contract.RESOURCE_VGPU: 1, contract.RESOURCE_VGPU_MEMORY: 1000},
}


@pytest.mark.adopted
@pytest.mark.timeout(300)
def test_kueue_counts_jobs_in_other_systems_words_by_their_templates(kubectl: Kubectl, kueue: Kubectl) -> None:
    del kueue
    kai = queued_job("kai", {}, "team-a", annotations={"gpu-memory": "40960"})
    hami = queued_job("hami", {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "8192"}, "team-a")
    template = {"metadata": {"labels": {"app": "service"}}, "spec": pod_spec({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"})}
    spec = {"replicas": 1, "serviceName": "service", "selector": {"matchLabels": {"app": "service"}}, "template": template}
    metadata = {"name": "service", "labels": {QUEUE: "team-a"}}
    service = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}
    with shipped(kubectl, "cohort"):
        kubectl.apply(kai, hami, service)
        for name, wanted in COUNTED_AS.items():
            wait_until_counted(kubectl, name, wanted)
        pods = running(kubectl, "kai", 1) + running(kubectl, "hami", 1)
        kubectl.wait_for_phase("service-0", "Running", seconds=START_SECONDS)
        devices = [[device["total_bytes"] // MIB for device in Client(kubectl, pod).devices()] for pod in [*pods, "service-0"]]
        assert devices == [[40960], [8192, 8192], [1000]]

        kubectl.apply(kai, hami, service)
        assert running(kubectl, "kai", 1) + running(kubectl, "hami", 1) == pods, "a Job's template cannot change, and did not"
        assert kubectl.get("statefulset", "service")["metadata"]["generation"] == 1


@pytest.mark.timeout(300)
def test_one_label_gives_a_workload_and_its_pods_their_priority(kubectl: Kubectl, kueue: Kubectl) -> None:
    del kueue
    job = queued_job("serve", {contract.RESOURCE_VGPU_MEMORY: "1024"}, "team-a")
    job["spec"]["template"]["metadata"]["labels"] = {contract.LABEL_CLASS: "inference"}
    with shipped(kubectl, "cohort"):
        kubectl.apply(job)
        [pod] = running(kubectl, "serve", 1)
        assert kubectl.get("pod", pod)["spec"]["priority"] == 100_000
        assert [workload["spec"]["priority"] for workload in workloads_of(kubectl, "serve")] == [100_000]


TRANSFORMED = {
    "hami": ({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "8192", "nvidia.com/gpucores": "30"}, (2, 16384)),
    "volcano": ({"volcano.sh/vgpu-number": "2", "volcano.sh/vgpu-memory": "1000"}, (2, 2000)),
    "vgpu-manager": ({"nvidia.com/vgpu-number": "3", "nvidia.com/vgpu-memory": "1000", "nvidia.com/vgpu-cores": "10"}, (3, 3000)),
    "aliquot": ({"nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "3000", "nvidia.com/vgpu-cores": "10"}, (2, 3000)),
}


@pytest.mark.adopted
@pytest.mark.timeout(300)
def test_shipped_transformations_count_templates_that_webhook_does_not_see(kubectl: Kubectl, kueue: Kubectl) -> None:
    kueue.run("label", "namespace", kubectl.namespace, f"{contract.LABEL_WEBHOOK}=ignore")
    probe = yaml.safe_dump(queued_job("probe", TRANSFORMED["hami"][0], "team-a"))

    def ignored() -> bool:
        """Whether the API server has seen the label."""
        stored = yaml.safe_load(kubectl.run("apply", "--dry-run=server", "--output=yaml", "--filename=-", stdin=probe))
        return "nvidia.com/gpumem" in stored["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]

    eventually(ignored, "the webhook not to be called for this namespace")
    with shipped(kubectl, "cohort"):
        kubectl.apply(*(queued_job(name, limits, "team-a") for name, (limits, _) in TRANSFORMED.items()))
        for name, (_, (vgpus, memory_mib)) in TRANSFORMED.items():
            wait_until_counted(kubectl, name, {contract.RESOURCE_VGPU: vgpus, contract.RESOURCE_VGPU_MEMORY: memory_mib})


def wait_for_next_second(kubectl: Kubectl, jobs: Sequence[str]) -> None:
    """Wait until what Kueue admits next is newer than these jobs: it orders its victims by times in whole seconds."""
    stamps = [condition(kubectl, job, "QuotaReserved")["lastTransitionTime"] for job in jobs]
    newest = max(datetime.fromisoformat(stamp).timestamp() for stamp in stamps)
    eventually(lambda: time.time() >= newest + 1, "the second in which the jobs were admitted to end")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cohorts", ["cohort", "cohort-tree"])
def test_team_gets_lent_gpus_back_without_harm_to_own_share(kubectl: Kubectl, kueue: Kubectl, cohorts: str) -> None:
    del kueue
    own, borrowing = ([f"{part}-{number}" for number in range(GPUS // 2)] for part in ("own", "borrowing"))

    def all_run(jobs: Sequence[str]) -> dict[str, Object] | None:
        pods = job_pods(kubectl, jobs)
        return pods if len(pods) == len(jobs) and all(pod["status"].get("phase") == "Running" for pod in pods.values()) else None

    with shipped(kubectl, cohorts):
        kubectl.apply(*(queued_job(name, WHOLE.limits, "team-a") for name in own))
        eventually(lambda: all_run(own), "the jobs of A's own share to run", seconds=START_SECONDS)
        wait_for_next_second(kubectl, own)
        kubectl.apply(*(queued_job(name, WHOLE.limits, "team-a") for name in borrowing))
        before = eventually(lambda: all_run([*own, *borrowing]), "A to run on all GPUs", seconds=START_SECONDS)

        kubectl.apply(queued_job("reclaiming", WHOLE.limits, "team-b", pods=2))
        reclaimed = [kubectl.get("pod", name) for name in running(kubectl, "reclaiming", 2)]
        after = job_pods(kubectl, [*own, *borrowing])
        uids = {name: pod["metadata"]["uid"] for name, pod in after.items()}
        ended = {name for name, pod in before.items() if uids.get(name) != pod["metadata"]["uid"]}
        assert len(ended) == len(reclaimed)
        assert ended <= set(borrowing)
        evictions = [condition(kubectl, name, "Preempted") for name in ended]
        assert {(one["status"], one["reason"]) for one in evictions} == {("True", "InCohortReclamation")}
        freed = sorted(uuid for name in ended for uuid in assigned_uuids(before[name]))
        assert sorted(uuid for pod in reclaimed for uuid in assigned_uuids(pod)) == freed


@pytest.mark.timeout(300)
def test_one_priority_class_orders_queue_and_pods(kubectl: Kubectl, kueue: Kubectl) -> None:
    del kueue
    with shipped(kubectl, "cohort"):
        kubectl.apply(queued_job("first", WHOLE.limits, "team-a", pods=4, priority_class="aliquot-best-effort"))
        first = running(kubectl, "first", 4)
        wait_for_next_second(kubectl, ["first"])
        kubectl.apply(queued_job("second", WHOLE.limits, "team-a", pods=4, priority_class="aliquot-best-effort"))
        running(kubectl, "second", 4)

        kubectl.apply(queued_job("urgent", WHOLE.limits, "team-a", priority_class="aliquot-production"))
        [pod] = running(kubectl, "urgent", 1)
        priority = int(kubectl.get("priorityclass", "aliquot-production")["value"])
        [workload] = workloads_of(kubectl, "urgent")
        assert (workload["spec"]["priority"], kubectl.get("pod", pod)["spec"]["priority"]) == (priority, priority)
        assert condition(kubectl, "second", "Preempted")["reason"] == "InClusterQueue"
        assert sorted(running(kubectl, "first", 4)) == sorted(first), "the job that was admitted last made room"
        assert condition(kubectl, "second", "QuotaReserved")["status"] == "False"

        kubectl.delete("job", "urgent")
        running(kubectl, "second", 4)


def borrowing(cohort: list[Object]) -> list[Object]:
    """The queues of cohort.yaml, of two GPUs each, and four GPUs that both may borrow; a higher priority may take those from the other."""
    pool = copy.deepcopy(next(item for item in cohort if item["kind"] == "ClusterQueue"))
    pool["metadata"]["name"] = "pool"
    for item in (item for item in (*cohort, pool) if item["kind"] == "ClusterQueue"):
        gpus = 4 if item is pool else 2
        item["spec"]["preemption"]["borrowWithinCohort"] = {"policy": "LowerPriority"}
        item["spec"]["resourceGroups"][0]["flavors"][0]["resources"][1]["nominalQuota"] = gpus * GPU_MEMORY_MIB
    return [*cohort, pool]


def ending_slowly(job: Object) -> Object:
    """Make a job's pods end slowly, as if they wrote a checkpoint. Kueue does not wait for them."""
    spec = job["spec"]["template"]["spec"]
    spec["terminationGracePeriodSeconds"] = 2 * CHECKPOINT_SECONDS
    for container in spec["containers"]:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": CHECKPOINT_SECONDS}}}
    return job


@pytest.mark.timeout(300)
def test_more_important_borrower_takes_one_gpu_from_less_important_one(kubectl: Kubectl, kueue: Kubectl) -> None:
    """Kueue ends the workload that was admitted last, and kube-scheduler would end the pod that started last."""
    del kueue
    first, *others = early = [f"early-{number}" for number in range(6)]
    with shipped(kubectl, "cohort", borrowing):
        jobs = [ending_slowly(queued_job(name, WHOLE.limits, "team-a", priority_class="aliquot-best-effort")) for name in early]
        kubectl.apply(jobs[0])
        [earliest] = running(kubectl, first, 1)
        wait_for_next_second(kubectl, [first])
        kubectl.apply(*jobs[1:], queued_job("own", WHOLE.limits, "team-b", pods=2, priority_class="aliquot-production"))
        running(kubectl, "own", 2)
        before = {name: running(kubectl, name, 1) for name in others}
        kubectl.delete("pod", earliest)
        before[first] = eventually(lambda: [name for name in running(kubectl, first, 1) if name != earliest], "a pod that starts last")

        kubectl.apply(queued_job("urgent", WHOLE.limits, "team-b", priority_class="aliquot-production"))
        running(kubectl, "urgent", 1)
        ended = {name: condition(kubectl, name, "Preempted").get("reason") for name in early}
        [victim] = [name for name, reason in ended.items() if reason]
        assert victim != first
        assert ended[victim] == "InCohortReclaimWhileBorrowing"
        left = {name: kubectl.get("pod", pod)["metadata"] for name, [pod] in before.items() if name != victim}
        assert [name for name, metadata in left.items() if "deletionTimestamp" in metadata] == []


@pytest.mark.timeout(300)
def test_queue_that_used_less_goes_first_and_use_is_forgotten(kubectl: Kubectl, kueue: Kubectl) -> None:
    del kueue

    def consumed() -> int:
        """What the heavy queue has used, in MiB, as Kueue remembers it."""
        sharing = kubectl.get("localqueue", "heavy").get("status", {}).get("fairSharing") or {}
        resources = (sharing.get("admissionFairSharingStatus") or {}).get("consumedResources") or {}
        return int(parse_quantity(resources.get(contract.RESOURCE_VGPU_MEMORY, "0")))

    with shipped(kubectl, "fair-share-by-use"):
        kubectl.apply(queued_job("heavy-1", WHOLE.limits, "heavy"))
        running(kubectl, "heavy-1", 1)
        eventually(lambda: consumed() > 0, "Kueue to remember what the heavy queue uses")
        kubectl.apply(queued_job("heavy-2", WHOLE.limits, "heavy"))
        eventually(lambda: why_waiting(kubectl, "heavy-2"), "the second job of the heavy queue to wait")
        kubectl.apply(queued_job("light-1", WHOLE.limits, "light"))
        eventually(lambda: workloads_of(kubectl, "light-1"), "Kueue to know the job of the light queue")
        kubectl.delete("job", "heavy-1")
        running(kubectl, "light-1", 1)
        assert why_waiting(kubectl, "heavy-2"), "it came before"
        used_before = consumed()
        eventually(lambda: 0 < consumed() * 2 <= used_before, "half of the use to be forgotten", seconds=6 * HALF_LIFE_SECONDS)


@pytest.fixture
def counting_whole_gpus(kueue: Kubectl) -> Iterator[Kubectl]:
    """The product as with component count-whole-gpus too; as before afterwards."""
    system = kueue.within(AGENT_NAMESPACE)
    for change in ("ALIQUOT_COUNT_WHOLE_GPUS=true", "ALIQUOT_COUNT_WHOLE_GPUS-"):
        system.run("set", "env", "deployment/aliquot-scheduler", "--containers=extender", change)
        system.run("rollout", "status", "deployment/aliquot-scheduler", "--timeout=120s", timeout_seconds=150)
        wait_until_rolled_out(system)
        if not change.endswith("-"):
            yield kueue


@pytest.fixture
def small_node(kubectl: Kubectl) -> Iterator[str]:
    """A node that exists in the API only, with smaller GPUs than the real one."""
    name = "smaller-1"
    devices = [{**device, "memoryMib": SMALL_MIB} for device in inventory(name)["devices"]]
    made = {"apiVersion": API_VERSION, "kind": contract.GPU_NODE_KIND, "metadata": {"name": name}}
    kubectl.apply(node_object(name), made)
    status = json.dumps({"status": {**inventory(name), "devices": devices}})
    kubectl.run("patch", "gpunode", name, "--subresource=status", "--type=merge", f"--patch={status}")
    yield name
    kubectl.delete("gpunode", name)
    kubectl.delete("node", name)


def queue_of_node(node: str, name: str) -> list[Object]:
    """A flavor of one node, and a queue for it."""
    amounts = {contract.RESOURCE_VGPU: 64, contract.RESOURCE_VGPU_MEMORY: GPUS * GPU_MEMORY_MIB}
    resources = [{"name": resource, "nominalQuota": str(amount)} for resource, amount in amounts.items()]
    group = {"coveredResources": list(amounts), "flavors": [{"name": name, "resources": resources}]}
    version, metadata = "kueue.x-k8s.io/v1beta2", {"name": name}
    labels = {"nodeLabels": {"kubernetes.io/hostname": node}}
    return [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": metadata, "spec": labels},
        {"apiVersion": version, "kind": "ClusterQueue", "metadata": metadata, "spec": {"namespaceSelector": {}, "resourceGroups": [group]}},
        {"apiVersion": version, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": name}},
    ]


def knows(kubectl: Kubectl, job: Object) -> bool:
    """Whether a Job with a percentage would be stored with MiB now."""
    stored = json.loads(kubectl.run("create", "--dry-run=server", "--output=json", "--filename=-", stdin=json.dumps(job)))
    return contract.RESOURCE_VGPU_MEMORY in stored["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.soak
@pytest.mark.adopted
@pytest.mark.timeout(400)
def test_kueue_counts_shares_and_whole_gpus_by_flavor_of_queue(
    kubectl: Kubectl, counting_whole_gpus: Kubectl, node_name: str, small_node: str
) -> None:
    del counting_whole_gpus
    asking = {
        "whole": {contract.RESOURCE_VGPU: "1"},
        "half": {contract.RESOURCE_VGPU: "1", contract.RESOURCE_VGPU_MEMORY_PERCENT: "50"},
        "hami": {"nvidia.com/gpu": "2", "nvidia.com/gpumem-percentage": "25"},
    }
    queues = [*queue_of_node(node_name, "large"), *queue_of_node(small_node, "small")]
    kubectl.apply(*queues)
    try:
        eventually(lambda: knows(kubectl, queued_job("probe", asking["half"], "small")), "the webhook to have seen the queues")
        for queue, mib in (("large", GPU_MEMORY_MIB), ("small", SMALL_MIB)):
            kubectl.apply(*(queued_job(f"{name}-{queue}", limits, queue) for name, limits in asking.items()))
            for name, parts in {"whole": [mib], "half": [mib // 2], "hami": [mib // 4] * 2}.items():
                counted = {contract.RESOURCE_VGPU: len(parts), contract.RESOURCE_VGPU_MEMORY: sum(parts)}
                wait_until_counted(kubectl, f"{name}-{queue}", counted)
                if queue == "large":
                    [pod] = running(kubectl, f"{name}-{queue}", 1)
                    assert [device["total_bytes"] // MIB for device in Client(kubectl, pod).devices()] == parts
    finally:
        kubectl.run("delete", "jobs", "--all", "--now")
        # No kubelet ends the pods on the second node.
        kubectl.run("delete", "pods", f"--field-selector=spec.nodeName={small_node}", "--force", "--grace-period=0")
        eventually(lambda: not kubectl.all("pods"), "all pods to be gone", seconds=START_SECONDS)
        for item in reversed(queues):
            kubectl.delete(f"{item['kind'].lower()}.kueue.x-k8s.io", item["metadata"]["name"])


@pytest.mark.timeout(300)
def test_kueue_chooses_node_and_aliquot_chooses_gpus_there(kubectl: Kubectl, kueue: Kubectl, node_name: str) -> None:
    del kueue
    required = {"kueue.x-k8s.io/podset-required-topology": "kubernetes.io/hostname"}
    with shipped(kubectl, "topology"):
        kubectl.apply(queued_job("together", WHOLE.limits, "by-node", pods=2, annotations=required))
        pods = [kubectl.get("pod", name) for name in running(kubectl, "together", 2)]
        assert [pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] for pod in pods] == [node_name] * 2
        assert len({uuid for pod in pods for uuid in assigned_uuids(pod)}) == 2


@pytest.mark.timeout(300)
def test_job_grows_and_shrinks_in_queue_without_losing_its_pods(kubectl: Kubectl, kueue: Kubectl) -> None:
    del kueue
    job = queued_job("elastic", WHOLE.limits, "team-a", pods=2)
    job["metadata"]["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    job["spec"]["completions"] = 2 * GPUS

    def resize(pods: int) -> None:
        kubectl.run("patch", "job", "elastic", f"--patch={json.dumps({'spec': {'parallelism': pods}})}")

    def counted(pods: int) -> None:
        wanted = {contract.RESOURCE_VGPU: pods, contract.RESOURCE_VGPU_MEMORY: pods * GPU_MEMORY_MIB}
        eventually(lambda: slice_counts(kubectl, "elastic") == [wanted], f"Kueue to count {wanted} once", seconds=START_SECONDS,
                   otherwise=lambda: f"{slice_counts(kubectl, 'elastic')}")  # fmt: skip

    with shipped(kubectl, "cohort"):
        kubectl.apply(job)
        first = running(kubectl, "elastic", 2)
        counted(2)
        resize(4)
        assert set(first) < set(running(kubectl, "elastic", 4))
        counted(4)
        resize(GPUS + 1)
        eventually(lambda: "insufficient" in str(newest_slice(kubectl, "elastic")), "Kueue to hold the growth back", seconds=START_SECONDS,
                   otherwise=lambda: str(newest_slice(kubectl, "elastic")))  # fmt: skip
        assert len(running(kubectl, "elastic", 4)) == 4
        resize(3)
        running(kubectl, "elastic", 3)
        counted(3)


def slice_counts(kubectl: Kubectl, owner: str) -> list[dict[str, int]]:
    """What Kueue counts for each workload of an object that is not finished: an elastic job has another one for each size."""
    statuses = [workload.get("status", {}) for workload in workloads_of(kubectl, owner)]
    return [
        {name: int(parse_quantity(amount)) for name, amount in assigned["resourceUsage"].items()}
        for status in statuses
        if not any(one["type"] == "Finished" and one["status"] == "True" for one in status.get("conditions", ()))
        for assigned in status.get("admission", {}).get("podSetAssignments", ())
    ]


def newest_slice(kubectl: Kubectl, owner: str) -> Object:
    """The conditions of the newest workload of an object."""
    found = sorted(workloads_of(kubectl, owner), key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]))
    return {one["type"]: one["message"] for one in found[-1].get("status", {}).get("conditions", ())} if found else {}


OTHER_MODELS = [f"other-model-{number}" for number in range(12)]
"""Jobs that come at once: Kueue writes to some of their workloads while the check does."""


@pytest.mark.timeout(300)
def test_queue_with_check_admits_only_what_fits_on_gpus(kubectl: Kubectl, kueue: Kubectl) -> None:
    del kueue
    with example(kubectl, "kueue-fits"):
        pods = [kubectl.get("pod", name) for name in running(kubectl, "fits", 2)]
        [workload] = workloads_of(kubectl, "fits")
        hold = f"{workload['metadata']['name']}/main"
        assert [pod["metadata"]["annotations"][contract.ANNOTATION_HOLD] for pod in pods] == [hold] * 2
        [check] = workload["status"]["admissionChecks"]
        assert check["state"] == "Ready"
        held = [place.partition("/")[0] for place in check["message"].split()[-2:]]
        assert held == [pod["spec"]["nodeName"] for pod in pods]

        # In sum there is room for these jobs. But "large" finds no GPU for its last pod, and the others want another model.
        kubectl.apply(queued_job("large", Slice(130_000).limits, "fitting-gpus", pods=GPUS - 1))
        wanted = {contract.ANNOTATION_GPU_TYPE: "A100"}
        kubectl.apply(*(queued_job(name, Slice(1024).limits, "fitting-gpus", annotations=wanted) for name in OTHER_MODELS))
        wait_for_reason(kubectl, "large", "6 of 7 pods")
        for name in OTHER_MODELS:
            wait_for_reason(kubectl, name, "0 of 1 pods")
        kubectl.delete("job", "fits")
        running(kubectl, "large", GPUS - 1)


def wait_for_reason(kubectl: Kubectl, job: str, reason: str) -> None:
    """Wait until the admission check says this of a job, which has its quota and is not started."""
    eventually(lambda: reason in answer(kubectl, job), f"the check to say {reason} of {job}", seconds=START_SECONDS,
               otherwise=lambda: explained_check(kubectl, job))  # fmt: skip
    assert condition(kubectl, job, "QuotaReserved")["status"] == "True"
    assert kubectl.get("job", job)["spec"]["suspend"]


def answer(kubectl: Kubectl, job: str) -> str:
    """What the admission check says of a job."""
    return "".join(
        one["message"] for workload in workloads_of(kubectl, job) for one in workload.get("status", {}).get("admissionChecks", ())
    )


def explained_check(kubectl: Kubectl, job: str) -> str:
    """The status of a job's workload, of the checks and queues, and the latest log lines of the schedulers, which answer."""
    statuses = [one.get("status", {}) for one in workloads_of(kubectl, job)]
    others = [
        [kind, one["metadata"]["name"], one.get("status", {})]
        for kind in ("admissionchecks", "clusterqueues", "localqueues")
        for one in kubectl.all(f"{kind}.kueue.x-k8s.io")
    ]
    logs = kubectl.within(AGENT_NAMESPACE).run(
        "logs", "--selector=app.kubernetes.io/name=aliquot-scheduler", "--all-containers", "--prefix", "--tail=40"
    )
    return "\n".join([*(json.dumps(one) for one in [*statuses, *others]), logs])
