"""The directory by which the agent and ``aliquot-mps`` speak to each other: ``<runtimeDir>/mps-daemons``, root's and nobody else's.

    supervisor.lock      two bytes, locked by the supervisor that lives: the first since it began, the second since its word counts
    supervisor.json      what it says of itself
    wanted/<GPU>.json    the agent's: of which GPUs daemons are wanted
    state/<GPU>.json     the supervisor's: what became of each

Locks are the kernel's, so a supervisor that was killed is gone at once, and files that it left count for nothing. A file that cannot be
read is refused with a sentence and stays where it is; it changes nothing about the daemon it may be of.
"""

import fcntl
import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from agent.adapters.durable import list_directory, make_directory, remove_file, remove_temporaries, write_whole
from agent.core.mps_records import (
    DAEMON_STATES,
    SUPERVISOR_STATES,
    WISHES,
    DaemonState,
    SupervisorState,
    Wish,
    file_of,
    gpu_of_file,
)
from agent.core.rows import RowFormat
from agent.errors import StorageError
from agent.ports import Wanted

logger = logging.getLogger(__name__)

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of 64-bit Linux, with its trailing padding."""
_BEGUN, _READY = 0, 1
_MOST_BYTES = 1 << 20
"""Of one file: a thousand clients of one GPU need a tenth of it."""
_Row = TypeVar("_Row", Wish, DaemonState)
_Any = TypeVar("_Any")


class _Directory:
    """The places of the files."""

    def __init__(self, directory: Path) -> None:
        self._all = (directory, directory / "wanted", directory / "state")
        _, self.wanted, self.state = self._all
        self.lock = directory / "supervisor.lock"
        self.supervisor = directory / "supervisor.json"

    def make(self) -> None:
        """Make the directories. Raises StorageError."""
        for directory in self._all:
            make_directory(directory, 0o700)


class MpsWishFiles:
    """Implements ``ports.MpsDaemons``: the agent's side. Where nothing is wanted, and no supervisor lives, it makes no directory."""

    def __init__(self, directory: Path) -> None:
        self._files = _Directory(directory)

    def supervisor(self) -> SupervisorState | None:
        """See ``ports.MpsDaemons``."""
        try:
            descriptor = os.open(self._files.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                question = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _READY, 1, 0)
                answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StorageError(f"looking at {self._files.lock}: {exc.strerror}") from exc
        if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK:
            return None
        return _decoded(SUPERVISOR_STATES, self._files.supervisor)

    def load(self) -> Mapping[str, Wish]:
        """See ``ports.MpsDaemons``."""
        remove_temporaries(self._files.wanted)
        found = {}
        for path in list_directory(self._files.wanted):
            try:
                wish = _read(WISHES, path)
            except StorageError as exc:
                logger.warning("MPS clients are not remembered: %s", exc)
                continue
            if wish is not None:
                found[wish.device_uuid] = wish
        return found

    def want(self, wish: Wish) -> None:
        """See ``ports.MpsDaemons``."""
        self._files.make()
        write_whole(self._files.wanted / file_of(wish.device_uuid), WISHES.encode(wish), mode=0o600, durable=False)

    def wanted(self) -> frozenset[str]:
        """See ``ports.MpsDaemons``."""
        return frozenset(uuid for path in list_directory(self._files.wanted) if (uuid := gpu_of_file(path.name)) is not None)

    def withdraw(self, device_uuid: str) -> None:
        """See ``ports.MpsDaemons``."""
        remove_file(self._files.wanted / file_of(device_uuid))

    def state(self, device_uuid: str) -> DaemonState | None:
        """See ``ports.MpsDaemons``."""
        return _read(DAEMON_STATES, self._files.state / file_of(device_uuid))


class MpsDeskFiles:
    """Implements ``ports.MpsDesk``: the supervisor's side."""

    def __init__(self, directory: Path) -> None:
        self._files = _Directory(directory)
        self._files.make()
        self._descriptor: int | None = None
        self._refused: frozenset[str] = frozenset()

    @property
    def wanted_directory(self) -> Path:
        """Where the wishes come and go."""
        return self._files.wanted

    def take(self) -> bool:
        """See ``ports.MpsDesk``."""
        try:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._files.lock, flags, 0o600)
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _locking(_BEGUN))
        except BlockingIOError:
            return False
        except OSError as exc:
            raise StorageError(f"locking {self._files.lock}: {exc.strerror}") from exc
        for directory in (self._files.wanted.parent, self._files.state):
            remove_temporaries(directory)
        for path in list_directory(self._files.state):
            if gpu_of_file(path.name) is not None:
                remove_file(path)
        return True

    def open(self, state: SupervisorState) -> None:
        """See ``ports.MpsDesk``."""
        if self._descriptor is None:
            raise StorageError(f"{self._files.lock} has to be taken before it is opened")
        write_whole(self._files.supervisor, SUPERVISOR_STATES.encode(state), mode=0o600, durable=False)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _locking(_READY))
        except OSError as exc:
            raise StorageError(f"locking {self._files.lock}: {exc.strerror}") from exc

    def close(self) -> None:
        """See ``ports.MpsDesk``."""
        if self._descriptor is not None:
            os.close(self._descriptor)  # and its locks with it
            self._descriptor = None

    def wanted(self) -> Wanted:
        """See ``ports.MpsDesk``."""
        devices: set[str] = set()
        unclear: dict[str, str] = {}
        refused: set[str] = set()
        for path in list_directory(self._files.wanted):
            if path.name.startswith("."):  # being written
                continue
            try:
                if (wish := _read(WISHES, path)) is not None:
                    devices.add(wish.device_uuid)
            except StorageError as exc:
                refused.add(str(exc))
                if (device_uuid := gpu_of_file(path.name)) is not None:
                    unclear[device_uuid] = str(exc)
        for sentence in refused - self._refused:
            logger.warning("MPS: a file is refused: %s", sentence)
        self._refused = frozenset(refused)
        return Wanted(frozenset(devices), unclear)

    def tell(self, state: DaemonState) -> None:
        """See ``ports.MpsDesk``."""
        write_whole(self._files.state / file_of(state.device_uuid), DAEMON_STATES.encode(state), mode=0o600, durable=False)

    def forget(self, device_uuid: str) -> None:
        """See ``ports.MpsDesk``."""
        remove_file(self._files.state / file_of(device_uuid))


def _locking(byte: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def _read(rows: RowFormat[_Row], path: Path) -> _Row | None:
    """Read the file of one GPU; None when it is gone. Raises StorageError with a sentence that names the file."""
    row = _decoded(rows, path)
    if row is not None and row.device_uuid != gpu_of_file(path.name):
        raise StorageError(f"{path}: want a file of the GPU it is named after, found one of {row.device_uuid[:80]!r}; remove it")
    return row


def _decoded(rows: RowFormat[_Any], path: Path) -> _Any | None:
    try:
        content = _content(path)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}; remove it") from exc
    try:
        return rows.decode(content)
    except StorageError as exc:
        raise StorageError(f"{path}: {exc}; remove it") from exc


def _content(path: Path) -> bytes:
    """Return what a file has, as far as one may be long: a pipe is not waited for, and no link followed. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor is no path
        return file.read(_MOST_BYTES)
