# SPDX-License-Identifier: Apache-2.0
"""The MPI operator and Trainer themselves: gangs from owners in a queue of Kueue."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.e2e.cluster.cluster import Cluster
from tests.e2e.controllers import JOBSET_CONTROLLER, KUEUE_CONTROLLER, MPI_CONTROLLER, TRAINER_CONTROLLER, installed
from tests.e2e.kubectl import Kubectl, Object
from tests.e2e.product import with_components
from tests.e2e.test_owner_groups import template
from tests.e2e.test_queue_kinds import TWO_GPUS, check_kind, gangs_from_owners, in_queue
from tests.e2e.test_queues import configure

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def operators(product: Kubectl, node: Cluster) -> Iterator[None]:
    """The product with gangs from owners, Kueue, and the operators; gone afterwards."""
    controllers = (JOBSET_CONTROLLER, MPI_CONTROLLER, TRAINER_CONTROLLER)
    with (
        with_components(product, ["kueue", "gangs-from-owners"]),
        installed(product, node, *controllers, replace(KUEUE_CONTROLLER, configure=configure)),
    ):
        yield


@pytest.fixture
def labelled(operators: None, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace with gangs from owners. The workloads go first, or their controllers would create deleted pods again."""
    del operators
    with gangs_from_owners(kubectl, "mpijobs.v2beta1.kubeflow.org,trainjobs"):
        yield kubectl


def mpi_job(name: str) -> Object:
    """A launcher without a GPU, and two workers."""
    launcher = template(TWO_GPUS)
    del launcher["spec"]["containers"][0]["resources"]
    replicas = {"Launcher": {"replicas": 1, "template": launcher}, "Worker": {"replicas": 2, "template": template(TWO_GPUS)}}
    spec = {"slotsPerWorker": 2, "mpiReplicaSpecs": replicas}
    return in_queue({"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {}, "spec": spec}, name)


def training_runtime() -> Object:
    """The template of TrainJobs: pods without a GPU, which a TrainJob asks for itself."""
    pods = template(TWO_GPUS)
    [container] = pods["spec"]["containers"]
    container["name"] = "node"
    del container["resources"]
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    jobs = [{"name": "node", "template": {"metadata": step, "spec": {"template": pods}}}]
    spec = {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": jobs}}}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": "plain"}, "spec": spec}


def train_job(name: str) -> Object:
    """Two nodes of the runtime above, each with two GPUs."""
    trainer = {"numNodes": 2, "resourcesPerNode": {"limits": TWO_GPUS.limits, "requests": TWO_GPUS.limits}}
    spec = {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "plain"}, "trainer": trainer}
    return in_queue({"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {}, "spec": spec}, name)


def test_mpi_job_is_counted_and_its_workers_start_together(labelled: Kubectl) -> None:
    check_kind(labelled, mpi_job)


def test_train_job_is_counted_and_its_nodes_start_together(labelled: Kubectl) -> None:
    labelled.apply(training_runtime())
    check_kind(labelled, train_job)
