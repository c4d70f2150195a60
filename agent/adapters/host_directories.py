"""Whether directories of the host that are mounted here are still the host's.

A mount keeps the directory it was made of: one that is removed on the host and made anew is another, which is not seen here. What is left
has no name any more, and its count of links tells.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path


class HostDirectories:
    """Implements ``ports.HostDirectories``."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Args: paths: those that are not there are left out, and those of file systems that count no links."""
        self._paths = [path for path in paths if _links(path)]

    def removed(self) -> Sequence[Path]:
        """See ``ports.HostDirectories``."""
        return [path for path in self._paths if _links(path) == 0]


def _links(path: Path) -> int | None:
    """Return how many names a directory has; None where the path leads nowhere, as to one that was removed and is no mount."""
    try:
        return path.stat().st_nlink
    except OSError:
        return None
