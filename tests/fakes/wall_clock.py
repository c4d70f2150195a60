# SPDX-License-Identifier: Apache-2.0
"""A wall clock for one process, which a test sets while the process runs; see ``wall_clock.c``."""

import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
SECONDS = struct.Struct("=q")


class WallClock:
    """The time of day of a process that runs with ``environment``."""

    def __init__(self, directory: Path) -> None:
        """Compile the library into ``directory``; the clock is correct until ``jump``."""
        self._library = directory / "wall_clock.so"
        self._offset = directory / "wall_clock_offset"
        self._offset.write_bytes(SECONDS.pack(0))
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment of the process."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_OFFSET": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the correct time; negative: behind."""
        with self._offset.open("r+b") as file:  # in place: the process has it mapped
            file.write(SECONDS.pack(seconds))
