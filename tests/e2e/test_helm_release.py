# SPDX-License-Identifier: Apache-2.0
"""The chart on a real cluster: a release is installed, tested, upgraded, rolled back and removed."""

import pytest

from tests.e2e.conftest import Target
from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.product import AGENT_NAMESPACE, MIB, SHARES_PER_GPU, Client, Slice, slice_pod, wait_until_rolled_out
from tests.e2e.test_helm import renderer
from tests.rendering import CHART, Renderer

__all__ = ["renderer"]  # a fixture

RELEASE = "aliquot"
HELM_SECONDS = 150
GPU_NODES = "gpunodes.aliquot.dev"
CLUSTER_KINDS = ("clusterroles", "clusterrolebindings", "crds", "validatingadmissionpolicies", "mutatingwebhookconfigurations")


@pytest.mark.timeout(600)
def test_a_release_is_installed_tested_upgraded_rolled_back_and_removed(bare: Target, kubectl: Kubectl, renderer: Renderer) -> None:
    cluster = bare.kubectl
    system = cluster.within(AGENT_NAMESPACE)

    def helm(*arguments: str) -> str:
        where = (f"--kubeconfig={cluster.kubeconfig}", f"--namespace={AGENT_NAMESPACE}")
        return renderer.run_helm(*arguments, *where, timeout_seconds=HELM_SECONDS)

    def shares_per_gpu() -> set[int]:
        written = [node["status"] for node in cluster.all(GPU_NODES) if "status" in node]
        return {status.get("sharesPerGpu", SHARES_PER_GPU) for status in written}  # the default is left out

    def of_the_cluster() -> set[str]:
        return {name for kind in CLUSTER_KINDS for name in cluster.run("get", kind, "--output=name").split()}

    before = of_the_cluster()
    notes = helm("install", RELEASE, str(CHART), "--set=variant=simulated", "--create-namespace", "--wait", "--timeout=120s")
    assert "pod-security.kubernetes.io/enforce=privileged" in notes, "says what the namespace that Helm made is lacking"
    wait_until_rolled_out(system)
    eventually(lambda: shares_per_gpu() == {SHARES_PER_GPU}, "the inventory")
    assert "Phase:          Succeeded" in helm("test", RELEASE)

    kubectl.apply(slice_pod("before", Slice(2048)))
    kubectl.wait_for_phase("before", "Running")

    def container_and_its_memory() -> tuple[str, int, list[int]]:
        container = kubectl.get("pod", "before")["status"]["containerStatuses"][0]
        devices = Client(kubectl, "before").devices()
        return container["containerID"], container["restartCount"], [device["total_bytes"] for device in devices]

    running = container_and_its_memory()
    assert running[2] == [2048 * MIB]
    helm("upgrade", RELEASE, str(CHART), "--reuse-values", "--set=agent.settings.sharesPerGpu=4", "--wait", "--timeout=120s")
    wait_until_rolled_out(system)
    eventually(lambda: shares_per_gpu() == {4}, "the agents to have the new setting")
    helm("rollback", RELEASE, "--wait", "--timeout=120s")
    wait_until_rolled_out(system)
    eventually(lambda: shares_per_gpu() == {SHARES_PER_GPU}, "the agents to have the old setting")
    assert container_and_its_memory() == running

    helm("uninstall", RELEASE, "--wait", "--timeout=120s")
    eventually(lambda: of_the_cluster() == before, "its objects to be gone", otherwise=lambda: str(of_the_cluster() - before))
    assert container_and_its_memory() == running, "who runs keeps the share and its limit"
