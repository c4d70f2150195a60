"""Requests to the Kubernetes API over aiohttp: pods, bindings, the lease, and the lists and watches of ``kube_watch``.

An answer of 4xx says that nothing was changed; anything else that is no success (no connection, a broken one, 5xx) leaves the outcome open,
because the API server may have written before it failed to answer.
"""

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

from program.api_server import ApiServer
from program.backoff import retry_after_seconds
from proto import contract
from proto.errors import AliquotError
from scheduler_plugin.core.objects import PodObject, pod_facts
from scheduler_plugin.core.pods import SUCCEEDED, PodFacts
from scheduler_plugin.errors import (
    KubeApiError,
    KubeConflictError,
    KubeExpiredError,
    KubeNotFoundError,
    KubeRefusedError,
)
from scheduler_plugin.ports import Clock, LeaseRecord

REQUEST_SECONDS: Final = 3.0
"""Shorter than the time between the moment a leader falls silent and the moment another may take over (services.leadership)."""
LIST_SECONDS: Final = 60.0
PAGE_SIZE: Final = 500
_CONNECT_SECONDS: Final = 3.0
_RETRIABLE_STATUS: Final = (408, 429)
_FAILURES: Final = {404: KubeNotFoundError, 409: KubeConflictError, 410: KubeExpiredError}
_USER_AGENT: Final = contract.SCHEDULER_NAME
_SECONDS_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
MAX_EVENT_CHARS: Final = 1024
"""The API server's limit."""
_MICROTIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


class KubeConnection:
    """Sends authorised requests and translates failures; one per process, used on one event loop."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._trust = _Trust(server.ca_file) if server.url.startswith("https:") else None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"User-Agent": _USER_AGENT, "Accept": "application/json"}
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def request(
        self, method: str, path: str, *, body: Any = None, content_type: str = "application/json", seconds: float = REQUEST_SECONDS
    ) -> bytes:
        """Send one request and return the body of the answer.

        Raises: KubeNotFoundError, KubeConflictError, KubeRefusedError, KubeExpiredError, KubeApiError.
        """
        limits = aiohttp.ClientTimeout(total=seconds, connect=_CONNECT_SECONDS)
        async with self._open(method, path, body, content_type, limits) as response:
            return await response.read()

    @asynccontextmanager
    async def stream(self, path: str, idle_seconds: float) -> AsyncIterator[aiohttp.StreamReader]:
        """Open a watch. Raises as ``request``, also while the stream is read inside the block."""
        limits = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS, sock_read=idle_seconds)
        async with self._open("GET", path, None, "application/json", limits) as response:
            yield response.content

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Any, content_type: str, limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else msgspec.json.encode(body)
        tls = True if self._trust is None else self._trust.context()
        try:
            async with self._session.request(
                method, self._server.url + path, data=data, headers=self._headers(content_type), timeout=limits, ssl=tls
            ) as response:
                if response.status >= 300:
                    raise _error(f"{method} {path}", response, await response.read())
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise KubeApiError(f"{method} {path}: {exc or type(exc).__name__}") from exc

    def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Content-Type": content_type}
        if self._server.token_file is not None:
            try:  # read every time: the kubelet rotates it
                headers["Authorization"] = f"Bearer {self._server.token_file.read_text().strip()}"
            except OSError as exc:
                raise KubeApiError(f"the API token {self._server.token_file}: {exc.strerror}") from exc
        return headers


class _Trust:
    """Whose certificates the API server may show, made anew when the file changes: the kubelet rotates the cluster's CA, too.

    A connection that is open stays so; aiohttp keeps those of each context apart, so that the next one is verified by the new file.
    """

    def __init__(self, ca_file: Path | None) -> None:
        """Args: ca_file: PEM certificates; None for those of the system, which are read once."""
        self._ca_file = ca_file
        self._version = self._look()
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """Return what to connect with now. Raises KubeApiError: the file changed and cannot be read."""
        try:
            version = self._look()
            if version != self._version:
                self._context = self._read()
                self._version = version
        except OSError as exc:  # also what ssl raises
            raise KubeApiError(f"the API's CA {self._ca_file}: {exc.strerror or exc}") from exc
        return self._context

    def _look(self) -> tuple[int, int] | None:
        if self._ca_file is None:
            return None
        found = self._ca_file.stat()
        return found.st_mtime_ns, found.st_ino

    def _read(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=None if self._ca_file is None else str(self._ca_file))


class _Status(msgspec.Struct):
    message: str = ""


def _error(what: str, response: aiohttp.ClientResponse, body: bytes) -> KubeApiError:
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.DecodeError:
        message = body[:200].decode(errors="replace")
    status = response.status
    refused = 400 <= status < 500 and status not in _RETRIABLE_STATUS
    kind = _FAILURES.get(status, KubeRefusedError if refused else KubeApiError)
    return kind(f"{what}: HTTP {status}: {message}", retry_after_seconds(response.headers.get("Retry-After")))


class _PageMetadata(msgspec.Struct):
    continue_: str | None = msgspec.field(default=None, name="continue")


class _PodPage(msgspec.Struct):
    metadata: _PageMetadata
    items: list[PodObject] | None = None


class KubePods:
    """Implements ``ports.PodApi``."""

    def __init__(self, connection: KubeConnection) -> None:
        self._connection = connection

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        """See ``ports.PodApi``."""
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "annotations": dict(annotations)},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._connection.request("POST", f"{_pod_path(namespace, name)}/binding", body=body)

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        """See ``ports.PodApi``."""
        try:
            data = await self._connection.request("GET", _pod_path(namespace, name))
        except KubeNotFoundError:
            return None
        try:
            return pod_facts(msgspec.json.decode(data, type=PodObject))
        except (AliquotError, msgspec.DecodeError) as exc:
            raise KubeApiError(f"the API answered with a pod that cannot be read: {exc}") from exc

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        """See ``ports.PodApi``; the event loop runs on between pages."""
        path = f"{_pods_path(namespace)}?fieldSelector=status.phase%3D{SUCCEEDED}&limit={PAGE_SIZE}"
        pods: list[PodFacts] = []
        token = ""
        while True:
            data = await self._connection.request("GET", f"{path}&continue={token}" if token else path, seconds=LIST_SECONDS)
            try:
                page = msgspec.json.decode(data, type=_PodPage)
                pods += map(pod_facts, page.items or ())
            except (AliquotError, msgspec.DecodeError) as exc:
                raise KubeApiError(f"the API answered with pods that cannot be read: {exc}") from exc
            token = page.metadata.continue_ or ""
            if not token:
                return pods

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """See ``ports.PodApi``."""
        patch = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        await self._connection.request("PATCH", _pod_path(namespace, name), body=patch, content_type="application/merge-patch+json")

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        """See ``ports.PodApi``."""
        options = {"preconditions": {"uid": uid}} | ({"dryRun": ["All"]} if dry_run else {})
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        await self._connection.request("POST", f"{_pod_path(namespace, name)}/eviction", body=body)


class KubeEvents:
    """Implements ``ports.EventApi``."""

    def __init__(self, connection: KubeConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        """See ``ports.EventApi``."""
        when = datetime.fromtimestamp(self._clock.now(), UTC).strftime(_SECONDS_TIME)
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name}.", "namespace": namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid},
            "reason": reason,
            "message": message if len(message) <= MAX_EVENT_CHARS else message[: MAX_EVENT_CHARS - 1] + "…",
            "type": "Warning",
            "source": {"component": contract.SCHEDULER_NAME},
            "reportingComponent": contract.SCHEDULER_NAME,
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
        }
        await self._connection.request("POST", f"/api/v1/namespaces/{quote(namespace, safe='')}/events", body=body)


class _LeaseMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _LeaseSpec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct):
    metadata: _LeaseMetadata = msgspec.field(default_factory=_LeaseMetadata)
    spec: _LeaseSpec = msgspec.field(default_factory=_LeaseSpec)


class KubeLease:
    """Implements ``ports.LeaseApi`` with a Lease of coordination.k8s.io."""

    def __init__(self, connection: KubeConnection, namespace: str, name: str, clock: Clock, read_seconds: float = REQUEST_SECONDS) -> None:
        """Args: read_seconds: how long a read may take."""
        self._connection = connection
        self._read_seconds = read_seconds
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace, safe='')}/leases"
        self._name = name
        self._clock = clock

    async def read(self) -> LeaseRecord | None:
        """See ``ports.LeaseApi``."""
        path = f"{self._collection}/{quote(self._name, safe='')}"
        try:
            return _record(await self._connection.request("GET", path, seconds=self._read_seconds))
        except KubeNotFoundError:
            return None

    async def write(self, holder: str, duration_seconds: float, transitions: int, version: str | None) -> LeaseRecord:
        """See ``ports.LeaseApi``."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, **({} if version is None else {"resourceVersion": version})},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": int(duration_seconds),
                "renewTime": datetime.fromtimestamp(self._clock.now(), UTC).strftime(_MICROTIME),
                "leaseTransitions": transitions,
            },
        }
        if version is None:
            return _record(await self._connection.request("POST", self._collection, body=body))
        return _record(await self._connection.request("PUT", f"{self._collection}/{quote(self._name, safe='')}", body=body))


def _record(data: bytes) -> LeaseRecord:
    try:
        lease = msgspec.json.decode(data, type=_Lease)
    except msgspec.DecodeError as exc:
        raise KubeApiError(f"the API answered with something that is no lease: {exc}") from exc
    spec = lease.spec
    return LeaseRecord(
        holder=spec.holder_identity or "",
        duration_seconds=float(spec.lease_duration_seconds or 0),
        renewals=spec.renew_time or "",
        transitions=spec.lease_transitions or 0,
        version=lease.metadata.resource_version,
    )


def _pods_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"


def _pod_path(namespace: str, name: str) -> str:
    return f"{_pods_path(namespace)}/{quote(name, safe='')}"
