# SPDX-License-Identifier: Apache-2.0
"""MultiKueue between two clusters: jobs are submitted to a manager without GPUs, and run on the GPUs of a worker."""

import base64
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster, running_cluster
from tests.e2e.cluster.paths import RUN
from tests.e2e.conftest import Target, own_namespace
from tests.e2e.controllers import KUEUE_CONTROLLER, installed
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, MIB, Client, Slice, all_images, install_without_agents, wait_until_rolled_out
from tests.e2e.test_queues import CONFIGURATION, START_SECONDS, configure, queued_job, running, shipped, wait_until_counted, workloads_of
from tests.e2e.test_without_dra import restart

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def configure_jobs(objects: Sequence[Object]) -> None:
    """Serve Jobs only: a manager uses no worker that lacks one of its kinds, and these clusters have no LeaderWorkerSets."""
    configure(objects)
    [data] = [item["data"] for item in objects if item["kind"] == "ConfigMap" and CONFIGURATION in item["data"]]
    data[CONFIGURATION] = yaml.safe_dump({**yaml.safe_load(data[CONFIGURATION]), "integrations": {"frameworks": ["batch/job"]}})


KUEUE_FOR_JOBS = replace(KUEUE_CONTROLLER, configure=configure_jobs)
WITHOUT_WATCH_LIST = "--feature-gates=WatchList=false"
"""Of the worker: a manager watches it without a version, which this API server otherwise serves only with an etcd newer than Debian's."""
UNTIL_TOLD = ["sh", "-c", "until [ -e /tmp/end ]; do sleep 0.2; done"]


@pytest.fixture(scope="module")
def clusters(product: Kubectl, node: Cluster, supplied: Target) -> Iterator[tuple[Target, Target]]:
    """A manager that has the webhook and Kueue, and may use the cluster under test as its worker. Both are gone afterwards."""
    with ExitStack() as parts:
        parts.callback(restart_control_plane, node)
        restart_control_plane(node, WITHOUT_WATCH_LIST)
        parts.enter_context(installed(product, node, KUEUE_FOR_JOBS))
        manager = parts.enter_context(running_cluster(RUN.with_name(f"{RUN.name}-manager")))
        for archive in all_images():
            manager.import_image(archive)
        kubectl = manager.kubectl()
        install_without_agents(kubectl)
        parts.enter_context(installed(kubectl, manager, KUEUE_FOR_JOBS))
        way = parts.enter_context(manager.api_of(node))
        kubectl.within("kueue-system").apply(way_to_worker(node.kubeconfig.read_text(), way))
        yield Target(kubectl, manager), supplied


def restart_control_plane(cluster: Cluster, *flags: str) -> None:
    """Run the control plane of a cluster that has the product with some more flags."""
    restart(cluster, flags)
    wait_until_rolled_out(cluster.kubectl().within(AGENT_NAMESPACE))


def way_to_worker(kubeconfig: str, server: str) -> Object:
    """The Secret of multikueue.yaml: a kubeconfig for another address of the server, and with the authority as data."""
    config = yaml.safe_load(kubeconfig)
    [cluster] = [one["cluster"] for one in config["clusters"]]
    cluster["certificate-authority-data"] = base64.b64encode(Path(cluster.pop("certificate-authority")).read_bytes()).decode()
    cluster["server"] = server
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "worker-1"}, "stringData": {"kubeconfig": yaml.safe_dump(config)}}


@dataclass(frozen=True)
class Case:
    """A request, what both clusters have in its place, and the MiB of each GPU in the container."""

    limits: dict[str, str]
    rewritten: dict[str, str]
    gpus_mib: list[int]
    adopted: bool = False


CASES = {
    "aliquot": Case(Slice(16384).limits, Slice(16384).limits, [16384]),
    "hami": Case({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "8192"}, Slice(16384, vgpus=2).limits, [8192, 8192], adopted=True),
}


@pytest.mark.parametrize("words", CASES)
def test_job_of_manager_is_counted_the_same_and_runs_on_worker(clusters: tuple[Target, Target], words: str) -> None:
    case, name = CASES[words], f"e2e-multikueue-{words}"
    counted = {resource: int(case.rewritten[resource]) for resource in (contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY)}
    job = queued_job(words, case.limits, "team-a")
    job["spec"]["template"]["spec"]["containers"][0]["command"] = UNTIL_TOLD
    with ExitStack() as parts:
        manager, worker = (parts.enter_context(own_namespace(one, name, adopted=case.adopted)) for one in clusters)
        parts.enter_context(shipped(worker, "cohort"))
        parts.enter_context(shipped(manager, "multikueue"))
        eventually(lambda: is_active(manager), "the manager's queue to be active", otherwise=lambda: explain(manager))

        manager.apply(job)
        eventually(lambda: worker.find("job", words), "the job to be on the worker", seconds=START_SECONDS,
                   otherwise=lambda: f"{explain(manager)}\n{explain(worker)}")  # fmt: skip
        [pod] = running(worker, words, 1)
        assert [limits_of(one.get("job", words)) for one in (manager, worker)] == [case.rewritten] * 2
        for cluster in (manager, worker):
            wait_until_counted(cluster, words, counted)
        assert [device["total_bytes"] for device in Client(worker, pod).devices()] == [mib * MIB for mib in case.gpus_mib]
        assert manager.all("pods") == []

        worker.exec(pod, "touch", "/tmp/end")
        eventually(lambda: is_complete(manager, words), "the manager to know the end of the job", seconds=START_SECONDS,
                   otherwise=lambda: f"{explain(manager)}\n{explain(worker)}")  # fmt: skip
        assert manager.get("job", words)["status"]["succeeded"] == 1
        eventually(lambda: not workloads_of(worker, words), "the worker to be free of it", seconds=START_SECONDS)


def is_active(manager: Kubectl) -> bool:
    """Whether the manager has reached its worker, and admits jobs."""
    conditions = manager.get("clusterqueue", "all-workers").get("status", {}).get("conditions", ())
    return any((one["type"], one["status"]) == ("Active", "True") for one in conditions)


def is_complete(manager: Kubectl, job: str) -> bool:
    conditions = manager.get("job", job).get("status", {}).get("conditions", ())
    return any((one["type"], one["status"]) == ("Complete", "True") for one in conditions)


def limits_of(job: Object) -> dict[str, str]:
    """The limits of a job's container."""
    limits: dict[str, str] = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    return limits


def explain(kubectl: Kubectl) -> str:
    """The state of Kueue's objects, and of the jobs."""
    kinds = "multikueueclusters,admissionchecks,clusterqueues,workloads.kueue.x-k8s.io,jobs"
    return kubectl.run("get", kinds, "--output=yaml", "--ignore-not-found")[-6000:]
