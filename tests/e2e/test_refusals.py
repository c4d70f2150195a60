# SPDX-License-Identifier: Apache-2.0
"""A pod that asks for too much says why."""

import pytest

from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, Slice, slice_pod

pytestmark = pytest.mark.usefixtures("product")


def test_request_above_any_gpu_waits_and_states_that_none_is_large_enough(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("too-large", Slice(GPU_MEMORY_MIB + 1)))
    wait_until_it_says(kubectl, "too-large", "1 not enough free memory on one GPU")


def test_more_than_the_node_has_waits_and_says_for_which_resource(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("hopeless", Slice(GPUS * GPU_MEMORY_MIB + 8, vgpus=GPUS)))
    wait_until_it_says(kubectl, "hopeless", "Insufficient nvidia.com/vgpu-memory")


def test_gpu_type_missing_in_cluster_is_named(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("picky", Slice(1024), annotations={"aliquot.dev/gpu-type": "B200"}))
    wait_until_it_says(kubectl, "picky", "1 GPUs excluded by the pod's gpu-type or gpu-uuid")


def test_pod_bound_by_other_scheduler_gets_no_gpu_and_event_with_remedy(kubectl: Kubectl) -> None:
    stranger = slice_pod("stranger", Slice(1024))
    stranger["spec"]["schedulerName"] = "by-hand"
    kubectl.apply(stranger)
    node = kubectl.all("nodes")[0]["metadata"]["name"]
    kubectl.bind("stranger", node)
    said = eventually(
        lambda: [event for event in kubectl.events("stranger") if event.startswith("AliquotRefused")],
        "an AliquotRefused event",
        otherwise=lambda: kubectl.explain("stranger"),
    )
    assert "aliquot.dev/assignment" in said[0]


def wait_until_it_says(kubectl: Kubectl, pod: str, reason: str) -> None:
    """Wait until the scheduler says why a pod waits. A scheduler that has just started may say something else first."""

    def said() -> list[str]:
        return [event for event in kubectl.events(pod) if event.startswith("FailedScheduling") and reason in event]

    eventually(said, f"the scheduler to say: {reason}", otherwise=lambda: kubectl.explain(pod))
