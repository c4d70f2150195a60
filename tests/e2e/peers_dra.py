# SPDX-License-Identifier: Apache-2.0
"""The examples of two other DRA drivers, run against this one: Kubernetes' dra-example-driver, and NVIDIA's driver.

Not part of ``make e2e``: the examples are not ours. The caller names checkouts of the two projects.

    make peers-dra EXAMPLES="/src/dra-example-driver /src/dra-driver-nvidia-gpu"

Each file is applied as it is, with three changes: the image is one that the cluster has, the programs only stay, and attributes that only
dra-example-driver has become those of ours. Its classes exist here as aliases. ``EXPECTED`` says of each file what must happen; a file
that is not in it fails, so that a newer checkout shows what is new.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from aliquot import contract
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, CLIENT, CLIENT_IMAGE, GPUS, HOLD_OPEN, wait_until_agents_rolled_out, with_components
from tests.e2e.test_dra import offered

CHECKOUTS = [Path(path) for path in os.environ.get("ALIQUOT_PEER_EXAMPLES", "").split()]
FOLDERS = (
    *("demo/examples", "demo/specs/quickstart/v1"),  # Kubernetes 1.36 serves no v1beta1
    *("demo/specs/consumable-shares", "demo/specs/extended-resources", "tests/bats/specs"),
)
GPU_CLASSES = {"gpu.example.com": "example.com/gpu", "gpu.nvidia.com": "nvidia.com/gpu"}
"""Classes of the two drivers, with the resource by which pods request them."""
RUNS = ""
ONE_GRANT = "A container can use one claim"
"""A container has one limits file, so it uses one claim."""
NO_DEVICE = "cannot allocate all claims"
EXPECTED: Mapping[str, str] = {
    # --- dra-example-driver ---
    "demo/examples/admin-access/admin-access.yaml": RUNS,
    "demo/examples/basic-multiple-requests/basic-multiple-requests.yaml": RUNS,
    "demo/examples/basic-resourceclaim-opaque-config/basic-resourceclaim-opaque-config.yaml": RUNS,
    "demo/examples/basic-resourceclaimtemplate/basic-resourceclaimtemplate.yaml": RUNS,
    "demo/examples/basic-shared-claim-across-containers/basic-shared-claim-across-containers.yaml": RUNS,
    "demo/examples/basic-shared-claim-across-pods/basic-shared-claim-across-pods.yaml": RUNS,
    "demo/examples/binding-conditions/binding-conditions.yaml": RUNS,
    "demo/examples/cel-selector/cel-selector.yaml": RUNS,
    "demo/examples/extended-resource-request/extended-resource-request.yaml": RUNS,
    "demo/examples/gpu-allow-multiple-allocations/gpu-allow-multiple-allocations.yaml": RUNS,
    "demo/examples/gpu-allow-multiple-allocations-partitionable/gpu-allow-multiple-allocations-partitionable.yaml": RUNS,
    "demo/examples/initcontainer-shared-gpu/initcontainer-shared-gpu.yaml": RUNS,
    "demo/examples/partitionable-devices/partitionable-devices.yaml": RUNS,
    "demo/examples/prioritized-alternatives/prioritized-alternatives.yaml": RUNS,
    # --- NVIDIA's driver ---
    "demo/specs/quickstart/v1/gpu-test1.yaml": RUNS,
    "demo/specs/quickstart/v1/gpu-test2.yaml": RUNS,
    "demo/specs/quickstart/v1/gpu-test3.yaml": RUNS,
    "demo/specs/quickstart/v1/gpu-test4.yaml": NO_DEVICE,  # MIG instances
    "demo/specs/quickstart/v1/gpu-test5.yaml": RUNS,
    "demo/specs/quickstart/v1/gpu-test6.yaml": NO_DEVICE,  # GPUs of type A100 only
    "demo/specs/quickstart/v1/gpu-test-mps.yaml": RUNS,
    "demo/specs/consumable-shares/integer-sharing.yaml": RUNS,
    "demo/specs/consumable-shares/memory-sharing.yaml": RUNS,
    "demo/specs/consumable-shares/unlimited-sharing.yaml": RUNS,
    "demo/specs/extended-resources/gpu-full.yaml": RUNS,
    "tests/bats/specs/gpu-1pod-2cnt-1gpu.yaml": RUNS,
    "tests/bats/specs/gpu-2pods-1gpu.yaml": RUNS,
    "tests/bats/specs/gpu-2pods-2gpus.yaml": RUNS,
    "tests/bats/specs/gpu-anymig.yaml": NO_DEVICE,
    "tests/bats/specs/gpu-cel-nomatch.yaml": NO_DEVICE,
    "tests/bats/specs/gpu-consumable-shares-integer.yaml": RUNS,
    "tests/bats/specs/gpu-consumable-shares-memory.yaml": RUNS,
    "tests/bats/specs/gpu-cuda-busgrind.yaml": RUNS,
    "tests/bats/specs/gpu-cuda-demo-suite.yaml": RUNS,
    "tests/bats/specs/gpu-job-rct-parallel.yaml": RUNS,
    "tests/bats/specs/gpu-job-rct.yaml": RUNS,
    "tests/bats/specs/gpu-mps.yaml": RUNS,
    "tests/bats/specs/gpu-multiple-mig.yaml": NO_DEVICE,
    "tests/bats/specs/gpu-pod-fail-restart.yaml": RUNS,
    "tests/bats/specs/gpu-simple-full.yaml": RUNS,
    "tests/bats/specs/gpu-simple-mig-ts.yaml": NO_DEVICE,
    "tests/bats/specs/gpu-simple-mig.yaml": NO_DEVICE,
    "tests/bats/specs/gpu-timeslicing.yaml": RUNS,
    "tests/bats/specs/gpu-two-claims-one-pod.yaml": ONE_GRANT,
}
NOT_ABOUT_GPUS = (
    "imex", "vfio", "mig-1g", "nvb.tmpl", "native-resource", "net-consumable", "podgroup", "device-taints-tolerations", "pods-shared-gpu",
    "rc-shared-gpu",
)  # fmt: skip
"""Parts of the names of files that need other hardware, another feature gate, or an action between two files."""


def files() -> Sequence[Any]:
    """All examples of the checkouts."""
    found = [
        (checkout, path)
        for checkout in CHECKOUTS
        for folder in FOLDERS
        for path in sorted((checkout / folder).rglob("*.yaml"))
        if not any(part in str(path.relative_to(checkout)) for part in NOT_ABOUT_GPUS)
    ]
    if not found:
        raise ValueError(
            f"expected checkouts with examples in ALIQUOT_PEER_EXAMPLES, such as /src/dra-example-driver; found none in {CHECKOUTS}"
        )
    return [pytest.param(path, id=str(path.relative_to(checkout))) for checkout, path in found]


@pytest.fixture(scope="module", autouse=True)
def dra(product: Kubectl) -> Iterator[None]:
    """The product with all GPUs in slices, and the classes of the two drivers."""
    with with_components(product, ["dra"]):
        system = product.within(AGENT_NAMESPACE)
        system.run("set", "env", "daemonset/aliquot-agent", "ALIQUOT_DRA_ADMIN_ACCESS=true")
        wait_until_agents_rolled_out(system)
        eventually(lambda: len(offered(product)) == GPUS, "the GPUs in ResourceSlices")
        product.apply(*(device_class(name, resource) for name, resource in GPU_CLASSES.items()), device_class("mig.nvidia.com", None))
        yield
        product.delete("deviceclass", *GPU_CLASSES, "mig.nvidia.com")


def device_class(name: str, resource: str | None) -> Object:
    """An alias of our GPUs; without a resource, one of MIG instances, which no slice has."""
    kind = "gpu" if resource is not None else "mig"
    expression = f"device.driver == '{contract.DRA_DRIVER}' && device.attributes['{contract.DRA_DRIVER}'].type == '{kind}'"
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": expression}}]}
    if resource is not None:
        spec["extendedResourceName"] = resource
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize("path", files())
def test_example(product: Kubectl, kubectl: Kubectl, path: Path, request: pytest.FixtureRequest) -> None:
    expected = EXPECTED[request.node.callspec.id]
    objects = [adapted(one) for one in yaml.safe_load_all(in_our_attributes(path.read_text())) if one]
    namespaces = [one["metadata"]["name"] for one in objects if one["kind"] == "Namespace"]
    own = product.within(namespaces[0]) if namespaces else kubectl
    try:
        if namespaces:
            product.apply(*(one for one in objects if one["kind"] == "Namespace"))
        eventually(lambda: own.find("serviceaccount", "default"), "the namespace's service account")
        own.apply(*(one for one in objects if one["kind"] != "Namespace"))
        if expected == RUNS:
            eventually(lambda: all_run(own), "all its pods", seconds=120, otherwise=lambda: explain(own))
        else:
            eventually(lambda: expected in all_events(own), expected, seconds=120, otherwise=lambda: explain(own))
    finally:
        product.delete("namespace", own.namespace, wait=False)


def in_our_attributes(text: str) -> str:
    """Replace the attributes that only dra-example-driver has, and the amounts that its small GPUs have."""
    theirs, ours = "device.attributes['gpu.example.com'].model", f"device.attributes['{contract.DRA_DRIVER}'].productName"
    text = text.replace(theirs, ours).replace("'LATEST-GPU-MODEL'", "'NVIDIA H200'")
    return text.replace("device.capacity['gpu.example.com']", f"device.capacity['{contract.DRA_DRIVER}']").replace("compute:", "cores:")


def adapted(one: Object) -> Object:
    """The same object with programs of ours in its containers."""
    if (spec := pod_spec(one)) is not None:
        for container in spec.get("initContainers", ()):
            replace_program(container, [CLIENT, "info"])
        for container in spec["containers"]:
            replace_program(container, [CLIENT, "info"] if one["kind"] == "Job" else HOLD_OPEN)
        spec["terminationGracePeriodSeconds"] = 1
    return one


def pod_spec(one: Object) -> dict[str, Any] | None:
    if one["kind"] == "Pod":
        return one["spec"]
    template = one.get("spec", {}).get("template") if one["kind"] in ("Deployment", "Job") else None
    return template["spec"] if template else None


def replace_program(container: dict[str, Any], command: Sequence[str]) -> None:
    container.pop("args", None)
    container |= {"image": CLIENT_IMAGE, "imagePullPolicy": "IfNotPresent", "command": list(command)}


def all_run(kubectl: Kubectl) -> bool:
    pods = kubectl.all("pods")
    return bool(pods) and all(one["status"].get("phase") in ("Running", "Succeeded") for one in pods)


def all_events(kubectl: Kubectl) -> str:
    return "\n".join(event.get("message", "") for event in kubectl.all("events"))


def explain(kubectl: Kubectl) -> str:
    return kubectl.run("get", "pods,resourceclaims", "--output=wide") + all_events(kubectl)
