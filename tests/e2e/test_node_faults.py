# SPDX-License-Identifier: Apache-2.0
"""Parts of the node end under running containers, which notice nothing; new pods work afterwards."""

import time
from collections.abc import Iterator

import pytest

from tests.e2e.cluster.cluster import Cluster
from tests.e2e.invariants import Invariants
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, GPU_MEMORY_MIB, GPUS, Slice, agent_pod, slice_pod, wait_until_agents_rolled_out

CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
API_DOWN_SECONDS = 15.0
"""Longer than kube-scheduler keeps its lease without the API, which is 10 s."""


def test_a_restarted_containerd_keeps_containers(invariants: Invariants, kubectl: Kubectl, node: Cluster) -> None:
    node.restart("containerd")
    eventually(lambda: node_is_ready(kubectl), "the node to be Ready again", seconds=60)
    invariants.hold()


def test_kubelet_without_checkpoint_offers_everything_but_held_gpus_stay_held(
    invariants: Invariants, node: Cluster, product: Kubectl, node_name: str
) -> None:
    node.stop("kubelet")
    assert node.in_node("rm", CHECKPOINT).returncode == 0
    node.start("kubelet")
    invariants.kubelet_forgot()
    wanted = str(GPUS * GPU_MEMORY_MIB)
    eventually(
        lambda: product.get("node", node_name)["status"]["allocatable"].get("nvidia.com/vgpu-memory") == wanted,
        f"{wanted} MiB to be offered again",
        seconds=60,
        otherwise=lambda: str(product.get("node", node_name)["status"]["allocatable"]),
    )
    invariants.hold()


@pytest.mark.timeout(400)
def test_during_api_outage_containers_run_on_and_pods_start_afterwards(
    invariants: Invariants, kubectl: Kubectl, node: Cluster, product: Kubectl, node_name: str
) -> None:
    before = restarts(agent_pod(product, node_name))
    address = agent_pod(product, node_name)["status"]["podIP"]
    node.stop("kube-apiserver")
    try:
        time.sleep(API_DOWN_SECONDS)
        served = node.in_node("busybox", "wget", "-q", "-O-", f"http://{address}:9402/metrics").stdout
    finally:
        node.start("kube-apiserver")
    eventually(lambda: answers(kubectl), "the API server to answer again", seconds=60)
    assert "aliquot_container_memory_used_bytes" in served, "the agent reports usage without the API server"
    invariants.hold(newcomer_seconds=150)  # kube-scheduler lost its lease with the API and must be elected again
    assert restarts(agent_pod(product, node_name)) == before


def restarts(pod: Object) -> int:
    return sum(container["restartCount"] for container in pod["status"]["containerStatuses"])


def node_is_ready(kubectl: Kubectl) -> bool:
    [node] = kubectl.all("nodes")
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in node["status"]["conditions"])


def answers(kubectl: Kubectl) -> bool:
    try:
        kubectl.raw("/readyz")
    except KubectlError:
        return False
    return True


@pytest.mark.timeout(300)
def test_full_disk_refuses_new_pods_with_reason_and_keeps_running_ones(
    state_on_small_disk: str, invariants: Invariants, kubectl: Kubectl, node: Cluster
) -> None:
    filled = node.in_node("dd", "if=/dev/zero", f"of={state_on_small_disk}/filler", "bs=64k")
    assert "No space left" in filled.stderr
    kubectl.apply(slice_pod("waiter", Slice(1024)))
    eventually(
        lambda: "No space left on device" in kubectl.explain("waiter"),
        "the new pod to say that the disk is full",
        otherwise=lambda: kubectl.explain("waiter"),
    )
    invariants.untouched()
    assert node.in_node("rm", f"{state_on_small_disk}/filler").returncode == 0
    kubectl.wait_for_phase("waiter", "Running", seconds=60)
    invariants.hold()


@pytest.fixture
def state_on_small_disk(node: Cluster, product: Kubectl, node_name: str) -> Iterator[str]:
    """The agent's state directory on a small file system of its own, with an agent that runs on it."""
    state, kept = "/var/lib/aliquot", "/var/lib/aliquot-kept"
    node.in_node("cp", "-a", state, kept)
    assert node.in_node("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", state).returncode == 0
    node.in_node("sh", "-c", f"cp -a {kept}/. {state}")
    restart_agent(product, node_name)
    yield state
    node.in_node("sh", "-c", f"rm -rf {kept}/ledger; cp -a {state}/ledger {kept}")
    assert node.in_node("umount", "-l", state).returncode == 0
    node.in_node("sh", "-c", f"rm -rf {state}; mv {kept} {state}")
    restart_agent(product, node_name)


def restart_agent(product: Kubectl, node_name: str) -> None:
    system = product.within(AGENT_NAMESPACE)
    system.run("rollout", "restart", "daemonset/aliquot-agent")
    wait_until_agents_rolled_out(system)
    eventually(lambda: agent_pod(product, node_name), "the next agent")
