# SPDX-License-Identifier: Apache-2.0
"""A cache of decoded files: a file is read again only after it changed.

The agent checks the files of every container in each period, and sends its token with each request; with this cache a look costs one stat.
"""

import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SETTLED_NS = 1_000_000_000
"""A file that changed less than this before it was read is not cached. The file system's clock is coarse, so a second change may get the
same time stamp."""

_Signature = tuple[int, int, int, int]


class FileCache(Generic[T]):
    """Reads files of one kind. Safe from any thread: at worst two threads read the same file at the same time."""

    def __init__(self, read: Callable[[str], T]) -> None:
        """Args: read: reads and decodes a file. Its exceptions reach the caller, and the cache keeps no entry then."""
        self._read = read
        self._entries: dict[str, tuple[_Signature, T]] = {}

    def read(self, path: str) -> T:
        """Return the decoded content of a file, from the cache if the file did not change. Raises OSError, or what ``read`` raises."""
        try:
            status = os.stat(path)  # noqa: PTH116 - making a Path costs as much as the look
        except OSError:
            self.forget(path)
            raise
        # st_ctime, because no program can set it back
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
        entry = self._entries.get(path)
        if entry is not None and entry[0] == signature:
            return entry[1]
        found = self._read(path)
        if time.time_ns() - status.st_ctime_ns > SETTLED_NS:
            self._entries[path] = signature, found
        return found

    def forget(self, path: str) -> None:
        """Drop the entry of a file that is removed."""
        self._entries.pop(path, None)
