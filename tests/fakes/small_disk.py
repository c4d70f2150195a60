# SPDX-License-Identifier: Apache-2.0
"""A small disk over a directory, which a test fills up or makes read-only. Without the right to mount, the test is skipped."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.mounting import mounted


class SmallDisk:
    """A file system in memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._filler = directory / "filler"

    def fill(self) -> None:
        """Use all free bytes."""
        room = os.statvfs(self.directory)
        with self._filler.open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize)

    def empty(self) -> None:
        """Remove the file that filled it."""
        self._filler.unlink()

    def set_read_only(self, read_only: bool) -> None:
        """Change the mount options, as the kernel does after a device error."""
        subprocess.run(["mount", "-o", f"remount,{'ro' if read_only else 'rw'}", self.directory], check=True)


@contextmanager
def small_disk(directory: Path, mib: int = 16) -> Iterator[SmallDisk]:
    """Mount a small disk over an empty directory. Skips the test without the right to mount."""
    with mounted(directory, "-t", "tmpfs", "-o", f"size={mib}m,mode=0755", "aliquot-test"):
        yield SmallDisk(directory)
