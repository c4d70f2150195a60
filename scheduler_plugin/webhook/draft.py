"""A pod being admitted: its JSON, with what must be changed collected until the patch is written.

Nothing of the original is touched; only the parts that changed are in the patch, each whole.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import msgspec

from placement.request import RequestError
from proto import contract, units
from proto.errors import ContractError, quote
from proto.model import ContainerSpec, Pod

Json = dict[str, Any]
GROUPS = ("initContainers", "containers")


class _Metadata(msgspec.Struct):
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    name: str | None = None
    generate_name: str | None = msgspec.field(name="generateName", default=None)
    namespace: str | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


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


class _Form(msgspec.Struct):
    """What must hold of the JSON for the rest to read it: the API server's own pods are so, and whoever else calls may send anything."""

    metadata: _Metadata | None = None
    spec: _Spec | None = None


class DraftContainer:
    """One container, with its amounts and environment as they will be."""

    def __init__(self, group: str, position: int, original: Mapping[str, Any]) -> None:
        self.path = f"/spec/{group}/{position}"
        self.name: str = original.get("name", "")
        self.init = group == "initContainers"
        self.restartable = self.init and original.get("restartPolicy") == "Always"
        self._original = original
        resources = original.get("resources") or {}
        self.limits: dict[str, str] = _texts(resources.get("limits"))
        self.requests: dict[str, str] = _texts(resources.get("requests"))
        self.env: list[Json] = deepcopy(list(original.get("env") or ()))

    def take(self, resource: str) -> str | None:
        """Remove a resource and return its amount: limits count before requests."""
        request, limit = self.requests.pop(resource, None), self.limits.pop(resource, None)
        return limit if limit is not None else request

    def has(self, resource: str) -> bool:
        """Whether a resource is asked for."""
        return resource in self.limits or resource in self.requests

    def wants(self, resource: str) -> bool:
        """Whether a resource is asked for, and not none of it."""
        return any(resource in amounts and not _is(amounts[resource], 0) for amounts in (self.limits, self.requests))

    def ask(self, resource: str, amount: int) -> None:
        """Ask for an amount. Extended resources have equal limit and request; the API server copies the limit.

        An amount that is the same in another spelling stays as it is: the API server writes ``4k`` for 4000.
        """
        if not self.asks(resource, amount):
            self.limits[resource] = str(amount)
        if resource in self.requests and not _is(self.requests[resource], amount):
            self.requests[resource] = str(amount)

    def asks(self, resource: str, amount: int) -> bool:
        """Whether the limit is this amount, however it is spelled."""
        return resource in self.limits and _is(self.limits[resource], amount)

    def set_env(self, name: str, value: str) -> bool:
        """Give a variable a value; return whether the pod had another."""
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
        """Yield the operations that make the original so."""
        resources = dict(self._original.get("resources") or {})
        if self.limits != _texts(resources.get("limits")) or self.requests != _texts(resources.get("requests")):
            resources |= {"limits": self.limits, "requests": self.requests}
            yield {"op": "add", "path": f"{self.path}/resources", "value": {key: value for key, value in resources.items() if value}}
        if self.env != list(self._original.get("env") or ()):
            yield {"op": "add", "path": f"{self.path}/env", "value": self.env}


class Draft:
    """The pod."""

    def __init__(self, pod: Mapping[str, Any]) -> None:
        """Raises RequestError when this is no pod."""
        try:
            msgspec.convert(pod, _Form)
        except msgspec.ValidationError as exc:
            raise RequestError(f"expected a pod, found {quote(repr(pod))}: {exc}") from exc
        self._metadata, self._spec = pod.get("metadata") or {}, pod.get("spec") or {}
        self.annotations: dict[str, str] = dict(self._metadata.get("annotations") or {})
        self.labels: Mapping[str, str] = dict(self._metadata.get("labels") or {})
        self.containers = [
            DraftContainer(group, position, container) for group in GROUPS for position, container in enumerate(self._spec.get(group) or ())
        ]
        self.tolerations: list[Json] = [dict(entry) for entry in self._spec.get("tolerations") or ()]
        self.scheduler_name = self._spec.get("schedulerName") or ""
        self.node_name = self._spec.get("nodeName") or ""
        self.warnings: list[str] = []

    def app_containers(self) -> list[DraftContainer]:
        """Return the containers that run after the init containers."""
        return [container for container in self.containers if not container.init]

    def set_annotation(self, name: str, value: str, source: str) -> None:
        """Set one of our annotations from another vocabulary. Raises RequestError when the pod says something else already."""
        present = self.annotations.get(name)
        if present is not None and present != value:
            raise RequestError(f"{source} means {name}: {value}, but the pod has {name}: {quote(present)}: keep one of the two")
        self.annotations[name] = value

    def pod(self) -> Pod:
        """Return the pod as it will be, for the checks that agent and scheduler make too."""
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
        operations: list[Json] = []
        if self.annotations != (self._metadata.get("annotations") or {}):
            operations.append({"op": "add", "path": "/metadata/annotations", "value": self.annotations})
        if self.scheduler_name != (self._spec.get("schedulerName") or ""):
            operations.append({"op": "add", "path": "/spec/schedulerName", "value": self.scheduler_name})
        if self.tolerations != list(self._spec.get("tolerations") or ()):
            operations.append({"op": "add", "path": "/spec/tolerations", "value": self.tolerations})
        for container in self.containers:
            operations.extend(container.changes())
        return operations


def _is(text: str, amount: int) -> bool:
    try:
        return units.parse_quantity(text) == amount
    except ContractError:
        return False


def _texts(amounts: Mapping[str, Any] | None) -> dict[str, str]:
    return {str(name): str(amount) for name, amount in (amounts or {}).items()}
