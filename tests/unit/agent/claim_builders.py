# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims as the API returns them, and an API that has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent.core.claims import ClaimRef
from agent.core.identity import claim_grant_id
from agent.core.ledger import ClaimedDevice, ClaimRequest, Grant
from aliquot import contract
from aliquot.contract.model import ClaimUse, ContainerSpec, DeviceShare, Pod
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from tests.unit.agent.builders import BOOT, SECRET, pod, share

NODE = "node-1"


def parameters(**stated: object) -> Mapping[str, object]:
    return {"apiVersion": contract.PARAMETERS_API_VERSION, "kind": contract.PARAMETERS_KIND, **stated}


def result(
    device: int | str = 0, mib: int | None = 100, cores: int | None = None, request: str = "gpu", **more: object
) -> Mapping[str, Any]:
    """One device of an allocation, with what it consumes."""
    memory = {"memory": f"{mib}Mi"} if mib is not None else {}
    return {
        "request": request,
        "driver": contract.DRA_DRIVER,
        "pool": NODE,
        "device": device if isinstance(device, str) else f"gpu-{device}",
        "shareID": f"share-{device}",
        "consumedCapacity": {**memory, "cores": str(cores or 1), "shares": "1"},
        **more,
    }


def claim_object(
    name: str,
    *results: Mapping[str, Any],
    uid: str | None = None,
    pods: Sequence[Pod] = (),
    stated: Mapping[str, object] | None = None,
    of_class: Mapping[str, object] | None = None,
    cores_stated: bool = False,
    allocated: bool = True,
) -> Mapping[str, Any]:
    """A claim. Args: stated, of_class: opaque parameters of the claim and of its DeviceClass."""
    capacity = {"capacity": {"requests": {"cores": "1"}}} if cores_stated else {}
    names = dict.fromkeys(one["request"] for one in results)
    config = [
        {"source": source, "opaque": {"driver": contract.DRA_DRIVER, "parameters": given}}
        for source, given in (("FromClaim", stated), ("FromClass", of_class))
        if given is not None
    ]
    status: dict[str, Any] = {"reservedFor": [{"resource": "pods", "name": one.name, "uid": one.uid} for one in pods]}
    if allocated:
        status["allocation"] = {"devices": {"results": list(results), "config": config}}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": uid or f"uid-{name}"},
        "spec": {"devices": {"requests": [{"name": request, "exactly": {"name": request, **capacity}} for request in names]}},
        "status": status,
    }


def body(claim: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(claim)


def claim_grant(name: str, *shares: DeviceShare, boot: str = BOOT, of: Pod | None = None) -> Grant:
    """The grant of a claim's only request."""
    request = ClaimRequest(f"uid-{name}", name, "gpu", tuple(ClaimedDevice(NODE, "gpu-0") for _ in shares or (1,)), ("gpu",))
    return Grant(
        grant_id=claim_grant_id(SECRET, request.uid, "gpu"),
        resource=contract.RESOURCE_VGPU,
        device_ids=(),
        namespace="default",
        pod=of.name if of is not None else "",
        pod_uid=of.uid if of is not None else "",
        container="main",
        shares=shares or (share(),),
        boot_id=boot,
        claim=request,
    )


def ref(name: str, uid: str | None = None) -> ClaimRef:
    return ClaimRef("default", name, uid or f"uid-{name}")


def user(name: str, claim: str, request: str = "", *, container: str = "main", phase: str = "Pending") -> Pod:
    """A pod with a container that uses a claim."""
    return pod(name, ContainerSpec(container, {}, claims=(ClaimUse(claim, request),)), phase=phase)


def using(name: str, claim: str, /, **containers: Sequence[str]) -> Pod:
    """A pod with containers that use a claim. Args: containers: by name, the requests that it uses; ``[""]`` for all of them."""
    specs = [ContainerSpec(one, {}, claims=tuple(ClaimUse(claim, request) for request in named)) for one, named in containers.items()]
    return pod(name, *specs)


@dataclass
class FakeResourceApi:
    """Has claims and slices; fails as long as ``outage`` is set."""

    claims: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    slices: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reads: int = 0
    reported: list[tuple[str, Sequence[Mapping[str, Any]]]] = field(default_factory=list)
    outage: bool = False
    dropped: frozenset[str] = frozenset()
    """Fields of a device that this API server does not know."""

    def put(self, claim: Mapping[str, Any]) -> None:
        self.claims[claim["metadata"]["name"]] = claim

    def read_claim(self, namespace: str, name: str) -> bytes:
        self._check()
        self.reads += 1
        if name not in self.claims:
            raise KubeNotFoundError(f"no claim {namespace}/{name}", status=404)
        return body(self.claims[name])

    def report_devices(self, namespace: str, name: str, uid: str, devices: Sequence[Mapping[str, Any]]) -> None:
        self._check()
        self.reported.append((name, devices))

    def create_slice(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._store(body["metadata"]["name"], body)

    def replace_slice(self, name: str, resource_version: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._store(name, body)

    def delete_slice(self, name: str) -> None:
        self._check()
        self.slices.pop(name, None)

    def _store(self, name: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check()
        devices = [{key: value for key, value in device.items() if key not in self.dropped} for device in body["spec"]["devices"]]
        self.slices[name] = {**body["spec"], "devices": devices}
        return self.slices[name]

    def _check(self) -> None:
        if self.outage:
            raise KubeApiError("the API server does not reply")
