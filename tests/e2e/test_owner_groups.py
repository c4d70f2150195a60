# SPDX-License-Identifier: Apache-2.0
"""Gangs from owners with the controllers that own the pods: JobSet, LeaderWorkerSet, KubeRay and the training operator themselves.

No pod and no template says that it is in a gang. Only the namespace has the label.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.controllers import JOBSET_CONTROLLER, KUBERAY_CONTROLLER, LWS_CONTROLLER, TRAINING_CONTROLLER, installed
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, HOLD_OPEN, Slice, Variant, slice_pod

START_SECONDS = 60
SMALL = Slice(1000)
TWO_GPUS = Slice(2 * GPU_MEMORY_MIB, vgpus=2)
NO_ROOM = "gang: no room for enough members at once"


VARIANT = Variant(("gangs-from-owners",))


@pytest.fixture(scope="module")
def workloads(product: Kubectl, node: Cluster) -> Iterator[None]:
    """The controllers of JobSet and LeaderWorkerSet; gone afterwards."""
    with installed(product, node, JOBSET_CONTROLLER, LWS_CONTROLLER):
        yield


@pytest.fixture(scope="module")
def operators(workloads: None, product: Kubectl, node: Cluster) -> Iterator[None]:
    """Also the operators of Ray and PyTorch; gone afterwards."""
    del workloads
    with installed(product, node, KUBERAY_CONTROLLER, TRAINING_CONTROLLER):
        yield


@contextmanager
def gangs_from_owners(kubectl: Kubectl, kinds: str) -> Iterator[None]:
    """Have gangs from owners in the namespace. Objects of these kinds go first, or their controllers would create deleted pods again."""
    kubectl.run("label", "namespace", kubectl.namespace, f"{contract.LABEL_GANG_FROM_OWNER}=true")
    yield
    kubectl.run("delete", kinds, "--all", "--cascade=foreground", timeout_seconds=START_SECONDS)


@pytest.fixture
def labelled(workloads: None, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace with gangs from owners."""
    del workloads
    with gangs_from_owners(kubectl, "jobsets,leaderworkersets"):
        yield kubectl


def template(wanted: Slice, command: Sequence[str] = HOLD_OPEN, **spec: object) -> Object:
    """The template of pods that ask for a slice."""
    return {"spec": {**slice_pod("", wanted, command)["spec"], **spec}}


def job(name: str, pods: Object, size: int, **fields: object) -> Object:
    """A replicated job of a JobSet. Args: size: pods of each Job."""
    return {"name": name, **fields, "template": {"spec": {"parallelism": size, "completions": size, "template": pods}}}


def jobset(name: str, *jobs: Object, exclusive: bool = False, **spec: object) -> Object:
    annotations = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "kubernetes.io/hostname"} if exclusive else {}
    metadata = {"name": name, "annotations": annotations}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": {"replicatedJobs": jobs, **spec}}


def leader_worker_set(name: str, wanted: Slice, size: int, *, exclusive: bool = False, **spec: object) -> Object:
    annotations = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "kubernetes.io/hostname"} if exclusive else {}
    workers = template(wanted, restartPolicy="Always")
    metadata = {"name": name, "annotations": annotations}
    wanted_spec = {**spec, "leaderWorkerTemplate": {"size": size, "workerTemplate": workers}}
    return {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": metadata, "spec": wanted_spec}


def members(kubectl: Kubectl, owner: str) -> list[Object]:
    """The pods of an owner: their names begin with its name."""
    return [pod for pod in kubectl.all("pods") if pod["metadata"]["name"].startswith(owner) and "deletionTimestamp" not in pod["metadata"]]


def annotation(pod: Object, name: str) -> str:
    text: str = pod["metadata"].get("annotations", {}).get(name, "")
    return text


def placed(kubectl: Kubectl, owner: str) -> int:
    return sum(bool(pod["spec"].get("nodeName")) for pod in members(kubectl, owner))


def wait_for_running(kubectl: Kubectl, owner: str, count: int) -> list[str]:
    """Wait until this many pods of an owner run; return the minimum of each one's gang, empty without a gang."""

    def is_running() -> bool:
        return sum(pod["status"].get("phase") == "Running" for pod in members(kubectl, owner)) == count

    eventually(is_running, f"{count} pods of {owner} to run", seconds=START_SECONDS,
               otherwise=lambda: kubectl.run("get", "pods", "--output=wide") + kubectl.run("get", "events")[-3000:])  # fmt: skip
    return sorted(annotation(pod, contract.ANNOTATION_GANG_MIN) for pod in members(kubectl, owner))


TRAIN = jobset(
    "train",
    job("prepare", template(SMALL, ["true"]), 1),
    job("workers", template(TWO_GPUS), 2, replicas=2, dependsOn=[{"name": "prepare", "status": "Complete"}]),
)
"""The workers need all GPUs, and exist only after the first job."""
SERVE = leader_worker_set("serve", TWO_GPUS, 4)
RAY: Object = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "ray", "annotations": {"ray.io/overwrite-container-cmd": "true"}},
    "spec": {
        "headGroupSpec": {"rayStartParams": {}, "template": template(TWO_GPUS)},
        "workerGroupSpecs": [
            {
                "groupName": "workers", "replicas": 3, "minReplicas": 3, "maxReplicas": 3,
                "rayStartParams": {}, "template": template(TWO_GPUS),
            }
        ],
    },
}  # fmt: skip
TORCH_TEMPLATE = template(TWO_GPUS)
TORCH_TEMPLATE["spec"]["containers"][0]["name"] = "pytorch"
TORCH: Object = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "torch"},
    "spec": {
        "pytorchReplicaSpecs": {
            "Master": {"replicas": 1, "template": TORCH_TEMPLATE},
            "Worker": {"replicas": 3, "template": TORCH_TEMPLATE},
        }
    },
}


@pytest.mark.parametrize(("workload", "owner"), [pytest.param(TRAIN, "train-workers", id="jobset"), pytest.param(SERVE, "serve", id="lws")])
def test_no_pod_of_workload_starts_before_all_have_room(labelled: Kubectl, workload: Object, owner: str) -> None:
    waits_until_all_have_room(labelled, workload, owner)


@pytest.mark.soak
@pytest.mark.parametrize(("workload", "owner"), [pytest.param(RAY, "ray", id="ray"), pytest.param(TORCH, "torch", id="pytorch")])
def test_no_pod_of_operator_starts_before_all_have_room(operators: None, kubectl: Kubectl, workload: Object, owner: str) -> None:
    """Soak, because their two operators take minutes to compile."""
    del operators
    with gangs_from_owners(kubectl, "rayclusters,pytorchjobs"):
        waits_until_all_have_room(kubectl, workload, owner)


def waits_until_all_have_room(labelled: Kubectl, workload: Object, owner: str) -> None:
    """Create a workload of all GPUs while one is taken, and then free that one."""
    labelled.apply(slice_pod("filler", Slice(GPU_MEMORY_MIB)))
    labelled.wait_for_phase("filler", "Running", seconds=START_SECONDS)
    labelled.apply(workload)
    eventually(lambda: len(members(labelled, owner)) == GPUS // 2, "all members to exist", seconds=START_SECONDS)
    name = members(labelled, owner)[0]["metadata"]["name"]
    eventually(lambda: any(NO_ROOM in event for event in labelled.events(name)), "the gang to be refused", seconds=START_SECONDS,
               otherwise=lambda: labelled.explain(name))  # fmt: skip
    assert placed(labelled, owner) == 0, "three of the four have room"
    labelled.delete("pod", "filler")
    # Not until they run: a worker of PyTorch first runs an image of its operator's, which is not on the node.
    eventually(lambda: placed(labelled, owner) == GPUS // 2, "all members to be placed", seconds=START_SECONDS)
    assert {annotation(pod, contract.ANNOTATION_GANG_MIN) for pod in members(labelled, owner)} == {str(GPUS // 2)}


IN_ORDER = {"startupPolicyOrder": "InOrder"}
STEPWISE = [
    pytest.param(
        jobset("steps", job("first", template(SMALL), 1), job("second", template(SMALL), 2), startupPolicy=IN_ORDER),
        3, ["", "2", "2"], id="jobset in order",
    ),
    pytest.param(jobset("steps", job("only", template(SMALL), 3), exclusive=True), 3, ["", "2", "2"], id="jobset with exclusive topology"),
    pytest.param(
        leader_worker_set("steps", SMALL, 3, replicas=2, startupPolicy="LeaderReady"),
        6, ["", "", "2", "2", "2", "2"], id="lws, workers after ready leader",
    ),
    pytest.param(leader_worker_set("steps", SMALL, 3, exclusive=True), 3, ["", "2", "2"], id="lws with exclusive topology"),
]  # fmt: skip


@pytest.mark.parametrize(("workload", "count", "minima"), STEPWISE)
def test_workload_that_starts_in_steps_has_gang_for_each(labelled: Kubectl, workload: Object, count: int, minima: list[str]) -> None:
    labelled.apply(workload)
    assert wait_for_running(labelled, "steps", count) == minima
    gangs = Counter(annotation(pod, contract.ANNOTATION_GANG) for pod in members(labelled, "steps"))
    assert all(gangs[annotation(pod, contract.ANNOTATION_GANG)] == int(minimum) for pod in members(labelled, "steps")
               if (minimum := annotation(pod, contract.ANNOTATION_GANG_MIN)))  # fmt: skip
