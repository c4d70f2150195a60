# SPDX-License-Identifier: Apache-2.0
"""Requests about ResourceClaims and ResourceSlices (resource.k8s.io/v1), and the list-watch of this node's slices."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agent.adapters.kube_watch import RULES
from agent.core.slices import API_VERSION, FoundSlice
from agent.ports.dra import SliceListener
from aliquot import contract
from aliquot.kube.errors import KubeNotFoundError, decode_reply
from aliquot.kube.http_reads import HttpReads
from aliquot.kube.requests import namespaced, object_path, with_options
from aliquot.kube.urllib3_transport import KEEPALIVE, KubeConnection
from aliquot.kube.watch import Changed, Deleted, Event, Listed, ListWatch
from aliquot.kube.watch_thread import follow

_API = f"apis/{API_VERSION}"
SLICES = f"/{_API}/resourceslices"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply: it writes this driver's entries of a list that several drivers share. JSON is YAML."""


class _WithSpec(msgspec.Struct):
    spec: dict[str, Any]


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str = ""


class _Slice(msgspec.Struct):
    metadata: _Metadata
    spec: dict[str, Any]


class ResourceApiClient:
    """Implements ``ports.ResourceApi``."""

    def __init__(self, connection: KubeConnection, reads: HttpReads) -> None:
        self._connection = connection
        self._reads = reads

    def read_claim(self, namespace: str, name: str) -> bytes:
        """See ``ports.ResourceApi``."""
        return self._reads.get(_claim_path(namespace, name))

    def report_devices(self, namespace: str, name: str, uid: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """See ``ports.ResourceApi``."""
        metadata = {"name": name, "namespace": namespace, "uid": uid}
        body = {"apiVersion": API_VERSION, "kind": "ResourceClaim", "metadata": metadata, "status": {"devices": list(devices)}}
        path = with_options(_claim_path(namespace, name, "status"), fieldManager=contract.DRA_DRIVER, force="true")
        self._connection.request("PATCH", path, body=body, content_type=APPLY_PATCH)

    def create_slice(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ``ports.ResourceApi``."""
        return _spec(self._connection.request("POST", SLICES, body=body))

    def replace_slice(self, name: str, resource_version: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ``ports.ResourceApi``."""
        versioned = {**body, "metadata": {**body["metadata"], "resourceVersion": resource_version}}
        return _spec(self._connection.request("PUT", object_path(SLICES, name), body=versioned))

    def delete_slice(self, name: str) -> None:
        """See ``ports.ResourceApi``."""
        with suppress(KubeNotFoundError):
            self._connection.request("DELETE", object_path(SLICES, name))


def _claim_path(namespace: str, name: str, subresource: str = "") -> str:
    return object_path(namespaced("resourceclaims", namespace, _API), name, subresource)


def _spec(reply: bytes) -> Mapping[str, Any]:
    return decode_reply(reply, _WithSpec, "a ResourceSlice").spec


class ResourceSliceWatcher:
    """Implements ``ports.SliceWatch``."""

    def __init__(self, connect: Callable[..., KubeConnection], node_name: str) -> None:
        """Args: connect: makes a connection with the given options of a urllib3 pool."""
        self._connect = connect
        self._path = with_options(SLICES, fieldSelector=f"spec.driver={contract.DRA_DRIVER},spec.nodeName={node_name}")
        self._stopped = threading.Event()

    def start(self, listener: SliceListener) -> None:
        """See ``ports.SliceWatch``."""
        decoder = msgspec.json.Decoder(_Slice)
        machine = ListWatch(self._path, lambda raw: _found(decoder.decode(raw)), RULES)

        def deliver(event: Event[FoundSlice]) -> None:
            match event:
                case Listed(items):
                    listener.slices_listed(items)
                case Changed(item):
                    listener.slice_changed(item)
                case Deleted(item):
                    listener.slice_deleted(item)

        def report(trouble: str) -> None:
            listener.api_trouble("resourceslices", trouble)

        connection = self._connect(socket_options=KEEPALIVE)
        arguments = (machine, connection, deliver, report, self._stopped)
        threading.Thread(target=follow, args=arguments, name="watch-resourceslices", daemon=True).start()

    def stop(self) -> None:
        """See ``ports.SliceWatch``."""
        self._stopped.set()


def _found(item: _Slice) -> FoundSlice:
    return FoundSlice(item.metadata.name, item.metadata.resource_version, item.spec)
