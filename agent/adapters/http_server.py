"""The HTTP server of /metrics, /healthz and /readyz: a thread per request, so that a client that stalls keeps no probe waiting."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agent.ports import Page
from program.settings import SettingsError

logger = logging.getLogger(__name__)

Pages = Mapping[str, Callable[[str], Page]]
"""By path: what to answer, given the Accept header."""
CLIENT_TIMEOUT_SECONDS = 10
"""A client that sends nothing must not keep its thread for ever."""


class StatusServer:
    """Serves the pages until stopped."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Raises SettingsError when the address cannot be listened on."""
        handler = type("Handler", (_Handler,), {"pages": pages})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        try:
            self._server = server((host, port), handler)
        except OSError as exc:
            raise SettingsError(f"metricsAddress {host}:{port}: {exc.strerror}; choose another address") from exc
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="status", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, as ``host:port``."""
        host, port = self._server.server_address[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End, if it began."""
        self._stopped.set()
        if self._thread.is_alive():
            self._server.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
            self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """Wait for one connection after the other; unlike ``serve_forever``, it does not wake up to see whether it is to stop."""
        while not self._stopped.is_set():
            self._server.handle_request()


class _Handler(BaseHTTPRequestHandler):
    pages: Pages
    timeout = CLIENT_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Answer one page."""
        make = self.pages.get(self.path.partition("?")[0])
        if make is None:
            page = Page(HTTPStatus.NOT_FOUND, "text/plain", f"{', '.join(self.pages)}\n".encode())
        else:
            page = make(self.headers.get("Accept", ""))
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        self.wfile.write(page.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Log at debug level: a scrape every few seconds is no news."""
        logger.debug(format, *args)
