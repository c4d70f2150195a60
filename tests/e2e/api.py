# SPDX-License-Identifier: Apache-2.0
"""Requests to the API server over kept connections. kubectl takes a process for each, which was a third of a run's CPU time."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

_CONNECTIONS = 10
_TIMEOUT_SECONDS = 60
_JSON = "application/json"
_DISCOVERY = f"{_JSON};g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
"""All kinds of a server in one answer (https://kubernetes.io/docs/concepts/overview/kubernetes-api/#aggregated-discovery)."""


class ApiError(AssertionError):
    """The API server refused a request, or did not answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        """Of HTTP; 0 without an answer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that the server has, at the version it prefers."""

    version: str
    """``apps/v1``, for example."""
    plural: str
    names: frozenset[str]
    """What kubectl takes for it."""
    namespaced: bool

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of one object, or of all. Args: namespace: empty for all namespaces."""
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"/{'apis' if '/' in self.version else 'api'}/{self.version}{within}/{self.plural}{f'/{name}' if name else ''}"


class Api:
    """A client of one API server, with the rights of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self._configuration = Configuration()
        load_kube_config(str(kubeconfig), client_configuration=self._configuration)
        files = {"ca_certs": "ssl_ca_cert", "cert_file": "cert_file", "key_file": "key_file"}
        options = {option: getattr(self._configuration, field) for option, field in files.items()}
        self._pool = urllib3.PoolManager(maxsize=_CONNECTIONS, timeout=urllib3.Timeout(_TIMEOUT_SECONDS), **options)
        self._kinds: tuple[Kind, ...] = ()

    def send(self, verb: str, path: str, body: object = None) -> bytes:
        """Send one request.

        Returns: the body of the answer.
        Raises:  ApiError: the server refused it, or did not answer.
        """
        return self._answer(verb, path, body).data

    def watch(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the events of a watch until the connection ends. Raises: ApiError: it ended in the middle of one."""
        try:
            for line in self._answer("GET", path, preload_content=False, timeout=None):
                yield json.loads(line)
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"watch {path}: {error}") from error

    def kind(self, name: str) -> Kind:
        """Return a kind by any name that kubectl takes: ``pods``, ``pod``, ``po``, ``workloads.kueue.x-k8s.io``.

        Raises: ApiError: the server has no such kind.
        """
        for _ in range(2):
            for kind in self._kinds:
                if name.lower() in kind.names:
                    return kind
            self._kinds = tuple(self._discover())  # a definition may be new
        raise ApiError(f"the API server has no kind {name}", HTTPStatus.NOT_FOUND)

    def of(self, one: dict[str, Any]) -> Kind:
        """Return the kind of an object, at the version that the object states. Raises: ApiError: the server has no such kind."""
        group, _, _ = one["apiVersion"].rpartition("/")
        return replace(self.kind(f"{one['kind']}.{group}" if group else one["kind"]), version=one["apiVersion"])

    def _discover(self) -> Iterable[Kind]:
        for path in ("/api", "/apis"):
            for group in json.loads(self._answer("GET", path, accept=_DISCOVERY).data)["items"]:
                seen: set[str] = set()
                for version in group["versions"]:  # the preferred one is first
                    new = [one for one in version.get("resources", ()) if one["resource"] not in seen]
                    seen.update(one["resource"] for one in new)
                    yield from (_kind(group["metadata"].get("name", ""), version["version"], one) for one in new)

    def _answer(self, verb: str, path: str, body: object = None, accept: str = _JSON, **options: Any) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": accept, "Content-Type": _JSON}
        if token := self._configuration.get_api_key_with_prefix("BearerToken", "authorization"):  # by version of the library
            headers["Authorization"] = token
        text = json.dumps(body) if body is not None else None
        try:
            answer = self._pool.request(verb, self._configuration.host + path, body=text, headers=headers, **options)
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"{verb} {path}: {error}") from error
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise ApiError(f"{verb} {path}: HTTP {answer.status}: {_message(answer.data)}", answer.status)
        return answer


def _message(body: bytes) -> str:
    """Return what an answer says: the message of a Status, or the text of a proxy or of a component that is not ready."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")


def _kind(group: str, version: str, found: dict[str, Any]) -> Kind:
    singular, plural = found.get("singularResource", ""), found["resource"]
    kind = (found.get("responseKind") or {}).get("kind", "").lower()
    short = {plural, singular, kind, *found.get("shortNames", ())} - {""}
    return Kind(
        f"{group}/{version}" if group else version,
        plural,
        frozenset({*short, *(f"{name}.{group}" for name in short if group)}),
        found["scope"] == "Namespaced",
    )
