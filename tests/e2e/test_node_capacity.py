# SPDX-License-Identifier: Apache-2.0
"""What a node offers, as the cluster sees it."""

from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, SHARES_PER_GPU

EXPECTED = {
    "nvidia.com/vgpu": str(GPUS * SHARES_PER_GPU),
    "nvidia.com/vgpu-memory": str(GPUS * GPU_MEMORY_MIB),
    "nvidia.com/vgpu-memory-percent": str(GPUS * 100),
    "nvidia.com/vgpu-cores": str(GPUS * 100),
}


def test_the_node_offers_every_share_mebibyte_and_percent(product: Kubectl, node_name: str) -> None:
    def offered() -> bool:
        status = product.get("node", node_name)["status"]
        return all({name: status[kind].get(name) for name in EXPECTED} == EXPECTED for kind in ("capacity", "allocatable"))

    eventually(offered, f"capacity and allocatable {EXPECTED}", otherwise=lambda: str(product.get("node", node_name)["status"]["capacity"]))


def test_describe_node_shows_them(product: Kubectl, node_name: str) -> None:
    described = product.run("describe", "node", node_name)
    for name, amount in EXPECTED.items():
        assert f"{name}:" in described
        assert amount in described
