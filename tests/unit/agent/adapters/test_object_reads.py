# SPDX-License-Identifier: Apache-2.0
"""Reads of single objects against a server that replies as the test says."""

import asyncio
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.adapters import object_reads as module
from agent.adapters.object_reads import READS_AT_ONCE, ObjectReader
from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from tests.unit.agent.fakes import until
from tests.unit.scheduler_plugin.adapters.test_kube import Authority

OBJECT = b'{"metadata":{"uid":"u"}}'
FOUND = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(OBJECT), OBJECT)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + OBJECT


class Api:
    """Sends the replies in turn, the last one for ever. Closes a connection after a reply that says so, and after an empty one."""

    def __init__(self, *replies: bytes) -> None:
        self._replies = list(replies)
        self.heads: list[str] = []
        self.connections = 0
        self.open: list[asyncio.StreamWriter] = []
        self.may_reply = asyncio.Event()
        self.may_reply.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
                await self.may_reply.wait()
                writer.write(reply)
                if not reply or b"Connection: close" in reply:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.open.remove(writer)
            writer.close()


@asynccontextmanager
async def reading(api: Api, *, path: str = "", token: Path | None = None, tls: ssl.SSLContext | None = None, ca: Path | None = None):
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    reader = ObjectReader(ApiServer(f"{'https' if tls else 'http'}://127.0.0.1:{port}{path}", token, ca), "agent")
    try:
        yield reader
    finally:
        reader.close()
        server.close()


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(FOUND, id="known length"),
        pytest.param(UNTIL_CLOSED, id="up to the end of the connection"),
        pytest.param(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + FOUND, id="after an early hint"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;a=b\r\n%s\r\n%X\r\n%s\r\n0\r\nAfter: x\r\n\r\n"
            % (OBJECT[:4], len(OBJECT) - 4, OBJECT[4:]),
            id="in chunks",
        ),
    ],
)
async def test_body_is_returned_in_each_form_of_http(reply):
    api = Api(reply)
    async with reading(api) as reader:
        assert [await reader.read("/x") for _ in range(3)] == [OBJECT] * 3
        assert api.connections == (3 if reply == UNTIL_CLOSED else 1)


async def test_request_has_path_of_url_and_current_token(tmp_path):
    token = tmp_path / "token"
    api = Api(FOUND)
    async with reading(api, path="/clusters/a", token=token) as reader:
        for text in ("first", "second"):
            token.write_text(f"{text}\n")
            await reader.read("/apis/x")
        token.write_text("\N{EURO SIGN}")
        with pytest.raises(KubeApiError, match="can't encode"):
            await reader.read("/apis/x")
        token.unlink()
        with pytest.raises(KubeApiError, match="the API token"):
            await reader.read("/apis/x")
    assert [head.splitlines()[0] for head in api.heads] == ["GET /clusters/a/apis/x HTTP/1.1"] * 2
    assert ["Authorization: Bearer first" in api.heads[0], "Authorization: Bearer second" in api.heads[1]] == [True, True]
    assert "Host: 127.0.0.1:" in api.heads[0]


async def test_connection_that_server_closed_is_replaced():
    api = Api(FOUND, b"", FOUND)
    async with reading(api) as reader:
        assert [await reader.read("/x"), await reader.read("/x")] == [OBJECT] * 2
    assert (api.connections, len(api.heads)) == (2, 3)


async def test_failing_server_is_asked_once():
    api = Api(b"")
    async with reading(api) as reader:
        with pytest.raises(KubeApiError, match=r"GET http://127\.0\.0\.1:\d+/x: 0 bytes read"):
            await reader.read("/x")
    assert len(api.heads) == 1


async def test_refusals_have_type_sentence_and_pause():
    missing = b'{"kind":"Status","message":"no claim x"}'
    api = Api(
        b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(missing), missing),
        b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\nContent-Length: 0\r\n\r\n",
        FOUND,
    )
    async with reading(api) as reader:
        with pytest.raises(KubeNotFoundError, match="no claim x"):
            await reader.read("/x")
        with pytest.raises(KubeApiError) as caught:
            await reader.read("/x")
        assert (caught.value.status, caught.value.retry_after_seconds) == (429, 7)
        assert await reader.read("/x") == OBJECT
    assert api.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/1.1 many OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n123",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: %s\r\n\r\n" % (b"x" * (1 << 17)),
    ],
)
async def test_reply_that_is_no_http_is_an_error_and_ends_its_connection(reply):
    api = Api(reply, FOUND)
    async with reading(api) as reader:
        with pytest.raises(KubeApiError, match="GET http"):
            await reader.read("/x")
        assert await reader.read("/x") == OBJECT
    assert api.connections == 2


async def test_server_without_reply_is_an_error_and_loses_all_connections(monkeypatch):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.05)
    api = Api(FOUND)
    async with reading(api) as reader:
        await asyncio.gather(reader.read("/x"), reader.read("/x"))
        api.may_reply.clear()
        with pytest.raises(KubeApiError, match=r"no reply in 0\.05 s"):
            await reader.read("/x")
        api.may_reply.set()
        await until(lambda: not api.open)
        assert await reader.read("/x") == OBJECT


async def test_cancelled_read_leaves_no_reply_for_the_next_one():
    other = FOUND.replace(b'"u"', b'"o"')
    api = Api(other, FOUND)
    api.may_reply.clear()
    async with reading(api) as reader:
        left = asyncio.ensure_future(reader.read("/other"))
        await until(lambda: api.heads)
        left.cancel()
        await asyncio.wait([left])
        api.may_reply.set()
        assert await reader.read("/x") == OBJECT


async def test_many_reads_share_a_few_connections():
    api = Api(FOUND)
    async with reading(api) as reader:
        assert await asyncio.gather(*(reader.read("/x") for _ in range(5 * READS_AT_ONCE))) == [OBJECT] * 5 * READS_AT_ONCE
    assert api.connections <= READS_AT_ONCE


async def test_server_that_does_not_listen_is_an_error():
    async with reading(Api(FOUND)) as reader:
        pass
    with pytest.raises(KubeApiError, match="Connect call failed"):
        await reader.read("/x")


async def test_only_a_server_of_the_cluster_ca_is_trusted(tmp_path):
    ours, theirs, ca = Authority("ours"), Authority("theirs"), tmp_path / "ca.crt"
    async with reading(Api(UNTIL_CLOSED), tls=ours.serving_context(tmp_path), ca=ca) as reader:
        ca.write_bytes(ours.certificate)
        assert await reader.read("/x") == OBJECT
        ca.write_bytes(theirs.certificate)
        with pytest.raises(KubeApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await reader.read("/x")
        ca.unlink()
        with pytest.raises(KubeApiError, match=r"the API's CA .*ca\.crt: No such file"):
            await reader.read("/x")
