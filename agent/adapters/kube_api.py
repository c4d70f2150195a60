"""Requests to the Kubernetes API over urllib3: the node's capacity, condition and inventory, and events. Watching is in ``kube_watch``.

Not a general client: an agent runs on every node of a large cluster, so it asks for a few things only, over a few connections. Nothing is
read before it is written: every patch names just what is the agent's own, so that it cannot undo what somebody else writes meanwhile.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec
import urllib3

from agent.core.publishing import NodeCondition
from agent.errors import KubeAbsentError, KubeApiError, KubeBehindError, KubeExistsError, KubeExpiredError, KubeRefusedError
from agent.ports import Clock, NodeEvent, PodEvent
from program.api_server import ApiServer
from program.backoff import retry_after_seconds
from proto import contract, gpunode

CONNECT_TIMEOUT_SECONDS = 5.0
MOST_CONNECTIONS = 4
"""Kept open: one of them for each part that writes by itself."""
READ_TIMEOUT_SECONDS = 10.0
LIST_TIMEOUT_SECONDS = 60.0
"""For lists: where a slow server's were given up sooner, every agent would ask for its own again, and none would ever get it."""
MAX_EVENT_MESSAGE = 1024
"""The API refuses longer ones."""
MAX_EVENT_NAME_PREFIX = 200
"""Names have 253 characters at most."""
COMPONENT = f"{contract.PRODUCT}-agent"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
"""Merges conditions by their type; only built-in kinds know it."""
GPU_NODES = f"/apis/{gpunode.API_VERSION}/{contract.GPU_NODE_PLURAL}"
CLUSTER_EVENTS_NAMESPACE = "default"
"""Where Kubernetes keeps events about objects that are in no namespace."""
_FAILURES = {
    404: KubeAbsentError,
    409: KubeExistsError,
    410: KubeExpiredError,
    504: KubeBehindError,
    **dict.fromkeys((400, 403, 413, 422), KubeRefusedError),
}


class KubeConnection:
    """Sends authorised requests and translates failures; shared by this module and ``kube_watch``. Thread-safe."""

    def __init__(self, server: ApiServer, **pool_options: Any) -> None:
        self._server = server
        if server.url.startswith("https:"):
            pool_options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": str(server.ca_file) if server.ca_file else None}
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=MOST_CONNECTIONS, retries=False, **pool_options)

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        content_type: str = "application/json",
        read_timeout: float = READ_TIMEOUT_SECONDS,
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """Send one request.

        Raises: KubeAbsentError on 404, KubeExistsError on 409, KubeExpiredError on 410, KubeBehindError on 504, KubeRefusedError on 400,
                403, 413 and 422, KubeApiError on every other answer than success, and when there is none.
        """
        try:
            response = self._pool.request(
                method,
                self._server.url + path,
                headers=self._headers(content_type),
                body=None if body is None else msgspec.json.encode(body),
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_SECONDS, read=read_timeout),
                preload_content=not stream,
            )
        except urllib3.exceptions.HTTPError as exc:
            raise KubeApiError(f"{method} {self._server.url}{path}: {_cause(exc)}") from exc
        if response.status >= 300:
            message = f"{method} {path}: HTTP {response.status}: {_status_message(response)}"
            raise _FAILURES.get(response.status, KubeApiError)(message, retry_after_seconds(response.headers.get("Retry-After")))
        return response

    def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": COMPONENT}
        if self._server.token_file is not None:
            try:  # read every time: the kubelet rotates it
                headers["Authorization"] = f"Bearer {self._server.token_file.read_text().strip()}"
            except OSError as exc:
                raise KubeApiError(f"the API token {self._server.token_file}: {exc.strerror}") from exc
        return headers


class KubeApiClient:
    """Implements ``ports.KubeApi``."""

    def __init__(self, connection: KubeConnection, node_name: str, clock: Clock) -> None:
        self._connection = connection
        self._node_name = node_name
        self._clock = clock

    def publish_capacity(self, node_name: str, capacity: Mapping[str, int]) -> None:
        """See ``ports.KubeApi``."""
        patch = [{"op": "add", "path": f"/status/capacity/{_pointer(name)}", "value": str(value)} for name, value in capacity.items()]
        path = f"/api/v1/nodes/{quote(node_name, safe='')}/status"
        self._connection.request("PATCH", path, body=patch, content_type=JSON_PATCH)

    def publish_condition(self, node_name: str, condition: NodeCondition, *, turned: bool) -> None:
        """See ``ports.KubeApi``."""
        when = _timestamp(self._clock.now())
        body: dict[str, object] = {
            "type": contract.NODE_CONDITION_GPUS_HEALTHY,
            "status": "True" if condition.holds else "False",
            "reason": condition.reason,
            "message": condition.message,
            "lastHeartbeatTime": when,
        }
        if turned:
            body["lastTransitionTime"] = when
        path = f"/api/v1/nodes/{quote(node_name, safe='')}/status"
        self._connection.request("PATCH", path, body={"status": {"conditions": [body]}}, content_type=STRATEGIC_PATCH)

    def create_gpu_node(self, node_name: str, node_uid: str) -> None:
        """See ``ports.KubeApi``."""
        owner = {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid}
        metadata = {"name": node_name, "ownerReferences": [owner]}
        body = {"apiVersion": gpunode.API_VERSION, "kind": contract.GPU_NODE_KIND, "metadata": metadata}
        self._connection.request("POST", GPU_NODES, body=body)

    def publish_gpu_node(self, node_name: str, status: Mapping[str, object]) -> Mapping[str, object]:
        """See ``ports.KubeApi``."""
        path = f"{GPU_NODES}/{quote(node_name, safe='')}/status"
        patch = [{"op": "add", "path": "/status", "value": status}]  # adding replaces what is there
        response = self._connection.request("PATCH", path, body=patch, content_type=JSON_PATCH)
        try:
            return msgspec.json.decode(response.data, type=_WithStatus).status
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise KubeApiError(f"PATCH {path}: the answer is not an object with a status: {exc}") from exc

    def post_event(self, event: PodEvent | NodeEvent, happened_at: float) -> None:
        """See ``ports.KubeApi``."""
        when = _timestamp(happened_at)
        namespace, involved = _involved(event)
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": _event_name(involved["name"], event, happened_at), "namespace": namespace},
            "involvedObject": involved,
            "reason": event.reason,
            "message": event.message if len(event.message) <= MAX_EVENT_MESSAGE else event.message[: MAX_EVENT_MESSAGE - 1] + "…",
            "type": "Warning" if event.warning else "Normal",
            "source": {"component": COMPONENT, "host": self._node_name},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._node_name,
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
        }
        with suppress(KubeExistsError):  # an earlier try was taken, and its answer lost
            self._connection.request("POST", f"/api/v1/namespaces/{quote(namespace, safe='')}/events", body=body)

    def evict_pod(self, namespace: str, name: str, uid: str) -> None:
        """See ``ports.KubeApi``."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}/eviction"
        self._connection.request("POST", path, body=body)


def _timestamp(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _event_name(about: str, event: PodEvent | NodeEvent, happened_at: float) -> str:
    """Return the name that every try to post an event gives it, so that it is there once."""
    digest = hashlib.sha256(repr((event, happened_at)).encode()).hexdigest()[:16]
    return f"{about[:MAX_EVENT_NAME_PREFIX].rstrip('-.')}.{digest}"


def _involved(event: PodEvent | NodeEvent) -> tuple[str, dict[str, str]]:
    """Return an event's namespace, and the reference to what it is about."""
    if isinstance(event, NodeEvent):
        return CLUSTER_EVENTS_NAMESPACE, {"apiVersion": "v1", "kind": "Node", "name": event.node, "uid": event.node_uid}
    involved = {"apiVersion": "v1", "kind": "Pod", "namespace": event.namespace, "name": event.pod, "uid": event.pod_uid}
    return event.namespace, {**involved, "fieldPath": f"spec.containers{{{event.container}}}"}


class _WithStatus(msgspec.Struct):
    status: dict[str, Any] = {}


def _pointer(name: str) -> str:
    """Escape a key for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


class _Status(msgspec.Struct):
    message: str = ""


def _status_message(response: urllib3.BaseHTTPResponse) -> str:
    try:
        return msgspec.json.decode(response.data, type=_Status).message
    except (msgspec.MsgspecError, UnicodeDecodeError, urllib3.exceptions.HTTPError):
        return response.reason or "no reason given"


def _cause(exc: urllib3.exceptions.HTTPError) -> str:
    """Return the innermost sentence: urllib3 wraps what the system said in its own object's description."""
    text = str(getattr(exc, "reason", None) or exc)
    return text.rpartition(">: ")[2] or text
