# SPDX-License-Identifier: Apache-2.0
"""How long a stream waits between its tries, in a time of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from aliquot.kube.errors import KubeApiError
from scheduler_plugin.adapters.kube_watch import RULES, Stream


class SlowApi:
    """An API server with answers that take a while, and a client that hears its stream."""

    def __init__(self, takes: float, *, refused: KubeApiError | None = None, open_for: float = 0.0) -> None:
        """Args: takes, open_for: seconds for each request, and that each watch stays open. refused: the answer to lists."""
        self.now = 0.0
        self.waits: list[float] = []
        self.troubles: list[str] = []
        self._takes = takes
        self._refused = refused
        self._open_for = open_for

    async def request(self, method: str, path: str, *, seconds: float) -> bytes:
        self.now += self._takes
        if self._refused is not None:
            raise self._refused
        return b'{"metadata":{"resourceVersion":"5"},"items":[]}'

    @asynccontextmanager
    async def stream(self, path: str, silence_seconds: float) -> AsyncIterator[AsyncIterator[bytes]]:
        self.now += self._takes
        yield self._silence()

    async def _silence(self) -> AsyncIterator[bytes]:
        self.now += self._open_for
        return
        yield b""

    def listing(self) -> None: ...

    def listed(self, items: list[object]) -> None: ...

    def opened(self) -> None: ...

    def trouble(self, sentence: str, *, is_missing: bool = False) -> None:
        assert not is_missing
        self.troubles.append(sentence)

    async def play(self, tries: int) -> list[float]:
        """Let the stream try so often; return how long it waited each time."""

        async def pause(seconds: float) -> None:
            self.waits.append(seconds)
            self.now += seconds
            if len(self.waits) == tries:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await Stream("pods", "/pods", lambda raw: raw, cast(Any, self), cast(Any, self), monotonic=lambda: self.now, pause=pause).run()
        return self.waits


@pytest.mark.parametrize("takes", [0.0, 1.5, 59.0])
async def test_backoff_grows_with_any_refusal_time_of_server(takes):
    api = SlowApi(takes, refused=KubeApiError("HTTP 503: overloaded"))
    waits = await api.play(9)
    assert all(wait >= 0.5 * want for wait, want in zip(waits, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10), strict=True))
    assert max(waits) <= RULES.last_backoff_seconds
    assert api.troubles == ["pods: HTTP 503: overloaded"] * 9


async def test_waits_grow_where_watches_break_off_soon():
    assert (await SlowApi(1.5, open_for=1.0).play(7))[-1] >= 3.2


async def test_a_watch_that_ends_after_a_while_is_opened_again_soon():
    assert max(await SlowApi(1.5, open_for=300.0).play(6)) <= RULES.first_backoff_seconds


async def test_server_with_retry_after_is_not_called_before_that():
    waits = await SlowApi(0.0, refused=KubeApiError("HTTP 429", 7.0)).play(3)
    assert all(7.0 < wait <= 7.4 for wait in waits)
