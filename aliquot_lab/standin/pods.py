# SPDX-License-Identifier: Apache-2.0
"""Parses pods for the kubelet: containers in starting order, limits of extended resources, restart rules. Values in, values out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aliquot.contract.errors import QuantityError
from aliquot.contract.units import parse_quantity
from aliquot_lab.standin.cluster import Object
from aliquot_lab.standin.errors import InvalidError

MIRROR = "kubernetes.io/config.mirror"
STATIC_UID = "kubernetes.io/config.hash"
TERMINAL_PHASES = ("Succeeded", "Failed")


class Role(Enum):
    """When a container runs: before the others, next to them from the start (a sidecar), or as the pod's work."""

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod's spec."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    limits: tuple[tuple[str, int], ...]
    """Extended resources only, such as ``nvidia.com/vgpu``."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """The constant part of a pod that the kubelet needs."""

    namespace: str
    name: str
    uid: str
    containers: tuple[Container, ...]
    """Init containers and sidecars first, in the order of the spec."""
    restart_policy: str
    grace_seconds: float
    api_uid: str = ""
    """UID in the API. The mirror of a static pod has another UID than the pod."""

    @property
    def full_name(self) -> str:
        """Return ``namespace/name``."""
        return f"{self.namespace}/{self.name}"


def read_pod(pod: Object) -> PodSpec:
    """Parse a pod. Raises InvalidError for a pod that the stand-in cannot run."""
    spec, metadata = pod["spec"], pod["metadata"]
    before = [_container(item, _init_role(item)) for item in spec.get("initContainers", ())]
    work = [_container(item, Role.APP) for item in spec.get("containers", ())]
    if not work:
        raise InvalidError(f"pod {metadata['name']}: spec.containers is empty")
    return PodSpec(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=uid_of(pod),
        containers=(*before, *work),
        restart_policy=spec.get("restartPolicy", "Always"),
        grace_seconds=float(spec.get("terminationGracePeriodSeconds", 30)),
        api_uid=metadata["uid"],
    )


def uid_of(pod: Object) -> str:
    """Return the UID under which the kubelet runs a pod. For a static pod it is the hash of its file, from an annotation of the mirror."""
    annotations = pod["metadata"].get("annotations", {})
    return str(annotations[STATIC_UID] if MIRROR in annotations else pod["metadata"]["uid"])


def requested(spec: PodSpec) -> dict[str, int]:
    """Return what the scheduler and admission count for a pod: the sum of its containers, or its largest init container if that is more."""
    together = _sum(container.limits for container in spec.containers if container.role is not Role.INIT)
    for container in spec.containers:
        if container.role is Role.INIT:
            for resource, amount in container.limits:
                together[resource] = max(together.get(resource, 0), amount)
    return together


def is_active(pod: Object) -> bool:
    """Whether the pod still runs or will run."""
    return pod.get("status", {}).get("phase") not in TERMINAL_PHASES


def parse_amount(text: str) -> int:
    """Parse a whole Kubernetes quantity such as ``0``, ``3``, ``4Gi`` or ``20k``. Raises InvalidError."""
    try:
        amount = parse_quantity(text)
    except QuantityError as exc:
        raise InvalidError(str(exc)) from exc
    if amount.denominator != 1 or amount < 0:
        raise InvalidError(f"quantity {text!r}: expected a whole number, as extended resources require")
    return amount.numerator


def is_extended_resource(name: str) -> bool:
    """Whether plugins or operators add the resource: it has a domain that is not Kubernetes'."""
    domain, slash, _ = name.partition("/")
    return bool(slash) and domain != "kubernetes.io" and not domain.endswith(".kubernetes.io")


def _init_role(item: Mapping[str, Any]) -> Role:
    return Role.SIDECAR if item.get("restartPolicy") == "Always" else Role.INIT


def _container(item: Mapping[str, Any], role: Role) -> Container:
    limits = item.get("resources", {}).get("limits", {})
    for entry in item.get("env", ()):
        if "valueFrom" in entry:
            raise InvalidError(
                f"container {item['name']}: env {entry['name']} uses valueFrom; the stand-in kubelet reads plain values only"
            )
    return Container(
        name=item["name"],
        role=role,
        argv=(*item.get("command", ()), *item.get("args", ())),
        env=tuple((entry["name"], str(entry.get("value", ""))) for entry in item.get("env", ())),
        limits=tuple((name, parse_amount(str(amount))) for name, amount in limits.items() if is_extended_resource(name)),
    )


def _sum(limits: Iterable[tuple[tuple[str, int], ...]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for pairs in limits:
        for resource, amount in pairs:
            total[resource] = total.get(resource, 0) + amount
    return total
