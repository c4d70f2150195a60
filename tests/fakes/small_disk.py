"""A small disk over a directory, which a test fills up or turns read-only. Who may not mount skips the test."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.mounting import mounted


class SmallDisk:
    """A file system of its own in memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._filler = directory / "filler"

    def fill(self) -> None:
        """Leave no byte free."""
        room = os.statvfs(self.directory)
        with self._filler.open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize)

    def empty(self) -> None:
        """Take away what filled it."""
        self._filler.unlink()

    def set_read_only(self, read_only: bool) -> None:
        """Change what may be done with it, as the kernel does after an error of the device."""
        subprocess.run(["mount", "-o", f"remount,{'ro' if read_only else 'rw'}", self.directory], check=True)


@contextmanager
def small_disk(directory: Path, mib: int = 16) -> Iterator[SmallDisk]:
    """Put one over an empty directory. Skips the test where nothing can be mounted."""
    with mounted(directory, "-t", "tmpfs", "-o", f"size={mib}m,mode=0755", "aliquot-test"):
        yield SmallDisk(directory)
