# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims with the control plane of Kubernetes 1.34, where shares of one device are an alpha feature (T22).

The kubelet cannot act as an older one; tests/integration has both versions of its interface.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.product import AGENT_NAMESPACE, GPUS, MIB, wait_until_rolled_out, with_components
from tests.e2e.test_dra import GIB, claim, memory_in, offered, pod, request
from tests.e2e.test_without_dra import restart

FLAGS = ("--emulated-version=1.34", "--feature-gates=DRAConsumableCapacity=true")


@pytest.fixture(scope="module", autouse=True)
def as_134(product: Kubectl, node: Cluster, scratch_in_tree: Path) -> Iterator[None]:
    """API server, controllers and our kube-scheduler as of 1.34, with the feature gate that docs/use/dra.md names."""
    with with_components(product, ["dra"], scratch_in_tree):
        restart(node, FLAGS)
        patch = [{"op": "add", "path": "/spec/template/spec/containers/0/command/-", "value": flag} for flag in FLAGS]
        system = product.within(AGENT_NAMESPACE)
        system.run("patch", "deployment", "aliquot-scheduler", "--type=json", f"--patch={json.dumps(patch)}")
        wait_until_rolled_out(system)
        eventually(lambda: len(offered(product)) == GPUS, "the GPUs in ResourceSlices", seconds=60, otherwise=lambda: str(offered(product)))
        yield
        restart(node, ())


def test_two_claims_share_one_gpu_with_exact_limits(kubectl: Kubectl, product: Kubectl) -> None:
    """T22."""
    assert json.loads(product.raw("/version"))["emulationMinor"] == "34"
    for name, gib in (("one", 8), ("two", 4)):
        kubectl.apply(claim(name, request(memory=f"{gib}Gi")), pod(name, {"main": None}, claim=name))
    for name, gib in (("one", 8), ("two", 4)):
        running = kubectl.wait_for_phase(name, "Running", seconds=90)
        assert running["spec"]["schedulerName"] == contract.SCHEDULER_NAME
        assert memory_in(kubectl, name, "main") == [gib * GIB * MIB]
    results = [kubectl.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"][0] for name in ("one", "two")]
    assert len({one["device"] for one in results}) == 1
