# SPDX-License-Identifier: Apache-2.0
"""Identifies processes from /proc, and ends them. A process that has ended in the meantime is left out.

``proc`` is the host's, because the driver reports the host's pids: the agent shares the host's pid namespace, or has the host's /proc
mounted elsewhere. To end a process, the agent opens a pidfd first and then checks the start time again, so that the signal cannot reach a
process that reused the pid. It ends a process only if its own /proc shows the same start time: the kernel interprets a pid in the agent's
namespace.
"""

import errno
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.core.overhead import HostProcess
from agent.errors import ProcessError

_OWN_PROC = Path("/proc")
"""With the pids of the agent's own namespace."""
_STATE_FIELD, _FLAGS_FIELD, _THREADS_FIELD, _START_TICKS_FIELD = 3, 9, 20, 22
_FIRST_AFTER_NAME = 3
_EXITING = 0x4
"""PF_EXITING of linux/sched.h."""
_UNIFIED = "0::"
"""The beginning of the line for cgroup version 2."""


class ProcProcesses:
    """Implements ``ports.Processes``."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def read(self, pids: Iterable[int]) -> Sequence[HostProcess]:
        """See ``ports.Processes``."""
        return [process for pid in sorted(set(pids)) if (process := self._read(pid)) is not None]

    def cgroups(self) -> Collection[str]:
        """See ``ports.Processes``."""
        pids = [entry for entry in self._proc.iterdir() if entry.name.isdigit()]
        return {cgroup for directory in pids if (cgroup := _cgroup(directory)) is not None}

    def own_cgroup(self) -> str:
        """See ``ports.Processes``."""
        try:
            return (self._proc / "self" / "cgroup").read_text(errors="replace")
        except OSError:
            return ""

    def maps(self, pid: int, path: str) -> bool | None:
        """See ``ports.Processes``. Compares device and inode, because the file has another name in the container."""
        try:
            file = Path(path).stat()
            lines = (self._proc / str(pid) / "maps").read_text(errors="replace").splitlines()
        except PermissionError:
            return None
        except OSError:  # the process or the file no longer exists, so the process does not map it
            return False
        wanted = (f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino))
        return any(tuple(line.split()[3:5]) == wanted for line in lines)

    def kill(self, process: HostProcess) -> bool:
        """See ``ports.Processes``."""
        with _opened(process.pid) as descriptor:
            own_start_ticks = _own_start_ticks(process.pid)
            now = self._read(process.pid)
            if now is None or now.start_ticks != process.start_ticks:
                return False
            if descriptor is None or own_start_ticks != process.start_ticks:
                raise ProcessError(
                    f"process {process.pid} of the host cannot be ended: in the agent's pid namespace its pid is another process or "
                    "unused. auditPolicy: kill needs hostPID: true in the agent's pod"
                )
            return _end(process.pid, descriptor)

    def _read(self, pid: int) -> HostProcess | None:
        directory = self._proc / str(pid)
        try:
            stat = (directory / "stat").read_text(errors="replace")
            status = (directory / "status").read_text(errors="replace")
            cgroup = (directory / "cgroup").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        return HostProcess(pid, _namespace_pids(status) or (pid,), _start_ticks(stat), cgroup)


def _cgroup(directory: Path) -> str | None:
    """Return the cgroup of a process; empty if the process is exiting and has lost its cgroup, None if it no longer exists."""
    try:
        cgroup = (directory / "cgroup").read_text(errors="replace")
        if _may_be_hidden(cgroup) and _is_ending((directory / "stat").read_text(errors="replace")):
            return ""
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return cgroup


@contextmanager
def _opened(pid: int) -> Iterator[int | None]:
    """Open a pidfd of a process in the agent's pid namespace; None if this pid is unused there. Raises ProcessError."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    except OSError as exc:
        raise ProcessError(f"opening process {pid}: {exc.strerror}") from exc
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _end(pid: int, descriptor: int) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except OSError as exc:
        cure = "; the agent needs the capability KILL for auditPolicy: kill" if exc.errno == errno.EPERM else ""
        raise ProcessError(f"ending process {pid}: {exc.strerror}{cure}") from exc
    return True


def _own_start_ticks(pid: int) -> int | None:
    try:
        return _start_ticks((_OWN_PROC / str(pid) / "stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _namespace_pids(status: str) -> tuple[int, ...]:
    """Return the pids in the NSpid line; empty on kernels without pid namespaces."""
    line = next((line for line in status.splitlines() if line.startswith("NSpid:")), "")
    return tuple(int(word) for word in line.split()[1:])


def _may_be_hidden(cgroup: str) -> bool:
    """Whether this may be the cgroup of an exiting process: cgroup version 1 then shows the root in every hierarchy."""
    version_1 = [line for line in cgroup.splitlines() if not line.startswith(_UNIFIED)]
    return bool(version_1) and all(line.endswith(":/") for line in version_1)


def _is_ending(stat: str) -> bool:
    """Whether a process is exiting but has not ended. It may hang while the kernel closes its files."""
    if not int(_field(stat, _FLAGS_FIELD)) & _EXITING:
        return False
    return _field(stat, _STATE_FIELD) not in "ZX" or int(_field(stat, _THREADS_FIELD)) > 1


def _start_ticks(stat: str) -> int:
    return int(_field(stat, _START_TICKS_FIELD))


def _field(stat: str, number: int) -> str:
    """Return a field, counted from 1. The name in field 2 may contain spaces and parentheses, so the fields after it are split."""
    return stat.rpartition(")")[2].split()[number - _FIRST_AFTER_NAME]
