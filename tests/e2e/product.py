# SPDX-License-Identifier: Apache-2.0
"""The product under test, installed as users install it, and the pods that use it."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from release.archive import write_archive
from release.dockerfile import Options, build_images
from release.images import image_name
from tests.e2e import programs
from tests.e2e.cluster import images
from tests.e2e.cluster.host import KUBERNETES, built_programs
from tests.e2e.cluster.paths import BUILD, ROOT
from tests.e2e.kubectl import Kubectl, Object, eventually

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
AGENT_IMAGE = image_name("agent", VERSION)
SCHEDULER_IMAGE = image_name("scheduler", VERSION)
KUBE_SCHEDULER_IMAGE = "registry.k8s.io/kube-scheduler:v1.36.3"
CLIENT_IMAGE = "aliquot.test/cuda-client:e2e"
CLIENT = "/bin/aliquot-cuda-client"
SETUID_CLIENT = "/bin/aliquot-cuda-client-setuid"
"""In that image: the CUDA program as a file that runs as root for any user who starts it."""
STATIC_CLIENT = "/bin/static-client"
"""In both images: the CUDA program with a driver linked in, so that no library can be put in front of it."""
FORKED = "/bin/forked"
"""In both images: takes memory in processes that come of fork alone."""
BECOME_ROOT = "/bin/become-root"
"""In the first image: does what sudo does, with the program it is given."""
MUSL_IMAGE = "aliquot.test/musl-client:e2e"
AGENT_NAMESPACE = "aliquot-system"
SIMULATED_OVERLAY = ROOT / "deploy/daemonset/overlays/simulated"
WITH_COMPONENTS = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{daemonset}/overlays/simulated]
components: [{components}]
"""
WITH_SETTINGS = """\
configMapGenerator:
  - {name: aliquot-scheduler-config, namespace: aliquot-system, behavior: merge, files: [config.yaml]}
"""
DOCKERFILE = ROOT / "deploy/daemonset/Dockerfile"
BUILD_OPTIONS = Options(folder=BUILD / "layers")
RESERVATIONS = "aliquot_scheduler_reservations"
"""The schedulers' metric of room that is kept for pods that are not bound, and for replacements of pods that move."""
INSTALL_SECONDS = 180
SIMULATED_DRIVER = "/opt/aliquot-simulated"
"""In the agent's image: programs and libraries of the simulated driver."""

GPUS = 8
GPU_MEMORY_MIB = 143151
"""The node of the simulated overlay: eight H200 (simulated_driver/profiles/h200x8) of 143771 MiB each; the driver keeps 620 of them."""
SHARES_PER_GPU = 16
"""The agent's default."""
MIB = 1 << 20


def product_images() -> list[Path]:
    """Build the product's images, agent and scheduler, from their Dockerfile, and return the archives."""
    return build_images(DOCKERFILE, ROOT, {"agent": AGENT_IMAGE, "scheduler": SCHEDULER_IMAGE}, BUILD / "images/product", BUILD_OPTIONS)


def kube_scheduler_image() -> Path:
    """An image of kube-scheduler alone, laid out like Kubernetes' own."""
    rootfs = images.Rootfs(files={"usr/local/bin/kube-scheduler": built_programs(KUBERNETES) / "kube-scheduler"})
    archive = BUILD / "images/kube-scheduler.tar"
    write_archive(archive, KUBE_SCHEDULER_IMAGE, [rootfs.layer()], {"Env": ["PATH=/usr/local/bin"]})
    return archive


def all_images() -> list[Path]:
    """The archives of every image that the product and its scenarios need."""
    with images.one_process():
        return [*product_images(), kube_scheduler_image(), client_image(), musl_image()]


def install(kubectl: Kubectl) -> None:
    """Install the product with the simulated driver on every node, from the manifests as they are; returns when it serves."""
    install_manifests(kubectl)
    wait_until_rolled_out(kubectl.within(AGENT_NAMESPACE))
    eventually(
        lambda: _every_inventory_is_there(kubectl), "every node's GPUs in the inventory", otherwise=lambda: kubectl.run("get", "gpunodes")
    )


def install_without_agents(kubectl: Kubectl) -> None:
    """Install the scheduler with its webhook alone, for a cluster without GPUs."""
    install_manifests(kubectl)
    system = kubectl.within(AGENT_NAMESPACE)
    system.delete("daemonset", "aliquot-agent")
    wait_until_schedulers_rolled_out(system)


def install_manifests(kubectl: Kubectl) -> None:
    """Apply the manifests, as docs/use/install.md says, and return at once."""
    kubectl.apply_kustomization(SIMULATED_OVERLAY)


@contextmanager
def with_components(kubectl: Kubectl, components: Sequence[str], scratch: Path, settings: Object | None = None) -> Iterator[None]:
    """Roll the product out with some of deploy/daemonset/components inside the block.

    Args: scratch: a folder of this source tree. settings: further settings for the scheduler's file.
    """
    daemonset = Path("../" * len(scratch.relative_to(ROOT).parts)) / "deploy/daemonset"
    paths = ", ".join(f"{daemonset}/components/{component}" for component in components)
    text = WITH_COMPONENTS.format(daemonset=daemonset, components=paths)
    if settings is not None:
        shipped = yaml.safe_load((ROOT / "deploy/daemonset/scheduler/config.yaml").read_text())
        (scratch / "config.yaml").write_text(yaml.safe_dump({**shipped, **settings}))
        text += WITH_SETTINGS
    (scratch / "kustomization.yaml").write_text(text)
    kubectl.apply_kustomization(scratch)
    wait_until_rolled_out(kubectl.within(AGENT_NAMESPACE))
    yield
    install_manifests(kubectl)
    wait_until_rolled_out(kubectl.within(AGENT_NAMESPACE))
    remove_objects_of_components(kubectl, scratch)


def remove_objects_of_components(kubectl: Kubectl, folder: Path) -> None:
    """Delete what a kustomization has and the product without components has not."""
    for kind, namespace, name in sorted(_objects(kubectl, folder) - _objects(kubectl, SIMULATED_OVERLAY)):
        (kubectl.within(namespace) if namespace else kubectl).delete(kind, name)


def _objects(kubectl: Kubectl, folder: Path) -> set[tuple[str, str, str]]:
    """The objects of a kustomization: kind, namespace and name."""
    made = [item["metadata"] | {"kind": item["kind"]} for item in yaml.safe_load_all(kubectl.run("kustomize", str(folder)))]
    return {(item["kind"], item.get("namespace", ""), item["name"]) for item in made}


def wait_until_rolled_out(system: Kubectl) -> None:
    """Wait until every agent and scheduler is the current one and serves."""
    wait_until_agents_rolled_out(system)
    wait_until_schedulers_rolled_out(system)


def wait_until_schedulers_rolled_out(system: Kubectl) -> None:
    """Wait until every scheduler, which is the webhook too, is the current one and serves."""
    eventually(
        lambda: _schedulers_rolled_out(system), "every scheduler", seconds=INSTALL_SECONDS, otherwise=lambda: explain(system, "scheduler")
    )


def wait_until_agents_rolled_out(system: Kubectl) -> None:
    """Wait until every agent is the current one and serves."""
    eventually(
        lambda: _agents_rolled_out(system), "the agent on every node", seconds=INSTALL_SECONDS, otherwise=lambda: explain(system, "agent")
    )


def explain(system: Kubectl, program: str) -> str:
    """State and last words of the pods of one program, agent or scheduler."""
    pods = system.all("pods", f"--selector=app.kubernetes.io/name=aliquot-{program}")
    said = [system.run("logs", pod["metadata"]["name"], "--all-containers", "--tail=8", "--ignore-errors") for pod in pods]
    return "\n".join([*(system.explain(pod["metadata"]["name"]) for pod in pods), *said]) or f"no pod was made for aliquot-{program}"


def metrics(kubectl: Kubectl, node: str) -> list[tuple[str, dict[str, str], float]]:
    """The metrics of a node's agent, read through the API server.

    Returns: name, labels and value of every sample.
    """
    pod = agent_pod(kubectl, node)["metadata"]["name"]
    text = kubectl.raw(f"/api/v1/namespaces/{AGENT_NAMESPACE}/pods/{pod}:9402/proxy/metrics")
    return [(sample.name, sample.labels, sample.value) for family in text_string_to_metric_families(text) for sample in family.samples]


def scheduler_metric(system: Kubectl, name: str, **labels: str) -> float:
    """The sum of a metric over all schedulers. Args: labels: of the samples that count."""
    return sum(
        sample.value
        for pod in system.all("pods", "--selector=app.kubernetes.io/name=aliquot-scheduler")
        for family in text_string_to_metric_families(
            system.raw(f"/api/v1/namespaces/{AGENT_NAMESPACE}/pods/{pod['metadata']['name']}:9412/proxy/metrics")
        )
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def agent_pod(kubectl: Kubectl, node: str) -> Object:
    """The agent of a node."""
    pods = kubectl.within(AGENT_NAMESPACE).all("pods", "--selector=app.kubernetes.io/name=aliquot-agent")
    # the pod that a DaemonSet has just made has no nodeName until kube-scheduler binds it
    found = [pod for pod in pods if pod["spec"].get("nodeName") == node and "deletionTimestamp" not in pod["metadata"]]
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


def assigned_uuids(pod: Object) -> list[str]:
    """The UUIDs of the devices that the scheduler assigned to a pod's containers, in order."""
    assignment = json.loads(pod["metadata"]["annotations"][contract.ANNOTATION_ASSIGNMENT])
    return [device["uuid"] for container in assignment["containers"] for device in container["devices"]]


@dataclass(frozen=True, slots=True)
class Client:
    """The CUDA program inside a running pod."""

    kubectl: Kubectl
    pod: str
    prefix: tuple[str, ...] = field(default=())
    """Words before the program, such as ``env -i``."""

    def run(self, *arguments: str) -> list[dict[str, Any]]:
        """Run the program; one object per line it printed."""
        return parse_events(self.kubectl.exec(self.pod, *self.prefix, CLIENT, *arguments))

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
    rootfs.add_program(program, _at(CLIENT))
    rootfs.files |= {
        _at(SETUID_CLIENT): program,
        _at(STATIC_CLIENT): programs.static_client(),
        _at(FORKED): programs.forked(),
        _at(BECOME_ROOT): programs.become_root(),
        "lib/client/libaliquot-client-lookup.so": lookup,
    }
    rootfs.setuid |= {_at(SETUID_CLIENT), _at(BECOME_ROOT)}
    archive = BUILD / "images/cuda-client.tar"
    write_archive(archive, CLIENT_IMAGE, [rootfs.layer()], {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"], **images.AT_ONCE})
    return archive


def musl_image() -> Path:
    """An image with musl instead of glibc, as Alpine's is: NVIDIA's driver does not load there."""
    rootfs = images.Rootfs()
    rootfs.add_busybox()
    rootfs.files |= {
        "lib/ld-musl-x86_64.so.1": Path("/lib/ld-musl-x86_64.so.1").resolve(),
        _at(STATIC_CLIENT): programs.musl_static_client(),
        _at(FORKED): programs.musl_forked(),
    }
    archive = BUILD / "images/musl-client.tar"
    write_archive(archive, MUSL_IMAGE, [rootfs.layer()], {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"], **images.AT_ONCE})
    return archive


def _at(path: str) -> str:
    """A path as an image has it."""
    return path.lstrip("/")


def _agents_rolled_out(system: Kubectl) -> bool:
    daemonset = system.get("daemonset", "aliquot-agent")
    status = daemonset["status"]
    if status.get("observedGeneration") != daemonset["metadata"]["generation"]:
        return False
    wanted = status.get("desiredNumberScheduled", 0)
    return wanted > 0 and status.get("numberReady") == wanted == status.get("updatedNumberScheduled")


def _schedulers_rolled_out(system: Kubectl) -> bool:
    deployment = system.get("deployment", "aliquot-scheduler")
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    if not (current and status.get("readyReplicas") == wanted == status.get("updatedReplicas") == status.get("replicas")):
        return False
    # one that is being ended counts no longer there, and its webhook goes on answering for a while as the configuration before had it
    return len(system.all("pods", "--selector=app.kubernetes.io/name=aliquot-scheduler")) == wanted


def _every_inventory_is_there(kubectl: Kubectl) -> bool:
    agents = kubectl.within(AGENT_NAMESPACE).all("pods", "--selector=app.kubernetes.io/name=aliquot-agent")
    inventories = {item["metadata"]["name"]: item.get("status", {}).get("devices", []) for item in kubectl.all("gpunodes")}
    return all(len(inventories.get(agent["spec"]["nodeName"], [])) == GPUS for agent in agents)
