"""Files that readers see whole or not at all, also after a crash."""

import itertools
import logging
import os
import secrets
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from agent.errors import StorageError

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".aliquot-tmp"
"""Ends the names of files being written; leftovers of a crash are removed by whoever keeps the directory."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_counter = itertools.count()


def write_whole(path: Path, content: bytes, *, mode: int, durable: bool, size: int | None = None) -> None:
    """Write a file under another name and rename it into place.

    Args:   durable: wait until it is on the disk; not for files that a reboot may forget.
            size: make the file this long, with a hole after the content.
    Raises: StorageError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}{TEMPORARY_SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.fchmod(descriptor, mode)  # whatever the umask
            _write_all(descriptor, content)
            if size is not None:
                os.ftruncate(descriptor, size)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as exc:
        with suppress(OSError):  # a file system that turned read-only refuses this too, also where there is nothing to remove
            temporary.unlink(missing_ok=True)
        raise StorageError(f"writing {path}: {exc.strerror}") from exc


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises StorageError."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise StorageError(f"syncing {directory}: {exc.strerror}") from exc


def remove_file(path: Path) -> None:
    """Remove a file if it is there. Raises StorageError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise StorageError(f"removing {path}: {exc.strerror}") from exc


def remove_tree(directory: Path) -> None:
    """Remove a directory with what programs nobody trusts have left in it; what cannot be removed stays.

    However deep it is: directories inside directories are first moved up, where each is one step away. Links are not followed.
    """
    with suppress(OSError):
        top = os.open(directory, _DIRECTORY)
        try:
            waiting = deque(os.listdir(top))  # noqa: PTH208 - a descriptor is no path
            while waiting:
                waiting.extend(_remove_entry(top, waiting.popleft()))
        finally:
            os.close(top)
        directory.rmdir()


def _remove_entry(top: int, name: str) -> Iterator[str]:
    """Remove one entry of an open directory; return the names under which directories from inside it are there now."""
    with suppress(OSError):
        try:
            os.unlink(name, dir_fd=top)
        except IsADirectoryError:
            inside = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                for child in os.listdir(inside):  # noqa: PTH208 - likewise
                    yield from _move_up(inside, child, top)
            finally:
                os.close(inside)
            os.rmdir(name, dir_fd=top)


def _move_up(inside: int, name: str, top: int) -> Iterator[str]:
    with suppress(OSError):
        try:
            os.unlink(name, dir_fd=inside)
        except IsADirectoryError:
            moved = f"{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
            os.rename(name, moved, src_dir_fd=inside, dst_dir_fd=top)
            yield moved


def make_directory(path: Path, mode: int) -> Path:
    """Make a directory with this mode, and its parents; one that is as it should be may be of a disk that is read-only.

    Raises StorageError.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
    except OSError as exc:
        raise StorageError(f"making {path}: {exc.strerror}") from exc
    return path


def remove_temporaries(directory: Path) -> None:
    """Remove what a crash left of files being written; what the disk does not let go of stays, and harms nobody.

    Raises StorageError when the directory cannot be read.
    """
    for path in list_directory(directory):
        if path.name.endswith(TEMPORARY_SUFFIX):
            try:
                remove_file(path)
            except StorageError as exc:
                logger.warning("a file that was half written stays: %s", exc)


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, in order; none when it is not there. Raises StorageError."""
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208 - names are wanted, not paths
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise StorageError(f"reading {directory}: {exc.strerror}") from exc


def list_directory(directory: Path) -> list[Path]:
    """Return the entries in name order; empty when the directory is not there. Raises StorageError."""
    return [directory / name for name in names_in(directory)]
