"""A directory of the host as a container has it mounted. Who may not mount skips the test."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.mounting import mounted as mount


class MountedDirectory:
    """What ``mounted`` shows is what ``host`` was when it was mounted."""

    def __init__(self, host: Path, mounted: Path) -> None:
        self._host = host
        self._mounted = mounted

    def replace(self) -> None:
        """Remove it on the host, and make it anew."""
        shutil.rmtree(self._host)
        self._host.mkdir()

    def mount_again(self) -> None:
        """Show what the host has now, as to a container that is started anew."""
        subprocess.run(["umount", "--lazy", self._mounted], check=True)
        subprocess.run(["mount", "--bind", self._host, self._mounted], check=True)


@contextmanager
def mounted_directory(host: Path, mounted: Path) -> Iterator[MountedDirectory]:
    """Make a directory and mount it over another, which is empty. Skips the test where nothing can be mounted."""
    host.mkdir()
    with mount(mounted, "--bind", host):
        yield MountedDirectory(host, mounted)
