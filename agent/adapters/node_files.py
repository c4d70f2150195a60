"""The node's own files: the secret that names CDI devices, what the API last told, which boot this is, and the pages of containers."""

import os
import secrets
import stat
from pathlib import Path
from typing import Generic, TypeVar

from agent.adapters.durable import make_directory, write_whole
from agent.core.node_pages import MAGIC_BYTES, NodePage
from agent.core.rows import RowFormat
from agent.errors import StorageError

T = TypeVar("T")

SECRET_BYTES = 32
PAGE_MODE = 0o666
SPARE_BYTES = 2**20
"""A file system may take somewhat more for a file than is in it."""


def load_secret(path: Path) -> bytes:
    """Return the node's secret, made at the first start.

    It must outlive reboots: kubelet replays its remembered Allocate answers, and with another secret their CDI names would mean nothing.

    Raises: StorageError; a damaged secret is not replaced, because only its owner can say that no container of it is left.
    """
    make_directory(path.parent, 0o700)
    if not path.exists():
        write_whole(path, secrets.token_bytes(SECRET_BYTES), mode=0o600, durable=True)
    try:
        secret = path.read_bytes()
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
    if len(secret) != SECRET_BYTES:
        raise StorageError(
            f"{path}: want {SECRET_BYTES} bytes, found {len(secret)}; drain the node, remove the file and start the agent again"
        )
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
            content = self._path.read_bytes()
        except FileNotFoundError:
            return self._at_first
        except OSError as exc:
            raise StorageError(f"reading {self._path}: {exc.strerror}") from exc
        return self._rows.decode(content)

    def save(self, value: T) -> None:
        """See ``ports.Store``."""
        write_whole(self._path, self._rows.encode(value), mode=0o600, durable=True)


class PageFile:
    """One page that containers share, in a directory that on the host nobody else enters. Implements ``ports.SharedPage``.

    Where it is mounted containers of every user must be able to open it; those who may write it may also cut it off, let it grow, or take
    its mode away. It is mended in place: containers that run have this very file.
    """

    def __init__(self, directory: Path, page: NodePage) -> None:
        self.path = directory / "page"
        self._page = page

    def make(self) -> Path:
        """Make the page unless it is there, whole or not, and return its path. Raises StorageError."""
        make_directory(self.path.parent, 0o700)
        if not self.path.exists():
            self._replace()
        return self.path

    def mend(self) -> bool:
        """See ``ports.SharedPage``."""
        try:
            return self._mend_in_place()
        except (FileNotFoundError, PermissionError):  # the latter: given to another user, by a container that may do that
            self._replace()
            return True
        except OSError as exc:
            raise StorageError(f"mending {self.path}: {exc.strerror}") from exc

    def _replace(self) -> None:
        write_whole(self.path, self._page.empty(), mode=PAGE_MODE, durable=False)

    def _mend_in_place(self) -> bool:
        mended = stat.S_IMODE(self.path.lstat().st_mode) != PAGE_MODE
        if mended:
            self.path.chmod(PAGE_MODE)
        # not to wait for somebody who holds a lease on the file
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            return self._mend_content(descriptor) or mended
        finally:
            os.close(descriptor)

    def _mend_content(self, descriptor: int) -> bool:
        found = os.fstat(descriptor)
        bloated = found.st_blocks * 512 > self._page.size_bytes + SPARE_BYTES  # room can be taken beyond the end, too
        if self._page.accepts(found.st_size, os.pread(descriptor, MAGIC_BYTES, 0)) and not bloated:
            return False
        empty = self._page.empty()
        if found.st_size > len(empty) or bloated:
            os.ftruncate(descriptor, len(empty))
        if found.st_size < len(empty):
            os.pwrite(descriptor, empty[found.st_size :], found.st_size)  # no hole: a write to one fails where the disk is full
        os.pwrite(descriptor, empty[:MAGIC_BYTES], 0)  # last: with it, the page is whole
        return True


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return the kernel's id of this boot. Raises StorageError."""
    try:
        return path.read_text().strip()
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
