"""The product under test, installed as users install it, and the pods that use it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.cluster import images
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.dockerfile import build_image
from tests.e2e.cluster.paths import BUILD, ROOT
from tests.e2e.kubectl import Kubectl, Object, eventually

AGENT_IMAGE = "aliquot.dev/aliquot-agent:0.1.0"
AGENT_NAMESPACE = "aliquot-system"
CLIENT_IMAGE = "aliquot.test/cuda-client:e2e"
SIMULATED_OVERLAY = ROOT / "deploy/daemonset/overlays/simulated"
DOCKERFILE = ROOT / "deploy/daemonset/Dockerfile"
INSTALL_SECONDS = 90

GPUS = 8
GPU_MEMORY_MIB = 143151
"""The node of the simulated overlay: eight H200 (cuda_shim/sim/profiles/h200x8), each 143771 MiB of which the driver keeps 620."""
SHARES_PER_GPU = 16
"""The agent's default."""
MIB = 1 << 20


def agent_image() -> Path:
    """Build the agent's image from its Dockerfile, and return the archive."""
    return build_image(DOCKERFILE, ROOT, AGENT_IMAGE, BUILD / "images/agent")


def install(kubectl: Kubectl, local: Cluster | None) -> None:
    """Install the agent with the simulated driver on every node, from the manifests as they are; returns when it serves.

    A cluster that is not ours must have the images already: ``python -m tests.e2e.cluster images`` makes them.
    """
    if local is not None:
        for archive in (agent_image(), client_image()):
            local.import_image(archive)
    kubectl.apply_kustomization(SIMULATED_OVERLAY)
    agents = kubectl.within(AGENT_NAMESPACE)
    eventually(lambda: _rolled_out(agents), "the agent on every node", seconds=INSTALL_SECONDS, otherwise=lambda: explain_agents(agents))


def explain_agents(agents: Kubectl) -> str:
    """State and last words of the agents."""
    pods = agents.all("pods", "--selector=app.kubernetes.io/name=aliquot-agent")
    said = [agents.run("logs", pod["metadata"]["name"], "--all-containers", "--tail=8", "--ignore-errors") for pod in pods]
    return "\n".join([*(agents.explain(pod["metadata"]["name"]) for pod in pods), *said]) or "no pod was made for the DaemonSet"


def metrics(kubectl: Kubectl, node: str) -> list[tuple[str, dict[str, str], float]]:
    """The metrics of a node's agent, read through the API server.

    Returns: name, labels and value of every sample.
    """
    pod = agent_pod(kubectl, node)["metadata"]["name"]
    text = kubectl.run("get", f"--raw=/api/v1/namespaces/{AGENT_NAMESPACE}/pods/{pod}:9402/proxy/metrics")
    return [(sample.name, sample.labels, sample.value) for family in text_string_to_metric_families(text) for sample in family.samples]


def agent_pod(kubectl: Kubectl, node: str) -> Object:
    """The agent of a node."""
    pods = kubectl.within(AGENT_NAMESPACE).all("pods", "--selector=app.kubernetes.io/name=aliquot-agent")
    found = [pod for pod in pods if pod["spec"]["nodeName"] == node and "deletionTimestamp" not in pod["metadata"]]
    if len(found) != 1:
        raise AssertionError(f"expected one agent on node {node}, found {len(found)}")
    return found[0]


@dataclass(frozen=True, slots=True)
class Slice:
    """What one container asks for."""

    memory_mib: int
    vgpus: int = 1
    cores: int | None = None

    @property
    def limits(self) -> dict[str, str]:
        """As the pod writes it."""
        cores = {} if self.cores is None else {"nvidia.com/vgpu-cores": str(self.cores)}
        return {"nvidia.com/vgpu": str(self.vgpus), "nvidia.com/vgpu-memory": str(self.memory_mib), **cores}


HOLD_OPEN: tuple[str, ...] = ("sleep", "3600")


def slice_pod(name: str, wanted: Slice, command: Sequence[str] = HOLD_OPEN, annotations: dict[str, str] | None = None) -> Object:
    """A pod with one container that gets a slice of a GPU."""
    container = {
        "name": "main",
        "image": CLIENT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "resources": {"limits": wanted.limits},
    }
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations or {}}, "spec": spec}


@dataclass(frozen=True, slots=True)
class Client:
    """The CUDA program inside a running pod."""

    kubectl: Kubectl
    pod: str
    prefix: tuple[str, ...] = field(default=())
    """Words before the program, such as ``env -i``."""

    def run(self, *arguments: str) -> list[dict[str, Any]]:
        """Run the program; one object per line it printed."""
        return parse_events(self.kubectl.exec(self.pod, *self.prefix, "/bin/aliquot-cuda-client", *arguments))

    def devices(self) -> list[dict[str, Any]]:
        """The GPUs as the program sees them."""
        return [event for event in self.run("info") if event["event"] == "device"]

    def fill(self, *arguments: str) -> dict[str, Any]:
        """Allocate until refused, then let go of everything."""
        return self.run("fill", *arguments)[-1]

    def converse(self, *lines: str) -> list[dict[str, Any]]:
        """Give the program commands, one after the other, in one process."""
        script = "printf '%s\\n' \"$@\" | /bin/aliquot-cuda-client repl"
        return parse_events(self.kubectl.exec(self.pod, "sh", "-c", script, "sh", *lines, "quit"))


def parse_events(text: str) -> list[dict[str, Any]]:
    """One JSON object per line."""
    return [json.loads(line) for line in text.splitlines()]


def client_image() -> Path:
    """An image with the CUDA program, a shell and this machine's C library; the driver is for the node to bring."""
    program, lookup = ROOT / "build/bin/aliquot-cuda-client", ROOT / "build/lib/client/libaliquot-client-lookup.so"
    if not program.exists():
        raise RuntimeError(f"{program} is not built: make -C cuda_shim")
    rootfs = images.Rootfs()
    rootfs.add_busybox()
    rootfs.add_program(program, "bin/aliquot-cuda-client")
    rootfs.files["lib/client/libaliquot-client-lookup.so"] = lookup
    archive = BUILD / "images/cuda-client.tar"
    images.write_archive(archive, CLIENT_IMAGE, [rootfs.layer()], {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"]})
    return archive


def _rolled_out(agents: Kubectl) -> bool:
    status = agents.get("daemonset", "aliquot-agent")["status"]
    wanted = status.get("desiredNumberScheduled", 0)
    return wanted > 0 and status.get("numberReady") == wanted == status.get("updatedNumberScheduled")
