# SPDX-License-Identifier: Apache-2.0
"""The records that the agent and ``aliquot-mps`` exchange about MPS daemons. Both can read them across upgrades of either program.

The supervisor is rarely upgraded, so either program may be the older one. A reader ignores unknown fields, and a new field has a default.
The version changes only if an older reader would misread a record. ``core.rows`` rejects everything else.

The agent requests a daemon per GPU and lists its clients. The supervisor reports the state of each daemon, and its own. A restarted daemon
has
a new generation: clients of an earlier one have permanently lost their connection.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.rows import RowFormat

_DEVICE_UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,64}")
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class DaemonRequest:
    """A request for a GPU's daemon."""

    device_uuid: str
    clients: Mapping[str, str] = field(default_factory=dict)
    """By grant id, the last generation that the container got or was notified of. Only the agent reads it, after its own restart."""
    lost: tuple[str, ...] = ()
    """Ids of the grants among the clients that started with an earlier daemon. Only for the agent, too."""


@dataclass(frozen=True, slots=True)
class DaemonState:
    """The state of a requested daemon."""

    device_uuid: str
    generation: str = ""
    """A name unique to this start of the daemon; empty while it does not run."""
    pid: int | None = None
    """The daemon's pid in the supervisor's pid namespace; None while it does not run, or if it was not found."""
    since: float = 0.0
    """Unix time in seconds of the latest change."""
    trouble: str = ""
    """Why the daemon does not run, if that lasts for more than a moment."""


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """The supervisor's own state."""

    pid: int
    """Its pid on the host, if it shares the host's pid namespace."""
    shared_memory: str
    """The host directory that all daemons have as /dev/shm."""
    trouble: str = ""
    """Why it cannot start daemons; empty if it can."""


DAEMON_REQUESTS = RowFormat("request for an MPS daemon", "wish", DaemonRequest, 1)
DAEMON_STATES = RowFormat("state of an MPS daemon", "state", DaemonState, 1)
SUPERVISOR_STATES = RowFormat("state of aliquot-mps", "state", SupervisorState, 1)


def file_of(device_uuid: str) -> str:
    """Return the name of a GPU's file."""
    return f"{device_uuid}{SUFFIX}"


def gpu_of_file(name: str) -> str | None:
    """Return the GPU of a file with this name; None if the name is not that of a GPU's file."""
    stem = name.removesuffix(SUFFIX)
    return stem if stem != name and _DEVICE_UUID.fullmatch(stem) else None
