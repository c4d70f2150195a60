# SPDX-License-Identifier: Apache-2.0
"""Connects to a cluster: by kubeconfig and context like kubectl, or by the service account inside a pod. JSON in and out."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from aliquot.kube.requests import MERGE_PATCH, with_options
from aliquot.kube.urllib3_transport import KubeConnection
from aliquot_cli.errors import AccessError, NotFoundError

CONNECTIONS = 32
"""How many agents are queried at the same time."""
REQUEST_SECONDS = 10.0
PAGE_SIZE = 500
"""Objects in one page of a list, as kubectl requests them."""
USER_AGENT = "aliquot-cli"


class ConflictError(AccessError):
    """The object changed between reading and writing."""


class Cluster(Protocol):
    """What commands request from a cluster. Calls raise AccessError, NotFoundError or ConflictError."""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return an object or a list, decoded."""
        ...

    def text(self, path: str) -> str:
        """Return a page as it is, for example a page that a pod serves, through the proxy."""
        ...

    def merge(self, path: str, change: Mapping[str, Any]) -> Any:
        """Merge a change into an object."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster that the user chose."""

    kubeconfig: Path | None = None
    context: str | None = None


class ApiCluster:
    """A cluster behind an API server."""

    def __init__(self, connection: KubeConnection, url: str, request_seconds: float) -> None:
        self._connection = connection
        self._url = url
        self._request_seconds = request_seconds

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """See ``Cluster``."""
        return self._decoded(self._send("GET", with_options(path, **(query or {}))), path)

    def text(self, path: str) -> str:
        """See ``Cluster``."""
        return self._send("GET", path).decode(errors="replace")

    def merge(self, path: str, change: Mapping[str, Any]) -> Any:
        """See ``Cluster``."""
        return self._decoded(self._send("PATCH", path, body=change, content_type=MERGE_PATCH), path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send an object to a collection or a subresource; return the reply, decoded. Raises as the methods of ``Cluster``."""
        return self._decoded(self._send("POST", path, body=body), path)

    def _send(self, method: str, path: str, **options: Any) -> bytes:
        try:
            return self._connection.request(method, path, seconds=self._request_seconds, **options)
        except KubeNotFoundError as exc:
            raise NotFoundError(_sentence(path, exc)) from exc
        except KubeConflictError as exc:
            raise ConflictError(_sentence(path, exc), exc.status) from exc
        except KubeApiError as exc:
            unreachable = f"the cluster at {self._url} cannot be reached: {exc.reason}"
            raise AccessError(_sentence(path, exc) if exc.status else unreachable, exc.status) from exc

    def _decoded(self, data: bytes, path: str) -> Any:
        try:
            return json.loads(data)
        except ValueError as exc:
            raise AccessError(f"{self._url}{path} does not reply with JSON: is it a Kubernetes API server?") from exc


def _sentence(path: str, failed: KubeApiError) -> str:
    return f"{path.partition('?')[0]}: {failed.status} {failed.reason}"


def connect(target: Target, request_seconds: float = REQUEST_SECONDS) -> ApiCluster:
    """Find the cluster as kubectl does, or by the service account inside a pod. Raises AccessError."""
    configuration = _configuration(target)
    pool = _kubernetes().client.ApiClient(configuration).rest_client.pool_manager
    headers = {"User-Agent": USER_AGENT}
    headers |= {one["key"]: one["value"] for one in configuration.auth_settings().values() if one["in"] == "header" and one["value"]}
    url = configuration.host.rstrip("/")
    return ApiCluster(KubeConnection(pool, url, lambda: headers, request_seconds), url, request_seconds)


def _configuration(target: Target) -> Any:
    """Return the Configuration of the Kubernetes client. Raises AccessError."""
    kubernetes = _kubernetes()
    configuration = kubernetes.client.Configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    try:
        kubernetes.config.load_kube_config(
            config_file=str(target.kubeconfig) if target.kubeconfig else None,
            context=target.context,
            client_configuration=configuration,
            persist_config=False,
        )
    except kubernetes.config.ConfigException as exc:
        if target.kubeconfig is not None or target.context is not None:
            raise AccessError(f"kubeconfig: {exc}") from exc
        try:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        except kubernetes.config.ConfigException:
            raise AccessError(f"no cluster: {exc}; set KUBECONFIG, or give --kubeconfig") from exc
    return configuration


def listed(cluster: Cluster, path: str, query: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Yield the objects of a list, read in pages: the pods of a large cluster are hundreds of megabytes. Raises AccessError."""
    more = ""
    while True:
        answer = cluster.get(path, {**(query or {}), "limit": str(PAGE_SIZE), **({"continue": more} if more else {})})
        yield from answer["items"]
        more = answer.get("metadata", {}).get("continue") or ""
        if not more:
            return


def context_names(target: Target) -> list[str]:
    """Return the contexts of the kubeconfig; an empty list without a kubeconfig."""
    return [context["name"] for context in _contexts(target)[0]]


def current_namespace(target: Target) -> str:
    """Return the namespace that kubectl would use."""
    contexts, active = _contexts(target)
    if active is None:
        return "default"
    chosen = next((one for one in contexts if one["name"] == target.context), active)
    return str(chosen["context"].get("namespace") or "default")


def _contexts(target: Target) -> tuple[list[Any], Any]:
    """Return the contexts of the kubeconfig and the current one; without a kubeconfig, as inside a pod, an empty list and None."""
    kubernetes = _kubernetes()
    try:
        contexts, active = kubernetes.config.list_kube_config_contexts(str(target.kubeconfig) if target.kubeconfig else None)
    except kubernetes.config.ConfigException:
        return [], None
    return contexts, active


def _kubernetes() -> Any:
    """Import the client only when needed: it takes a quarter of a second."""
    import kubernetes

    return kubernetes


def proxy_path(namespace: str, pod: str, port: int, page: str) -> str:
    """Return the path of a page that a pod serves, through the API server's proxy."""
    return f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}:{port}/proxy{page}"
