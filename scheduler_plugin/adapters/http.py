# SPDX-License-Identifier: Apache-2.0
"""HTTP servers on aiohttp: a verb takes a body and returns one, a page takes no body. TLS files are reloaded when they change.

Bodies have a limit in size, and a body and the first request of a connection have a limit in time, so that large or slow clients do not
harm others. All calls together have a limit in memory: beyond it a call gets 503. A client that does not read its reply is disconnected. A
compressed body gets 415 and is never unpacked. A WireError becomes 400 with its message, a NotReadyError becomes 503. A request that is no
HTTP gets 400 and a line at debug level.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final
from weakref import WeakSet

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from aliquot.process.listening import WILDCARDS, listening_address, listening_socket
from aliquot.process.settings import SettingsError
from scheduler_plugin.errors import NotReadyError, WireError

logger = logging.getLogger(__name__)

BODY_SECONDS: Final = 10.0
FIRST_REQUEST_SECONDS: Final = 10.0
"""Limit from the connection to the head of the first request; between requests, aiohttp's keep-alive time holds."""
HANDSHAKE_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
"""Limit for a client to read its reply."""
MAX_HELD_BYTES: Final = 64 << 20
"""Limit of bodies and replies in memory per server; at least two bodies of the largest size. A reply takes twice its size."""
MAX_CONNECTIONS: Final = 1024
BACKLOG: Final = 512
"""Connections that wait to be accepted."""
CERTIFICATE_SECONDS: Final = 10.0
"""Interval in which files are checked for a rotated certificate."""

Verb = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Page:
    """The reply of a page."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


PageMaker = Callable[[web.Request], Page | Awaitable[Page]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of certificate and key and, for mutual TLS, of the CA of the allowed clients."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class _BusyError(Exception):
    """The calls in progress use too much memory."""


@dataclass(slots=True)
class _Hold:
    """The memory of a call, in bytes."""

    size: int = 0


class _WithoutClientFaults(logging.Filter):
    """Turns an error with a traceback into one line at debug level when the client caused it: a malformed request, a lost connection."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep a record."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | ConnectionError):
            return True
        logger.debug("a client's request ended early: %s", error)
        return False


_protocol_logger = logging.getLogger(f"{__name__}.protocol")
_protocol_logger.addFilter(_WithoutClientFaults())


class _Refused(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        if isinstance(transport, asyncio.Transport):
            transport.abort()


async def _answer_expectation(request: web.Request) -> None:
    """Tell a client to send its body. aiohttp's own function quotes the header in its refusal, and fails where that is no valid text."""
    if request.headers[hdrs.EXPECT].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="header Expect: expected 100-continue; leave the header out\n")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun


def _refusal_of_others(allowed: Mapping[str, str]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Refuse what no verb or page takes. Args: allowed: the method by path."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        if request.path in allowed:
            raise web.HTTPMethodNotAllowed(request.method, [allowed[request.path]])
        raise web.HTTPNotFound

    return refuse


class HttpServer:
    """Serves verbs by POST and pages by GET on one address."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        verbs: Mapping[str, Verb] | None = None,
        pages: Mapping[str, PageMaker] | None = None,
        max_body_bytes: int = 1 << 20,
        tls: TlsFiles | ssl.SSLContext | None = None,
    ) -> None:
        """Args: tls: files to load and to watch, or a context that the caller updates."""
        self._host, self._port = host, port
        self._max_body_bytes = max_body_bytes
        self._tls = tls if isinstance(tls, TlsFiles) else None
        self._context = tls if isinstance(tls, ssl.SSLContext) else None
        self._loaded: tuple[int, ...] = ()
        self._watcher: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._has_requested: WeakSet[asyncio.BaseTransport] = WeakSet()
        self._held_bytes = 0
        self._most_held_bytes = max(MAX_HELD_BYTES, 2 * max_body_bytes)
        application = web.Application(client_max_size=max_body_bytes, middlewares=[self._note_request])
        for path, verb in (verbs or {}).items():
            application.router.add_post(path, self._verb_handler(verb), expect_handler=_answer_expectation)
        for path, page in (pages or {}).items():
            application.router.add_get(path, self._page_handler(page), expect_handler=_answer_expectation)
        allowed = dict.fromkeys(pages or {}, hdrs.METH_GET) | dict.fromkeys(verbs or {}, hdrs.METH_POST)
        application.router.add_route("*", "/{path:.*}", _refusal_of_others(allowed), expect_handler=_answer_expectation)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, auto_decompress=False, logger=_protocol_logger)

    async def start(self) -> str:
        """Start to serve; return the address as ``host:port``. Raises SettingsError if it is in use or the certificate is invalid."""
        if self._tls is not None:
            self._context = self._new_context(self._tls)
            self._watcher = asyncio.create_task(self._follow_files(self._tls), name="certificates")
        await self._runner.setup()
        loop, patience = asyncio.get_running_loop(), HANDSHAKE_SECONDS if self._context is not None else None
        try:
            if self._host in WILDCARDS:
                listening = listening_socket(self._host, self._port, BACKLOG)
                self._server = await loop.create_server(
                    self._accept, sock=listening, ssl=self._context, backlog=BACKLOG, ssl_handshake_timeout=patience
                )
            else:  # a name may have several addresses
                self._server = await loop.create_server(
                    self._accept, self._host, self._port, ssl=self._context, backlog=BACKLOG, ssl_handshake_timeout=patience
                )
        except OSError as exc:
            raise SettingsError(f"cannot listen on {self._host}:{self._port}: {exc.strerror or exc}; choose another address") from exc
        return listening_address(self._host, self._server.sockets[0].getsockname()[:2])

    async def stop(self) -> None:
        """Stop; requests in progress get a moment to end."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        if server is None:
            raise RuntimeError("got a connection before the server was set up")
        if len(server.connections) >= MAX_CONNECTIONS:
            return _Refused()
        protocol = server()
        asyncio.get_running_loop().call_later(FIRST_REQUEST_SECONDS, self._close_if_silent, protocol)
        return protocol

    def _close_if_silent(self, protocol: web.RequestHandler) -> None:
        if protocol.transport is not None and protocol.transport not in self._has_requested:
            protocol.transport.abort()

    @web.middleware
    async def _note_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.transport is not None:
            self._has_requested.add(request.transport)
        try:
            return await handler(request)
        except _BusyError as exc:
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text=f"{exc}\n")

    def _verb_handler(self, verb: Verb) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            encoding = ", ".join(request.headers.getall("Content-Encoding", ()))
            if encoding.strip().lower() not in {"", "identity"}:
                text = f"found a body with Content-Encoding {encoding!r}, expected one that is not compressed\n"
                return web.Response(status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text=text)
            with self._holding() as hold:
                try:
                    async with asyncio.timeout(BODY_SECONDS):
                        body = await self._read(request, hold)
                except (web.RequestPayloadError, ConnectionError) as exc:  # bad chunks, or the client left
                    return web.Response(status=400, text=f"cannot read the body: {exc}\n")
                except TimeoutError:
                    return web.Response(status=408, text=f"the body did not arrive within {BODY_SECONDS:g} s\n")
                try:
                    answer = await verb(body)
                except WireError as exc:
                    return web.Response(status=400, text=f"{exc}\n")
                except NotReadyError as exc:
                    return web.Response(status=503, text=f"{exc}\n")
                return await self._send(request, web.Response(body=answer, content_type="application/json"), hold)

        return handle

    def _page_handler(self, page: PageMaker) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            made = page(request)
            if not isinstance(made, Page):
                made = await made
            headers = {"Content-Type": made.content_type, **made.headers}
            with self._holding() as hold:
                return await self._send(request, web.Response(status=made.status, body=made.body, headers=headers), hold)

        return handle

    @contextmanager
    def _holding(self) -> Iterator[_Hold]:
        """Count the memory of one call, until it ends."""
        hold = _Hold()
        try:
            yield hold
        finally:
            self._held_bytes -= hold.size

    def _take(self, hold: _Hold, size: int) -> None:
        """Count more memory for a call. Raises _BusyError if all calls together would exceed the limit."""
        if self._held_bytes > hold.size and self._held_bytes + size > self._most_held_bytes:
            raise _BusyError(f"too busy: calls in progress use {self._held_bytes} of {self._most_held_bytes} bytes; retry later")
        hold.size += size
        self._held_bytes += size

    async def _read(self, request: web.Request, hold: _Hold) -> bytes:
        """Read a body, and count it chunk by chunk. Raises _BusyError, HTTPRequestEntityTooLarge."""
        chunks: list[bytes] = []
        while chunk := await request.content.readany():
            if hold.size + len(chunk) > self._max_body_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=self._max_body_bytes, actual_size=hold.size + len(chunk))
            self._take(hold, len(chunk))
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _send(self, request: web.Request, response: web.Response, hold: _Hold) -> web.StreamResponse:
        """Write a reply while its call still counts; a client that does not read it in time is disconnected. Raises _BusyError."""
        self._take(hold, response.content_length or 0)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await response.prepare(request)
                await response.write_eof()  # waits while the client does not read
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            logger.debug("a client disconnected before it read its reply")
        return response

    def _new_context(self, files: TlsFiles) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._loaded = _stamps(files)
            _load(context, files)
        except (OSError, ssl.SSLError) as exc:
            raise SettingsError(f"the certificate {files.certificate} with key {files.key} cannot be used: {exc}") from exc
        return context

    async def _follow_files(self, files: TlsFiles) -> None:
        """Load rotated files into the context in use: new connections use them, open connections continue.

        A new client CA is trusted in addition to the old one, which OpenSSL forgets only at the next start.
        """
        while True:
            await asyncio.sleep(CERTIFICATE_SECONDS)
            try:
                stamps = _stamps(files)
                if stamps != self._loaded and self._context is not None:
                    _load(self._context, files)
                    self._loaded = stamps
                    logger.info("reloaded the certificate %s", files.certificate)
            except (OSError, ssl.SSLError) as exc:
                logger.warning("cannot use the changed certificate %s, so the old one stays in use: %s", files.certificate, exc)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED


def _stamps(files: TlsFiles) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns for path in (files.certificate, files.key, files.client_ca) if path is not None)
