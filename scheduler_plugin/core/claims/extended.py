# SPDX-License-Identifier: Apache-2.0
"""The claim that kube-scheduler makes for a pod with extended resources that DeviceClasses give out. Pure.

The claim has a request for each container and resource. On a node that has a resource in its allocatable amounts, a device plugin gives it
out, so the claim for that node lacks its requests. Init containers that end use the devices of later containers, and of each other.
Source: k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources, ``createRequestsAndMappings``
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler_plugin.core.claims.objects import COUNT
from scheduler_plugin.core.cluster.extended import CLASS_PREFIX, ExtendedAsk

Json = Mapping[str, Any]


def classes_by_resource(classes: Mapping[str, Json]) -> Mapping[str, str]:
    """Return the names of the DeviceClasses by the resource that they give out. Of several for one resource the newest counts."""
    found = {f"{CLASS_PREFIX}{name}": name for name in classes}
    for name in sorted(sorted(classes, reverse=True), key=lambda name: classes[name]["metadata"].get("creationTimestamp") or ""):
        if resource := (classes[name].get("spec") or {}).get("extendedResourceName"):
            found[resource] = name
    return found


def requests_for(asks: Iterable[ExtendedAsk], class_of: Mapping[str, str]) -> Sequence[tuple[str, Json]]:
    """Return the requests of the claim, as the API has them, each with its resource. Resources without a class get none."""
    by_resource: dict[str, list[ExtendedAsk]] = {}
    for ask in asks:
        if ask.resource in class_of:
            by_resource.setdefault(ask.resource, []).append(ask)
    found = [(resource, _request(ask, class_of[resource])) for resource, of_one in by_resource.items() for ask in _own(of_one)]
    return sorted(found, key=lambda item: str(item[1]["name"]))


def _own(asks: Sequence[ExtendedAsk]) -> Iterable[ExtendedAsk]:
    """Yield who gets devices of its own: each container that stays, and of the init containers that end the one that lacks most."""
    lasting = [ask for ask in asks if not ask.is_brief]
    lacking = [
        ask._replace(amount=ask.amount - sum(other.amount for other in lasting if other.container >= ask.container))
        for ask in asks
        if ask.is_brief
    ]
    yield from lasting
    most = max(lacking, key=lambda ask: ask.amount, default=None)
    if most is not None and most.amount > 0:
        yield most


def _request(ask: ExtendedAsk, device_class: str) -> Json:
    exactly = {"deviceClassName": device_class, "allocationMode": COUNT, "count": ask.amount}
    return {"name": f"container-{ask.container}-request-{ask.position}", "exactly": exactly}
