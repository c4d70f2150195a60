# SPDX-License-Identifier: Apache-2.0
"""Finds the GPUs that a new NVML session would see, in a separate process.

The current session may be better than a new one: initialising a faulty driver takes long or fails, and a container that lost access to the
device files keeps only its open ones. So the agent tries a new session here before it ends the current one.

python -m agent.adapters.nvml.probe LIBRARY
"""

import asyncio
import ctypes
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

import pynvml

from agent.errors import DriverError

PROBE_SECONDS = 60.0
"""Limit for a session to start and read all GPUs: eight GPUs without persistence mode take a third of it."""
STOP_SECONDS = 5.0


class NvmlProbe:
    """Runs the probe, one process at a time."""

    def __init__(self, library: str) -> None:
        """Args: library: empty for the loader's own choice."""
        self._library = library
        self._process: Process | None = None

    async def answering(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs that answer. Raises DriverError."""
        if self._process is not None and self._process.returncode is None:
            raise DriverError(f"process {self._process.pid}, which tried the driver, was killed but has not ended: it hangs in the driver")
        command = (sys.executable, "-m", "agent.adapters.nvml.probe", self._library)
        try:
            self._process = process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        except OSError as exc:
            raise DriverError(f"cannot start a process that tries the driver: {exc.strerror}") from exc
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                printed, messages = await process.communicate()
        except TimeoutError as exc:
            raise DriverError(f"a new session of the driver did not answer within {PROBE_SECONDS:g} s") from exc
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise DriverError(f"a new session of the driver fails: {messages.decode(errors='replace').strip().rpartition(chr(10))[2]}")
        return frozenset(printed.decode().split())

    async def stop(self) -> None:
        """End a running probe, so that it has no GPU open. Raises DriverError."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.kill()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError as exc:
            raise DriverError(f"process {self._process.pid}, which tried the driver, did not end within {STOP_SECONDS:g} s") from exc


def find(library: str) -> Sequence[str]:
    """Start an NVML session; return the UUIDs of the GPUs that answer. Raises NVMLError, OSError."""
    if library:
        pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInitWithFlags(0)
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError:  # it does not answer, or is an unsupported GPU without its own memory
            continue
    return found


if __name__ == "__main__":
    print("\n".join(find(sys.argv[1])))
