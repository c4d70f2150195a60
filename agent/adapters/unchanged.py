"""What was read from a file, kept until the file changes: a look at the files of every container each period costs a stat of each."""

import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SETTLED_NS = 1_000_000_000
"""What changed later than this before it was read may change again at the same time by the file system's clock, and is read again."""

_Signature = tuple[int, int, int, int]


class Unchanged(Generic[T]):
    """Reads files of one kind. For any thread: the worst that two at once do is to read twice."""

    def __init__(self, read: Callable[[str], T]) -> None:
        """Args: read: reads and decodes a file; what it raises is passed on, and nothing is kept."""
        self._read = read
        self._kept: dict[str, tuple[_Signature, T]] = {}

    def of(self, path: str) -> T:
        """Return what is in a file. Raises OSError, or what ``read`` raises."""
        try:
            status = os.stat(path)  # noqa: PTH116 - making a Path costs as much as the look
        except OSError:
            self.forget(path)
            raise
        # the time of the inode's change, because nobody can set it back
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
        kept = self._kept.get(path)
        if kept is not None and kept[0] == signature:
            return kept[1]
        found = self._read(path)
        if time.time_ns() - status.st_ctime_ns > SETTLED_NS:
            self._kept[path] = signature, found
        return found

    def forget(self, path: str) -> None:
        """Keep nothing of a file that is removed."""
        self._kept.pop(path, None)
