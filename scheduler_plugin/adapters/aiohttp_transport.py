# SPDX-License-Identifier: Apache-2.0
"""Requests to the Kubernetes API over aiohttp, for asyncio. ``kube`` has the requests, ``kube_watch`` the list-watch.

After KubeRefusedError the server has changed no object. After another KubeApiError the outcome is unknown: the API server may have
written before it failed to reply, or before the connection broke.
"""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from aliquot import contract
from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeApiError, error_of_reply
from aliquot.kube.requests import ACCEPT, JSON

REQUEST_SECONDS: Final = 3.0
"""Shorter than the time between the moment a leader falls silent and the moment another may take over (services.leadership)."""
_CONNECT_SECONDS: Final = 3.0


class KubeConnection:
    """Sends requests with credentials and translates failures; one per process, used on one event loop."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._trust = _Trust(server.ca_file) if server.url.startswith("https:") else None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"User-Agent": contract.SCHEDULER_NAME, "Accept": ACCEPT}
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def request(
        self, method: str, path: str, *, body: Any = None, content_type: str = JSON, seconds: float = REQUEST_SECONDS
    ) -> bytes:
        """Send one request; return the body of the reply. Raises KubeApiError, or a subclass by the status."""
        limits = aiohttp.ClientTimeout(total=seconds, connect=_CONNECT_SECONDS)
        async with self._reply(method, path, body, {"Content-Type": content_type}, limits) as reply:
            return await reply.read()

    @asynccontextmanager
    async def stream(self, path: str, silence_seconds: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch; yield its chunks as they arrive. Raises as ``request``, also while they are read inside the block."""
        limits = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS, sock_read=silence_seconds)
        async with self._reply("GET", path, None, {}, limits) as reply:
            yield reply.content.iter_any()

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else msgspec.json.encode(body)
        tls = True if self._trust is None else self._trust.context()
        headers = {**headers, **self._server.credentials()}
        try:
            async with self._session.request(method, self._server.url + path, data=data, headers=headers, timeout=limits, ssl=tls) as reply:
                if reply.status >= 300:
                    raise error_of_reply(f"{method} {path}", reply.status, await reply.read(), reply.headers.get("Retry-After"))
                yield reply
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise KubeApiError(f"{method} {path}: {exc or type(exc).__name__}") from exc


class _Trust:
    """The CA certificates of the API server; read again when the file changes, because kubelet rotates the cluster's CA too.

    Open connections stay open. aiohttp keeps the connections of each TLS context apart, so a new one is verified by the new file.
    """

    def __init__(self, ca_file: Path | None) -> None:
        """Args: ca_file: PEM certificates; None means those of the system, which are read once."""
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
        except OSError as exc:  # the base of ssl's errors too
            raise KubeApiError(f"the API's CA {self._ca_file}: {exc.strerror or exc}") from exc
        return self._context

    def _look(self) -> tuple[int, int] | None:
        if self._ca_file is None:
            return None
        found = self._ca_file.stat()
        return found.st_mtime_ns, found.st_ino

    def _read(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=None if self._ca_file is None else str(self._ca_file))
