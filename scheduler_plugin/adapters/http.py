"""HTTP servers on aiohttp: verbs take a body and answer one, pages take nothing. TLS files are read again when they change.

Bodies are bounded and must arrive within a time, so that neither a large nor a slow client costs the others anything. A WireError is the
client's fault: 400 with the sentence.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from scheduler_plugin.errors import SettingsError, WireError

logger = logging.getLogger(__name__)

BODY_SECONDS: Final = 10.0
CERTIFICATE_SECONDS: Final = 10.0
"""How soon a rotated certificate is used."""

Verb = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where certificate and key are, and, for mutual TLS, the CA whose clients are let in."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class HttpServer:
    """Serves verbs by POST and pages by GET on one address."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        verbs: Mapping[str, Verb] | None = None,
        pages: Mapping[str, Callable[[web.Request], Page]] | None = None,
        max_body_bytes: int = 1 << 20,
        tls: TlsFiles | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._max_body_bytes = max_body_bytes
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._loaded: tuple[int, ...] = ()
        self._watcher: asyncio.Task[None] | None = None
        application = web.Application(client_max_size=max_body_bytes)
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
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._context, backlog=512)
        try:
            await site.start()
        except OSError as exc:
            raise SettingsError(f"cannot listen on {self._host}:{self._port}: {exc.strerror or exc}; choose another address") from exc
        host, port = self._runner.addresses[0][:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """End; requests under way get a moment."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._runner.cleanup()

    def _verb_handler(self, verb: Verb) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = await asyncio.wait_for(request.read(), BODY_SECONDS)
            except TimeoutError:
                return web.Response(status=408, text=f"the body did not arrive within {BODY_SECONDS:g} s\n")
            try:
                return web.Response(body=await verb(body), content_type="application/json")
            except WireError as exc:
                return web.Response(status=400, text=f"{exc}\n")

        return handle

    def _page_handler(self, page: Callable[[web.Request], Page]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            made = page(request)
            return web.Response(status=made.status, body=made.body, headers={"Content-Type": made.content_type})

        return handle

    def _new_context(self, files: TlsFiles) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._loaded = _stamps(files)
            context.load_cert_chain(files.certificate, files.key)
            if files.client_ca is not None:
                context.load_verify_locations(files.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as exc:
            raise SettingsError(f"the certificate {files.certificate} with key {files.key} cannot be used: {exc}") from exc
        return context

    async def _follow_files(self, files: TlsFiles) -> None:
        """Load a rotated certificate into the context in use: new connections get it, old ones go on."""
        while True:
            await asyncio.sleep(CERTIFICATE_SECONDS)
            try:
                stamps = _stamps(files)
                if stamps != self._loaded and self._context is not None:
                    self._context.load_cert_chain(files.certificate, files.key)
                    self._loaded = stamps
                    logger.info("the certificate %s was loaded again", files.certificate)
            except (OSError, ssl.SSLError) as exc:
                logger.warning("the changed certificate %s cannot be used, the old one stays: %s", files.certificate, exc)


def _stamps(files: TlsFiles) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns for path in (files.certificate, files.key))
