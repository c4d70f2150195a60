# SPDX-License-Identifier: Apache-2.0
"""What clients have under way together is bounded, and a client that does not take an answer is cut off."""

import asyncio
import logging
import socket
import zlib
from contextlib import asynccontextmanager

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.process.settings import SettingsError
from scheduler_plugin.adapters import http
from scheduler_plugin.adapters.http import HttpServer, Page
from tests.fakes.hostile_requests import malformed
from tests.fakes.networks import LOOPBACKS, WITHOUT_IPV6

LARGE = b"x" * (20 << 20)
"""More than what the kernel keeps for both ends of a connection."""


@asynccontextmanager
async def serving(host="127.0.0.1", **options):
    """Serve a verb that answers with the length of its body, and a large page; yields the address."""

    async def count(body: bytes) -> bytes:
        return str(len(body)).encode()

    server = HttpServer(host, 0, verbs={"/count": count}, pages={"/large": lambda _: Page(200, "text/plain", LARGE)}, **options)
    try:
        yield await server.start()
    finally:
        await server.stop()


async def connected(address: str, sent: bytes, limit: int = 65_536) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and send; at most twice ``limit`` bytes of an answer are taken unasked."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def until_answered(session: aiohttp.ClientSession, url: str, status: int) -> None:
    """Call until a status is answered."""
    for _ in range(200):
        async with session.post(url, data=b"abc") as answer:
            if answer.status == status:
                return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{url} never answered {status}")


async def _write_until_cut_off(writer: asyncio.StreamWriter) -> None:
    """Go on asking. Raises ConnectionError."""
    for _ in range(100):
        await asyncio.sleep(0.05)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the other side to say something; return whether that is the end."""
    try:
        return not await reader.read(1)
    except ConnectionError:
        return True


async def test_slow_bodies_are_held_up_to_total_and_further_calls_get_503(monkeypatch):
    monkeypatch.setattr(http, "MAX_HELD_BYTES", 100_000)
    monkeypatch.setattr(http, "BODY_SECONDS", 1.0)
    head = b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n"
    async with serving(max_body_bytes=100_000) as address, aiohttp.ClientSession() as session:
        slow = [await connected(address, head + b"x" * 60_000) for _ in range(4)]
        await until_answered(session, f"http://{address}/count", 200)
        slow += [await connected(address, head + b"x" * 89_999) for _ in range(2)]
        firsts = await asyncio.wait_for(asyncio.gather(*(reader.readline() for reader, _ in slow)), 10)
        assert {first[:12] for first in firsts} == {b"HTTP/1.1 408", b"HTTP/1.1 503"}
        await until_answered(session, f"http://{address}/count", 200)
        async with session.post(f"http://{address}/count", data=b"x" * 100_000) as answer:
            assert await answer.text() == "100000"  # nothing is counted any more
        for _, writer in slow:
            writer.close()


async def test_body_above_shared_total_is_taken_alone_but_oversized_one_is_not(monkeypatch):
    monkeypatch.setattr(http, "MAX_HELD_BYTES", 1000)
    async with serving(max_body_bytes=300_000) as address, aiohttp.ClientSession() as session:
        for size, status in ((300_000, 200), (300_001, 413)):
            async with session.post(f"http://{address}/count", data=b"x" * size) as answer:
                assert answer.status == status


async def test_client_that_does_not_read_is_cut_off_and_others_are_served(monkeypatch):
    monkeypatch.setattr(http, "MAX_HELD_BYTES", len(LARGE) + 1000)
    monkeypatch.setattr(http, "ANSWER_SECONDS", 1.0)
    async with serving() as address, aiohttp.ClientSession() as session:
        _, writer = await connected(address, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", limit=1)
        await asyncio.sleep(0.3)
        async with session.get(f"http://{address}/large") as answer:
            assert answer.status == 503
            assert "retry later" in await answer.text()
        with pytest.raises(ConnectionError):
            await _write_until_cut_off(writer)
        async with session.get(f"http://{address}/large") as answer:
            assert await answer.read() == LARGE


async def test_connections_beyond_the_most_are_closed(monkeypatch):
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 3)
    async with serving() as address, aiohttp.ClientSession() as session:
        open_ones = [await connected(address, b"POST ") for _ in range(3)]
        reader, late = await connected(address, b"")
        assert await asyncio.wait_for(_is_closed(reader), 5)
        for _, writer in (*open_ones, (reader, late)):
            writer.close()
        await asyncio.sleep(0.1)
        await until_answered(session, f"http://{address}/count", 200)


@pytest.mark.parametrize("loopback", LOOPBACKS)
async def test_the_default_answers_the_api_server_and_kubelet_of_both_families(loopback):
    async with serving("0.0.0.0") as address, aiohttp.ClientSession() as session:
        host, port = address.split(":")
        assert host == "0.0.0.0"
        url = f"http://[{loopback}]:{port}/count" if ":" in loopback else f"http://{loopback}:{port}/count"
        await until_answered(session, url, 200)


@pytest.mark.parametrize("kernel", WITHOUT_IPV6)
async def test_without_ipv6_it_answers_on_ipv4(monkeypatch, kernel):
    monkeypatch.setattr(socket, "socket", kernel)
    async with serving("0.0.0.0") as address, aiohttp.ClientSession() as session:
        await until_answered(session, f"http://{address}/count", 200)


async def test_an_address_in_use_is_named_as_it_was_set():
    async with serving() as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(SettingsError, match=rf"^cannot listen on 0\.0\.0\.0:{port}: Address already in use; choose another address$"):
            await HttpServer("0.0.0.0", port).start()


HOSTILE_HEADS = [
    b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n",
    b"POST /count HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n",
    b"GET /large HTTP/1.1\r\nHost: x\r\nAccept: text/plain;version=1.x,*/*;q=x\r\n",
    b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Encoding: gzip\r\n",
    b"POST /count HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n",
    b"POST /count HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n",
]
HOSTILE_BODIES = [b"", b"abc", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"-1\r\nx\r\n", b"ffffffffffffffffffff\r\n", b"5\r\nhellohello"]


class Records(logging.Handler):
    """Keeps the log records of the server at warning level and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


async def answer_to(address: str, sent: bytes) -> bytes:
    """Send, end the sending side, and read the answer."""
    reader, writer = await connected(address, sent)
    try:
        writer.write_eof()
        return await asyncio.wait_for(reader.read(4096), 5)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("start", "status"), [(b"POST /count", 200), (b"GET /large", 200), (b"GET /nowhere", 404), (b"PUT /count", 405), (b"POST /large", 405)]
)
@pytest.mark.parametrize("expect", [b"", b"100-continue", b"100-Continue", b"200-ok", b"\xff", b"100-continue\xff"])
def test_expectation_is_met_or_refused_on_every_path(start, status, expect, caplog):
    async def ask() -> bytes:
        async with serving() as address:
            header = b"Expect: " + expect + b"\r\n" if expect else b""
            head = start + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n" + header
            reader, writer = await connected(address, head + b"\r\nabc")
            answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            return answer

    asked = expect.lower() == b"100-continue"
    answer = asyncio.run(ask())
    if asked:
        met, _, answer = answer.partition(b"\r\n\r\n")
        assert met == b"HTTP/1.1 100 Continue"
    expected = status if asked or not expect else 417
    assert answer.startswith(b"HTTP/1.1 %d " % expected)
    assert caplog.records == []


@settings(max_examples=25)
@given(st.lists(malformed(HOSTILE_HEADS, HOSTILE_BODIES), min_size=20, max_size=20))
def test_malformed_request_is_never_a_500_and_logs_no_traceback(requests):
    records = Records()
    logging.getLogger().addHandler(records)

    async def send_all() -> None:
        async with serving() as address:
            for sent in requests:
                answer = await answer_to(address, sent)
                assert answer == b"" or answer.startswith(b"HTTP/1."), sent
                assert b" 500 " not in answer.partition(b"\r\n")[0], sent

    try:
        asyncio.run(send_all())
    finally:
        logging.getLogger().removeHandler(records)
    assert [record.getMessage() for record in records.kept] == []


@pytest.mark.parametrize("encoding", ["deflate", "gzip", "br", "zstd", "GZIP", "identity, gzip", "x"])
async def test_compressed_body_is_refused_without_being_unpacked(encoding):
    bomb = zlib.compress(bytes(64 << 20))
    async with serving() as address, aiohttp.ClientSession() as session:
        headers = {"Content-Encoding": encoding}
        async with session.post(f"http://{address}/count", data=bomb, headers=headers) as answer:
            assert answer.status == 415
            assert "expected one that is not compressed" in await answer.text()
        async with session.post(f"http://{address}/count", data=b"abc", headers={"Content-Encoding": "identity"}) as answer:
            assert (answer.status, await answer.text()) == (200, "3")
