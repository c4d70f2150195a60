# SPDX-License-Identifier: Apache-2.0
"""The part of the Kubernetes API that the agent uses, over HTTP on loopback, for a cluster of one node.

Like the real server it has: list and watch of pods, nodes, events, gpunodes, claims and slices (resource.k8s.io) with field selectors,
resource versions, bookmarks and 410; lists with a minimum version; get; JSON patch, merge patch and strategic merge patch of objects and of
the status subresource, and server-side apply to claims, as a merge; replacement of slices; creation and deletion; and the pod proxy, which
forwards to the URLs in ``pages``. Without gpunodes, it is a server where the resource definition is not installed. Left out: paging (a
server is free to ignore ``limit``), label selectors, admission and conversion.

For tests, the server can stop answering (``outage``), break its watches, drop its history, and serve from a cache that lags behind.
"""

import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aliquot.contract import gpunode
from aliquot_lab.standin.cluster import Change, ChangeType, Cluster, Kind, Object
from aliquot_lab.standin.errors import (
    ClusterError,
    ConflictError,
    GoneError,
    InvalidError,
    MediaTypeError,
    MethodError,
    NotFoundError,
    PathError,
    TooLargeVersionError,
)
from aliquot_lab.standin.patches import apply_json_patch, merge_patch, strategic_merge_patch

POLL_SECONDS = 0.1
"""Time after which an idle watch notices that the server stops or breaks it."""
WATCH_TIMEOUT_SECONDS = 1800.0
"""Life of a watch without a timeout from the client; the real server chooses 30 to 60 minutes."""
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
PROXY_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/pods/([^/:]+)(?::[^/]*)?/proxy(/.*)")
PROXY_SECONDS = 10.0


class ProxyError(ClusterError):
    """The pod behind the proxy does not answer."""

    code = 503
    reason = "ServiceUnavailable"


class UnauthorizedError(ClusterError):
    """The bearer token is missing or wrong."""

    code = 401
    reason = "Unauthorized"


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a path. ``namespace`` None means all namespaces, or a kind without namespaces; ``name`` None the collection."""

    kind: Kind
    namespace: str | None
    name: str | None
    subresource: str | None


def parse_path(path: str) -> Target:
    """Parse ``/api/v1/[namespaces/<ns>/]<kind>[/<name>[/status]]``, or the same below the API of gpunodes. Raises PathError."""
    api_version, parts = _split_api_version(path)
    namespace = None
    if len(parts) >= 3 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    kind = _kind_of(path, api_version, parts)
    name, subresource = (*parts[1:], None, None)[:2]
    if kind.namespaced and name is not None and namespace is None:
        raise PathError(f"{path}: no such resource")
    if subresource not in ((None, "status", "eviction") if kind is Kind.POD else (None, "status")):
        raise PathError(f"{path}: no such resource")
    return Target(kind, namespace, name, subresource)


def _split_api_version(path: str) -> tuple[str, list[str]]:
    """Return the path's API version, and the parts of the path after it. Raises PathError."""
    parts = [part for part in path.split("/") if part]
    api_version = "v1" if parts[:2] == ["api", "v1"] else "/".join(parts[1:3])
    if parts[:1] not in (["api"], ["apis"]) or api_version not in {kind.api_version for kind in Kind}:
        raise PathError(f"{path}: this server has /api/v1 and /apis/{gpunode.API_VERSION} only")
    return api_version, parts[2 if api_version == "v1" else 3 :]


def _kind_of(path: str, api_version: str, parts: Sequence[str]) -> Kind:
    """Return the kind of ``<kind>[/<name>[/<subresource>]]``. Raises PathError."""
    kinds = [kind for kind in Kind if kind.api_version == api_version]
    if not parts or len(parts) > 3 or parts[0] not in kinds:
        raise PathError(f"{path}: expected one of {', '.join(kinds)}")
    return Kind(parts[0])


def parse_field_selector(text: str) -> Callable[[Object], bool]:
    """Turn ``a.b=x,c!=y`` into a predicate over objects. A missing field counts as the empty string."""
    terms: list[tuple[list[str], str, bool]] = []
    for term in filter(None, text.split(",")):
        field, separator, value = term.partition("!=")
        wanted = not separator
        if wanted:
            field, separator, value = term.replace("==", "=").partition("=")
        if not separator:
            raise InvalidError(f"field selector {term!r}: expected field=value or field!=value")
        terms.append((field.split("."), value, wanted))
    return lambda item: all((_field(item, path) == value) is wanted for path, value, wanted in terms)


def _field(item: Any, path: list[str]) -> str:
    for key in path:
        item = item.get(key) if isinstance(item, dict) else None
    return "" if item is None else str(item)


def select_change(change: Change, keep: Callable[[Object], bool]) -> ChangeType | None:
    """Return the change that a watch with a selector sees: an object that starts to match is added, one that stops to match deleted."""
    before = change.previous is not None and keep(change.previous)
    after = change.type is not ChangeType.DELETED and keep(change.object)
    if after:
        return ChangeType.MODIFIED if before else ChangeType.ADDED
    return ChangeType.DELETED if before else None


class ApiServer:
    """Serves one cluster at ``url`` from ``start`` to ``stop``."""

    def __init__(self, cluster: Cluster, *, token: str | None = None, bookmark_seconds: float = 5.0, gpu_nodes: bool = True) -> None:
        """Create the server; ``start`` serves.

        Args: token: the bearer token of all requests; None accepts any request.
              bookmark_seconds: time between two bookmarks of a watch.
              gpu_nodes: whether the resource definition of gpunodes is installed.
        """
        self.cluster = cluster
        self.gpu_nodes = gpu_nodes
        self.token = token
        self.bookmark_seconds = bookmark_seconds
        self.cache_version: int | None = None
        """Version of a cache that lags behind: lists are not newer. None while the cache is current."""
        self.pages: dict[tuple[str, str], str] = {}
        """Base URL of the pod proxy's target, by namespace and name of the pod."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of every answered request, oldest first, for tests."""
        self.unanswered: list[tuple[str, str]] = []
        """Method and path of every request during an outage."""
        self._silent = threading.Event()
        self._watch_epoch = 0
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.api = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(POLL_SECONDS,), name="apiserver", daemon=True)

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End watches and free the port."""
        self.break_watches()
        self._silent.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Be unreachable inside the block: watches break, and requests get no answer."""
        self._silent.set()
        self.break_watches()
        try:
            yield
        finally:
            self._silent.clear()

    def break_watches(self) -> None:
        """End all open watches, as a proxy or a server restart does."""
        self._watch_epoch += 1

    @property
    def silent(self) -> bool:
        """Whether an outage is in progress."""
        return self._silent.is_set()

    @property
    def watch_epoch(self) -> int:
        """Return a number that changes when all open watches must end."""
        return self._watch_epoch


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    api: ApiServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error in a request, except that the client has gone: tests kill clients."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as the real API server: header and body go out at once, not 40 ms apart
    server: _Server

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Print nothing: ``ApiServer.requests`` has the requests."""

    # --- verbs ---

    def _get(self, target: Target, query: dict[str, str]) -> None:
        cluster = self.server.api.cluster
        if target.name is not None:
            self._send(200, cluster.get(target.kind, target.namespace or "", target.name))
        elif query.get("watch", "").lower() in ("1", "true"):
            self._watch(target, query)
        else:
            version, items = cluster.list(target.kind, _selector(target, query))
            self._check_version(query, version)
            listing = {
                "kind": f"{target.kind.type_name}List",
                "apiVersion": target.kind.api_version,
                "metadata": {"resourceVersion": str(version)},
                "items": items,
            }
            self._send(200, listing)

    def _check_version(self, query: dict[str, str], version: int) -> None:
        """Refuse a list with a minimum version that is not reached (the real server waits 3 s first), and lists of an exact version."""
        match, requested = query.get("resourceVersionMatch", ""), query.get("resourceVersion", "")
        if match not in ("", "NotOlderThan") or (match and not requested):
            raise InvalidError(f"resourceVersionMatch {match!r} with resourceVersion {requested!r}: expected NotOlderThan and a version")
        behind = self.server.api.cache_version
        current = version if behind is None else behind
        if requested and int(requested) > current:
            raise TooLargeVersionError(f"Too large resource version: {requested}, current: {current}")

    def _post(self, target: Target, query: dict[str, str]) -> None:
        del query
        body = self._body()
        if not isinstance(body, dict):
            raise InvalidError("expected one object")
        if target.subresource == "eviction":
            self._send(201, evict_pod(self.server.api.cluster, target.namespace or "", target.name or "", body))
            return
        if target.name is not None:
            raise MethodError("POST is for collections")
        if target.namespace is not None:
            body.setdefault("metadata", {}).setdefault("namespace", target.namespace)
        if target.kind is Kind.GPU_NODE:
            body.pop("status", None)  # creation ignores the status of a resource with a status subresource
        self._send(201, self.server.api.cluster.create(target.kind, body))

    def _patch(self, target: Target, query: dict[str, str]) -> None:
        del query
        if target.name is None:
            raise MethodError("PATCH is for single objects")
        patch = self._body()
        content_type = self.headers.get("Content-Type", "").partition(";")[0].strip()
        known = _PATCHES.get(target.kind, (JSON_PATCH, MERGE_PATCH, STRATEGIC_MERGE_PATCH))
        if content_type not in known:
            raise MediaTypeError(f"expected {', '.join(known)}, found {content_type or 'no type'}")

        def change(item: dict[str, Any]) -> None:
            if content_type == JSON_PATCH:
                patched = json.loads(json.dumps(item))
                apply_json_patch(patched, patch)
            elif content_type in (MERGE_PATCH, APPLY_PATCH):
                patched = merge_patch(item, patch)
            else:
                patched = strategic_merge_patch(item, patch)
            _keep_other_half(item, patched, target.subresource)
            item.clear()
            item.update(patched)

        self._send(200, self.server.api.cluster.update(target.kind, target.namespace or "", target.name, change))

    def _put(self, target: Target, query: dict[str, str]) -> None:
        """Replace an object if the client knows its version. Only kinds without a status subresource."""
        del query
        if target.name is None or target.kind is not Kind.RESOURCE_SLICE:
            raise MethodError("PUT is for single ResourceSlices")
        body = self._body()

        def change(item: dict[str, Any]) -> None:
            if body["metadata"].get("resourceVersion") != item["metadata"]["resourceVersion"]:
                raise ConflictError(f"{target.name}: the object has been modified; apply your changes to the latest version")
            item["spec"] = body["spec"]

        self._send(200, self.server.api.cluster.update(target.kind, "", target.name, change))

    def _delete(self, target: Target, query: dict[str, str]) -> None:
        del query
        if target.name is None:
            raise MethodError("DELETE is for single objects")
        self._body()
        cluster = self.server.api.cluster
        if target.kind is Kind.POD:
            self._send(200, request_pod_deletion(cluster, target.namespace or "", target.name))
        else:
            self._send(200, cluster.delete(target.kind, target.namespace or "", target.name))

    # --- watch ---

    def _watch(self, target: Target, query: dict[str, str]) -> None:
        """Stream changes as the real server does: an expired version is an ERROR event in a stream that started with 200."""
        api, keep = self.server.api, _selector(target, query)
        epoch = api.watch_epoch
        deadline = time.monotonic() + float(query.get("timeoutSeconds", WATCH_TIMEOUT_SECONDS))
        bookmarks = query.get("allowWatchBookmarks", "").lower() in ("1", "true")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        version = self._begin_watch(target, query, keep)
        next_bookmark = time.monotonic() + api.bookmark_seconds
        try:
            while time.monotonic() < deadline and epoch == api.watch_epoch:
                version, changes = api.cluster.changes_after(version, target.kind, POLL_SECONDS)
                for change in changes:
                    if (seen := select_change(change, keep)) is not None:
                        self._send_event(seen.value, change.object)
                if bookmarks and time.monotonic() >= next_bookmark:
                    next_bookmark = time.monotonic() + api.bookmark_seconds
                    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
                    self._send_event(
                        "BOOKMARK", {"kind": target.kind.type_name, "apiVersion": target.kind.api_version, "metadata": metadata}
                    )
        except GoneError as exc:
            self._send_event("ERROR", _status(exc))
        if api.silent:
            self.close_connection = True
        else:
            self._send_chunk(b"")

    def _begin_watch(self, target: Target, query: dict[str, str], keep: Callable[[Object], bool]) -> int:
        """Return the version to continue from. Without one from the client, first send the objects that exist."""
        if (requested := query.get("resourceVersion", "0")) not in ("", "0"):
            return int(requested)
        version, items = self.server.api.cluster.list(target.kind, keep)
        for item in items:
            self._send_event(ChangeType.ADDED.value, item)
        return version

    def _send_event(self, event_type: str, item: Object) -> None:
        self._send_chunk(json.dumps({"type": event_type, "object": item}, separators=(",", ":")).encode() + b"\n")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    # --- plumbing ---

    def _answer(self, verb: Callable[[Target, dict[str, str]], None]) -> None:
        api = self.server.api
        if api.silent:
            api.unanswered.append((self.command, self.path))
            self.close_connection = True
            return
        split = urlsplit(self.path)
        api.requests.append((self.command, self.path))
        try:
            if api.token is not None and self.headers.get("Authorization") != f"Bearer {api.token}":
                raise UnauthorizedError("expected this cluster's bearer token")
            if (proxied := PROXY_PATH.fullmatch(split.path)) is not None:
                self._proxy(*proxied.groups())
                return
            query = {key: values[-1] for key, values in parse_qs(split.query, keep_blank_values=True).items()}
            target = parse_path(split.path)
            if target.kind is Kind.GPU_NODE and not api.gpu_nodes:
                raise PathError("the server could not find the requested resource")
            verb(target, query)
        except ClusterError as exc:
            self._send(exc.code, _status(exc))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _proxy(self, namespace: str, pod: str, page: str) -> None:
        base = self.server.api.pages.get((namespace, pod))
        if base is None:
            raise NotFoundError(f"pods {pod!r} not found")
        try:
            with urllib.request.urlopen(base + page, timeout=PROXY_SECONDS) as answer:  # noqa: S310 - a page on loopback
                code, content_type, data = answer.status, answer.headers["Content-Type"], answer.read()
        except OSError as exc:
            raise ProxyError(f"error trying to reach service: {exc}") from exc
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        if not length:
            return None
        try:
            return json.loads(self.rfile.read(length))
        except ValueError as exc:
            raise InvalidError(f"the body is not JSON: {exc}") from exc

    def _send(self, code: int, body: Object) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


_PATCHES = {Kind.GPU_NODE: (JSON_PATCH, MERGE_PATCH), Kind.RESOURCE_CLAIM: (JSON_PATCH, MERGE_PATCH, APPLY_PATCH)}


def request_pod_deletion(cluster: Cluster, namespace: str, name: str) -> Object:
    """Mark a pod for deletion, as DELETE does. The object stays until the kubelet has stopped its containers."""

    def mark(pod: dict[str, Any]) -> None:
        grace = pod.get("spec", {}).get("terminationGracePeriodSeconds", 30)
        pod["metadata"].setdefault("deletionTimestamp", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + grace)))
        pod["metadata"].setdefault("deletionGracePeriodSeconds", grace)

    return cluster.update(Kind.POD, namespace, name, mark)


def evict_pod(cluster: Cluster, namespace: str, name: str, eviction: Object) -> Object:
    """Delete a pod as its eviction subresource does, without disruption budgets."""
    if eviction.get("kind") != "Eviction" or eviction.get("apiVersion") != "policy/v1":
        raise InvalidError(f"expected an Eviction of policy/v1, found {eviction.get('kind')} of {eviction.get('apiVersion')}")
    wanted = eviction.get("deleteOptions", {}).get("preconditions", {}).get("uid")
    found = cluster.get(Kind.POD, namespace, name)["metadata"]["uid"]
    if wanted is not None and wanted != found:
        raise ConflictError(f"pods {name!r}: expected UID {wanted}, found {found}")
    if eviction.get("deleteOptions", {}).get("dryRun") == ["All"]:
        return cluster.get(Kind.POD, namespace, name)
    return request_pod_deletion(cluster, namespace, name)


def _selector(target: Target, query: dict[str, str]) -> Callable[[Object], bool]:
    fields = parse_field_selector(query.get("fieldSelector", ""))
    if target.namespace is None:
        return fields
    return lambda item: item["metadata"].get("namespace") == target.namespace and fields(item)


def _keep_other_half(item: Object, patched: dict[str, Any], subresource: str | None) -> None:
    """Restrict a patch of ``status`` to the status, and keep the status in any other patch."""
    for key in set(item) | set(patched):
        protected = key in ("spec", "data") if subresource == "status" else key == "status"
        if not protected:
            continue
        if key in item:
            patched[key] = item[key]
        else:
            patched.pop(key, None)


def _status(exc: ClusterError) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": str(exc),
        "reason": exc.reason,
        "code": exc.code,
    }
