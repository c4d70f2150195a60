# SPDX-License-Identifier: Apache-2.0
"""How pods with GPUs behave as parts of ordinary workloads: in quotas, priorities, sets, and beside other containers."""

import pytest

from aliquot import contract
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import (
    CLIENT,
    CLIENT_IMAGE,
    GPU_MEMORY_MIB,
    GPUS,
    HOLD_OPEN,
    MIB,
    Client,
    Slice,
    assigned_uuids,
    parse_events,
    slice_pod,
)

pytestmark = pytest.mark.usefixtures("product")


def gpu_container(name: str, wanted: Slice, *command: str) -> Object:
    """One container of a pod."""
    return {
        "name": name,
        "image": CLIENT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command or HOLD_OPEN),
        "resources": {"limits": wanted.limits},
    }


def test_init_container_sidecar_and_containers_each_have_a_slice_of_their_own(kubectl: Kubectl) -> None:
    pod = slice_pod("family", Slice(1))
    pod["spec"]["initContainers"] = [
        gpu_container("prepare", Slice(6000), CLIENT, "info"),
        gpu_container("sidecar", Slice(1000)) | {"restartPolicy": "Always"},
    ]
    pod["spec"]["containers"] = [gpu_container("first", Slice(2000)), gpu_container("second", Slice(3000))]
    kubectl.apply(pod)
    kubectl.wait_for_phase("family", "Running")
    seen = {"prepare": parse_events(kubectl.logs("family", "--container=prepare"))[-1]["total_bytes"] // MIB}
    for name in ("sidecar", "first", "second"):
        said = parse_events(kubectl.exec("family", CLIENT, "info", container=name))
        seen[name] = said[-1]["total_bytes"] // MIB
    assert seen == {"prepare": 6000, "sidecar": 1000, "first": 2000, "second": 3000}


def test_container_without_gpu_request_sees_no_gpu(kubectl: Kubectl) -> None:
    pod = slice_pod("mixed", Slice(1024))
    plain = gpu_container("plain", Slice(1))
    del plain["resources"]
    pod["spec"]["containers"].append(plain)
    kubectl.apply(pod)
    kubectl.wait_for_phase("mixed", "Running")
    assert kubectl.exec("mixed", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES", container="plain") == "void\n"
    with pytest.raises(KubectlError):
        kubectl.exec("mixed", CLIENT, "info", container="plain")


@pytest.mark.adopted
def test_quota_counts_mebibytes_in_every_vocabulary(kubectl: Kubectl) -> None:
    hard = {f"requests.{contract.RESOURCE_VGPU_MEMORY}": "5001"}
    kubectl.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpu"}, "spec": {"hard": hard}})
    eventually(lambda: "hard" in kubectl.get("resourcequota", "gpu").get("status", {}), "the quota to count")
    kubectl.apply(slice_pod("within", Slice(4001)))
    beyond = [slice_pod("beyond", Slice(2001)), slice_pod("beyond-in-hamis-words", Slice(2001))]
    beyond[1]["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "2001"}
    for pod in beyond:
        with pytest.raises(KubectlError, match=r"exceeded quota: gpu, requested: requests\.nvidia\.com/vgpu-memory=2001"):
            kubectl.apply(pod)


def test_production_work_takes_one_gpu_from_best_effort_and_leaves_others(kubectl: Kubectl) -> None:
    for number in range(GPUS):
        kubectl.apply(with_priority(slice_pod(f"filler-{number}", Slice(GPU_MEMORY_MIB)), "aliquot-best-effort"))
    for number in range(GPUS):
        kubectl.wait_for_phase(f"filler-{number}", "Running", seconds=60)
    kubectl.apply(with_priority(slice_pod("important", Slice(GPU_MEMORY_MIB // 2)), "aliquot-production"))
    kubectl.wait_for_phase("important", "Running", seconds=60)

    def others() -> list[str]:
        return [pod["metadata"]["name"] for pod in kubectl.all("pods") if pod["metadata"]["name"] != "important"]

    eventually(lambda: len(others()) < GPUS, "the pod whose GPU was taken to be gone")  # its object outlives its containers
    assert len(others()) == GPUS - 1
    assert Client(kubectl, "important").devices()[0]["total_bytes"] == GPU_MEMORY_MIB // 2 * MIB


def test_victim_is_pod_that_its_budget_allows_to_end(kubectl: Kubectl) -> None:
    """The node as a whole has enough free, so kube-scheduler proposes no victim; the extender chooses which GPU is freed."""
    fillers = [
        with_priority(slice_pod(f"filler-{number}", Slice(GPU_MEMORY_MIB * 6 // 10)), "aliquot-best-effort") for number in range(GPUS)
    ]
    for pod in fillers[1:]:
        pod["metadata"]["labels"] = {"keep": "me"}
    spec = {"minAvailable": GPUS - 1, "selector": {"matchLabels": {"keep": "me"}}}
    kubectl.apply(*fillers, {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "keep"}, "spec": spec})
    eventually(
        lambda: kubectl.get("poddisruptionbudget", "keep").get("status", {}).get("currentHealthy") == GPUS - 1,
        "the budget to count its pods",
        seconds=60,
        otherwise=lambda: kubectl.explain("filler-1"),
    )
    kubectl.apply(with_priority(slice_pod("important", Slice(GPU_MEMORY_MIB * 8 // 10)), "aliquot-production"))
    kubectl.wait_for_phase("important", "Running", seconds=60)
    left = {pod["metadata"]["name"] for pod in kubectl.all("pods") if "deletionTimestamp" not in pod["metadata"]}
    assert left == {"important", *(pod["metadata"]["name"] for pod in fillers[1:])}


def with_priority(pod: Object, name: str) -> Object:
    pod["spec"]["priorityClassName"] = name
    return pod


def test_a_pod_that_waits_starts_as_soon_as_another_leaves(kubectl: Kubectl, shared_gpu: str) -> None:
    only = {contract.ANNOTATION_GPU_UUID: shared_gpu}
    kubectl.apply(slice_pod("holder", Slice(GPU_MEMORY_MIB), annotations=only))
    kubectl.wait_for_phase("holder", "Running")
    kubectl.apply(slice_pod("waiter", Slice(2048), annotations=only))
    eventually(
        lambda: [event for event in kubectl.events("waiter") if event.startswith("FailedScheduling")],
        "an event that the pod waits",
        otherwise=lambda: kubectl.explain("waiter"),
    )
    kubectl.delete("pod", "holder")
    kubectl.wait_for_phase("waiter", "Running")


def test_next_pod_of_stateful_set_gets_own_share_under_same_name(kubectl: Kubectl) -> None:
    template = slice_pod("unused", Slice(3072))
    template["spec"]["restartPolicy"] = "Always"
    spec = {
        "serviceName": "none",
        "selector": {"matchLabels": {"app": "set"}},
        "template": {"metadata": {"labels": {"app": "set"}}, "spec": template["spec"]},
    }
    kubectl.apply({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "set"}, "spec": spec})
    eventually(lambda: phase(kubectl, "set-0") == "Running", "the set's pod to run", otherwise=lambda: kubectl.explain("set-0"))
    first = kubectl.get("pod", "set-0")
    kubectl.delete("pod", "set-0")
    eventually(
        lambda: phase(kubectl, "set-0") == "Running" and kubectl.get("pod", "set-0")["metadata"]["uid"] != first["metadata"]["uid"],
        "the set's next pod to run",
        otherwise=lambda: kubectl.explain("set-0"),
    )
    [device] = Client(kubectl, "set-0").devices()
    assert [f"GPU-{device['uuid']}"] == assigned_uuids(kubectl.get("pod", "set-0"))
    assert device["total_bytes"] == 3072 * MIB
    kubectl.delete("statefulset", "set")


def phase(kubectl: Kubectl, pod: str) -> str:
    """A pod's phase; nothing while there is no such pod."""
    found = [item for item in kubectl.all("pods") if item["metadata"]["name"] == pod]
    return found[0]["status"].get("phase", "") if found else ""
