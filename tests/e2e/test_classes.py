# SPDX-License-Identifier: Apache-2.0
"""Classes of work on one node: a notebook and an inference service take a GPU from training, which comes back when they are gone."""

import pytest

from aliquot import contract
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, MIB, Client, Slice, assigned_uuids, slice_pod

pytestmark = pytest.mark.usefixtures("product")

SECONDS = 90
VGPU = contract.RESOURCE_VGPU


def of_class(name: str, limits: dict[str, str], **annotations: str) -> Object:
    """A pod of a class."""
    pod = slice_pod(name, Slice(1), annotations={f"{contract.ANNOTATION_PREFIX}{key}": text for key, text in annotations.items()})
    pod["metadata"]["labels"] = {contract.LABEL_CLASS: name, "app": name}
    pod["spec"]["containers"][0]["resources"]["limits"] = limits
    return pod


def controlled(kind: str, name: str, pod: Object, **spec: object) -> Object:
    """A controller of such pods."""
    template = {key: pod[key] for key in ("metadata", "spec")}
    template["metadata"].pop("name")
    group = {"Job": "batch/v1", "Deployment": "apps/v1"}[kind]
    return {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": {**spec, "template": template}}


def test_training_gives_way_to_notebook_and_service_and_comes_back(kubectl: Kubectl) -> None:
    def running(app: str) -> list[Object]:
        found = kubectl.all("pods", f"--selector=app={app}", "--field-selector=status.phase=Running")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def count(app: str, wanted: int) -> None:
        eventually(lambda: len(running(app)) == wanted, f"{wanted} pods of {app} to run", seconds=SECONDS, otherwise=lambda: explain(app))

    def explain(app: str) -> str:
        return "\n".join(kubectl.explain(pod["metadata"]["name"]) for pod in kubectl.all("pods", f"--selector=app={app}"))

    training = of_class("training", {VGPU: "1"}, **{"min-runtime": "1s"})
    kubectl.apply(controlled("Job", "training", training, parallelism=GPUS, completions=GPUS, backoffLimit=100))
    count("training", GPUS)
    assert {pod["spec"]["priority"] for pod in running("training")} == {-10}

    service = of_class("inference", {VGPU: "1", contract.RESOURCE_VGPU_MEMORY: str(GPU_MEMORY_MIB // 4)})
    service["spec"]["restartPolicy"] = "Always"
    selector = {"matchLabels": {"app": "inference"}}
    kubectl.apply(of_class("interactive", {VGPU: "1"}))
    count("interactive", 1)
    kubectl.apply(controlled("Deployment", "inference", service, replicas=1, selector=selector))
    count("inference", 1)
    count("training", GPUS - 1)
    [notebook], [server] = running("interactive"), running("inference")
    assert (notebook["spec"]["priority"], server["spec"]["priority"]) == (50_000, 100_000)
    assert assigned_uuids(notebook) == assigned_uuids(server), "they share the GPU that one training pod left"
    assert [device["total_bytes"] // MIB for device in Client(kubectl, "interactive").devices()] == [GPU_MEMORY_MIB // 4]

    kubectl.delete("deployment", "inference")
    kubectl.delete("pod", "interactive")
    count("training", GPUS)
