"""Which GPUs a new session of NVML would find, asked in a process of its own.

The session at hand may be worth more than any new one: entering a sick driver takes long, or fails, and a container whose access to the
device files was lost keeps only what it has open. So a new session is tried here before the one at hand is left.

python -m agent.adapters.nvml_probe LIBRARY
"""

import asyncio
import ctypes
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

import pynvml

from agent.errors import DriverError

PROBE_SECONDS = 60.0
"""How long a session may take to be entered and look at all GPUs: eight without persistence mode take a third of it."""


STOP_SECONDS = 5.0


class NvmlProbe:
    """Asks, one process at a time."""

    def __init__(self, library: str) -> None:
        """Args: library: empty for the loader's own choice."""
        self._library = library
        self._process: Process | None = None

    async def answering(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs that answer. Raises DriverError."""
        if self._process is not None and self._process.returncode is None:
            raise DriverError(
                f"process {self._process.pid}, which was killed while it tried the driver, is still there: the driver holds it"
            )
        command = (sys.executable, "-m", "agent.adapters.nvml_probe", self._library)
        try:
            self._process = process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        except OSError as exc:
            raise DriverError(f"the driver cannot be tried in a process of its own: {exc.strerror}") from exc
        try:
            printed, said = await asyncio.wait_for(process.communicate(), PROBE_SECONDS)
        except TimeoutError as exc:
            raise DriverError(f"a new session of the driver has not answered for {PROBE_SECONDS:g} s") from exc
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise DriverError(f"a new session of the driver fails: {said.decode(errors='replace').strip().rpartition(chr(10))[2]}")
        return frozenset(printed.decode().split())

    async def stop(self) -> None:
        """End a look that is under way, so that it has no GPU open any more. Raises DriverError."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.kill()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError as exc:
            raise DriverError(f"process {self._process.pid}, which tried the driver, has not ended for {STOP_SECONDS:g} s") from exc


def find(library: str) -> Sequence[str]:
    """Enter the driver; return the UUIDs of the GPUs that answer. Raises NVMLError, OSError."""
    if library:
        pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInitWithFlags(0)
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError:  # it does not answer, or has no memory of its own and is none of ours
            continue
    return found


if __name__ == "__main__":
    print("\n".join(find(sys.argv[1])))
