# SPDX-License-Identifier: Apache-2.0
"""The small installation: one DaemonSet, and the agent itself places pods. The cluster is as if the scheduler had never been installed."""

import pytest

from aliquot import contract
from tests.e2e.kubectl import Kubectl, KubectlError, eventually
from tests.e2e.product import GPU_MEMORY_MIB, MIB, Slice, Variant, parse_events, slice_pod

PODS = 20
VARIANT = Variant(("simulated",), overlay="local-placement")
pytestmark = pytest.mark.usefixtures("product")


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
