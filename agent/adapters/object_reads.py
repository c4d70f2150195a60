# SPDX-License-Identifier: Apache-2.0
"""Reads single objects from the Kubernetes API, on the event loop and over connections that stay open.

Kubelet waits for these reads, and many pods start at once. By urllib3 in a thread, a read took several times the CPU time. It needs little
of HTTP/1.1: the request has no body, and the body of the reply has a known length, comes in chunks, or ends with the connection.
Source: https://www.rfc-editor.org/rfc/rfc9112
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeApiError, error_of_reply
from aliquot.kube.requests import ACCEPT
from aliquot.kube.urllib3_transport import REQUEST_SECONDS

READS_AT_ONCE: Final = 8
"""More do not make many reads faster, and the API server serves other nodes too."""
_END_OF_HEAD: Final = b"\r\n\r\n"
_PORTS: Final = {"http": 80, "https": 443}


class ObjectReader:
    """Reads objects with the agent's credentials."""

    def __init__(self, server: ApiServer, user_agent: str) -> None:
        self._server = server
        self._url = urlsplit(server.url)
        self._user_agent = user_agent
        self._turns = asyncio.Semaphore(READS_AT_ONCE)
        self._idle: list[_Connection] = []

    async def read(self, path: str) -> bytes:
        """Return the object at a path of the API. Raises KubeApiError, or a subclass by the status."""
        try:
            async with self._turns, asyncio.timeout(REQUEST_SECONDS):
                reply = await self._reply(self._request(path))
        except TimeoutError as exc:
            self.close()  # the server may have vanished, and then no connection to it works
            raise self._no_reply(path, f"no reply in {REQUEST_SECONDS:g} s") from exc
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as exc:
            raise self._no_reply(path, str(exc)) from exc
        if reply.status >= 300:
            raise error_of_reply(f"GET {path}", reply.status, reply.body, reply.headers.get("retry-after"))
        return reply.body

    def close(self) -> None:
        """Close the connections that no read uses."""
        while self._idle:
            self._idle.pop().close()

    def _request(self, path: str) -> bytes:
        """Return the head of a request. Raises KubeApiError: the credentials cannot be read."""
        headers = {"Host": self._url.netloc, "Accept": ACCEPT, "User-Agent": self._user_agent, **self._server.credentials()}
        lines = [f"GET {self._url.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode("latin-1") + _END_OF_HEAD

    async def _reply(self, request: bytes) -> "_Reply":
        while self._idle:
            try:
                return await self._ask(self._idle.pop(), request)
            except (OSError, EOFError):  # the server has closed it meanwhile, and a read can be repeated
                continue
        return await self._ask(await self._connect(), request)

    async def _ask(self, connection: "_Connection", request: bytes) -> "_Reply":
        reply = None
        try:
            reply = await connection.ask(request)
        finally:
            if reply is not None and reply.stays_open:
                self._idle.append(connection)
            else:
                connection.close()
        return reply

    async def _connect(self) -> "_Connection":
        url = self._url
        context = self._context() if url.scheme == "https" else None
        return _Connection(*await asyncio.open_connection(url.hostname, url.port or _PORTS[url.scheme], ssl=context))

    def _context(self) -> ssl.SSLContext:
        """Return the verification for a new connection: the CA file may be replaced. Raises KubeApiError: it cannot be read."""
        ca_file = self._server.ca_file
        try:
            return ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        except OSError as exc:
            raise KubeApiError(f"the API's CA {ca_file}: {exc.strerror or exc}") from exc

    def _no_reply(self, path: str, cause: str) -> KubeApiError:
        return KubeApiError(f"GET {self._server.url}{path}: {cause}", reason=cause)


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes
    stays_open: bool
    """Whether the connection can carry another request."""


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes) -> _Reply:
        """Send a request and return the reply. Raises OSError; EOFError: the server has closed the connection; ValueError: no HTTP/1.1."""
        self._writer.write(request)
        status, headers = await self._head()
        while status < 200:  # a word before the reply
            status, headers = await self._head()
        stays_open = headers.get("connection", "").lower() != "close"
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return _Reply(status, headers, await self._chunks(), stays_open)
        if "content-length" in headers:
            return _Reply(status, headers, await self._reader.readexactly(int(headers["content-length"])), stays_open)
        return _Reply(status, headers, await self._reader.read(), stays_open=False)

    def close(self) -> None:
        """Close it without waiting."""
        self._writer.close()

    async def _head(self) -> tuple[int, Mapping[str, str]]:
        first, *lines = (await self._reader.readuntil(_END_OF_HEAD)).decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        if version != "HTTP/1.1":
            raise ValueError(f"want a reply of HTTP/1.1, found {first[:100]!r}")
        return int(status), {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    async def _chunks(self) -> bytes:
        parts = []
        while size := int((await self._reader.readline()).partition(b";")[0], 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        while (await self._reader.readline()).strip():
            pass  # a header after the body
        return b"".join(parts)
