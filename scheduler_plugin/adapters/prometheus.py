# SPDX-License-Identifier: Apache-2.0
"""Range queries of Prometheus' HTTP API over aiohttp, with limits on time, size and concurrency."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec

from scheduler_plugin.errors import HistoryError

REQUEST_SECONDS: Final = 5.0
MAX_ANSWER_BYTES: Final = 1 << 20
AT_ONCE: Final = 4
"""Concurrent queries; further ones wait, so that many open pages do not load Prometheus."""


class _Series(msgspec.Struct):
    values: list[tuple[float, str]] = msgspec.field(default_factory=list)


class _Data(msgspec.Struct):
    result: list[_Series] = msgspec.field(default_factory=list)


class _Answer(msgspec.Struct):
    status: str
    data: _Data = msgspec.field(default_factory=_Data)
    error: str = ""


class Prometheus:
    """Implements ``dashboard.history.MetricStore`` for the server at a URL, used on one event loop. Connects at the first query."""

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/api/v1/query_range"
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def query_range(self, query: str, start: float, end: float, step_seconds: float) -> Sequence[tuple[float, float]]:
        """See ``MetricStore``."""
        form = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_seconds:g}"}
        async with self._slots:
            answer = await self._ask(form)
        if answer.status != "success":
            raise HistoryError(f"Prometheus refused a query: {answer.error[:200]}")
        if len(answer.data.result) > 1:
            raise HistoryError(f"Prometheus returned {len(answer.data.result)} series, expected 1")
        points = answer.data.result[0].values if answer.data.result else []
        return [(at, float(value)) for at, value in points]

    async def _ask(self, form: dict[str, Any]) -> _Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Accept": "application/json"})
        try:
            limits = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
            async with self._session.post(self._url, data=form, timeout=limits, allow_redirects=False) as response:
                body = await _bounded(response)
                status = response.status
        except TimeoutError as exc:
            raise HistoryError(f"Prometheus at {self._url}: no reply within {REQUEST_SECONDS:g} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise HistoryError(f"Prometheus at {self._url}: {exc}") from exc
        try:
            return msgspec.json.decode(body, type=_Answer, strict=False)
        except msgspec.MsgspecError as exc:
            raise HistoryError(f"Prometheus at {self._url} returned status {status} with an invalid body: {exc}") from exc


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise HistoryError(f"Prometheus returned more than {MAX_ANSWER_BYTES >> 10} KiB")
    return bytes(body)
