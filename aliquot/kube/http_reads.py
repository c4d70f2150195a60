# SPDX-License-Identifier: Apache-2.0
"""Reads from the Kubernetes API by the standard library's HTTP client, which needs about half of urllib3's CPU time.

For reads that a starting container waits for, many at once. ``urllib3_transport`` has what else the agent and the command line send.
"""

import http.client
import ssl
import threading
from urllib.parse import urlsplit

from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeApiError, error_of_reply
from aliquot.kube.requests import ACCEPT

REQUEST_SECONDS = 10.0
"""Without progress, not in all."""
_CLOSED = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
"""How a connection fails that the server closed while no request was on it."""


class HttpReads:
    """Reads objects. Thread-safe: each thread keeps a connection of its own."""

    def __init__(self, server: ApiServer, user_agent: str, seconds: float = REQUEST_SECONDS) -> None:
        self._server = server
        self._user_agent = user_agent
        self._seconds = seconds
        self._prefix = urlsplit(server.url).path
        self._of_thread = threading.local()

    def get(self, path: str) -> bytes:
        """Return the body of the reply. Raises KubeApiError, or a subclass by the status."""
        headers = {"Accept": ACCEPT, "User-Agent": self._user_agent, **self._server.credentials()}
        try:
            reply, body = self._ask(path, headers)
        except (OSError, http.client.HTTPException) as exc:
            self._drop()
            cause = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            raise KubeApiError(f"GET {self._server.url}{path}: {cause}", reason=cause) from exc
        if reply.status >= 300:
            raise error_of_reply(f"GET {path}", reply.status, body, reply.headers.get("Retry-After"))
        return body

    def _ask(self, path: str, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, bytes]:
        kept: http.client.HTTPConnection | None = getattr(self._of_thread, "connection", None)
        if kept is not None:
            try:
                return _reply(kept, self._prefix + path, headers)
            except _CLOSED:
                self._drop()
        self._of_thread.connection = connection = self._connect()
        return _reply(connection, self._prefix + path, headers)

    def _drop(self) -> None:
        """Close this thread's connection. The next one reads the CA file again."""
        kept: http.client.HTTPConnection | None = getattr(self._of_thread, "connection", None)
        if kept is not None:
            kept.close()
        self._of_thread.connection = None

    def _connect(self) -> http.client.HTTPConnection:
        url = urlsplit(self._server.url)
        if url.scheme != "https":
            return http.client.HTTPConnection(url.hostname or "", url.port, timeout=self._seconds)
        ca_file = self._server.ca_file
        try:
            context = ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
        except OSError as exc:
            raise KubeApiError(f"the API's CA {ca_file}: {exc.strerror or exc}") from exc
        return http.client.HTTPSConnection(url.hostname or "", url.port, timeout=self._seconds, context=context)


def _reply(connection: http.client.HTTPConnection, target: str, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, bytes]:
    connection.request("GET", target, headers=headers)
    reply = connection.getresponse()
    return reply, reply.read()
