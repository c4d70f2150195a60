# SPDX-License-Identifier: Apache-2.0
"""Programs that stop (SIGSTOP) while they hold a lock of their region; see ``stop_in_lock.c``."""

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
PATIENCE_SECONDS = 30.0


class StopInLock:
    """The library that stops them."""

    def __init__(self, directory: Path) -> None:
        """Compile the library into ``directory``."""
        self._library = directory / "stop_in_lock.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True)

    def environment(self, offset: int) -> Mapping[str, str]:
        """Return the environment of a process that stops once, when it holds the lock on this byte of the region."""
        return {"LD_PRELOAD": str(self._library), "STOP_AT_OFFSET": str(offset)}


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    """Return when the process is stopped.

    Raises: AssertionError: it ended, or was not stopped in time.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (state := Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        assert state != "Z", f"process {process.pid} ended and never took the lock"
        assert time.monotonic() < deadline, f"process {process.pid} is in state {state} and took no such lock"
        time.sleep(0.01)
