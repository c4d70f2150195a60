# SPDX-License-Identifier: Apache-2.0
"""The product under test, installed as users install it, and the pods that use it."""

import json
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
DAEMONSET = ROOT / "deploy/daemonset"
SIMULATED_OVERLAY = DAEMONSET / "overlays/simulated"
DOCKERFILE = DAEMONSET / "Dockerfile"
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


@dataclass(frozen=True, slots=True)
class Variant:
    """How the product differs from the overlay with simulated GPUs. A module of tests states its own as VARIANT."""

    components: tuple[str, ...] = ()
    """Of deploy/daemonset/components, in this order."""
    patches: tuple[Object, ...] = ()
    """Further patches of the kustomization."""
    config_maps: tuple[Object, ...] = ()
    """Its generators of ConfigMaps, which may name ``files``."""
    files: Mapping[str, str] = field(default_factory=dict)
    overlay: str = "simulated"


def patch(kind: str, name: str, *operations: Object) -> Object:
    """Return a patch of one of our objects, for a variant."""
    return {"target": {"kind": kind, "name": name}, "patch": yaml.safe_dump(list(operations))}


def agents_with(**variables: str) -> Object:
    """Return a patch: the agents have further settings."""
    return patch("DaemonSet", "aliquot-agent", *_added_variables(0, variables))


def schedulers_with(**variables: str) -> Object:
    """Return a patch: the extenders have further settings."""
    return patch("Deployment", "aliquot-scheduler", *_added_variables(1, variables))


def _added_variables(container: int, variables: Mapping[str, str]) -> Iterator[Object]:
    path = f"/spec/template/spec/containers/{container}/env/-"
    yield from ({"op": "add", "path": path, "value": {"name": name, "value": value}} for name, value in variables.items())


PLAIN = Variant()
_ALL_AT_ONCE = patch("Deployment", "aliquot-scheduler", {"op": "replace", "path": "/spec/strategy/rollingUpdate/maxSurge", "value": "100%"})
"""Starts both replicas of the scheduler together, which halves the time of a rollout."""
Names = set[tuple[str, str, str]]
"""Kind, namespace and name of objects."""


@dataclass(slots=True)
class _Installed:
    """What a cluster has of the product."""

    variant: Variant | None = None
    """None before the first rollout, and while one is not finished."""
    names: Names = field(default_factory=set)
    """Of all objects that may be there."""


_INSTALLED: dict[Path, _Installed] = defaultdict(_Installed)
"""By kubeconfig."""


def install(kubectl: Kubectl) -> None:
    """Install the product with the simulated driver on every node, from the manifests as they are; returns when it serves."""
    install_manifests(kubectl)
    wait_until_rolled_out(kubectl.within(AGENT_NAMESPACE))
    eventually(
        lambda: _every_inventory_is_there(kubectl), "every node's GPUs in the inventory", otherwise=lambda: kubectl.run("get", "gpunodes")
    )
    _INSTALLED[kubectl.kubeconfig] = _Installed(PLAIN, _names(kubectl.run("kustomize", str(SIMULATED_OVERLAY))))


def uninstall(kubectl: Kubectl) -> None:
    """Remove the product, whatever variant of it is installed."""
    kubectl.run("delete", f"--kustomize={SIMULATED_OVERLAY}", "--ignore-not-found", timeout_seconds=180)
    names = _INSTALLED.pop(kubectl.kubeconfig, _Installed()).names
    _delete(kubectl, {(kind, namespace, name) for kind, namespace, name in names if not namespace})


def install_without_agents(kubectl: Kubectl) -> None:
    """Install the scheduler with its webhook alone, for a cluster without GPUs."""
    install_manifests(kubectl)
    system = kubectl.within(AGENT_NAMESPACE)
    system.delete("daemonset", "aliquot-agent")
    wait_until_schedulers_rolled_out(system)


def install_manifests(kubectl: Kubectl) -> None:
    """Apply the manifests, as docs/use/install.md says, and return at once."""
    kubectl.apply_kustomization(SIMULATED_OVERLAY)


def roll_out(kubectl: Kubectl, variant: Variant) -> None:
    """Have the product as a variant of it, and no object of the variant before; returns when it serves.

    Nothing is rolled back after a module of tests: the next one may need another variant.
    """
    installed = _INSTALLED[kubectl.kubeconfig]
    if installed.variant == variant:
        return
    installed.variant = None
    text = _rendered(kubectl, variant)
    wanted = _names(text)
    installed.names |= wanted
    kubectl.run("apply", "--filename=-", stdin=text)
    system = kubectl.within(AGENT_NAMESPACE)
    wait_until_agents_rolled_out(system)
    if ("Deployment", AGENT_NAMESPACE, "aliquot-scheduler") in wanted:
        wait_until_schedulers_rolled_out(system)
    left = installed.names - wanted
    _delete(kubectl, left)
    if any(kind == "DeviceClass" for kind, _, _ in left):
        eventually(lambda: not kubectl.all("resourceslices"), "no device of a driver that has left", seconds=90)
    installed.names, installed.variant = wanted, variant


def forget_variant(kubectl: Kubectl) -> None:
    """Have the next rollout apply all objects: some were changed or deleted by a test."""
    _INSTALLED[kubectl.kubeconfig].variant = None


@contextmanager
def with_components(kubectl: Kubectl, components: Sequence[str], settings: Object | None = None) -> Iterator[None]:
    """Roll the product out with some of deploy/daemonset/components inside the block, and as it was afterwards.

    Args: settings: further settings for the scheduler's file.
    """
    if settings is None:
        variant = Variant(tuple(components))
    else:
        shipped = yaml.safe_load((DAEMONSET / "scheduler/config.yaml").read_text())
        generator = {"name": "aliquot-scheduler-config", "namespace": AGENT_NAMESPACE, "behavior": "merge", "files": ["config.yaml"]}
        variant = Variant(tuple(components), config_maps=(generator,), files={"config.yaml": yaml.safe_dump({**shipped, **settings})})
    roll_out(kubectl, variant)
    yield
    roll_out(kubectl, PLAIN)


def kustomization(folder: Path, variant: Variant) -> Object:
    """Return the kustomization of a variant. Args: folder: of this source tree, where it will be."""
    daemonset = Path("../" * len(folder.relative_to(ROOT).parts)) / "deploy/daemonset"
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{daemonset}/overlays/{variant.overlay}"],
        "components": [f"{daemonset}/components/{component}" for component in variant.components],
        "configMapGenerator": list(variant.config_maps),
        "patches": [_ALL_AT_ONCE, *variant.patches],
    }


def _rendered(kubectl: Kubectl, variant: Variant) -> str:
    """Return the objects of a variant, as YAML."""
    with tempfile.TemporaryDirectory(dir=BUILD) as name:  # kustomize reads files of one tree only
        folder = Path(name)
        for file, text in variant.files.items():
            (folder / file).write_text(text)
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization(folder, variant)))
        return kubectl.run("kustomize", name)


def _names(text: str) -> Names:
    """Return the names of the objects in YAML."""
    return {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in yaml.safe_load_all(text)}


def _delete(kubectl: Kubectl, names: Names) -> None:
    for kind, namespace, name in sorted(names):
        (kubectl.within(namespace) if namespace else kubectl).delete(kind, name)


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
    return pod_on(kubectl, "aliquot-agent", node)


def pod_on(kubectl: Kubectl, daemonset: str, node: str) -> Object:
    """The pod of one of our DaemonSets on a node. Raises: LookupError: none is there, or a second one during an update."""
    pods = kubectl.within(AGENT_NAMESPACE).all("pods", f"--selector=app.kubernetes.io/name={daemonset}")
    # the pod that a DaemonSet has just made has no nodeName until kube-scheduler binds it
    found = [pod for pod in pods if pod["spec"].get("nodeName") == node and "deletionTimestamp" not in pod["metadata"]]
    if len(found) != 1:
        raise LookupError(f"expected one pod of {daemonset} on node {node}, found {len(found)}")
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
    return all(len(inventories.get(agent["spec"].get("nodeName", ""), [])) == GPUS for agent in agents)
