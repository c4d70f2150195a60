# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims with the control plane of Kubernetes 1.34, where shares of one device are an alpha feature (T22).

This kubelet knows both versions of the interface, and has no option to behave like an older one. So the agent serves v1beta1 only.
"""

import json
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.invariants import PYTHON
from tests.e2e.kubectl import Kubectl
from tests.e2e.product import MIB, Variant, patch
from tests.e2e.test_dra import GIB, check_device_reports, claim, memory_in, pod, request, wait_until_offered
from tests.e2e.test_without_dra import kube_scheduler_with, restart

V1BETA1_ONLY = """\
import sys
from agent.adapters import dra_grpc
from agent.services import dra_registrar
dra_grpc.DRIVER_PACKAGES = ("k8s.io.kubelet.pkg.apis.dra.v1beta1",)
dra_registrar.VERSIONS = ("v1beta1.DRAPlugin",)
from agent.__main__ import main
sys.exit(main())
"""
FLAGS = ("--emulated-version=1.34", "--feature-gates=DRAConsumableCapacity=true")


NARROWED = {"op": "add", "path": "/spec/template/spec/containers/0/command", "value": [PYTHON, "-c", V1BETA1_ONLY]}
VARIANT = Variant(("dra",), (kube_scheduler_with(*FLAGS), patch("DaemonSet", "aliquot-agent", NARROWED)))
"""Our kube-scheduler as of 1.34, and an agent with v1beta1 only."""


@pytest.fixture(scope="module")
def as_134(installation: Kubectl, node: Cluster) -> Iterator[None]:
    """The control plane as of 1.34, with the gate that docs/use/dra.md names; as it was afterwards."""
    del installation
    restart(node, FLAGS)
    yield
    restart(node, ())


@pytest.fixture(scope="module", autouse=True)
def dra(as_134: None, product: Kubectl) -> None:
    """All GPUs are offered."""
    del as_134
    wait_until_offered(product)


def test_two_claims_share_one_gpu_with_exact_limits(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T22."""

    def prepared(version: str) -> float:
        """How many calls of kubelet have prepared claims, by this version."""
        families = text_string_to_metric_families(product.raw(f"/api/v1/nodes/{node_name}/proxy/metrics"))
        wanted = {"method_name": f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources", "grpc_status_code": "OK"}
        samples = [sample for family in families for sample in family.samples if wanted.items() <= sample.labels.items()]
        return sum(sample.value for sample in samples if sample.name == "dra_grpc_operations_duration_seconds_count")

    before = {version: prepared(version) for version in ("v1", "v1beta1")}
    assert json.loads(product.raw("/version"))["emulationMinor"] == "34"
    for name, gib in (("one", 8), ("two", 4)):
        kubectl.apply(claim(name, request(memory=f"{gib}Gi")), pod(name, {"main": None}, claim=name))
    for name, gib in (("one", 8), ("two", 4)):
        running = kubectl.wait_for_phase(name, "Running", seconds=90)
        assert running["spec"]["schedulerName"] == contract.SCHEDULER_NAME
        assert memory_in(kubectl, name, "main") == [gib * GIB * MIB]
    results = [kubectl.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"][0] for name in ("one", "two")]
    assert len({one["device"] for one in results}) == 1
    assert {version: prepared(version) - calls for version, calls in before.items()} == {"v1": 0, "v1beta1": 2}


def test_policy_refuses_devices_of_claim_on_another_node(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T21."""
    check_device_reports(kubectl, product, node_name, "an agent writes the devices of claims on its own node only")
