"""A pod that asks for too much says why."""

import pytest

from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, Slice, slice_pod

pytestmark = pytest.mark.usefixtures("product")


def test_more_than_any_gpu_has_is_refused_with_the_reason_in_the_pods_events(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("too-large", Slice(GPU_MEMORY_MIB + 1)))

    def refused() -> list[str]:
        return [event for event in kubectl.events("too-large") if event.startswith("AliquotRefused")]

    [said, *_] = eventually(refused, "an AliquotRefused event", otherwise=lambda: kubectl.explain("too-large"))
    assert f"{GPU_MEMORY_MIB + 1} MiB" in said, "names what was asked"
    assert f"at most {GPU_MEMORY_MIB} MiB" in said, "names what there is"
    assert "Ask for less nvidia.com/vgpu-memory" in said, "says what to do"


def test_more_than_the_node_has_waits_for_a_node_and_the_scheduler_says_for_what(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("hopeless", Slice(GPUS * GPU_MEMORY_MIB + 8, vgpus=GPUS)))

    def said() -> list[str]:
        return [event for event in kubectl.events("hopeless") if "Insufficient nvidia.com/vgpu-memory" in event]

    eventually(said, "the scheduler to name the resource", otherwise=lambda: kubectl.explain("hopeless"))
