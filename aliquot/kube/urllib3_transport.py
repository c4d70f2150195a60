# SPDX-License-Identifier: Apache-2.0
"""Requests to the Kubernetes API over urllib3, for the agent and the command line; ``watch_thread`` has the agent's list-watch.

The command line imports this at every press of a completion key, so it imports little.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import urllib3

from aliquot.kube.errors import KubeApiError, error_of_reply
from aliquot.kube.requests import ACCEPT, JSON

if TYPE_CHECKING:
    from aliquot.kube.api_server import ApiServer

REQUEST_SECONDS = 10.0
"""Without progress, not in all."""
MOST_CONNECTIONS = 4
"""Kept open by default: one for each part of the agent that writes by itself."""
CHUNK_BYTES = 1 << 16
KEEPALIVE = [
    *urllib3.connection.HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""Socket options for a connection that watches: a peer that vanished without closing is noticed in half a minute."""

_Headers: TypeAlias = Mapping[str, str]


class KubeConnection:
    """Sends requests with credentials and translates failures. Thread-safe."""

    def __init__(self, pool: urllib3.PoolManager, url: str, headers: Callable[[], _Headers], connect_seconds: float = 5.0) -> None:
        """Args: url: without a slash at its end. headers: called for each request, for credentials; raises KubeApiError."""
        self._pool = pool
        self._url = url
        self._headers = headers
        self._connect_seconds = connect_seconds

    def request(self, method: str, path: str, *, body: Any = None, content_type: str = JSON, seconds: float = REQUEST_SECONDS) -> bytes:
        """Send one request; return the body of the reply. Raises KubeApiError, or a subclass by the status."""
        with self._reply(method, path, body, {"Content-Type": content_type}, seconds) as reply:
            return reply.data

    @contextmanager
    def stream(self, path: str, silence_seconds: float) -> Iterator[Iterator[bytes]]:
        """Open a watch; yield its chunks as they arrive. Raises as ``request``, also while they are read inside the block."""
        with self._reply("GET", path, None, {}, silence_seconds) as reply:
            yield iter(lambda: reply.read1(CHUNK_BYTES), b"")

    @contextmanager
    def _reply(self, method: str, path: str, body: Any, headers: _Headers, seconds: float) -> Iterator[urllib3.BaseHTTPResponse]:
        try:
            reply = self._pool.request(
                method,
                self._url + path,
                headers={"Accept": ACCEPT, **headers, **self._headers()},
                body=None if body is None else msgspec.json.encode(body),
                timeout=urllib3.Timeout(connect=self._connect_seconds, read=seconds),
                retries=False,
                preload_content=False,
            )
            with closing(reply):
                if reply.status >= 300:
                    raise error_of_reply(f"{method} {path}", reply.status, reply.data, reply.headers.get("Retry-After"))
                yield reply
        except urllib3.exceptions.HTTPError as exc:
            raise KubeApiError(f"{method} {self._url}{path}: {_cause(exc)}", reason=_cause(exc)) from exc


def connect(server: "ApiServer", user_agent: str, **pool_options: Any) -> KubeConnection:
    """Return a connection that verifies the server by its CA file. Args: pool_options: of urllib3's pool."""
    if server.url.startswith("https:"):
        pool_options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": str(server.ca_file) if server.ca_file else None}
    pool = urllib3.PoolManager(num_pools=1, **{"maxsize": MOST_CONNECTIONS, **pool_options})
    return KubeConnection(pool, server.url, lambda: {"User-Agent": user_agent, **server.credentials()})


def _cause(exc: urllib3.exceptions.HTTPError) -> str:
    """Return the innermost sentence: urllib3 puts the system's message behind descriptions of its own objects."""
    text = str(getattr(exc, "reason", None) or exc)
    return text.rpartition(">: ")[2] or text
