# SPDX-License-Identifier: Apache-2.0
"""Checks whether mounted directories of the host still exist on the host.

A mount keeps its original directory. If the host removes and recreates that directory, the mount does not show the new one. The old one no
longer has a name, which its link count shows.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path


class HostDirectories:
    """Implements ``ports.HostDirectories``."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Args: paths: missing directories are ignored, as are those on file systems without link counts."""
        self._paths = [path for path in paths if _links(path)]

    def removed(self) -> Sequence[Path]:
        """See ``ports.HostDirectories``."""
        return [path for path in self._paths if _links(path) == 0]


def _links(path: Path) -> int | None:
    """Return the link count of a directory; None if the path does not exist, such as a removed directory that is no mount."""
    try:
        return path.stat().st_nlink
    except OSError:
        return None
