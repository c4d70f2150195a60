# SPDX-License-Identifier: Apache-2.0
"""Requests to the API about claims.

Kubelet waits for reads, so they do not wait behind the agent's other requests. The status of a claim is only information: it is written
in a thread when no claim is being prepared, or after ``PATIENCE_SECONDS``.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from agent.core.claims import AllocatedClaim, decode_claim
from agent.ports.dra import ResourceApi

PATIENCE_SECONDS: Final = 5.0
"""How long claims that are being prepared can delay the status of others."""


class ClaimRequests:
    """Reads claims, and writes the status of their devices."""

    def __init__(self, api: ResourceApi) -> None:
        self._api = api
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="claim-status")
        self._one_report = asyncio.Lock()
        self._closed = False
        self._busy = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Let work that kubelet waits for go first: the status of claims is written after it."""
        self._busy += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._quiet.set()

    async def read(self, namespace: str, name: str) -> AllocatedClaim:
        """Read a claim. Raises KubeApiError, ContractError."""
        return decode_claim(await self._api.read_claim(namespace, name))

    async def report(self, namespace: str, name: str, uid: str, devices: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Write this driver's part of a claim's status, one claim after another. Raises KubeApiError."""
        loop = asyncio.get_running_loop()
        patience_ends = loop.time() + PATIENCE_SECONDS
        async with self._one_report:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(patience_ends):
                    await self._quiet.wait()
            if not self._closed:
                await loop.run_in_executor(self._reports, partial(self._api.report_devices, namespace, name, uid, devices()))

    def close(self) -> None:
        """End the thread and the connections. Statuses that wait are dropped: the next agent writes one with its next Prepare."""
        self._closed = True
        self._api.close_reads()
        self._reports.shutdown(wait=False, cancel_futures=True)
