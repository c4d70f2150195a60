# SPDX-License-Identifier: Apache-2.0
"""Agent and kubelet restart under running containers, which notice nothing; new pods work afterwards."""

import pytest

from tests.e2e.cluster.cluster import Cluster
from tests.e2e.invariants import Invariants
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, GPU_MEMORY_MIB, GPUS, agent_pod


def test_a_new_agent_finds_running_containers_as_the_old_one_left_them(invariants: Invariants, product: Kubectl, node_name: str) -> None:
    old = agent_pod(product, node_name)["metadata"]
    product.within(AGENT_NAMESPACE).delete("pod", old["name"])
    eventually(lambda: another_agent_is_ready(product, node_name, old["uid"]), "the next agent to be ready", seconds=60)
    invariants.hold()


@pytest.mark.timeout(500)
def test_a_killed_agent_is_back_and_running_containers_noticed_nothing(
    invariants: Invariants, product: Kubectl, node: Cluster, node_name: str
) -> None:
    kill_agent(product, node, node_name)
    invariants.hold()


def test_a_restarted_kubelet_keeps_containers_and_capacity(invariants: Invariants, product: Kubectl, node: Cluster, node_name: str) -> None:
    node.restart("kubelet")
    invariants.hold()
    capacity = product.get("node", node_name)["status"]["capacity"]
    assert capacity["nvidia.com/vgpu-memory"] == str(GPUS * GPU_MEMORY_MIB)


def kill_agent(product: Kubectl, node: Cluster, node_name: str) -> None:
    """End the agent's process without a word, and wait until the next one is ready."""
    end_agent(product, node, node_name)
    eventually(lambda: _agent_container(product, node_name)["ready"], "the agent's next container to be ready", seconds=150)


def end_agent(product: Kubectl, node: Cluster, node_name: str) -> None:
    """End the agent's process without a word, and wait until kubelet has started another."""
    old = _agent_container(product, node_name)
    node.kill_container(old["containerID"])
    eventually(lambda: _is_running_after(product, node_name, old["restartCount"]), "the agent's next container to run", seconds=150)


def another_agent_is_ready(product: Kubectl, node_name: str, old_uid: str) -> bool:
    """Whether an agent of another pod serves the node."""
    try:
        pod = agent_pod(product, node_name)
    except LookupError:
        return False  # the DaemonSet has not made it yet
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in pod["status"].get("conditions", []))
    return pod["metadata"]["uid"] != old_uid and ready


def _agent_container(product: Kubectl, node_name: str) -> Object:
    """State of the agent's container."""
    return agent_pod(product, node_name)["status"]["containerStatuses"][0]


def _is_running_after(product: Kubectl, node_name: str, restarts: int) -> bool:
    container = _agent_container(product, node_name)
    return container["restartCount"] > restarts and "running" in container["state"]
