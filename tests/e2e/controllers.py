# SPDX-License-Identifier: Apache-2.0
"""Other projects' controllers in the cluster under test: each built from its module, and installed from its own manifests."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from release.archive import write_archive
from tests.e2e.cluster import images
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.host import (
    ARGO,
    JOBSET,
    KUBERAY,
    KUEUE,
    LWS,
    MPI_OPERATOR,
    TRAINER,
    TRAINING_OPERATOR,
    GoPrograms,
    built_programs,
    module_source,
)
from tests.e2e.cluster.paths import BUILD
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually

UNPRIVILEGED = 65532
DELETE_SECONDS = 240
READY_SECONDS = 300
"""A controller is ready once kubelet has renewed its Secret's files: up to ninety seconds with kubelet's defaults."""


@dataclass(frozen=True)
class Controller:
    """A controller, and an object that its webhooks admit as soon as they serve: their certificate comes a moment after the pod."""

    name: str
    programs: GoPrograms
    probe: Object = field(hash=False)
    folders: tuple[str, ...] = ("config/default",)
    """Of its manifests."""
    namespace: str = ""
    """For manifests without a namespace."""
    configure: Callable[[list[Object]], None] = lambda _objects: None
    """Changes its objects before they are applied."""

    @property
    def image(self) -> str:
        """Its name: the program is /manager, and further programs of the build are in /bin."""
        return f"aliquot.test/{self.name}:e2e"


_CONTAINER = {"name": "main", "image": "probe"}
_TEMPLATE = {"spec": {"containers": [_CONTAINER]}}
_JOB = {"spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [_CONTAINER]}}}}


def _probe(api_version: str, kind: str, **spec: object) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": "probe"}, **({"spec": spec} if spec else {})}


KUEUE_CONTROLLER = Controller("kueue", KUEUE, _probe("kueue.x-k8s.io/v1beta2", "ResourceFlavor"))
JOBSET_CONTROLLER = Controller(
    "jobset", JOBSET, _probe("jobset.x-k8s.io/v1alpha2", "JobSet", replicatedJobs=[{"name": "probe", "template": _JOB}])
)
LWS_CONTROLLER = Controller(
    "lws", LWS, _probe("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", leaderWorkerTemplate={"size": 2, "workerTemplate": _TEMPLATE})
)


def _without_init_containers(objects: Sequence[Object]) -> None:
    """KubeRay's init container would run Ray's own program, which our image lacks."""
    [container] = _manager(objects)["spec"]["template"]["spec"]["containers"]
    container.setdefault("env", []).append({"name": "ENABLE_INIT_CONTAINER_INJECTION", "value": "false"})


KUBERAY_CONTROLLER = Controller(
    "kuberay",
    KUBERAY,
    _probe("ray.io/v1", "RayCluster", headGroupSpec={"rayStartParams": {}, "template": _TEMPLATE}),
    configure=_without_init_containers,
)
TRAINING_CONTROLLER = Controller(
    "training-operator",
    TRAINING_OPERATOR,
    _probe(
        "kubeflow.org/v1",
        "PyTorchJob",
        pytorchReplicaSpecs={"Master": {"replicas": 1, "template": {"spec": {"containers": [{**_CONTAINER, "name": "pytorch"}]}}}},
    ),
    ("manifests/overlays/standalone",),
)
MPI_CONTROLLER = Controller(
    "mpi-operator",
    MPI_OPERATOR,
    _probe(
        "kubeflow.org/v2beta1",
        "MPIJob",
        mpiReplicaSpecs={"Launcher": {"replicas": 1, "template": _TEMPLATE}, "Worker": {"replicas": 1, "template": _TEMPLATE}},
    ),
    ("manifests/overlays/standalone",),
)


def _with_certificate(objects: list[Object]) -> None:
    """Trainer's own overlay, which needs the network, has the Secret for its certificate."""
    metadata = {"name": "kubeflow-trainer-webhook-cert", "namespace": "kubeflow-system"}
    objects.append({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})


TRAINER_CONTROLLER = Controller(
    "trainer",
    TRAINER,
    _probe(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        mlPolicy={"numNodes": 1},
        template={"spec": {"replicatedJobs": [{"name": "probe", "template": _JOB}]}},
    ),
    ("manifests/base/crds", "manifests/base/manager", "manifests/base/rbac", "manifests/base/webhook"),
    "kubeflow-system",
    _with_certificate,
)


def _with_own_executor(objects: list[Object]) -> None:
    """Argo puts its executor into every pod: the one in the controller's image."""
    [container] = _manager(objects)["spec"]["template"]["spec"]["containers"]
    executor = f"--executor-image={ARGO_CONTROLLER.image}"
    container.update(command=["/manager"], args=[executor, "--executor-image-pull-policy=IfNotPresent"])


ARGO_CONTROLLER = Controller(
    "argo",
    ARGO,
    _probe("argoproj.io/v1alpha1", "Workflow", entrypoint="probe", templates=[{"name": "probe", "container": {"image": "probe"}}]),
    ("manifests/base/crds/full", "manifests/base/workflow-controller", "manifests/cluster-install-no-crds/workflow-controller-rbac"),
    "argo",
    _with_own_executor,
)


@contextmanager
def installed(kubectl: Kubectl, node: Cluster, *controllers: Controller) -> Iterator[None]:
    """Run controllers inside the block."""
    objects = [_objects(kubectl, node, controller) for controller in controllers]
    try:
        for own in objects:
            kubectl.run("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(own))
        for controller, own in zip(controllers, objects, strict=True):
            _wait_until_served(kubectl, controller, _manager(own))
        yield
    finally:
        # Without its controller, a webhook would refuse all pods.
        together = sorted((item for own in objects for item in own), key=lambda item: "WebhookConfiguration" not in item["kind"])
        text = yaml.safe_dump_all(together)
        kubectl.run("delete", "--ignore-not-found", "--filename=-", stdin=text, timeout_seconds=DELETE_SECONDS)


def _objects(kubectl: Kubectl, node: Cluster, controller: Controller) -> list[Object]:
    """Return a controller's own manifests, for an image that is on the node."""
    archive, built = BUILD / f"images/{controller.name}.tar", built_programs(controller.programs)
    *others, program = controller.programs.names
    rootfs = images.Rootfs(files={"manager": built / program, **{f"bin/{name}": built / name for name in others}})
    entry = {"Entrypoint": ["/manager"], "User": str(UNPRIVILEGED), "Env": ["PATH=/bin"]}
    write_archive(archive, controller.image, [rootfs.layer()], entry)
    node.import_image(archive)
    objects = list(yaml.safe_load_all(kubectl.run("kustomize", str(_kustomization(controller)))))
    if controller.namespace:
        objects.insert(0, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": controller.namespace}})
    spec = _manager(objects)["spec"]
    spec["replicas"] = 1
    # Without its requests: LeaderWorkerSet's are more than the node has left.
    spec["template"]["spec"]["containers"][0].update(image=controller.image, imagePullPolicy="IfNotPresent", resources={})
    controller.configure(objects)
    return objects


def _kustomization(controller: Controller) -> Path:
    """Return the folder of a controller's manifests; for several folders, one of ours that names them."""
    source = module_source(controller.programs.module)
    if not controller.namespace:
        [folder] = controller.folders
        return source / folder
    ours = BUILD / "manifests" / controller.name
    ours.mkdir(parents=True, exist_ok=True)
    resources = [os.path.relpath(source / folder, ours.resolve()) for folder in controller.folders]
    (ours / "kustomization.yaml").write_text(yaml.safe_dump({"namespace": controller.namespace, "resources": resources}))
    return ours


def _manager(objects: Sequence[Object]) -> Object:
    [manager] = [item for item in objects if item["kind"] == "Deployment"]
    return manager


def _wait_until_served(kubectl: Kubectl, controller: Controller, manager: Object) -> None:
    system, name = kubectl.within(manager["metadata"]["namespace"]), manager["metadata"]["name"]

    def is_ready() -> bool:
        return bool(system.get("deployment", name).get("status", {}).get("readyReplicas"))

    def refusal() -> str:
        try:
            kubectl.run("apply", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(controller.probe))
        except KubectlError as refused:
            return str(refused)
        return ""

    def seen() -> str:
        return f"{refusal()}\n{_explain(system)}"

    eventually(is_ready, f"{name} to be ready", seconds=READY_SECONDS, otherwise=lambda: _explain(system))
    eventually(lambda: not refusal(), f"the webhooks of {name} to admit the probe", seconds=READY_SECONDS, otherwise=seen)


def _explain(system: Kubectl) -> str:
    """The pods of a controller that is not ready, and the last lines of each that ran."""
    said = []
    for pod in system.all("pods"):
        name = pod["metadata"]["name"]
        said.append(system.explain(name))
        if pod["status"].get("containerStatuses", [{}])[0].get("containerID"):
            said.append(system.logs(name, "--tail=12"))
    return "\n".join(said)
