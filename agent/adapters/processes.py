"""Who a process is, from /proc. A process that has gone meanwhile is left out."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from agent.core.overhead import HostProcess

_START_TICKS_FIELD = 22
_FIRST_AFTER_NAME = 3


class ProcProcesses:
    """Implements ``ports.Processes``."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def read(self, pids: Iterable[int]) -> Sequence[HostProcess]:
        """See ``ports.Processes``."""
        return [process for pid in sorted(set(pids)) if (process := self._read(pid)) is not None]

    def _read(self, pid: int) -> HostProcess | None:
        directory = self._proc / str(pid)
        try:
            stat = (directory / "stat").read_text(errors="replace")
            status = (directory / "status").read_text(errors="replace")
            cgroup = (directory / "cgroup").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        return HostProcess(pid, _namespace_pids(status) or (pid,), _start_ticks(stat), cgroup)


def _namespace_pids(status: str) -> tuple[int, ...]:
    """Return the NSpid line; empty on kernels without pid namespaces."""
    line = next((line for line in status.splitlines() if line.startswith("NSpid:")), "")
    return tuple(int(word) for word in line.split()[1:])


def _start_ticks(stat: str) -> int:
    """Return field 22; the name in field 2 may hold spaces and parentheses, so fields are counted from its end."""
    return int(stat.rpartition(")")[2].split()[_START_TICKS_FIELD - _FIRST_AFTER_NAME])
