# SPDX-License-Identifier: Apache-2.0
"""Copies of the shim's libraries that no container has yet. A starting container gets one by a rename, a tenth of the time of a copy."""

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.adapters.durable import TEMPORARY_SUFFIX, remove_file, write_whole
from agent.errors import StorageError

MOST: Final = 110
"""Spare copies of one library: as many as the pods that kubelet allows on a node by default."""
COPY_MODE: Final = 0o555
LEAST_FREE_BYTES: Final = 1 << 30
"""With less on the disk, ledger rows and other programs need it more."""


class SpareCopies:
    """Spare copies in the directory of the containers' copies. Their names mark them as temporary: the next agent removes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._contents: dict[str, bytes] = {}
        """By library that a container has asked for, its content at that time."""
        self._paths: dict[str, list[Path]] = {}

    def take(self, library: str, content: bytes, path: str) -> bool:
        """Move a spare copy of a library to this path. Returns: False if there is none with this content, or the path is taken."""
        if self._contents.get(library) != content:
            self._discard(library)
            self._contents[library], self._paths[library] = content, []
        spares = self._paths[library]
        while spares:
            spare = spares.pop()
            try:
                spare.rename(path)
            except FileNotFoundError:  # another program removed it
                continue
            except OSError:  # the caller writes a copy, and reports what is wrong
                spares.append(spare)
                return False
            return True
        return False

    def add(self) -> bool:
        """Write one more copy of a library that has too few. Returns: False when none has, or the disk is nearly full.

        Raises: StorageError.
        """
        library = next((name for name, paths in self._paths.items() if len(paths) < MOST), None)
        if library is None or self._free_bytes() < LEAST_FREE_BYTES:
            return False
        path = self._directory / f".{library}.{os.getpid()}.{next(self._numbers)}.spare{TEMPORARY_SUFFIX}"
        write_whole(path, self._contents[library], mode=COPY_MODE, durable=False)
        self._paths[library].append(path)
        return True

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._directory).free
        except OSError as exc:
            raise StorageError(f"reading the free space of {self._directory}: {exc.strerror}") from exc

    def _discard(self, library: str) -> None:
        for spare in self._paths.pop(library, ()):
            with suppress(StorageError):  # it does no harm, and the next agent removes it
                remove_file(spare)
