# SPDX-License-Identifier: Apache-2.0
"""A directory of the host, mounted as in a container. Without the right to mount, the test is skipped."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.mounting import mounted as mount


class MountedDirectory:
    """``mounted`` shows the directory that ``host`` was at the time of the mount."""

    def __init__(self, host: Path, mounted: Path) -> None:
        self._host = host
        self._mounted = mounted

    def replace(self) -> None:
        """Remove the directory on the host, and create it again."""
        shutil.rmtree(self._host)
        self._host.mkdir()

    def mount_again(self) -> None:
        """Mount the host's current directory, as for a new container."""
        subprocess.run(["umount", "--lazy", self._mounted], check=True)
        subprocess.run(["mount", "--bind", self._host, self._mounted], check=True)


@contextmanager
def mounted_directory(host: Path, mounted: Path) -> Iterator[MountedDirectory]:
    """Create a directory and mount it over another, empty one. Skips the test without the right to mount."""
    host.mkdir()
    with mount(mounted, "--bind", host):
        yield MountedDirectory(host, mounted)
