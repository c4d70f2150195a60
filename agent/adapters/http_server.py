# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of /metrics, /healthz and /readyz. It has an event loop in its own thread, independent of the agent's loop.

Any pod of the cluster may connect. Invariants: the number of open connections and their duration are limited, and a client that stalls
occupies no thread. A connection above the limit closes the oldest one of the address with the most connections, so that no client can lock
out kubelet's probes. The loop itself answers probes; a few threads make the slower pages.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from agent.ports.status_page import Page
from aliquot.process.listening import listening_address, listening_socket, peer_address
from aliquot.process.settings import SettingsError

logger = logging.getLogger(__name__)

Pages = Mapping[str, Callable[[str], Page]]
"""By path: the function that makes the response from the Accept header."""
PROBES = frozenset({"/healthz", "/readyz"})
"""Pages that are made at once, in the event loop."""
MOST_CONNECTIONS = 64
BACKLOG = 128
"""Connections that wait to be accepted."""
REQUEST_SECONDS = 10.0
"""Limit from the connection to the end of the response."""
HEAD_BYTES_MAX = 16 << 10
PAGE_THREADS = 4


class StatusServer:
    """Serves the pages until stopped."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Raises SettingsError if the server cannot listen on the address."""
        self._pages = pages
        self._host = host
        try:
            self._socket = listening_socket(host, port, BACKLOG)
        except OSError as exc:
            raise SettingsError(f"metricsAddress {host}:{port}: {exc.strerror}; choose another address") from exc
        self._clients: dict[asyncio.Task[None], str] = {}
        """The address of each client, the oldest first."""
        self._makers = ThreadPoolExecutor(PAGE_THREADS, thread_name_prefix="page")
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, as ``host:port``."""
        return listening_address(self._host, self._socket.getsockname()[:2])

    def start(self) -> None:
        """Begin to serve."""
        self._runner.get_loop()  # create the loop here, so that an immediate ``stop`` finds it
        self._thread.start()

    def stop(self) -> None:
        """Stop, if started."""
        if self._thread.is_alive():
            self._runner.get_loop().call_soon_threadsafe(self._stopped.set)
            self._thread.join()
        self._makers.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    # --- in the server's thread ---

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=HEAD_BYTES_MAX, backlog=BACKLOG)
        await self._stopped.wait()
        server.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MOST_CONNECTIONS:
            self._make_room()
        address, *_ = writer.get_extra_info("peername") or ("",)  # missing if the connection was already reset
        address = peer_address(address)
        client = asyncio.get_running_loop().create_task(self._serve_client(reader, writer, address))
        self._clients[client] = address

        def end(client: asyncio.Task[None]) -> None:
            """Close the connection at once, even if the task was cancelled before it started."""
            self._clients.pop(client, None)
            writer.transport.abort()

        client.add_done_callback(end)

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                page = await self._answer(reader)
                writer.write(_head(page))
                writer.write(page.body)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, EOFError, OSError, asyncio.LimitOverrunError) as exc:
            logger.debug("no response to a request from %s: %s", address, str(exc) or type(exc).__name__)

    def _make_room(self) -> None:
        """Close the oldest connection of the address with the most connections."""
        counts = Counter(self._clients.values())
        most = max(counts.values())
        oldest = next(client for client, address in self._clients.items() if counts[address] == most)
        del self._clients[oldest]
        oldest.cancel()

    async def _answer(self, reader: asyncio.StreamReader) -> Page:
        """Read a request and make its page. Raises EOFError, OSError or LimitOverrunError without a complete request."""
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, *_ = (*request.split(" "), "", "")
        path = target.partition("?")[0]
        make = self._pages.get(path)
        if method != "GET":
            return Page(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET is supported\n")
        if make is None:
            return Page(HTTPStatus.NOT_FOUND, "text/plain", f"{', '.join(self._pages)}\n".encode())
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        accept = headers.get("accept", "")
        try:
            if path in PROBES:
                return make(accept)
            return await asyncio.get_running_loop().run_in_executor(self._makers, make, accept)
        except Exception:
            logger.exception("page %s", path)
            return Page(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"failed: see the agent's log\n")


def _head(page: Page) -> bytes:
    status = HTTPStatus(page.status)
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode()
