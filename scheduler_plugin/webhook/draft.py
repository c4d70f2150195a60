# SPDX-License-Identifier: Apache-2.0
"""A pod that is being admitted: its JSON, and the changes to it until the patch is written.

Invariant: the original is never changed. The patch has only the parts that changed, each as a whole.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import msgspec

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError, quote
from aliquot.contract.model import ContainerSpec, Pod
from aliquot.placement.request import RequestError

Json = dict[str, Any]
GROUPS = ("initContainers", "containers")
_BY_PRIORITY_CLASS = ("priority", "preemptionPolicy")
"""Fields of a pod that follow from its PriorityClass."""


class _Metadata(msgspec.Struct):
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    name: str | None = None
    generate_name: str | None = msgspec.field(name="generateName", default=None)
    namespace: str | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None
    claims: list[dict[str, Any]] | None = None


class _Variable(msgspec.Struct):
    name: str = ""


class _Container(msgspec.Struct):
    name: str = ""
    resources: _Resources | None = None
    env: list[_Variable] | None = None


class _Toleration(msgspec.Struct):
    key: str | None = None
    operator: str | None = None
    effect: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    tolerations: list[_Toleration] | None = None
    scheduler_name: str | None = None
    node_name: str | None = None
    resource_claims: list[dict[str, Any]] | None = None
    priority_class_name: str | None = None


class _Form(msgspec.Struct):
    """The form of a pod that the code below relies on. The API server keeps it; any other client may send something else."""

    metadata: _Metadata | None = None
    spec: _Spec | None = None


class DraftContainer:
    """One container, with its amounts and environment after the changes so far."""

    def __init__(self, group: str, position: int, original: Mapping[str, Any]) -> None:
        self.path = f"/spec/{group}/{position}"
        self.name: str = original.get("name", "")
        self.init = group == "initContainers"
        self.restartable = self.init and original.get("restartPolicy") == "Always"
        self._original = original
        resources = original.get("resources") or {}
        self.limits: dict[str, str] = _texts(resources.get("limits"))
        self.requests: dict[str, str] = _texts(resources.get("requests"))
        self.claims = _copies(resources.get("claims"))
        self.env: list[Json] = deepcopy(list(original.get("env") or ()))

    def take(self, resource: str) -> str | None:
        """Remove a resource and return its amount: the limit, or else the request."""
        request, limit = self.requests.pop(resource, None), self.limits.pop(resource, None)
        return limit if limit is not None else request

    def has(self, resource: str) -> bool:
        """Whether the container names a resource, with any amount."""
        return resource in self.limits or resource in self.requests

    def wants(self, resource: str) -> bool:
        """Whether the container asks for a resource, with an amount above 0."""
        return any(resource in amounts and not _is(amounts[resource], 0) for amounts in (self.limits, self.requests))

    def ask(self, resource: str, amount: int) -> None:
        """Set an amount. Limit and request of an extended resource are equal; the API server copies the limit.

        An equal amount in another notation is kept: the API server writes ``4k`` for 4000.
        """
        if not self.asks(resource, amount):
            self.limits[resource] = str(amount)
        if resource in self.requests and not _is(self.requests[resource], amount):
            self.requests[resource] = str(amount)

    def asks(self, resource: str, amount: int) -> bool:
        """Whether the limit is this amount, in any notation."""
        return resource in self.limits and _is(self.limits[resource], amount)

    def set_env(self, name: str, value: str) -> bool:
        """Set a variable; return whether the pod had another value."""
        had = [entry for entry in self.env if entry.get("name") == name]
        if had == [{"name": name, "value": value}]:
            return False
        self.env = [entry for entry in self.env if entry.get("name") != name] + [{"name": name, "value": value}]
        return bool(had)

    def remove_env(self, name: str) -> bool:
        """Remove a variable; return whether the pod had it."""
        had = len(self.env)
        self.env = [entry for entry in self.env if entry.get("name") != name]
        return len(self.env) < had

    def changes(self) -> Iterator[Json]:
        """Yield the patch operations for this container."""
        resources = dict(self._original.get("resources") or {})
        claims = list(resources.get("claims") or ())
        if self.limits != _texts(resources.get("limits")) or self.requests != _texts(resources.get("requests")) or self.claims != claims:
            resources |= {"limits": self.limits, "requests": self.requests, "claims": self.claims}
            yield {"op": "add", "path": f"{self.path}/resources", "value": {key: value for key, value in resources.items() if value}}
        if self.env != list(self._original.get("env") or ()):
            yield {"op": "add", "path": f"{self.path}/env", "value": self.env}


class Draft:
    """The pod with the changes so far."""

    def __init__(self, pod: Mapping[str, Any]) -> None:
        """Raises RequestError when this is not a pod."""
        _check_form(pod)
        self._metadata, self._spec = pod.get("metadata") or {}, pod.get("spec") or {}
        self.annotations: dict[str, str] = dict(self._metadata.get("annotations") or {})
        self.labels: dict[str, str] = dict(self._metadata.get("labels") or {})
        self.containers = [DraftContainer(*found) for found in _containers(self._spec)]
        self.tolerations = _copies(self._spec.get("tolerations"))
        self.resource_claims = _copies(self._spec.get("resourceClaims"))
        self.scheduling_gates = _copies(self._spec.get("schedulingGates"))
        self.scheduler_name = self._spec.get("schedulerName") or ""
        self.node_name = self._spec.get("nodeName") or ""
        self.priority_class = self._spec.get("priorityClassName") or ""
        self.warnings: list[str] = []

    @property
    def spec(self) -> Mapping[str, Any]:
        """The pod's spec as it came; read only."""
        return self._spec

    @property
    def controller_kind(self) -> str:
        """The kind of the object that controls the pod; empty without one."""
        return str(self.controller.get("kind") or "")

    @property
    def controller_name(self) -> str:
        """The name of the object that controls the pod; empty without one."""
        return str(self.controller.get("name") or "")

    @property
    def name(self) -> str:
        """The pod's name; empty if the API server will generate it."""
        return str(self._metadata.get("name") or "")

    def host_paths(self) -> list[str]:
        """Return the directories of the node that the pod's volumes mount."""
        volumes = [volume for volume in self._spec.get("volumes") or () if isinstance(volume, dict)]
        sources = [source for volume in volumes if isinstance(source := volume.get("hostPath"), dict)]
        return [str(source.get("path") or "").rstrip("/") for source in sources]

    @property
    def controller(self) -> Mapping[str, Any]:
        """The ownerReference of the object that controls the pod; empty without one."""
        owners = self._metadata.get("ownerReferences")
        found = (owner for owner in (owners if isinstance(owners, list) else ()) if isinstance(owner, dict) and owner.get("controller"))
        return next(found, {})

    def app_containers(self) -> list[DraftContainer]:
        """Return the containers that run after the init containers."""
        return [container for container in self.containers if not container.init]

    def set_annotation(self, name: str, value: str, source: str) -> None:
        """Set one of our annotations from another vocabulary. Raises RequestError when the pod has it with another value."""
        present = self.annotations.get(name)
        if present is not None and present != value:
            raise RequestError(f"{source} means {name}: {value}, but the pod has {name}: {quote(present)}: keep one of the two")
        self.annotations[name] = value

    def pod(self) -> Pod:
        """Return the changed pod, for the checks that agent and scheduler make as well."""
        return Pod(
            namespace=self._metadata.get("namespace") or "",
            name=self._metadata.get("name") or self._metadata.get("generateName") or "",
            uid="",
            node_name=self.node_name,
            phase="Pending",
            annotations={name: value for name, value in self.annotations.items() if name.startswith(contract.ANNOTATION_PREFIX)},
            containers=tuple(
                ContainerSpec(container.name, container.limits, init=container.init, restartable=container.restartable)
                for container in self.containers
            ),
        )

    def patch(self) -> list[Json]:
        """Return the JSON patch from the original to the draft."""
        operations = [
            *_set_if_changed("/metadata", self._metadata, {"annotations": self.annotations, "labels": self.labels}),
            *self._set_priority_class(),
            *_set_if_changed(
                "/spec",
                self._spec,
                {
                    "schedulerName": self.scheduler_name,
                    "tolerations": self.tolerations,
                    "resourceClaims": self.resource_claims,
                    "schedulingGates": self.scheduling_gates,
                },
            ),
        ]
        for container in self.containers:
            operations.extend(container.changes())
        return operations

    def _set_priority_class(self) -> Iterator[Json]:
        changed = list(_set_if_changed("/spec", self._spec, {"priorityClassName": self.priority_class}))
        yield from changed
        if changed:
            # The API server has filled them in by the class that the pod did not name. It does so again after the webhooks.
            computed = (name for name in _BY_PRIORITY_CLASS if self._spec.get(name) is not None)
            yield from ({"op": "add", "path": f"/spec/{name}", "value": None} for name in computed)


def _copies(entries: Iterable[Mapping[str, Any]] | None) -> list[Json]:
    return [dict(entry) for entry in entries or ()]


def _set_if_changed(path: str, original: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the operations that set the fields with another value than the original. An absent field equals an empty one."""
    for name, value in fields.items():
        if (original.get(name) or type(value)()) != value:
            yield {"op": "add", "path": f"{path}/{name}", "value": value}


def _check_form(pod: Mapping[str, Any]) -> None:
    try:
        msgspec.convert(pod, _Form)
    except msgspec.ValidationError as exc:
        raise RequestError(f"expected a pod, found {quote(repr(pod))}: {exc}") from exc


def _containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield each container with its group and its position there."""
    for group in GROUPS:
        for position, container in enumerate(spec.get(group) or ()):
            yield group, position, container


def _is(text: str, amount: int) -> bool:
    try:
        return units.parse_quantity(text) == amount
    except ContractError:
        return False


def _texts(amounts: Mapping[str, Any] | None) -> dict[str, str]:
    return {str(name): str(amount) for name, amount in (amounts or {}).items()}
