# SPDX-License-Identifier: Apache-2.0
"""The status server and the simulated node's files."""

import logging
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from agent.adapters import http_server
from agent.adapters.http_server import HEAD_BYTES_MAX, MOST_CONNECTIONS, PAGE_THREADS, StatusServer
from agent.adapters.simulation import driver_library, prepare_node
from agent.ports.status_page import Page
from agent.services.monitor import with_readable_versions
from aliquot.process.settings import SettingsError
from tests.fakes.hostile_requests import malformed
from tests.fakes.networks import LOOPBACKS, WITHOUT_IPV6

PATIENCE_SECONDS = 30
OK = Page(200, "text/plain", b"ok\n")


@contextmanager
def serving(pages, host: str = "127.0.0.1") -> Iterator[StatusServer]:
    server = StatusServer(host, 0, pages)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def connected(server: StatusServer, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS, (source, 0)) as client:
        yield client


def get(server: StatusServer, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{server.address}{path}", timeout=PATIENCE_SECONDS) as answer:
        return answer.read()


def drip(client: socket.socket, data: bytes) -> bool:
    """Send; False when the server closed the connection."""
    try:
        client.sendall(data)
    except ConnectionError:
        return False
    return True


def closed(client: socket.socket, wait_seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether the server closes a connection, to which it has sent nothing."""
    client.settimeout(wait_seconds)
    try:
        return client.recv(1) == b""
    except (TimeoutError, BlockingIOError):
        return False
    except ConnectionError:
        return True
    finally:
        client.settimeout(PATIENCE_SECONDS)


class TestStatusServer:
    @pytest.fixture
    def server(self):
        pages = {
            "/metrics": lambda accept: Page(200, "text/plain", accept.encode()),
            "/readyz": lambda _: Page(503, "text/plain", b"not yet\n"),
        }
        with serving(pages) as one:
            yield one

    def test_a_page_is_made_for_what_the_client_accepts(self, server):
        request = urllib.request.Request(f"http://{server.address}/metrics?name=x", headers={"Accept": "text/openmetrics"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert (answer.status, answer.read()) == (200, b"text/openmetrics")

    @pytest.mark.parametrize(("path", "status"), [("/readyz", 503), ("/other", 404)])
    def test_failed_page_has_its_status(self, server, path, status):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{server.address}{path}", timeout=5)
        assert caught.value.code == status
        caught.value.close()

    def test_an_address_in_use_is_a_settings_error(self, server):
        host, _, port = server.address.rpartition(":")
        with pytest.raises(SettingsError, match="in use"):
            StatusServer(host, int(port), {})

    def test_page_that_cannot_be_rendered_is_error_with_log_line(self, caplog):
        with serving({"/metrics": lambda _: 1 // 0}) as server:
            with pytest.raises(urllib.error.HTTPError, match="500") as caught:
                urllib.request.urlopen(f"http://{server.address}/metrics", timeout=PATIENCE_SECONDS)
            caught.value.close()
        assert "page /metrics" in caplog.text

    @pytest.mark.parametrize("request_line", [b"POST /metrics HTTP/1.1", b"HEAD /metrics HTTP/1.1", b"nonsense", b""])
    def test_other_methods_than_get_are_refused(self, server, request_line):
        with connected(server) as client:
            client.sendall(request_line + b"\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")

    def test_a_request_without_end_is_not_read_to_its_end(self, server):
        with connected(server) as client:
            assert drip(client, b"GET /metrics HTTP/1.1\r\n")
            assert not all(drip(client, b"X: " + b"x" * HEAD_BYTES_MAX) for _ in range(1 << 10))

    def test_it_stops_whether_or_not_it_was_started(self):
        StatusServer("127.0.0.1", 0, {}).stop()
        server = StatusServer("127.0.0.1", 0, {"/healthz": lambda _: OK})
        server.start()
        with connected(server) as silent:
            assert get(server, "/healthz") == OK.body  # so the one before is accepted as well
            server.stop()
            assert closed(silent)


class TestEveryAddress:
    @pytest.mark.parametrize("loopback", LOOPBACKS)
    def test_the_default_answers_kubelets_probes_of_both_families(self, loopback):
        with serving({"/healthz": lambda _: OK}, "0.0.0.0") as server:
            host, _, port = server.address.rpartition(":")
            assert host == "0.0.0.0"  # what others read in the file metrics-address
            with socket.create_connection((loopback, int(port)), PATIENCE_SECONDS) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert client.makefile("rb").read().endswith(OK.body)

    @pytest.mark.parametrize("kernel", WITHOUT_IPV6)
    def test_without_ipv6_it_answers_on_ipv4(self, monkeypatch, kernel):
        monkeypatch.setattr(socket, "socket", kernel)
        with serving({"/healthz": lambda _: OK}, "0.0.0.0") as server:
            assert get(server, "/healthz") == OK.body

    def test_the_log_names_an_ipv4_client_by_its_ipv4_address(self, caplog):
        caplog.set_level(logging.DEBUG, http_server.__name__)
        with serving({"/healthz": lambda _: OK}, "0.0.0.0") as server, connected(server) as client:
            client.sendall(b"GET")
            client.shutdown(socket.SHUT_WR)
            assert closed(client)
        assert "no response to a request from 127.0.0.1" in caplog.text

    def test_an_address_in_use_is_named_as_it_was_set(self):
        with serving({}) as server:
            port = int(server.address.rpartition(":")[2])
            with pytest.raises(SettingsError, match=rf"^metricsAddress 0\.0\.0\.0:{port}: Address already in use; choose another address$"):
                StatusServer("0.0.0.0", port, {})


class TestClientsThatMeanIll:
    @pytest.mark.timeout(120)
    def test_stalling_clients_are_bounded_hold_no_threads_and_block_no_probe(self, monkeypatch):
        monkeypatch.setattr(http_server, "REQUEST_SECONDS", 3600)
        with serving({"/healthz": lambda _: OK}) as server, ExitStack() as stack:
            threads = threading.active_count()
            clients = [stack.enter_context(connected(server)) for _ in range(200)]
            for client in clients[::2]:
                drip(client, b"GET /healthz HTTP/1.1\r\nX: ")
            assert get(server, "/healthz") == OK.body
            assert threading.active_count() <= threads + PAGE_THREADS
            begun = time.monotonic()
            while len(clients) > MOST_CONNECTIONS and time.monotonic() - begun < PATIENCE_SECONDS:
                clients = [client for client in clients if not closed(client, wait_seconds=0)]
            assert MOST_CONNECTIONS - 1 <= len(clients) <= MOST_CONNECTIONS

    @pytest.mark.timeout(120)
    def test_clients_that_drip_are_closed_in_the_end(self, monkeypatch):
        monkeypatch.setattr(http_server, "REQUEST_SECONDS", 1.0)
        with serving({"/healthz": lambda _: OK}) as server, ExitStack() as stack:
            clients = [stack.enter_context(connected(server)) for _ in range(MOST_CONNECTIONS // 2)]
            begun = time.monotonic()
            while clients and time.monotonic() - begun < PATIENCE_SECONDS:
                clients = [client for client in clients if drip(client, b"x") and not closed(client, wait_seconds=0.01)]
            assert clients == []

    def test_the_oldest_of_the_address_that_has_most_makes_room(self, monkeypatch):
        monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)
        with serving({"/healthz": lambda _: OK}) as server, ExitStack() as stack:
            alone, *many = (
                stack.enter_context(connected(server, source)) for source in ("127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.4")
            )
            assert closed(many[0])
            for client in (alone, *many[1:]):
                client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert client.makefile("rb").read().endswith(OK.body)

    @pytest.mark.timeout(60)
    def test_probes_are_answered_while_all_threads_make_pages(self):
        begun, done = threading.Semaphore(0), threading.Event()

        def takes_long(_):
            begun.release()
            done.wait()
            return OK

        with serving({"/metrics": takes_long, "/healthz": lambda _: OK}) as server, ExitStack() as stack:
            for _ in range(PAGE_THREADS + 1):
                stack.enter_context(connected(server)).sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            for _ in range(PAGE_THREADS):
                begun.acquire()
            try:
                assert get(server, "/healthz") == OK.body
            finally:
                done.set()

    def test_client_reset_during_response_is_not_logged(self, caplog, capfd):
        asked, reset = threading.Semaphore(0), threading.Event()

        def large(_):
            asked.release()
            reset.wait()
            return Page(200, "text/plain", b"x" * 3_000_000)

        with serving({"/metrics": large, "/healthz": lambda _: OK}) as server:
            for _ in range(3):
                reset.clear()
                with connected(server) as client:
                    client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                    asked.acquire()
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                reset.set()
            assert get(server, "/healthz") == OK.body
        assert capfd.readouterr().err == ""
        assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


HEADS = [
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text; version=1.0.0\r\n",
    b"GET /metrics?name=x HTTP/1.1\r\nAccept: text/plain;q=0.5,*/*;version=1.x\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\nContent-Encoding: gzip\r\n",
]


@settings(max_examples=10)
@given(st.lists(malformed(HEADS), min_size=20, max_size=20))
def test_malformed_request_is_never_a_500_and_logs_nothing(requests):
    def metrics(accept: str) -> Page:
        encode, content_type = choose_encoder(with_readable_versions(accept))
        return Page(200, content_type, encode(CollectorRegistry()))

    with logged(http_server.logger) as records, serving({"/metrics": metrics, "/healthz": lambda _: OK}) as server:
        for sent in requests:
            answer = answer_to(server, sent)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 404 ", b"HTTP/1.1 405 ")), sent
        assert get(server, "/healthz") == OK.body
    assert [record.getMessage() for record in records] == []


def answer_to(server: StatusServer, sent: bytes) -> bytes:
    """Return the first line of the answer; nothing where the server closes the connection."""
    with connected(server) as client, suppress(ConnectionError):
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").readline()
    return b""


@contextmanager
def logged(logger: logging.Logger) -> Iterator[list[logging.LogRecord]]:
    """Yield the records that a logger makes, above those for debugging."""
    records: list[logging.LogRecord] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keeper(logging.INFO)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


class TestSimulation:
    def test_a_node_is_made_once_and_found_again(self, build_dir, tmp_path):
        prepare_node("t4x2", tmp_path / "sim", "node-1", build_dir)
        before = (tmp_path / "sim/state").stat().st_ino
        prepare_node("t4x2", tmp_path / "sim", "node-1", build_dir)
        assert (tmp_path / "sim/state").stat().st_ino == before
        assert driver_library(build_dir).exists()

    def test_unknown_profile_is_refused_with_the_tools_message(self, build_dir, tmp_path):
        with pytest.raises(SettingsError, match="no-such-profile"):
            prepare_node("no-such-profile", tmp_path / "sim", "node-1", build_dir)

    def test_what_was_not_built_is_named(self, tmp_path):
        with pytest.raises(SettingsError, match=r"aliquot-sim cannot be run.*make"):
            prepare_node("t4x2", tmp_path / "sim", "node-1", tmp_path)
        with pytest.raises(SettingsError, match=r"libnvidia-ml.so.1 is missing"):
            driver_library(tmp_path)
