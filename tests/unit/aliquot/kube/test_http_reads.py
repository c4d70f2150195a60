# SPDX-License-Identifier: Apache-2.0
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from aliquot.kube.http_reads import HttpReads
from tests.unit.authority import Authority


class Handler(BaseHTTPRequestHandler):
    """Replies with the path, or as the path says; notes each connection."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def setup(self) -> None:
        super().setup()
        self.server.opened.append(self)

    def do_GET(self) -> None:
        self.server.seen.append(dict(self.headers))
        status = 404 if self.path.endswith("missing") else 429 if self.path.endswith("busy") else 200
        if self.path.endswith("silent"):
            self.server.stopped.wait(5)
        body = self.path.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """An API server for one test."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.opened: list[Handler] = []
        self.seen: list[dict[str, str]] = []
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.server_address[1]}"

    def close_connections(self) -> None:
        """Close what is open, as a server does with connections that are idle."""
        for handler in self.opened:
            handler.close_connection = True
            handler.connection.shutdown(2)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield made
        made.stopped.set()
        made.shutdown()


def test_reads_of_one_thread_share_a_connection_and_carry_the_token(server, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    reads = HttpReads(ApiServer(server.url, tmp_path / "token", None), "some-agent")
    assert [reads.get(f"/apis/{name}") for name in "ab"] == [b"/apis/a", b"/apis/b"]
    assert len(server.opened) == 1
    assert {(seen["Authorization"], seen["User-Agent"]) for seen in server.seen} == {("Bearer secret", "some-agent")}


def test_each_thread_has_a_connection_of_its_own(server):
    reads = HttpReads(ApiServer(server.url, None, None), "some-agent")
    reads.get("/a")
    other = threading.Thread(target=reads.get, args=("/b",))
    other.start()
    other.join()
    assert len(server.opened) == 2


def test_path_of_the_servers_url_comes_first(server):
    assert HttpReads(ApiServer(f"{server.url}/clusters/one", None, None), "some-agent").get("/a") == b"/clusters/one/a"


def test_connection_that_the_server_closed_is_opened_again(server):
    reads = HttpReads(ApiServer(server.url, None, None), "some-agent")
    reads.get("/a")
    server.close_connections()
    assert reads.get("/b") == b"/b"
    assert len(server.opened) == 2


@pytest.mark.parametrize(("path", "kind", "seconds"), [("/missing", KubeNotFoundError, 0.0), ("/busy", KubeApiError, 7.0)])
def test_refused_read_is_an_error_by_status_and_keeps_the_connection(server, path, kind, seconds):
    reads = HttpReads(ApiServer(server.url, None, None), "some-agent")
    with pytest.raises(kind, match=f"GET {path}: HTTP 4") as caught:
        reads.get(path)
    assert caught.value.retry_after_seconds == seconds
    reads.get("/a")
    assert len(server.opened) == 1


def test_silent_server_is_an_error_in_time_and_next_read_succeeds(server):
    reads = HttpReads(ApiServer(server.url, None, None), "some-agent", seconds=0.2)
    with pytest.raises(KubeApiError, match=r"GET http://.*/silent: timed out"):
        reads.get("/silent")
    assert reads.get("/a") == b"/a"


def test_server_that_is_not_there_is_an_error_with_the_systems_sentence():
    with pytest.raises(KubeApiError, match=r"GET http://127\.0\.0\.1:1/a: Connection refused") as caught:
        HttpReads(ApiServer("http://127.0.0.1:1", None, None), "some-agent").get("/a")
    assert caught.value.reason == "Connection refused"


def test_missing_ca_file_is_named(tmp_path):
    with pytest.raises(KubeApiError, match=r"the API's CA .*/ca.crt: No such file"):
        HttpReads(ApiServer("https://127.0.0.1:1", None, tmp_path / "ca.crt"), "some-agent").get("/a")


def test_server_is_verified_by_the_ca_file_as_it_is_now(tmp_path):
    ours, another, ca = Authority("ours"), Authority("another"), tmp_path / "ca.crt"
    ca.write_bytes(another.certificate)
    with Server(ours.serving_context(tmp_path)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        reads = HttpReads(ApiServer(server.url, None, ca), "some-agent")
        with pytest.raises(KubeApiError, match="certificate verify failed"):
            reads.get("/a")
        ca.write_bytes(ours.certificate)
        assert reads.get("/a") == b"/a"
        server.shutdown()
