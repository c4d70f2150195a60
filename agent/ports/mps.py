# SPDX-License-Identifier: Apache-2.0
"""MPS daemons: what ``aliquot-mps`` does, and the files between it and the agent."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from agent.core.mps_records import DaemonRequest, DaemonState, SupervisorState


class MpsControl(Protocol):
    """MPS control daemons, one per GPU. Calls block, so they are made in a thread. They raise MpsError or StorageError."""

    def start(self, device_uuid: str) -> int | None:
        """Start the daemon of a GPU, unless it runs. Return its pid; None when the process is not found."""
        ...

    def servers(self, device_uuid: str) -> Mapping[int, str] | None:
        """Return the state of each server of a daemon, by pid; None when no daemon replies."""
        ...

    def trim_logs(self, device_uuid: str) -> None:
        """Empty large logs of the daemon and its servers; every query adds to them."""
        ...

    def shut_down_server(self, device_uuid: str, pid: int) -> None:
        """End a server, and the connections of its clients."""
        ...

    def stop(self, device_uuid: str) -> None:
        """End the daemon and its servers in any state, and remove its directories."""
        ...

    def known(self) -> Sequence[str]:
        """Return the GPUs for which a daemon's directories exist."""
        ...

    def clear_shared_memory(self) -> None:
        """Empty the directory that all daemons and clients of the node have as /dev/shm. Call it only while no daemon runs."""
        ...


class MpsDaemons(Protocol):
    """The agent's side of the files between it and ``aliquot-mps``. Calls raise StorageError."""

    def supervisor(self) -> SupervisorState | None:
        """Return the state of the supervisor; None when no supervisor runs."""
        ...

    def load(self) -> Mapping[str, DaemonRequest]:
        """Return the requests that an earlier agent left, by GPU. Unreadable files are left out."""
        ...

    def want(self, wish: DaemonRequest) -> None:
        """Request the daemon of a GPU, for these clients."""
        ...

    def wanted(self) -> Set[str]:
        """Return the GPUs that have a request file, also where its content is invalid."""
        ...

    def withdraw(self, device_uuid: str) -> None:
        """Remove the request for the daemon of a GPU."""
        ...

    def state(self, device_uuid: str) -> DaemonState | None:
        """Return the state of a requested daemon; None before the supervisor has reported one. Valid only while a supervisor runs."""
        ...


@dataclass(frozen=True, slots=True)
class WantedDaemons:
    """The requests as the supervisor reads them."""

    devices: Set[str] = frozenset()
    """The GPUs that need a daemon."""
    unclear: Mapping[str, str] = field(default_factory=dict)
    """By GPU, why its request cannot be read. A running daemon is kept; no new daemon is started."""


class MpsRequests(Protocol):
    """The supervisor's side of the files between it and the agent. Calls raise StorageError."""

    def take(self) -> bool:
        """Become the supervisor of this node, and delete the reports of an earlier one; False while another supervisor runs."""
        ...

    def open(self, state: SupervisorState) -> None:
        """Report that this supervisor runs. Its later reports are valid from now on."""
        ...

    def close(self) -> None:
        """Report that this supervisor has ended."""
        ...

    def wanted(self) -> WantedDaemons:
        """Return what the agent requests. A refused file is logged once."""
        ...

    def report(self, state: DaemonState) -> None:
        """Report the state of a requested daemon."""
        ...

    def forget(self, device_uuid: str) -> None:
        """Remove the report about a GPU without a request."""
        ...
