# SPDX-License-Identifier: Apache-2.0
"""The ground the other scenarios stand on: a real node that is Ready and runs pods."""

from pathlib import Path

from tests.e2e.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.e2e.conftest import Target
from tests.e2e.kubectl import Kubectl, Object


def busybox_pod(name: str, script: str) -> Object:
    """A pod that runs a shell script once."""
    container = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", script]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"restartPolicy": "Never", "containers": [container]}}


def test_every_node_is_ready(target: Target) -> None:
    nodes = target.kubectl.all("nodes")
    conditions = {node["metadata"]["name"]: {c["type"]: c["status"] for c in node["status"]["conditions"]} for node in nodes}
    assert conditions
    assert all(condition["Ready"] == "True" for condition in conditions.values()), conditions


def test_a_pod_runs_and_its_logs_are_read_through_the_api_server(kubectl: Kubectl) -> None:
    kubectl.apply(busybox_pod("hello", "echo said by a real container"))
    kubectl.wait_for_phase("hello", "Succeeded")
    assert kubectl.logs("hello") == "said by a real container\n"


def test_a_command_runs_inside_a_running_pod(kubectl: Kubectl) -> None:
    kubectl.apply(busybox_pod("sleeper", "sleep 600"))
    kubectl.wait_for_phase("sleeper", "Running")
    assert kubectl.exec("sleeper", "hostname") == "sleeper\n"


def test_a_pod_reaches_the_api_server_by_its_service_address(kubectl: Kubectl) -> None:
    kubectl.apply(busybox_pod("caller", "nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null && echo reached"))
    kubectl.wait_for_phase("caller", "Succeeded", "Failed")
    assert kubectl.logs("caller") == "reached\n"


def test_a_killed_kubelet_comes_back_and_leaves_a_running_pod_alone(kubectl: Kubectl, node: Cluster) -> None:
    kubectl.apply(busybox_pod("bystander", "sleep 600"))
    before = kubectl.wait_for_phase("bystander", "Running")["status"]["containerStatuses"][0]["containerID"]
    node.kill("kubelet")
    kubectl.apply(busybox_pod("after", "true"))
    kubectl.wait_for_phase("after", "Succeeded", seconds=60)
    assert kubectl.get("pod", "bystander")["status"]["containerStatuses"][0]["containerID"] == before


def test_what_the_node_mounts_and_connects_is_not_seen_on_the_machine(node: Cluster) -> None:
    assert node.in_node("test", "-d", "/var/lib/kubelet/pods").returncode == 0
    assert node.in_node("ip", "link", "show", "e2e0").returncode == 0
    assert not Path("/sys/class/net/e2e0").exists()
    assert "/var/lib/kubelet" not in Path("/proc/self/mounts").read_text()
