# SPDX-License-Identifier: Apache-2.0
"""Reads files without waiting and without surprises: a pipe, a directory, a link, a huge file or a lease is an error with a sentence.

A damaged disk, a program of the host, or a container that can open the file may have put anything in its place. An open with O_NONBLOCK
does not wait for a writer of a pipe, nor for a program that holds a lease on the file.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent.errors import StorageError

T = TypeVar("T")

ROW_BYTES_MAX = 1 << 20
"""The largest file with a value of the agent. A ledger row has a few kilobytes."""
LIBRARY_BYTES_MAX = 64 << 20
FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_SENTENCES = {errno.ELOOP: "want a regular file, found a symbolic link", errno.EWOULDBLOCK: "a program holds a lease on it"}


def read_regular(path: Path | str, most_bytes: int = ROW_BYTES_MAX, *, follow: bool = False) -> bytes:
    """Return the content of a regular file.

    Args:   follow: whether the path may be a symbolic link.
    Raises: FileNotFoundError; StorageError for every other reason, with the path.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | FLAGS | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise StorageError(f"reading {path}: {reason(exc)}") from exc
    try:
        return _content(descriptor, path, most_bytes)
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
    finally:
        os.close(descriptor)


def decoded(decode: Callable[[bytes], T], content: bytes, path: Path) -> T:
    """Decode what was read from a file. Raises StorageError with the path."""
    try:
        return decode(content)
    except StorageError as exc:
        raise StorageError(f"{path}: {exc}") from exc


def reason(exc: OSError) -> str:
    """Return what an error of an open with O_NOFOLLOW and O_NONBLOCK means."""
    return _SENTENCES.get(exc.errno or 0, exc.strerror or str(exc))


def _content(descriptor: int, path: Path | str, most_bytes: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise StorageError(f"reading {path}: want a regular file, found {kind}")
    if found.st_size > most_bytes:
        raise StorageError(f"reading {path}: want at most {most_bytes} bytes, found {found.st_size}")
    parts: list[bytes] = []
    left = most_bytes + 1  # the file may have grown since
    while left > 0 and (part := os.read(descriptor, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise StorageError(f"reading {path}: want at most {most_bytes} bytes, found more")
    return b"".join(parts)
