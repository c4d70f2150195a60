# SPDX-License-Identifier: Apache-2.0
"""Kueue itself in front of our shares: it counts GPU memory and lets a job go in its turn, and our scheduler places what it let go."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from aliquot import contract
from release.archive import write_archive
from tests.e2e.cluster import images
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.host import KUEUE, built_programs, module_source
from tests.e2e.cluster.paths import BUILD
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import CLIENT_IMAGE, GPUS, HOLD_OPEN, MIB, Client, Slice, assigned_uuids, slice_pod, with_component
from tests.rendering import EXAMPLES

IMAGE = "aliquot.test/kueue:e2e"
SYSTEM = "kueue-system"
QUEUE = "kueue.x-k8s.io/queue-name"
NOBODY = 65532
START_SECONDS = 90
CERTIFIED_SECONDS = 300
"""Kueue is ready once kubelet has renewed the files of the Secret it wrote its certificate to: up to ninety seconds on an idle node."""


@pytest.fixture(scope="module")
def kueue(product: Kubectl, node: Cluster) -> Iterator[Kubectl]:
    """The product together with Kueue, from Kueue's own manifests; gone afterwards."""
    rootfs = images.Rootfs(files={"manager": built_programs(KUEUE) / "kueue"})
    archive = BUILD / "images/kueue.tar"
    write_archive(archive, IMAGE, [rootfs.layer()], {"Entrypoint": ["/manager"], "User": str(NOBODY)})
    node.import_image(archive)
    objects = list(yaml.safe_load_all(product.run("kustomize", str(module_source(KUEUE.module) / "config/default"))))
    [manager] = [item for item in objects if item["kind"] == "Deployment"]
    manager["spec"]["template"]["spec"]["containers"][0].update(image=IMAGE, imagePullPolicy="IfNotPresent")
    try:
        product.run("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(objects))
        system = product.within(SYSTEM)
        eventually(lambda: ready(system), "Kueue to be ready", seconds=CERTIFIED_SECONDS, otherwise=lambda: why_not_ready(system))
        eventually(lambda: serves(product), "Kueue's webhooks to answer", seconds=START_SECONDS)
        yield product
    finally:
        objects.sort(key=lambda item: "WebhookConfiguration" not in item["kind"])  # they refuse everybody's pods once Kueue is not there
        text = yaml.safe_dump_all(objects)
        product.run("delete", "--ignore-not-found", "--filename=-", stdin=text, timeout_seconds=START_SECONDS)


def ready(system: Kubectl) -> bool:
    """Whether Kueue's one pod is ready."""
    [deployment] = system.all("deployments")
    return bool(deployment.get("status", {}).get("readyReplicas"))


def why_not_ready(system: Kubectl) -> str:
    """What there is to say of a Kueue that is not ready: its pods, and the last lines of each that ran."""
    said = []
    for pod in system.all("pods"):
        name = pod["metadata"]["name"]
        said.append(system.explain(name))
        if pod["status"].get("containerStatuses", [{}])[0].get("containerID"):
            said.append(system.logs(name, "--tail=12"))
    return "\n".join(said)


def serves(kubectl: Kubectl) -> bool:
    """Whether Kueue takes objects: its certificate comes a moment after its pod."""
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "probe"}}
    try:
        kubectl.run("apply", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(flavor))
    except AssertionError:
        return False
    return True


@pytest.fixture
def queue(kueue: Kubectl, kubectl: Kubectl) -> Iterator[list[Object]]:
    """The example, unchanged except for its image; gone afterwards, its job first."""
    del kueue
    objects = list(yaml.safe_load_all((EXAMPLES / "kueue.yaml").read_text()))
    [job] = [item for item in objects if item["kind"] == "Job"]
    for container in job["spec"]["template"]["spec"]["containers"]:
        container.update(image=CLIENT_IMAGE, imagePullPolicy="IfNotPresent")
    try:
        kubectl.run("apply", "--validate=strict", "--filename=-", stdin=yaml.safe_dump_all(objects))
        yield objects
    finally:
        kubectl.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)
        for item in reversed(objects):
            kubectl.delete(item["kind"], item["metadata"]["name"])


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
        return kubectl.run("get", "pods,workloads", "--output=yaml")[-3000:]

    found: list[str] = eventually(names, f"{count} pods of job {job} to run", seconds=START_SECONDS, otherwise=explained)
    return found


def why_waiting(kubectl: Kubectl, job: str) -> str:
    """What Kueue says of a job that it does not let go; nothing while it has not said."""
    for workload in kubectl.all("workloads"):
        if any(owner["name"] == job for owner in workload["metadata"]["ownerReferences"]):
            conditions = {one["type"]: one for one in workload.get("status", {}).get("conditions", [])}
            reserved = conditions.get("QuotaReserved", {})
            return str(reserved["message"]) if reserved.get("status") == "False" else ""
    return ""


def queued_job(name: str, wanted: Slice) -> Object:
    """A job of one pod, for the example's queue."""
    container = {"name": "main", "image": CLIENT_IMAGE, "command": [*HOLD_OPEN], "resources": {"limits": wanted.limits}}
    template = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}}
    spec = {"suspend": True, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": {QUEUE: "gpus"}}, "spec": spec}


@pytest.mark.timeout(300)
def test_kueue_counts_share_memory_and_job_waits_until_enough_is_free(kubectl: Kubectl, queue: list[Object]) -> None:
    first = next(item["metadata"]["name"] for item in queue if item["kind"] == "Job")
    pods = running(kubectl, first, 2)
    for pod in pods:
        assert [device["total_bytes"] for device in Client(kubectl, pod).devices()] == [16384 * MIB]
    expected = {contract.RESOURCE_VGPU: 2, contract.RESOURCE_VGPU_MEMORY: 2 * 16384}
    eventually(lambda: used(kubectl) == expected, f"the queue to count {expected}", otherwise=lambda: str(used(kubectl)))

    kubectl.apply(queued_job("large", Slice(245760, vgpus=2)))
    said = eventually(lambda: why_waiting(kubectl, "large"), "Kueue to say why the second job waits")
    assert f"insufficient unused quota for {contract.RESOURCE_VGPU_MEMORY} in flavor shared-gpus" in said
    assert kubectl.get("job", "large")["spec"]["suspend"]

    kubectl.delete("job", first)
    [pod] = running(kubectl, "large", 1)
    assert [device["total_bytes"] for device in Client(kubectl, pod).devices()] == [122880 * MIB] * 2


# --- the admission check: a workload is admitted only when its pods fit on real GPUs ---

ACTIVE_SECONDS = 60
OTHER_MIB, FRAGMENT_JOB_MIB = 60_000, 100_000
"""A pod outside of queues on each GPU leaves less than the job needs, and eight times as much in sum."""


@pytest.fixture
def checked_queue(kubectl: Kubectl, kueue: Kubectl, scratch_in_tree: Path) -> Iterator[Kubectl]:
    """The example's queue with the admission check, answered by the scheduler; gone afterwards."""
    objects = [item for item in yaml.safe_load_all((EXAMPLES / "kueue-fits.yaml").read_text()) if item["kind"] != "Job"]
    with with_component(kueue, "kueue", scratch_in_tree):
        try:
            kubectl.run("apply", "--validate=strict", "--filename=-", stdin=yaml.safe_dump_all(objects))
            eventually(lambda: is_active(kubectl), "the admission check to be Active", seconds=ACTIVE_SECONDS)
            yield kubectl
        finally:
            kubectl.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)
            for item in reversed(objects):
                kubectl.delete(item["kind"], item["metadata"]["name"])


def is_active(kubectl: Kubectl) -> bool:
    conditions = kubectl.get("admissionchecks.kueue.x-k8s.io", "gpus-fit").get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) == ("Active", "True") for one in conditions)


def check_of(kubectl: Kubectl, job: str) -> Object:
    """The entry of the admission check in a job's workload; empty while there is none."""
    for workload in kubectl.all("workloads.kueue.x-k8s.io"):
        if any(owner["name"] == job for owner in workload["metadata"]["ownerReferences"]):
            return next(iter(workload.get("status", {}).get("admissionChecks", [])), {})
    return {}


def checked_job(name: str, count: int, mib: int) -> Object:
    job = queued_job(name, Slice(mib))
    job["metadata"]["labels"][QUEUE] = "fitting-gpus"
    job["spec"] |= {"parallelism": count, "completions": count}
    return job


@pytest.mark.timeout(600)
def test_job_is_admitted_when_a_gpu_takes_it_and_its_seat_is_held(checked_queue: Kubectl) -> None:
    kubectl, spread = checked_queue, {contract.ANNOTATION_PLACEMENT: "spread"}
    others = [f"other-{number}" for number in range(GPUS)]
    for name in others:
        kubectl.apply(slice_pod(name, Slice(OTHER_MIB), annotations=spread))
        kubectl.wait_for_phase(name, "Running", seconds=START_SECONDS)

    # The sum is enough for Kueue, and no GPU is: the job waits with the reason, and has no pod.
    kubectl.apply(checked_job("fragment", 1, FRAGMENT_JOB_MIB))
    said = eventually(lambda: check_of(kubectl, "fragment").get("message", ""), "the reason why the job waits")
    assert "0 of 1 pods of pod set main fit now" in said
    assert check_of(kubectl, "fragment")["state"] == "Pending"
    assert kubectl.get("job", "fragment")["spec"]["suspend"]

    # Room on one GPU: the job is admitted and runs there.
    [freed] = assigned_uuids(kubectl.get("pod", others[0]))
    kubectl.delete("pod", others[0])
    eventually(lambda: check_of(kubectl, "fragment")["state"] == "Ready", "the check to be Ready", seconds=ACTIVE_SECONDS)
    [pod] = running(kubectl, "fragment", 1)
    assert assigned_uuids(kubectl.get("pod", pod)) == [freed]
    assert kubectl.get("pod", pod)["metadata"]["annotations"][contract.ANNOTATION_HOLD].endswith("/main")
    assert check_of(kubectl, "fragment")["message"].startswith("Seats are held: main ")
