# SPDX-License-Identifier: Apache-2.0
"""An API server that refuses every request with a Retry-After header."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

RETRY_AFTER_SECONDS = 7


class _Handler(BaseHTTPRequestHandler):
    status = 429

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Retry-After", str(RETRY_AFTER_SECONDS))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def overloaded_api(status: int = 429) -> Iterator[str]:
    """Serve inside the block; yield the URL."""
    server = HTTPServer(("127.0.0.1", 0), type("_Refusing", (_Handler,), {"status": status}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="overloaded-api", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
