# SPDX-License-Identifier: Apache-2.0
"""The node's own files: the secret for names of CDI devices, the last state from the API, the boot id, and the containers' shared pages."""

import os
import secrets
import stat
from pathlib import Path
from typing import Generic, TypeVar

from agent.adapters.durable import make_directory, write_over, write_whole
from agent.adapters.regular_files import FLAGS, decoded, read_regular, reason
from agent.core.node_pages import MAGIC_BYTES, NodePage
from agent.core.rows import RowFormat
from agent.errors import StorageError

T = TypeVar("T")

SECRET_BYTES = 32
PAGE_MODE = 0o666
SPARE_BYTES = 2**20
"""A file system may use slightly more space for a file than its content."""


def load_secret(path: Path) -> bytes:
    """Return the node's secret. It is created at the first start.

    It must survive reboots: kubelet repeats stored Allocate responses, and with another secret their CDI names would be invalid.

    Raises: StorageError. A damaged secret is not replaced: only the operator can make sure that no container depends on it.
    """
    make_directory(path.parent, 0o700)
    if not os.path.lexists(path):
        write_whole(path, secrets.token_bytes(SECRET_BYTES), mode=0o600, durable=True)
    secret = read_regular(path)
    if len(secret) != SECRET_BYTES:
        raise StorageError(f"{path}: want {SECRET_BYTES} bytes, found {len(secret)}; drain the node, remove the file and restart the agent")
    return secret


class RowFile(Generic[T]):
    """One value in a file. Implements ``ports.Store``."""

    def __init__(self, path: Path, rows: RowFormat[T], at_first: T) -> None:
        self._path = path
        self._rows = rows
        self._at_first = at_first

    def load(self) -> T:
        """See ``ports.Store``."""
        try:
            content = read_regular(self._path)
        except FileNotFoundError:
            return self._at_first
        return decoded(self._rows.decode, content, self._path)

    def save(self, value: T) -> None:
        """See ``ports.Store``."""
        write_whole(self._path, self._rows.encode(value), mode=0o600, durable=True)


class PageFile:
    """A page that containers share. On the host, only root can enter its directory. Implements ``ports.SharedPage``.

    Containers of every user must be able to open the mounted file. Containers that may write it may also truncate it, extend it or change
    its mode. The agent repairs it in place, because running containers have mapped this file.
    """

    def __init__(self, directory: Path, page: NodePage) -> None:
        self.path = directory / "page"
        self._page = page

    def make(self) -> Path:
        """Create the page unless it exists, damaged or not, and return its path. Raises StorageError."""
        make_directory(self.path.parent, 0o700)
        if not self._is_regular():
            self._replace()
        return self.path

    def repair(self) -> bool:
        """See ``ports.SharedPage``."""
        if not self._is_regular():
            self._replace()
            return True
        try:
            return self._mend_in_place()
        except (FileNotFoundError, PermissionError):  # PermissionError: a container with that right gave the file to another user
            self._replace()
            return True
        except OSError as exc:
            raise StorageError(f"repairing {self.path}: {reason(exc)}") from exc

    def _is_regular(self) -> bool:
        """Whether the page is a file, damaged or not: no program of a container can replace it by anything else."""
        try:
            return stat.S_ISREG(self.path.lstat().st_mode)
        except OSError:
            return False

    def _replace(self) -> None:
        write_over(self.path, self._page.empty(), mode=PAGE_MODE)

    def _mend_in_place(self) -> bool:
        mended = stat.S_IMODE(self.path.lstat().st_mode) != PAGE_MODE
        if mended:
            self.path.chmod(PAGE_MODE)
        descriptor = os.open(self.path, os.O_RDWR | FLAGS | os.O_NOFOLLOW)
        try:
            return self._mend_content(descriptor) or mended
        finally:
            os.close(descriptor)

    def _mend_content(self, descriptor: int) -> bool:
        found = os.fstat(descriptor)
        bloated = found.st_blocks * 512 > self._page.size_bytes + SPARE_BYTES  # blocks can be allocated beyond the file's end, too
        if self._page.accepts(found.st_size, os.pread(descriptor, MAGIC_BYTES, 0)) and not bloated:
            return False
        empty = self._page.empty()
        if found.st_size > len(empty) or bloated:
            os.ftruncate(descriptor, len(empty))
        if found.st_size < len(empty):
            os.pwrite(descriptor, empty[found.st_size :], found.st_size)  # no hole: a write into one fails on a full disk
        os.pwrite(descriptor, empty[:MAGIC_BYTES], 0)  # last, because the magic number marks the page as valid
        return True


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return the kernel's id of this boot. Raises StorageError."""
    try:
        return path.read_text().strip()
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
