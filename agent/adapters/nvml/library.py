# SPDX-License-Identifier: Apache-2.0
"""Loads libnvidia-ml, and loads the new one after an upgrade of the driver package.

nvidia-ml-py loads the library only once. For a path that it already knows, the loader returns the library that it has loaded before, and a
package may put the new file at the same path. So each load spells the path in a different way. The old library stays mapped, unused. Device
and inode number identify the file, as they do for the loader.
"""

import ctypes
import os
import re
from pathlib import Path

import pynvml

from aliquot import contract

_MAPPED = re.compile(r"(/\S*/libnvidia-ml\.so\S*)(?: \(deleted\))?$", re.MULTILINE)
MAPS = Path("/proc/self/maps")


class NvmlLibrary:
    """The library at a path."""

    def __init__(self, path: str) -> None:
        """Args: path: empty for the loader's own choice."""
        self._path = path
        self._loaded: tuple[int, int] | None = None
        self._loads = 0
        """The number of spellings of the path that the loader knows."""

    def load(self) -> None:
        """Load the library, or the one that has replaced it. Call it outside of a session.

        Raises: OSError; NVMLError if the loader finds no library.
        """
        if not self._path:
            pynvml._LoadNvmlLibrary()  # searches like the usual tools
            found = _mapped()
            if found is None:  # loaded under an unknown name, so a later load has no file to compare with
                return
            self._path = str(found.parent / contract.NVML_SONAME)
            self._loaded, self._loads = _identity(found), 1
        at_path = _identity(Path(self._path))
        if self._loaded is None or (at_path is not None and at_path != self._loaded):
            pynvml.nvmlLib = ctypes.CDLL(_spelt(os.path.realpath(self._path), self._loads))
            self._loads += 1
            pynvml._nvmlGetFunctionPointer_cache.clear()  # otherwise pynvml would still call the old library
            self._loaded = at_path


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode number of the file at a path; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _spelt(path: str, number: int) -> str:
    """Return a path to the same file, with a different spelling for each number."""
    directory, _, name = path.rpartition("/")
    return f"{directory}/{'./' * number}{name}"


def _mapped() -> Path | None:
    """Return the file of the library that is mapped into this process."""
    match = _MAPPED.search(MAPS.read_text())
    return Path(match.group(1)) if match else None
