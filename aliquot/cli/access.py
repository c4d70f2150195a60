"""The way to the API server: kubeconfig and contexts as kubectl has them, or the service account inside a cluster; JSON in and out."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import urllib3

from aliquot.cli.errors import AccessError, NotFoundError

CONNECTIONS = 32
"""Agents that are asked at the same time."""
REQUEST_SECONDS = 10.0
PAGE_SIZE = 500
"""Objects of a list that are asked for at once; what kubectl asks for."""


class ConflictError(AccessError):
    """The object was changed by somebody else between reading and writing."""


class Cluster(Protocol):
    """What commands ask of a cluster. Calls raise AccessError, NotFoundError or ConflictError."""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return an object or a list, decoded."""
        ...

    def text(self, path: str) -> str:
        """Return a page as it is, such as one of a pod's through the proxy."""
        ...

    def merge(self, path: str, change: Mapping[str, Any]) -> Any:
        """Merge a change into an object."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Which cluster, as the user says it."""

    kubeconfig: Path | None = None
    context: str | None = None


class ApiCluster:
    """A cluster behind an API server."""

    def __init__(self, pool: urllib3.PoolManager, url: str, headers: Mapping[str, str], request_seconds: float) -> None:
        self._pool = pool
        self._request_seconds = request_seconds
        self._url = url.rstrip("/")
        self._headers = headers

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """See ``Cluster``."""
        return self._decoded(self._ask("GET", path + (f"?{urlencode(query)}" if query else ""), {"Accept": "application/json"}), path)

    def text(self, path: str) -> str:
        """See ``Cluster``."""
        return self._ask("GET", path, {"Accept": "*/*"}).decode(errors="replace")

    def merge(self, path: str, change: Mapping[str, Any]) -> Any:
        """See ``Cluster``."""
        headers = {"Content-Type": "application/merge-patch+json", "Accept": "application/json"}
        return self._decoded(self._ask("PATCH", path, headers, json.dumps(change).encode()), path)

    def _ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> bytes:
        try:
            answer = self._pool.request(
                method, self._url + path, headers={**self._headers, **headers}, body=body, timeout=self._request_seconds, retries=False
            )
        except urllib3.exceptions.HTTPError as exc:
            raise AccessError(f"the cluster at {self._url} cannot be reached: {exc}") from exc
        if answer.status < 300:
            return answer.data
        message = f"{path.partition('?')[0]}: {answer.status} {_reason(answer.data)}"
        raise {404: NotFoundError, 409: ConflictError}.get(answer.status, AccessError)(message)

    def _decoded(self, data: bytes, path: str) -> Any:
        try:
            return json.loads(data)
        except ValueError as exc:
            raise AccessError(f"{self._url}{path} answers no JSON: is it a Kubernetes API server?") from exc


def connect(target: Target, request_seconds: float = REQUEST_SECONDS) -> ApiCluster:
    """Find the cluster as kubectl does, or as a pod does. Raises AccessError."""
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
    client = kubernetes.client.ApiClient(configuration)
    headers = {"User-Agent": "aliquot-cli"}
    headers |= {one["key"]: one["value"] for one in configuration.auth_settings().values() if one["in"] == "header" and one["value"]}
    return ApiCluster(client.rest_client.pool_manager, configuration.host, headers, request_seconds)


def listed(cluster: Cluster, path: str, query: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Yield the objects of a list, a page at a time: a large cluster's pods are hundreds of megabytes. Raises AccessError."""
    more = ""
    while True:
        answer = cluster.get(path, {**(query or {}), "limit": str(PAGE_SIZE), **({"continue": more} if more else {})})
        yield from answer["items"]
        more = answer.get("metadata", {}).get("continue") or ""
        if not more:
            return


def context_names(target: Target) -> list[str]:
    """Return the contexts of the kubeconfig; none without one."""
    return [context["name"] for context in _contexts(target)[0]]


def current_namespace(target: Target) -> str:
    """Return the namespace that kubectl would use."""
    contexts, active = _contexts(target)
    if active is None:
        return "default"
    chosen = next((one for one in contexts if one["name"] == target.context), active)
    return str(chosen["context"].get("namespace") or "default")


def _contexts(target: Target) -> tuple[list[Any], Any]:
    """Return the contexts of the kubeconfig and the current one; nothing and None where there is no kubeconfig, as inside a cluster."""
    kubernetes = _kubernetes()
    try:
        contexts, active = kubernetes.config.list_kube_config_contexts(str(target.kubeconfig) if target.kubeconfig else None)
    except kubernetes.config.ConfigException:
        return [], None
    return contexts, active


def _kubernetes() -> Any:
    """Import the client when it is needed: it costs a quarter of a second."""
    import kubernetes

    return kubernetes


def proxy_path(namespace: str, pod: str, port: int, page: str) -> str:
    """Return the path of a pod's page through the API server."""
    return f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}:{port}/proxy{page}"


def _reason(body: bytes) -> str:
    """Return what the API server says of a failure; others' pages are cut."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip()
