# SPDX-License-Identifier: Apache-2.0
"""Locks on the agent's directories, so that only one agent works with the files of a node.

The kernel holds each lock for an open directory, and drops it when the process ends in any way. The lock is on the directory itself and
not on a file in it, so it cannot be lost with a file. No container can open these directories. ``agent-holder`` in a directory says who
holds it; it is for people, and nothing depends on it.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agent.adapters.durable import write_whole
from agent.adapters.regular_files import read_regular
from agent.errors import StorageError

logger = logging.getLogger(__name__)

HOLDER_FILE = "agent-holder"
_HOLDER_BYTES_MAX = 1 << 10
_WITHOUT_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""What network file systems return, such as NFS below a diskless node. ``runtimeDir`` is in memory on every node."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryLocks:
    """Implements ``ports.DirectoryLocks``: the locks on several directories, taken in the given order and then held together."""

    def __init__(self, directories: Sequence[Path], noted: Sequence[Path], holder: str) -> None:
        """Args: noted: the directories that get a file with ``holder``, the text that another agent shows."""
        self._directories = directories
        self._noted = noted
        self._holder = holder
        self._held: dict[Path, int] = {}

    def take(self) -> str:
        """See ``ports.DirectoryLocks``."""
        for directory in self._directories:
            if directory not in self._held and not self._take(directory):
                return f"{self._holder_of(directory)} uses {directory}"
        for directory in self._noted:
            try:
                write_whole(directory / HOLDER_FILE, f"{self._holder}\n".encode(), mode=0o644, durable=False)
            except StorageError as exc:  # a full or read-only disk; the lock holds all the same
                logger.warning("other agents do not see the name of this one: %s", exc)
        return ""

    def close(self) -> None:
        """See ``ports.DirectoryLocks``."""
        while self._held:
            _, descriptor = self._held.popitem()
            os.close(descriptor)

    def _take(self, directory: Path) -> bool:
        try:
            descriptor = os.open(directory, _DIRECTORY)
        except OSError as exc:
            raise StorageError(f"opening {directory}: {exc.strerror}") from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as exc:
            if exc.errno not in _WITHOUT_LOCKS:
                os.close(descriptor)
                raise StorageError(f"locking {directory}: {exc.strerror}") from exc
            logger.warning("%s is on a file system without locks on directories (%s): the others decide", directory, exc.strerror)
        self._held[directory] = descriptor
        return True

    def _holder_of(self, directory: Path) -> str:
        with suppress(OSError, StorageError):
            if holder := read_regular(directory / HOLDER_FILE, _HOLDER_BYTES_MAX).decode(errors="replace").strip():
                return f"another agent ({holder})"
        return "another agent"
