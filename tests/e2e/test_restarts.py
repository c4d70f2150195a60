"""Agent and kubelet restart under running containers, which notice nothing; new pods work afterwards."""

from tests.e2e.cluster.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, GPU_MEMORY_MIB, GPUS, MIB, Client, Slice, agent_pod, slice_pod

HELD_MIB = 2048
LIMIT_MIB = 6144


def test_a_new_agent_finds_running_containers_as_the_old_one_left_them(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    container = _start_holder(kubectl)
    old = agent_pod(product, node_name)["metadata"]
    product.within(AGENT_NAMESPACE).delete("pod", old["name"])
    eventually(lambda: _another_agent_is_ready(product, node_name, old["uid"]), "the next agent to be ready", seconds=60)
    _assert_untouched(kubectl, container)
    _assert_a_new_pod_runs(kubectl)


def test_a_killed_agent_is_back_and_running_containers_noticed_nothing(
    kubectl: Kubectl, product: Kubectl, node: Cluster, node_name: str
) -> None:
    container = _start_holder(kubectl)
    agent = _agent_container(product, node_name)
    node.kill_container(agent["containerID"])
    eventually(lambda: _is_ready_after(product, node_name, agent["restartCount"]), "the agent's next container to be ready", seconds=60)
    _assert_untouched(kubectl, container)
    _assert_a_new_pod_runs(kubectl)


def test_a_restarted_kubelet_keeps_containers_and_capacity(kubectl: Kubectl, product: Kubectl, node: Cluster, node_name: str) -> None:
    container = _start_holder(kubectl)
    node.restart("kubelet")
    _assert_a_new_pod_runs(kubectl)
    _assert_untouched(kubectl, container)
    capacity = product.get("node", node_name)["status"]["capacity"]
    assert capacity["nvidia.com/vgpu-memory"] == str(GPUS * GPU_MEMORY_MIB)


def _start_holder(kubectl: Kubectl) -> str:
    """Start a pod that holds memory, and return its container's ID."""
    kubectl.apply(slice_pod("holder", Slice(LIMIT_MIB), ["/bin/aliquot-cuda-client", "hold", "--mib", str(HELD_MIB)]))
    return kubectl.wait_for_phase("holder", "Running")["status"]["containerStatuses"][0]["containerID"]


def _assert_untouched(kubectl: Kubectl, container: str) -> None:
    """The same container still runs, still holds what it held, and its limit still counts it."""
    [status] = kubectl.get("pod", "holder")["status"]["containerStatuses"]
    assert (status["containerID"], status["restartCount"]) == (container, 0)
    [device] = Client(kubectl, "holder").devices()
    assert device["total_bytes"] == LIMIT_MIB * MIB
    assert device["free_bytes"] <= (LIMIT_MIB - HELD_MIB) * MIB


def _assert_a_new_pod_runs(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("newcomer", Slice(1024)))
    kubectl.wait_for_phase("newcomer", "Running", seconds=60)
    assert Client(kubectl, "newcomer").devices()[0]["total_bytes"] == 1024 * MIB


def _agent_container(product: Kubectl, node_name: str) -> Object:
    """State of the agent's container."""
    return agent_pod(product, node_name)["status"]["containerStatuses"][0]


def _is_ready_after(product: Kubectl, node_name: str, restarts: int) -> bool:
    container = _agent_container(product, node_name)
    return container["restartCount"] > restarts and container["ready"]


def _another_agent_is_ready(product: Kubectl, node_name: str, old_uid: str) -> bool:
    try:
        pod = agent_pod(product, node_name)
    except AssertionError:
        return False  # the DaemonSet has not made it yet
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in pod["status"].get("conditions", []))
    return pod["metadata"]["uid"] != old_uid and ready
