# SPDX-License-Identifier: Apache-2.0
"""Whole GPUs in quotas, by the component count-whole-gpus."""

import pytest

from aliquot import contract
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import GPU_MEMORY_MIB, MIB, Client, Slice, Variant, slice_pod

VARIANT = Variant(("count-whole-gpus",))


@pytest.mark.adopted
@pytest.mark.usefixtures("product")
def test_a_quota_counts_the_memory_of_whole_gpus(kubectl: Kubectl) -> None:
    """All GPUs here have the same."""
    hard = {f"requests.{contract.RESOURCE_VGPU_MEMORY}": str(2 * GPU_MEMORY_MIB)}
    kubectl.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpu"}, "spec": {"hard": hard}})
    eventually(lambda: "hard" in kubectl.get("resourcequota", "gpu").get("status", {}), "the quota to count")
    kubectl.apply(asking_for("whole", {contract.RESOURCE_VGPU: "1"}))
    kubectl.wait_for_phase("whole", "Running")
    assert [device["total_bytes"] for device in Client(kubectl, "whole").devices()] == [GPU_MEMORY_MIB * MIB]
    beyond = [
        asking_for("pair", {contract.RESOURCE_VGPU: "2"}),
        asking_for("pair-exclusive", {contract.RESOURCE_VGPU: "2"}, annotations={contract.ANNOTATION_ISOLATION: "exclusive"}),
        asking_for("pair-by-cores", {contract.RESOURCE_VGPU: "2", contract.RESOURCE_VGPU_CORES: "20"}),
        asking_for("pair-in-hamis-words", {"nvidia.com/gpu": "2", "nvidia.com/gpumem-percentage": "100"}),
    ]
    for pod in beyond:
        requested = rf"exceeded quota: gpu, requested: requests\.nvidia\.com/vgpu-memory={2 * GPU_MEMORY_MIB}"
        with pytest.raises(KubectlError, match=requested):
            kubectl.apply(pod)
    kubectl.apply(asking_for("single-exclusive", {contract.RESOURCE_VGPU: "1"}, annotations={contract.ANNOTATION_ISOLATION: "exclusive"}))
    kubectl.wait_for_phase("single-exclusive", "Running")


def asking_for(name: str, limits: dict[str, str], annotations: dict[str, str] | None = None) -> Object:
    """A pod with these limits."""
    pod = slice_pod(name, Slice(1), annotations=annotations)
    pod["spec"]["containers"][0]["resources"]["limits"] = limits
    return pod
