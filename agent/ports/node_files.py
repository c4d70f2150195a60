# SPDX-License-Identifier: Apache-2.0
"""The node's other files and directories."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol, TypeVar

from agent.core.health import GpuHealth, HealthTable

T = TypeVar("T")


class HealthStore(Protocol):
    """The health of the GPUs, kept over restarts of the agent until the next boot. Calls raise StorageError."""

    def load(self) -> HealthTable:
        """Read it; an empty table when it was not saved in this boot."""
        ...

    def save(self, gpus: Mapping[str, GpuHealth]) -> None:
        """Replace it."""
        ...


class Store(Protocol[T]):
    """The last value that the API reported, kept over restarts and reboots. Calls raise StorageError."""

    def load(self) -> T:
        """Read it; the initial value when it was never saved."""
        ...

    def save(self, value: T) -> None:
        """Replace it, durably."""
        ...


class DirectoryLocks(Protocol):
    """Locks that only one agent of the node holds. The kernel drops them when the process ends, however it ends."""

    def take(self) -> str:
        """Take the locks that this process does not have; return who holds the first missing one, empty if none is missing.

        Does not wait. Raises StorageError.
        """
        ...

    def close(self) -> None:
        """Release the locks."""
        ...


class Succession(Protocol):
    """How a waiting agent takes over from the one that works."""

    def ask(self) -> None:
        """Ask the working agent for its place, until ``withdraw`` or the end of this process."""
        ...

    def withdraw(self) -> None:
        """End the request."""
        ...

    def is_asked_for(self) -> bool:
        """Whether another agent asks for the place of this one."""
        ...

    def retire(self) -> None:
        """Note that this agent's pod gives its place away."""
        ...

    @property
    def retired(self) -> bool:
        """Whether this agent's pod was the last to give its place away."""
        ...


class HeldFiles(Protocol):
    """Files that are kept open, so that no container can hold a lease on them."""

    def hold(self, files: Mapping[Path, bool]) -> None:
        """Keep exactly these files open; for writing where the value is True. Files that are missing or have a lease are kept later."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


class HostDirectories(Protocol):
    """Directories that the agent shares with the host."""

    def removed(self) -> Sequence[Path]:
        """Return the directories that were removed on the host while they are mounted here."""
        ...


class FileChanges(Protocol):
    """Changes in the directories that the reconciler compares. On the event loop."""

    def start(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` from now on when a file there appears, disappears or is replaced."""
        ...

    def forget(self) -> None:
        """Drop the changes until now."""
        ...

    def close(self) -> None:
        """Stop calling ``notify``."""
        ...


class SharedPage(Protocol):
    """A memory page that containers share, as a file of the node."""

    @property
    def path(self) -> Path:
        """Path of the file."""
        ...

    def repair(self) -> bool:
        """Restore its size and its header in place; return whether that was needed. Raises StorageError."""
        ...


class ShimInstaller(Protocol):
    """The shim's files on the host."""

    def installed(self) -> Path:
        """Install them unless they are installed, and return their directory. Raises ShimError."""
        ...

    def sweep(self, mentioned: Callable[[Iterable[str]], Set[str]]) -> Sequence[str]:
        """Remove other versions that no container uses, and return their directories. Raises ShimError, or what ``mentioned`` raises.

        Args: mentioned: returns which of these directories a container uses.
        """
        ...
