# SPDX-License-Identifier: Apache-2.0
"""Clusters in memory, for commands: answers by path, and what was merged into them."""

import json
from collections.abc import Mapping
from typing import Any

from aliquot.contract.gpunode import GpuDevice, GpuNode, encode_gpu_node
from aliquot.contract.model import Device
from aliquot.contract.units import MIB
from aliquot_cli.access import ConflictError
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.source import GPU_NODES_PATH

METRICS = """# HELP aliquot_device_info What the device is.
aliquot_build_info{version="0.1.0",driver_version="580.1",cuda_version="13000"} 1.0
aliquot_device_info{node="n1",device_uuid="GPU-aaaa-0",model="NVIDIA H200",minor="0",mig_enabled="false"} 1.0
aliquot_device_info{node="n1",device_uuid="GPU-bbbb-1",model="NVIDIA H200",minor="1",mig_enabled="true"} 1.0
aliquot_device_health{node="n1",device_uuid="GPU-aaaa-0",model="NVIDIA H200"} 1.0
aliquot_device_health{node="n1",device_uuid="GPU-bbbb-1",model="NVIDIA H200"} 0.0
aliquot_device_memory_total_bytes{node="n1",device_uuid="GPU-aaaa-0",model="NVIDIA H200"} 1.048576e+09
aliquot_device_mig_instance_info{node="n1",device_uuid="GPU-bbbb-1",mig_uuid="MIG-1",profile="1g.10gb"} 1.0
aliquot_container_info{node="n1",namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0",uid="u1",backend="shim"} 1.0
aliquot_container_info{node="n1",namespace="ml",pod="hard",container="main",device_uuid="MIG-1",uid="u2",backend="mig"} 1.0
aliquot_container_memory_limit_bytes{node="n1",namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} 1.048576e+08
aliquot_container_memory_used_bytes{node="n1",namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} 1.00663296e+08
aliquot_container_throttled_seconds_total{node="n1",namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} 4.0
aliquot_container_enforcement_in_force{namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0",backend="shim"} 0.0
"""


def gpu(minor: int, uuid: str = "", trouble: str = "") -> GpuDevice:
    device = Device(uuid or f"GPU-{minor}", "NVIDIA H200", minor, f"00000000:{minor + 1:02X}:00.0", 1000 * MIB, 0)
    return GpuDevice(device, trouble)


def gpu_node(name: str = "n1", *devices: GpuDevice, **facts: Any) -> GpuNode:
    return GpuNode(name, devices or (gpu(0, "GPU-aaaa-0"), gpu(1, "GPU-bbbb-1")), **facts)


def agent_pod(node: str = "n1", *, phase: str = "Running") -> dict[str, Any]:
    return {
        "metadata": {"name": f"agent-{node}", "namespace": "aliquot-system", "labels": {"app.kubernetes.io/name": "aliquot-agent"}},
        "spec": {"nodeName": node, "containers": [{"ports": [{"name": "metrics", "containerPort": 9999}]}]},
        "status": {"phase": phase},
    }


class FakeCluster:
    """Implements ``access.Cluster``."""

    def __init__(self, *nodes: GpuNode, pods: list[dict[str, Any]] | None = None, installed: bool = True) -> None:
        self.objects = {node.name: json.loads(encode_gpu_node(node)) for node in nodes}
        for item in self.objects.values():
            item["metadata"]["resourceVersion"] = "1"
        self.pods = [agent_pod()] if pods is None else pods
        self.installed = installed
        self.pages: dict[str, str] = {}
        self.conflicts = 0
        self.page_size = 500

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        if path.startswith(GPU_NODES_PATH):
            if not self.installed:
                raise NotFoundError(path)
            name = path.removeprefix(GPU_NODES_PATH).strip("/")
            return self.objects[name] if name else {"items": list(self.objects.values())}
        begin = int((query or {}).get("continue", 0))
        end = begin + min(self.page_size, int((query or {}).get("limit", len(self.pods) or 1)))
        return {"items": self.pods[begin:end], "metadata": {"continue": str(end) if end < len(self.pods) else ""}}

    def text(self, path: str) -> str:
        if path not in self.pages:
            raise AccessError(f"{path}: 503")
        return self.pages[path]

    def merge(self, path: str, change: Mapping[str, Any]) -> Any:
        item = self.objects[path.rpartition("/")[2]]
        if self.conflicts:
            self.conflicts -= 1
            item["metadata"]["resourceVersion"] = str(int(item["metadata"]["resourceVersion"]) + 1)
            raise ConflictError("changed meanwhile")
        assert change["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]
        spec = {**item.get("spec", {}), **change["spec"]}
        item["spec"] = {key: value for key, value in spec.items() if value is not None}
        return item
