"""Requests to the Kubernetes API over urllib3: the node's capacity and events about pods. Watching is in ``kube_watch``.

Not a general client: an agent runs on every node of a large cluster, so it asks for four things only and keeps one connection.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import urllib3

from agent.errors import KubeApiError, KubeExpiredError, SettingsError
from agent.ports import Clock, PodEvent
from proto import contract

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_TIMEOUT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 10.0
MAX_EVENT_MESSAGE = 1024
"""The API refuses longer ones."""
COMPONENT = f"{contract.PRODUCT}-agent"


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API is, and as whom to ask."""

    url: str
    token_file: Path | None
    ca_file: Path | None


def find_api_server(
    url: str, token_file: str, ca_file: str, environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT
) -> ApiServer:
    """Complete the settings from what a pod is given.

    Raises: SettingsError when there is neither a URL nor a cluster around us.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    in_cluster = host is not None and port is not None
    if not url:
        if not in_cluster:
            raise SettingsError("no Kubernetes API: this process is not in a pod, so set kubeApiUrl")
        url = f"https://[{host}]:{port}" if ":" in str(host) else f"https://{host}:{port}"
    if not re.match(r"https?://[^/]", url):
        raise SettingsError(f"kubeApiUrl {url!r}: want http:// or https:// and a host")
    token = Path(token_file) if token_file else service_account / "token"
    ca = Path(ca_file) if ca_file else service_account / "ca.crt"
    return ApiServer(
        url.rstrip("/"),
        token if token_file or token.exists() else None,
        ca if (ca_file or ca.exists()) and url.startswith("https:") else None,
    )


class KubeConnection:
    """Sends authorised requests and translates failures; shared by this module and ``kube_watch``. Thread-safe."""

    def __init__(self, server: ApiServer, **pool_options: Any) -> None:
        self._server = server
        if server.url.startswith("https:"):
            pool_options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": str(server.ca_file) if server.ca_file else None}
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=2, retries=False, **pool_options)

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

        Raises: KubeExpiredError on 410, KubeApiError on every other answer than success, and when there is none.
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
            raise KubeExpiredError(message) if response.status == 410 else KubeApiError(message)
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
        self._connection.request("PATCH", path, body=patch, content_type="application/json-patch+json")

    def post_event(self, event: PodEvent) -> None:
        """See ``ports.KubeApi``."""
        when = datetime.fromtimestamp(self._clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{event.pod}.", "namespace": event.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": event.namespace,
                "name": event.pod,
                "uid": event.pod_uid,
                "fieldPath": f"spec.containers{{{event.container}}}",
            },
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
        self._connection.request("POST", f"/api/v1/namespaces/{quote(event.namespace, safe='')}/events", body=body)


def _pointer(name: str) -> str:
    """Escape a key for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


class _Status(msgspec.Struct):
    message: str = ""


def _status_message(response: urllib3.BaseHTTPResponse) -> str:
    try:
        return msgspec.json.decode(response.data, type=_Status).message
    except (msgspec.DecodeError, urllib3.exceptions.HTTPError):
        return response.reason or "no reason given"


def _cause(exc: urllib3.exceptions.HTTPError) -> str:
    """Return the innermost sentence: urllib3 wraps what the system said in its own object's description."""
    text = str(getattr(exc, "reason", None) or exc)
    return text.rpartition(">: ")[2] or text
