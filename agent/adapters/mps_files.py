# SPDX-License-Identifier: Apache-2.0
"""The directory by which the agent and ``aliquot-mps`` communicate: ``<runtimeDir>/mps-daemons``, accessible by root only.

    supervisor.lock      two bytes, locked by the live supervisor: the first from its start, the second once its state is valid
    supervisor.json      the supervisor's own state
    wanted/<GPU>.json    written by the agent: requests for daemons, one per GPU
    state/<GPU>.json     written by the supervisor: the state of each daemon

The kernel releases locks when a process dies, so a killed supervisor is noticed at once and the files that it left are ignored. A file that
cannot be read is refused with a message and stays where it is; it does not affect the GPU's daemon.
"""

import fcntl
import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from agent.adapters.durable import list_directory, make_directory, remove_file, remove_temporaries, write_whole
from agent.adapters.regular_files import FLAGS, read_regular
from agent.core.mps_records import (
    DAEMON_REQUESTS,
    DAEMON_STATES,
    SUPERVISOR_STATES,
    DaemonRequest,
    DaemonState,
    SupervisorState,
    file_of,
    gpu_of_file,
)
from agent.core.rows import RowFormat
from agent.errors import StorageError
from agent.ports.mps import WantedDaemons

logger = logging.getLogger(__name__)

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of 64-bit Linux, with its trailing padding."""
_BEGUN, _READY = 0, 1
_Row = TypeVar("_Row", DaemonRequest, DaemonState)
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


class MpsDaemonFiles:
    """Implements ``ports.MpsDaemons``: the agent's side. It creates the directory only with the first request."""

    def __init__(self, directory: Path) -> None:
        self._files = _Directory(directory)

    def supervisor(self) -> SupervisorState | None:
        """See ``ports.MpsDaemons``."""
        try:
            descriptor = os.open(self._files.lock, os.O_RDONLY | os.O_NOFOLLOW | FLAGS)
            try:
                question = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _READY, 1, 0)
                answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StorageError(f"reading the lock of {self._files.lock}: {exc.strerror}") from exc
        if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK:
            return None
        return _decoded(SUPERVISOR_STATES, self._files.supervisor)

    def load(self) -> Mapping[str, DaemonRequest]:
        """See ``ports.MpsDaemons``."""
        remove_temporaries(self._files.wanted)
        found = {}
        for path in list_directory(self._files.wanted):
            try:
                wish = _read(DAEMON_REQUESTS, path)
            except StorageError as exc:
                logger.warning("a record of MPS clients cannot be read: %s", exc)
                continue
            if wish is not None:
                found[wish.device_uuid] = wish
        return found

    def want(self, wish: DaemonRequest) -> None:
        """See ``ports.MpsDaemons``."""
        self._files.make()
        write_whole(self._files.wanted / file_of(wish.device_uuid), DAEMON_REQUESTS.encode(wish), mode=0o600, durable=False)

    def wanted(self) -> frozenset[str]:
        """See ``ports.MpsDaemons``."""
        return frozenset(uuid for path in list_directory(self._files.wanted) if (uuid := gpu_of_file(path.name)) is not None)

    def withdraw(self, device_uuid: str) -> None:
        """See ``ports.MpsDaemons``."""
        remove_file(self._files.wanted / file_of(device_uuid))

    def state(self, device_uuid: str) -> DaemonState | None:
        """See ``ports.MpsDaemons``."""
        return _read(DAEMON_STATES, self._files.state / file_of(device_uuid))


class MpsRequestFiles:
    """Implements ``ports.MpsRequests``: the supervisor's side."""

    def __init__(self, directory: Path) -> None:
        self._files = _Directory(directory)
        self._files.make()
        self._descriptor: int | None = None
        self._refused: frozenset[str] = frozenset()

    @property
    def wanted_directory(self) -> Path:
        """The directory of the agent's requests."""
        return self._files.wanted

    def take(self) -> bool:
        """See ``ports.MpsRequests``."""
        try:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | FLAGS
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
        """See ``ports.MpsRequests``."""
        if self._descriptor is None:
            raise StorageError(f"{self._files.lock} must be taken before it is opened")
        write_whole(self._files.supervisor, SUPERVISOR_STATES.encode(state), mode=0o600, durable=False)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _locking(_READY))
        except OSError as exc:
            raise StorageError(f"locking {self._files.lock}: {exc.strerror}") from exc

    def close(self) -> None:
        """See ``ports.MpsRequests``."""
        if self._descriptor is not None:
            os.close(self._descriptor)  # releases its locks, too
            self._descriptor = None

    def wanted(self) -> WantedDaemons:
        """See ``ports.MpsRequests``."""
        devices: set[str] = set()
        unclear: dict[str, str] = {}
        refused: set[str] = set()
        for path in list_directory(self._files.wanted):
            if path.name.startswith("."):  # being written
                continue
            try:
                if (wish := _read(DAEMON_REQUESTS, path)) is not None:
                    devices.add(wish.device_uuid)
            except StorageError as exc:
                refused.add(str(exc))
                if (device_uuid := gpu_of_file(path.name)) is not None:
                    unclear[device_uuid] = str(exc)
        for sentence in refused - self._refused:
            logger.warning("MPS: a file is ignored: %s", sentence)
        self._refused = frozenset(refused)
        return WantedDaemons(frozenset(devices), unclear)

    def report(self, state: DaemonState) -> None:
        """See ``ports.MpsRequests``."""
        write_whole(self._files.state / file_of(state.device_uuid), DAEMON_STATES.encode(state), mode=0o600, durable=False)

    def forget(self, device_uuid: str) -> None:
        """See ``ports.MpsRequests``."""
        remove_file(self._files.state / file_of(device_uuid))


def _locking(byte: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def _read(rows: RowFormat[_Row], path: Path) -> _Row | None:
    """Read the file of one GPU; None if it does not exist. Raises StorageError with the file's name."""
    row = _decoded(rows, path)
    if row is not None and row.device_uuid != gpu_of_file(path.name):
        raise StorageError(f"{path}: want the GPU in the file's name, found {row.device_uuid[:80]!r}; remove the file")
    return row


def _decoded(rows: RowFormat[_Any], path: Path) -> _Any | None:
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    except StorageError as exc:
        raise StorageError(f"{exc}; remove it") from exc
    try:
        return rows.decode(content)
    except StorageError as exc:
        raise StorageError(f"{path}: {exc}; remove it") from exc
