"""Installs the shim where containers can mount it: ``<stateDir>/shim/<sha256 of its content>/``.

Content-addressed, complete before it gets its name, and never written again: a running container keeps the version it mapped, and
an upgrade puts another beside it. A version goes when it is not the present one and no container uses it: by its CDI spec, or by a link
beside its files.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path

from agent.adapters.durable import TEMPORARY_SUFFIX, list_directory, make_directory, sync_directory, write_whole
from agent.core.cdi import DRIVER_LIBRARIES, PRELOAD_ARTEFACT, PRELOAD_LIST_ARTEFACT
from agent.errors import ShimError, StorageError
from proto import contract

ARTEFACTS = (*(library.front for library in DRIVER_LIBRARIES), PRELOAD_ARTEFACT)


class ShimStore:
    """Implements ``ports.ShimInstaller``: installs once per process; artefacts that change later belong to the next one."""

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
        others = [str(path) for path in list_directory(self._store) if path != current]
        unused = [path for path in others if path not in mentioned(others)]
        for path in unused:
            try:
                shutil.rmtree(path)
            except OSError as exc:
                raise ShimError(f"removing {path}, which no container uses: {exc.strerror}") from exc
        return unused


def install_shim(source: Path, store: Path) -> Path:
    """Install the artefacts of ``source`` unless that version is there, and return its directory.

    Raises: ShimError naming what is missing or unwritable.
    """
    files = {name: _read(source / name) for name in ARTEFACTS}
    files[PRELOAD_LIST_ARTEFACT] = f"{contract.CONTAINER_PRELOAD}\n".encode()
    target = store / _digest(files)
    try:
        make_directory(store, 0o755)
        if target.is_dir():
            if _is_intact(target, files):
                return target
            _set_aside(target)
        _install(files, target)
    except (OSError, StorageError) as exc:
        raise ShimError(f"installing the shim in {target}: {exc}") from exc
    return target


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ShimError(f"the shim's {path.name} cannot be read: {path}: {exc.strerror}; build it with make, or set shimDir") from exc


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _is_intact(target: Path, files: dict[str, bytes]) -> bool:
    return all((target / name).is_file() and (target / name).read_bytes() == content for name, content in files.items())


def _set_aside(target: Path) -> None:
    """Move a damaged installation away; containers that mapped it keep their files."""
    number = 0
    while (aside := target.with_name(f"{target.name}.damaged-{number}")).exists():
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
