# SPDX-License-Identifier: Apache-2.0
"""Manifests written for HAMi, KAI and NVIDIA's plugin run unchanged, except for the image: the cluster pulls no image, so each is ours."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from aliquot import contract
from aliquot.contract import units
from tests.e2e.cluster.paths import ROOT
from tests.e2e.conftest import Target
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import (
    CLIENT,
    CLIENT_IMAGE,
    GPU_MEMORY_MIB,
    HOLD_OPEN,
    MIB,
    Client,
    Variant,
    parse_events,
    roll_out,
)

pytestmark = [pytest.mark.usefixtures("product"), pytest.mark.adopted]

GOLDEN = ROOT / "tests/unit/scheduler_plugin/webhook/golden"
"""The upstream examples' fields, each with what admission makes of it."""
NOT_OF_THE_TYPE = "GPUs excluded by the pod's gpu-type or gpu-uuid"
NO_SUCH_NODE = "didn't match Pod's node affinity/selector"
NO_BURST = "the pod's isolation or memory burst not offered"
WAITS = {
    "hami/mig_example": "Insufficient nvidia.com/mig-3g.20gb",
    "hami/specify_card_type_to_use": NOT_OF_THE_TYPE,
    "hami/specify_uuid_to_use": NOT_OF_THE_TYPE,
    "kai/gpu-imex-pod": 'resource claim template "imex-channel-0"',
    "kai/gpu-fraction-limit": NO_BURST,
    "kai/gpu-fraction-limit-translated": NO_BURST,
    "kai/gpu-memory-limit": NO_BURST,
    "kai/gpu-memory-limit-translated": NO_BURST,
    "kai/nvfractions": NO_BURST,
    "nvidia/mig-mixed": "Insufficient nvidia.com/mig-1g.5gb",
    "nvidia/mig-single": NO_SUCH_NODE,
    "nvidia/time-slicing-product": NO_SUCH_NODE,
}
"""What this cluster lacks, in the words of a requesting pod's events: its GPUs are H200, not in MIG mode, without oversubscription."""
REFUSED_WITHOUT_MIG = {"hami/dynamic_mig_example": "no node offers MIG instances now"}
"""Examples that choose a MIG profile by its memory: the golden files know profiles, and this cluster has no MIG instance."""
LESS_THAN_A_CONTEXT = "nvidia/fraction-request-alone"
"""512 MiB; a CUDA context on an H200 takes more. The share is granted, and a program gets the error that it is too small."""
ALL_SECONDS = 200

HAMI_TWO_GPUS = """
apiVersion: v1
kind: Pod
metadata: {name: hami-pair}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: aliquot.test/cuda-client:e2e
      command: [sleep, "3600"]
      resources:
        limits: {nvidia.com/gpu: 2, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 30}
"""
HAMI_PERCENTAGE = """
apiVersion: v1
kind: Pod
metadata: {name: hami-half, annotations: {nvidia.com/use-gputype: "H100,H200"}}
spec:
  schedulerName: hami-scheduler
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: aliquot.test/cuda-client:e2e
      command: [sleep, "3600"]
      resources:
        limits: {nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 50}
"""
KAI_FRACTION = """
apiVersion: v1
kind: Pod
metadata: {name: kai-half, labels: {kai.scheduler/queue: test}, annotations: {gpu-fraction: "0.5"}}
spec:
  schedulerName: kai-scheduler
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: aliquot.test/cuda-client:e2e
      command: [sleep, "3600"]
"""
KAI_MEMORY = """
apiVersion: v1
kind: Pod
metadata: {name: kai-memory, annotations: {gpu-memory: "2000"}}
spec:
  schedulerName: kai-scheduler
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: aliquot.test/cuda-client:e2e
      command: [sleep, "3600"]
"""


@pytest.mark.parametrize(
    ("manifest", "gpus_mib"),
    [
        pytest.param(HAMI_TWO_GPUS, [3000, 3000], id="HAMi: amounts are per GPU"),
        pytest.param(HAMI_PERCENTAGE, [GPU_MEMORY_MIB // 2], id="HAMi: percentage"),
        pytest.param(KAI_FRACTION, [GPU_MEMORY_MIB // 2], id="KAI: fraction"),
        pytest.param(KAI_MEMORY, [2000], id="KAI: memory"),
    ],
)
def test_a_manifest_of_another_system_gives_what_it_means_there(kubectl: Kubectl, manifest: str, gpus_mib: list[int]) -> None:
    kubectl.run("apply", "--filename=-", stdin=manifest)
    name = yaml.safe_load(manifest)["metadata"]["name"]
    kubectl.wait_for_phase(name, "Running")
    devices = Client(kubectl, name).devices()
    assert [device["total_bytes"] // MIB for device in devices] == gpus_mib
    assert len({device["uuid"] for device in devices}) == len(gpus_mib)


@pytest.fixture(scope="module")
def adopting(product: Kubectl, target: Target) -> Iterator[None]:
    """A scheduler that takes over plain nvidia.com/gpu too, as docs/use/migration.md describes, where HAMi or NVIDIA's plugin ran."""
    roll_out(product, Variant(("adopt-nvidia-gpu",)))
    yield
    if target.local is not None:
        target.local.in_node("rmdir", "/tmp/nvidia-mps")  # one of KAI's examples has the node make it


@pytest.mark.usefixtures("adopting")
@pytest.mark.timeout(ALL_SECONDS + 100)
def test_every_hami_kai_and_nvidia_example_runs_or_states_what_it_awaits(kubectl: Kubectl) -> None:
    """All at once: many of them take whole GPUs, and each pod that has run makes room."""
    waiting = {}
    for file in sorted(GOLDEN.rglob("*.yaml")):
        if file.parent.name in ("copies", "native"):
            continue  # of pods of our own: test_admission has one of the former, test_examples the latter
        example = f"{file.parent.name}/{file.stem}"
        golden = yaml.safe_load(file.read_text())
        outcome = golden.get("adopted", golden["admitted"])
        if example in REFUSED_WITHOUT_MIG:
            outcome = {"refused": REFUSED_WITHOUT_MIG[example]}
        if submit(kubectl, runnable(golden["pod"], example), outcome):
            waiting[pod_name(example)] = WAITS.get(example, "")

    def unresolved() -> list[str]:
        for pod in kubectl.all("pods"):
            name = pod["metadata"]["name"]
            if name in waiting and resolved(kubectl, pod, waiting[name]):
                del waiting[name]
                kubectl.delete("pod", name, wait=False)
        return sorted(waiting)

    assert len(waiting) > len(WAITS)
    eventually(
        lambda: not unresolved(),
        "every example to run, or to wait for the stated reason",
        seconds=ALL_SECONDS,
        otherwise=lambda: "\n".join(f"{name} (expected: {waiting[name] or 'runs'}): {kubectl.explain(name)}" for name in unresolved()),
    )


def submit(kubectl: Kubectl, pod: Object, outcome: Object) -> bool:
    """Create an example's pod; return whether it is one for us to run. Refused and untouched ones are checked here."""
    refusal = outcome.get("refused")
    if refusal is not None:
        with pytest.raises(KubectlError) as said:
            kubectl.apply(pod)
        assert " ".join(refusal.split()) in str(said.value)
        return False
    kubectl.apply(pod)
    admitted = kubectl.get("pod", pod["metadata"]["name"])["spec"]["schedulerName"]
    untouched = pod["spec"].get("schedulerName", "default-scheduler")
    assert admitted == (untouched if outcome.get("untouched") else contract.SCHEDULER_NAME)
    return not outcome.get("untouched")


def resolved(kubectl: Kubectl, pod: Object, waits_for: str) -> bool:
    """Whether a pod runs with what it asked for, or has said that it waits for the reason it is expected to wait for."""
    name = pod["metadata"]["name"]
    if waits_for:
        return any(waits_for in event for event in kubectl.events(name))
    if pod["status"].get("phase") != "Running":
        return False
    for container in pod["spec"]["containers"]:
        limits = container.get("resources", {}).get("limits", {})
        count = int(limits.get(contract.RESOURCE_VGPU, 0))
        if count:
            seen = parse_events(kubectl.exec(name, "sh", "-c", f"{CLIENT} info; true", container=container["name"]))
            if name == pod_name(LESS_THAN_A_CONTEXT):
                return bool(seen[-1].get("result_name") == "CUDA_ERROR_OUT_OF_MEMORY")
            total = units.parse_quantity(limits.get(contract.RESOURCE_VGPU_MEMORY, str(count * GPU_MEMORY_MIB)))  # 3000 is given back as 3k
            each = int(total) // count
            assert [event["total_bytes"] // MIB for event in seen if event["event"] == "device"] == [each] * count, name
    return True


def runnable(pod: Object, example: str) -> Object:
    """An example's pod under a name of its own, with an image and program that are there. What it asks of CPU and memory is left out:
    this machine may have less."""
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        container.update(image=CLIENT_IMAGE, imagePullPolicy="IfNotPresent", command=list(HOLD_OPEN))
        if container in pod["spec"].get("initContainers", []) and container.get("restartPolicy") != "Always":
            container["command"] = ["sh", "-c", f"{CLIENT} info"]  # it must end, and fails without its GPU
        for amounts in (container.get("resources", {}).get(kind, {}) for kind in ("limits", "requests")):
            for name in ("cpu", "memory"):
                amounts.pop(name, None)
    metadata: dict[str, Any] = {**pod["metadata"], "name": pod_name(example)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**pod["spec"], "terminationGracePeriodSeconds": 1}}


def pod_name(example: str) -> str:
    """The name of an example as a pod may have it."""
    return example.replace("/", "-").replace("_", "-").lower()
