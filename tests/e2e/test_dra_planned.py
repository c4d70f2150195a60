# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims that Aliquot's scheduler allocates, on the real API server, kube-scheduler, controllers and kubelet."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    GPUS,
    RESERVATIONS,
    Client,
    Variant,
    scheduler_metric,
    wait_until_schedulers_rolled_out,
)
from tests.e2e.test_dra import claim, measured, offered, pod, request, why
from tests.e2e.test_scheduler_faults import SELECTOR, calls_hang, container_id

LOW, HIGH = "aliquot-best-effort", "aliquot-production"


VARIANT = Variant(("dra", "dra-translate", "dra-planned"))
"""All GPUs are in slices that only our scheduler allocates."""


@pytest.fixture(scope="module", autouse=True)
def planned(product: Kubectl) -> None:
    """All GPUs are offered to our scheduler only."""
    wait_until_tainted(product)


def test_pods_run_on_gpus_of_our_choice_and_others_wait(kubectl: Kubectl) -> None:
    """T19. kube-scheduler would take the first GPU that fits for both pods; ours spreads them."""
    spread = {contract.ANNOTATION_PLACEMENT: "spread"}
    for name in ("one", "two"):
        kubectl.apply(asking(name, {contract.RESOURCE_VGPU_MEMORY: "20Gi"}, annotations=spread))
    left = pod("left", {"main": None}, claim="own")
    left["metadata"]["labels"] = {contract.LABEL_ALLOCATION: "dra"}
    kubectl.apply(claim("own", request(memory="1Gi")), left)
    for name in ("one", "two"):
        running = kubectl.wait_for_phase(name, "Running", seconds=60)
        assert running["metadata"]["labels"][contract.LABEL_ALLOCATION] == "planned"
    assert len({device["uuid"] for name in ("one", "two") for device in Client(kubectl, name).devices()}) == 2
    eventually(
        lambda: "cannot allocate all claims" in str(kubectl.events("left")) or "taint" in str(kubectl.events("left")), "left to wait"
    )
    assert "allocation" not in kubectl.get("resourceclaim", "own").get("status", {})
    kubectl.apply(pod("planned", {"main": None}, claim="own"))
    kubectl.wait_for_phase("planned", "Running", seconds=60)
    kubectl.delete("pod", "planned", "left")
    eventually(lambda: "allocation" not in kubectl.get("resourceclaim", "own").get("status", {}), "the claim to be free", seconds=60)


def test_gang_gets_all_its_gpus_or_none(kubectl: Kubectl) -> None:
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    kubectl.apply(asking("in-the-way", {contract.RESOURCE_VGPU: "1"}))
    kubectl.wait_for_phase("in-the-way", "Running", seconds=60)
    for name in ("first", "second"):
        kubectl.apply(asking(name, {contract.RESOURCE_VGPU: str(GPUS // 2)}, annotations=gang))
    eventually(lambda: all(map(kubectl.events, ("first", "second"))), "an event on both", otherwise=lambda: kubectl.explain("first"))
    assert [name for name in ("first", "second") if allocations(kubectl, name)] == []
    assert f"scheduling gate {contract.PLANNED} holds it back" in (sentence := why(kubectl, "first").sentence)
    assert "no room for 2 members at once" in sentence
    kubectl.delete("pod", "in-the-way")
    for name in ("first", "second"):
        kubectl.wait_for_phase(name, "Running", seconds=60)
        assert len(allocations(kubectl, name)) == GPUS // 2


def test_pod_ends_for_more_important_pod_with_claim(kubectl: Kubectl) -> None:
    kubectl.apply(asking("low", {contract.RESOURCE_VGPU: str(GPUS)}, priorityClassName=LOW))
    kubectl.wait_for_phase("low", "Running", seconds=60)
    kubectl.apply(asking("high", {contract.RESOURCE_VGPU_MEMORY: "20Gi"}, priorityClassName=HIGH))
    kubectl.wait_for_phase("high", "Running", seconds=60)
    # Its claims are free when its containers have ended. kubelet takes the pod out of the API after that.
    low = [one for one in kubectl.all("pods") if one["metadata"]["name"] == "low"]
    assert all("deletionTimestamp" in one["metadata"] for one in low)


def test_pod_of_killed_scheduler_starts_with_the_same_devices_and_leaves_nothing(
    kubectl: Kubectl, product: Kubectl, node: Cluster, node_name: str
) -> None:
    """T19: the scheduler ends after it has written the allocation, while it opens the gate."""
    system = product.within(AGENT_NAMESPACE)
    with calls_hang(product, node, "UPDATE", "pods", "has(oldObject.spec.schedulingGates)"):
        kubectl.apply(asking("cut-off", {contract.RESOURCE_VGPU_MEMORY: "20Gi"}))
        written = eventually(lambda: allocations(kubectl, "cut-off"), "an allocation", otherwise=lambda: why(kubectl, "cut-off").sentence)
        for replica in system.all("pods", SELECTOR):
            node.kill_container(container_id(replica, "extender"))
        assert [gate["name"] for gate in kubectl.get("pod", "cut-off")["spec"]["schedulingGates"]] == [contract.PLANNED]
    kubectl.wait_for_phase("cut-off", "Running", seconds=60)
    assert allocations(kubectl, "cut-off") == written
    kubectl.delete("pod", "cut-off")
    eventually(lambda: not kubectl.all("resourceclaims"), "its claim to be gone")
    wait_until_schedulers_rolled_out(system)
    eventually(lambda: scheduler_metric(system, RESERVATIONS) == 0, "no room to be kept")
    eventually(lambda: not any(measured(product, node_name, "aliquot_device_memory_allocated_bytes")), "no memory to be granted")


def test_claim_that_kube_scheduler_frees_is_planned_on_another_node(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T19. kube-scheduler frees a claim if the pod could run on another node by all other rules."""
    agents = {"labelSelector": {"matchLabels": {"app.kubernetes.io/name": "aliquot-agent"}}, "namespaces": [AGENT_NAMESPACE]}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [{**agents, "topologyKey": "kubernetes.io/hostname"}]}
    anywhere: dict[str, Any] = {"affinity": {"podAntiAffinity": apart}, "tolerations": [{"operator": "Exists"}]}
    kubectl.apply(asking("moves", {contract.RESOURCE_VGPU_MEMORY: "20Gi"}, **anywhere))
    eventually(lambda: "anti-affinity" in str(kubectl.events("moves")), "kube-scheduler to refuse the node of our choice")
    assert {one["pool"] for one in allocations(kubectl, "moves")} == {node_name}
    with twin_of(product, node_name, "twin"):
        eventually(
            lambda: kubectl.get("pod", "moves")["spec"].get("nodeName") == "twin",
            "the pod to be bound to the other node",
            otherwise=lambda: kubectl.explain("moves"),
        )
        assert {one["pool"] for one in allocations(kubectl, "moves")} == {"twin"}
        kubectl.run("delete", "pod", "moves", "--force", "--grace-period=0")  # no kubelet would end it


@contextmanager
def twin_of(product: Kubectl, node_name: str, twin: str) -> Iterator[None]:
    """Have a node with the same GPUs inside the block, which exists in the API only. Pods need tolerations for it."""

    def renamed(found: Any) -> Any:
        return json.loads(json.dumps(found).replace(node_name, twin).replace("GPU-", "GPU-2"))

    made = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": twin, "labels": {"kubernetes.io/hostname": twin}},
        "spec": {"taints": [{"key": "example.com/no-kubelet", "effect": "NoSchedule"}]},
        "status": {"allocatable": {"cpu": "8", "memory": "8Gi", "pods": "8"}},
    }
    inventory = product.get("gpunode", node_name)
    slices = [
        {**found, "metadata": {"name": f"{twin}-{number}"}}
        for number, found in enumerate(product.all("resourceslices", f"--field-selector=spec.driver={contract.DRA_DRIVER}"))
    ]
    product.apply(made, {**inventory, "metadata": {"name": twin}}, *map(renamed, slices))
    try:
        patch = json.dumps({"status": renamed(inventory["status"])})
        product.run("patch", "gpunode", twin, "--subresource=status", "--type=merge", f"--patch={patch}")
        yield
    finally:
        product.delete("resourceslices", *(one["metadata"]["name"] for one in slices))
        product.delete("gpunode", twin)
        product.delete("node", twin)


def asking(name: str, limits: Mapping[str, str], *, annotations: Mapping[str, str] | None = None, **more: Any) -> Object:
    """A pod that requests vGPUs, which become claims."""
    found = pod(name, {"main": None}, claim="", limits=limits, **more)
    found["metadata"]["annotations"] = dict(annotations or {})
    return found


def allocations(kubectl: Kubectl, name: str) -> Sequence[Object]:
    """The devices of a pod's claims."""
    made = [one["resourceClaimName"] for one in kubectl.get("pod", name)["status"].get("resourceClaimStatuses", [])]
    found = [kubectl.get("resourceclaim", one).get("status", {}).get("allocation") for one in made]
    return [result for allocation in found if allocation for result in allocation["devices"]["results"]]


def wait_until_tainted(product: Kubectl) -> None:
    """Wait until only our scheduler allocates the devices, which are all GPUs."""

    def tainted() -> list[bool]:
        return [contract.PLANNED in [taint["key"] for taint in device.get("taints", [])] for device in offered(product)]

    eventually(lambda: tainted() == [True] * GPUS, "the taint on all GPUs", seconds=90, otherwise=lambda: str(offered(product)))
