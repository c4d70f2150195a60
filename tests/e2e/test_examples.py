# SPDX-License-Identifier: Apache-2.0
"""Every manifest of deploy/examples, unchanged except for its image: its pods run with what they request, or wait for the stated reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from aliquot import contract
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import CLIENT_IMAGE, GPU_MEMORY_MIB, MIB, parse_events
from tests.e2e.test_refusals import wait_until_it_says
from tests.rendering import EXAMPLES

pytestmark = pytest.mark.usefixtures("product")

FILES = {path.stem: path for path in sorted(EXAMPLES.glob("*.yaml")) if not path.stem.startswith("kueue")}
"""Kueue's is test_queues.py's, where Kueue is."""
NOT_OFFERED = "the pod's isolation or memory burst not offered"
WAITS = {
    "driver": NOT_OFFERED,
    "gpu-uuid": "GPUs excluded by the pod's gpu-type or gpu-uuid",
    "memory-burst": NOT_OFFERED,
    "mig": "Insufficient nvidia.com/mig-1g.18gb",
    "mps": NOT_OFFERED,
}
"""What this cluster's nodes lack, as the pod's events say it: the GPUs are simulated and not in MIG mode, the agents have no settings."""
START_SECONDS = 60


def objects(name: str) -> list[Object]:
    """The objects of an example."""
    return list(yaml.safe_load_all(FILES[name].read_text()))


@pytest.fixture
def applied(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[list[Object]]:
    """The objects of the example that a test is about, applied with an image that is there; gone when it ends."""
    items = objects(request.getfixturevalue("name"))
    for item in items:
        for container in containers_of(item.get("spec", {}).get("template", item).get("spec", {})):
            container.update(image=CLIENT_IMAGE, imagePullPolicy="IfNotPresent")
    kubectl.apply(*items)
    yield items
    for item in items:
        kubectl.delete(item["kind"], item["metadata"]["name"])


def containers_of(pod_spec: Object) -> list[Any]:
    return [*pod_spec.get("initContainers", []), *pod_spec.get("containers", [])]


def pods_wanted(items: list[Object]) -> int:
    """How many pods objects come to."""
    specs = [(item["kind"], item.get("spec", {})) for item in items]
    return sum(_PODS[kind](spec) for kind, spec in specs if kind in _PODS)


_PODS = {
    "Pod": lambda _: 1,
    "Job": lambda spec: spec.get("parallelism", 1),
    "Deployment": lambda spec: spec["replicas"],
}


def wait_until_running(kubectl: Kubectl, count: int) -> list[Object]:
    """Wait for all pods of the namespace to run; return them."""

    def running() -> list[Object] | None:
        pods = kubectl.all("pods")
        return pods if [pod["status"].get("phase") for pod in pods] == ["Running"] * count else None

    def explained() -> str:
        return "\n".join(kubectl.explain(pod["metadata"]["name"]) for pod in kubectl.all("pods")) or "there is no pod"

    found: list[Object] = eventually(running, f"{count} pods to run", seconds=START_SECONDS, otherwise=explained)
    return found


def granted(kubectl: Kubectl, pod: Object) -> dict[str, list[int]]:
    """The memory of each GPU that the containers of a running pod see, in MiB; empty for containers that requested no GPU."""
    seen = {}
    for container in pod["spec"]["containers"]:
        if contract.RESOURCE_VGPU in container.get("resources", {}).get("limits", {}):
            said = kubectl.exec(pod["metadata"]["name"], "/bin/aliquot-cuda-client", "info", container=container["name"])
            seen[container["name"]] = [event["total_bytes"] // MIB for event in parse_events(said) if event["event"] == "device"]
    return seen


def asked(pod: Object) -> dict[str, list[int]]:
    """What the containers of a pod asked for in the end, in the same form; without an amount it is the whole GPU."""
    wanted = {}
    for container in pod["spec"]["containers"]:
        limits = container.get("resources", {}).get("limits", {})
        if (count := int(parse_quantity(limits.get(contract.RESOURCE_VGPU, "0")))) > 0:
            each = int(parse_quantity(limits.get(contract.RESOURCE_VGPU_MEMORY, count * GPU_MEMORY_MIB))) // count  # 6000 is 6k
            if contract.RESOURCE_VGPU_MEMORY_PERCENT in limits:
                each = GPU_MEMORY_MIB * int(limits[contract.RESOURCE_VGPU_MEMORY_PERCENT]) // count // 100
            wanted[container["name"]] = [each] * count
    return wanted


@pytest.mark.parametrize("path", FILES.values(), ids=lambda path: path.stem)
def test_api_server_accepts_example_unchanged_and_knows_every_field(product: Kubectl, path: Path) -> None:
    product.run("apply", f"--filename={path}", "--dry-run=server", "--validate=strict")


@pytest.mark.parametrize("name", [name for name in FILES if name not in WAITS])
def test_an_example_runs_with_what_it_asks_for(kubectl: Kubectl, applied: list[Object], name: str) -> None:
    del name  # names the test; what it is about is applied
    pods = wait_until_running(kubectl, pods_wanted(applied))
    assert all(asked(pod) for pod in pods)
    for pod in pods:
        assert granted(kubectl, pod) == asked(pod)


@pytest.mark.parametrize("name", WAITS)
def test_example_beyond_cluster_capacity_states_that(kubectl: Kubectl, applied: list[Object], name: str) -> None:
    [pod] = [item["metadata"]["name"] for item in applied]
    wait_until_it_says(kubectl, pod, WAITS[name])


@pytest.mark.parametrize("name", ["quota"])
def test_the_quota_of_an_example_counts_its_pod(kubectl: Kubectl, applied: list[Object], name: str) -> None:
    del applied, name

    def used() -> dict[str, str]:
        return {
            key: amount for key, amount in kubectl.get("resourcequota", "gpus").get("status", {}).get("used", {}).items() if amount != "0"
        }

    amounts = eventually(used, "the quota to count")
    assert amounts == {"requests.nvidia.com/vgpu": "1", "requests.nvidia.com/vgpu-memory": "32768", "requests.nvidia.com/vgpu-cores": "50"}
