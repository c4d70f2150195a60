# SPDX-License-Identifier: Apache-2.0
"""Keeps files open that containers share, so that no container can hold a lease on them.

A process that may open a file and has its owner's uid, as root in a container has, may hold a lease on it (F_SETLEASE). Every open that
conflicts with the lease waits, up to 45 seconds each time. Two rules of the kernel exclude that. A write lease needs a file that no other
process has open, and a read lease one that no process has open for writing. So a file that is open for writing here can have no lease, and
one that is open for reading can have only a read lease, which delays no reader.

A lease that is there already, because no agent ran for a moment, is ended: an open that waits keeps the owner from a new lease, and the
kernel ends the old one after /proc/sys/fs/lease-break-time. Such an open has a thread of its own.
Source: generic_add_lease and do_dentry_open, Linux fs/locks.c and fs/open.c
"""

import errno
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class HeldFiles:
    """Implements ``ports.HeldFiles``. One thread calls ``hold``; the threads that wait for leases add what they have opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Path, tuple[int, int]] = {}
        """By path: descriptor and inode."""
        self._waiting: set[Path] = set()

    def hold(self, files: Mapping[Path, bool]) -> None:
        """See ``ports.HeldFiles``."""
        with self._lock:
            held = dict(self._held)
        for path in [path for path, (_, inode) in held.items() if path not in files or _inode(path) != inode]:
            self._drop(path)
        for path, writable in files.items():
            with self._lock:
                known = path in self._held or path in self._waiting
            if not known:
                self._open(path, os.O_RDWR if writable else os.O_RDONLY)

    def close(self) -> None:
        """Close all files. A thread that still waits for a lease ends with the process."""
        for path in tuple(self._held):
            self._drop(path)

    def _open(self, path: Path, access: int) -> None:
        try:
            self._keep(path, os.open(path, access | _FLAGS | os.O_NONBLOCK))
        except OSError as exc:
            if exc.errno != errno.EWOULDBLOCK:  # missing or damaged: those who use it say so
                logger.debug("not held open: %s: %s", path, exc.strerror)
                return
            logger.warning("a container holds a lease on %s and delays programs that open it: the kernel ends the lease now", path)
            with self._lock:
                self._waiting.add(path)
            threading.Thread(target=self._wait, args=(path, access), name="lease", daemon=True).start()

    def _wait(self, path: Path, access: int) -> None:
        with suppress(OSError):  # removed meanwhile; the next look decides
            self._keep(path, os.open(path, access | _FLAGS))
            logger.info("the lease has ended", extra={"path": str(path)})
        with self._lock:
            self._waiting.discard(path)

    def _keep(self, path: Path, descriptor: int) -> None:
        with self._lock:
            before, self._held[path] = self._held.get(path), (descriptor, os.fstat(descriptor).st_ino)
        if before is not None:
            os.close(before[0])

    def _drop(self, path: Path) -> None:
        with self._lock:
            found = self._held.pop(path, None)
        if found is not None:
            os.close(found[0])


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None
