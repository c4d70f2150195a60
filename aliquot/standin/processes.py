"""A ``/proc`` in which the processes of containers are in cgroups, as a node's kernel shows them.

The stand-in has no root, so it cannot make cgroups; who audits processes reads this directory instead of the real one. Kept true: each
process of a container's session has an entry, made within a moment of its start and removed within one of its end; what it says, but for
the cgroup, is the kernel's own word. Processes outside of all containers have none.
"""

import shutil
from contextlib import suppress
from pathlib import Path

KERNEL = Path("/proc")
LINKED = ("stat", "status", "maps")
_SESSION_FIELD = 6
_FIRST_AFTER_NAME = 3


class ProcessTable:
    """Follows the sessions of containers; ``refresh`` is called every so often."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._cgroups: dict[int, str] = {}
        """By the session: the pid of the container's first process."""
        self._known: set[int] = set()

    def add(self, leader_pid: int, pod_uid: str, container_id: str) -> None:
        """Take in a container by its first process; its entry is there at once."""
        pod_slice = f"kubepods-burstable-pod{pod_uid.replace('-', '_')}.slice"
        self._cgroups[leader_pid] = f"0::/kubepods.slice/kubepods-burstable.slice/{pod_slice}/cri-containerd-{container_id}.scope\n"
        self._known.discard(leader_pid)
        self.refresh()

    def remove(self, leader_pid: int) -> None:
        """Forget a container that has ended."""
        del self._cgroups[leader_pid]
        self.refresh()

    def refresh(self) -> None:
        """Bring the entries in line with the kernel's."""
        pids = {int(path.name) for path in KERNEL.iterdir() if path.name.isdigit()}
        for pid in pids - self._known:
            cgroup = self._cgroups.get(_session(pid))
            if cgroup is not None:
                self._enter(pid, cgroup)
        for path in self.directory.iterdir():
            if int(path.name) not in pids:
                shutil.rmtree(path)
        self._known = pids

    def _enter(self, pid: int, cgroup: str) -> None:
        entry = self.directory / str(pid)
        with suppress(FileNotFoundError):  # left by an earlier process of this pid
            shutil.rmtree(entry)
        entry.mkdir()
        (entry / "cgroup").write_text(cgroup)
        for name in LINKED:
            (entry / name).symlink_to(KERNEL / str(pid) / name)


def _session(pid: int) -> int:
    try:
        stat = (KERNEL / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[_SESSION_FIELD - _FIRST_AFTER_NAME])
