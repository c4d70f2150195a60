# SPDX-License-Identifier: Apache-2.0
"""MPS: a control daemon for each GPU with clients, kept by aliquot-mps. It outlives agents, and ends with aliquot-mps.

The simulated driver has no MPS. Where a real node has nvidia-cuda-mps-control, a ConfigMap with tests/fakes/mps_daemon.py is mounted here.
"""

import pytest

from agent.core.mps import DAEMONS_DIRECTORY, pipe_directory
from aliquot import contract
from tests.e2e.cluster.paths import ROOT
from tests.e2e.invariants import PYTHON
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    CLIENT,
    Slice,
    Variant,
    agent_pod,
    assigned_uuids,
    explain,
    metrics,
    patch,
    pod_on,
    slice_pod,
)
from tests.e2e.test_restarts import another_agent_is_ready

PROGRAM = "nvidia-cuda-mps-control"
POD = "/spec/template/spec"
CONTAINER = f"{POD}/containers/0"
VOLUME = {"name": "program", "configMap": {"name": "mps-program", "defaultMode": 0o755}}
VARIANT = Variant(
    ("mps",),
    (
        patch(
            "DaemonSet", "aliquot-mps",
            {"op": "add", "path": f"{CONTAINER}/env/-", "value": {"name": "ALIQUOT_MPS_CONTROL", "value": f"/opt/mps/{PROGRAM}"}},
            {"op": "add", "path": f"{CONTAINER}/volumeMounts/-", "value": {"name": "program", "mountPath": "/opt/mps", "readOnly": True}},
            {"op": "add", "path": f"{POD}/volumes/-", "value": VOLUME},
        ),
    ),
    config_maps=({"name": "mps-program", "namespace": AGENT_NAMESPACE, "files": [PROGRAM]},),
    files={PROGRAM: f"#!{PYTHON} -S\n{(ROOT / 'tests/fakes/mps_daemon.py').read_text()}"},
)  # fmt: skip
MIB = 4096
HELD_MIB = 64


@pytest.fixture(scope="module", autouse=True)
def with_mps(product: Kubectl) -> None:
    """Each agent has an aliquot-mps."""
    wait_until_supervised(product.within(AGENT_NAMESPACE))


@pytest.fixture
def client(kubectl: Kubectl, product: Kubectl, node_name: str) -> Object:
    """A pod that runs as a client of MPS."""
    wait_for_offer(product, node_name, offered=True)
    kubectl.apply(mps_pod("client"))
    return kubectl.wait_for_phase("client", "Running", seconds=60)


def test_a_client_has_its_limits_and_the_daemon_of_its_gpu(kubectl: Kubectl, product: Kubectl, node_name: str, client: Object) -> None:
    environment = kubectl.exec("client", "env").splitlines()
    assert f"CUDA_MPS_PIPE_DIRECTORY={contract.CONTAINER_MPS_PIPE}" in environment
    assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={MIB}M" in environment
    assert "control" in kubectl.exec("client", "ls", contract.CONTAINER_MPS_PIPE).split()
    pid = daemon_pid(product, node_name, client)
    assert is_daemon(product, node_name, pid)
    kubectl.delete("pod", "client")
    eventually(lambda: not is_daemon(product, node_name, pid), "the daemon to be gone with its last client")


def test_an_agent_that_is_replaced_leaves_daemon_and_client_alone(
    kubectl: Kubectl, product: Kubectl, node_name: str, client: Object
) -> None:
    pid, supervisor = daemon_pid(product, node_name, client), supervisor_pod(product, node_name)["metadata"]["uid"]
    old = agent_pod(product, node_name)["metadata"]
    product.within(AGENT_NAMESPACE).delete("pod", old["name"])
    eventually(lambda: another_agent_is_ready(product, node_name, old["uid"]), "the next agent to be ready", seconds=60)
    wait_for_offer(product, node_name, offered=True)
    kubectl.apply(mps_pod("after", on_gpu=assigned_uuids(client)[0]))
    kubectl.wait_for_phase("after", "Running", seconds=60)
    assert daemon_pid(product, node_name, client) == pid
    assert is_daemon(product, node_name, pid)
    assert supervisor_pod(product, node_name)["metadata"]["uid"] == supervisor
    assert container_of(kubectl.get("pod", "client")) == container_of(client)
    assert not [event for event in kubectl.events("client") if event.startswith(contract.EVENT_REASON_MPS_RESTARTED)]


def test_changed_pod_template_replaces_no_supervisor_and_its_removal_ends_daemons(
    kubectl: Kubectl, product: Kubectl, node_name: str, client: Object
) -> None:
    """The last scenario of this module: what it removes stays away."""
    system, pid = product.within(AGENT_NAMESPACE), daemon_pid(product, node_name, client)
    supervisor = supervisor_pod(product, node_name)["metadata"]["uid"]
    system.run("set", "env", "daemonset/aliquot-mps", "ALIQUOT_LOG_LEVEL=debug")
    generation = system.get("daemonset", "aliquot-mps")["metadata"]["generation"]
    eventually(lambda: system.get("daemonset", "aliquot-mps")["status"].get("observedGeneration") == generation, "the change to be seen")
    assert supervisor_pod(product, node_name)["metadata"]["uid"] == supervisor
    assert is_daemon(product, node_name, pid)
    system.delete("daemonset", "aliquot-mps")
    eventually(lambda: not is_daemon(product, node_name, pid), "the daemon to end with aliquot-mps", seconds=60)
    eventually(lambda: supervisor_up(product, node_name) == 0, "the metrics to say that MPS clients have no supervisor")
    wait_for_offer(product, node_name, offered=False)
    assert container_of(kubectl.get("pod", "client")) == container_of(client)


def container_of(pod: Object) -> tuple[str, int]:
    """Which container a pod of one has, and how often it was started again."""
    [status] = pod["status"]["containerStatuses"]
    return status["containerID"], status["restartCount"]


def mps_pod(name: str, on_gpu: str | None = None) -> Object:
    """A pod that wants MPS and holds some memory."""
    annotations = {contract.ANNOTATION_ISOLATION: "mps", **({contract.ANNOTATION_GPU_UUID: on_gpu} if on_gpu is not None else {})}
    return slice_pod(name, Slice(MIB), [CLIENT, "hold", "--mib", str(HELD_MIB)], annotations)


def wait_until_supervised(system: Kubectl) -> None:
    """Wait until aliquot-mps runs on every node that has an agent."""

    def runs() -> bool:
        status = system.get("daemonset", "aliquot-mps")["status"]
        return 0 < status.get("desiredNumberScheduled", 0) == status.get("numberReady", 0)

    eventually(runs, "aliquot-mps on every node", seconds=60, otherwise=lambda: explain(system, "mps"))


def wait_for_offer(product: Kubectl, node_name: str, *, offered: bool) -> None:
    """Wait until the node's inventory offers isolation mps, or does not."""

    def reported() -> list[str]:
        isolation: list[str] = product.get("gpunode", node_name)["status"].get("isolation", [])
        return isolation

    what = f"isolation mps {'to be' if offered else 'no longer to be'} offered"
    eventually(lambda: ("mps" in reported()) is offered, what, seconds=90, otherwise=lambda: f"offered: {reported()}")


def supervisor_pod(product: Kubectl, node_name: str) -> Object:
    """The pod aliquot-mps of a node."""
    return pod_on(product, "aliquot-mps", node_name)


def daemon_pid(product: Kubectl, node_name: str, client: Object) -> int:
    """The process, on the node, of the daemon that serves a pod."""
    [uuid] = assigned_uuids(client)
    pipes = pipe_directory(f"{contract.RUNTIME_DIR}/{DAEMONS_DIRECTORY}", uuid)
    name = supervisor_pod(product, node_name)["metadata"]["name"]
    return int(product.within(AGENT_NAMESPACE).exec(name, "cat", f"{pipes}/{PROGRAM}.pid"))


def is_daemon(product: Kubectl, node_name: str, pid: int) -> bool:
    """Whether a process of the node is a daemon; asked in the agent's container, which sees all of them."""
    agent = agent_pod(product, node_name)["metadata"]["name"]
    try:
        return PROGRAM in product.within(AGENT_NAMESPACE).exec(agent, "cat", f"/proc/{pid}/cmdline", container="agent")
    except KubectlError as exc:
        if "No such " in str(exc):  # file, or process, where it ends at that moment
            return False
        raise


def supervisor_up(product: Kubectl, node_name: str) -> float | None:
    """What the agent reports of aliquot-mps; None without that metric."""
    return next((value for name, _, value in metrics(product, node_name) if name == "aliquot_mps_supervisor_up"), None)
