# SPDX-License-Identifier: Apache-2.0
"""Installs the shim on the node: ``<stateDir>/shim/<sha256 of its content>/``.

The directory is named after its content. It gets its name only when it is complete, and is never changed afterwards. Containers get
copies (``container_files``). Those that an agent of an earlier version started have the directory itself mounted, so an old version is
removed when no container uses it, neither by its CDI spec nor by a link in its directory.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path

from agent.adapters.durable import TEMPORARY_SUFFIX, list_directory, make_directory, remove_anything, sync_directory, write_whole
from agent.adapters.regular_files import LIBRARY_BYTES_MAX, read_regular
from agent.core.cdi import PRELOAD_LIST, PRELOAD_LIST_ARTEFACT, SHIM_LIBRARIES
from agent.errors import ShimError, StorageError

_CURE = "build it with make, or set shimDir"
CONTAINERS = "containers"
"""Name in the store of the directory with the copies for containers, which ``container_files`` writes."""


class ShimStore:
    """Implements ``ports.ShimInstaller``: installs once per process. The next agent process installs files that change later."""

    def __init__(self, source: Path, store: Path) -> None:
        self._source = source
        self._store = store
        self._directory: Path | None = None

    def installed(self) -> Path:
        """See ``ports.ShimInstaller``."""
        if self._directory is None:
            self._directory = install_shim(self._source, self._store)
        return self._directory

    def sweep(self, mentioned: Callable[[Iterable[str]], Set[str]]) -> Sequence[str]:
        """See ``ports.ShimInstaller``."""
        current = self.installed()
        others = [str(path) for path in self._versions() if path != current]
        unused = [path for path in others if path not in mentioned(others)]
        for path in unused:
            try:
                remove_anything(Path(path))
            except StorageError as exc:
                raise ShimError(f"no container uses it: {exc}") from exc
        return unused

    def _versions(self) -> Sequence[Path]:
        return [path for path in list_directory(self._store) if path.name != CONTAINERS]


def install_shim(source: Path, store: Path) -> Path:
    """Install the artefacts of ``source`` unless that version is installed, and return its directory.

    Raises: ShimError with the missing or unwritable file.
    """
    files = {name: _read(source / name) for name in SHIM_LIBRARIES}
    files[PRELOAD_LIST_ARTEFACT] = PRELOAD_LIST
    target = store / _digest(files)
    try:
        make_directory(store, 0o755)
        if os.path.lexists(target):
            if _is_intact(target, files):
                return target
            _set_aside(target)
        _install(files, target)
    except (OSError, StorageError) as exc:
        raise ShimError(f"installing the shim in {target}: {exc}") from exc
    return target


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, LIBRARY_BYTES_MAX, follow=True)
    except FileNotFoundError as exc:
        raise ShimError(f"the shim's {path.name} cannot be read: {path}: {exc.strerror}; {_CURE}") from exc
    except StorageError as exc:
        raise ShimError(f"the shim's {path.name} cannot be read: {exc}; {_CURE}") from exc


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _is_intact(target: Path, files: dict[str, bytes]) -> bool:
    """Whether a directory has these files. A file that cannot be read without waiting counts as damaged: new ones take its place."""
    try:
        return all(read_regular(target / name, LIBRARY_BYTES_MAX) == content for name, content in files.items())
    except (FileNotFoundError, StorageError):
        return False


def _set_aside(target: Path) -> None:
    """Rename a damaged installation. Containers that mapped it keep their files."""
    number = 0
    while os.path.lexists(aside := target.with_name(f"{target.name}.damaged-{number}")):
        number += 1
    target.rename(aside)


def _install(files: dict[str, bytes], target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)
    make_directory(temporary, 0o755)
    for name, content in files.items():
        write_whole(temporary / name, content, mode=0o555 if name != PRELOAD_LIST_ARTEFACT else 0o444, durable=True)
    temporary.rename(target)
    sync_directory(target.parent)
