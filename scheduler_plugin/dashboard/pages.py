# SPDX-License-Identifier: Apache-2.0
"""The dashboard's pages: three files, and two JSON documents with the present and the history. Read-only, and closed to scripts of other
sites."""

import asyncio
import gzip
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Final

import msgspec
from aiohttp import web

from scheduler_plugin.adapters.http import Page
from scheduler_plugin.dashboard.history import History
from scheduler_plugin.dashboard.picture import Picture
from scheduler_plugin.errors import HistoryError, WireError

_ASSETS: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
}
_SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_GZIP_LEVEL: Final = 1
"""For a thousand nodes it takes 10 ms and saves 14 of 15 bytes; higher levels cost more than they save on a cluster's network."""


class Dashboard:
    """Serves the pages. One picture is drawn at a time; all requests during that time get the same one.

    Args: draw: starts to draw the present cluster. history: None without Prometheus.
    """

    def __init__(self, draw: Callable[[], Iterator[Picture | None]], history: History | None = None) -> None:
        self._draw = draw
        self._history = history
        self._drawing: asyncio.Task[bytes] | None = None

    def pages(self) -> Mapping[str, Callable[[web.Request], Awaitable[Page]]]:
        """Return the pages by path."""
        pages: dict[str, Callable[[web.Request], Awaitable[Page]]] = {"/cluster.json": self._cluster}
        if self._history is not None:
            pages["/history.json"] = partial(_past, history=self._history)
        for path, (name, content_type) in _ASSETS.items():
            body = files(__package__).joinpath("assets", name).read_bytes()
            pages[path] = partial(_asset, body=body, content_type=content_type)
        return pages

    async def _cluster(self, request: web.Request) -> Page:
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._encoded(), name="dashboard")
        return await _answer(request, await asyncio.shield(self._drawing), "application/json")

    async def _encoded(self) -> bytes:
        for picture in self._draw():
            if picture is not None:
                return msgspec.json.encode(picture)
            await asyncio.sleep(0)
        raise RuntimeError("drawing ended without a picture")


async def _past(request: web.Request, *, history: History) -> Page:
    try:
        past = await history.ask(request.query)
    except WireError as exc:
        return _refusal(HTTPStatus.BAD_REQUEST, exc)
    except HistoryError as exc:
        return _refusal(HTTPStatus.BAD_GATEWAY, exc)
    return await _answer(request, msgspec.json.encode(past), "application/json")


def _refusal(status: HTTPStatus, why: Exception) -> Page:
    return Page(status, "text/plain", f"{why}\n".encode(), _SECURITY)


async def _asset(request: web.Request, *, body: bytes, content_type: str) -> Page:
    return await _answer(request, body, content_type)


async def _answer(request: web.Request, body: bytes, content_type: str) -> Page:
    """Return a body as a page: compressed if the client accepts that, empty if the client has it already."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**_SECURITY, "ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("If-None-Match") == tag:
        return Page(HTTPStatus.NOT_MODIFIED, content_type, b"", headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        packed = await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL, mtime=0)
        return Page(HTTPStatus.OK, content_type, packed, {**headers, "Content-Encoding": "gzip"})
    return Page(HTTPStatus.OK, content_type, body, headers)
