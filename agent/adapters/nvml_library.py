"""Which libnvidia-ml this process has loaded, and the change to another one when the driver package was upgraded underneath.

nvidia-ml-py loads the library once and never again. The loader would answer a second request by a name it has heard with the library it
already has, and a package may well put the new file where the old one was: so each load spells the path in a way of its own. The old
library stays mapped, unused. Which file it is, device and inode number tell, as they do to the loader.
"""

import ctypes
import os
import re
from pathlib import Path

import pynvml

from proto import contract

_MAPPED = re.compile(r"(/\S*/libnvidia-ml\.so\S*)(?: \(deleted\))?$", re.MULTILINE)
MAPS = Path("/proc/self/maps")


class NvmlLibrary:
    """The library, by the path under which it is found."""

    def __init__(self, path: str) -> None:
        """Args: path: empty for the loader's own choice."""
        self._path = path
        self._loaded: tuple[int, int] | None = None
        self._loads = 0
        """How many ways of spelling the path the loader has heard."""

    def load(self) -> None:
        """Load the library, or the one that has taken its place since. To be called outside of a session.

        Raises: OSError; NVMLError when the loader finds none.
        """
        if not self._path:
            pynvml._LoadNvmlLibrary()  # its search is the one that everybody's tools use
            found = _mapped()
            if found is None:  # loaded under a name we do not know: nothing to compare with later
                return
            self._path = str(found.parent / contract.NVML_SONAME)
            self._loaded, self._loads = _identity(found), 1
        at_path = _identity(Path(self._path))
        if self._loaded is None or (at_path is not None and at_path != self._loaded):
            pynvml.nvmlLib = ctypes.CDLL(_spelt(os.path.realpath(self._path), self._loads))
            self._loads += 1
            pynvml._nvmlGetFunctionPointer_cache.clear()  # else it goes on calling the old library
            self._loaded = at_path


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file a path names now; None when it names none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _spelt(path: str, number: int) -> str:
    """Return a path to the same file whose text is another for each number."""
    directory, _, name = path.rpartition("/")
    return f"{directory}/{'./' * number}{name}"


def _mapped() -> Path | None:
    """Return the file of the library that is mapped into this process."""
    match = _MAPPED.search(MAPS.read_text())
    return Path(match.group(1)) if match else None
