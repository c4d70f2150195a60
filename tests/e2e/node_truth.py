# SPDX-License-Identifier: Apache-2.0
"""What a node's driver and kubelet report, queried on the node: a program that runs in the agent's container.

Of our code it uses only the generated form of kubelet's protocol.

It prints one JSON object. The agent's container is a convenient place only: it has the driver, the kubelet's socket and the node's process
ids. What the agent believes is not asked.
"""

import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any

import grpc
import pynvml

from aliquot.kubelet_api import podresources_pb2, podresources_pb2_grpc

POD_RESOURCES = "unix:///var/lib/kubelet/pod-resources/kubelet.sock"
CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
ASK_SECONDS = 10


def container_of(pid: int) -> str:
    """The id of the container that a process is of; empty for a process of the host, and one that has just ended."""
    try:
        found = CONTAINER_ID.findall(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return ""
    return found[-1] if found else ""


def processes() -> list[dict[str, Any]]:
    """Every process on every GPU that answers: GPU, pid, bytes, container."""
    if library := os.environ.get("ALIQUOT_NVML_LIBRARY"):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid, running = pynvml.nvmlDeviceGetUUID(gpu), pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        except pynvml.NVMLError_GpuIsLost:
            continue
        for process in running:
            container = container_of(process.pid)
            found.append({"gpu": uuid, "pid": process.pid, "bytes": process.usedGpuMemory, "container": container})
    return found


def held() -> list[dict[str, Any]]:
    """Every container that kubelet says holds devices of ours, with their ids."""
    with grpc.insecure_channel(POD_RESOURCES, options=[("grpc.default_authority", "localhost")]) as channel:
        make_stub: Any = podresources_pb2_grpc.PodResourcesListerStub  # its types are asyncio's only
        listed = make_stub(channel).List(podresources_pb2.ListPodResourcesRequest(), timeout=ASK_SECONDS)
    return [
        {"namespace": pod.namespace, "pod": pod.name, "container": container.name, "ids": list(devices.device_ids)}
        for pod in listed.pod_resources
        for container in pod.containers
        for devices in container.devices
        if devices.resource_name.startswith("nvidia.com/")
    ]


print(json.dumps({"processes": processes(), "held": held()}))
