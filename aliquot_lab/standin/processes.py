# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``/proc`` with the processes of containers in cgroups, as on a real node.

Without root the stand-in cannot create cgroups, so the agent's audit reads this directory instead of the real one.

Invariant: each process of a container's session has an entry, created shortly after its start and removed shortly after its end. Apart from
the cgroup, the entry has the kernel's data. Processes outside of containers have no entry.
"""

import shutil
from contextlib import suppress
from pathlib import Path

KERNEL = Path("/proc")
LINKED = ("stat", "status", "maps")
_SESSION_FIELD = 6
_FIRST_AFTER_NAME = 3


class ProcessTable:
    """Follows the sessions of containers; the owner calls ``refresh`` periodically."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._cgroups: dict[int, str] = {}
        """By session: the pid of the container's first process."""
        self._known: set[int] = set()

    def add(self, leader_pid: int, pod_uid: str, container_id: str) -> None:
        """Add a container by its first process, with an entry immediately."""
        pod_slice = f"kubepods-burstable-pod{pod_uid.replace('-', '_')}.slice"
        self._cgroups[leader_pid] = f"0::/kubepods.slice/kubepods-burstable.slice/{pod_slice}/cri-containerd-{container_id}.scope\n"
        self._known.discard(leader_pid)
        self.refresh()

    def remove(self, leader_pid: int) -> None:
        """Forget a container that has ended."""
        del self._cgroups[leader_pid]
        self.refresh()

    def refresh(self) -> None:
        """Update the entries from the kernel's list of processes."""
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
        with suppress(FileNotFoundError):  # from an earlier process with this pid
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
