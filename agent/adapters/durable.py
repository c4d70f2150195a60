# SPDX-License-Identifier: Apache-2.0
"""Writes files atomically: a reader sees the whole file or no file, even after a crash.

A container starts after a dozen of these calls. So they take paths as text too, and use ``os``: making a ``Path`` costs as much as a call.
"""

import itertools
import logging
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from agent.errors import StorageError

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".aliquot-tmp"
"""Suffix of files being written. The owner of a directory removes leftovers of a crash."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_counter = itertools.count()
_SYNCS_AT_ONCE = 8
"""Syncs of one batch. A disk flushes once for those that wait for it at the same time, so a busy one is several times faster."""
_syncs = ThreadPoolExecutor(_SYNCS_AT_ONCE - 1, thread_name_prefix="disk-sync")


def write_whole(path: Path | str, content: bytes, *, mode: int, durable: bool, size: int | None = None, over: bool = False) -> None:
    """Write a file under another name and rename it into place.

    Args:   durable: wait until the file is on disk; not needed for files that a reboot may delete.
            size: extend the file to this length, with a hole after the content.
            over: also over a directory that damage put in its place.
    Raises: StorageError.
    """
    replacement = _Replacement(path)
    try:
        replacement.write(content, mode, size)
        if durable:
            replacement.sync()
        if over:
            replacement.rename_over()
        else:
            replacement.rename()
    except OSError as exc:
        replacement.discard()
        raise _unwritten(path, exc) from exc
    except StorageError:
        replacement.discard()
        raise
    if durable:
        sync_directory(os.path.dirname(os.fspath(path)))


def write_together(contents: Mapping[Path, bytes], *, mode: int) -> Mapping[Path, StorageError]:
    """Write files durably, as ``write_over`` does, with one sync of each directory for all. That is much faster than one file at a time.

    Returns: the files that cannot be written, with the reasons. The others are on disk.
    """
    batch = _Batch(contents)
    # All files are written before the first is synced: the file system then writes them in one transaction.
    batch.each(lambda path, replacement: replacement.write(contents[path], mode))
    batch.sync()
    batch.each(lambda _, replacement: replacement.rename_over())
    batch.sync_directories()
    return batch.failed


def write_over(path: Path | str, content: bytes, *, mode: int, size: int | None = None) -> None:
    """Write a file as ``write_whole`` does, without a sync, also over a directory that damage put in its place. Raises StorageError."""
    write_whole(path, content, mode=mode, durable=False, size=size, over=True)


class _Replacement:
    """A file with a temporary name, which takes the place of the one with its name. Calls raise OSError."""

    def __init__(self, path: Path | str) -> None:
        self._path = os.fspath(path)
        directory, name = os.path.split(self._path)
        self._temporary = os.path.join(directory, f".{name}.{os.getpid()}.{next(_counter)}{TEMPORARY_SUFFIX}")
        self._descriptor = -1

    def write(self, content: bytes, mode: int, size: int | None = None) -> None:
        """Write the file, which stays open."""
        self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        os.fchmod(self._descriptor, mode)  # regardless of the umask
        _write_all(self._descriptor, content)
        if size is not None:
            os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Wait until the content is on disk."""
        os.fsync(self._descriptor)

    def rename(self) -> None:
        """Close the file and give it its name."""
        self._close()
        os.replace(self._temporary, self._path)

    def rename_over(self) -> None:
        """Act as ``rename``, also over a directory. Raises StorageError too: the directory cannot be removed."""
        try:
            self.rename()
        except IsADirectoryError:
            remove_anything(self._path)
            self.rename()

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # a file system that became read-only refuses this too, even without a file to remove
            self._close()
        with suppress(OSError):
            os.unlink(self._temporary)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Batch:
    """Files that are written together. A file that fails at one step takes no part in the later ones."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._left = {path: _Replacement(path) for path in paths}
        self.failed: dict[Path, StorageError] = {}

    def each(self, step: Callable[[Path, _Replacement], None]) -> None:
        """Do one step for each file that has not failed."""
        for path, replacement in list(self._left.items()):
            try:
                step(path, replacement)
            except (OSError, StorageError) as exc:
                replacement.discard()
                self._fail(path, exc if isinstance(exc, StorageError) else _unwritten(path, exc))

    def sync(self) -> None:
        """Wait until the content of the files is on disk; a part of them in this thread, and the others in threads of their own."""
        files = list(self._left.items())
        mine, *others = [files[number::_SYNCS_AT_ONCE] for number in range(min(len(files), _SYNCS_AT_ONCE))] or [[]]
        waiting = [_syncs.submit(_sync_each, part) for part in others]
        for failed in (_sync_each(mine), *(one.result() for one in waiting)):
            for path, error in failed.items():
                self._left[path].discard()
                self._fail(path, _unwritten(path, error))

    def sync_directories(self) -> None:
        """Make the names of the files that have not failed durable."""
        for directory in {path.parent for path in self._left}:
            try:
                sync_directory(directory)
            except StorageError as exc:
                for path in [path for path in self._left if path.parent == directory]:
                    self._fail(path, exc)

    def _fail(self, path: Path, cause: StorageError) -> None:
        del self._left[path]
        self.failed[path] = cause


def _sync_each(files: Iterable[tuple[Path, _Replacement]]) -> Mapping[Path, OSError]:
    """Sync files one after another; return those that failed."""
    failed = {}
    for path, replacement in files:
        try:
            replacement.sync()
        except OSError as exc:
            failed[path] = exc
    return failed


def _unwritten(path: Path | str, cause: OSError) -> StorageError:
    error = StorageError(f"writing {path}: {cause.strerror}")
    error.__cause__ = cause
    return error


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(directory: Path | str) -> None:
    """Make the names in a directory durable. Raises StorageError."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise StorageError(f"syncing {directory}: {exc.strerror}") from exc


def remove_file(path: Path | str) -> bool:
    """Remove a file; return whether it was there. Raises StorageError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise StorageError(f"removing {path}: {exc.strerror}") from exc
    return True


def remove_anything(path: Path | str) -> bool:
    """Remove a file, or a directory that is in its place; return whether it was there. Raises StorageError."""
    try:
        return remove_file(path)
    except StorageError as exc:
        if not isinstance(exc.__cause__, IsADirectoryError):
            raise
    remove_tree(path)
    if os.path.lexists(path):
        raise StorageError(f"removing {path}: not everything in this directory can be removed")
    return True


def remove_tree(directory: Path | str) -> None:
    """Remove a directory with the files that untrusted programs left in it. What cannot be removed stays.

    Any depth works: nested directories are first moved up, so that each is one step away. Links are not followed.
    """
    with suppress(OSError):
        top = os.open(directory, _DIRECTORY)
        try:
            waiting = deque(os.listdir(top))
            while waiting:
                waiting.extend(_remove_entry(top, waiting.popleft()))
        finally:
            os.close(top)
        os.rmdir(directory)


def _remove_entry(top: int, name: str) -> Iterator[str]:
    """Remove one entry of an open directory; yield the new names of nested directories that were moved up into it."""
    with suppress(OSError):
        try:
            os.unlink(name, dir_fd=top)
        except IsADirectoryError:
            inside = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                for child in os.listdir(inside):
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
    """Create a directory with this mode, and its parents. An existing directory with this mode may be on a read-only disk.

    Raises StorageError.
    """
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
    except OSError as exc:
        raise StorageError(f"creating {path}: {exc.strerror}") from exc
    return path


def remove_temporaries(directory: Path) -> None:
    """Remove partly written files that a crash left. Files that cannot be removed stay and do no harm.

    Raises StorageError when the directory cannot be read.
    """
    for path in list_directory(directory):
        if path.name.endswith(TEMPORARY_SUFFIX):
            try:
                remove_file(path)
            except StorageError as exc:
                logger.warning("a partly written file cannot be removed and stays: %s", exc)


def names_in(directory: Path | str) -> list[str]:
    """Return the sorted names in a directory; empty if the directory does not exist. Raises StorageError."""
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise StorageError(f"reading {directory}: {exc.strerror}") from exc


def list_directory(directory: Path) -> list[Path]:
    """Return the entries, sorted by name; empty if the directory does not exist. Raises StorageError."""
    return [directory / name for name in names_in(directory)]
