# SPDX-License-Identifier: Apache-2.0
"""Requests to the API about claims, in threads of their own.

Kubelet waits for reads, so they do not wait behind the agent's other requests. The status of a claim is only information: it is written
when no claim is being prepared, or after ``PATIENCE_SECONDS``.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from agent.core.claims import AllocatedClaim, decode_claim
from agent.ports.dra import ResourceApi

READS_AT_ONCE: Final = 8
"""More do not make many reads faster: each costs this process CPU time."""
PATIENCE_SECONDS: Final = 5.0
"""How long claims that are being prepared can delay the status of others."""


class ClaimRequests:
    """Reads claims, and writes the status of their devices."""

    def __init__(self, api: ResourceApi) -> None:
        self._api = api
        self._reads = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="claim-reads")
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
        call = partial(self._api.read_claim, namespace, name)
        return decode_claim(await asyncio.get_running_loop().run_in_executor(self._reads, call))

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
        """End the threads. Requests that have not begun are dropped: the next agent writes a status with its next Prepare."""
        self._closed = True
        for threads in (self._reads, self._reports):
            threads.shutdown(wait=False, cancel_futures=True)
