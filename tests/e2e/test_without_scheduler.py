# SPDX-License-Identifier: Apache-2.0
"""The small installation: one DaemonSet, and the agent itself places pods. The scheduler is put back afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from aliquot import contract
from tests.e2e.cluster.paths import ROOT
from tests.e2e.kubectl import Kubectl, KubectlError, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    GPU_MEMORY_MIB,
    MIB,
    Slice,
    install_manifests,
    parse_events,
    slice_pod,
    wait_until_agents_rolled_out,
    wait_until_rolled_out,
)

PODS = 20
SMALL = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{daemonset}/overlays/local-placement]
components: [{daemonset}/components/simulated]
"""


@pytest.fixture(autouse=True, scope="module")
def agents_alone(product: Kubectl, scratch_in_tree: Path) -> Iterator[None]:
    """The cluster as if the scheduler had never been installed."""
    system = product.within(AGENT_NAMESPACE)
    product.run("delete", f"--kustomize={ROOT}/deploy/daemonset/scheduler", "--timeout=60s")
    system.run("wait", "pods", "--selector=app.kubernetes.io/name=aliquot-scheduler", "--for=delete", "--timeout=60s")
    daemonset = Path("../" * len(scratch_in_tree.relative_to(ROOT).parts)) / "deploy/daemonset"
    (scratch_in_tree / "kustomization.yaml").write_text(SMALL.format(daemonset=daemonset))
    product.apply_kustomization(scratch_in_tree)
    wait_until_agents_rolled_out(system)
    yield
    install_manifests(product)
    wait_until_rolled_out(system)


def test_pods_started_at_once_each_see_their_own_amount(kubectl: Kubectl) -> None:
    asked = {f"pod-{number}": 2048 + 100 * number for number in range(PODS)}
    kubectl.apply(*(slice_pod(name, Slice(mib), ["/bin/aliquot-cuda-client", "info"]) for name, mib in asked.items()))

    def ended() -> bool:
        return all(pod["status"].get("phase") in ("Succeeded", "Failed") for pod in kubectl.all("pods"))

    eventually(ended, f"{PODS} pods to end", seconds=90)
    assert {name: parse_events(kubectl.logs(name))[-1]["total_bytes"] // MIB for name in asked} == asked
    assert {pod["spec"]["schedulerName"] for pod in kubectl.all("pods")} == {"default-scheduler"}


def test_request_above_any_gpu_is_refused_with_reason_in_pod_events(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("too-large", Slice(GPU_MEMORY_MIB + 1)))

    def refused() -> list[str]:
        return [event for event in kubectl.events("too-large") if event.startswith("AliquotRefused")]

    [said, *_] = eventually(refused, "an AliquotRefused event", otherwise=lambda: kubectl.explain("too-large"))
    assert f"{GPU_MEMORY_MIB + 1} MiB" in said, "names what was asked"
    assert f"at most {GPU_MEMORY_MIB} MiB" in said, "names what there is"
    assert "Ask for less nvidia.com/vgpu-memory" in said, "says what to do"


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        pytest.param({contract.RESOURCE_VGPU_MEMORY: "4096"}, "would start without a GPU", id="memory alone"),
        pytest.param({contract.RESOURCE_VGPU_CORES: "30"}, "would start without a GPU", id="cores alone"),
        pytest.param({contract.RESOURCE_VGPU: "1", contract.RESOURCE_VGPU_MEMORY: "4Gi"}, "such as 4096 for 4Gi", id="a unit"),
    ],
)
def test_what_no_webhook_completes_is_refused_with_what_to_write(kubectl: Kubectl, limits: dict[str, str], sentence: str) -> None:
    pod = slice_pod("incomplete", Slice(1))
    pod["spec"]["containers"][0]["resources"]["limits"] = limits
    with pytest.raises(KubectlError, match=sentence):
        kubectl.apply(pod)
