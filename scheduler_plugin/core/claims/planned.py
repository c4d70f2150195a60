# SPDX-License-Identifier: Apache-2.0
"""Pods with claims that Aliquot's scheduler allocates, and what it writes into the claims. Pure.

The pods are those with the label ``aliquot.dev/allocation: planned``, which the webhook sets together with a scheduling gate. An allocation
has the form that kube-scheduler gives it: it counts these, and keeps the pod on the node that the allocation names.
Source: https://pkg.go.dev/k8s.io/api/resource/v1#AllocationResult
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, ContainerSpec, Pod
from aliquot.placement import mig
from scheduler_plugin.core.claims.first_fit import Request, Taken
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts

FINALIZER: Final = "resource.kubernetes.io/delete-protection"
"""Kubernetes' own, on each allocated claim: it stays until its devices are free."""
MEMORY: Final = "memory"
CORES: Final = "cores"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedPod:
    """A pod with claims that are allocated here."""

    facts: PodFacts
    """With its annotations and times, which other pods without requests for vGPUs do not have."""
    spec: Mapping[str, Any]
    """The fields that limit its nodes."""

    @property
    def is_held(self) -> bool:
        """Whether it has our scheduling gate."""
        return contract.PLANNED in self.facts.gates

    @property
    def waits(self) -> bool:
        """Whether it has no node and can get one."""
        return self.facts.active and not self.facts.node_name and not self.facts.deletion_requested


class _Spec(msgspec.Struct):
    spec: dict[str, Any] = msgspec.field(default_factory=dict)


_LIMITING: Final = ("nodeSelector", "affinity", "tolerations")


def decode_planned(raw: msgspec.Raw | bytes) -> PlannedPod:
    """Read a pod. Raises DecodeError, AliquotError."""
    item, spec = msgspec.json.decode(raw, type=PodObject), msgspec.json.decode(raw, type=_Spec).spec
    metadata, started, created = item.metadata, item.status.start_time, item.metadata.creation_timestamp
    annotations = {name: text for name, text in (metadata.annotations or {}).items() if name.startswith(contract.ANNOTATION_PREFIX)}
    facts = pod_facts(item)
    facts = replace(
        facts,
        gpu=Pod(facts.namespace, facts.name, facts.uid, facts.node_name, item.status.phase, annotations, ()),
        started_at=None if started is None else started.timestamp(),
        created_at=None if created is None else created.timestamp(),
    )
    return PlannedPod(facts, {name: spec[name] for name in _LIMITING if spec.get(name)})


def as_container(request: Request) -> ContainerRequest:
    """Return a request of a claim as a container that asks for shares."""
    memory, cores = request.amounts.get(MEMORY), request.amounts.get(CORES)
    memory_bytes = None if memory is None else request.count * -(-int(memory) // units.MIB) * units.MIB
    return ContainerRequest(request.name, request.count, memory_bytes, None if cores is None else request.count * int(cores))


def as_shares(pod: PodFacts, asks: Iterable[ContainerRequest]) -> PodFacts:
    """Return the pod as if it asked for its devices by resources, with its annotations: placement can judge it then."""
    containers = []
    for number, ask in enumerate(asks):
        limits = {contract.RESOURCE_VGPU: str(ask.vgpus)} if ask.vgpus else {}
        limits |= {mig.resource_of_profile(profile): str(count) for profile, count in ask.mig}
        if ask.memory_bytes is not None:
            limits[contract.RESOURCE_VGPU_MEMORY] = str(ask.memory_bytes // units.MIB)
        if ask.cores_percent is not None:
            limits[contract.RESOURCE_VGPU_CORES] = str(ask.cores_percent)
        containers.append(ContainerSpec(f"request-{number}", limits))
    annotations = {} if pod.gpu is None else pod.gpu.annotations
    gpu = Pod(pod.namespace, pod.name, pod.uid, "", "Pending", annotations, tuple(containers))
    return PodFacts(pod.uid, pod.namespace, pod.name, "", True, False, pod.priority, pod.cpu_milli, pod.memory_mib, gpu)


def allocation_of(
    spec: Mapping[str, Any], taken: Sequence[Taken], classes: Mapping[str, Mapping[str, Any]], node: str, share_ids: Sequence[str], at: str
) -> Json:
    """Return the ``status.allocation`` of a claim.

    Args: spec: of the claim. share_ids: a UUID for each device. at: the time, without which kube-scheduler cannot reserve the claim.
    """
    requests = (spec.get("devices") or {}).get("requests") or ()
    results = [_result(one, _stated(requests, one.request), share_id) for one, share_id in zip(taken, share_ids, strict=True)]
    config = [*_config_of_classes(requests, taken, classes), *_config_of_claim(spec)]
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    devices = {"results": results, **({"config": config} if config else {})}
    return {"devices": devices, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]}, "allocationTimestamp": at}


def _result(taken: Taken, stated: Mapping[str, Any], share_id: str) -> Json:
    driver, pool, device = taken.device
    shared = {"consumedCapacity": {name: _quantity(amount) for name, amount in taken.consumed.items()}, "shareID": share_id}
    tolerations = {"tolerations": stated["tolerations"]} if stated.get("tolerations") else {}
    return {"request": taken.request, "driver": driver, "pool": pool, "device": device, **(shared if taken.consumed else {}), **tolerations}


def _quantity(amount: Fraction) -> str:
    """Return an amount as Kubernetes reads it. A capacity consumes whole units."""
    return str(-(-amount.numerator // amount.denominator))


def _stated(requests: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return what a request states, or the alternative ``request/alternative``; empty if there is none of that name."""
    of, _, alternative = name.partition("/")
    for one in requests:
        if one["name"] == of:
            among = one.get("firstAvailable") or ()
            found = next((each for each in among if each["name"] == alternative), None) if alternative else one.get("exactly")
            return found or {}
    return {}


def _config_of_classes(
    requests: Sequence[Mapping[str, Any]], taken: Sequence[Taken], classes: Mapping[str, Mapping[str, Any]]
) -> Iterable[Json]:
    for name in dict.fromkeys(one.request for one in taken):
        found = classes.get(str(_stated(requests, name).get("deviceClassName")), {})
        for config in (found.get("spec") or {}).get("config") or ():
            yield {"source": "FromClass", "requests": [name], "opaque": config["opaque"]}


def _config_of_claim(spec: Mapping[str, Any]) -> Iterable[Json]:
    return ({"source": "FromClaim", **config} for config in (spec.get("devices") or {}).get("config") or ())
