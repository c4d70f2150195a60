# SPDX-License-Identifier: Apache-2.0
"""Slices, claims and pods that use them, with defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aliquot import contract
from aliquot.contract.gpunode import GpuNode
from scheduler_plugin.core.claims.stored import StoredClaim, decode_claim
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.context import ExtenderContext
from tests.unit.scheduler_plugin.api import pod_object

Json = dict[str, Any]
EXPRESSION = f"device.driver == '{contract.DRA_DRIVER}' && device.attributes['{contract.DRA_DRIVER}'].type == 'gpu'"


def slice_of(node: GpuNode, *, mib: int = 1000, taints: Sequence[Mapping[str, str]] = ()) -> Json:
    """Return the slice that a node's agent publishes."""
    memory = f"{mib}Mi"
    capacity = {
        "memory": {"value": memory, "requestPolicy": {"default": memory, "validRange": {"min": "1Mi", "max": memory, "step": "1Mi"}}},
        "cores": {"value": "100", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "100", "step": "1"}}},
        "shares": {"value": "16", "requestPolicy": {"default": "1", "validValues": ["1"]}},
    }
    devices = [
        {
            "name": f"gpu-{entry.device.minor}",
            "attributes": {
                "type": {"string": "gpu"},
                "uuid": {"string": entry.device.uuid},
                "productName": {"string": entry.device.model},
            },
            "capacity": capacity,
            "allowMultipleAllocations": True,
            "taints": list(taints),
        }
        for entry in node.devices
    ]
    pool = {"name": node.name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": contract.DRA_DRIVER, "nodeName": node.name, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{node.name}-0"}, "spec": spec}


def class_of(name: str = contract.DRA_CLASS, expression: str = EXPRESSION) -> Json:
    return {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}


def asking(name: str = "gpu", *, count: int = 1, device_class: str = contract.DRA_CLASS, selector: str = "", **amounts: str) -> Json:
    """Return one request of a claim."""
    exactly: Json = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count}
    if amounts:
        exactly["capacity"] = {"requests": amounts}
    if selector:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    return {"name": name, "exactly": exactly}


def claim_of(name: str, *requests: Json, results: Sequence[Json] | None = None, reserved_for: Sequence[str] = ()) -> StoredClaim:
    """Return a claim. Args: results: of its allocation; None before its allocation."""
    status: Json = {"reservedFor": [{"resource": "pods", "name": uid, "uid": uid} for uid in reserved_for]}
    if results is not None:
        status["allocation"] = {"devices": {"results": list(results)}}
    metadata = {"name": name, "namespace": "team", "uid": f"claim-{name}"}
    return decode_claim(msgspec.json.encode({"metadata": metadata, "spec": {"devices": {"requests": list(requests)}}, "status": status}))


def result(node: str, minor: int, *, request: str = "gpu", memory: str = "1000Mi", cores: str = "1") -> Json:
    """Return what a claim has of a device."""
    consumed = {"memory": memory, "cores": cores, "shares": "1"}
    return {
        "request": request,
        "driver": contract.DRA_DRIVER,
        "pool": node,
        "device": f"gpu-{minor}",
        "consumedCapacity": consumed,
        "shareID": "11111111-1111-4111-8111-111111111111",
    }


def pod_json(uid: str, *claims: str, node: str = "", cpu: str = "0") -> Json:
    """Return a pod with claims that were made from templates."""
    pod = pod_object(uid, node=node)
    pod["metadata"] |= {"uid": uid, "namespace": "team"}
    pod["spec"]["containers"] = [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]
    pod["spec"]["resourceClaims"] = [{"name": f"c-{name}", "resourceClaimTemplateName": "t"} for name in claims]
    pod["status"]["resourceClaimStatuses"] = [{"name": f"c-{name}", "resourceClaimName": name} for name in claims]
    return pod


def pod_of(uid: str, *claims: str, node: str = "", cpu: str = "0") -> PodFacts:
    return pod_facts(msgspec.convert(pod_json(uid, *claims, node=node, cpu=cpu), PodObject))


def serve(context: ExtenderContext, *nodes: GpuNode) -> None:
    """Show slices of these nodes and the class, and complete the lists."""
    context.claims.pools.replace_classes([class_of()])
    context.claims.holds.replace_slices([slice_of(node) for node in nodes])
    context.claims.is_current = True
