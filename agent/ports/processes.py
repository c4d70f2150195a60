# SPDX-License-Identifier: Apache-2.0
"""The host's processes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from agent.core.overhead import HostProcess


class ProcessEnds(Protocol):
    """Notices when processes end. On the event loop."""

    def watch(self, pid: int, notify: Callable[[], None]) -> Callable[[], None]:
        """Call ``notify`` once when a process ends, at once if it has ended already. Return a function that stops watching.

        Raises: ProcessError.
        """
        ...


class Processes(Protocol):
    """The host's processes."""

    def read(self, pids: Iterable[int]) -> Sequence[HostProcess]:
        """Return the facts of these processes. Processes that have ended are left out."""
        ...

    def cgroups(self) -> Collection[str]:
        """Return the cgroups of all processes, in the form of ``HostProcess.cgroup``; empty text for a process that is ending."""
        ...

    def own_cgroup(self) -> str:
        """Return the cgroup of this agent, in the form of ``HostProcess.cgroup``; empty when it cannot be read."""
        ...

    def maps(self, pid: int, path: str) -> bool | None:
        """Whether a process has mapped the file at this host path; None without the right to see that."""
        ...

    def kill(self, process: HostProcess) -> bool:
        """Kill exactly this process, not a later one with the same pid; False when it has ended. Raises ProcessError."""
        ...
