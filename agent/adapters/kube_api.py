# SPDX-License-Identifier: Apache-2.0
"""What the agent writes to the Kubernetes API: the node's capacity and condition, its GpuNode object, events and evictions.

Not a general client: an agent runs on every node of a large cluster, so it sends few kinds of requests over few connections. It reads
nothing before it writes: every patch names only what belongs to the agent, so that it cannot undo what others write at the same time.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from agent.core.publishing import NodeCondition
from agent.ports.clock import Clock
from agent.ports.kube import NodeEvent, PodEvent
from aliquot import contract
from aliquot.contract import gpunode
from aliquot.kube import requests
from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeConflictError, decode_reply
from aliquot.kube.requests import JSON_PATCH, STRATEGIC_PATCH, json_pointer, namespaced, object_path, pod_path, timestamp
from aliquot.kube.urllib3_transport import KubeConnection, connect

MAX_EVENT_NAME_PREFIX = 200
"""Names have 253 characters at most."""
COMPONENT = f"{contract.PRODUCT}-agent"
NODES = "/api/v1/nodes"
GPU_NODES = f"/apis/{gpunode.API_VERSION}/{contract.GPU_NODE_PLURAL}"
CLUSTER_EVENTS_NAMESPACE = "default"
"""Where Kubernetes keeps events about objects that are in no namespace."""


def kube_connection(server: ApiServer, **pool_options: Any) -> KubeConnection:
    """Return a connection for the agent. Args: pool_options: of urllib3's pool."""
    return connect(server, COMPONENT, **pool_options)


class KubeApiClient:
    """Implements ``ports.KubeApi``."""

    def __init__(self, connection: KubeConnection, node_name: str, clock: Clock) -> None:
        self._connection = connection
        self._node_name = node_name
        self._clock = clock

    def publish_capacity(self, node_name: str, capacity: Mapping[str, int]) -> None:
        """See ``ports.KubeApi``."""
        patch = [{"op": "add", "path": json_pointer("status", "capacity", name), "value": str(value)} for name, value in capacity.items()]
        self._connection.request("PATCH", object_path(NODES, node_name, "status"), body=patch, content_type=JSON_PATCH)

    def publish_condition(self, node_name: str, condition: NodeCondition, *, turned: bool) -> None:
        """See ``ports.KubeApi``."""
        when = timestamp(self._clock.now())
        body: dict[str, object] = {
            "type": contract.NODE_CONDITION_GPUS_HEALTHY,
            "status": "True" if condition.holds else "False",
            "reason": condition.reason,
            "message": condition.message,
            "lastHeartbeatTime": when,
        }
        if turned:
            body["lastTransitionTime"] = when
        path = object_path(NODES, node_name, "status")
        self._connection.request("PATCH", path, body={"status": {"conditions": [body]}}, content_type=STRATEGIC_PATCH)

    def create_gpu_node(self, node_name: str, node_uid: str) -> None:
        """See ``ports.KubeApi``."""
        owner = {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid}
        metadata = {"name": node_name, "ownerReferences": [owner]}
        body = {"apiVersion": gpunode.API_VERSION, "kind": contract.GPU_NODE_KIND, "metadata": metadata}
        self._connection.request("POST", GPU_NODES, body=body)

    def publish_gpu_node(self, node_name: str, status: Mapping[str, object]) -> Mapping[str, object]:
        """See ``ports.KubeApi``."""
        path = object_path(GPU_NODES, node_name, "status")
        patch = [{"op": "add", "path": "/status", "value": status}]  # adding replaces what is there
        reply = self._connection.request("PATCH", path, body=patch, content_type=JSON_PATCH)
        return decode_reply(reply, _WithStatus, "a GpuNode").status

    def post_event(self, event: PodEvent | NodeEvent, happened_at: float) -> None:
        """See ``ports.KubeApi``."""
        namespace, involved = _involved(event)
        metadata = {"name": _event_name(involved["name"], event, happened_at), "namespace": namespace}
        kind = "Warning" if event.warning else "Normal"
        body = requests.event(metadata, involved, COMPONENT, happened_at, type=kind, reason=event.reason, message=event.message)
        body["source"]["host"] = body["reportingInstance"] = self._node_name
        with suppress(KubeConflictError):  # an earlier try arrived, and its reply was lost
            self._connection.request("POST", namespaced("events", namespace), body=body)

    def evict_pod(self, namespace: str, name: str, uid: str) -> None:
        """See ``ports.KubeApi``."""
        self._connection.request("POST", pod_path(namespace, name, "eviction"), body=requests.eviction(namespace, name, uid))


def _event_name(about: str, event: PodEvent | NodeEvent, happened_at: float) -> str:
    """Return a name that is the same in every try to post the event, so that the API has it once."""
    digest = hashlib.sha256(repr((event, happened_at)).encode()).hexdigest()[:16]
    return f"{about[:MAX_EVENT_NAME_PREFIX].rstrip('-.')}.{digest}"


def _involved(event: PodEvent | NodeEvent) -> tuple[str, dict[str, str]]:
    """Return an event's namespace, and the reference to the object it is about."""
    if isinstance(event, NodeEvent):
        return CLUSTER_EVENTS_NAMESPACE, {"apiVersion": "v1", "kind": "Node", "name": event.node, "uid": event.node_uid}
    involved = {"apiVersion": "v1", "kind": "Pod", "namespace": event.namespace, "name": event.pod, "uid": event.pod_uid}
    return event.namespace, {**involved, "fieldPath": f"spec.containers{{{event.container}}}"}


class _WithStatus(msgspec.Struct):
    status: dict[str, Any] = {}
