"""HTTP servers on aiohttp: verbs take a body and answer one, pages take nothing. TLS files are read again when they change.

Bodies are bounded, and both a body and a connection's first request must arrive within a time, so that neither a large nor a slow client
costs the others anything. What many of them have under way together is bounded too: past that a call is answered 503, and a client that
does not take its answer is cut off. A WireError is the client's fault: 400 with the sentence; a NotReadyError is a 503.
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

from aiohttp import web

from program.listening import WILDCARDS, listening_address, listening_socket
from program.settings import SettingsError
from scheduler_plugin.errors import NotReadyError, WireError

logger = logging.getLogger(__name__)

BODY_SECONDS: Final = 10.0
FIRST_REQUEST_SECONDS: Final = 10.0
"""Within this time of connecting, a client must have sent the head of a request; between requests aiohttp's keep-alive time counts."""
HANDSHAKE_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
"""Within this time a client must have taken its answer."""
MAX_HELD_BYTES: Final = 64 << 20
"""Bodies and answers that one server holds at a time, at least two bodies of the largest size. An answer takes twice its size."""
MAX_CONNECTIONS: Final = 1024
BACKLOG: Final = 512
"""Connections that wait to be accepted."""
CERTIFICATE_SECONDS: Final = 10.0
"""How soon a rotated certificate is used."""

Verb = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


PageMaker = Callable[[web.Request], Page | Awaitable[Page]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where certificate and key are, and, for mutual TLS, the CA whose clients are let in."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class _BusyError(Exception):
    """More is under way than is held at a time."""


@dataclass(slots=True)
class _Hold:
    """What a call holds, in bytes."""

    size: int = 0


class _TurnedAway(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        if isinstance(transport, asyncio.Transport):
            transport.abort()


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
        """Args: tls: files to load and to follow, or a context whose certificate somebody else keeps."""
        self._host, self._port = host, port
        self._max_body_bytes = max_body_bytes
        self._tls = tls if isinstance(tls, TlsFiles) else None
        self._context = tls if isinstance(tls, ssl.SSLContext) else None
        self._loaded: tuple[int, ...] = ()
        self._watcher: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._spoken: WeakSet[asyncio.BaseTransport] = WeakSet()
        self._held_bytes = 0
        self._most_held_bytes = max(MAX_HELD_BYTES, 2 * max_body_bytes)
        application = web.Application(client_max_size=max_body_bytes, middlewares=[self._note_request])
        for path, verb in (verbs or {}).items():
            application.router.add_post(path, self._verb_handler(verb))
        for path, page in (pages or {}).items():
            application.router.add_get(path, self._page_handler(page))
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)

    async def start(self) -> str:
        """Begin to serve; return the address as ``host:port``. Raises SettingsError when it is taken or the certificate is unusable."""
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
        """End; requests under way get a moment."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        if server is None:
            raise RuntimeError("a connection came before the server was set up")
        if len(server.connections) >= MAX_CONNECTIONS:
            return _TurnedAway()
        protocol = server()
        asyncio.get_running_loop().call_later(FIRST_REQUEST_SECONDS, self._close_if_silent, protocol)
        return protocol

    def _close_if_silent(self, protocol: web.RequestHandler) -> None:
        if protocol.transport is not None and protocol.transport not in self._spoken:
            protocol.transport.abort()

    @web.middleware
    async def _note_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.transport is not None:
            self._spoken.add(request.transport)
        try:
            return await handler(request)
        except _BusyError as exc:
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text=f"{exc}\n")

    def _verb_handler(self, verb: Verb) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            with self._holding() as hold:
                try:
                    body = await asyncio.wait_for(self._read(request, hold), BODY_SECONDS)
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
        """Count what one call holds, until it ends."""
        hold = _Hold()
        try:
            yield hold
        finally:
            self._held_bytes -= hold.size

    def _take(self, hold: _Hold, size: int) -> None:
        """Count more for a call. Raises _BusyError: the calls under way hold too much already."""
        if self._held_bytes > hold.size and self._held_bytes + size > self._most_held_bytes:
            raise _BusyError(
                f"calls under way hold {self._held_bytes} bytes, and at most {self._most_held_bytes} are held: try again later"
            )
        hold.size += size
        self._held_bytes += size

    async def _read(self, request: web.Request, hold: _Hold) -> bytes:
        """Read a body, counting it as it comes. Raises _BusyError, HTTPRequestEntityTooLarge."""
        chunks: list[bytes] = []
        while chunk := await request.content.readany():
            if hold.size + len(chunk) > self._max_body_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=self._max_body_bytes, actual_size=hold.size + len(chunk))
            self._take(hold, len(chunk))
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _send(self, request: web.Request, response: web.Response, hold: _Hold) -> web.StreamResponse:
        """Write an answer while its call still counts; a client that does not take it in time is cut off. Raises _BusyError."""
        self._take(hold, response.content_length or 0)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await response.prepare(request)
                await response.write_eof()  # waits while the client does not read
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            logger.debug("a client went before it had its answer")
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
        """Load what was rotated into the context in use: new connections get it, old ones go on.

        A client CA that is new is trusted from then on beside the former, which OpenSSL forgets at the next start only.
        """
        while True:
            await asyncio.sleep(CERTIFICATE_SECONDS)
            try:
                stamps = _stamps(files)
                if stamps != self._loaded and self._context is not None:
                    _load(self._context, files)
                    self._loaded = stamps
                    logger.info("the certificate %s was loaded again", files.certificate)
            except (OSError, ssl.SSLError) as exc:
                logger.warning("the changed certificate %s cannot be used, the old one stays: %s", files.certificate, exc)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED


def _stamps(files: TlsFiles) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns for path in (files.certificate, files.key, files.client_ca) if path is not None)
