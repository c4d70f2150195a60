# SPDX-License-Identifier: Apache-2.0
"""Argo Workflows itself: the steps of a DAG use the GPUs of a node one after another."""

from collections.abc import Iterator

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.controllers import ARGO_CONTROLLER, installed
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import CLIENT_IMAGE, GPU_MEMORY_MIB, GPUS, Slice
from tests.e2e.test_owner_groups import START_SECONDS, annotation

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

ALL_GPUS = Slice(GPUS * GPU_MEMORY_MIB, vgpus=GPUS)
HALF_OF_GPUS = Slice(GPUS // 2 * GPU_MEMORY_MIB, vgpus=GPUS // 2)


@pytest.fixture(scope="module")
def argo(product: Kubectl, node: Cluster) -> Iterator[None]:
    """The product, and Argo's controller; gone afterwards."""
    with installed(product, node, ARGO_CONTROLLER):
        yield


def step(name: str, wanted: Slice, command: list[str]) -> Object:
    """A template of a workflow."""
    resources = {"limits": wanted.limits}
    container = {"image": CLIENT_IMAGE, "imagePullPolicy": "IfNotPresent", "command": command, "resources": resources}
    return {"name": name, "container": container}


def executor_rights() -> list[Object]:
    """What Argo's executor needs in the namespace of a workflow."""
    api, metadata = "rbac.authorization.k8s.io/v1", {"name": "executor"}
    rules = [{"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "executor"}
    subjects = [{"kind": "ServiceAccount", "name": "default"}]
    return [
        {"apiVersion": api, "kind": "Role", "metadata": metadata, "rules": rules},
        {"apiVersion": api, "kind": "RoleBinding", "metadata": metadata, "roleRef": reference, "subjects": subjects},
    ]


def test_steps_of_dag_use_the_same_gpus_one_after_another(kubectl: Kubectl, argo: None) -> None:
    del argo
    tasks = [
        {"name": "prepare", "template": "all"},
        {"name": "left", "template": "half", "dependencies": ["prepare"]},
        {"name": "right", "template": "half", "dependencies": ["prepare"]},
        {"name": "join", "template": "all", "dependencies": ["left", "right"]},
    ]
    templates = [{"name": "main", "dag": {"tasks": tasks}}, step("all", ALL_GPUS, ["true"]), step("half", HALF_OF_GPUS, ["true"])]
    spec = {"entrypoint": "main", "templates": templates}
    kubectl.apply(*executor_rights())
    kubectl.apply({"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "dag"}, "spec": spec})

    def phase() -> str:
        text: str = kubectl.get("workflow", "dag").get("status", {}).get("phase", "")
        return text

    eventually(lambda: phase() in ("Succeeded", "Failed", "Error"), "the workflow to end", seconds=2 * START_SECONDS,
               otherwise=lambda: kubectl.run("get", "pods,workflows", "--output=wide") + kubectl.run("get", "events")[-3000:])  # fmt: skip
    assert phase() == "Succeeded"
    pods = kubectl.all("pods")
    assert len(pods) == len(tasks)
    assert {pod["spec"]["schedulerName"] for pod in pods} == {contract.SCHEDULER_NAME}
    assert {annotation(pod, contract.ANNOTATION_GANG) for pod in pods} == {""}
    assert all(annotation(pod, contract.ANNOTATION_ASSIGNMENT) for pod in pods)
    kubectl.delete("workflow", "dag")
