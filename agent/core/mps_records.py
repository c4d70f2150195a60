"""What the agent and ``aliquot-mps`` tell each other about MPS daemons, as rows of files that both can read over an upgrade of either.

The supervisor is replaced seldom, so either may be the older one: a reader leaves out fields that it does not know, a new field has a
default, and another version is for what an older reader must not take for what it knows. Nothing else is taken: see ``core.rows``.

The agent says per GPU that a daemon is wanted, and for whom; the supervisor says per GPU what became of it, and once about itself. A daemon
that is started anew is another generation: clients of an earlier one have lost their connection for good.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.rows import RowFormat

_DEVICE_UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,64}")
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Wish:
    """A GPU of which a daemon is wanted."""

    device_uuid: str
    clients: Mapping[str, str] = field(default_factory=dict)
    """By grant id, the generation that a container was given last, or was told of. For the agent itself, after its own restart."""
    lost: tuple[str, ...] = ()
    """Ids of the grants among them whose containers started with an earlier daemon. Likewise."""


@dataclass(frozen=True, slots=True)
class DaemonState:
    """What has become of a wish."""

    device_uuid: str
    generation: str = ""
    """The name of this start of the daemon, which no other start has; empty while none runs."""
    pid: int | None = None
    """The daemon, in the supervisor's process ids; None while none runs, or where it was not found."""
    since: float = 0.0
    """Unix time in seconds of the latest change."""
    trouble: str = ""
    """Why none runs, where that is more than a matter of moments."""


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """What the supervisor says of itself."""

    pid: int
    """In the host's process ids, where it shares them."""
    shared_memory: str
    """The host directory that is /dev/shm to all daemons."""
    trouble: str = ""
    """Why it can start no daemon; empty where it can."""


WISHES = RowFormat("wish for an MPS daemon", "wish", Wish, 1)
DAEMON_STATES = RowFormat("state of an MPS daemon", "state", DaemonState, 1)
SUPERVISOR_STATES = RowFormat("state of aliquot-mps", "state", SupervisorState, 1)


def file_of(device_uuid: str) -> str:
    """Return the name of a GPU's file."""
    return f"{device_uuid}{SUFFIX}"


def gpu_of_file(name: str) -> str | None:
    """Return the GPU whose file has this name; None for a name that no such file has."""
    stem = name.removesuffix(SUFFIX)
    return stem if stem != name and _DEVICE_UUID.fullmatch(stem) else None
