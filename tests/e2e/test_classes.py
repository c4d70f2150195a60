# SPDX-License-Identifier: Apache-2.0
"""Classes of work on one node: a notebook and an inference service take a GPU from training, which comes back when they are gone.

The long form has notebooks that do nothing: they give way, or end.
"""

from collections.abc import Iterator
from functools import partial

import pytest

from aliquot import contract
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import CLIENT, GPU_MEMORY_MIB, GPUS, MIB, Client, Slice, assigned_uuids, slice_pod, with_components

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


CLASSES: Object = {"interactive": {"idleYieldAfter": "1m"}, "ended": {"idleEndAfter": "1m"}}
IDLE_SECONDS = 200
"""An agent reports a pod after a minute, and waits up to 70 s with a write that is not urgent."""


@pytest.fixture
def idle_policy(product: Kubectl) -> Iterator[None]:
    """The product with short times for idle pods."""
    with with_components(product, [], {"classes": CLASSES}):
        yield


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("idle_policy")
def test_idle_notebook_gives_way_and_one_that_works_stays(kubectl: Kubectl) -> None:
    def notebook(name: str, class_name: str, wanted: Slice, *command: str) -> Object:
        pod = slice_pod(name, wanted, command or ("sleep", "3600"))
        pod["metadata"]["labels"] = {contract.LABEL_CLASS: class_name}
        return pod

    def is_gone(name: str) -> bool:
        return not any(pod["metadata"]["name"] == name for pod in kubectl.all("pods"))

    def said(pod: str, reason: str, word: str) -> bool:
        return any(event.startswith(reason) and word in event for event in kubectl.events(pod))

    whole, rest = Slice(GPU_MEMORY_MIB), Slice(GPU_MEMORY_MIB - 1000)
    works = (CLIENT, "work", "--seconds", "3600", "--kernel-us", "1000", "--sync-every", "1")
    others = [slice_pod(f"other-{number}", whole) for number in range(GPUS - 2)]
    kubectl.apply(*others, notebook("works", "interactive", rest, *works), notebook("ended", "ended", Slice(1000)))
    kubectl.apply(notebook("idle", "interactive", whole))
    for pod in kubectl.all("pods"):
        kubectl.wait_for_phase(pod["metadata"]["name"], "Running", seconds=SECONDS)
    kubectl.apply(notebook("training", "training", whole))

    kubectl.wait_for_phase("training", "Running", seconds=IDLE_SECONDS)
    assert is_gone("idle")
    for reason, word in ((contract.EVENT_REASON_IDLE, contract.ANNOTATION_MIN_RUNTIME), (contract.EVENT_REASON_PREEMPTED, "training")):
        eventually(partial(said, "idle", reason, word), f"an event {reason} with {word}", otherwise=lambda: str(kubectl.events("idle")))
    eventually(lambda: is_gone("ended"), "the class to end its idle pod", seconds=IDLE_SECONDS)
    eventually(lambda: said("ended", "", "class ended ends idle pods"), "the reason in an event")
    running = [pod["metadata"]["name"] for pod in kubectl.all("pods") if pod["status"]["phase"] == "Running"]
    assert {"works", *(pod["metadata"]["name"] for pod in others)} < set(running)
