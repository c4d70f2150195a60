# SPDX-License-Identifier: Apache-2.0
"""The objects of a small cluster with Kubernetes' rules for versions: the store behind the API server stand-in.

Invariant: every change gets the next resource version and an entry in the history that watches read. A returned object is a snapshot and
never changes. All methods are safe to call from any thread.

HTTP is in ``apiserver``; ``kubelet`` writes the status of pods.
"""

import copy
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from aliquot import contract
from aliquot.contract import gpunode
from aliquot_lab.standin.errors import AlreadyExistsError, ConflictError, GoneError, InvalidError, NotFoundError
from aliquot_lab.standin.quantities import canonical_amounts

Object = Mapping[str, Any]
"""A Kubernetes object as JSON. Snapshots are shared and must not be changed."""

HISTORY_LENGTH = 4096
"""Number of changes kept for watches. A watch from an older version gets 410 Gone, as after compaction in etcd."""


class Kind(StrEnum):
    """The kinds that the agent uses, by their plural in paths."""

    POD = "pods"
    NODE = "nodes"
    EVENT = "events"
    GPU_NODE = contract.GPU_NODE_PLURAL
    RESOURCE_CLAIM = "resourceclaims"
    RESOURCE_SLICE = "resourceslices"

    @property
    def type_name(self) -> str:
        """Return the ``kind`` field of such an object."""
        return _TYPE_NAMES[self]

    @property
    def api_version(self) -> str:
        """Return the ``apiVersion`` field of such an object."""
        if self in (Kind.RESOURCE_CLAIM, Kind.RESOURCE_SLICE):
            return "resource.k8s.io/v1"
        return gpunode.API_VERSION if self is Kind.GPU_NODE else "v1"

    @property
    def namespaced(self) -> bool:
        """Whether objects of this kind live in a namespace."""
        return self in (Kind.POD, Kind.EVENT, Kind.RESOURCE_CLAIM)


_TYPE_NAMES = {
    Kind.POD: "Pod",
    Kind.NODE: "Node",
    Kind.EVENT: "Event",
    Kind.GPU_NODE: contract.GPU_NODE_KIND,
    Kind.RESOURCE_CLAIM: "ResourceClaim",
    Kind.RESOURCE_SLICE: "ResourceSlice",
}


class ChangeType(StrEnum):
    """The type of a watch event."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Change:
    """One step of the history. ``previous`` lets a watch with a selector see objects enter and leave it."""

    version: int
    kind: Kind
    type: ChangeType
    object: Object
    previous: Object | None


Listener = Callable[[Change], None]


def timestamp() -> str:
    """The present moment as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Cluster:
    """Objects of every kind with resource versions, history and listeners."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._objects: dict[Kind, dict[tuple[str, str], Object]] = {kind: {} for kind in Kind}
        self._history: deque[Change] = deque(maxlen=HISTORY_LENGTH)
        self._version = 1
        self._compacted = 1
        self._listeners: list[Listener] = []

    @property
    def version(self) -> int:
        """Return the version of the latest change."""
        with self._changed:
            return self._version

    def create(self, kind: Kind, body: Object) -> Object:
        """Add an object, with UID, version and creation time.

        Raises: AlreadyExistsError; InvalidError: it has no name.
        """
        item = copy.deepcopy(dict(body))
        metadata = item.setdefault("metadata", {})
        if "generateName" in metadata and not metadata.get("name"):
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if not metadata.get("name"):
            raise InvalidError(f"{kind.type_name}: metadata.name is required")
        if kind.namespaced:
            metadata.setdefault("namespace", "default")
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", timestamp())
        item.setdefault("apiVersion", kind.api_version)
        item.setdefault("kind", kind.type_name)
        if kind is Kind.POD:
            item.setdefault("status", {"phase": "Pending"})
        _normalise(kind, item)
        with self._changed:
            key = _key(item)
            if key in self._objects[kind]:
                raise AlreadyExistsError(f'{kind.value} "{key[1]}" already exists')
            return self._record(kind, ChangeType.ADDED, item, None)

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return one object. Raises NotFoundError."""
        with self._changed:
            return self._get(kind, namespace, name)

    def list(self, kind: Kind, keep: Callable[[Object], bool] = lambda _: True) -> tuple[int, tuple[Object, ...]]:
        """Return the version of this view and the objects that ``keep`` accepts, oldest first."""
        with self._changed:
            return self._version, tuple(item for item in self._objects[kind].values() if keep(item))

    def update(self, kind: Kind, namespace: str, name: str, change: Callable[[dict[str, Any]], None], *, uid: str | None = None) -> Object:
        """Apply ``change`` to a copy of the object and store it as the next version; an unchanged object keeps its version.

        Args:   uid: if given, the object must have this UID.
        Raises: NotFoundError, ConflictError. An exception of ``change`` leaves the object unchanged.
        """
        with self._changed:
            previous = self._get(kind, namespace, name)
            if uid is not None and previous["metadata"]["uid"] != uid:
                raise ConflictError(f"{kind.value} {name!r}: expected UID {uid}, found {previous['metadata']['uid']}")
            item = copy.deepcopy(dict(previous))
            change(item)
            _check_identity(kind, previous, item)
            _normalise(kind, item)
            if item == previous:
                return previous
            return self._record(kind, ChangeType.MODIFIED, item, previous)

    def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> Object:
        """Remove the object immediately (the kubelet handles a pod's grace period); return its last version."""
        with self._changed:
            previous = self._get(kind, namespace, name)
            if uid is not None and previous["metadata"]["uid"] != uid:
                raise ConflictError(f"{kind.value} {name!r}: expected UID {uid}, found {previous['metadata']['uid']}")
            return self._record(kind, ChangeType.DELETED, copy.deepcopy(dict(previous)), previous)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every later change, in order, in the changing thread; it must not block. Return how to stop it."""
        with self._changed:
            self._listeners.append(listener)

        def stop() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return stop

    def changes_after(self, version: int, kind: Kind, timeout_seconds: float) -> tuple[int, tuple[Change, ...]]:
        """Wait for a change after ``version``; return the current version and the changes of this kind.

        Raises: GoneError: the history does not reach back to ``version``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version > version, timeout_seconds)
            if version < self._compacted:
                raise GoneError(f"too old resource version: {version} ({self._compacted})")
            return self._version, tuple(change for change in self._history if change.version > version and change.kind is kind)

    def compact(self) -> None:
        """Drop the history, so that every watch from an older version gets 410."""
        with self._changed:
            self._history.clear()
            self._version += 1
            self._compacted = self._version

    def _get(self, kind: Kind, namespace: str, name: str) -> Object:
        try:
            return self._objects[kind][namespace if kind.namespaced else "", name]
        except KeyError:
            raise NotFoundError(f'{kind.value} "{name}" not found') from None

    def _record(self, kind: Kind, change_type: ChangeType, item: dict[str, Any], previous: Object | None) -> Object:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        if change_type is ChangeType.DELETED:
            del self._objects[kind][_key(item)]
        else:
            self._objects[kind][_key(item)] = item
        if len(self._history) == self._history.maxlen:
            self._compacted = self._history[0].version
        change = Change(self._version, kind, change_type, item, previous)
        self._history.append(change)
        for listener in self._listeners:
            listener(change)
        self._changed.notify_all()
        return item


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _normalise(kind: Kind, item: dict[str, Any]) -> None:
    """Normalise resource amounts as the API server does: canonical form, and requests that default to the limits."""
    if kind is Kind.NODE:
        for name in ("capacity", "allocatable"):
            canonical_amounts(item.get("status", {}).get(name, {}))
    if kind is Kind.POD:
        spec = item.get("spec", {})
        for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
            resources = container.get("resources", {})
            if limits := resources.get("limits"):
                canonical_amounts(limits)
                resources["requests"] = {**limits, **resources.get("requests", {})}
                canonical_amounts(resources["requests"])


def _check_identity(kind: Kind, previous: Object, item: Object) -> None:
    before, after = previous["metadata"], item.get("metadata", {})
    for field in ("name", "namespace", "uid"):
        if before.get(field) != after.get(field):
            raise InvalidError(f"{kind.value} {before['name']!r}: metadata.{field} is immutable")
    if before.get("resourceVersion") != after.get("resourceVersion"):
        raise ConflictError(
            f"{kind.value} {before['name']!r}: the change is for version {after.get('resourceVersion')}, "
            f"the object is at {before['resourceVersion']}"
        )
